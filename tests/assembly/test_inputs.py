"""The inputs of a run: paths that follow one another, and every list, source and header read once."""

import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from speakernet.assembly import inputs as inputs_module
from speakernet.assembly.inputs import Inputs, make_synthetic_corpus, with_default_paths
from speakernet.assembly.runs import score_experiment, train_experiment
from speakernet.config import Config, ConfigError, LoadedConfig, load_config
from speakernet.config.schema import replaced
from speakernet.data import sources
from speakernet.data.lists import StringTable
from speakernet.parallel import distributed

CPU = torch.device("cpu")
OPENED: list[str] | None = None


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    # An opener of Python's own `open` is seen a second time, as the call of the system that it makes, without a mode.
    if OPENED is not None and event == "open" and isinstance(arguments[0], str):
        if arguments[1] is None and OPENED[-1:] == [arguments[0]]:
            return
        OPENED.append(arguments[0])


# Sees every file that the process opens, whoever opens it and however; there is no way to take it back.
sys.addaudithook(_note_opened)


@pytest.fixture()
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that are opened while the test runs."""
    found: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "OPENED", found)
    return found


@pytest.fixture()
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of names of each list whose headers are read, or taken from the disk."""
    found: list[int] = []
    build = sources.build_lookup_table

    def noting(root: str, names: StringTable, **options: Any) -> Any:
        found.append(len(names))
        return build(root, names, **options)

    monkeypatch.setattr(sources, "build_lookup_table", noting)
    return found


@pytest.fixture()
def lists(tiny_corpus: Path, tmp_path: Path) -> Path:
    """A folder with a training list, a validation list and a test list of its own names."""
    trials = (tiny_corpus / "trials.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.txt").write_bytes((tiny_corpus / "train_list.txt").read_bytes())
    (tmp_path / "validation.txt").write_text("".join(trials), encoding="utf-8")
    (tmp_path / "test.txt").write_text("".join(line for line in trials if "spk13" not in line), encoding="utf-8")
    return tmp_path


def loaded(lists: Path, corpus: Path, *options: str) -> LoadedConfig:
    """One epoch and a second stage of one of the smallest network, scored with all that needs the training list."""
    paths = [f"--data.{kind}_list={lists / kind}.txt" for kind in ("train", "validation", "test")]
    paths += [f"--data.{kind}_path={corpus}" for kind in ("train", "validation", "test")]
    sizes = ["--data.batch_size=8", "--data.crop_frames=50", "--data.num_workers=0", "--augment.enabled=false"]
    model = ["--model.name=ResNet", "--model.embedding_dim=8", "--frontend.num_mels=40"]
    model += ["--model.options={channels: 16, blocks: [1, 1], stem_stride: 2}"]
    stages = ["--training.max_epochs=1", "--training.large_margin_epochs=1", "--training.large_margin_crop_frames=60"]
    scoring = ["--evaluation.num_crops=1", "--evaluation.eval_frames=60", "--evaluation.bootstrap_samples=0"]
    scoring += ["--evaluation.subtract_mean=true", "--evaluation.mean_utterances=7"]
    scoring += ["--evaluation.score_norm=as", "--evaluation.cohort_utterances=1", "--evaluation.cohort_size=4"]
    machine = ["--runtime.device=cpu", "--runtime.compile=off", "--runtime.precision=no"]
    folder = f"--training.save_path={lists / 'run'}"
    return load_config([*paths, *sizes, *model, *stages, *scoring, *machine, folder, *options])


def test_a_run_reads_every_list_once_from_its_start_to_its_report(
    lists: Path, tiny_corpus: Path, opened: list[str], looked_up: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "speakernet")
    train_experiment(loaded(lists, tiny_corpus))
    read = Counter(Path(path).name for path in opened if Path(path).parent == lists)
    assert {name: read[name] for name in ("train.txt", "validation.txt", "test.txt")} == {
        "train.txt": 1,
        "validation.txt": 1,
        "test.txt": 1,
    }
    # The training list, 18 and 15 names of trials, and the utterances of the mean and of the cohort.
    assert sorted(looked_up) == [7, 8, 15, 18, 32]
    assert sum(message.startswith("device: ") for message in caplog.messages) == 1
    assert (lists / "run" / "large_margin" / "best.pt").is_file() and (lists / "run" / "report.html").is_file()


