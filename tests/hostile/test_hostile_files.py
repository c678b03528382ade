"""Damaged files against every reader, in processes with limits; HOSTILE_CASES sets how many (`make hostile`)."""

import functools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import cases
import pytest
from targets import TARGETS, Target

SEED = 20260101
NUM_CASES = int(os.environ.get("HOSTILE_CASES", "2000"))

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes under limits need fork")


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_a_clear_error_or_changes_nothing(name: str) -> None:
    draw = random.Random(SEED)
    outcomes, failures = cases.run(name, [draw.randrange(1 << 31) for _ in range(cases.shares(NUM_CASES)[name])])
    assert not failures, "\n".join(failures[:10])
    assert outcomes["read"] + outcomes["refused"]


def misbehave(folder: Path) -> Any:
    """A reader that does once what no reader may."""
    content = (folder / "file").read_bytes()
    if content == b"dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if content == b"hangs":
        time.sleep(1000)
    if content == b"eats":
        return bytearray(2 << 30)
    if content == b"names nothing":
        raise ValueError("something is wrong")
    return content


def make_whole(folder: Path) -> None:
    (folder / "file").write_bytes(b"whole")


def write(content: bytes, path: Path, _draw: random.Random) -> None:
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", "ended with -11"),
        ("hangs", "no answer"),
        ("eats", "MemoryError"),
        ("changes", "not noticed"),
        ("names nothing", "names no file"),
    ],
)
def test_misbehaviour_is_found(monkeypatch: pytest.MonkeyPatch, how: str, words: str) -> None:
    monkeypatch.setattr(cases, "CASE_SECONDS", 2.0)
    target = Target(make_whole, misbehave, ("file",), functools.partial(write, how.encode()), is_checked=True)
    _, failures = cases.run(how, [1, 2], target)
    assert len(failures) == 2 and all(words in one for one in failures), failures
