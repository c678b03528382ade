"""A robustness sweep: the EER when the trial audio is degraded by set amounts with the project's own augmentation.

Steps are transforms of one utterance's samples; a `DegradedSource` applies one to everything that is read. The same
utterance meets the same clip and the same room at every amount, so that only the amount changes.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch

from speakernet.data.augment.augmenter import Augmenter, mu_law_codec, telephone_band
from speakernet.data.augment.banks import ClipBank, RirBank
from speakernet.data.augment.draw import Drawn
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.cache import AudioCache
from speakernet.data.lists import StringTable, TrialList
from speakernet.data.lookup import LookupTable
from speakernet.data.sources import AudioSource, RowReader
from speakernet.evaluation.bootstrap import SpeakerBootstrap, measure
from speakernet.evaluation.options import Sweep
from speakernet.evaluation.results import GroupResult, SweepResult
from speakernet.evaluation.speakers import Speakers

logger = logging.getLogger(__name__)

KINDS = get_args(Sweep)
# From the least disturbed to the most, as the rows of a sweep stand in the report.
NOISE_SNR_DB = (20.0, 15.0, 10.0, 5.0, 0.0)
REVERB_SHARES_PERCENT = (25, 50, 75, 100)
DURATIONS_SECONDS = (4.0, 3.0, 2.0, 1.0)
AXES = {
    "noise": "signal-to-noise ratio (dB)",
    "reverb": "share of reverberated sound (%)",
    "duration": "seconds kept, from the middle",
    "telephone": "channel",
}

Transform = Callable[[np.ndarray, int], np.ndarray]
"""(samples of a whole utterance, its row in the list of names) -> degraded samples."""


@dataclass(frozen=True)
class Step:
    """One amount of one degradation.

    Attributes:
        label: the amount, as it stands on the axis.
        transform: what it does to an utterance.
    """

    label: str
    transform: Transform


class DegradedSource(AudioSource):
    """Another source, with every utterance transformed when it is read whole.

    Args:
        source: of the audio as it is.
        names: utterances; their rows are what the transform is told.
        transform: of the samples.
    """

    def __init__(self, source: AudioSource, names: StringTable, transform: Transform) -> None:
        super().__init__(source.root, source.sample_rate)
        self._source = source
        self._row_of = {name: row for row, name in enumerate(names)}
        self._transform = transform

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """The transformed utterance, or a crop of it."""
        waveform = self._transform(self._source.read(name), self._row_of[name])
        return waveform[start:] if num_samples is None else waveform[start : start + num_samples]

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        # A degraded utterance is as long as the one it was made of.
        return self._source.lookup_table(names, num_threads)

    def missing(self, names: StringTable) -> np.ndarray:
        """Of the audio as it is."""
        return self._source.missing(names)

    def rows(self, names: StringTable, table: LookupTable, cache: AudioCache | None = None) -> RowReader:
        """Refused: crops read from within a file cannot be degraded as the whole is.

        Raises:
            ValueError: always.
        """
        raise ValueError("a degraded source is read by whole utterances; use `read`")


def sweep_steps(
    kinds: Sequence[str], banks: Mapping[str, ClipBank], rooms: RirBank | None, *, sample_rate: int, seed: int = 0
) -> dict[str, list[Step]]:
    """The steps of each kind, from the least to the most.

    Args:
        kinds: of KINDS.
        banks: clips by kind of disturbance; `noise` is asked for by the noise sweep.
        rooms: impulse responses, for the reverb sweep; aligned, so that the direct path stays in place.
        sample_rate: Hz, of the audio that the transforms get.
        seed: of the choice of clips and rooms.

    Raises:
        ValueError: an unknown kind, or one whose files are not there.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"sweep {unknown[0]!r}: expected {', '.join(KINDS)}")
    if "noise" in kinds and not len(banks.get("noise", ())):
        raise ValueError(
            "the noise sweep needs clips of noise: set augment.noise_path (or leave noise out of the sweep)"
        )
    if "reverb" in kinds and not rooms:
        raise ValueError("the reverb sweep needs impulse responses: set augment.rir_path (or leave reverb out)")
    makers: dict[str, Callable[[], list[Step]]] = {
        "noise": lambda: _noise_steps(banks, sample_rate, seed),
        "reverb": lambda: _reverb_steps(rooms, sample_rate, seed),
        "duration": lambda: [_duration_step(seconds, sample_rate) for seconds in DURATIONS_SECONDS],
        "telephone": lambda: _telephone_steps(sample_rate),
    }
    return {kind: makers[kind]() for kind in dict.fromkeys(kinds)}