def test_scoring_reads_its_list_once_and_no_other(
    lists: Path, tiny_corpus: Path, opened: list[str], looked_up: list[int]
) -> None:
    from speakernet.checkpoint import write_checkpoint
    from speakernet.models.model_file import model_file_contents
    from speakernet.models.speaker_net import SpeakerNet

    model = lists / "model.pt"
    write_checkpoint(model, model_file_contents(SpeakerNet.named("ResNetSE34L", embedding_dim=8), loss_normalizes=True))
    plain = ["--evaluation.subtract_mean=false", "--evaluation.score_norm=none", f"--training.initial_model={model}"]
    score_experiment(loaded(lists, tiny_corpus, *plain))
    read = Counter(Path(path).name for path in opened if Path(path).parent == lists and path.endswith(".txt"))
    assert read == {"test.txt": 1} and looked_up == [15]


def test_lists_and_audio_are_known_by_where_they_lie(tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_corpus)
    config = replaced(Config(), data={"train_list": "train_list.txt", "test_list": str(tiny_corpus / "trials.txt")})
    inputs = Inputs(config, CPU)
    assert inputs.validation.trials is inputs.test.trials
    assert inputs.training.source is inputs.test.source
    assert inputs.training_input(tiny_corpus / "train_list.txt").rows is inputs.training.rows
    assert inputs.trial_input("trials.txt", tiny_corpus).trials is inputs.test.trials
    assert inputs.training.table is inputs.training.source.lookup_table(inputs.training.rows.paths)


def test_paths_follow_their_lists() -> None:
    given = {"train_list": "a/train.txt", "test_list": "b/test.txt", "test_path": "c"}
    data = with_default_paths(replaced(Config(), data=given)).data
    assert (data.train_path, data.test_path) == ("a", "c")
    assert (data.validation_list, data.validation_path) == ("b/test.txt", "c")
    data = with_default_paths(replaced(Config(), data={"validation_list": "b/v.txt", "test_path": "c"})).data
    assert (data.test_list, data.test_path, data.validation_path) == ("b/v.txt", "b", "b")


def test_what_is_not_named_is_refused_when_it_is_needed() -> None:
    inputs = Inputs(Config(), CPU)
    with pytest.raises(ConfigError, match="no training list"):
        _ = inputs.training
    with pytest.raises(ConfigError, match=r"no trial list: set data.test_list \(--test_list FILE\)") as refused:
        _ = inputs.test
    assert "--config" not in str(refused.value), "one may have been named"


@pytest.mark.parametrize(("is_main", "local_rank", "waits_before"), [(True, 0, 0), (False, 0, 1), (False, 1, 2)])
def test_one_process_of_each_machine_makes_the_synthetic_corpus(
    is_main: bool, local_rank: int, waits_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    made = types.SimpleNamespace(**dict.fromkeys(("train_list", "train_path", "test_list", "test_path"), "made"))
    made.noise_path = made.rir_path = "made"
    monkeypatch.setattr(distributed, "is_main", lambda: is_main)
    monkeypatch.setattr(distributed, "local_rank", lambda: local_rank)
    monkeypatch.setattr(distributed, "barrier", lambda: done.append("wait"))
    monkeypatch.setattr(inputs_module, "make_corpus", lambda folder, **_: done.append("make") or made)
    config = make_synthetic_corpus(replaced(Config(), data={"synthetic_corpus": "somewhere"}))
    assert config.data.train_list == "made"
    # Others of the same disk come later, and find it made; all wait as often.
    assert done == [*["wait"] * waits_before, "make", *["wait"] * (3 - waits_before)]
