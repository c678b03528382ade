"""A robustness sweep: the EER when the trial audio is degraded by fixed amounts with the project's
augmentation.

A step transforms the samples of an utterance; a `DegradedSource` applies it to everything that is
read. Each utterance keeps its noise clip and its RIR at every amount, so that only the amount
changes.
"""

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from scipy.signal import oaconvolve

from speakernet.data.augment.augmenter import Augmenter, mu_law_codec, telephone_band
from speakernet.data.augment.banks import ClipBank, RirBank
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.lists import StringTable, TrialList
from speakernet.data.lookup import LookupTable
from speakernet.data.sources import AudioCache, AudioSource, RowReader
from speakernet.data.windows import window_edges
from speakernet.evaluation.figures import SpeakerBootstrap, group_result
from speakernet.evaluation.options import Sweep
from speakernet.evaluation.results import GroupResult, SweepResult
from speakernet.evaluation.speakers import Speakers
from speakernet.random import numpy_generator

logger = logging.getLogger(__name__)

KINDS = get_args(Sweep)
# From the weakest degradation to the strongest, the order of the rows in the report.
NOISE_SNR_DB = (20.0, 15.0, 10.0, 5.0, 0.0)
REVERB_SHARES_PERCENT = (25, 50, 75, 100)
DURATIONS_SECONDS = (4.0, 3.0, 2.0, 1.0)
MICROPHONE_DB = (2.5, 5.0, 7.5, 10.0)
# In critical distances of the room; at one, direct sound and reverberation are equally strong.
DISTANCES = (0.25, 0.5, 1.0, 2.0, 4.0)
NARROWED = "300-3400 Hz"
CODED = "and mu-law"
DIRECT_SECONDS = (
    0.0025  # duration of the direct sound at the start of an RIR; the rest is reflected
)
AXES = {
    "noise": "signal-to-noise ratio (dB)",
    "reverb": "share of reverberated sound (%)",
    "duration": "seconds kept, from the middle",
    "telephone": "channel",
    "microphone": "standard deviation of the frequency response (dB)",
    "distance": "distance (critical distances of the room)",
}

Transform = Callable[[np.ndarray, int], np.ndarray]
"""(samples of an utterance or of a window of a long one, its row in the list of names) -> the
degraded samples."""


@dataclass(frozen=True)
class Step:
    """One amount of a degradation."""

    label: str
    """The amount as shown on the axis."""
    transform: Transform | None = None
    kept_seconds: float = 0.0
    """Length of the middle that is kept if there is no transform."""


