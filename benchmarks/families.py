"""The suite `--models`: a training step and an embedding of each network, in turn in one process.

Networks are those of the tables, at their published sizes; batches are noise, so no data is needed. Precision, threads
and memory are the configuration's, compiling is off: it would take minutes a network.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps import RandomBatch, trainer_step, variant_config
from benchmarks.timing import Timing, Way, run_in_turn, timings
from speakernet.assembly.model import build_model
from speakernet.assembly.training import prepare_machine
from speakernet.config.schema import Config, replaced
from speakernet.machine.device import find_device
from speakernet.models.options import FAMILIES, MODELS
from speakernet.registry import lookup

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
        embedding_spread_seconds: likewise.
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


def published_config(config: Config, name: str) -> Config:
    """The configuration with a network as it was published: embedding, mel bands, front end and pooling."""
    trunk: Any = lookup(MODELS, name, "model").options
    mels = {"num_mels": trunk.published_mels} if trunk.published_mels else {}
    config = replaced(
        config,
        model={"name": name, "embedding_dim": trunk.published_dim, "pooling": "auto"},
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
