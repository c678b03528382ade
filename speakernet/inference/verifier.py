"""A model file in use: recordings or features in, embeddings, decisions and streams of decisions out.

Knows model files, audio and the network, no training and no configuration. Lists of trials are scored by
`speakernet.evaluation`. People known by their voice are enrolled and identified here and kept by
`speakernet.inference.people`: a recording is inspected first, and little speech, noise, clipping, or a voice unlike the
person's other ones are warned about, or refused.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from speakernet.data.audio import AudioError, audio_of_array
from speakernet.evaluation.embedding import Stretch, batches_of, padded, weights_digest
from speakernet.evaluation.results import html_table
from speakernet.evaluation.scoring import mean_embeddings, mean_of_whole_utterances, pair_scores, plda_of
from speakernet.inference.decision import Decision, DecisionRule
from speakernet.inference.identification import Identification, identify_embedding, open_set_threshold
from speakernet.inference.people import TOP, PeopleStore, checked_name
from speakernet.inference.recordings import (
    LEAST_WEIGHT_SECONDS,
    MOST_SPEECH_SECONDS,
    Array,
    Audio,
    Quality,
    Recording,
    inspect_recording,
    open_recording,
    usable,
)
from speakernet.machine.device import find_device
from speakernet.machine.options import MachineOptions
from speakernet.models.model_file import ModelFile, load_model_file
from speakernet.models.speaker_net import folded

if TYPE_CHECKING:
    from speakernet.inference.who.conversation import Conversation

BATCH_SIZE = 16
"""Recordings that are embedded at once; a long one is a batch of its own."""
TRACK_WINDOW_SECONDS, TRACK_HOP_SECONDS = 3.0, 1.0
STEP_SECONDS = 1.0
"""How often a stream has a new state."""
WINDOW_SECONDS = 10.0
"""A stream embeds so much at once; what came before counts by its embedding."""
SAME_COSINE = 0.99999
"""Embeddings of one recording in different batches are at least this close."""


@dataclass(frozen=True)
class Track:
    """Embeddings of one recording over time.

    Attributes:
        start_seconds: of each window, (windows,).
        stop_seconds: of each window, (windows,).
        embeddings: (windows, dim) float32.
    """

    start_seconds: np.ndarray
    stop_seconds: np.ndarray
    embeddings: np.ndarray


@dataclass(frozen=True)
class StreamState:
    """What is known after so many seconds of a stream.

    Attributes:
        seconds: received.
        embedding: (1, dim) of all of them, as the network gives it.
        score: cosine with the enrolled embedding; None if nobody is enrolled.
        decision: of that score; None if nobody is enrolled, or without calibration and threshold.
    """

    seconds: float
    embedding: np.ndarray
    score: float | None = None
    decision: Decision | None = None


@dataclass(frozen=True)
class Enrolment:
    """What came of an enrolment."""

    name: str
    added: int
    total: int
    qualities: tuple[Quality, ...]
    warnings: tuple[str, ...]


def load(path: str | Path, device: torch.device | str = "auto", local_rank: int | None = None) -> "SpeakerVerifier":
    """A model file, our own or imported, ready to use.

    Args:
        path: such as `exps/exp01/best.pt`; `speakernet import-weights` makes a model file of other checkpoints.
        device: `cpu`, `cuda`, `cuda:1`, …; `auto` takes a GPU if there is one.
        local_rank: the rank on this machine, if there are several: for `auto` the number of its GPU.

    Raises:
        ValueError: not a model file, a damaged or newer one, or a device that is not here.
    """
    found = _device(device, local_rank)
    return SpeakerVerifier(load_model_file(path, found), found, str(path))


class SpeakerVerifier:
    """A trained network in evaluation mode, on one device, with the decisions of its model file.

    Embeddings are what the network gives: not of unit length, no mean subtracted. They have the kind of the input: a
    tensor (on the CPU) for a tensor, else a numpy array. Several threads may use it.

    Args:
        model: the file that was read, its network already on `device`.
        device: where it runs.
        name: of the file, for messages.

    Examples:
        >>> from speakernet.models.speaker_net import SpeakerNet
        >>> verifier = SpeakerVerifier(ModelFile(SpeakerNet.named("ResNet", embedding_dim=8).eval(), {}))
        >>> clip = np.sin(np.arange(16000) / 20).astype(np.float32)
        >>> verifier.embed(clip, sample_rate=16000).shape, verifier.embed([clip, clip], sample_rate=16000).shape
        ((1, 8), (2, 8))
        >>> verifier.embed_features(torch.zeros(3, 200, verifier.num_features)).shape
        torch.Size([3, 8])
        >>> verifier.embed_track(clip, sample_rate=16000, window_seconds=0.5, hop_seconds=0.25).start_seconds.tolist()
        [0.0, 0.25, 0.5]
        >>> verifier.verify(clip, clip, sample_rate=16000, threshold=0.5).same_speaker
        True
    """

    def __init__(self, model: ModelFile, device: torch.device | str = "cpu", name: str = "model.pt") -> None:
        self.net, self.contents, self.device, self.name = model.net, model.contents, torch.device(device), name
        self.embedding_net = folded(model.net)
        """The same network with its batch norms merged, for embedding; `net` has the weights of the file."""
        self.embedding_dim, self.sample_rate = self.net.embedding_dim, self.net.sample_rate
        """Numbers in an embedding, and Hz of the waveforms that the network was trained on."""
        self.num_features = int(self.net.front_end.num_features)
        """Numbers in a frame of features: mel bands, or 1 for a network of raw samples."""
        self.mean = mean_of_whole_utterances(model.contents)
        """(dim,), subtracted before scoring; None subtracts nothing."""
        self.plda = plda_of(model.contents)
        """Compares in place of the cosine; None in all files but adapted ones."""
        self.rule = DecisionRule.of_model_file(model.contents, subtracts_mean=self.mean is not None, name=name)
        self.is_calibrated = bool(self.rule.thresholds)
        """Whether `verify` decides without a threshold of the caller's."""

    def _repr_html_(self) -> str:
        """What it is, in notebooks."""
        thresholds = [(f"threshold {one['name']}", f"{one['threshold']:.4f}") for one in self.rule.thresholds]
        rows = [("file", self.name), ("network", self.net.model_name), ("embedding", f"{self.embedding_dim} numbers")]
        return html_table([*rows, ("sample rate", f"{self.sample_rate} Hz"), ("device", self.device), *thresholds])

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over weights, architecture and front end: what decides an embedding, not the calibration."""
        described = json.dumps(self.net.spec(), sort_keys=True)
        return hashlib.sha256((weights_digest(self.net.weights()) + described).encode()).hexdigest()

    def embed(self, audio: Audio | Sequence[Audio], *, sample_rate: int | None = None) -> Any:
        """The embedding of one recording, whole, or of each of a list.

        Recordings of more than three minutes are read and embedded in windows of a minute, whose mean is theirs.

        Args:
            audio: a file, or an array `(samples,)` or `(samples, channels)` as soundfile gives it, floating point in
                -1..1 or int16, or a list of these. Channels are mixed down.
            sample_rate: Hz, of the arrays; any rate, resampled to the network's. Files have their own.

        Returns:
            (1, dim) float32 for one recording, (recordings, dim) for a list.

        Raises:
            ValueError: audio that is missing, broken, of another shape or type, or too short for the network.
        """
        several: list[Any] = list(audio) if isinstance(audio, list | tuple) else [audio]
        recordings = [self.open(one, sample_rate) for one in several]
        return _like(several[0] if several else None, self._embed_recordings(recordings))

    def embed_track(
        self,
        audio: Audio,
        *,
        sample_rate: int | None = None,
        window_seconds: float = TRACK_WINDOW_SECONDS,
        hop_seconds: float = TRACK_HOP_SECONDS,
    ) -> Track:
        """Embeddings over time: of a window every `hop_seconds`, the last one at the recording's end.

        A recording shorter than a window is one window. Memory does not grow with a file's length.

        Raises:
            ValueError: as `embed`; windows too short for the network, or no hop.
        """
        recording = self.open(audio, sample_rate)
        window, hop = (round(max(0.0, seconds) * self.sample_rate) for seconds in (window_seconds, hop_seconds))
        if window < self.net.min_samples or hop < 1:
            shortest = self.net.min_samples / self.sample_rate
            raise ValueError(
                f"windows of {window_seconds} s every {hop_seconds} s; expected a window of {shortest:.3f} s or more "
                "and a hop above 0"
            )
        window = min(window, recording.num_samples)
        last = recording.num_samples - window
        # The last window ends with the recording, so that nothing is left out.
        starts = np.unique(np.append(np.arange(0, last + 1, hop), last))
        stops = starts + window
        embeddings = self.embed_windows(recording, zip(starts.tolist(), stops.tolist(), strict=True), len(starts))
        return Track(starts / self.sample_rate, stops / self.sample_rate, embeddings)

    def embed_windows(self, recording: Recording, windows: Iterable[tuple[int, int]], num_windows: int) -> np.ndarray:
        """Embeddings of so many stretches of a recording, (first, last + 1) sample each: (windows, dim) float32."""
        pieces = (
            (Stretch(row, start, stop - start), recording.read(start, stop - start))
            for row, (start, stop) in enumerate(windows)
        )
        return self._embed_pieces(pieces, num_windows).numpy()

    def embed_features(self, features: Array) -> Any:
        """The embeddings of features that were computed elsewhere, which are used as they are.

        Args:
            features: (batch, frames, mels) floating point, as the published code feeds its network: with the mean
                removed if it removes it.

        Returns:
            (batch, dim) float32.

        Raises:
            ValueError: another shape or type, NaN, or fewer frames than the network needs.
        """
        tensor = torch.as_tensor(features)
        shape, kind = tuple(tensor.shape), tensor.dtype
        is_fine = tensor.ndim == 3 and shape[2] == self.num_features and 0 not in shape and kind.is_floating_point
        if not is_fine or not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"features of shape {shape} and type {kind}; expected (batch, frames, {self.num_features}) finite "
                "floating-point values"
            )
        with torch.inference_mode():
            given = tensor.to(self.device, torch.float32).transpose(1, 2)
            return _like(features, self.embedding_net.from_features(given))

    def verify(
        self,
        first: Audio,
        second: Audio,
        *,
        sample_rate: int | None = None,
        false_accept_rate: float | None = None,
        threshold: float | str | None = None,
    ) -> Decision:
        """Whether two recordings are of one speaker, and how sure that is.

        Args:
            first: a file or an array, as `embed` takes it.
            second: another one.
            sample_rate: Hz, of arrays.
            false_accept_rate: decide at the threshold of the model file with this name, such as 0.01.
            threshold: decide at this score, or at a named threshold (`DecisionRule.decide`).

        Raises:
            ValueError: as `embed`; a recording that is silent or shorter than a syllable; `NotCalibratedError` if the
                model file has no such threshold.
        """
        limits: dict[str, Any] = {"false_accept_rate": false_accept_rate, "threshold": threshold}
        # Before anything is embedded, not after.
        self.rule.decide(0.0, **limits)
        recordings = [usable(self.open(audio, sample_rate)) for audio in (first, second)]
        embeddings = [self.embed(one) for one in recordings]
        return self.rule_for(recordings, embeddings).decide(self.compare(*embeddings), **limits)

    def rule_for(self, recordings: Sequence[Recording], embeddings: Sequence[Array]) -> DecisionRule:
        """The rule for two recordings: by their qualities too, if the model file has such a calibration."""
        if self.rule.quality is None:
            return self.rule
        values = {
            "duration": np.array([one.seconds for one in recordings]),
            "magnitude": np.array([np.linalg.norm(np.asarray(one)) for one in embeddings]),
            "snr": np.array([inspect_recording(one).snr_db for one in recordings]),
        }
        return self.rule.for_pair(values)

    def compare(self, first: Array, second: Array) -> float:
        """The score of two embeddings, (dim,) or (1, dim) each: their cosine, less the model file's mean, or PLDA's."""
        rows = [np.asarray(one).reshape(-1) for one in (first, second)]
        if lengths := [len(row) for row in rows if len(row) != self.embedding_dim]:
            raise ValueError(f"an embedding of {lengths[0]} numbers; those of this model have {self.embedding_dim}")
        # Not narrowed to float32, which holds no 1e300; nor left as float16, whose squares overflow.
        wide = [row.astype(np.result_type(row, np.float32)) for row in rows]
        one, other = mean_embeddings(np.stack(wide), self.mean)
        if self.plda is not None:
            return float(pair_scores(one[None], other[None], self.plda)[0, 0])
        # Of rounded unit vectors: it may come out as 1.0000001.
        return float(np.clip(np.dot(one, other), -1.0, 1.0))

    def decide(
        self, score: float, *, false_accept_rate: float | None = None, threshold: float | str | None = None
    ) -> Decision:
        """The decision about a score; see `DecisionRule.decide`."""
        return self.rule.decide(score, false_accept_rate=false_accept_rate, threshold=threshold)

    def people(
        self, path: str | os.PathLike, key: str | bytes | None = None, *, must_exist: bool = False
    ) -> PeopleStore:
        """A store of people for this network; made if it is missing.

        Args:
            path: of the file, such as `people.db`.
            key: encrypts the embeddings; the same one is needed ever after.
            must_exist: refuse a missing or empty file.

        Raises:
            StoreError: not a store, damaged, or of another model; `StoreKeyError` for the wrong key.
        """
        return PeopleStore(
            path,
            fingerprint=self.fingerprint,
            embedding_dim=self.embedding_dim,
            key=key,
            mean=self.mean,
            plda=self.plda,
            model=self.name,
            must_exist=must_exist,
        )

    def stream(
        self,
        sample_rate: int,
        enrolled: Array | None = None,
        *,
        false_accept_rate: float | None = None,
        threshold: float | str | None = None,
    ) -> "SpeakerStream":
        """Speech that comes in chunks: after each second its embedding, and whether it is the enrolled speaker.

        Args:
            sample_rate: Hz, of the chunks.
            enrolled: (dim,) or (1, dim), as `embed` gives it; None only embeds.
            false_accept_rate: as for `decide`.
            threshold: as for `decide`.

        Raises:
            ValueError: a bad rate, embedding or threshold.

        Examples:
            >>> from speakernet.models.speaker_net import SpeakerNet
            >>> verifier = SpeakerVerifier(ModelFile(SpeakerNet.named("ResNet", embedding_dim=8).eval(), {}))
            >>> stream = verifier.stream(8000)
            >>> clip = np.sin(np.arange(10000) / 20).astype(np.float32)
            >>> [state.seconds for state in stream.add(clip) + stream.add(clip)]
            [1.0, 2.0]
        """
        return SpeakerStream(
            self, sample_rate, enrolled, {"false_accept_rate": false_accept_rate, "threshold": threshold}
        )

    def who(
        self,
        audio: Audio,
        store: PeopleStore | None = None,
        *,
        sample_rate: int | None = None,
        **how: Any,
    ) -> "Conversation":
        """Who speaks when in a recording, with the names of a store's people (docs/who.md).

        Args:
            audio: a file or an array, as `embed` takes it; memory hardly grows with a file's length.
            store: of people; None names nobody.
            sample_rate: Hz, of an array.
            how: `num_speakers`; `max_speakers`, 10 by default; `threshold`, or `false_accept_rate`, 0.05 by default.

        Raises:
            ValueError: as `embed`; more speakers than windows of speech; no threshold for names.
        """
        # Only here: it loads clustering and silero-vad.
        from speakernet.inference.who.conversation import who_speaks

        return who_speaks(self, self.open(audio, sample_rate), store, **how)

    def open(self, audio: Audio, sample_rate: int | None = None) -> Recording:
        """A recording for this network; of a file only the header is read."""
        recording = open_recording(audio, sample_rate, self.sample_rate)
        if recording.num_samples < (shortest := self.net.min_samples):
            raise AudioError(
                f"{recording.name}: {recording.seconds:.3f} s of audio is too short: {self.net.model_name} needs "
                f"{shortest / self.sample_rate:.3f} s or more ({shortest} samples at {self.sample_rate} Hz)"
            )
        return recording

    def _embed_recordings(self, recordings: Sequence[Recording]) -> Tensor:
        """(recordings, dim) on the CPU; those of similar length share a batch."""
        order = np.argsort([one.num_samples for one in recordings], kind="stable")
        pieces = (piece for row in order.tolist() for piece in recordings[row].pieces(row))
        return self._embed_pieces(pieces, len(recordings))

    def _embed_pieces(self, pieces: Iterable[tuple[Stretch, np.ndarray]], num_rows: int) -> Tensor:
        """The mean embedding of each row's pieces, (rows, dim) on the CPU."""
        values = torch.zeros(num_rows, self.embedding_dim)
        items = ((piece, len(piece[1]), piece[0].num_windows > 1) for piece in pieces)
        for batch, _ in batches_of(items, BATCH_SIZE, self.sample_rate):
            waveforms, lengths = padded([waveform for _, waveform in batch])
            given = waveforms.to(self.device), lengths
            embedded = self.embedding_net.embed(*given, sample_rate=self.sample_rate).float().cpu()
            for (stretch, _), embedding in zip(batch, embedded, strict=True):
                values[stretch.row] += embedding / stretch.num_windows
        if not bool(torch.isfinite(values).all()):
            raise AudioError(f"{self.name} gives an embedding with NaN or infinite values; expected finite ones")
        return values


