"""The training step measured: each speed-up on and off, alone and together, in paired runs; and its peak memory.

The reference is the step as one writes it by hand: the plain definition of the network and loss in torch, float32,
torch's plain Adam, forward, backward, update. Batches are random numbers of the right shape, so no data is needed.
"""

import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from speakernet.build.model import build_loss, build_model
from speakernet.build.training import build_precision, build_trainer
from speakernet.config.schema import Config
from speakernet.performance.paired import Timing, time_in_turn
from speakernet.performance.plain_models import PlainAMSoftmax, plain_model
from speakernet.performance.system import MemoryMonitor
from speakernet.training.trainer import Trainer

NUM_SPEAKERS = 150
# voxceleb_trainer's sizes: mel bands of its definitions, and its embedding.
CLASSIC_MELS = {"ResNetSE34L": 40, "ResNetSE34V2": 64, "VGGVox": 40}
CLASSIC_DIM = 512
BY_HAND = "the default's forward, backward and update alone"
CROP_SAMPLES = 32240  # 200 frames of 10 ms with a window of 25 ms
# One variant of the trainer by name: what it sets in `runtime` and `optimizer`.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "float32": {"runtime": {"precision": "no"}, "optimizer": {"fused": "off"}},
    "float32 + fused": {"runtime": {"precision": "no"}},
    "float32 + channels_last": {"runtime": {"precision": "no", "channels_last": "on"}},
    "default": {},
    "default + channels_last": {"runtime": {"channels_last": "on"}},
    "default + checkpointing": {"runtime": {"gradient_checkpointing": True}},
    "float32 + compiled": {"runtime": {"precision": "no", "compile": "on"}},
    "default + compiled": {"runtime": {"compile": "on"}},
    "default + compiled + channels_last": {"runtime": {"compile": "on", "channels_last": "on"}},
    "default + compiled by block": {"runtime": {"compile": "on", "compile_scope": "regional"}},
}


@dataclasses.dataclass
class RandomBatch:
    """A batch of noise with the labels 0, 1, 2 …"""

    waveforms: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(cls, batch_size: int, device: torch.device) -> "RandomBatch":
        """One batch on the device."""
        noise = torch.randn(batch_size, CROP_SAMPLES, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(batch_size) % NUM_SPEAKERS
        return cls((0.1 * noise).to(device), labels.to(device), torch.arange(batch_size))


class OneBatchLoader:
    """Gives the same batch again and again, without end for any benchmark."""

    utterances_per_speaker = 1

    def __init__(self, batch: RandomBatch) -> None:
        self.batch = batch

    def set_epoch(self, epoch: int) -> None:
        """Every epoch is the same."""

    def __len__(self) -> int:
        return 1 << 20

    def __iter__(self) -> Iterator[RandomBatch]:
        return itertools.repeat(self.batch)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take up."""

    def file_names(self, indices: torch.Tensor) -> list[str]:
        """Noise comes from no file."""
        return []

    def epoch_report(self) -> Mapping[str, Any]:
        """Nothing happened."""
        return {}


def variant_config(config: Config, name: str) -> Config:
    """The configuration with a variant's settings; everything else stays."""
    fixed: dict[str, dict[str, Any]] = {"runtime": {"compile": "off"}}
    sections = VARIANTS[name]
    for section in {*fixed, *sections}:
        fields = {**fixed.get(section, {}), **sections.get(section, {})}
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})
    return config


def trainer_step(config: Config, folder: Path, batch_size: int) -> tuple[Callable[[], None], Trainer]:
    """One whole step of a real trainer as a callable: what the loop does between two batches, progress line and all."""
    torch.manual_seed(config.runtime.seed)
    net, loss = build_model(config), build_loss(config, NUM_SPEAKERS)
    device = torch.device("cuda" if torch.cuda.is_available() and config.runtime.device != "cpu" else "cpu")
    loader = OneBatchLoader(RandomBatch.of(batch_size, device))
    trainer = build_trainer(config, net, loss, loader, lambda: {"eer_percent": 50.0}, folder)
    net.train()
    loss.train()
    batches = iter(loader)

    def run() -> None:
        trainer._one_step(batches, len(loader))
        trainer._after_step(len(loader))

    return run, trainer


