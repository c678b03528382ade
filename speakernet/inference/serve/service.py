"""What the server does, without HTTP: each request on a thread of its own, with what Python callers use.

Only the embedding is another: recordings of all requests go to one thread, which embeds those that wait together.
"""

import asyncio
import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from speakernet.inference.decision import NotCalibratedError
from speakernet.inference.enrolment import enroll, identify
from speakernet.inference.people import PeopleStore
from speakernet.inference.quality import Quality
from speakernet.inference.recordings import Recording
from speakernet.inference.serve.batching import MOST_TOGETHER, Batcher
from speakernet.inference.serve.clips import Upload, decode_clip
from speakernet.inference.serve.errors import ApiError
from speakernet.inference.serve.limits import Limits
from speakernet.inference.store_rows import checked_name
from speakernet.inference.streaming import SpeakerStream, StreamState
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.models.model_file import ModelFile

Result = TypeVar("Result")
WORKERS = 2 * MOST_TOGETHER
"""Requests that are worked on: while one batch is embedded, the next one is read."""


class BatchedVerifier(SpeakerVerifier):
    """A verifier whose recordings are embedded together with those of other threads.

    Args:
        verifier: whose network, mean and calibration it has.
    """

    def __init__(self, verifier: SpeakerVerifier) -> None:
        super().__init__(ModelFile(verifier.net, verifier.contents), verifier.device, verifier.name)
        self.batcher: Batcher[Recording] = Batcher(lambda recordings: np.asarray(verifier.embed(list(recordings))))

    def _embed_recordings(self, recordings: Sequence[Recording]) -> Tensor:
        futures = [self.batcher.submit(one) for one in recordings]
        return torch.from_numpy(np.stack([future.result() for future in futures]))