class SpeakerStream:
    """One stream of audio from its first sample; `SpeakerVerifier.stream` makes it. Not for several threads.

    What came so far is embedded as a whole, as a recording of it would be; of a longer stream each window of ten
    seconds is embedded once, and the embeddings are averaged by their length. Memory does not grow with the stream.
    """

    def __init__(
        self, verifier: SpeakerVerifier, sample_rate: int, enrolled: Array | None, limits: dict[str, Any]
    ) -> None:
        # Refused now, not after the first second.
        audio_of_array(np.zeros(1, dtype=np.float32), sample_rate, sample_rate)
        self.verifier, self.sample_rate, self.enrolled, self.limits = verifier, int(sample_rate), enrolled, limits
        self.decides = verifier.is_calibrated or any(value is not None for value in limits.values())
        if enrolled is not None:
            verifier.compare(enrolled, enrolled)
        if self.decides:
            verifier.decide(0.0, **limits)
        self._chunks: list[np.ndarray] = []
        """Samples of the window that is not full."""
        self._num_samples, self._closed_seconds = 0, 0.0
        self._closed_sum: np.ndarray = np.zeros((1, verifier.embedding_dim), dtype=np.float32)
        """Embeddings of full windows times their seconds."""

    @property
    def seconds(self) -> float:
        """Received so far."""
        return self._closed_seconds + self._num_samples / self.sample_rate

    def add(self, chunk: Any) -> list[StreamState]:
        """Take more samples; gives a state for each second that became full.

        Args:
            chunk: (samples,) or (samples, channels) of any length, floating point in -1..1 or int16.

        Raises:
            AudioError: another type or shape, NaN, or samples far beyond -1..1; the chunk is left out then.
        """
        chunk = np.asarray(chunk)
        if chunk.size == 0:
            return []
        # At its own rate: resampled chunk by chunk, every seam would click.
        samples = audio_of_array(chunk, self.sample_rate, self.sample_rate)
        states, step = [], round(STEP_SECONDS * self.sample_rate)
        for part in np.split(samples, range(step - self._num_samples % step, len(samples), step)):
            self._chunks.append(part)
            self._num_samples += len(part)
            if self._num_samples % step == 0:
                states.append(self._state())
                if self._num_samples >= round(WINDOW_SECONDS * self.sample_rate):
                    # Its embedding is kept instead of its samples.
                    self._closed_seconds = self.seconds
                    self._closed_sum = states[-1].embedding * self._closed_seconds
                    self._chunks, self._num_samples = [], 0
        return states

    def finish(self) -> StreamState:
        """The state after everything that came, also the last part of a second."""
        if not self.seconds:
            raise AudioError("the stream held no samples; is the microphone on, or the file empty?")
        return self._state()

    def _state(self) -> StreamState:
        total, seconds = self._closed_sum, self._closed_seconds
        if self._num_samples:
            try:
                embedding = self.verifier.embed(np.concatenate(self._chunks), sample_rate=self.sample_rate)
                total, seconds = total + embedding * (self.seconds - seconds), self.seconds
            except AudioError:
                # After full windows the last moment may be too short for the network, and changes nothing.
                if not seconds:
                    raise
        score = None if self.enrolled is None else self.verifier.compare(total / seconds, self.enrolled)
        decision = None if score is None or not self.decides else self.verifier.decide(score, **self.limits)
        return StreamState(self.seconds, total / seconds, score, decision)