def classic_config(config: Config, model: str) -> Config:
    """The configuration with voxceleb_trainer's own sizes of a model, and AM-softmax."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, name=model, embedding_dim=CLASSIC_DIM),
        frontend=dataclasses.replace(config.frontend, num_mels=CLASSIC_MELS.get(model, config.frontend.num_mels)),
        loss=dataclasses.replace(config.loss, name="amsoftmax"),
    )


def plain_step(config: Config, batch_size: int, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """The step as one writes it by hand: plain network, plain loss, plain Adam; below float32 under autocast."""
    torch.manual_seed(config.runtime.seed)
    front_end = build_model(config).front_end
    net = plain_model(config.model.name, front_end, config.model.embedding_dim, config.frontend.num_mels).train()
    loss = PlainAMSoftmax(config.model.embedding_dim, NUM_SPEAKERS, config.loss.margin, config.loss.scale).train()
    optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()], lr=1e-3)
    return _by_hand(optimizer, lambda batch: loss(net(batch.waveforms), batch.labels), batch_size, dtype)


def by_hand_step(config: Config, batch_size: int) -> Callable[[], None]:
    """Forward, backward and fused Adam of our network, nothing else: the trainer's overhead is measured against it."""
    torch.manual_seed(config.runtime.seed)
    net, loss = build_model(config).train(), build_loss(config, NUM_SPEAKERS).train()
    optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()], lr=1e-3, fused=True)
    dtype = build_precision(config, torch.device("cpu")).dtype
    return _by_hand(optimizer, lambda batch: loss(net(batch.waveforms), batch.labels)[0], batch_size, dtype)


def _by_hand(
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[RandomBatch], torch.Tensor],
    batch_size: int,
    dtype: torch.dtype,
) -> Callable[[], None]:
    batch = RandomBatch.of(batch_size, torch.device("cpu"))

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            value = loss_of(batch)
        value.backward()
        optimizer.step()

    return run


def measure_steps(config: Config, variants: list[str], *, batch_size: int, rounds: int) -> list[Timing]:
    """Time the plain step and every variant in turn.

    Raises:
        ValueError: an unknown variant, or one that this machine cannot run.
    """
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown:
        raise ValueError(f"unknown variant {unknown[0]!r}; known: {', '.join(VARIANTS)}")
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Callable[[], None]] = {"plain definition": plain_step(config, batch_size)}
        if "default" in variants:
            runs["plain definition under bf16 autocast"] = plain_step(config, batch_size, torch.bfloat16)
            runs[BY_HAND] = by_hand_step(config, batch_size)
        for number, name in enumerate(variants):
            runs[name], _ = trainer_step(variant_config(config, name), Path(folder) / str(number), batch_size)
        return time_in_turn(runs, rounds=rounds, warmup=2)


def measure_memory(model: str, variant: str, batch_size: int) -> int:
    """Bytes that two steps of a variant add to a fresh process at their peak.

    A process of its own, because memory that an earlier variant gave back would hide what this one takes.
    """
    command = [sys.executable, "-m", "speakernet", "benchmark-step", "--memory_of", variant, "--models", model]
    command += ["--step_batch", str(batch_size)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"measuring the memory of {variant} failed: {result.stderr.strip()[-500:]}")
    return int(json.loads(result.stdout.splitlines()[-1])["added_bytes"])


def added_bytes(config: Config, variant: str, batch_size: int) -> int:
    """Bytes that two steps add to this process at their peak; call it in a fresh one.

    A step of two crops comes first: it loads the kernels' code, hundreds of megabytes that no batch size changes.
    """
    config = variant_config(config, variant)
    with tempfile.TemporaryDirectory() as folder:
        warm, _ = trainer_step(config, Path(folder) / "warm", 2)
        warm()
        run, _ = trainer_step(config, Path(folder) / "run", batch_size)
        with MemoryMonitor() as monitor:
            run()
            run()
        return monitor.added_bytes
