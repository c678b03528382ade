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
import scipy.fft
import torch
from torch import Tensor

from speakernet.data.augment.augmenter import Augmenter, mu_law_codec, telephone_band
from speakernet.data.augment.banks import ClipBank, RirBank
from speakernet.data.augment.codecs import CODECS, Coding, encode_and_decode, lacking
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.lists import StringTable, TrialList
from speakernet.data.lookup import LookupTable
from speakernet.data.sources import AudioSource
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
DISTANCES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""In critical distances of the room; at one, direct sound and reverberation are equally strong."""
DIRECT_SECONDS = 0.0025
"""Duration of the direct sound at the start of an RIR; the rest is reflected."""
AXES = {
    "noise": "signal-to-noise ratio (dB)",
    "reverb": "share of reverberated sound (%)",
    "duration": "seconds kept, from the middle",
    "telephone": "channel",
    "codec": "codec and bit rate (kbit/s)",
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
        self._kept_samples = round(step.kept_seconds * source.sample_rate)
        self._row_of = {name: row for row, name in enumerate(names)}
        # Looked up once, because every read needs the length of the whole recording.
        self._lengths = source.lookup_table(names).num_samples

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """The degraded utterance, or a crop of it."""
        row = self._row_of[name]
        total = int(self._lengths[row])
        if self._transform is None:
            left = min(total, self._kept_samples) - start
            count = left if num_samples is None else min(left, num_samples)
            if count <= 0:
                return np.empty(0, dtype=np.float32)
            return self._source.read(name, max(0, (total - self._kept_samples) // 2) + start, count)
        # Long recordings are degraded in the windows of a minute in which they are embedded,
        # because two hours of samples take much memory. Noise and codec restart with each window;
        # whether that changes the EER was not measured.
        edges = window_edges(total, self.sample_rate)
        stop = total if num_samples is None else start + num_samples
        if len(edges) == 2:
            return self._transform(self._source.read(name), row)[start:stop]
        # The windows that overlap the crop, each cut to the overlap.
        pieces = [np.empty(0, dtype=np.float32)]
        for begin, end in itertools.pairwise(edges):
            if begin < stop and end > start:
                window = self._transform(self._source.read(name, begin, end - begin), row)
                pieces.append(window[max(0, start - begin) : max(0, stop - begin)])
        return np.concatenate(pieces)

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        whole = self._source.lookup_table(names, num_threads)
        if self._transform is not None:
            return whole
        cut = {
            "native_samples": np.minimum(whole.num_samples, self._kept_samples),
            "sample_rates": np.full(len(names), self.sample_rate),
        }
        return LookupTable(self.sample_rate, {**vars(whole), **cut}, whole.problems)


def sweep_steps(
    kinds: Sequence[str],
    banks: Mapping[str, ClipBank],
    rirs: RirBank | None,
    *,
    sample_rate: int,
    seed: int = 0,
) -> dict[str, list[Step]]:
    """The steps of each kind, from the weakest degradation to the strongest."""
    needed = {
        "noise": (banks.get("noise"), "augment.noise_path"),
        "reverb": (rirs, "augment.rir_path"),
        "distance": (rirs, "augment.rir_path"),
    }
    # Refused here, before anything is embedded.
    for kind in kinds:
        audio, option = needed.get(kind, (True, ""))
        if not audio:
            raise ValueError(
                f"the {kind} sweep needs audio: set {option}, or remove {kind} from "
                "evaluation.sweep"
            )
    return {kind: _steps_of(kind, banks, rirs, sample_rate, seed) for kind in kinds}


def _steps_of(
    kind: str, banks: Mapping[str, ClipBank], rirs: RirBank | None, sample_rate: int, seed: int
) -> list[Step]:
    augmented = functools.partial(augmenting, sample_rate=sample_rate, seed=seed)
    always = functools.partial(AugmentOptions, probability=1.0)
    steps = []
    if kind == "noise":
        for snr in NOISE_SNR_DB:
            section = always(categories=["noise"], noise_snr_db=[snr, snr])
            steps.append(Step(f"{snr:g}", augmented(banks, None, section)))
    elif kind == "reverb":
        # By the share of reverberated sound, because the reverberation times of recorded rooms
        # cannot be changed.
        wet = augmented({}, rirs, always(categories=["reverb"]))
        for percent in REVERB_SHARES_PERCENT:
            steps.append(
                Step(f"{percent}", functools.partial(_mix_reverberation, wet, percent / 100))
            )
    elif kind == "duration":
        steps = [Step(f"{seconds:g}", kept_seconds=seconds) for seconds in DURATIONS_SECONDS]
    elif kind == "microphone":
        for decibels in MICROPHONE_DB:
            section = always(categories=[], microphone_probability=1.0, microphone_db=decibels)
            steps.append(Step(f"{decibels:g}", augmented(banks, None, section)))
    elif kind == "distance":
        assert rirs is not None
        for distance in DISTANCES:
            steps.append(Step(f"{distance:g}", functools.partial(_far, rirs, seed, distance)))
    elif kind == "codec":
        steps = _codec_steps(sample_rate)
    else:
        steps = [
            Step("300-3400 Hz", _through(sample_rate, telephone_band)),
            Step("and mu-law", _through(sample_rate, telephone_band, mu_law_codec)),
        ]
    return steps


def _codec_steps(sample_rate: int) -> list[Step]:
    """Each codec that this machine has, at each of its bit rates."""
    steps = [Step("mu-law 64", _through(sample_rate, mu_law_codec))]
    for name, codec in CODECS.items():
        # Codecs depend on this machine's libraries. A missing one is left out with a warning,
        # because the others are still worth comparing.
        if problem := lacking(name):
            logger.warning("sweep: codec %s is left out: %s", name, problem)
            continue
        for kilobits in codec.levels:
            transform = functools.partial(_encode_waveform, sample_rate, Coding(name, kilobits))
            steps.append(Step(f"{name} {kilobits:g}", transform))
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

    def row(label: str, scores: np.ndarray) -> GroupResult:
        bootstrap = SpeakerBootstrap(scores, labels, *sides, {})
        return group_result(label, bootstrap, None, num_draws, seed)

    # Every curve begins with the undegraded list, for comparison.
    unchanged = row("none", scores)
    results = []
    for kind, amounts in steps.items():
        rows = [replace(unchanged, label="all") if kind == "duration" else unchanged]
        for step in amounts:
            rows.append(row(step.label, score(DegradedSource(source, trials.recordings, step))))
            eer = rows[-1].eer_percent
            logger.info("sweep: %s, %s %s: EER %.2f %%", kind, AXES[kind], step.label, eer)
        note = "Both sides of every trial are degraded."
        results.append(SweepResult(kind, AXES[kind], note, rows))
    return results


def augmenting(
    banks: Mapping[str, ClipBank], rirs: RirBank | None, section: AugmentOptions, **options: Any
) -> Transform:
    """A transform by an augmenter with these arguments, which makes the same choices for the same
    row.
    """
    augmenter = Augmenter(banks, rirs, section, **options)
    lock = threading.Lock()

    def augment(waveform: np.ndarray, row: int) -> np.ndarray:
        batch = torch.from_numpy(waveform.astype(np.float32, copy=True))[None]  # (1, samples)
        # Always epoch 0, so that an utterance gets the same clip and position at every amount.
        # Locked, because reader threads share the augmenter and its buffers.
        with lock:
            return augmenter(batch, epoch=0, rows=np.array([row], dtype=np.int64))[0].numpy()

    return augment


def _mix_reverberation(wet: Transform, share: float, waveform: np.ndarray, row: int) -> np.ndarray:
    """A mix of the dry and the reverberated sound, both at the loudness of the dry one."""
    reverberated = _as_loud_as(waveform, wet(waveform, row))
    return ((1 - share) * waveform + share * reverberated).astype(np.float32)


def _far(rirs: RirBank, seed: int, distance: float, waveform: np.ndarray, row: int) -> np.ndarray:
    """The sound at a distance, in critical distances of the utterance's room: only the direct sound
    fades.
    """
    response = rirs.prepare(int(numpy_generator(seed, row).integers(len(rirs)))).astype(np.float64)
    direct, late = np.split(response, [round(DIRECT_SECONDS * rirs.source.sample_rate)])
    # Equal energy at the critical distance; the amplitude of direct sound is inversely proportional
    # to the distance.
    gain = np.sqrt(np.dot(late, late) / max(np.dot(direct, direct), 1e-12)) / distance
    response = np.concatenate([gain * direct, late]).astype(np.float32)
    # Not by scipy.signal, which takes every run half a second to import.
    num_points = scipy.fft.next_fast_len(len(waveform) + len(response) - 1, real=True)
    spectrum = scipy.fft.rfft(waveform, num_points) * scipy.fft.rfft(response, num_points)
    wet = scipy.fft.irfft(spectrum, num_points)[: len(waveform)]
    return _as_loud_as(waveform, wet).astype(np.float32)


def _as_loud_as(waveform: np.ndarray, wet: np.ndarray) -> np.ndarray:
    """Scale to equal loudness, so that the room changes and the level does not."""
    # Digital silence would otherwise be divided by zero.
    loudness = np.sqrt(np.mean(np.square(wet))) or 1.0
    return wet * (np.sqrt(np.mean(np.square(waveform))) / loudness)


def _through(sample_rate: int, *channels: Callable[[Tensor, int], Tensor]) -> Transform:
    """A transform by these channels, one after the other."""

    def transmit(waveform: np.ndarray, _row: int) -> np.ndarray:
        batch = torch.from_numpy(waveform.astype(np.float32))[None]  # (1, samples)
        for channel in channels:
            batch = channel(batch, sample_rate)
        return batch[0].numpy()

    return transmit


def _encode_waveform(
    sample_rate: int, coding: Coding, waveform: np.ndarray, _row: int
) -> np.ndarray:
    batch = torch.from_numpy(waveform.astype(np.float32, copy=True))[None]  # (1, samples)
    encode_and_decode(batch, {0: coding}, sample_rate)
    return batch[0].numpy()
