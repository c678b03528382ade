"""Validation while training: by held-out speakers or not at all, in training's precision; small_data.yaml as it is."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from speakernet.assembly.inputs import Inputs, with_default_paths
from speakernet.cli import main
from speakernet.config import Config, ConfigError
from speakernet.config.schema import replaced
from speakernet.data.audio import read_audio, write_audio
from speakernet.data.lists import read_training_list, read_trials
from speakernet.models.model_file import load_model_file


def train(corpus: Path, folder: Path, *options: str) -> dict:
    """The command that is all it takes, with fewer epochs; what results.json says."""
    lists = ("--train_list", str(corpus / "train_list.txt"), "--test_list", str(corpus / "trials.txt"))
    short = ("--max_epoch", "2", "--data.num_workers", "0", "--runtime.device", "cpu", "--save_path", str(folder))
    quick = ("--evaluation.bootstrap_samples", "0", "--data.crop_frames", "60")
    assert main(["train", "--config", "small_data.yaml", *lists, *short, *quick, *options]) == 0
    return json.loads((folder / "results.json").read_text())


def evaluations(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "evaluation"]


def test_two_lists_are_all_that_the_recipe_takes(tiny_corpus: Path, tmp_path: Path) -> None:
    """The reported trials choose nothing: no epoch, no threshold; and they are scored in float32."""
    results = train(tiny_corpus, tmp_path, "--mixed-precision", "bf16", "--test_interval", "1")
    assert [one["precision"] for one in evaluations(tmp_path)] == ["bf16", "bf16"]
    assert results["precision"] == "float32"
    assert results["backend"]["embedding"] == "whole"
    assert not any("chosen on this very list" in one or "calibration" in one for one in results.get("warnings", []))
    kept = load_model_file(tmp_path / "best.pt").contents
    assert kept["training_summary"]["epoch"] == 2
    assert not kept.get("calibration") and not kept.get("thresholds")


@pytest.mark.slow
def test_held_out_speakers_choose_the_model_and_its_thresholds(tiny_corpus: Path, tmp_path: Path) -> None:
    best = ("--training.final_model", "best", "--test_interval", "1", "--evaluation.validation_precision", "no")
    results = train(tiny_corpus, tmp_path, "--data.validation_speakers", "3", "--data.batch_size", "8", *best)
    assert results["training"]["speakers"] == 5 and results["training"]["utterances"] == 20
    lists = {one["role"]: one for one in results["lists"]}
    assert (
        lists["validation"]["name"] == "train_list.txt: 3 held-out speakers"
        and len(lists["validation"]["sha256"]) == 64
    )
    assert lists["trials"]["name"] == "trials.txt"
    assert all(one["precision"] == "float32" and one["num_speakers"] == 3 for one in evaluations(tmp_path))
    assert not any("flatter" in one for one in results.get("warnings", []))
    assert load_model_file(tmp_path / "best.pt").contents["thresholds"]


def test_the_same_seed_holds_out_the_same_speakers(tiny_corpus: Path) -> None:
    listed = {"train_list": str(tiny_corpus / "train_list.txt"), "test_list": str(tiny_corpus / "trials.txt")}

    def inputs(seed: int) -> Inputs:
        data = {**listed, "validation_speakers": 3}
        return Inputs(replaced(Config(), data=data, runtime={"seed": seed}), torch.device("cpu"))

    first, again, other = inputs(1), inputs(1), inputs(5)
    whole = read_training_list(listed["train_list"])
    trained = set(first.training.rows.speakers)
    judges = {name.split("/")[0] for name in first.validation.trials.names}
    assert len(judges) == 3 and trained | judges == set(whole.speakers) and not trained & judges
    assert first.checksums() == again.checksums()
    assert first.validation.trials.checksum == again.validation.trials.checksum != other.validation.trials.checksum
    assert first.validation.source is first.training.source
    # Test and validation trials are not each other's default any more.
    assert with_default_paths(replaced(Config(), data={**listed, "validation_speakers": 3})).data.validation_list == ""
    with pytest.raises(ConfigError, match="train_list"):
        _ = Inputs(replaced(Config(), data={"validation_speakers": 3}), torch.device("cpu")).validation


def test_a_damaged_trial_recording_stops_the_run_before_its_first_step(
    tiny_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its header is whole: only decoding finds it, which would be after the last epoch."""
    corpus = tmp_path / "corpus"
    shutil.copytree(tiny_corpus, corpus)
    name = read_trials(corpus / "trials.txt").names[0]
    waveform = read_audio(corpus / name)
    damaged = corpus / "damaged.flac"
    write_audio(damaged, waveform, 16000)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    damaged.write_bytes(bytes(content))
    (corpus / "trials.txt").write_text((corpus / "trials.txt").read_text().replace(name, "damaged.flac"))
    lists = ("--train_list", str(corpus / "train_list.txt"), "--test_list", str(corpus / "trials.txt"))
    options = ("--data.num_workers", "0", "--runtime.device", "cpu", "--save_path", str(tmp_path / "run"))
    assert main(["train", "--config", "small_data.yaml", *lists, *options]) == 1
    assert "damaged: 1 undecodable file" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_disk_without_room_for_a_checkpoint_is_said_before_the_first_step(
    tiny_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("speakernet.assembly.runs.shutil.disk_usage", lambda _: usage._replace(free=400 << 10))
    lists = ("--train_list", str(tiny_corpus / "train_list.txt"), "--test_list", str(tiny_corpus / "trials.txt"))
    options = ("--data.num_workers", "0", "--runtime.device", "cpu", "--save_path", str(tmp_path / "run"))
    assert main(["train", "--config", "small_data.yaml", *lists, *options]) == 1
    said = capsys.readouterr().err
    assert "400.0 KiB" in said and "--save_path" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
