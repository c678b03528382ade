"""What the server does: one method a route, on a thread of its own, with what Python callers use.

Only embedding differs: the recordings of all requests go to one thread, which embeds those that wait together.
"""

import contextlib
import copy
import dataclasses
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from fastapi import Body, Depends, File, Form, Request, UploadFile
from torch import Tensor

from speakernet.data.audio import info_of_bytes, read_audio_bytes, readable_bytes
from speakernet.inference.decision import NotCalibratedError
from speakernet.inference.enrolment import enroll, identify
from speakernet.inference.people import PeopleStore, Person, checked_name
from speakernet.inference.recordings import Recording, inspect_recording
from speakernet.inference.serve.guard import DEADLINE, ApiError, Budget, Limits, busy, too_slow
from speakernet.inference.verifier import SpeakerStream, SpeakerVerifier

MOST_TOGETHER = 16
MOST_CLIPS, MOST_TOP = 10, 100
MIN_SPEECH_SECONDS = 1.0
"""Less speech in a clip causes a warning."""
MOST_SAMPLES_A_SECOND = 2 * 48_000
"""Over all channels: what a clip of the longest duration may decode to."""
CLOSE_SECONDS = 5.0
RATE_HELP = "decide at the model's threshold of this false-accept rate, such as 0.01"

Rate = Annotated[float | None, Form(gt=0, lt=1, allow_inf_nan=False, description=RATE_HELP)]
Threshold = Annotated[float | None, Form(allow_inf_nan=False, description="decide at this score instead")]
Answer = dict[str, Any]
"""As docs/serve.md describes it."""
Clips = Annotated[list[UploadFile], File(min_length=1, max_length=MOST_CLIPS)]


async def body_of(request: Request) -> bytes:
    """The body as it is."""
    return await request.body()


