"""Mutations of real files against every reader, in child processes with limits of memory and time.

Resumable: what was done is kept in a state file. Used by `make hostile` and, with fewer cases, by the slow tests.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
HANG_SECONDS = 60.0
CASES_PER_CHILD = 500


def failures(reader: str, first: int, last: int, seed: int) -> Iterator[dict[str, Any]]:
    """Every case of a range that ended neither in an error that names the file nor in the right answer."""
    while first < last:
        begun = first
        for line in _lines(reader, first, min(last, first + CASES_PER_CHILD), seed):
            if "begins" in line:
                begun = line["begins"]
            elif "done" in line:
                first = line["done"]
            else:
                yield {"reader": reader, **line}
        if first <= begun:
            # The child died or hung at this case; the next one goes on behind it.
            first = begun + 1


def _lines(reader: str, first: int, last: int, seed: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "child.py"), reader, str(first), str(last), str(seed), folder]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=environment, text=True, **pipes) as child:  # type: ignore[call-overload]
            said: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_copy, args=(child.stdout, said), daemon=True).start()
            errors: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_copy, args=(child.stderr, errors), daemon=True).start()
            case = first
            while True:
                try:
                    line = said.get(timeout=HANG_SECONDS)
                except queue.Empty:
                    child.kill()
                    yield {"case": case, "problem": f"hangs: nothing for {HANG_SECONDS:.0f} s"}
                    return
                if line is None:
                    break
                found = json.loads(line)
                case = found.get("begins", case)
                yield found
                if "done" in found:
                    return
            child.wait()
            last_words = [one for one in iter(errors.get, None) if one]
            yield {"case": case, "problem": f"died with status {child.returncode}: {''.join(last_words)[-1500:]}"}


def _copy(stream: Any, lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