def run_sweep(
    steps: Mapping[str, Sequence[Step]],
    source: AudioSource,
    score: Callable[[AudioSource], np.ndarray],
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    *,
    num_draws: int,
    seed: int,
) -> list[SweepResult]:
    """Score the list at every step.

    Args:
        steps: of `sweep_steps`.
        source: of the audio as it is.
        score: source -> scores of the list, (trials,).
        trials: labelled.
        scores: of the audio as it is, (trials,).
        speakers: of the list's utterances.
        num_draws: draws of speakers for the intervals.
        seed: of the draws.

    Returns:
        One for each kind; its rows begin with the audio as it is.
    """
    unchanged = _row("none", trials, scores, speakers, num_draws, seed)
    results = []
    for kind, amounts in steps.items():
        rows = [replace(unchanged, label="all") if kind == "duration" else unchanged]
        for step in amounts:
            # Embedded anew at every step: kept embeddings are of the audio as it is.
            found = score(DegradedSource(source, trials.names, step.transform))
            rows.append(_row(step.label, trials, found, speakers, num_draws, seed))
            logger.info("sweep: %s %s: EER %.2f %%", kind, step.label, rows[-1].eer_percent)
        note = "Both sides of every trial are degraded."
        results.append(SweepResult(kind, AXES[kind], note, rows))
    return results


def _row(
    label: str, trials: TrialList, scores: np.ndarray, speakers: Speakers, num_draws: int, seed: int
) -> GroupResult:
    assert trials.labels is not None
    enrol, test = speakers.ids[trials.enrol], speakers.ids[trials.test]
    found = measure(SpeakerBootstrap(scores, trials.labels, enrol, test, []), num_draws, seed)
    return GroupResult(label, found.eer_percent, found.eer_interval, found.note)


def _noise_steps(banks: Mapping[str, ClipBank], sample_rate: int, seed: int) -> list[Step]:
    # One lock for all amounts: a bank's reader is not made for several threads.
    lock = threading.Lock()
    steps = []
    for snr_db in NOISE_SNR_DB:
        only_noise = AugmentOptions(probability=1.0, categories=["noise"], noise_snr_db=[snr_db, snr_db])
        augmenter = Augmenter(banks, None, only_noise, sample_rate=sample_rate, seed=seed)
        steps.append(Step(f"{snr_db:g}", _augmenting(augmenter, lock)))
    return steps


def _reverb_steps(rooms: RirBank | None, sample_rate: int, seed: int) -> list[Step]:
    assert rooms is not None
    only_rooms = AugmentOptions(probability=1.0, categories=["reverb"])
    wet = _augmenting(Augmenter({}, rooms, only_rooms, sample_rate=sample_rate, seed=seed), threading.Lock())
    return [Step(f"{percent}", _mixing(wet, percent / 100)) for percent in REVERB_SHARES_PERCENT]


def _augmenting(augmenter: Augmenter, lock: threading.Lock) -> Transform:
    def transform(waveform: np.ndarray, row: int) -> np.ndarray:
        batch = torch.from_numpy(waveform.astype(np.float32, copy=True))[None]
        # Epoch 0 for every amount: the same clip and place for the same utterance.
        drawn: Drawn = augmenter.draw(np.array([row], dtype=np.int64), 0)
        with lock:
            ingredients = augmenter.gather(drawn, batch.shape[1])
        return augmenter.apply(batch, drawn, ingredients)[0].numpy()

    return transform


def _mixing(wet: Transform, share: float) -> Transform:
    """Some of the dry and some of the reverberated sound, both at the loudness of the dry one."""

    def transform(waveform: np.ndarray, row: int) -> np.ndarray:
        reverberated = wet(waveform, row)
        # Equal loudness, so that the room is what changes and not the level.
        loudness = np.sqrt(np.mean(np.square(reverberated))) or 1.0
        reverberated = reverberated * (np.sqrt(np.mean(np.square(waveform))) / loudness)
        return ((1 - share) * waveform + share * reverberated).astype(np.float32)

    return transform


def _duration_step(seconds: float, sample_rate: int) -> Step:
    wanted = round(seconds * sample_rate)

    def transform(waveform: np.ndarray, _row: int) -> np.ndarray:
        # From the middle: recordings often begin and end with silence.
        start = max(0, (len(waveform) - wanted) // 2)
        return waveform[start : start + wanted]

    return Step(f"{seconds:g}", transform)


def _telephone_steps(sample_rate: int) -> list[Step]:
    def band(waveform: np.ndarray, _row: int) -> np.ndarray:
        return telephone_band(torch.from_numpy(waveform.astype(np.float32))[None], sample_rate)[0].numpy()

    def codec(waveform: np.ndarray, _row: int) -> np.ndarray:
        narrow = telephone_band(torch.from_numpy(waveform.astype(np.float32))[None], sample_rate)
        return mu_law_codec(narrow, sample_rate)[0].numpy()

    return [Step("300-3400 Hz", band), Step("and mu-law", codec)]
