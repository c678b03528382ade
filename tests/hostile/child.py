"""Runs cases, each batch in a copy of this warm process under a memory limit; `cases.py` gives the orders.

Reads a line of JSON for each batch: `target`, `folder`, `seeds`. Answers with the copy's process, a line before and
after each case, and the status that the copy ended with: whoever reads them knows at which seed it died or hangs.
"""

import gc
import json
import logging
import os
import random
import resource
import shutil
import sys
import traceback
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from drawings import keep_drawings
from targets import TARGETS, Target

SPARE_BYTES = 512 << 20
"""Address space that the cases may take above what the process holds when they begin."""
READ, REFUSED, FAILED = "read", "refused", "failed"


def serve() -> None:
    """One batch after the other, until the input ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    keep_drawings(Path(os.environ["HOSTILE_DRAWINGS"]))
    gc.collect()
    gc.freeze()
    # What the readers print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    say(answers, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        process = os.fork()
        if process == 0:
            status = 70
            try:
                run_cases(answers, TARGETS[order["target"]], order)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        say(answers, {"process": process})
        say(answers, {"status": os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])})


def run_cases(answers: Any, target: Target, order: dict[str, Any]) -> None:
    """In the copy: the cases, one after the other."""
    original, case = Path(order["folder"]) / "original", Path(order["folder"]) / "case"
    original.mkdir(parents=True)
    target.make(original)
    # Once undamaged: imports that come late, and what a checked answer is compared with.
    shutil.copytree(original, case)
    right = target.read(case)
    limit_memory()
    for seed in order["seeds"]:
        say(answers, {"seed": seed})
        # Another draw for every target, from the one seed.
        draw = random.Random(zlib.crc32(order["target"].encode()) ^ seed)
        say(answers, {"seed": seed, **run_case(target, original, case, draw, right)})


def run_case(target: Target, original: Path, case: Path, draw: random.Random, right: Any) -> dict[str, str]:
    """Damage a copy of the files and read it; what came of it."""
    shutil.rmtree(case)
    shutil.copytree(original, case)
    damaged = target.damage(case, draw)
    try:
        found = target.read(case)
    except BaseException as error:
        return {"file": damaged, **judged(error, case, damaged)}
    if target.is_checked and found != right:
        return {"outcome": FAILED, "said": "damage was not noticed", "file": damaged}
    return {"outcome": READ}


def judged(error: BaseException, case: Path, damaged: str) -> dict[str, str]:
    """An error is clear where it is of ours to raise, not the language's own, and names what was read."""
    said = str(error)
    names = {path.name for path in case.rglob("*")} | {case.name, Path(damaged).name}
    # UnicodeDecodeError and its like are ValueErrors too, which no reader should let through.
    is_ours = isinstance(error, ValueError) and (type(error) is ValueError or type(error).__module__ != "builtins")
    if not is_ours:
        return {"outcome": FAILED, "said": f"{type(error).__name__}: {said}"[:300]}
    if not any(name in said for name in names):
        return {"outcome": FAILED, "said": f"names no file: {said}"[:300]}
    return {"outcome": REFUSED}


def limit_memory() -> None:
    """Let this process take no more than `SPARE_BYTES` above what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def say(answers: Any, record: dict[str, Any]) -> None:
    answers.write(json.dumps(record) + "\n")
    answers.flush()


if __name__ == "__main__":
    serve()