class Batcher:
    """One thread that embeds what others hand it; what waits while one batch is computed is the next batch.

    >>> batcher = Batcher(lambda clips: np.array([[len(clip)] for clip in clips]))
    >>> batcher.submit(np.zeros(3)).result()
    array([3])
    >>> batcher.close()
    """

    def __init__(self, embed: Callable[[list[Any]], np.ndarray]) -> None:
        self._embed = embed
        self.waiting: queue.Queue[tuple[Any, Future[np.ndarray]] | None] = queue.Queue()
        self.num_batches = self.num_clips = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="embedding", daemon=True)
        self._thread.start()

    def submit(self, clip: Any) -> "Future[np.ndarray]":
        """The embedding of a clip, (dim,), in its turn; a cancelled one is not computed."""
        future: Future[np.ndarray] = Future()
        if self._is_closed:
            future.cancel()
        self.waiting.put((clip, future))
        return future

    def close(self) -> None:
        """End after the batch that is being computed, and cancel what waits."""
        self._is_closed = True
        self.waiting.put(None)
        self._thread.join(CLOSE_SECONDS)
        while not self.waiting.empty():
            if (one := self.waiting.get()) is not None:
                one[1].cancel()

    def _work(self) -> None:
        while not self._is_closed:
            batch = [self.waiting.get()]
            while len(batch) < MOST_TOGETHER and not self.waiting.empty():
                batch.append(self.waiting.get())
            running = [one for one in batch if one is not None and one[1].set_running_or_notify_cancel()]
            if running:
                self.num_batches += 1
                self.num_clips += len(running)
                self._answer(running)

    def _answer(self, batch: Sequence[tuple[Any, "Future[np.ndarray]"]]) -> None:
        try:
            embeddings = self._embed([clip for clip, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            # One request must not fail because of another's clip.
            for one in batch:
                self._answer([one])
            return
        for (_, future), embedding in zip(batch, embeddings, strict=True):
            future.set_result(embedding)


@dataclass
class LiveStream:
    """A stream that a client feeds, one chunk at a time."""

    stream: SpeakerStream
    last_used: float = dataclasses.field(default_factory=time.monotonic)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Service:
    """Everything that a running server holds: the model, the store of people (or None), streams and threads."""

    def __init__(self, verifier: SpeakerVerifier, store: PeopleStore | None, limits: Limits) -> None:
        self.batcher = Batcher(lambda recordings: np.asarray(verifier.embed(recordings)))
        self.verifier = copy.copy(verifier)
        self.verifier._embed_recordings = self._embed_together  # type: ignore[method-assign]
        self.store, self.limits, self.budget = store, limits, Budget(limits.memory_bytes)
        self.streams: dict[str, LiveStream] = {}
        self._streams_lock = threading.Lock()

    async def health(self) -> Answer:
        """What is served, and how busy it is."""
        verifier = self.verifier
        return {
            "status": "ok",
            "model": verifier.net.model_name,
            "sample_rate": verifier.sample_rate,
            "embedding_dim": verifier.embedding_dim,
            "fingerprint": verifier.fingerprint,
            "is_calibrated": verifier.is_calibrated,
            "advice": self._decide(0.0)["advice"],
            "keeps_people": self.store is not None,
            "waiting": self.batcher.waiting.qsize(),
            "clips": self.batcher.num_clips,
            "batches": self.batcher.num_batches,
        }

    def verify(
        self, first: UploadFile, second: UploadFile, false_accept_rate: Rate = None, threshold: Threshold = None
    ) -> Answer:
        """Whether two clips are of one person, and how sure that is."""
        # First, so that no clip is decoded for an answer that cannot be given.
        self._decide(0.0, false_accept_rate, threshold)
        with self._opened([first, second]) as (recordings, clips):
            score = self.verifier.compare(*self.verifier.embed(recordings))
        return {**self._decide(score, false_accept_rate, threshold), "clips": clips}

    def embed(self, audio: UploadFile) -> Answer:
        """The embedding of a clip."""
        with self._opened([audio]) as (recordings, clips):
            return {"embedding": self.verifier.embed(recordings)[0].tolist(), "clips": clips}

    def compare(self, first: Annotated[list[float], Body()], second: Annotated[list[float], Body()]) -> Answer:
        """The answer about two embeddings of /embed."""
        if not np.isfinite([*first, *second]).all():
            raise ValueError("an embedding with NaN or infinite values; expected finite numbers")
        return self._decide(self.verifier.compare(np.array(first), np.array(second)))

    def people(self) -> Answer:
        """Everybody who is enrolled."""
        return {"people": [_person(one) for one in self._store().people()]}

    def enrol(self, name: Annotated[str, Form()], audio: Clips) -> Answer:
        """Enrol somebody, or add clips of somebody who is enrolled."""
        store, name = self._store(), checked_name(name)
        with self._opened(audio) as (recordings, clips):
            done = enroll(self.verifier, store, name, recordings)
        return {"name": done.name, "recordings": done.total, "warnings": done.warnings, "clips": clips}

    def remove(self, name: str) -> Answer:
        """Remove somebody: nothing of them can be read in the store or its backups."""
        store, name = self._store(), checked_name(name)
        known = {one.name: _person(one) for one in store.people()}
        if name not in known:
            raise ApiError(404, "unknown_person", f"nobody is enrolled as {name!r}")
        store.purge(name)
        return known[name]

    def identify(
        self,
        audio: UploadFile,
        top: Annotated[int, Form(ge=1, le=MOST_TOP)] = 5,
        false_accept_rate: Rate = None,
        threshold: Threshold = None,
    ) -> Answer:
        """Which of the enrolled people it is, or a stranger."""
        store, name, limit, advice = self._store(), None, None, None
        with self._opened([audio]) as (recordings, clips):
            given: dict[str, Any] = {"false_accept_rate": false_accept_rate, "threshold": threshold}
            try:
                found = identify(self.verifier, store, recordings[0], top=top, **given)
                name, candidates = found.name, found.candidates
                limit = None if found.decision is None else found.decision.threshold
            except NotCalibratedError as error:
                if false_accept_rate is not None:
                    raise
                advice = str(error)
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

    def open_stream(
        self, reference: UploadFile, sample_rate: Annotated[int, Form()], threshold: Threshold = None
    ) -> Answer:
        """Start comparing live speech with a clip."""
        with self._opened([reference]) as (recordings, _):
            stream = self.verifier.stream(sample_rate, self.verifier.embed(recordings), threshold=threshold)
        with self._streams_lock:
            self._close_idle()
            if len(self.streams) >= self.limits.streams:
                raise busy(f"{len(self.streams)} streams are open")
            identity = secrets.token_urlsafe(12)
            self.streams[identity] = LiveStream(stream)
        return {"id": identity}

    def feed_stream(self, identity: str, content: Annotated[bytes, Depends(body_of)]) -> Answer:
        """Add samples: 16 bits, little-endian, one channel."""
        live, limit, state = self._stream(identity), self.limits.chunk_seconds, None
        if len(content) % 2:
            raise ApiError(422, "bad_samples", f"{len(content)} bytes; expected 16-bit samples, one channel")
        if len(content) > 2 * limit * live.stream.sample_rate:
            raise ApiError(413, "too_long", f"{len(content)} bytes; send at most {limit:g} s at once")
        with live.lock:
            states = live.stream.add(np.frombuffer(content, dtype="<i2").astype(np.int16))
            live.last_used = time.monotonic()
            for last in states[-1:]:
                assert last.score is not None, "a server's stream has a reference"
                state = {"seconds": last.seconds, **self._decide(last.score, **live.stream.limits)}
            return {"seconds": live.stream.seconds, "state": state}

    def close_stream(self, identity: str) -> Answer:
        """Close a stream."""
        self._stream(identity)
        self.streams.pop(identity, None)
        return {"id": identity}

    def _decide(self, score: float, false_accept_rate: float | None = None, threshold: float | None = None) -> Answer:
        """A decision; without a calibration and a threshold, the score and what to do."""
        try:
            decision = self.verifier.decide(score, false_accept_rate=false_accept_rate, threshold=threshold)
            return {**vars(decision), "advice": None}
        except NotCalibratedError as error:
            if false_accept_rate is not None:
                raise
            unknown = dict.fromkeys(("log_likelihood_ratio", "same_speaker", "threshold", "false_accept_rate"))
            return {"score": score, **unknown, "advice": str(error)}

    def _embed_together(self, recordings: Sequence[Recording]) -> Tensor:
        """(recordings, dim), embedded with those of other requests; given up at the request's deadline."""
        futures = [self.batcher.submit(one) for one in recordings]
        try:
            found = [future.result(max(0.0, DEADLINE.get() - time.monotonic())) for future in futures]
        except FutureTimeout:
            raise too_slow(self.limits) from None
        finally:
            for future in futures:
                future.cancel()
        return torch.from_numpy(np.stack(found))

    @contextlib.contextmanager
    def _opened(self, uploads: Sequence[UploadFile]) -> Iterator[tuple[list[Recording], list[Answer]]]:
        """The decoded files and what is known of each; their memory is counted within the block."""
        with contextlib.ExitStack() as held:
            found = [self._decoded(upload, held) for upload in uploads]
            qualities = [inspect_recording(one, min_speech_seconds=MIN_SPEECH_SECONDS) for one in found]
            yield (
                found,
                [
                    {
                        "seconds": round(one.seconds, 3),
                        "speech_seconds": round(one.speech_seconds, 3),
                        "warnings": one.warnings,
                    }
                    for one in qualities
                ],
            )

    def _decoded(self, upload: UploadFile, held: contextlib.ExitStack) -> Recording:
        # As it may appear in a message: without folders, and short.
        name = (upload.filename or "clip").replace("\\", "/").rpartition("/")[2][:100]
        name = "".join(letter if letter.isprintable() else "?" for letter in name)
        content, limits, rate = readable_bytes(upload.file.read(), name), self.limits, self.verifier.sample_rate
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
        return self.verifier.open(Recording(name, rate, len(waveform), samples=waveform))

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
        self.streams = {identity: live for identity, live in self.streams.items() if live.last_used >= oldest}


def _person(one: Person) -> Answer:
    return {"name": one.name, "recordings": one.recordings}
