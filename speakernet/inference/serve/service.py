"""What the server does, without HTTP: each request on its own thread, with what Python callers use.

Only embedding differs: the recordings of all requests go to one thread, which embeds those that wait together.
"""

import asyncio
import contextlib
import copy
import dataclasses
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from speakernet.data.audio import AudioError, info_of_bytes, read_audio_bytes, readable_bytes
from speakernet.inference.decision import NotCalibratedError
from speakernet.inference.enrolment import enroll, identify
from speakernet.inference.people import PeopleStore, checked_name
from speakernet.inference.recordings import Recording, inspect_recording, refuse_unusable
from speakernet.inference.serve.guard import ApiError, Budget, Limits, busy, too_slow
from speakernet.inference.verifier import SpeakerStream, SpeakerVerifier, StreamState

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Clip = TypeVar("Clip")
Upload = tuple[str, bytes]
"""A file's name and its content."""
MOST_TOGETHER = 16
WORKERS = 2 * MOST_TOGETHER
"""Requests that are worked on: while one batch is embedded, the next one is decoded."""
MIN_SPEECH_SECONDS = 1.0
"""Less speech in a clip causes a warning."""
MOST_SAMPLES_A_SECOND = 2 * 48_000
"""Over all channels: what a clip of the longest duration may decode to."""
CLOSE_SECONDS = 5.0


