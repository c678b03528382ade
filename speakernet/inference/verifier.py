"""Use a model file: from recordings or features to embeddings, decisions and streams of decisions.

This file uses model files, audio and the network, but no training code and no configuration;
`speakernet.evaluation` scores trial lists. People are enrolled and identified here and stored by
`speakernet.inference.people`. For a decision, a recording goes through `SpeakerVerifier.hear`:
without speech it is refused, otherwise its speech alone is embedded. Too little speech, noise,
clipping, or a voice unlike the person's other recordings cause a warning.
"""

import copy
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from speakernet.data.audio import AudioError, NoSpeechError
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.data.windows import Stretch
from speakernet.evaluation.embedding import (
    Forward,
    batches_of,
    embed_utterances,
    pad,
    prepare_waveform,
    weights_digest,
)
from speakernet.evaluation.scoring import (
    VERIFYING,
    WHOLE,
    mean_embeddings,
    mean_of_whole_utterances,
    pair_scores,
    plda_of,
)
from speakernet.inference.decision import MIN_TEST_SECONDS, Decision, DecisionLimits, DecisionRule
from speakernet.inference.enrolment import enroll, weight_of
from speakernet.inference.identification import identify
from speakernet.inference.people import PeopleStore, StoreModel
from speakernet.inference.recordings import (
    Array,
    Audio,
    Heard,
    Recording,
    array_of,
    inspect_recording,
    open_recording,
)
from speakernet.inference.streams import SpeakerStream
from speakernet.machine.device import find_device
from speakernet.machine.memory import bound_compiled_shapes
from speakernet.machine.options import MachineOptions
from speakernet.machine.threads import use_one_thread_after_fork
from speakernet.models.model_file import ModelFile, load_model_file, model_of, voices_caution
from speakernet.models.speaker_net import SpeakerNet, fold_batch_norms, fold_network
from speakernet.terminal import Bar

if TYPE_CHECKING:
    from speakernet.inference.who.conversation import Conversation

__all__ = ["SpeakerVerifier", "Track", "enroll", "identify", "load"]

logger = logging.getLogger(__name__)

BATCH_SIZE = 16
"""Recordings embedded at once; a long one is a batch by itself."""
TRACK_WINDOW_SECONDS = 3.0
TRACK_HOP_SECONDS = 1.0
SPEECH_WORDS = {"detected": "detected speech", "whole": "whole recordings"}


@dataclass(frozen=True)
class Track:
    """Embeddings of a recording over time.

    Attributes:
        start_seconds: start of each window, (windows,).
        stop_seconds: end of each window, (windows,).
        embeddings: (windows, dim) float32.
    """

    start_seconds: np.ndarray
    stop_seconds: np.ndarray
    embeddings: np.ndarray


def load(
    path: str | Path, device: torch.device | str = "auto", local_rank: int | None = None
) -> "SpeakerVerifier":
    """Load a model file, trained here or imported.

    Args:
        path: such as `exps/exp01/best.pt`; `speakernet import-weights` converts other checkpoints
            to model files.
        device: `cpu`, `cuda`, `cuda:1`, …; `auto` uses a GPU if there is one.
        local_rank: the rank on this machine if there are several; with `auto`, it is the number of
            the GPU.

    Raises:
        ValueError: the file is not a model file, is damaged or newer, or the device does not exist.
    """
    # On a CPU each new length of audio would otherwise keep memory: 300 lengths took 327 MB.
    bound_compiled_shapes()
    chosen_device = _device(device, local_rank)
    model = load_model_file(path, chosen_device)
    return SpeakerVerifier(model, chosen_device, str(path), is_model_kept=False)