@dataclasses.dataclass
class LiveStream:
    """A stream that a client feeds.

    Attributes:
        stream: what was heard.
        last_used: seconds, of the monotonic clock.
        lock: one chunk at a time.
    """

    stream: SpeakerStream
    last_used: float
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Service:
    """Everything that a running server holds.

    Args:
        verifier: of the model.
        store: of people; None without one.
        limits: of clips and streams.
    """

    def __init__(self, verifier: SpeakerVerifier, store: PeopleStore | None, limits: Limits) -> None:
        self.verifier = BatchedVerifier(verifier)
        self.store = store
        self.limits = limits
        self.batcher = self.verifier.batcher
        self.streams: dict[str, LiveStream] = {}
        self._streams_lock = threading.Lock()
        self._workers = ThreadPoolExecutor(WORKERS, "request")

    async def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do something on a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *arguments)

    def close(self) -> None:
        """Finish what was begun, and end the threads."""
        self._workers.shutdown()
        self.batcher.close()

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
        """What to do about a model that was never calibrated; None for one that was."""
        try:
            self.verifier.decide(0.0)
        except NotCalibratedError as error:
            return str(error)
        return None

    def verify(
        self, first: Upload, second: Upload, false_accept_rate: float | None, threshold: float | None
    ) -> dict[str, Any]:
        """Whether two files are of one person.

        Raises:
            ApiError: clips that cannot be used, or a threshold that the model does not have.
        """
        # Asked first: no clip is decoded for an answer that cannot be given.
        self.decide(0.0, false_accept_rate, threshold)
        recordings, heard = self._heard([first, second])
        one, other = self.verifier.embed(recordings)
        return {**self.decide(self.verifier.compare(one, other), false_accept_rate, threshold), "clips": heard}

    def embed(self, upload: Upload) -> dict[str, Any]:
        """The embedding of a file.

        Raises:
            ApiError: a clip that cannot be used.
        """
        recordings, heard = self._heard([upload])
        return {"embedding": [float(value) for value in self.verifier.embed(recordings)[0]], "clips": heard}

    def compare(self, first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
        """What two embeddings say.

        Raises:
            ApiError: embeddings that are none of this model's.
        """
        if not all(math.isfinite(value) for value in (*first, *second)):
            raise ApiError(422, "bad_embedding", "an embedding with NaN or infinity; expected finite numbers")
        try:
            score = self.verifier.compare(np.array(first), np.array(second))
        except ValueError as error:
            raise ApiError(422, "bad_embedding", str(error)) from error
        return self.decide(score, None, None)

    def decide(self, score: float, false_accept_rate: float | None, threshold: float | None) -> dict[str, Any]:
        """A decision in plain values; without a calibration and a threshold, the score and what to do.

        Raises:
            ApiError: a threshold that the model does not have.
        """
        try:
            decision = self.verifier.decide(score, false_accept_rate=false_accept_rate, threshold=threshold)
        except NotCalibratedError as error:
            if false_accept_rate is not None:
                raise ApiError(422, "no_threshold", str(error)) from error
            return undecided(score, str(error))
        except ValueError as error:
            raise ApiError(422, "bad_threshold", str(error)) from error
        return {**dataclasses.asdict(decision), "advice": None}

    def people(self) -> list[dict[str, Any]]:
        """Everybody who is enrolled.

        Raises:
            ApiError: the server has no store.
        """
        return [{"name": person.name, "recordings": person.recordings} for person in self._store().people()]

    def enrol(self, name: str | None, uploads: Sequence[Upload]) -> dict[str, Any]:
        """Enrol somebody, or add to what is known of them.

        Raises:
            ApiError: a name or a clip that cannot be used, or no store.
        """
        store, name = self._store(), self._checked_name(name)
        recordings, heard = self._heard(uploads)
        try:
            done = enroll(self.verifier, store, name, recordings)
        except ValueError as error:
            raise ApiError(422, "refused", str(error)) from error
        return {"name": done.name, "recordings": done.total, "warnings": list(done.warnings), "clips": heard}

    def remove(self, name: str) -> dict[str, Any]:
        """Forget somebody: nothing of them can be read in the store or its backups.

        Raises:
            ApiError: nobody of that name, or no store.
        """
        store, name = self._store(), self._checked_name(name)
        known = {person["name"]: person for person in self.people()}
        if name not in known:
            raise ApiError(404, "unknown_person", f"nobody is enrolled as {name!r}")
        try:
            store.purge(name)
        except ValueError as error:
            raise ApiError(422, "refused", str(error)) from error
        return known[name]

    def identify(
        self, upload: Upload, top: int, false_accept_rate: float | None, threshold: float | None
    ) -> dict[str, Any]:
        """Which of the enrolled people it is, or a stranger.

        Raises:
            ApiError: a clip or threshold that cannot be used, or no store.
        """
        store = self._store()
        recordings, heard = self._heard([upload])
        advice = None
        try:
            found = identify(
                self.verifier,
                store,
                recordings[0],
                top=top,
                false_accept_rate=false_accept_rate,
                threshold=threshold,
            )
            name, candidates = found.name, found.candidates
        except NotCalibratedError as error:
            if false_accept_rate is not None:
                raise ApiError(422, "no_threshold", str(error)) from error
            name, advice = None, str(error)
            candidates = tuple(store.identify(self.verifier.embed(recordings[0]), top))
        except ValueError as error:
            raise ApiError(422, "refused", str(error)) from error
        ratio = self.verifier.rule.log_likelihood_ratio
        return {
            "name": name,
            "is_calibrated": self.verifier.is_calibrated,
            "advice": advice,
            "candidates": [
                {"name": one, "score": score, "log_likelihood_ratio": ratio(score)} for one, score in candidates
            ],
            "clips": heard,
        }

    def open_stream(self, upload: Upload, sample_rate: float | None, threshold: float | None) -> dict[str, str]:
        """Begin a live comparison with a clip; gives its identity.

        Raises:
            ApiError: a clip or a rate that cannot be used, or too many streams.
        """
        if sample_rate is None or not sample_rate.is_integer():
            raise ApiError(422, "missing_field", "sample_rate is missing or no whole number; give it in Hz")
        recordings, _ = self._heard([upload])
        try:
            stream = self.verifier.stream(int(sample_rate), self.verifier.embed(recordings), threshold=threshold)
        except ValueError as error:
            raise ApiError(422, "bad_stream", str(error)) from error
        with self._streams_lock:
            self._forget_idle()
            if len(self.streams) >= self.limits.streams:
                raise ApiError(
                    503, "busy", f"{len(self.streams)} streams are open; try again later", {"Retry-After": "5"}
                )
            identity = secrets.token_urlsafe(12)
            self.streams[identity] = LiveStream(stream, time.monotonic())
        return {"id": identity}

    def feed_stream(self, identity: str, content: bytes) -> dict[str, Any]:
        """Hear 16-bit samples; gives the newest state, or none before another second is full.

        Raises:
            ApiError: no such stream, or no samples.
        """
        if len(content) % 2:
            raise ApiError(422, "bad_samples", f"{len(content)} bytes; expected 16-bit samples, one channel")
        live = self._stream(identity)
        with live.lock:
            states = live.stream.add(np.frombuffer(content, dtype="<i2").astype(np.int16))
            live.last_used = time.monotonic()
            state = self._described(states[-1]) if states else None
            return {"seconds": live.stream.seconds, "state": state}

    def close_stream(self, identity: str) -> dict[str, str]:
        """Forget a stream.

        Raises:
            ApiError: no such stream.
        """
        self._stream(identity)
        self.streams.pop(identity, None)
        return {"id": identity}

    def _heard(self, uploads: Sequence[Upload]) -> tuple[list[Recording], list[dict[str, Any]]]:
        """The recordings, and what was heard in them in plain values."""
        found: list[tuple[Recording, Quality]] = [decode_clip(one, self.verifier, self.limits) for one in uploads]
        heard = [
            {
                "seconds": round(quality.seconds, 3),
                "speech_seconds": round(quality.speech_seconds, 3),
                "warnings": list(quality.warnings),
            }
            for _, quality in found
        ]
        return [recording for recording, _ in found], heard

    def _store(self) -> PeopleStore:
        if self.store is None:
            raise ApiError(404, "no_store", "this server keeps no people; start it with --store people.db")
        return self.store

    def _checked_name(self, name: str | None) -> str:
        try:
            return checked_name(name or "")
        except ValueError as error:
            raise ApiError(422, "bad_name", str(error)) from error

    def _stream(self, identity: str) -> LiveStream:
        with self._streams_lock:
            self._forget_idle()
            if identity not in self.streams:
                raise ApiError(404, "unknown_stream", "no such stream; it ended, or nothing was sent for too long")
            return self.streams[identity]

    def _forget_idle(self) -> None:
        oldest = time.monotonic() - self.limits.stream_idle_seconds
        for identity in [one for one, live in self.streams.items() if live.last_used < oldest]:
            del self.streams[identity]

    def _described(self, state: StreamState) -> dict[str, Any]:
        assert state.score is not None, "a server's stream has somebody to compare with"
        if state.decision is None:
            return {"seconds": state.seconds, **undecided(state.score, self.advice() or "")}
        return {"seconds": state.seconds, **dataclasses.asdict(state.decision), "advice": None}


def undecided(score: float, advice: str) -> dict[str, Any]:
    """A score that nothing is known to compare with."""
    nothing = dict.fromkeys(("log_likelihood_ratio", "same_speaker", "threshold", "false_accept_rate"))
    return {"score": score, **nothing, "advice": advice}
