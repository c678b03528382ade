"""The suite `--steps`: a training step against a hand-written one, in paired runs.

The reference is a hand-written step: the plain definition of network and loss in torch, float32,
torch's plain Adam, forward, backward, update. Batches are random numbers of the right shape, so no
data is needed. Every variant runs in its own process, because memory settings are among the
speed-ups, and they run in turn.
"""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.plain_models import PlainAMSoftmax, PlainResNetSE34L
from benchmarks.served import ServedProcess, own_command, own_environment, serve
from benchmarks.timing import Way, run_in_turn, timings
from speakernet import distributed
from speakernet.assembly.training import (
    Parts,
    build_loss,
    build_model,
    build_precision,
    build_trainer,
    prepare_machine,
    refuse_impossible,
)
from speakernet.config.schema import Config, with_changes
from speakernet.losses.options import AMSoftmaxOptions, LossOptions
from speakernet.machine.device import find_device
from speakernet.models.options import FAMILIES, MODELS
from speakernet.options import lookup

NUM_SPEAKERS = 150
# voxceleb_trainer's network and its sizes.
NETWORK = "ResNetSE34L"
NUM_MELS = 40
EMBEDDING_DIM = 512
CROP_SAMPLES = 32240  # 200 frames of 10 ms with a window of 25 ms
PLAIN = "plain definition"
PLAIN_BF16 = "plain definition, bf16 autocast"
BY_HAND = "forward, backward, update alone"
AS_BEFORE: dict[str, dict[str, Any]] = {
    "runtime": {"precision": "no", "keep_memory": False, "channels_last": "off"},
    "optimizer": {"fused": "off"},
}
# Variants of the trainer: name -> section -> options; without any speed-up, and with all.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "none": AS_BEFORE,
    "default": {},
    "default + compile": {"runtime": {"compile": "on"}},
}
# The allocator's heap grows for some steps until it holds all that a step needs.
WARMUP_STEPS = 10
NAMES = (PLAIN, PLAIN_BF16, BY_HAND, *VARIANTS)
SMALLEST = tuple(next(iter(sizes)) for sizes in FAMILIES.values())
"""The smallest network of each family."""


@dataclasses.dataclass
class RandomBatch:
    """A batch of noise with labels 0, 1, 2 …"""

    waveforms: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    rank_sizes: tuple[int, ...]
    draw_key: int = 0

    @property
    def draw_rows(self) -> np.ndarray:
        """The rows: no utterance is repeated."""
        return self.indices.numpy()

    @classmethod
    def of(cls, batch_size: int, device: torch.device) -> "RandomBatch":
        """One batch on the device; with several processes, each has `batch_size` crops."""
        # Noise is as good as speech here: the time of a step does not depend on the values.
        noise = torch.randn(batch_size, CROP_SAMPLES, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(batch_size) % NUM_SPEAKERS
        sizes = (batch_size,) * distributed.world_size()
        return cls((0.1 * noise).to(device), labels.to(device), torch.arange(batch_size), sizes)


# The trainer asks a loader for an epoch and its position. One endless batch answers all of that and
# takes no time, so what is measured is the step alone.
class OneBatchLoader:
    """Yields the same batch over and over; its epoch is longer than any benchmark."""

    utterances_per_speaker = 1
    identity: ClassVar[dict[str, int]] = {}

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
    # `auto` would compile in the middle of the measurement.
    config = with_changes(config, runtime={"compile": "off"})
    return with_changes(config, **VARIANTS[name])


def trainer_step(config: Config, folder: Path, batch_size: int) -> Callable[[], None]:
    """A callable for one complete step of a real trainer, including progress display."""
    torch.manual_seed(config.runtime.seed)
    net = build_model(config)
    loss = build_loss(config, NUM_SPEAKERS)
    device = find_device(config.runtime)
    refuse_impossible(config, net, device)
    # The real trainer, with clipping, the check for non-finite numbers, schedules, averages and the
    # progress bar: all of these are its overhead over a step by hand.
    loader = OneBatchLoader(RandomBatch.of(batch_size, device))
    parts = Parts(net, loss, loader, device)
    trainer = build_trainer(config, parts, lambda epoch: {"eer_percent": 50.0}, folder)
    net.train()
    loss.train()
    trainer.step.exchange.begin_epoch()
    batches = iter(loader)

    def run() -> None:
        trainer.run_step(batches)

    return run


def classic_config(config: Config) -> Config:
    """The configuration with voxceleb_trainer's network in its sizes, and AM-softmax."""
    return with_changes(
        config,
        model={"name": NETWORK, "embedding_dim": EMBEDDING_DIM},
        frontend={"name": "auto", "num_mels": NUM_MELS},
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


def plain_step(config: Config, batch_size: int, is_bf16: bool) -> Callable[[], None]:
    """A hand-written step: plain network, plain loss, plain Adam; in float32 or by autocast."""
    torch.manual_seed(config.runtime.seed)
    # The same front end on both sides: features are not part of the network's plain definition.
    front_end = build_model(config).front_end
    device = find_device(config.runtime)
    dim = config.model.embedding_dim
    net = PlainResNetSE34L(front_end, dim).train().to(device)
    loss = PlainAMSoftmax(dim, NUM_SPEAKERS, *margin_and_scale(config.loss)).train().to(device)
    optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()], lr=1e-3)
    batch = RandomBatch.of(batch_size, device)
    return _by_hand(optimizer, lambda: loss(net(batch.waveforms), batch.labels), device, is_bf16)


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
    is_bf16 = build_precision(config, device).name == "bf16"
    return _by_hand(optimizer, lambda: loss(net(batch.waveforms), batch.labels)[0], device, is_bf16)


