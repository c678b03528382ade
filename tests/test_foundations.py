"""The files that every package stands on: tables, seeding, atomic files, collectives in one process."""

import os
import random as python_random
import sys
import types
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
from annotated_types import Ge, Le

from speakernet import random as seeding
from speakernet.cli import main
from speakernet.files import FileError, atomic_write, human_bytes, sha256_of
from speakernet.options import Component, Options, create, lookup, options_of
from speakernet.parallel import distributed


class PartOptions(Options):
    """A part for tests."""

    scale: Annotated[float, Ge(0.0), Le(2.0)] = 1.0
    """How much."""


class Thing:
    def __init__(self, options: PartOptions, size: int) -> None:
        self.made = (size, options.scale)


def test_a_part_takes_its_options_and_what_it_asks_for_of_the_context() -> None:
    table = {"part": Component(PartOptions, f"{__name__}:Thing")}
    sys.modules.setdefault(__name__, types.SimpleNamespace(Thing=Thing))  # type: ignore[arg-type]
    assert create(table["part"], options_of(table, "part", {"scale": 2}), size=3, color="red").made == (3, 2.0)
    with pytest.raises(ValueError, match=r"unknown model .CAM\+\+.; did you mean .CAMPPlus.\?"):
        lookup({"CAMPPlus": 1, "ResNet34": 2}, "CAM++", "model")
    with pytest.raises(ValueError, match="unknown model 'prt'; did you mean 'part'"):
        lookup(table, "prt", "model")
    with pytest.raises(ValueError, match=r"sclae.*did you mean 'scale'"):
        options_of(table, "part", {"sclae": 2})
    with pytest.raises(ValueError, match="scale is 3; expected float from 0 to 2"):
        options_of(table, "part", {"scale": 3})


def test_keyed_generators_repeat_and_differ() -> None:
    first = seeding.numpy_generator(1, 2, 3).random(4)
    assert np.array_equal(first, seeding.numpy_generator(1, 2, 3).random(4))
    for others in ((1, 2, 4), (1, 3, 2), (2, 2, 3), (1, 2)):
        assert not np.array_equal(first, seeding.numpy_generator(*others).random(4))
    seeds = {seeding.derive_seed(seed, key) for seed in range(3) for key in range(3)}
    assert len(seeds) == 9 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_random_state_survives_a_file_that_holds_no_code(tmp_path: Path) -> None:
    seeding.seed_everything(5)
    torch.save(seeding.capture_random_state(), tmp_path / "state.pt")
    expected = (python_random.random(), np.random.rand(), torch.rand(1).item())
    seeding.restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (python_random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_atomic_write_replaces_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "null", "folder"):
        with pytest.raises(FileError, match=name), atomic_write(tmp_path / name):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "null", "pipe"]


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    with atomic_write(target) as file:
        file.write("old")
    with pytest.raises(RuntimeError), atomic_write(target) as file:
        file.write("half")
        raise RuntimeError("interrupted")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_hash_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert sha256_of(tmp_path / "empty").startswith("e3b0c44298fc1c14")
    assert human_bytes(512) == "512 B"
    assert human_bytes(5 * 1024**3) == "5.0 GiB"


@pytest.mark.parametrize("command", [["train"], ["train", "--eval"], ["evaluate"]])
def test_half_of_what_torchrun_sets_is_refused_at_once_and_leaves_nothing(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*command, "--config", "exp01.yaml", "--save_path", "run"]) == 1
    said = capsys.readouterr().err.strip()
    assert "WORLD_SIZE is 2" in said and "RANK, MASTER_ADDR, MASTER_PORT" in said and len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_what_the_main_process_makes_or_raises() -> None:
    assert distributed.from_main(lambda: 3) == 3
    with pytest.raises(ValueError, match="nothing there"):
        distributed.from_main(_fail)


def _fail() -> None:
    raise ValueError("nothing there")
