"""The suites `--runtimes` and `--serving`: the cost of using a model file.

Real-time factors (compute seconds per second of audio; below 1 is faster than real time) of torch
as trained, torch with merged batch norms, and ONNX Runtime, one recording at a time; and the
latency of a server for many parallel clients over loopback.
"""

import asyncio
import copy
import io
import statistics
import threading
import time
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import torch

from benchmarks.timing import Way, run_in_turn, timings
from speakernet.assembly.exchange import synthetic_speech
from speakernet.inference.export import INPUT, onnx_bytes
from speakernet.inference.serve.limits import Limits
from speakernet.inference.serve.server import Address, Service, make_server
from speakernet.inference.verifier import load
from speakernet.models.model_file import ModelFile
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet, fold_batch_norms
from speakernet.options import lookup

THREADS = (1, 2)
AUDIO_SECONDS = 5.0
PERCENTILE = 95


@dataclass(frozen=True)
class Runtime:
    """One network in one runtime.

    Attributes:
        name: the network.
        runtime: the runtime.
        threads: the number of threads.
        real_time_factor: median compute seconds per second of audio.
        spread: its interquartile range.
    """

    name: str
    runtime: str
    threads: int
    real_time_factor: float
    spread: float


@dataclass(frozen=True)
class Latency:
    """How long clients wait.

    Attributes:
        clients: parallel clients.
        answers: successful answers.
        median_seconds: median time to an answer.
        high_seconds: 95th percentile of the time to an answer.
        answers_a_second: rate over all clients.
        clips_a_batch: mean number of clips embedded together.
    """

    clients: int
    answers: int
    median_seconds: float
    high_seconds: float
    answers_a_second: float
    clips_a_batch: float


def measure_runtimes(name: str, rounds: int) -> list[Runtime]:
    """Real-time factors of a network of published size, all runtimes in turn.

    Raises:
        ValueError: unknown name.
    """
    trunk: Any = lookup(MODELS, name, "model").options
    torch.manual_seed(0)
    mels = {"num_mels": trunk.published.mels} if trunk.published.mels else {}
    net = SpeakerNet.named(name, embedding_dim=trunk.published.dim, front_end_options=mels).eval()
    folded = copy.deepcopy(net)
    fold_batch_norms(folded)
    content = onnx_bytes(ModelFile(net, {}))
    waveform = 0.1 * np.random.default_rng(0).standard_normal(
        (1, round(AUDIO_SECONDS * net.sample_rate))
    )
    clip = waveform.astype(np.float32)
    ways = {}
    for threads in THREADS:
        ways["torch", threads] = _torch_way(net, clip, threads)
        ways["torch, norms merged", threads] = _torch_way(folded, clip, threads)
        ways["ONNX Runtime", threads] = _onnx_way(content, clip, threads)
    named = {f"{runtime}|{threads}": way for (runtime, threads), way in ways.items()}
    done = timings(run_in_turn(named, rounds=rounds, warmup=2, settle=1))
    return [
        Runtime(
            name,
            *key,
            one.median_seconds / AUDIO_SECONDS,
            one.quartile_spread_seconds / AUDIO_SECONDS,
        )
        for key, one in zip(ways, done, strict=True)
    ]


def measure_serving(model: Path, clients: int, rounds: int) -> Latency:
    """The latency of `/embed` for parallel clients, each with its own connection.

    Args:
        model: a model file.
        clients: number of clients; they run in this process and share its cores with the server.
        rounds: requests per client.
    """
    verifier = load(model, "cpu")
    service = Service(verifier, None, Limits())
    address = Address("127.0.0.1", 0)
    listener = address.listen()
    server = make_server(service, address, "")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        clips = [
            _wav(one, verifier.sample_rate) for one in synthetic_speech(8, verifier.sample_rate)
        ]
        began = time.perf_counter()
        seconds = asyncio.run(_ask(base, clips, clients, rounds))
        taken = time.perf_counter() - began
        num_batches = service.batcher.num_batches
        num_clips = service.batcher.num_clips
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
    return Latency(
        clients,
        len(seconds),
        statistics.median(seconds),
        float(np.percentile(seconds, PERCENTILE)),
        len(seconds) / taken,
        num_clips / num_batches,
    )


async def _ask(base: str, clips: list[bytes], clients: int, rounds: int) -> list[float]:
    """Seconds to every answer; a failed request ends the measurement."""

    async def be_client(number: int) -> list[float]:
        waited = []
        async with httpx.AsyncClient(base_url=base, timeout=300) as client:
            for row in range(rounds):
                began = time.perf_counter()
                answer = await client.post(
                    "/embed", files={"audio": ("a.wav", clips[(number + row) % len(clips)])}
                )
                answer.raise_for_status()
                waited.append(time.perf_counter() - began)
        return waited

    found = await asyncio.gather(*[be_client(number) for number in range(clients)])
    return [one for waited in found for one in waited]


def _torch_way(net: SpeakerNet, clip: np.ndarray, threads: int) -> Way:
    waveform = torch.from_numpy(clip)

    def run(_: None) -> int:
        net.embed(waveform, sample_rate=net.sample_rate)
        return 1

    return Way(run, _with_threads(threads))


def _onnx_way(content: bytes, clip: np.ndarray, threads: int) -> Way:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(_: None) -> int:
        session.run(None, {INPUT: clip})
        return 1

    return Way(run)


def _with_threads(threads: int) -> Callable[[], None]:
    return lambda: torch.set_num_threads(threads)


def _wav(samples: np.ndarray, sample_rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, sample_rate, 0, "NONE", ""))
        written.writeframes((32767 * samples.clip(-1, 1)).astype("<i2").tobytes())
    return file.getvalue()
