"""A model file in use: recordings or features in, embeddings and decisions out.

Knows model files, audio and the network, no training and no configuration. Whoever has audio in a list with trials to
score goes through `speakernet.evaluation` instead; people who are known by their voice are kept by
`speakernet.inference.people`.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speakernet.data.audio import AudioError
from speakernet.evaluation.backend import mean_of_whole_utterances
from speakernet.evaluation.batching import Piece, Stretch, batches_of, padded
from speakernet.evaluation.embedding_store import weights_digest
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.inference.decision import Decision, DecisionRule
from speakernet.inference.people import PeopleStore
from speakernet.inference.quality import usable
from speakernet.inference.recordings import Array, Audio, Recording, is_array, open_recording
from speakernet.inference.streaming import SpeakerStream
from speakernet.machine.device import find_device
from speakernet.machine.options import MachineOptions
from speakernet.models.model_file import ModelFile, load_model_file

BATCH_SIZE = 16
"""Recordings that are embedded at once; long ones fill a batch on their own."""
TRACK_WINDOW_SECONDS, TRACK_HOP_SECONDS = 3.0, 1.0
MODELS_KEPT = 2
"""Model files that a process keeps: one in use, and one to compare it with or to go over to."""


@dataclass(frozen=True)
class Track:
    """Embeddings of one recording over time.

    Attributes:
        start_seconds: where each window begins, (windows,).
        stop_seconds: where it ends, (windows,).
        embeddings: (windows, dim) float32.
    """

    start_seconds: np.ndarray
    stop_seconds: np.ndarray
    embeddings: np.ndarray


def load(path: str | Path, device: torch.device | str = "auto", local_rank: int | None = None) -> "SpeakerVerifier":
    """A model file, our own or imported, ready to use.

    A file that has not changed is not read again: verifiers of one file share its network.

    Args:
        path: such as `exps/exp01/best.pt`; a checkpoint of another toolkit becomes a model file by
            `speakernet import-weights`.
        device: `cpu`, `cuda`, `cuda:1`, …; `auto` takes a GPU where there is one.
        local_rank: of one of several processes on this machine: for `auto` the number of its GPU.

    Raises:
        ValueError: not a model file, a damaged or newer one, or a device that is not here.
    """
    found = _device(device, local_rank)
    path = Path(path)
    if not path.is_file():
        # Says what is wrong with it, and keeps nothing.
        return SpeakerVerifier(load_model_file(path, found), found, str(path))
    state = path.stat()
    model = _read_once(path.resolve(), str(found), (state.st_size, state.st_mtime_ns, state.st_ino))
    return SpeakerVerifier(model, found, str(path))


@functools.lru_cache(maxsize=MODELS_KEPT)
def _read_once(path: Path, device: str, state: tuple[int, int, int]) -> ModelFile:
    """A model file in a state (size, time of change, number) that it is in now."""
    return load_model_file(path, device)


class SpeakerVerifier:
    """A trained network in evaluation mode, on one device, with the decisions of its model file.

    Embeddings are what the network's forward pass gives: not of unit length, no mean subtracted. They come as the
    input came: a tensor (on the CPU) for a tensor, else a numpy array. It may be used by several threads at once.

    Args:
        model: the file that was read, its network already on `device`.
        device: where it runs.
        name: of the file, for messages.

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
        self.net = model.net
        self.contents = model.contents
        self.embedding_net = model.folded
        """What embeds, with its batch norms merged; `net` has the weights of the file."""
        self.device = torch.device(device)
        self.name = name
        self.mean = mean_of_whole_utterances(model.contents)
        """(dim,), subtracted before scoring; None subtracts nothing."""
        self.rule = DecisionRule.of_model_file(model.contents, subtracts_mean=self.mean is not None, name=name)

    def __repr__(self) -> str:
        net = self.net
        return f"SpeakerVerifier({net.model_name}, {net.embedding_dim} numbers, {net.sample_rate} Hz, {self.device})"

    @property
    def embedding_dim(self) -> int:
        """Numbers in an embedding."""
        return self.net.embedding_dim

    @property
    def sample_rate(self) -> int:
        """Hz, of the waveforms that the network was trained on."""
        return self.net.sample_rate

    @property
    def num_features(self) -> int:
        """Numbers in a frame of features: mel bands, or 1 where the network hears samples."""
        return int(self.net.front_end.num_features)

    @property
    def is_calibrated(self) -> bool:
        """Whether `verify` decides without a threshold of the caller's."""
        return self.rule.is_calibrated

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over weights, architecture and front end: of what decides an embedding, and of nothing else.

        Calibrating a model file does not change it.
        """
        described = json.dumps(self.net.spec(), sort_keys=True)
        return hashlib.sha256((weights_digest(self.net.weights()) + described).encode()).hexdigest()

    def embed(self, audio: Audio | Sequence[Audio], *, sample_rate: int | None = None) -> Any:
        """The embedding of one recording, whole, or of each of a list.

        Recordings of more than three minutes are read and embedded in windows of a minute, whose mean is theirs.

        Args:
            audio: a file, or an array `(samples,)` or `(samples, channels)` as soundfile gives it, floating point in
                -1..1 or int16, or a list of these. Channels are mixed down.
            sample_rate: Hz, of the arrays; any rate, resampled to the network's. A file says its own.

        Returns:
            (1, dim) float32 for one recording, (recordings, dim) for a list.

        Raises:
            ValueError: audio that is missing, broken, of another shape or type, or shorter than the network can hear.
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
        """Embeddings over time: of windows that begin every `hop_seconds`, the last one at the recording's end.

        A recording shorter than a window is one window. Memory does not grow with a file's length.

        Raises:
            ValueError: as `embed`; windows that the network cannot hear, or no hop.
        """
        recording = self.open(audio, sample_rate)
        window = round(window_seconds * self.sample_rate) if window_seconds > 0 else 0
        hop = round(hop_seconds * self.sample_rate) if hop_seconds > 0 else 0
        if window < self.net.min_samples or hop < 1:
            shortest = self.net.min_samples / self.sample_rate
            raise ValueError(
                f"windows of {window_seconds} s every {hop_seconds} s; expected a window of {shortest:.3f} s or more "
                "and a hop above 0"
            )
        window = min(window, recording.num_samples)
        # The last window ends where the recording does, so that nothing of it is left out.
        starts = np.unique(
            np.append(np.arange(0, recording.num_samples - window + 1, hop), recording.num_samples - window)
        )
        pieces = (
            Piece(Stretch(row, int(start), window), recording.read(int(start), window)[None], np.zeros(1, np.int64))
            for row, start in enumerate(starts)
        )
        embeddings = self._embed_pieces(pieces, len(starts))
        return Track(starts / self.sample_rate, (starts + window) / self.sample_rate, embeddings.numpy())

    def embed_features(self, features: Array) -> Any:
        """The embeddings of features that were computed elsewhere; nothing is done to them.

        Args:
            features: (batch, frames, mels) floating point, as the published code feeds its network: with the mean
                removed where it removes it.

        Returns:
            (batch, dim) float32.

        Raises:
            ValueError: another shape, other numbers than floating-point ones, NaN, or fewer frames than the network can
                hear.
        """
        tensor = torch.as_tensor(features)
        shape = tuple(tensor.shape)
        if tensor.ndim != 3 or shape[2] != self.num_features or 0 in shape:
            is_turned = tensor.ndim == 3 and shape[1] == self.num_features
            raise ValueError(
                f"features of shape {shape}; expected (batch, frames, {self.num_features})"
                f"{': transpose the last two axes' if is_turned else ''}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"features of type {tensor.dtype}; expected floating point")
        tensor = tensor.to(self.device, torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError("features with NaN or infinite values; expected finite ones")
        with torch.inference_mode():
            return _like(features, self.embedding_net.from_features(tensor.transpose(1, 2)))

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
            second: likewise.
            sample_rate: Hz, of arrays.
            false_accept_rate: decide at the threshold of the model file that is named by it, such as 0.01.
            threshold: decide at this score, or at a named threshold (`DecisionRule.decide`).

        Raises:
            ValueError: as `embed`; a recording that is silent or shorter than a syllable; `NotCalibratedError` where
                the model file holds no such threshold.
        """
        # Before anything is embedded, not after.
        self.rule.decide(0.0, false_accept_rate=false_accept_rate, threshold=threshold)
        recordings = [self.open(audio, sample_rate if is_array(audio) else None) for audio in (first, second)]
        # Both before either is embedded.
        one, other = map(self.embed, [usable(recording) for recording in recordings])
        return self.decide(self.compare(one, other), false_accept_rate=false_accept_rate, threshold=threshold)

    def compare(self, first: Array, second: Array) -> float:
        """The score of two embeddings, (dim,) or (1, dim) each: their cosine, less the model file's mean.

        Raises:
            ValueError: embeddings of another size.
        """
        rows = [np.asarray(one, dtype=np.float32).reshape(-1) for one in (first, second)]
        for row in rows:
            if len(row) != self.embedding_dim:
                raise ValueError(f"an embedding of {len(row)} numbers; those of this model have {self.embedding_dim}")
        one, other = mean_embeddings(np.stack(rows), self.mean)
        return float(np.dot(one, other))

    def decide(
        self, score: float, *, false_accept_rate: float | None = None, threshold: float | str | None = None
    ) -> Decision:
        """What a score says; see `DecisionRule.decide`.

        Raises:
            NotCalibratedError: the model file holds no such threshold.
        """
        return self.rule.decide(score, false_accept_rate=false_accept_rate, threshold=threshold)

    def people(
        self, path: str | os.PathLike, key: str | bytes | None = None, *, must_exist: bool = False
    ) -> PeopleStore:
        """A store of people by their voice, as this network hears it; made if it is missing.

        Args:
            path: of the file, such as `people.db`.
            key: encrypts the embeddings; the same one is needed ever after.
            must_exist: refuse a missing or empty file.

        Raises:
            StoreError: no store, damaged, or of another model; `StoreKeyError` for the wrong key.
        """
        return PeopleStore(
            path,
            fingerprint=self.fingerprint,
            embedding_dim=self.embedding_dim,
            key=key,
            mean=self.mean,
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
    ) -> SpeakerStream:
        """Speech that comes in chunks: after each second its embedding, and whether it is the enrolled speaker.

        Args:
            sample_rate: Hz, of the chunks.
            enrolled: (dim,) or (1, dim), as `embed` gives it; None only embeds.
            false_accept_rate: as `decide` takes it.
            threshold: likewise.

        Raises:
            ValueError: a rate that none is, or an embedding or threshold that the model does not have.

        >>> from speakernet.models.speaker_net import SpeakerNet
        >>> verifier = SpeakerVerifier(ModelFile(SpeakerNet.named("ResNet", embedding_dim=8).eval(), {}))
        >>> stream = verifier.stream(8000)
        >>> clip = np.sin(np.arange(10000) / 20).astype(np.float32)
        >>> [state.seconds for state in stream.add(clip) + stream.add(clip)]
        [1.0, 2.0]
        """
        return SpeakerStream(self, sample_rate, enrolled, false_accept_rate=false_accept_rate, threshold=threshold)

    def open(self, audio: Audio, sample_rate: int | None = None) -> Recording:
        """A recording as this network hears it; of a file only the header is read.

        Raises:
            AudioError: missing, broken, or shorter than the network can hear.
        """
        recording = open_recording(audio, sample_rate, self.sample_rate)
        if recording.num_samples < (shortest := self.net.min_samples):
            named = f"{recording.name}: " if recording.file else ""
            raise AudioError(
                f"{named}{recording.seconds:.3f} s of audio is too short: {self.net.model_name} needs "
                f"{shortest / self.sample_rate:.3f} s or more ({shortest} samples at {self.sample_rate} Hz)"
            )
        return recording

    def _embed_recordings(self, recordings: Sequence[Recording]) -> Tensor:
        """(recordings, dim) on the CPU; those of like length share a batch."""
        order = np.argsort([one.num_samples for one in recordings], kind="stable")
        pieces = (piece for row in order.tolist() for piece in recordings[row].pieces(row))
        return self._embed_pieces(pieces, len(recordings))

    def _embed_pieces(self, pieces: Any, num_rows: int) -> Tensor:
        """The mean embedding of each row's pieces, (rows, dim) on the CPU."""
        values = torch.zeros(num_rows, self.embedding_dim)
        for batch in batches_of(pieces, BATCH_SIZE, self.sample_rate):
            waveforms, lengths = padded([piece.waveforms[index] for piece, index in batch])
            given = waveforms.to(self.device), lengths
            embedded = self.embedding_net.embed(*given, sample_rate=self.sample_rate).float().cpu()
            for (piece, _), embedding in zip(batch, embedded, strict=True):
                values[piece.stretch.row] += embedding / piece.stretch.num_windows
        if not bool(torch.isfinite(values).all()):
            raise AudioError(f"{self.name} gives an embedding with NaN or infinite values; expected finite ones")
        return values


def _like(given: Any, embeddings: Tensor) -> Any:
    """The embeddings as a tensor where one was given, else as a numpy array."""
    # A copy made outside of inference mode: what is kept of it may be trained on.
    with torch.inference_mode(False):
        found = embeddings.float().cpu().clone()
    return found if isinstance(given, Tensor) else found.numpy()


def _device(asked: torch.device | str, local_rank: int | None) -> torch.device:
    """The device that is meant, if it is here.

    Raises:
        ValueError: no such device.
    """
    if asked == "auto":
        return find_device(MachineOptions(), local_rank)
    # By its text: torch keeps the number in one byte, so that cuda:257 would be the second GPU.
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", str(asked))
    if match is None:
        raise ValueError(f"device {asked!r}; expected auto, cpu, cuda or cuda:1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if match[0] != "cpu" and int(match[1] or 0) >= count:
        raise ValueError(f"device {asked!r}, but torch finds {count} GPUs here; use auto or cpu")
    return torch.device(match[0])
