"""The inputs of a run: default paths, lists and headers read once, one corpus and a share of the
batch per rank.
"""

import builtins
import io
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from speakernet import distributed
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs, with_default_paths
from speakernet.assembly.reports import score_experiment
from speakernet.assembly.runs import train_experiment
from speakernet.config import Config, load_config
from speakernet.config.schema import with_changes
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data import sources
from speakernet.data.audio import read_audio, write_audio
from speakernet.data.packing import pack, pack_part
from speakernet.data.parts import WorkPart
from speakernet.distributed import refuse_differences
from tests.small_networks import tiny_resnet, write_model
from tests.tiny_recipe import two_stages, write_recipe

pytestmark = pytest.mark.usefixtures("blank_figures")
CPU = torch.device("cpu")


@pytest.fixture
def opened(lists, monkeypatch):
    """The name of a list for each time its file is opened during the test."""
    found = []
    original = open

    def recording(file, *arguments, **options):
        if isinstance(file, str | Path) and Path(file).name in (
            "train.txt",
            "validation.txt",
            "test.txt",
        ):
            found.append(Path(file).name)
        return original(file, *arguments, **options)

    # `Path.open` uses `io.open`.
    for module in (builtins, io):
        monkeypatch.setattr(module, "open", recording)
    return found


@pytest.fixture
def looked_up(monkeypatch):
    """The number of names in each list whose headers are read from the audio or the cache."""
    found = []
    build = sources.build_lookup_table

    def recording(root, names, **options):
        found.append(len(names))
        return build(root, names, **options)

    monkeypatch.setattr(sources, "build_lookup_table", recording)
    return found


@pytest.fixture
def lists(tiny_corpus, tmp_path):
    """A folder with a training, a validation and a test list."""
    trials = (tiny_corpus / "trials.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.txt").write_bytes((tiny_corpus / "train_list.txt").read_bytes())
    (tmp_path / "validation.txt").write_text("".join(trials), encoding="utf-8")
    (tmp_path / "test.txt").write_text(
        "".join(line for line in trials if "spk13" not in line), encoding="utf-8"
    )
    return tmp_path


CHANGES = yaml.safe_load("""
data: {batch_size: 8, crop_frames: 50}
training: {}
evaluation:
  {num_crops: 1, eval_frames: 60, bootstrap_samples: 0, subtract_mean: true, mean_utterances: 7,
  score_norm: as, cohort_utterances: 1, cohort_size: 4}
""")
CHANGES["training"]["stages"] = two_stages(1, 1, 60)
"""One epoch and a second stage of one epoch, with every option of scoring that needs the training
list."""


def loaded(lists, corpus, *options):
    paths = [f"--data.{kind}_list={lists / kind}.txt" for kind in ("train", "validation", "test")]
    recipe = write_recipe(lists / "run.yaml", corpus, lists / "run", CHANGES)
    return load_config([f"--config={recipe}", *paths, f"--data.validation_path={corpus}", *options])


def test_lists_are_read_once(lists, tiny_corpus, opened, looked_up, caplog):
    caplog.set_level("INFO", "speakernet")
    train_experiment(loaded(lists, tiny_corpus))
    assert sorted(opened) == ["test.txt", "train.txt", "validation.txt"]
    # The training list (32), the names of the trials (18 and 15), the utterances of the mean and of
    # the cohort.
    assert sorted(looked_up) == [7, 8, 15, 18, 32]
    assert sum(message.startswith("device: ") for message in caplog.messages) == 1
    assert (lists / "run" / "2_large_margin" / "best.pt").is_file() and (
        lists / "run" / "report.html"
    ).is_file()


def test_scoring_reads_one_list(lists, tiny_corpus, opened, looked_up):
    model = write_model(lists / "model.pt", tiny_resnet())
    plain = f"--evaluation.subtract_mean=false --score_norm=none --initial_model={model}"
    score_experiment(loaded(lists, tiny_corpus, *plain.split()))
    assert opened == ["test.txt"] and looked_up == [15]


def test_default_paths():
    given = {"train_list": "a/train.txt", "test_list": "b/test.txt", "test_path": "c"}
    data = with_default_paths(with_changes(Config(), data=given)).data
    assert (data.train_path, data.test_path) == ("a", "c")
    assert (data.validation_list, data.validation_path) == ("b/test.txt", "c")
    data = with_default_paths(
        with_changes(Config(), data={"validation_list": "b/v.txt", "test_path": "c"})
    ).data
    assert (data.test_list, data.test_path, data.validation_path) == ("b/v.txt", "b", "b")


NAMES = [f"s{speaker}/{utterance}.wav" for speaker in range(2) for utterance in range(3)]