def _by_hand(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    device: torch.device,
    is_bf16: bool,
) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad()
        # Neither scale nor clipping nor checks, as in a loop that somebody writes in an afternoon.
        with torch.autocast(device.type, torch.bfloat16, is_bf16):
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
        return plain_step(config, batch_size, name == PLAIN_BF16)
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
    names: Sequence[str], *, batch_size: int, rounds: int, arguments: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Time the plain definition's step and every variant in turn.

    Raises:
        ValueError: an unknown variant, or one that this machine cannot run.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"unknown variant {name!r}; known: {', '.join(NAMES)}")
    # Each variant in its own process with its own memory settings; the reference comes first, so
    # that all ratios refer to it.
    with contextlib.ExitStack() as stack:
        ways = {}
        for name in dict.fromkeys([PLAIN, *names]):
            # The plain definition runs with torch's defaults: neither kept memory nor huge pages.
            keeps = name == BY_HAND or (name in VARIANTS and name != "none")
            command = own_command(*arguments, "--step_of", name, "--step_batch", str(batch_size))
            process = ServedProcess(name, command, own_environment(huge_pages=keeps))
            ways[name] = Way(stack.enter_context(contextlib.closing(process)).run)
        # The first step after another process has cold caches, which cost some hundredths of a
        # second; training has none.
        return timings(run_in_turn(ways, rounds=rounds, warmup=WARMUP_STEPS, settle=1))


def published_config(config: Config, name: str) -> Config:
    """The configuration with a network as published: embedding size, mel bands, front end and
    pooling.
    """
    # Published sizes, because a speed-up of a toy network says little about the ones that people
    # train.
    trunk: Any = lookup(MODELS, name, "model").options
    mels = {"num_mels": trunk.published.mels} if trunk.published.mels else {}
    # Weights are random, so a backbone needs only its sizes, here WavLM-Base's.
    backbone = {"options": {"config": {"model_type": "wavlm"}}} if name == "Pretrained" else {}
    config = with_changes(
        config,
        model={"name": name, "embedding_dim": trunk.published.dim, "pooling": "auto", **backbone},
        frontend={"name": "auto", **mels},
    )
    return variant_config(config, "default")
