"""Runs cases of one target in this process, under a memory limit: `python child.py TARGET FOLDER SEED…`.

A line of JSON before each case and one after it: whoever reads them knows at which seed the process died or hangs.
"""

import json
import logging
import random
import resource
import shutil
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from targets import TARGETS, Target

SPARE_BYTES = 512 << 20
"""Address space that the cases may take above what the process holds when they begin."""
READ, REFUSED, FAILED = "read", "refused", "failed"


def main(target_name: str, folder: str, seeds: list[int]) -> None:
    """Run the cases, one after the other."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    target = TARGETS[target_name]
    original, case = Path(folder) / "original", Path(folder) / "case"
    original.mkdir(parents=True)
    target.make(original)
    # Once undamaged: imports that come late, and what a checked answer is compared with.
    shutil.copytree(original, case)
    right = target.read(case)
    limit_memory()
    for seed in seeds:
        say({"seed": seed})
        say({"seed": seed, **run_case(target, original, case, seed, right, target_name)})


def run_case(target: Target, original: Path, case: Path, seed: int, right: Any, name: str) -> dict[str, str]:
    """Damage a copy of the files and read it; what came of it."""
    shutil.rmtree(case)
    shutil.copytree(original, case)
    # Another draw for every target, from the one seed.
    damaged = target.damage(case, random.Random(zlib.crc32(name.encode()) ^ seed))
    try:
        found = target.read(case)
    except (ValueError, KeyboardInterrupt, SystemExit) as error:
        return judged(error, case, damaged)
    except BaseException as error:
        return {"outcome": FAILED, "said": f"{type(error).__name__}: {error}"[:300], "file": damaged}
    if target.is_checked and found != right:
        return {"outcome": FAILED, "said": "damage was not noticed", "file": damaged}
    return {"outcome": READ}


def judged(error: BaseException, case: Path, damaged: str) -> dict[str, str]:
    """An error is clear where it is of ours to raise and names what was read."""
    said = str(error)
    names = {path.name for path in case.rglob("*")} | {case.name, Path(damaged).name}
    if not isinstance(error, ValueError) or (type(error).__module__ == "builtins" and type(error) is not ValueError):
        return {"outcome": FAILED, "said": f"{type(error).__name__}: {said}"[:300], "file": damaged}
    if not any(name in said for name in names):
        return {"outcome": FAILED, "said": f"names no file: {said}"[:300], "file": damaged}
    return {"outcome": REFUSED}


def limit_memory() -> None:
    """Let this process take no more than `SPARE_BYTES` above what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def say(record: dict[str, Any]) -> None:
    sys.__stdout__.write(json.dumps(record) + "\n")
    sys.__stdout__.flush()


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    # The commands print; this pipe carries cases alone.
    sys.stdout = sys.stderr
    main(sys.argv[1], sys.argv[2], [int(seed) for seed in sys.argv[3:]])
