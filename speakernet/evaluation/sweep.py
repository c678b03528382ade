"""A robustness sweep: the EER when the trial audio is degraded by set amounts with the project's own augmentation.

Steps are transforms of one utterance's samples; a `DegradedSource` applies one to everything that is read. The same
utterance meets the same clip and the same room at every amount, so that only the amount changes.
"""

import itertools
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
from speakernet.data.lists import StringTable, TrialList
from speakernet.data.lookup import LookupTable
from speakernet.data.sources import AudioCache, AudioSource, RowReader
from speakernet.evaluation.bootstrap import SpeakerBootstrap, measure
from speakernet.evaluation.embedding import window_edges
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
"""(samples of a whole utterance, or of a window of a long one; its row in the list of names) -> as many, degraded."""


@dataclass(frozen=True)
class Step:
    """One amount of one degradation.

    Attributes:
        label: the amount, as it stands on the axis.
        transform: what it does to an utterance; None where it only keeps a part of it.
        kept_seconds: how much of the middle it keeps, where there is no transform.
    """

    label: str
    transform: Transform | None = None
    kept_seconds: float = 0.0

    def applied_to(self, source: AudioSource, names: StringTable) -> "DegradedSource":
        """The audio of these utterances, degraded."""
        if self.transform is None:
            return MiddleSource(source, names, self.kept_seconds)
        return TransformedSource(source, names, self.transform)


class DegradedSource(AudioSource):
    """Another source, with every utterance degraded as it is read; utterances, not rows of batches.

    Args:
        source: of the audio as it is.
        names: utterances; their rows are what a transform is told.
    """

    def __init__(self, source: AudioSource, names: StringTable) -> None:
        super().__init__(source.root, source.sample_rate)
        self._source = source
        self._row_of = {name: row for row, name in enumerate(names)}
        self._lengths = source.lookup_table(names).num_samples

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        # A transformed utterance is as long as the one it was made of.
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


class TransformedSource(DegradedSource):
    """Every utterance transformed whole; a long one by the windows in which it is embedded, each on its own.

    Args:
        source: of the audio as it is.
        names: utterances; their rows are what the transform is told.
        transform: of the samples.
    """

    def __init__(self, source: AudioSource, names: StringTable, transform: Transform) -> None:
        super().__init__(source, names)
        self._transform = transform

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """The transformed utterance, or a crop of it."""
        row = self._row_of[name]
        total = int(self._lengths[row])
        edges = window_edges(total, self.sample_rate)
        if len(edges) == 2:
            waveform = self._transform(self._source.read(name), row)
            return waveform[start:] if num_samples is None else waveform[start : start + num_samples]
        stop = total if num_samples is None else min(total, start + num_samples)
        windows = [(begin, end) for begin, end in itertools.pairwise(edges) if begin < stop and end > start]
        parts = [np.empty(0, dtype=np.float32)]
        for begin, end in windows:
            window = self._transform(self._source.read(name, begin, end - begin), row)
            parts.append(window[max(0, start - begin) : stop - begin])
        return np.concatenate(parts)


class MiddleSource(DegradedSource):
    """The middle of every utterance: recordings often begin and end with silence.

    Args:
        source: of the audio as it is.
        names: utterances.
        seconds: kept of each; a shorter one stays as it is.
    """

    def __init__(self, source: AudioSource, names: StringTable, seconds: float) -> None:
        super().__init__(source, names)
        self._wanted = round(seconds * source.sample_rate)

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """The middle of the utterance, or a crop of it; nothing else is read."""
        total = int(self._lengths[self._row_of[name]])
        left = min(total, self._wanted) - start
        count = left if num_samples is None else min(left, num_samples)
        if count <= 0:
            return np.empty(0, dtype=np.float32)
        return self._source.read(name, max(0, (total - self._wanted) // 2) + start, count)

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        whole = self._source.lookup_table(names, num_threads)
        table = LookupTable.empty(len(names), self.sample_rate)
        table.native_samples[:] = np.minimum(whole.num_samples, self._wanted)
        table.sample_rates[:] = self.sample_rate
        table.problems.update(whole.problems)
        return table


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
        "duration": lambda: [Step(f"{one:g}", kept_seconds=one) for one in DURATIONS_SECONDS],
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
            found = score(step.applied_to(source, trials.names))
            rows.append(_row(step.label, trials, found, speakers, num_draws, seed))
            logger.info("sweep: %s, %s %s: EER %.2f %%", kind, AXES[kind], step.label, rows[-1].eer_percent)
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


def _telephone_steps(sample_rate: int) -> list[Step]:
    def band(waveform: np.ndarray, _row: int) -> np.ndarray:
        return telephone_band(torch.from_numpy(waveform.astype(np.float32))[None], sample_rate)[0].numpy()

    def codec(waveform: np.ndarray, _row: int) -> np.ndarray:
        narrow = telephone_band(torch.from_numpy(waveform.astype(np.float32))[None], sample_rate)
        return mu_law_codec(narrow, sample_rate)[0].numpy()

    return [Step("300-3400 Hz", band), Step("and mu-law", codec)]
