"""The suites `--steps` and `--memory`: each speed-up on and off, alone and together, in paired
runs; peak memory.

The reference is a hand-written step: the plain definition of network and loss in torch, float32,
torch's plain Adam, forward, backward, update. Batches are random numbers of the right shape, so no
data is needed. Every variant runs in its own process, because memory settings are among the
speed-ups, and they run in turn.
"""

import dataclasses
import itertools
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.plain_models import PlainAMSoftmax, plain_model
from benchmarks.served import own_command, own_environment, serve, time_processes
from benchmarks.timing import Timing
from speakernet.assembly.training import (
    build_loss,
    build_model,
    build_precision,
    build_trainer,
    prepare_machine,
    refuse_impossible,
)
from speakernet.config.schema import Config, replaced
from speakernet.losses.options import AMSoftmaxOptions, LossOptions
from speakernet.machine.device import find_device
from speakernet.machine.memory import Monitor
from speakernet.parallel import distributed
from speakernet.training.profiler import peak_tensor_bytes
from speakernet.training.trainer import Trainer

NUM_SPEAKERS = 150
# voxceleb_trainer's sizes: mel bands of its networks, and its embedding.
CLASSIC_MELS = {"ResNetSE34L": 40, "ResNetSE34V2": 64, "VGGVox": 40}
CLASSIC_DIM = 512
CROP_SAMPLES = 32240  # 200 frames of 10 ms with a window of 25 ms
PLAIN = "plain definition"
PLAIN_BF16 = "plain definition, bf16 autocast"
BY_HAND = "forward, backward, update alone"
AS_BEFORE: dict[str, dict[str, Any]] = {
    "runtime": {"precision": "no", "keep_memory": False, "channels_last": "off"},
    "optimizer": {"fused": "off"},
}
# Variants of the trainer: name -> section -> options. First each speed-up alone, then together.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "none": AS_BEFORE,
    "fused only": {"runtime": AS_BEFORE["runtime"]},
    "channels_last only": {**AS_BEFORE, "runtime": {"precision": "no", "keep_memory": False}},
    "keep_memory only": {**AS_BEFORE, "runtime": {"precision": "no", "channels_last": "off"}},
    "bf16 only": {**AS_BEFORE, "runtime": {"keep_memory": False, "channels_last": "off"}},
    "compile only": {**AS_BEFORE, "runtime": {**AS_BEFORE["runtime"], "compile": "on"}},
    "all but bf16": {"runtime": {"precision": "no"}},
    "default": {},
    "default without fused": {"optimizer": {"fused": "off"}},
    "default without channels_last": {"runtime": {"channels_last": "off"}},
    "default without keep_memory": {"runtime": {"keep_memory": False}},
    "default + compile": {"runtime": {"compile": "on"}},
    "default + compile by block": {"runtime": {"compile": "on", "compile_scope": "regional"}},
    "default + checkpointing": {"runtime": {"gradient_checkpointing": True}},
}
# The allocator's heap grows for some steps until it holds all that a step needs.
WARMUP_STEPS = 10
NAMES = (PLAIN, PLAIN_BF16, BY_HAND, *VARIANTS)