def enroll(
    verifier: SpeakerVerifier,
    store: PeopleStore | Callable[[], PeopleStore],
    name: str,
    recordings: Sequence[Audio],
    *,
    sample_rate: int | None = None,
    is_strict: bool = False,
) -> Enrolment:
    """Add recordings of a person to a store, or to a new one that a callable makes; all of them, or none.

    A new store is made when there is something to write: refused recordings leave no empty one.
    """
    existing = store if isinstance(store, PeopleStore) else None
    name = checked_name(name)
    if not len(recordings):
        raise AudioError(f"no recording of {name!r} was given; expected one or more")
    opened = [verifier.open(one, sample_rate) for one in recordings]
    qualities = [inspect_recording(one) for one in opened]
    warnings = [f"{one.name}: {text}" for one in qualities for text in one.warnings]
    embeddings = np.asarray(verifier.embed(opened))
    there = existing.recordings(name) if existing else []
    kept = np.array([one.embedding for one in there], dtype=np.float32).reshape(-1, verifier.embedding_dim)
    known = {one.digest for one in there}
    # Stores of 0.2.0 have no digests: there a recording is known by its embedding.
    old = mean_embeddings(kept[np.array([not one.digest for one in there], dtype=bool)])
    limit = verifier.decide(0.0, threshold="eer" if verifier.is_calibrated else "default").threshold
    everything, rows = np.concatenate([embeddings, kept]), []
    for row, (quality, unit) in enumerate(zip(qualities, mean_embeddings(embeddings), strict=True)):
        if quality.digest in known or (old @ unit > SAME_COSINE).any():
            warnings.append(f"{quality.name}: enrolled before as {name!r}, left out")
        else:
            rows.append(row)
        known.add(quality.digest)
        scores = [verifier.compare(everything[row], one) for one in np.delete(everything, row, axis=0)]
        # The median: one wrong recording must not accuse all others.
        if scores and (score := float(np.median(scores))) < limit:
            warnings.append(
                f"{quality.name}: does not sound like the person's other recordings (score {score:.4f}; expected "
                f"{limit:.4f} or more)"
            )
    nearest = existing.identify(embeddings.mean(axis=0), top=2) if existing else []
    others = [(other, score) for other, score in nearest if other != name]
    if others and others[0][1] >= limit:
        warnings.append(f"{name}: sounds like {others[0][0]!r}, who is enrolled already (score {others[0][1]:.2f})")
    if warnings and is_strict:
        raise AudioError(f"nothing was enrolled: {'; '.join(warnings)}")
    weights = [min(max(qualities[row].speech_seconds, LEAST_WEIGHT_SECONDS), MOST_SPEECH_SECONDS) for row in rows]
    details = [
        {
            "source": str(file.absolute()) if (file := opened[row].file) else "",
            "seconds": qualities[row].seconds,
            "speech_seconds": qualities[row].speech_seconds,
            "warnings": "; ".join(qualities[row].warnings),
            "digest": qualities[row].digest,
        }
        for row in rows
    ]
    written = store if isinstance(store, PeopleStore) else store()
    total = written.enroll(name, embeddings[rows], weights, details) if rows else len(kept)
    return Enrolment(name, len(rows), total, tuple(qualities), tuple(warnings))