class SpeakerVerifier:
    """A trained network in evaluation mode on one device, with the thresholds of its model file.

    Embeddings are the network's raw output: not of unit length, and no mean subtracted. A tensor
    gives a tensor (on the CPU), any other input a numpy array. Several threads may use a verifier.

    Args:
        model: the loaded file, with its network already on `device`.
        device: where the network runs.
        name: name of the file, for messages.
        is_model_kept: leave `model.net` as it is; otherwise its batch norms are folded in place,
            which is faster than in a copy.

    Examples:
        >>> from speakernet.models.speaker_net import SpeakerNet
        >>> net = SpeakerNet.named("ResNet", embedding_dim=8).eval()
        >>> verifier = SpeakerVerifier(ModelFile(net, {}))
        >>> clip = np.sin(np.arange(16000) / 20).astype(np.float32)
        >>> verifier.embed([clip, clip], sample_rate=16000).shape
        (2, 8)
        >>> verifier.embed_features(torch.zeros(3, 200, verifier.num_features)).shape
        torch.Size([3, 8])
        >>> windows = {"window_seconds": 0.5, "hop_seconds": 0.25}
        >>> verifier.embed_track(clip, sample_rate=16000, **windows).start_seconds.tolist()
        [0.0, 0.25, 0.5]
    """

    def __init__(
        self,
        model: ModelFile,
        device: torch.device | str = "cpu",
        name: str = "model.pt",
        *,
        is_model_kept: bool = True,
    ) -> None:
        # A forked child does not have the parent's torch threads and would wait for them forever.
        use_one_thread_after_fork()
        self.contents = model.contents
        self.device = torch.device(device)
        self.name = name
        net = model.net
        # A folded network needs fewer operations for the same embeddings, but it cannot be trained
        # or adapted, and its weights cannot be compared. A verifier that loaded the file itself
        # folds in place, and reads the file again if `net` is asked for.
        if is_model_kept:
            self.net = net
            net = fold_network(net)
        else:
            fold_batch_norms(net)
        self.embedding_net = net
        """The same network as `net` with folded batch norms, used for embedding."""
        self.embedding_dim = net.embedding_dim
        self.sample_rate = net.sample_rate
        """In Hz, of the audio that the network was trained on."""
        self.min_samples = net.min_samples
        """Samples that the network needs at least."""
        self.num_features = int(net.front_end.num_features)
        """Features per frame: mel bands, or 1 for a network on raw samples."""
        self.mean = mean_of_whole_utterances(model.contents)
        """(dim,) subtracted before scoring; None subtracts nothing."""
        self.plda = plda_of(model.contents)
        """Replaces the cosine as the score; None unless the file is adapted by PLDA."""
        self.rule = DecisionRule.of_model_file(model.contents, name)
        self.caution = voices_caution(model.contents)
        """A warning about what the network was trained on; empty without one."""
        self.is_calibrated = bool(self.rule.thresholds)
        """Whether `verify` can decide without being given a threshold."""
        self.cuts_speech = self.rule.speech == VERIFYING.speech
        """Whether decisions are about detected speech; files calibrated before version 0.4.0 use
        whole recordings."""

    @functools.cached_property
    def net(self) -> SpeakerNet:
        """The network with the weights of the file, built when it is asked for."""
        return model_of(self.contents, self.name, self.device).net

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over weights, architecture and front end, which determine embeddings; not over
        the calibration.
        """
        # Includes the spec, because the same weights behind another front end give other
        # embeddings, and leaves out the calibration, because new thresholds need no new enrolment.
        spec = json.dumps(self.net.spec(), sort_keys=True)
        content = weights_digest(self.net.weights()) + spec
        return hashlib.sha256(content.encode()).hexdigest()

    def embed(
        self,
        audio: Audio | Sequence[Audio],
        *,
        sample_rate: int | None = None,
        speech: bool = False,
    ) -> Any:
        """Embed one whole recording, or each recording in a list.

        Recordings longer than three minutes are embedded in windows of a minute, whose embeddings
        are averaged.

        Args:
            audio: a file, or an array `(samples,)` or `(samples, channels)` as soundfile returns
                it, floating point in -1..1 or int16, or a list of these. Channels are mixed down,
                unless they cancel each other (`open`).
            sample_rate: sample rate of arrays in Hz; they are resampled to the network's rate.
                Files have their own.
            speech: embed for `compare` and `decide`, as `verify` does: detected speech, and none is
                an error.

        Returns:
            (1, dim) float32 for one recording, (recordings, dim) for a list.

        Raises:
            ValueError: audio that is missing, broken, of a wrong shape or type, or too short for
                the network.
        """
        # All are opened before the first is embedded, so that a broken one at the end fails at
        # once.
        inputs: list[Any] = list(audio) if isinstance(audio, list | tuple) else [audio]
        recordings = []
        for recording in inputs:
            if speech:
                recordings.append(self.hear(recording, sample_rate).recording)
            else:
                recordings.append(self.open(recording, sample_rate))
        example = inputs[0] if inputs else None
        return _like(example, self._embed_recordings(recordings))

    def embed_track(
        self,
        audio: Audio,
        *,
        sample_rate: int | None = None,
        window_seconds: float = TRACK_WINDOW_SECONDS,
        hop_seconds: float = TRACK_HOP_SECONDS,
    ) -> Track:
        """Embeddings over time: one window every `hop_seconds`, the last one ending with the
        recording.

        A recording shorter than a window counts as one window. Memory does not grow with the length
        of a file.

        Raises:
            ValueError: as for `embed`; windows too short for the network, or no hop.
        """
        recording = self.open(audio, sample_rate)
        rate = self.sample_rate
        window = round(max(0.0, window_seconds) * rate)
        hop = round(max(0.0, hop_seconds) * rate)
        if window < self.min_samples or hop < 1:
            raise ValueError(
                f"windows of {window_seconds} s every {hop_seconds} s; expected windows of at "
                f"least {self.min_samples / rate:.3f} s and a hop above 0"
            )
        window = min(window, recording.num_samples)
        last = recording.num_samples - window
        # The last window ends with the recording, so that all of it is covered.
        starts = np.unique(np.append(np.arange(0, last + 1, hop), last))
        stops = starts + window
        # Windows of one length share batches. They are read one by one, so memory does not grow.
        embeddings = self.embed_windows(recording, np.stack([starts, stops], axis=1))
        return Track(starts / rate, stops / rate, embeddings)

    def embed_windows(
        self, recording: Recording, edges: np.ndarray, description: str = ""
    ) -> np.ndarray:
        """Embed windows of a recording, (windows, dim) float32.

        Args:
            recording: read window by window.
            edges: first and last + 1 sample of each window, (windows, 2).
            description: shown beside a progress bar; empty shows none.
        """
        with Bar(description, len(edges), "window", is_shown=bool(description)) as bar:
            pieces = (
                (Stretch(row, start, stop - start), recording.read(start, stop - start))
                for row, (start, stop) in enumerate(bar.over(edges.tolist()))
            )
            return self._embed_pieces(pieces, len(edges)).numpy()

    def embed_source(
        self,
        source: AudioSource,
        names: StringTable | Sequence[str],
        description: str = "",
        net: SpeakerNet | None = None,
    ) -> np.ndarray:
        """Embed recordings of a source, (recordings, dim), as `embed` does.

        Args:
            source: reads them by name.
            names: their names.
            description: shown beside a progress bar; empty shows none.
            net: a network to use instead of the model file's, on the same device.
        """
        # In trial lists, short recordings are wrapped around; here they are not.
        embeddings = embed_utterances(
            net or self.embedding_net,
            source,
            names,
            WHOLE,
            Forward(self.device),
            description=description,
            wrapped_seconds=0.0,
        )
        return embeddings[:, 0]

    def embed_features(self, features: Array) -> Any:
        """Embed features computed elsewhere, which are used unchanged.

        Args:
            features: (batch, frames, mels) floating point, as the published code feeds them to its
                network, with the mean removed if that code removes it.

        Returns:
            (batch, dim) float32.

        Raises:
            ValueError: a wrong shape or type, NaN, or fewer frames than the network needs.
        """
        # As an array first, because a tensor may be sparse or have no values.
        tensor = torch.as_tensor(array_of(features))
        has_shape = tensor.ndim == 3 and tensor.shape[2] == self.num_features
        is_finite = tensor.is_floating_point() and torch.isfinite(tensor).all()
        if not (has_shape and is_finite and tensor.numel()):
            raise ValueError(
                f"features of shape {tuple(tensor.shape)} and type {tensor.dtype}; expected "
                f"(batch, frames, {self.num_features}) finite floating-point values"
            )
        with torch.inference_mode():
            # (batch, mels, frames)
            by_band = tensor.to(self.device, torch.float32).transpose(1, 2)
            return _like(features, self.embedding_net.from_features(by_band))

    def verify(
        self,
        first: Audio | Heard,
        second: Audio | Heard | list[Audio] | list[Heard],
        *,
        sample_rate: int | None = None,
        false_accept_rate: float | None = None,
        threshold: float | str | None = None,
    ) -> Decision:
        """Decide whether two recordings are of the same speaker, and how certain that is.

        Args:
            first: a file or an array, as for `embed`.
            second: the other recording, or a list of different recordings of one person.
            sample_rate: sample rate of arrays in Hz.
            false_accept_rate: decide at the model file's threshold for this rate, such as 0.01.
            threshold: decide at this score, or at a named threshold (`DecisionLimits`).

        Raises:
            ValueError: as for `embed`; a recording without speech or shorter than a syllable;
                `NotCalibratedError` if the model file has no such threshold.
        """
        limits = DecisionLimits(false_accept_rate=false_accept_rate, threshold=threshold)
        # A threshold that does not exist is refused before anything is embedded.
        self.rule.decide(0.0, **limits)
        enrolled: Sequence[Audio | Heard] = second if isinstance(second, list) else [second]
        heard = [self.hear(recording, sample_rate) for recording in (first, *enrolled)]
        score, rule, seconds = self.score_heard(heard)
        return rule.decide(score, **limits, speech_seconds=seconds)

    def hear(
        self,
        audio: Audio | Heard,
        sample_rate: int | None = None,
        *,
        min_speech_seconds: float = MIN_TEST_SECONDS,
    ) -> Heard:
        """Open a recording for a decision: its speech alone, unless the model file is calibrated on
        whole recordings.

        Args:
            audio: a file or an array, as for `embed`, or what this method returned for it.
            sample_rate: sample rate of an array in Hz.
            min_speech_seconds: with less speech, the quality has a warning.

        Raises:
            ValueError: as for `embed`; a recording without speech or shorter than a syllable.
        """
        # Everything that decides passes here: verify, identify, enrolment and the server. A
        # decision takes six steps, of which this method is the first two. Speech is found (silero-
        # vad; by energy alone if its weights are missing, which mistakes loud noise for speech). It
        # is cut out, as the calibration did, because pauses and noise move an embedding and its
        # score, and the quality is measured on the same speech. Then `score_heard` embeds both
        # recordings and scores them, and `DecisionRule.decide` calibrates the score, bounds the
        # odds by what the calibration's pairs support, and compares it with a threshold. What this
        # misses: a replayed or synthetic voice is as good as a real one here.
        if isinstance(audio, Heard):
            return audio
        recording = self.open(audio, sample_rate)
        quality = inspect_recording(recording, min_speech_seconds=min_speech_seconds)
        if not len(quality.speech):
            raise NoSpeechError(
                f"{quality.name}: {quality.warnings[0]}; give a recording in which somebody speaks"
            )
        if self.cuts_speech:
            # Opened again, since the speech alone may be too short for the network.
            recording = self.open(recording.cut_to(quality.speech))
        return Heard(recording, quality)

    def score_heard(self, heard: Sequence[Heard]) -> tuple[float, DecisionRule, float]:
        """Score the first recording against the others, which are of one person.

        Returns:
            The score, the rule for recordings of this quality, and the seconds of speech in the
            first or, if they have less, in the others together.
        """
        qualities = [quality for _, quality in heard]
        if len(heard) < 2:
            raise AudioError(f"there is nothing to compare {qualities[0].name} with")
        # A copy would count twice in the mean, which would then look more certain than it is.
        digests: set[str] = set()
        for quality in qualities[1:]:
            if quality.digest in digests:
                raise AudioError(
                    f"{quality.name} is a recording that was given before; give each one once"
                )
            digests.add(quality.digest)
        # One at a time: padding to the longer one would cost more than a batch saves.
        embeddings = np.concatenate([self.embed(recording) for recording, _ in heard])
        seconds = [quality.speech_seconds for quality in qualities]
        if len(heard) > 2:
            test, *enrolled = embeddings
            scores = np.array([self.compare(test, embedding) for embedding in enrolled])
            weights = np.array([weight_of(value) for value in seconds[1:]])
            units = mean_embeddings(embeddings[1:], self.mean)
            score = self.rule.score_of_several(scores, units, weights)
            sides = seconds[0], sum(seconds[1:])
            # Quality measures other than the duration are calibrated on pairs.
            return score, self.rule.for_seconds(*sides), min(sides)
        rule = self.rule
        # Other measures belong to a pair of recordings; most calibrations have none.
        if rule.quality is not None:
            rule = rule.for_pair(
                {
                    "duration": np.array([recording.seconds for recording, _ in heard]),
                    "magnitude": np.linalg.norm(embeddings, axis=1),
                    "snr": np.array([quality.snr_db for quality in qualities]),
                }
            )
        return self.compare(*embeddings), rule, min(seconds)

    def compare(self, first: Array, second: Array) -> float:
        """Score two embeddings, (dim,) or (1, dim): their cosine after subtracting the model file's
        mean, or PLDA.
        """
        rows = []
        for embedding in (first, second):
            row = array_of(embedding).reshape(-1)
            if len(row) != self.embedding_dim:
                raise ValueError(
                    f"expected a {self.embedding_dim}-dimensional embedding, got {len(row)}"
                )
            if not np.isfinite(row).all():
                raise ValueError("an embedding has NaN or infinite values; expected finite numbers")
            # At least float32, since squares of float16 overflow; float64 is kept, since float32
            # cannot hold 1e300.
            rows.append(row.astype(np.result_type(row, np.float32)))
        first_unit, second_unit = mean_embeddings(np.stack(rows), self.mean)
        if self.plda is not None:
            return float(pair_scores(first_unit[None], second_unit[None], self.plda)[0, 0])
        # Rounding may give 1.0000001.
        return float(np.clip(np.dot(first_unit, second_unit), -1.0, 1.0))

    def decide(self, score: float, **limits: Any) -> Decision:
        """Decide on a score; see `DecisionRule.decide`. Embed with `speech=True` for this."""
        return self.rule.decide(score, **limits)

    @functools.cached_property
    def store_model(self) -> StoreModel:
        """What a store of people keeps about this model."""
        return StoreModel(
            self.fingerprint,
            self.embedding_dim,
            name=self.name,
            speech=self.rule.speech,
            mean=self.mean,
            plda=self.plda,
            several=self.rule.several,
        )

    def people(
        self, path: str | os.PathLike, key: str | bytes | None = None, *, must_exist: bool = False
    ) -> PeopleStore:
        """Open a store of people for this network, or create it.

        Args:
            path: the file, such as `people.db`.
            key: encrypts the embeddings; the same key is needed from then on.
            must_exist: refuse a missing or empty file.

        Raises:
            StoreError: not a store, damaged, or for a different model; `StoreKeyError` for the
                wrong key.
        """
        store = PeopleStore(path, self.store_model, key=key, must_exist=must_exist)
        # Embeddings of whole recordings can be compared with those of detected speech, if less
        # well, so this is a warning and not an error.
        stored_speech = store.facts["speech"]
        if stored_speech != self.rule.speech:
            logger.warning(
                "%s has embeddings of %s, but %s decides by %s; `speakernet people reembed` embeds "
                "them again",
                path,
                SPEECH_WORDS[stored_speech],
                self.name,
                SPEECH_WORDS[self.rule.speech],
            )
        return store

    def stream(
        self,
        sample_rate: int,
        enrolled: Array | Heard | None = None,
        *,
        false_accept_rate: float | None = None,
        threshold: float | str | None = None,
    ) -> SpeakerStream:
        """Process speech in chunks: after each second, its embedding and whether it is the enrolled
        speaker.

        Args:
            sample_rate: sample rate of the chunks in Hz.
            enrolled: a recording from `hear`, or its embedding, (dim,) or (1, dim), from `embed`;
                with None, the stream only embeds. Only a recording shows how much speech it has:
                with less than a second of it nothing is decided.
            false_accept_rate: as for `verify`.
            threshold: as for `verify`.

        Raises:
            ValueError: a bad rate, embedding or threshold.

        Examples:
            >>> from speakernet.models.speaker_net import SpeakerNet
            >>> net = SpeakerNet.named("ResNet", embedding_dim=8).eval()
            >>> verifier = SpeakerVerifier(ModelFile(net, {}))
            >>> stream = verifier.stream(8000)
            >>> clip = np.sin(np.arange(10000) / 20).astype(np.float32)
            >>> [state.seconds for state in stream.add(clip) + stream.add(clip)]
            [1.0, 2.0]
        """
        limits = DecisionLimits(false_accept_rate=false_accept_rate, threshold=threshold)
        # An embedding does not tell how much speech it is from, so it counts as long enough.
        if isinstance(enrolled, Heard):
            embedding = self.embed(enrolled.recording)
            seconds = enrolled.quality.speech_seconds
            return SpeakerStream(self, sample_rate, embedding, seconds, limits)
        return SpeakerStream(self, sample_rate, enrolled, np.inf, limits)

    def who(
        self,
        audio: Audio,
        store: PeopleStore | None = None,
        *,
        sample_rate: int | None = None,
        num_speakers: int | None = None,
        max_speakers: int | None = None,
        segmentation: str | Path | None = None,
        overlap: bool = True,
        false_accept_rate: float | None = None,
        threshold: float | str | None = None,
    ) -> "Conversation":
        """Who speaks when in a recording, with names from a store of people (docs/who.md).

        Args:
            audio: a file or an array, as for `embed`; memory hardly grows with the length of a
                file.
            store: a store of people; None names nobody.
            sample_rate: sample rate of an array in Hz.
            num_speakers: number of speakers, if known.
            max_speakers: otherwise the upper bound of their number, 10 by default; a warning says
                if it is too low.
            segmentation: the ONNX file of a segmentation model, which finds second voices; by
                default the fetched one, if any; `none` uses none.
            overlap: False leaves one voice at a time in `turns` too.
            false_accept_rate: share of strangers that may get a name, 0.05 by default.
            threshold: name people at this score, or at a named threshold, instead.

        Raises:
            ValueError: as for `embed`; more speakers than windows of speech; no threshold for
                naming people.
        """
        # Imported here, since it loads clustering and silero-vad.
        from speakernet.inference.who.conversation import who_speaks

        return who_speaks(
            self,
            self.open(audio, sample_rate),
            store,
            DecisionLimits(false_accept_rate=false_accept_rate, threshold=threshold),
            num_speakers=num_speakers,
            max_speakers=max_speakers,
            segmentation=segmentation,
            overlap=overlap,
        )

    def open(
        self, audio: Audio, sample_rate: int | None = None, channel: int | str | None = None
    ) -> Recording:
        """Open a recording for this network; only the header of a file is read if it has one
        channel.

        Args:
            audio: a file or an array, as for `embed`, which takes the recording too.
            sample_rate: sample rate of an array in Hz.
            channel: one of several channels, counted from 1, or `mix`; by default their mean, or a
                single channel if they cancel each other.
        """
        recording = open_recording(audio, sample_rate, self.sample_rate, channel)
        shortest = self.min_samples
        if recording.num_samples < shortest:
            raise AudioError(
                f"{recording.name}: {recording.seconds:.3f} s of audio is too short; "
                f"{self.embedding_net.model_name} needs at least "
                f"{shortest / self.sample_rate:.3f} s ({shortest} samples at {self.sample_rate} Hz)"
            )
        return recording

    def embedding_by(self, embed: Callable[..., Tensor]) -> "SpeakerVerifier":
        """A copy that has its opened recordings embedded by another function, (recordings, dim) on
        the CPU.
        """
        verifier = copy.copy(self)
        verifier._embed_recordings = embed  # type: ignore[method-assign]
        return verifier

    def _embed_recordings(self, recordings: Sequence[Recording]) -> Tensor:
        """Embeddings (recordings, dim) on the CPU; recordings of similar length share a batch."""
        # Sorted by length, because a batch is padded to its longest recording.
        order = np.argsort([recording.num_samples for recording in recordings], kind="stable")
        pieces = (
            (stretch, prepare_waveform(waveform, self.sample_rate, self.embedding_net.preparation))
            for row in order.tolist()
            for stretch, waveform in recordings[row].pieces(row)
        )
        return self._embed_pieces(pieces, len(recordings))

    def _embed_pieces(self, pieces: Iterable[tuple[Stretch, np.ndarray]], num_rows: int) -> Tensor:
        """The mean embedding of each row's pieces, (rows, dim) on the CPU."""
        values = torch.zeros(num_rows, self.embedding_dim)
        items = (
            ((stretch, waveform), len(waveform), stretch.num_windows > 1)
            for stretch, waveform in pieces
        )
        for batch, _ in batches_of(items, BATCH_SIZE, self.sample_rate):
            waveforms, lengths = pad([waveform for _, waveform in batch])
            # (batch, samples) -> (batch, dim)
            embedded = self.embedding_net.embed(
                waveforms.to(self.device), lengths, sample_rate=self.sample_rate
            )
            embedded = embedded.float().cpu()
            for (stretch, _), embedding in zip(batch, embedded, strict=True):
                values[stretch.row] += embedding / stretch.num_windows
        if not bool(torch.isfinite(values).all()):
            raise AudioError(
                f"{self.name}: the embedding has NaN or infinite values; expected finite ones"
            )
        return values


def _like(audio: Any, embeddings: Tensor) -> Any:
    """The embeddings as a tensor if the input was one, otherwise as a numpy array."""
    # Copied outside inference mode, so that callers may train on it.
    with torch.inference_mode(False):
        copied = embeddings.float().cpu().clone()
    return copied if isinstance(audio, Tensor) else copied.numpy()


def _device(device: torch.device | str, local_rank: int | None) -> torch.device:
    """The device of this name; ValueError if it does not exist."""
    if device == "auto":
        return find_device(MachineOptions(), local_rank)
    # Compared as text: torch keeps the number in one byte, so cuda:257 would be the second GPU.
    name = str(device)
    known = ["cpu"]
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        known += ["cuda", *(f"cuda:{number}" for number in range(num_gpus))]
    if name not in known:
        raise ValueError(f"device {name!r}; expected auto or, on this machine, {', '.join(known)}")
    return torch.device(name)
