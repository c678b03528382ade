"""All of the hostile cases, resumable: `make hostile`.

    python tests/hostile/run.py [--cases 100000] [--kills 200] [--folder exps/hostile]

The state file in the folder says how far each reader and how many kills were done; what failed is appended to
`failures.jsonl`, with the case's number, by which it comes again.
"""

import argparse
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parents[1], HERE):
    sys.path.insert(0, str(folder))
from conftest import tiny_voice  # noqa: E402  found by the path above
from fuzz import CASES_PER_CHILD, failures  # noqa: E402
from kills import differences, finish, killed_run, make_corpus  # noqa: E402
from readers import READERS  # noqa: E402

from speakernet.files import atomic_write  # noqa: E402

SEED = 20260101
KILLS_PER_RUN = 5


def main() -> int:
    """Go on where the last start was stopped; status 1 when anything failed, in this start or before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="mutated files over all readers")
    parser.add_argument("--kills", type=int, default=200, help="kills over runs with 0 and with 2 workers")
    parser.add_argument("--folder", type=Path, default=Path("exps/hostile"), help="state, failures and runs")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    state_path, failed_path = asked.folder / "state.json", asked.folder / "failures.jsonl"
    state = json.loads(state_path.read_text()) if state_path.exists() else {"cases": {}, "kills": 0, "runs": 0}

    def keep() -> None:
        with atomic_write(state_path) as file:
            json.dump(state, file, indent=1)

    def note(problem: dict) -> None:
        with failed_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(problem) + "\n")

    each = -(-asked.cases // len(READERS))
    for name in READERS:
        while (first := state["cases"].get(name, 0)) < each:
            last = min(each, first + CASES_PER_CHILD)
            for problem in failures(name, first, last, SEED):
                note(problem)
            state["cases"][name] = last
            keep()
            print(f"{name}: {last} of {each} cases", flush=True)
    if state["kills"] < asked.kills:
        root = asked.folder.absolute() / "runs"
        make_corpus(root, tiny_voice)
        seconds = {workers: finish(root, root / f"undisturbed{workers}", workers) for workers in (0, 2)}
        while state["kills"] < asked.kills:
            workers, draw = (0, 2)[state["runs"] % 2], random.Random(f"{SEED} {state['runs']}")
            run = root / f"run{state['runs']}"
            count = killed_run(root, run, workers, seconds[workers], draw, KILLS_PER_RUN)
            for difference in differences(run, root / f"undisturbed{workers}"):
                note({"run": run.name, "problem": difference})
            state["kills"], state["runs"] = state["kills"] + count, state["runs"] + 1
            keep()
            print(f"{state['kills']} of {asked.kills} kills", flush=True)
    failed = failed_path.read_text().count("\n") if failed_path.exists() else 0
    print(f"{sum(state['cases'].values())} cases, {state['kills']} kills, {failed} failures ({failed_path})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
