"""All of the hostile cases, resumable: `make hostile`.

    python tests/hostile/run.py [--cases 100000] [--kills 200] [--rank-kills 20] [--every 1] [--folder exps/hostile]

The journal in the folder has a line for every batch of cases, round of kills and fault that is done, with what failed
in it; a start goes on behind them. `seed` and target of a failure bring it again (`cases.Reader.run`).
"""

import argparse
import errno
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
from cases import Reader, Tally, shares  # noqa: E402  found by the path above
from ranks import RankKills  # noqa: E402
from runs import DiskFaults, Kills, Starter, build_shim  # noqa: E402
from stores import KILL, StoreFaults  # noqa: E402
from targets import tiny_voice_corpus  # noqa: E402

SEED = 20260101
CASES_A_BATCH = 500
KILLS_A_ROUND = 5
WORKERS = (0, 2)
STORE_ERRORS = ((KILL, False), (errno.EIO, False), (errno.ENOSPC, True), (errno.EROFS, True))


class Journal:
    """What is done, a line each, kept when the process is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.records = [json.loads(line) for line in lines if line.endswith("}")]
        self.done = {record["name"] for record in self.records}

    def add(self, name: str, **values: Any) -> None:
        """Note a part that is done."""
        record = {"name": name, **values}
        self.records.append(record)
        self.done.add(name)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{name}: {values}", flush=True)

    def failures(self) -> list[str]:
        """Everything that failed, in this start or before."""
        return [f"{record['name']}: {one}" for record in self.records for one in record["failures"]]


def run_cases(journal: Journal, num_cases: int) -> None:
    """Mutated files over all readers."""
    left = [batch for batch in batches(num_cases) if batch[0] not in journal.done]
    if not left:
        return
    with Reader() as reader:
        for name, target, first, last in left:
            tally = Tally()
            reader.run(target, range(SEED + first, SEED + last), tally.add)
            journal.add(name, cases=dict(tally.outcomes), failures=tally.failures)


def batches(num_cases: int) -> Iterator[tuple[str, str, int, int]]:
    """Name, target, first and last case of each batch."""
    for target, count in shares(num_cases).items():
        for first in range(0, count, CASES_A_BATCH):
            last = min(count, first + CASES_A_BATCH)
            yield f"{target} {first}-{last}", target, first, last


def run_kills(journal: Journal, folder: Path, num_kills: int) -> None:
    """Kills at random moments over all stages of a run, without and with workers."""
    done = Counter(dict.fromkeys(WORKERS, 0))
    rounds: Counter[int] = Counter()
    for record in journal.records:
        if "kills" in record:
            done[record["workers"]] += record["kills"]
            rounds[record["workers"]] += 1
    for workers in WORKERS:
        if done[workers] >= num_kills / len(WORKERS):
            continue
        with Starter(folder) as starter:
            kills = Kills(starter, workers, SEED + 1000 * workers + rounds[workers])
            while done[workers] < num_kills / len(WORKERS):
                before, phases = kills.num_kills, Counter(kills.phases)
                problems = kills.round(KILLS_A_ROUND)
                done[workers] += kills.num_kills - before
                rounds[workers] += 1
                journal.add(
                    f"kills with {workers} workers, round {rounds[workers]}",
                    workers=workers,
                    kills=kills.num_kills - before,
                    phases=dict(kills.phases - phases),
                    failures=problems,
                )


def run_stores(journal: Journal, folder: Path, every: int) -> None:
    """A kill, a full, a broken and a read-only disk at each call of the commands over a store of people."""
    shim = build_shim(folder)
    if shim is None:
        return
    with Starter(folder, shim) as starter:
        faults = StoreFaults(starter)
        for command, call in faults.cases(every):
            for error, lasts in STORE_ERRORS:
                name = f"{command}, {fault_name(error, lasts=lasts)} at call {call}"
                if name not in journal.done:
                    journal.add(name, failures=faults.case(command, call, error, lasts=lasts))


def fault_name(error: int, *, lasts: bool) -> str:
    """A fault in words."""
    return "kill" if error == KILL else errno.errorcode[error] + " from then on" * lasts


def run_rank_kills(journal: Journal, folder: Path, num_kills: int) -> None:
    """Kills of one of two processes at random moments, over all stages of a run."""
    rounds = [record["rank_kills"] for record in journal.records if "rank_kills" in record]
    if sum(rounds) >= num_kills:
        return
    if not (folder / "corpus").exists():
        tiny_voice_corpus(folder / "corpus")
    kills = RankKills(folder / "ranks", folder / "corpus", SEED + len(rounds))
    while sum(rounds) < num_kills:
        before = kills.num_kills
        problems = kills.round(min(KILLS_A_ROUND, num_kills - sum(rounds)))
        rounds.append(kills.num_kills - before)
        journal.add(f"kills of processes, round {len(rounds)}", rank_kills=rounds[-1], failures=problems)


def run_faults(journal: Journal, folder: Path, every: int) -> None:
    """A full and a broken disk at each call that changes it (or each so many)."""
    shim = build_shim(folder)
    if shim is None:
        print("no compiler, or no Linux: the faults of disks are left out")
        return
    with Starter(folder, shim) as starter:
        faults = DiskFaults(starter)
        print(f"{faults.num_calls} calls change the disk", flush=True)
        # Those far apart first: a run that is stopped has tried something of every stage.
        for call in sorted(range(1, faults.num_calls + 1, every), key=lambda one: f"{one:016b}"[::-1]):
            for error, lasts in ((errno.EIO, False), (errno.ENOSPC, True)):
                name = f"{errno.errorcode[error]} at call {call}{' and all after' * lasts}"
                if name not in journal.done:
                    journal.add(name, failures=faults.case(call, error, lasts=lasts))


def main() -> int:
    """Go on where the last start was stopped; status 1 when anything failed, in this start or before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="mutated files over all readers")
    parser.add_argument("--kills", type=int, default=200, help="kills over runs with 0 and with 2 workers")
    parser.add_argument("--rank-kills", type=int, default=20, help="kills over runs of two processes")
    parser.add_argument("--every", type=int, default=1, help="faults at every so many calls; 0: none")
    parser.add_argument("--folder", type=Path, default=Path("exps/hostile"), help="journal and runs")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "journal.jsonl")
    run_cases(journal, asked.cases)
    run_kills(journal, folder, asked.kills)
    run_rank_kills(journal, folder, asked.rank_kills)
    if asked.every:
        run_stores(journal, folder, asked.every)
        run_faults(journal, folder, asked.every)
    failures = journal.failures()
    print(f"{len(journal.done)} parts done, {len(failures)} failures", *failures, sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
