"""Model files that a person or a program made: an error that names the file, or the network."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from speakernet.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from speakernet.models.model_file import load_initial_weights, load_model_file, model_file_contents
from speakernet.models.model_schema import laid_out
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet

BACKEND = {"score": "cosine"}


def small_net() -> SpeakerNet:
    torch.manual_seed(0)
    return SpeakerNet.named("ResNet", "TSTP", 8, {"channels": 8, "blocks": [1, 1]}, front_end_options={"num_mels": 16})


def whole() -> dict[str, Any]:
    fit = {"inputs": ["score"], "weights": [2.0], "offset": 0.5, "prior": 0.01, "backend": BACKEND}
    threshold = {"name": "eer", "threshold": 0.4, "backend": BACKEND}
    return model_file_contents(
        small_net(),
        loss_normalizes=True,
        embedding_mean=torch.ones(8),
        calibration={"fits": [fit]},
        thresholds=[threshold],
        training_summary={"epoch": 3},
    )


def set_option(part: str, **options: Any) -> Callable[[dict], Any]:
    return lambda contents: contents[part]["options"].update(options)


def set_entry(**entries: Any) -> Callable[[dict], Any]:
    return lambda contents: contents.update(entries)


def drop(*names: str) -> Callable[[dict], Any]:
    def change(contents: dict) -> None:
        for name in names[:-1]:
            contents = contents[name]
        del contents[names[-1]]

    return change


def nested(levels: int, width: int) -> Any:
    """A value that is small in the file and endless to walk through."""
    value: Any = "x"
    for _ in range(levels):
        value = [value] * width
    return value


KINDS: dict[str, tuple[Callable[[dict], Any], str]] = {
    "huge channels": (set_option("model", channels=10**6), "channels is 1000000; expected int from 8 to 4096"),
    "huge blocks": (set_option("model", blocks=[10**7]), "blocks is .*10000000"),
    "many blocks": (set_option("model", blocks=[1000] * 8), "describes a network of more than .* parameters"),
    "wide": (set_option("model", channels=4096), "describes a network of more than"),
    "huge embedding": (set_option("model", embedding_dim=10**9), "embedding_dim is 1000000000"),
    "another embedding": (set_option("model", embedding_dim=9), r"embedding.weight is \(8, \d+\) in the file"),
    "unknown option": (set_option("model", colour=1), "has no option 'colour'"),
    "option of text": (set_option("model", channels="wide"), "channels is 'wide'; expected int"),
    "option of nothing": (set_option("model", channels=None), "channels is nothing; expected int"),
    "endless option": (set_option("model", blocks=nested(40, 10)), "model is a dict of another content"),
    "unknown pooling": (set_option("model", pooling="TSPT"), "unknown pooling 'TSPT'"),
    "no pooling": (drop("model", "options", "pooling"), "expected name and options of a network"),
    "no model": (drop("model"), "model is missing; expected name and options"),
    "unknown model": (lambda contents: contents["model"].update(name="ResNot"), "unknown model 'ResNot'"),
    "model of text": (set_entry(model="ResNet"), "model is 'ResNet'; expected name and options"),
    "no front end": (drop("front_end"), "front_end is missing"),
    "another front end": (
        lambda contents: contents["front_end"].update(name="raw"),
        "has no option|needs the front end",
    ),
    "no rate": (set_entry(sample_rate=0), "sample_rate is 0; expected a whole number from 1000 to 768000"),
    "huge rate": (set_entry(sample_rate=10**12), "sample_rate is 1000000000000; expected"),
    "rate of NaN": (set_entry(sample_rate=float("nan")), "sample_rate is nan; expected"),
    "no weights": (set_entry(weights={}), "describes a network of more than"),
    "weights of text": (set_entry(weights={"a": "b"}), "weights is a dict of another content; expected tensors"),
    "weights in a list": (set_entry(weights=[torch.ones(2)]), "weights is a list of another content"),
    "a weight left out": (drop("weights", "embedding.bias"), "missing embedding.bias"),
    "mean of NaN": (set_entry(embedding_mean=torch.full((8,), torch.nan)), "embedding_mean is with NaN"),
    "long mean": (set_entry(embedding_mean=torch.ones(9)), r"embedding_mean is of shape \(9,\); expected 8 finite"),
    "mean of text": (set_entry(embedding_mean="zero"), "embedding_mean is 'zero'; expected a vector"),
    "no word of the loss": (drop("loss_normalizes"), "loss_normalizes is missing; expected true or false"),
    "calibration cut": (
        lambda contents: contents["calibration"]["fits"][0].pop("offset"),
        "calibration is a dict of another content; expected fits",
    ),
    "calibration of NaN": (
        lambda contents: contents["calibration"]["fits"][0].update(offset=torch.nan),
        "calibration is a dict",
    ),
    "calibration on many pairs": (
        lambda contents: contents["calibration"]["fits"][0].update(num_targets="many"),
        "calibration is a dict",
    ),
    "chosen by text": (set_entry(training_summary={"chosen_by": "trials.txt"}), "training_summary is a dict"),
    "thresholds of text": (set_entry(thresholds="eer"), "thresholds is 'eer'"),
    "summary of text": (set_entry(training_summary="good"), "training_summary is 'good'"),
    "version of text": (set_entry(format_version="1"), "format version '1'; expected a number"),
    "version of nothing": (set_entry(format_version=None), "format version None; expected a number"),
    "version before the first": (set_entry(format_version=0), "format version 0; expected a number from 1"),
    "a later version": (set_entry(format_version=2), "format version 2; .*upgrade it"),
    "an expanded tensor": (
        set_entry(weights={"a": torch.zeros(1).expand(10**6, 10**6)}),
        r"a tensor of shape \(1000000, 1000000\) whose numbers are not in the file",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_content_has_a_clear_error_before_anything_is_built(kind: str, tmp_path) -> None:
    change, message = KINDS[kind]
    contents = whole()
    change(contents)
    write_checkpoint(tmp_path / "my.pt", contents)
    with pytest.raises(CheckpointError, match=rf"my\.pt.*{message}"):
        load_model_file(tmp_path / "my.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_odd_content_starts_no_training(kind: str, tmp_path) -> None:
    contents = whole()
    KINDS[kind][0](contents)
    write_checkpoint(tmp_path / "my.pt", contents)
    try:
        load_initial_weights(small_net(), None, tmp_path / "my.pt")
    except CheckpointError as error:
        assert "my.pt" in str(error)


def test_what_a_file_may_say_is_taken(tmp_path) -> None:
    write_checkpoint(tmp_path / "my.pt", whole())
    assert load_model_file(tmp_path / "my.pt").contents["thresholds"] == [
        {"name": "eer", "threshold": 0.4, "backend": BACKEND}
    ]


@pytest.mark.parametrize("name", MODELS)
def test_every_network_is_laid_out_within_its_own_weights(name: str) -> None:
    with torch.device("meta"):
        expected = SpeakerNet.named(name).state_dict()
    with laid_out(expected, "my.pt"):
        found = SpeakerNet.named(name).state_dict()
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in expected.items()}
    assert all(value.device.type == "meta" for key, value in found.items() if value.is_floating_point())


@pytest.mark.parametrize("compress", [False, True])
def test_a_flipped_byte_anywhere_in_the_contents_is_found(compress: bool, tmp_path) -> None:
    path = tmp_path / "my.pt"
    write_checkpoint(path, {"weights": {"a": torch.arange(300.0)}, "format_version": 1}, compress=compress)
    content = path.read_bytes()
    found = 0
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        try:
            contents = read_checkpoint(path)
        except CheckpointError as error:
            assert str(path) in str(error)
            found += 1
        else:
            # Padding and dates of the archive: nothing of what was kept is another.
            assert contents["format_version"] == 1 and torch.equal(contents["weights"]["a"], torch.arange(300.0))
    assert found > len(content) // 7 // 2
    path.write_bytes(content)
    assert torch.equal(torch.load(path, weights_only=True)["weights"]["a"], torch.arange(300.0))


def test_an_archive_whose_end_is_lost_is_damaged(tmp_path) -> None:
    """Such a file torch would open."""
    write_checkpoint(tmp_path / "my.pt", whole(), compress=True)
    with (tmp_path / "my.pt").open("ab") as file:
        file.write(b"PK" + b"x" * 70_000)
    with pytest.raises(CheckpointError, match=r"my\.pt is truncated or not a checkpoint \(BadZipFile"):
        load_model_file(tmp_path / "my.pt")


def test_a_pipe_is_no_checkpoint(tmp_path) -> None:
    os.mkfifo(tmp_path / "my.pt")
    with pytest.raises(CheckpointError, match=r"my\.pt: not a regular file but a pipe"):
        read_checkpoint(tmp_path / "my.pt")