class DegradedSource(AudioSource):
    """A source whose utterances are degraded when read: transformed as a whole (long ones window by
    window), or cut to the middle, since recordings often begin and end with silence.
    """

    def __init__(self, source: AudioSource, names: StringTable, step: Step) -> None:
        super().__init__(source.root, source.sample_rate)
        self._source = source
        self._transform = step.transform
        self._wanted = round(step.kept_seconds * source.sample_rate)
        self._row_of = {name: row for row, name in enumerate(names)}
        self._lengths = source.lookup_table(names).num_samples

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """The degraded utterance, or a crop of it."""
        row = self._row_of[name]
        total = int(self._lengths[row])
        if self._transform is None:
            left = min(total, self._wanted) - start
            count = left if num_samples is None else min(left, num_samples)
            if count <= 0:
                return np.empty(0, dtype=np.float32)
            return self._source.read(name, max(0, (total - self._wanted) // 2) + start, count)
        edges = window_edges(total, self.sample_rate)
        if len(edges) == 2:
            waveform = self._transform(self._source.read(name), row)
            return waveform[start : None if num_samples is None else start + num_samples]
        stop = total if num_samples is None else min(total, start + num_samples)
        # The windows that overlap the crop, each cut to the overlap.
        pieces = [
            self._transform(self._source.read(name, begin, end - begin), row)[
                max(0, start - begin) : stop - begin
            ]
            for begin, end in itertools.pairwise(edges)
            if begin < stop and end > start
        ]
        return np.concatenate([np.empty(0, dtype=np.float32), *pieces])

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        whole = self._source.lookup_table(names, num_threads)
        if self._transform is not None:
            return whole
        cut = {
            "native_samples": np.minimum(whole.num_samples, self._wanted),
            "sample_rates": np.full(len(names), self.sample_rate),
        }
        return LookupTable(self.sample_rate, {**vars(whole), **cut}, whole.problems)

    def rows(
        self, names: StringTable, table: LookupTable, cache: AudioCache | None = None
    ) -> RowReader:
        """Raise ValueError, since crops that are read directly from a file cannot be degraded like
        the whole.
        """
        raise ValueError("a degraded source cannot read crops directly from files; use `read`")


def sweep_steps(
    kinds: Sequence[str],
    banks: Mapping[str, ClipBank],
    rirs: RirBank | None,
    *,
    sample_rate: int,
    seed: int = 0,
) -> dict[str, list[Step]]:
    """The steps of each kind, from the weakest degradation to the strongest."""
    for kind, is_there, option in (
        ("noise", len(banks.get("noise", ())), "augment.noise_path"),
        ("reverb", rirs, "augment.rir_path"),
        ("distance", rirs, "augment.rir_path"),
    ):
        if kind in kinds and not is_there:
            raise ValueError(
                f"the {kind} sweep needs audio: set {option}, or remove {kind} from "
                "evaluation.sweep"
            )

    def always(rirs: RirBank | None, **options: object) -> Transform:
        section = AugmentOptions(probability=1.0, **options)  # type: ignore[arg-type]
        return augmenting({} if rirs else banks, rirs, section, sample_rate=sample_rate, seed=seed)

    steps: dict[str, list[Step]] = {}
    for kind in kinds:
        match kind:
            case "noise":
                steps[kind] = [
                    Step(f"{one:g}", always(None, categories=["noise"], noise_snr_db=[one, one]))
                    for one in NOISE_SNR_DB
                ]
            case "reverb":
                mixed = functools.partial(_mixed, always(rirs, categories=["reverb"]))
                steps[kind] = [
                    Step(f"{one}", functools.partial(mixed, one / 100))
                    for one in REVERB_SHARES_PERCENT
                ]
            case "duration":
                steps[kind] = [Step(f"{one:g}", kept_seconds=one) for one in DURATIONS_SECONDS]
            case "microphone":
                steps[kind] = [
                    Step(
                        f"{one:g}",
                        always(None, categories=[], microphone_probability=1.0, microphone_db=one),
                    )
                    for one in MICROPHONE_DB
                ]
            case "distance":
                assert rirs is not None
                steps[kind] = [
                    Step(f"{one:g}", functools.partial(_far, rirs, seed, one)) for one in DISTANCES
                ]
            case _:
                steps[kind] = [
                    Step(label, functools.partial(_narrowed, sample_rate, label == CODED))
                    for label in (NARROWED, CODED)
                ]
    return steps


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

    Returns:
        A result for each kind, whose first row is the original audio.
    """
    labels = trials.labels
    assert labels is not None, "only labelled trials are swept"
    sides = speakers.ids[trials.enrol], speakers.ids[trials.test]

    def row(label: str, found: np.ndarray) -> GroupResult:
        return group_result(
            label, SpeakerBootstrap(found, labels, *sides, {}), None, num_draws, seed
        )

    unchanged = row("none", scores)
    results = []
    for kind, amounts in steps.items():
        rows = [replace(unchanged, label="all") if kind == "duration" else unchanged]
        for step in amounts:
            rows.append(row(step.label, score(DegradedSource(source, trials.names, step))))
            logger.info(
                "sweep: %s, %s %s: EER %.2f %%", kind, AXES[kind], step.label, rows[-1].eer_percent
            )
        results.append(
            SweepResult(kind, AXES[kind], "Both sides of every trial are degraded.", rows)
        )
    return results


def augmenting(*given: Any, **options: Any) -> Transform:
    """A transform that uses an augmenter with these arguments and makes the same choices for the
    same row.
    """
    return functools.partial(_augmented, Augmenter(*given, **options), threading.Lock())


def _augmented(
    augmenter: Augmenter, lock: threading.Lock, waveform: np.ndarray, row: int
) -> np.ndarray:
    # Always epoch 0, so that an utterance gets the same clip and position at every amount.
    with lock:
        return augmenter(
            torch.from_numpy(waveform.astype(np.float32, copy=True))[None],
            epoch=0,
            rows=np.array([row], dtype=np.int64),
        )[0].numpy()


def _mixed(wet: Transform, share: float, waveform: np.ndarray, row: int) -> np.ndarray:
    """A mix of the dry and the reverberated sound, both at the loudness of the dry one."""
    return ((1 - share) * waveform + share * _as_loud_as(waveform, wet(waveform, row))).astype(
        np.float32
    )


def _far(rirs: RirBank, seed: int, distance: float, waveform: np.ndarray, row: int) -> np.ndarray:
    """The sound at a distance, in critical distances of the utterance's room: only the direct sound
    fades.
    """
    response = rirs.prepared(int(numpy_generator(seed, row).integers(len(rirs)))).astype(np.float64)
    direct, late = np.split(response, [round(DIRECT_SECONDS * rirs.source.sample_rate)])
    # Equal energy at the critical distance; the amplitude of direct sound is inversely proportional
    # to the distance.
    gain = np.sqrt(np.dot(late, late) / max(np.dot(direct, direct), 1e-12)) / distance
    wet = oaconvolve(waveform, np.concatenate([gain * direct, late]).astype(np.float32))[
        : len(waveform)
    ]
    return _as_loud_as(waveform, wet).astype(np.float32)


def _as_loud_as(waveform: np.ndarray, wet: np.ndarray) -> np.ndarray:
    """Scale to equal loudness, so that the room changes and the level does not."""
    loudness = np.sqrt(np.mean(np.square(wet))) or 1.0
    return wet * (np.sqrt(np.mean(np.square(waveform))) / loudness)


def _narrowed(sample_rate: int, has_codec: bool, waveform: np.ndarray, _row: int) -> np.ndarray:
    narrow = telephone_band(torch.from_numpy(waveform.astype(np.float32))[None], sample_rate)
    return (mu_law_codec(narrow, sample_rate) if has_codec else narrow)[0].numpy()