@dataclasses.dataclass
class RandomBatch:
    """A batch of noise with labels 0, 1, 2 …"""

    waveforms: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    shares: tuple[int, ...]
    draw_key: int = 0

    @property
    def draw_rows(self) -> np.ndarray:
        """The rows: no utterance is repeated."""
        return self.indices.numpy()

    @property
    def warps(self) -> np.ndarray:
        """No vocal tract is warped."""
        return np.zeros(len(self.labels), dtype=np.int64)

    @classmethod
    def of(cls, batch_size: int, device: torch.device) -> "RandomBatch":
        """One batch on the device; with several processes, each has `batch_size` crops."""
        noise = torch.randn(batch_size, CROP_SAMPLES, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(batch_size) % NUM_SPEAKERS
        shares = (batch_size,) * distributed.world_size()
        return cls((0.1 * noise).to(device), labels.to(device), torch.arange(batch_size), shares)


class OneBatchLoader:
    """Yields the same batch over and over; its epoch is longer than any benchmark."""

    utterances_per_speaker = 1

    def __init__(self, batch: RandomBatch) -> None:
        self.batch = batch

    def set_epoch(self, epoch: int) -> None:
        """Nothing to do: every epoch is the same."""

    def __len__(self) -> int:
        return 1 << 20

    def __iter__(self) -> Iterator[RandomBatch]:
        return itertools.repeat(self.batch)

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def file_names(self, indices: torch.Tensor) -> list[str]:
        """Empty: noise has no files."""
        return []

    def epoch_report(self) -> Mapping[str, Any]:
        """Empty."""
        return {}


def variant_config(config: Config, name: str) -> Config:
    """The configuration with a variant's settings."""
    fixed: dict[str, dict[str, Any]] = {"runtime": {"compile": "off"}}
    sections = VARIANTS[name]
    for section in {*fixed, *sections}:
        fields = {**fixed.get(section, {}), **sections.get(section, {})}
        config = replaced(config, **{section: fields})
    return config


def trainer_step(config: Config, folder: Path, batch_size: int) -> Callable[[], None]:
    """A callable for one complete step of a real trainer, including progress display."""
    return trainer_and_step(config, folder, batch_size)[1]


def trainer_and_step(
    config: Config, folder: Path, batch_size: int
) -> tuple[Trainer, Callable[[], None]]:
    """The trainer, for reading the results of its steps, and its `trainer_step`."""
    torch.manual_seed(config.runtime.seed)
    net = build_model(config)
    loss = build_loss(config, NUM_SPEAKERS)
    device = find_device(config.runtime)
    refuse_impossible(config, net, device)
    loader = OneBatchLoader(RandomBatch.of(batch_size, device))
    trainer = build_trainer(
        config, net, loss, loader, lambda epoch: {"eer_percent": 50.0}, folder, device
    )
    net.train()
    loss.train()
    trainer.step.ranks.begin_epoch()
    batches = iter(loader)

    def run() -> None:
        trainer.run_step(batches)

    return trainer, run


def classic_config(config: Config, model: str) -> Config:
    """The configuration with voxceleb_trainer's sizes for a model, and AM-softmax."""
    mels = {"num_mels": CLASSIC_MELS[model]} if model in CLASSIC_MELS else {}
    return replaced(
        config,
        model={"name": model, "embedding_dim": CLASSIC_DIM},
        frontend={"name": "auto", **mels},
        loss={"name": "amsoftmax"},
    )


def margin_and_scale(options: LossOptions) -> tuple[float, float]:
    """Margin and scale of AM-softmax, the loss of the plain definitions.

    Raises:
        ValueError: any other loss.
    """
    if not isinstance(options, AMSoftmaxOptions):
        raise ValueError(f"loss.name is {options.name}; expected amsoftmax, the only loss compared")
    return options.margin, options.scale


def plain_step(
    config: Config, batch_size: int, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """A hand-written step: plain network, plain loss, plain Adam; with autocast for dtypes other
    than float32.
    """
    torch.manual_seed(config.runtime.seed)
    front_end = build_model(config).front_end
    device = find_device(config.runtime)
    dim = config.model.embedding_dim
    net = plain_model(config.model.name, front_end, dim, front_end.num_features).train().to(device)
    loss = PlainAMSoftmax(dim, NUM_SPEAKERS, *margin_and_scale(config.loss)).train().to(device)
    optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()], lr=1e-3)
    batch = RandomBatch.of(batch_size, device)
    return _by_hand(optimizer, lambda: loss(net(batch.waveforms), batch.labels), device, dtype)