class Batcher(Generic[Clip]):
    """One thread that embeds what others hand it; what waits while one batch is computed is the next batch.

    >>> batcher = Batcher(lambda clips: np.array([[len(clip)] for clip in clips]))
    >>> batcher.submit(np.zeros(3)).result()
    array([3])
    >>> batcher.close()
    """

    def __init__(self, embed: Callable[[Sequence[Clip]], np.ndarray]) -> None:
        self._embed = embed
        self._waiting: queue.Queue[tuple[Clip, Future[np.ndarray]] | None] = queue.Queue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="embedding", daemon=True)
        self._thread.start()
        self.num_batches = 0
        self.num_clips = 0

    @property
    def num_waiting(self) -> int:
        """Clips that wait."""
        return self._waiting.qsize()

    def submit(self, clip: Clip) -> "Future[np.ndarray]":
        """The embedding of a clip, (dim,), in its turn; a cancelled one is not computed."""
        future: Future[np.ndarray] = Future()
        if self._is_closed:
            future.cancel()
        self._waiting.put((clip, future))
        return future

    def close(self) -> None:
        """Cancel what waits, and end after the batch that is being computed."""
        self._is_closed = True
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        is_open = True
        while is_open:
            batch = [self._waiting.get()]
            while len(batch) < MOST_TOGETHER and batch[-1] is not None:
                try:
                    batch.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            is_open = batch[-1] is not None
            waiting = [one for one in batch if one is not None]
            if self._is_closed:
                for _, future in waiting:
                    future.cancel()
            self._answer([one for one in waiting if one[1].set_running_or_notify_cancel()])

    def _answer(self, batch: Sequence[tuple[Clip, "Future[np.ndarray]"]]) -> None:
        if not batch:
            return
        self.num_batches += 1
        self.num_clips += len(batch)
        try:
            embeddings = self._embed([clip for clip, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            # One request must not fail because of another's clip.
            logger.warning("a batch of %d clips failed (%s); trying each alone", len(batch), error)
            for one in batch:
                self._answer([one])
            return
        for (_, future), embedding in zip(batch, embeddings, strict=True):
            future.set_result(embedding)


@dataclasses.dataclass
class LiveStream:
    """A stream that a client feeds, one chunk at a time."""

    stream: SpeakerStream
    last_used: float
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Service:
    """Everything that a running server holds: the model, the store of people (or None), streams and threads."""

    def __init__(self, verifier: SpeakerVerifier, store: PeopleStore | None, limits: Limits) -> None:
        self.batcher: Batcher[Recording] = Batcher(lambda recordings: np.asarray(verifier.embed(list(recordings))))
        self.verifier = copy.copy(verifier)
        self.verifier._embed_recordings = self._embed_together  # type: ignore[method-assign]
        self.store = store
        self.limits = limits
        self.budget = Budget(limits.memory_bytes)
        self.streams: dict[str, LiveStream] = {}
        self._streams_lock = threading.Lock()
        self._workers = ThreadPoolExecutor(WORKERS, "request")
        self._request = threading.local()

    async def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do something on a thread, in the time of a request."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._timed, work, *arguments)

    def close(self) -> None:
        """Cancel what has not begun, and end the threads."""
        self.batcher.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def health(self) -> dict[str, Any]:
        """What is served, and how busy it is."""
        verifier = self.verifier
        return {
            "status": "ok",
            "model": verifier.net.model_name,
            "sample_rate": verifier.sample_rate,
            "embedding_dim": verifier.embedding_dim,
            "fingerprint": verifier.fingerprint,
            "is_calibrated": verifier.is_calibrated,
            "advice": self.advice(),
            "keeps_people": self.store is not None,
            "waiting": self.batcher.num_waiting,
            "clips": self.batcher.num_clips,
            "batches": self.batcher.num_batches,
        }

    def advice(self) -> str | None:
        """How to calibrate the model; None if it is calibrated."""
        try:
            self.verifier.decide(0.0)
        except NotCalibratedError as error:
            return str(error)
        return None

    def verify(
        self, first: Upload, second: Upload, false_accept_rate: float | None, threshold: float | None
    ) -> dict[str, Any]:
        """Whether two files are of one person."""
        # First, so that no clip is decoded for an answer that cannot be given.
        self.decide(0.0, false_accept_rate, threshold)
        with self._opened([first, second]) as (recordings, clips):
            one, other = self.verifier.embed(recordings)
            score = self.verifier.compare(one, other)
        return {**self.decide(score, false_accept_rate, threshold), "clips": clips}

    def embed(self, upload: Upload) -> dict[str, Any]:
        """The embedding of a file."""
        with self._opened([upload]) as (recordings, clips):
            embedding = self.verifier.embed(recordings)[0]
        return {"embedding": _finite(embedding).tolist(), "clips": clips}

    def compare(self, first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
        """What two embeddings say."""
        score = self.verifier.compare(_finite(np.array(first)), _finite(np.array(second)))
        return self.decide(score, None, None)

    def decide(self, score: float, false_accept_rate: float | None, threshold: float | None) -> dict[str, Any]:
        """A decision in plain values; without a calibration and a threshold, the score and what to do."""
        try:
            decision = self.verifier.decide(score, false_accept_rate=false_accept_rate, threshold=threshold)
        except NotCalibratedError as error:
            if false_accept_rate is not None:
                raise
            return _undecided(score, str(error))
        return {**dataclasses.asdict(decision), "advice": None}

    def people(self) -> list[dict[str, Any]]:
        """Everybody who is enrolled."""
        return [{"name": person.name, "recordings": person.recordings} for person in self._store().people()]

    def enrol(self, name: str, uploads: Sequence[Upload]) -> dict[str, Any]:
        """Enrol somebody, or add recordings."""
        store, name = self._store(), checked_name(name)
        with self._opened(uploads) as (recordings, clips):
            done = enroll(self.verifier, store, name, recordings)
        return {"name": done.name, "recordings": done.total, "warnings": list(done.warnings), "clips": clips}

    def remove(self, name: str) -> dict[str, Any]:
        """Remove somebody: nothing of them can be read in the store or its backups."""
        store, name = self._store(), checked_name(name)
        known = {person["name"]: person for person in self.people()}
        if name not in known:
            raise ApiError(404, "unknown_person", f"nobody is enrolled as {name!r}")
        store.purge(name)
        return known[name]

    def identify(
        self, upload: Upload, top: int, false_accept_rate: float | None, threshold: float | None
    ) -> dict[str, Any]:
        """Which of the enrolled people it is, or a stranger."""
        store, limit, advice = self._store(), None, None
        with self._opened([upload]) as (recordings, clips):
            given = {"false_accept_rate": false_accept_rate, "threshold": threshold}
            try:
                found = identify(self.verifier, store, recordings[0], top=top, **given)  # type: ignore[arg-type]
                name, candidates = found.name, found.candidates
                limit = None if found.decision is None else found.decision.threshold
            except NotCalibratedError as error:
                if false_accept_rate is not None:
                    raise
                name, advice = None, str(error)
                candidates = tuple(store.identify(self.verifier.embed(recordings[0]), top))
        ratio = self.verifier.rule.log_likelihood_ratio
        return {
            "name": name,
            "threshold": limit,
            "is_calibrated": self.verifier.is_calibrated,
            "advice": advice,
            "candidates": [
                {"name": one, "score": score, "log_likelihood_ratio": ratio(score)} for one, score in candidates
            ],
            "clips": clips,
        }

    def open_stream(self, upload: Upload, sample_rate: int, threshold: float | None) -> dict[str, str]:
        """Start comparing live speech with a clip; gives the identity of the stream."""
        with self._opened([upload]) as (recordings, _):
            stream = self.verifier.stream(sample_rate, self.verifier.embed(recordings), threshold=threshold)
        with self._streams_lock:
            self._close_idle()
            if len(self.streams) >= self.limits.streams:
                raise busy(f"{len(self.streams)} streams are open")
            identity = secrets.token_urlsafe(12)
            self.streams[identity] = LiveStream(stream, time.monotonic())
        return {"id": identity}

    def feed_stream(self, identity: str, content: bytes) -> dict[str, Any]:
        """Add 16-bit samples; gives the newest state, or none before another second is complete."""
        live, limit = self._stream(identity), self.limits.chunk_seconds
        if len(content) % 2:
            raise ApiError(422, "bad_samples", f"{len(content)} bytes; expected 16-bit samples, one channel")
        if len(content) > 2 * limit * live.stream.sample_rate:
            raise ApiError(413, "too_long", f"{len(content)} bytes; send at most {limit:g} s at once")
        with live.lock:
            states = live.stream.add(np.frombuffer(content, dtype="<i2").astype(np.int16))
            live.last_used = time.monotonic()
            state = self._described(states[-1]) if states else None
            return {"seconds": live.stream.seconds, "state": state}

    def close_stream(self, identity: str) -> dict[str, str]:
        """Close a stream."""
        self._stream(identity)
        self.streams.pop(identity, None)
        return {"id": identity}

    def _timed(self, work: Callable[..., Result], *arguments: Any) -> Result:
        self._request.deadline = time.monotonic() + self.limits.answer_seconds
        return work(*arguments)

    def _embed_together(self, recordings: Sequence[Recording]) -> Tensor:
        """(recordings, dim), embedded with those of other requests; given up at the request's deadline."""
        futures = [self.batcher.submit(one) for one in recordings]
        deadline = getattr(self._request, "deadline", time.monotonic() + self.limits.answer_seconds)
        try:
            found = [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
        except FutureTimeout:
            raise too_slow(self.limits) from None
        finally:
            for future in futures:
                future.cancel()
        return torch.from_numpy(np.stack(found))

    @contextlib.contextmanager
    def _opened(self, uploads: Sequence[Upload]) -> Iterator[tuple[list[Recording], list[dict[str, Any]]]]:
        """The decoded files and what is known of each; their memory is counted within the block."""
        with contextlib.ExitStack() as held:
            found = [self._decoded(upload, held) for upload in uploads]
            qualities = [inspect_recording(one, min_speech_seconds=MIN_SPEECH_SECONDS) for one in found]
            for quality in qualities:
                refuse_unusable(quality)
            clips = [
                {
                    "seconds": round(one.seconds, 3),
                    "speech_seconds": round(one.speech_seconds, 3),
                    "warnings": list(one.warnings),
                }
                for one in qualities
            ]
            yield found, clips

    def _decoded(self, upload: Upload, held: contextlib.ExitStack) -> Recording:
        name, content = upload
        content, limits, rate = readable_bytes(content, name), self.limits, self.verifier.sample_rate
        info = info_of_bytes(content, name)
        num_values = info.num_samples * info.num_channels
        if info.seconds > limits.clip_seconds or num_values > limits.clip_seconds * MOST_SAMPLES_A_SECOND:
            message = f"{name}: {info.seconds:.0f} s; this server takes up to {limits.clip_seconds:g} s"
            raise ApiError(413, "too_long", message)
        held.enter_context(self.budget.hold(4 * info.num_samples_at(rate)))
        # Decoded blocks and their concatenation exist at the same time.
        with self.budget.hold(8 * num_values):
            waveform = read_audio_bytes(content, name, sample_rate=rate)
        # Also refuses what is shorter than the network needs.
        try:
            return self.verifier.open(Recording(name, rate, len(waveform), samples=waveform))
        except AudioError as error:
            raise AudioError(f"{name}: {error}") from error

    def _store(self) -> PeopleStore:
        if self.store is None:
            raise ApiError(404, "no_store", "this server keeps no people; start it with --store people.db")
        return self.store

    def _stream(self, identity: str) -> LiveStream:
        with self._streams_lock:
            self._close_idle()
            if identity not in self.streams:
                raise ApiError(404, "unknown_stream", "no such stream; it was closed, or received nothing for too long")
            return self.streams[identity]

    def _close_idle(self) -> None:
        oldest = time.monotonic() - self.limits.stream_idle_seconds
        for identity in [one for one, live in self.streams.items() if live.last_used < oldest]:
            del self.streams[identity]

    def _described(self, state: StreamState) -> dict[str, Any]:
        assert state.score is not None, "a server's stream has a reference"
        if state.decision is None:
            return {"seconds": state.seconds, **_undecided(state.score, self.advice() or "")}
        return {"seconds": state.seconds, **dataclasses.asdict(state.decision), "advice": None}


def _undecided(score: float, advice: str) -> dict[str, Any]:
    """A score without a threshold to compare it with."""
    nothing = dict.fromkeys(("log_likelihood_ratio", "same_speaker", "threshold", "false_accept_rate"))
    return {"score": score, **nothing, "advice": advice}


def _finite(embedding: np.ndarray) -> np.ndarray:
    if not np.isfinite(embedding).all():
        raise ValueError("an embedding with NaN or infinite values; expected finite numbers")
    return embedding