@pytest.fixture(scope="module")
def disks(tmp_path_factory):
    """The same six utterances as files, packed, and packed in parts; and packed with one utterance
    replaced.
    """
    root = tmp_path_factory.mktemp("disks")
    for row, name in enumerate(NAMES):
        write_audio(root / "files" / name, torch.sin(torch.arange(800 + row) / 9).numpy())
    shutil.copytree(root / "files", root / "altered")
    write_audio(root / "altered" / NAMES[2], -read_audio(root / "files" / NAMES[2]))
    shutil.copytree(root / "files", root / "longer")
    write_audio(root / "longer" / NAMES[2], torch.sin(torch.arange(900) / 9).numpy())
    pack(FolderInput(root / "files"), root / "whole")
    pack(FolderInput(root / "altered"), root / "other")
    for number in (1, 2, 3):
        pack_part(FolderInput(root / "files"), root / "parts", WorkPart(number, 3))
    (root / "train.txt").write_text("".join(f"{name[:2]} {name}\n" for name in NAMES))
    (root / "trials.txt").write_text(f"1 {NAMES[0]} {NAMES[1]}\n0 {NAMES[0]} {NAMES[3]}\n")
    return root


def found_by(disks, audio):
    """The checksums of a rank with this audio."""
    data = {"train_list": str(disks / "train.txt"), "test_list": str(disks / "trials.txt")}
    data |= dict.fromkeys(("train_path", "test_path"), str(disks / audio))
    return Inputs(with_changes(Config(), data=data), CPU).checksums()


def test_facts_of_the_training_corpus(tmp_path):
    """One speaker with 2 s recorded at 8 kHz, another with 1 s and 3 s at 16 kHz: six seconds."""
    for name, seconds, rate in (("a/0.wav", 2, 8000), ("b/0.wav", 1, 16000), ("b/1.wav", 3, 16000)):
        write_audio(tmp_path / name, np.zeros(seconds * rate, dtype=np.float32), rate)
    path = tmp_path / "train_list.txt"
    path.write_text("a a/0.wav\nb b/0.wav\nb b/1.wav\n")
    config = with_changes(Config(), data={"train_list": str(path), "test_list": str(path)})
    facts = Inputs(config, CPU).corpus_facts()
    assert facts == {
        "list": str(path),
        "is_synthetic": False,
        "speakers": 2,
        "utterances": 3,
        "hours": pytest.approx(6 / 3600, abs=0.0005),
        "recorded_at_hz": [8000, 16000],
    }
    (tmp_path / "parameters.json").write_text('{"synthesiser_version": 1}')
    assert Inputs(config, CPU).corpus_facts()["is_synthetic"]


@pytest.fixture
def compare_ranks(monkeypatch):
    """Compare the inputs of rank 0 with those of another rank."""

    def agree(own, other):
        def gather(value):
            return (
                [value, other]
                if isinstance(value, dict)
                else [value, "" if other != own else value]
            )

        monkeypatch.setattr(distributed, "is_distributed", lambda: True)
        monkeypatch.setattr(distributed, "gather_objects", gather)
        refuse_differences(own)

    return agree


def test_copies_of_a_corpus(disks, compare_ranks):
    compare_ranks(found_by(disks, "whole"), found_by(disks, "parts"))
    # The content of files is unknown until they are read.
    compare_ranks(found_by(disks, "files"), found_by(disks, "altered"))


@pytest.mark.parametrize(
    ("left", "right", "option"),
    [
        ("whole", "other", "audio of data.train_path"),
        ("files", "longer", "lengths of the audio of data.train_list"),
    ],
)
def test_another_corpus_is_refused(disks, compare_ranks, left, right, option):
    with pytest.raises(ValueError, match=option):
        compare_ranks(found_by(disks, left), found_by(disks, right))


def build(corpus, monkeypatch, world_size, rank, *options):
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    lists = ["--data.train_list", f"{corpus}/train_list.txt", "--data.train_path", str(corpus)]
    machine = ["--data.num_workers", "0", "--data.crop_frames", "20", "--augment.enabled", "false"]
    config = load_config([*lists, *machine, *options]).config
    return build_training_loader(config, Inputs(config, CPU))


def test_shares_of_a_batch(tiny_corpus, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    whole = list(build(tiny_corpus, monkeypatch, 1, 0, "--data.batch_size", "8"))
    ranks = [
        list(build(tiny_corpus, monkeypatch, 3, rank, "--data.batch_size", "8"))
        for rank in range(3)
    ]
    assert "2 or 3 each" in caplog.text
    for parts in zip(whole, *ranks, strict=True):
        assert torch.equal(parts[0].waveforms, torch.cat([part.waveforms for part in parts[1:]]))
        assert torch.equal(parts[0].labels, torch.cat([part.labels for part in parts[1:]]))
        assert {part.rank_sizes for part in parts[1:]} == {(2, 3, 3)}


def test_fewer_utterances_than_ranks(tiny_corpus, monkeypatch):
    with pytest.raises(ValueError, match=r"data\.batch_size is 2 "):
        build(tiny_corpus, monkeypatch, 3, 0, "--data.batch_size", "2")
