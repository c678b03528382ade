"""The suite `--models`: a training step and an embedding of each network, in turn in one process.

Networks have their published sizes; batches are noise, so no data is needed. Precision, threads and
memory follow the configuration. Compiling takes minutes per network, so it is measured only with
`--compiled`, against the network's eager step.
"""

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps import RandomBatch, trainer_and_step, trainer_step, variant_config
from benchmarks.timing import Timing, Way, run_in_turn, timings
from speakernet.assembly.training import build_model, prepare_machine
from speakernet.config.schema import Config, replaced
from speakernet.machine.device import find_device
from speakernet.models.options import FAMILIES, MODELS
from speakernet.options import lookup

SMALLEST = tuple(next(iter(sizes)) for sizes in FAMILIES.values())
# The first steps allocate memory and load kernels; the first step after another network has cold
# caches.
WARMUP_RUNS = 2
SETTLING_RUNS = 1


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """The cost of a network on this machine.

    Attributes:
        name: name in a configuration.
        step_seconds: median training step.
        step_spread_seconds: its interquartile range.
        embedding_seconds: median per utterance of a batch.
        embedding_spread_seconds: its interquartile range.
    """

    name: str
    step_seconds: float
    step_spread_seconds: float
    embedding_seconds: float
    embedding_spread_seconds: float


def measure_models(
    config: Config, names: Sequence[str], *, batch_size: int, rounds: int
) -> list[ModelCosts]:
    """Time a step and an embedding of every network in turn, first all steps, then all embeddings.

    Args:
        config: everything but the network: optimizer, loss, precision, machine.
        names: the networks.
        batch_size: crops of 2 s per step, and utterances of 2 s embedded at once.
        rounds: measured runs of each.

    Raises:
        ValueError: unknown name, or a network that this machine cannot train.
    """
    for name in names:
        lookup(MODELS, name, "model")
    prepare_machine(config)
    configs = {name: published_config(config, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        # Each trainer needs its own run folder.
        steps = {
            name: trainer_step(one, Path(folder) / name, batch_size)
            for name, one in configs.items()
        }
        trained = _in_turn(steps, rounds)
    del steps
    embedded = _in_turn(
        {name: embedding_run(one, batch_size) for name, one in configs.items()}, rounds
    )
    return [
        ModelCosts(
            step.name,
            step.median_seconds,
            step.quartile_spread_seconds,
            embedding.median_seconds / batch_size,
            embedding.quartile_spread_seconds / batch_size,
        )
        for step, embedding in zip(trained, embedded, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class CompiledCosts:
    """The cost and gain of compiling a network on this machine.

    Attributes:
        name: name in a configuration.
        compile_seconds: duration of the first step, which compiles the network.
        eager_seconds: median eager training step.
        compiled_seconds: median compiled training step.
        ratio: compiled to eager, median over the rounds.
        loss_difference: relative difference between compiled and eager loss in the first step.
    """

    name: str
    compile_seconds: float
    eager_seconds: float
    compiled_seconds: float
    ratio: float
    loss_difference: float


def measure_compiled(
    config: Config, names: Sequence[str], *, batch_size: int, rounds: int
) -> Iterator[CompiledCosts]:
    """Time eager and compiled steps of one network after the other, yielding each result as it is
    done.

    Args:
        config: as in `measure_models`; `runtime.compile_scope` selects what is compiled.
        names: the networks.
        batch_size: crops of 2 s per step.
        rounds: measured steps of each.

    Raises:
        ValueError: unknown name, or a network that this machine cannot train or compile.
    """
    for name in names:
        lookup(MODELS, name, "model")
    prepare_machine(config)
    for name in names:
        torch._dynamo.reset()  # discard compiled code of the previous network
        with tempfile.TemporaryDirectory() as folder:
            eager_config = published_config(config, name)
            compiled_config = variant_config(eager_config, "default + compile")
            eager, eager_step = trainer_and_step(eager_config, Path(folder) / "eager", batch_size)
            compiled, compiled_step = trainer_and_step(
                compiled_config, Path(folder) / "compiled", batch_size
            )
            eager_step()
            begin = time.perf_counter()
            compiled_step()
            compile_seconds = time.perf_counter() - begin
            if not compiled.step.compiler.is_compiled:
                raise ValueError(f"{name} was not compiled; see the log for the reason")
            losses = []
            for trainer in (eager, compiled):
                trainer.recent.fetch_into(trainer.state, trainer.precision)
                losses.append(trainer.recent.means()["loss"])
            one, other = _in_turn({"eager": eager_step, "compiled": compiled_step}, rounds)
        yield CompiledCosts(
            name,
            compile_seconds,
            one.median_seconds,
            other.median_seconds,
            other.ratio,
            abs(losses[1] - losses[0]) / abs(losses[0]),
        )


def published_config(config: Config, name: str) -> Config:
    """The configuration with a network as published: embedding size, mel bands, front end and
    pooling.
    """
    trunk: Any = lookup(MODELS, name, "model").options
    mels = {"num_mels": trunk.published.mels} if trunk.published.mels else {}
    # Weights are random, so a backbone needs only its sizes, here WavLM-Base's.
    backbone = {"options": {"config": {"model_type": "wavlm"}}} if name == "Pretrained" else {}
    config = replaced(
        config,
        model={"name": name, "embedding_dim": trunk.published.dim, "pooling": "auto", **backbone},
        frontend={"name": "auto", **mels},
    )
    return variant_config(config, "default")


def embedding_run(config: Config, batch_size: int) -> Callable[[], None]:
    """A callable that embeds a batch in the precision of evaluation."""
    torch.manual_seed(config.runtime.seed)
    device = find_device(config.runtime)
    net = build_model(config).to(device).eval()
    batch = RandomBatch.of(batch_size, device)
    lengths = torch.full((batch_size,), batch.waveforms.shape[1])

    def run() -> None:
        with torch.inference_mode():
            net.embed(batch.waveforms, lengths, sample_rate=config.data.sample_rate)

    return run


def load_now() -> float:
    """The system's load average over the last minute; 0 if it does not report one."""
    with contextlib.suppress(AttributeError, OSError):
        return os.getloadavg()[0]
    return 0.0


def _in_turn(runs: Mapping[str, Callable[[], None]], rounds: int) -> list[Timing]:
    def counted(run: Callable[[], None]) -> Way:
        def once(prepared: None) -> int:
            run()
            return 1

        return Way(once)

    ways = {name: counted(run) for name, run in runs.items()}
    return timings(run_in_turn(ways, rounds=rounds, warmup=WARMUP_RUNS, settle=SETTLING_RUNS))
