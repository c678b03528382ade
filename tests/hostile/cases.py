"""Cases of the readers, in processes with a memory limit; after a crash or hang the next process
continues.
"""

import logging
import multiprocessing
import random
import resource
import shutil
import tempfile
import warnings
import zlib
from collections import Counter
from pathlib import Path

from targets import TARGETS

CASE_SECONDS = 20.0
"""A case that takes longer counts as hanging; generous, as the machine may be busy."""
START_SECONDS = 120.0
SPARE_BYTES = 512 << 20
"""Address space that the cases may use beyond that of the process at their start."""
READ = "read"
REFUSED = "refused"
FAILED = "failed"

CONTEXT = multiprocessing.get_context("forkserver")
# Absolute names: this process does not have the tests' path.
READERS = (
    "data.packing",
    "corpora.archives",
    "corpora.pack_inputs",
    "evaluation.report",
    "models.speaker_net",
)
CONTEXT.set_forkserver_preload([f"speakernet.{name}" for name in READERS])


def run(name, seeds):
    """Run cases of a target; returns the count of each outcome and descriptions of failures."""
    outcomes = Counter()
    failures = []
    left = list(seeds)
    while left:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            records = list(_run_some(name, folder, left))
        outcomes.update(outcome for outcome, _ in records)
        for seed, (outcome, words) in zip(left, records, strict=False):
            if outcome == FAILED:
                failures.append(f"{name}, seed {seed}: {words}")
        left = left[len(records) :]
    return outcomes, failures


def _run_some(name, folder, seeds):
    """Outcomes until the process ended, died or hung; dying and hanging are outcomes too."""
    answers, other_end = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=run_cases, args=(other_end, name, folder, seeds))
    process.start()
    other_end.close()
    try:
        assert answers.poll(START_SECONDS) and answers.recv() == "ready", (
            f"{name}: the undamaged files cannot be read"
        )
        for _ in seeds:
            try:
                if not answers.poll(CASE_SECONDS):
                    yield FAILED, f"no answer in {CASE_SECONDS:g} s"
                    return
                yield answers.recv()
            except EOFError:
                process.join()
                yield FAILED, f"the process ended with {process.exitcode}"
                return
    finally:
        process.kill()
        process.join()
        answers.close()


def run_cases(answers, name, folder, seeds):
    """Run the cases in turn; called in the child process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    target = TARGETS[name]
    original = Path(folder) / "original"
    case = Path(folder) / "case"
    original.mkdir()
    target.make(original)
    # First undamaged, for late imports and as the reference of checked answers.
    shutil.copytree(original, case)
    right = target.read(case)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answers.send("ready")
    for seed in seeds:
        # Every target has its own draws from the same seed.
        draw = random.Random(zlib.crc32(name.encode()) ^ seed)
        shutil.rmtree(case)
        shutil.copytree(original, case)
        answers.send(run_case(target, case, draw, right))


def run_case(target, case, draw, right):
    """Damage a copy of the files and read it; returns the outcome and, for a failure, a
    description.
    """
    damaged = target.damage(case, draw)
    try:
        answer = target.read(case)
    except BaseException as error:
        description = f"{damaged}: {type(error).__name__}: {error}"[:300]
        # UnicodeDecodeError and similar are ValueErrors too, but readers must not let them through.
        is_foreign = type(error) is not ValueError and type(error).__module__ == "builtins"
        if not isinstance(error, ValueError) or is_foreign:
            return FAILED, description
        names = {path.name for path in case.rglob("*")} | {case.name, Path(damaged).name}
        if any(name in str(error) for name in names):
            return REFUSED, ""
        return FAILED, f"names no file: {description}"
    if target.is_checked and answer != right:
        return FAILED, f"{damaged}: damage was not noticed"
    return READ, ""
