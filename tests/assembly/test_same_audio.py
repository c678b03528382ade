"""Processes that hold a corpus each on a disk of their own: the same one, or they refuse to train."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speakernet.assembly.inputs import Inputs
from speakernet.config.loading import load_config
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data.audio import read_audio, write_audio
from speakernet.data.packing import pack, pack_part
from speakernet.files import WorkPart
from speakernet.parallel import distributed
from speakernet.parallel.distributed import refuse_differences

NAMES = [f"s{speaker}/{utterance}.wav" for speaker in range(2) for utterance in range(3)]


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same six utterances as files, packed whole and packed in parts; and packed with one that is another."""
    root = tmp_path_factory.mktemp("disks")
    for row, name in enumerate(NAMES):
        (root / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        write_audio(root / "files" / name, torch.sin(torch.arange(800 + row) / 9).numpy(), 16000)
    shutil.copytree(root / "files", root / "altered")
    write_audio(root / "altered" / NAMES[2], -read_audio(root / "files" / NAMES[2]), 16000)
    shutil.copytree(root / "files", root / "longer")
    write_audio(root / "longer" / NAMES[2], torch.sin(torch.arange(900) / 9).numpy(), 16000)
    pack(FolderInput(root / "files"), root / "whole")
    pack(FolderInput(root / "altered"), root / "other")
    for number in (1, 2, 3):
        pack_part(FolderInput(root / "files"), root / "parts", WorkPart(number, 3))
    (root / "train.txt").write_text("".join(f"{name[:2]} {name}\n" for name in NAMES))
    (root / "trials.txt").write_text(f"1 {NAMES[0]} {NAMES[1]}\n0 {NAMES[0]} {NAMES[3]}\n")
    return root


def found_by(disks: Path, audio: str) -> dict[str, str]:
    """What a process says that has the audio there."""
    lists = ["--data.train_list", str(disks / "train.txt"), "--data.test_list", str(disks / "trials.txt")]
    where = ["--data.train_path", str(disks / audio), "--data.test_path", str(disks / audio)]
    config = load_config([*lists, *where]).config
    return Inputs(config, torch.device("cpu")).checksums()


@pytest.fixture()
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str], dict[str, str]], None]:
    """Agree as rank 0 of two processes, the other of which says something of its own."""

    def agree(own: dict[str, str], other: dict[str, str]) -> None:
        def gather(value: Any) -> list[Any]:
            return [value, other] if isinstance(value, dict) else [value, "" if other != own else value]

        monkeypatch.setattr(distributed, "is_distributed", lambda: True)
        monkeypatch.setattr(distributed, "gather_objects", gather)
        refuse_differences(own)

    return agree


def test_a_copy_on_each_disk_is_fine_whole_or_in_parts(disks: Path, beside: Callable) -> None:
    beside(found_by(disks, "whole"), found_by(disks, "parts"))
    beside(found_by(disks, "files"), found_by(disks, "altered"))  # what files hold is not known before they are read


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ("whole", "other", r"the audio of data.train_path is '6 utterances packed, 4815 samples, SHA-256 .* on rank 0"),
        ("files", "longer", r"the lengths of the audio of data.train_list \(CRC-32\) is '\w{8}' on rank 0 and '\w{8}'"),
        ("files", "whole", r"the audio of data.test_path is 'files of their own' on rank 0 and '6 utterances packed"),
    ],
)  # fmt: skip
def test_another_corpus_is_refused_by_what_differs(
    disks: Path, beside: Callable, left: str, right: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        beside(found_by(disks, left), found_by(disks, right))
