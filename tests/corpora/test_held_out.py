"""Speakers held out of a training list: who, with which trials, and the lists that are written."""

from pathlib import Path

import numpy as np
import pytest

from speakernet.corpora.utterances import hold_out
from speakernet.data.lists import ListError, TrainingList, read_training_list, write_training_list


@pytest.fixture()
def training(tmp_path: Path) -> TrainingList:
    """Twelve speakers with six utterances each, and two with one."""
    rows = [(f"s{speaker:02}", f"s{speaker:02}/{row}.wav") for row in range(6) for speaker in range(12)]
    write_training_list(tmp_path / "all.txt", [*rows, ("t0", "t0/0.wav"), ("t1", "t1/0.wav")])
    return read_training_list(tmp_path / "all.txt")


def speaker_of(name: str) -> str:
    return name.split("/")[0]


def test_held_out_speakers_are_in_the_trials_alone(training: TrainingList) -> None:
    held = hold_out(training, 4, seed=3, nontargets_per_target=2)
    judges = {speaker_of(name) for name in held.trials.names}
    assert len(judges) == 4 and not judges & set(held.training.speakers)
    assert judges | set(held.training.speakers) == set(training.speakers)
    for label, path in zip(held.training.labels.tolist(), held.training.paths, strict=True):
        assert held.training.speakers[label] == speaker_of(path)
    assert held.training.labels.max() == 9
    same = [
        speaker_of(held.trials.names[int(first)]) == speaker_of(held.trials.names[int(second)])
        for first, second in zip(held.trials.enrol, held.trials.test, strict=True)
    ]
    np.testing.assert_array_equal(held.trials.labels, np.array(same, dtype=np.int8))
    # All 15 pairs of six utterances of each, and twice as many others.
    assert int(held.trials.labels.sum()) == 60 and len(held.trials) == 180


def test_the_seed_decides(training: TrainingList) -> None:
    first, again, other = (hold_out(training, 4, seed=seed).trials for seed in (3, 3, 4))
    assert first.sha256 == again.sha256 and first.checksum == again.checksum
    assert first.sha256 != other.sha256 and set(first.names) != set(other.names)


@pytest.mark.parametrize("number", [1, 13])
def test_too_few_on_either_side_are_refused(training: TrainingList, number: int) -> None:
    with pytest.raises(ListError, match=rf"{number} speakers to be held out of 14, of whom 12 .*; expected 2 to 12"):
        hold_out(training, number, seed=1)