def identify(
    verifier: SpeakerVerifier,
    store: PeopleStore,
    audio: Audio,
    *,
    sample_rate: int | None = None,
    top: int = TOP,
    false_accept_rate: float | None = None,
    threshold: float | str | None = None,
) -> Identification:
    """Who of the people in a store a recording is, or a stranger.

    With N people a stranger is compared N times. `false_accept_rate` is meant for all of these together: of single
    comparisons at most its N-th part may be wrong. The lowest threshold of the model file that keeps this is used; if
    none does, the strictest one, and `stranger_rate` is what it keeps. Odds below 1 never name anybody, unless
    `threshold` is given.
    """
    # Before anything is embedded, not after.
    open_set_threshold(verifier.rule, len(store), false_accept_rate, threshold)
    embedding = verifier.embed(usable(verifier.open(audio, sample_rate)))
    limits: dict[str, Any] = {"false_accept_rate": false_accept_rate, "threshold": threshold}
    return identify_embedding(verifier.rule, store, embedding, top=top, **limits)


def _like(given: Any, embeddings: Tensor) -> Any:
    """The embeddings as a tensor if one was given, else as a numpy array."""
    # A copy made outside of inference mode: what is kept of it may be trained on.
    with torch.inference_mode(False):
        found = embeddings.float().cpu().clone()
    return found if isinstance(given, Tensor) else found.numpy()


def _device(wanted: torch.device | str, local_rank: int | None) -> torch.device:
    """The device of this name, if it is here."""
    if wanted == "auto":
        return find_device(MachineOptions(), local_rank)
    count = torch.cuda.device_count()
    # By its text: torch keeps the number in one byte, so that cuda:257 would be the second GPU.
    if str(wanted) not in ("cpu", *["cuda"][:count], *(f"cuda:{number}" for number in range(count))):
        raise ValueError(f"device {wanted!r}; expected auto, cpu, cuda or cuda:1 (torch finds {count} GPUs here)")
    return torch.device(str(wanted))