def by_hand_step(config: Config, batch_size: int) -> Callable[[], None]:
    """Forward, backward and fused Adam of our network, and nothing else; the reference for the
    trainer's overhead.
    """
    torch.manual_seed(config.runtime.seed)
    device = find_device(config.runtime)
    net = build_model(config).train().to(device)
    loss = build_loss(config, NUM_SPEAKERS).train().to(device)
    optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()], lr=1e-3, fused=True)
    batch = RandomBatch.of(batch_size, device)
    dtype = build_precision(config, device).dtype
    return _by_hand(optimizer, lambda: loss(net(batch.waveforms), batch.labels)[0], device, dtype)


def _by_hand(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            value = loss()
        value.backward()
        optimizer.step()

    return run


def make_step(config: Config, name: str, folder: Path, batch_size: int) -> Callable[[], None]:
    """The step of a variant; also applies its process-wide settings.

    Raises:
        ValueError: a variant that this machine cannot run.
    """
    if name in (PLAIN, PLAIN_BF16):
        return plain_step(
            config, batch_size, torch.bfloat16 if name == PLAIN_BF16 else torch.float32
        )
    if name == BY_HAND:
        prepare_machine(config)
        return by_hand_step(config, batch_size)
    config = variant_config(config, name)
    prepare_machine(config)
    return trainer_step(config, folder, batch_size)


def serve_steps(config: Config, name: str, batch_size: int) -> None:
    """Run in a separate process: a step for every line of input."""
    with tempfile.TemporaryDirectory() as folder:
        serve(make_step(config, name, Path(folder), batch_size))


def measure_steps(
    model: str, names: Sequence[str], *, batch_size: int, rounds: int, arguments: Sequence[str] = ()
) -> list[Timing]:
    """Time the plain definition's step and every variant in turn.

    Raises:
        ValueError: an unknown variant, or one that this machine cannot run.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"unknown variant {name!r}; known: {', '.join(NAMES)}")
    commands = {}
    for name in dict.fromkeys([PLAIN, *names]):
        # The plain definition runs with torch's defaults: neither kept memory nor huge pages.
        keeps = name == BY_HAND or VARIANTS.get(name, AS_BEFORE).get("runtime", {}).get(
            "keep_memory", True
        )
        measured = ["--steps", model, "--step_of", name, "--step_batch", str(batch_size)]
        commands[name] = own_command(*arguments, *measured), own_environment(huge_pages=keeps)
    # The first step after another process has cold caches, which cost some hundredths of a second;
    # training has none.
    return time_processes(commands, rounds=rounds, warmup=WARMUP_STEPS, settle=1)


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Peak memory of a step, in bytes."""

    tensor_bytes: int
    """Tensors created in the step: activations, gradients, temporary tensors."""
    process_bytes: int
    """Growth of the process, including buffers of kernels and memory held by the allocator."""


def measure_memory(
    model: str, variant: str, batch_size: int, arguments: Sequence[str] = ()
) -> StepMemory:
    """The peak memory of a variant's step, in a fresh process.

    In the same process, memory freed by an earlier variant would hide what this one needs.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; known: {', '.join(VARIANTS)}")
    command = own_command(
        *arguments, "--memory_of", variant, "--steps", model, "--step_batch", str(batch_size)
    )
    # Huge pages would be counted in full, however little of each is used.
    environment = own_environment(huge_pages=False)
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise ValueError(
            f"measuring the memory of {variant} failed: {result.stderr.strip()[-500:]}"
        )
    return StepMemory(**json.loads(result.stdout.splitlines()[-1]))


def step_memory(config: Config, variant: str, batch_size: int) -> StepMemory:
    """The peak memory of a variant's step; call it in a fresh process.

    A step of two crops comes first, to load the code of kernels: hundreds of megabytes, whatever
    the batch size.
    """
    config = variant_config(config, variant)
    prepare_machine(config)
    with tempfile.TemporaryDirectory() as folder:
        # Each trainer needs its own run folder.
        warm = trainer_step(config, Path(folder) / "warm", 2)
        warm()
        run = trainer_step(config, Path(folder) / "run", batch_size)
        with Monitor() as monitor:
            run()
            run()
        return StepMemory(peak_tensor_bytes(run), int(monitor.peak - monitor.start))
