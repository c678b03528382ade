"""The suite `--models`: a training step and an embedding of each network, in turn in one process.

Networks are those of the tables, at their published sizes; batches are noise, so no data is needed. Precision, threads
and memory are the configuration's. Compiling takes minutes a network, so it is measured for those that are asked for
with `--compiled`, each against its own eager step.
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
# The first steps find memory and kernels; the first after another network finds cold caches.
WARMUP_RUNS, SETTLING_RUNS = 2, 1


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """What a network costs on this machine.

    Attributes:
        name: in a configuration.
        step_seconds: median of a training step.
        step_spread_seconds: between its quartiles.
        embedding_seconds: median for one utterance of a batch.
        embedding_spread_seconds: the same for an embedding.
    """

    name: str
    step_seconds: float
    step_spread_seconds: float
    embedding_seconds: float
    embedding_spread_seconds: float


def measure_models(config: Config, names: Sequence[str], *, batch_size: int, rounds: int) -> list[ModelCosts]:
    """Time a step and an embedding of every network in turn, first all steps, then all embeddings.

    Args:
        config: of everything but the network: optimizer, loss, precision, machine.
        names: of the networks.
        batch_size: crops of 2 s in a step, and utterances of 2 s that are embedded at once.
        rounds: runs of each that count.

    Raises:
        ValueError: an unknown name, or a network that this machine cannot train.
    """
    for name in names:
        lookup(MODELS, name, "model")
    prepare_machine(config)
    configs = {name: published_config(config, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        # A run folder has one trainer.
        steps = {name: trainer_step(one, Path(folder) / name, batch_size) for name, one in configs.items()}
        trained = _in_turn(steps, rounds)
    del steps
    embedded = _in_turn({name: embedding_run(one, batch_size) for name, one in configs.items()}, rounds)
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
    """What compiling a network costs and brings on this machine.

    Attributes:
        name: in a configuration.
        compile_seconds: of the first step, which compiles the network.
        eager_seconds: median of a training step as it comes.
        compiled_seconds: the same compiled.
        ratio: compiled by eager, median over the rounds.
        loss_difference: of the first step's loss from the eager one's, relative.
    """

    name: str
    compile_seconds: float
    eager_seconds: float
    compiled_seconds: float
    ratio: float
    loss_difference: float


def measure_compiled(config: Config, names: Sequence[str], *, batch_size: int, rounds: int) -> Iterator[CompiledCosts]:
    """Time a step of every network eager and compiled in turn, network after network, each reported when it is done.

    Args:
        config: as in `measure_models`; `runtime.compile_scope` says what is compiled.
        names: of the networks.
        batch_size: crops of 2 s in a step.
        rounds: steps of each that count.

    Raises:
        ValueError: an unknown name, or a network that this machine cannot train or compile.
    """
    for name in names:
        lookup(MODELS, name, "model")
    prepare_machine(config)
    for name in names:
        torch._dynamo.reset()  # what the last network left
        with tempfile.TemporaryDirectory() as folder:
            eager_config = published_config(config, name)
            compiled_config = variant_config(eager_config, "default + compile")
            eager, eager_step = trainer_and_step(eager_config, Path(folder) / "eager", batch_size)
            compiled, compiled_step = trainer_and_step(compiled_config, Path(folder) / "compiled", batch_size)
            eager_step()
            begin = time.perf_counter()
            compiled_step()
            compile_seconds = time.perf_counter() - begin
            if not compiled.step.compiler.is_compiled:
                raise ValueError(f"{name} was not compiled; the log says why")
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
    """The configuration with a network as it was published: embedding, mel bands, front end and pooling."""
    trunk: Any = lookup(MODELS, name, "model").options
    mels = {"num_mels": trunk.published.mels} if trunk.published.mels else {}
    # Weights are random: a backbone has its sizes alone, those of WavLM-Base.
    backbone = {"options": {"config": {"model_type": "wavlm"}}} if name == "Pretrained" else {}
    config = replaced(
        config,
        model={"name": name, "embedding_dim": trunk.published.dim, "pooling": "auto", **backbone},
        frontend={"name": "auto", **mels},
    )
    return variant_config(config, "default")


def embedding_run(config: Config, batch_size: int) -> Callable[[], None]:
    """Waveforms to embeddings in the precision of evaluation, as a callable."""
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
    """Processes that want a core, averaged over the last minute; 0 where the system does not say."""
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
