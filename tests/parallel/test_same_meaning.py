"""Two processes give the results of one: weights, step figures, statistics, sharded heads, undone
steps.

They start once and do everything in float64: in float32, ReLUs near zero flip with the kernels that
a processor chooses for a share of a batch, and weights differ by far more than rounding.
"""

import contextlib
import dataclasses
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from speakernet import distributed
from speakernet.frontend.perturbation import keep_draws_eager
from speakernet.losses.options import LOSSES, AAMSoftmaxOptions
from speakernet.losses.sharded import shard
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import create
from speakernet.parallel.sharding import share_of
from speakernet.parallel.sync_norm import synchronize_norms
from speakernet.training.compiling import OBSERVED_STEPS, Compiler
from speakernet.training.exchange import SeveralProcesses
from speakernet.training.fully_sharded import FullySharded
from speakernet.training.optimizers import create_optimizer
from speakernet.training.options import OPTIMIZERS, RuntimeOptions, TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.step import StepTools, TrainingStep
from tests.losses.sharded_heads import HEADS
from tests.parallel.several import in_several

CPU = torch.device("cpu")
CLASSES = 7
STEPS = 5
SAMPLES = 4800


@dataclasses.dataclass(frozen=True)
class Case:
    """A training run of a few steps."""

    loss: Any
    """Its name, or its options."""
    is_frozen: bool = False
    per_speaker: int = 1
    units: int = 4
    accumulation: int = 1
    head_only: bool = False
    is_sharded: bool = False
    """Whether each process holds a shard of the head."""
    poisoned: int = -1
    """The step whose first utterance has NaN."""
    has_own_norms: bool = False
    """Whether each process normalises by its own share of the batch (`runtime.sync_batch_norm:
    off`)."""
    has_no_whole: bool = False
    """Whether each process holds a shard of everything (`runtime.parallel: fsdp`)."""
    optimizer: str = "sgd"
    freezes: bool = False
    """Whether the last layer is frozen after the second step."""


CENTRES = AAMSoftmaxOptions(sub_centers=2, inter_top_k=2)
CASES = {
    "amsoftmax": Case("amsoftmax"),
    "aamsoftmax with centres": Case(CENTRES),
    "GE2E, frozen norm": Case("ge2e", per_speaker=3, is_frozen=True),
    "triplet": Case("triplet", per_speaker=2),
    "uneven shares": Case("aamsoftmax", units=5),
    "accumulation of uneven shares": Case("amsoftmax", units=3, accumulation=2),
    "gradient cache": Case("angleproto", per_speaker=2, accumulation=2),
    "shared head": Case(CENTRES, is_sharded=True, units=5),
    "shared head, accumulation": Case("amsoftmax", is_sharded=True, accumulation=2),
    "shared head of two losses, gradient cache": Case(
        "softmaxproto", per_speaker=2, accumulation=2, is_sharded=True
    ),
    "only a shared head": Case("sphereface2", is_frozen=True, head_only=True, is_sharded=True),
    "fsdp, accumulation of uneven shares": Case(
        "aamsoftmax", units=3, accumulation=2, has_no_whole=True
    ),
    "fsdp, gradient cache, undone": Case(
        "triplet", per_speaker=2, accumulation=2, has_no_whole=True, poisoned=1
    ),
    "fsdp, adamw": Case("amsoftmax", has_no_whole=True, optimizer="adamw"),
    "fsdp, frozen layer": Case("aamsoftmax", has_no_whole=True, freezes=True),
    "a step that is undone, shared head": Case("amsoftmax", poisoned=1, is_sharded=True),
}
for head in HEADS:
    CASES[repr(head)] = Case(head, per_speaker=1 + head.is_metric, is_sharded=True)


@dataclasses.dataclass
class Share:
    """One process's share of a batch."""

    waveforms: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    rank_sizes: tuple[int, ...]
    draw_key: int = 3

    @property
    def draw_rows(self):
        """The rows: no utterance is repeated."""
        return self.indices.numpy()


def batch_of(case, number):
    """This process's share of batch `number`."""
    generator = torch.Generator().manual_seed(100 + number)
    labels = torch.randperm(CLASSES, generator=generator)[: case.units].repeat_interleave(
        case.per_speaker
    )
    waveforms = 0.1 * torch.randn(len(labels), SAMPLES, generator=generator) * (1 + labels[:, None])
    if number == case.poisoned:
        waveforms[0, 0] = math.nan
    rank = distributed.rank()
    size = distributed.world_size()
    edges = [case.units * part // size * case.per_speaker for part in range(size + 1)]
    own = slice(edges[rank], edges[rank + 1])
    sizes = tuple(np.diff(edges).tolist())
    return Share(waveforms[own], labels[own], torch.arange(len(labels))[own] + 50 * number, sizes)


def make_network():
    torch.manual_seed(1)
    return SpeakerNet.named(
        "ResNet",
        embedding_dim=8,
        model_options={"channels": 8, "blocks": [1], "stem_stride": 4},
        front_end="fbank",
        front_end_options={"num_mels": 24, "dither": 1.0, "spec_augment": True},
    )


def build(case, net=None, compiling=None):
    """Network, loss and step, for one process or several; options for compiling."""
    net = net or make_network()
    options = LOSSES[case.loss].options() if isinstance(case.loss, str) else case.loss
    loss = create(LOSSES[options.name], options, embedding_dim=8, num_classes=CLASSES, seed=5)
    net.train()
    if case.is_frozen:
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
    for parameter in net.parameters():
        parameter.requires_grad_(not case.head_only)
    if distributed.is_distributed():
        if not case.has_own_norms:
            synchronize_norms(net, CPU)
        if case.is_sharded:
            shard(loss)
    kind = FullySharded if case.has_no_whole else SeveralProcesses
    exchange = kind(net, loss, CPU) if distributed.is_distributed() else None
    tools = StepTools(exchange)
    if compiling:
        tools.compiler = Compiler(net, compiling, prepare=keep_draws_eager)
    step = TrainingStep(
        net,
        loss,
        create_optimizer(OPTIMIZERS[case.optimizer].options(learning_rate=0.05), [net, loss], CPU),
        Precision(RuntimeOptions(), "no", CPU),
        TrainingOptions(accumulation_steps=case.accumulation),
        utterances_per_speaker=case.per_speaker,
        tools=tools,
    )
    return net, loss, step


def train(case):
    """The results of some steps."""
    net, loss, step = build(case)
    rows = []
    wishes = []
    is_last_rank = distributed.rank() == distributed.world_size() - 1
    # Only the last process has a wish, after the third step.
    step.exchange.listen_to(lambda: [len(rows) == 2 and is_last_rank, False])
    step.exchange.begin_epoch()
    for number in range(STEPS):
        for part in range(case.accumulation):
            step.add(
                batch_of(case, number * case.accumulation + part),
                is_last=part + 1 == case.accumulation,
            )
        results = step.finish(0.05)
        if case.has_no_whole and number == 1 and distributed.is_distributed():
            # An evaluation between two steps, while statistics differ between processes.
            step.exchange.share_statistics()
            for _ in range(2 * distributed.rank()):
                net.embed(torch.randn(1, SAMPLES), sample_rate=16000)
        if case.has_no_whole and number == 1:
            net.embedding.requires_grad_(not case.freezes)
            step.exchange.begin_epoch()
        wishes.append(step.exchange.agreed_wishes())
        rows.append([float(results.loss), float(results.accuracy), float(results.grad_norm)])
    states = net.state_dict(), loss.state_dict()
    if case.has_no_whole and distributed.rank():
        states = {}, {}
    return {
        "net": {
            name: value for name, value in states[0].items() if isinstance(value, torch.Tensor)
        },
        "loss": {name: value for name, value in states[1].items() if value.is_floating_point()},
        "shard": sum(len(rows) for rows in loss.parameters() if share_of(rows) is not None),
        "rows": rows,
        "wishes": wishes,
    }


def own_norms():
    """Running means of local norms after a step; the same after sharing; and the weights."""
    net, _, step = build(Case("amsoftmax", has_own_norms=True))

    def means():
        state = net.state_dict().items()
        return [value.clone() for name, value in state if name.endswith("running_mean")]

    step.exchange.begin_epoch()
    step.add(batch_of(CASES["amsoftmax"], 0))
    step.finish(0.05)
    before = means()
    step.exchange.share_statistics()
    return [before, means(), [weights.detach() for weights in net.parameters()]]


class Compiled(nn.Linear):
    """Counts compilations instead of compiling, which takes minutes."""

    count = 0

    def compile(self, **options):
        self.count += 1


def count_compilations():
    """Compilations if this rank's steps are long and the other's short, and the other way round."""
    counts = []
    for slow_rank in (0, 1):
        net = Compiled(2, 2)
        compiler = Compiler(net, RuntimeOptions(compile="auto", compile_scope="whole"))
        for _ in range(OBSERVED_STEPS):
            compiler.consider(1.0 if distributed.rank() == slow_rank else 1e-6, 1000)
        counts.append(net.count)
    return counts


@contextlib.contextmanager
def in_float64():
    """Every network, loss and figure in float64, including casts to float32 in losses and front
    ends.
    """
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def everything():
    """All results of this process."""
    torch.set_num_threads(1)
    results = {}
    if distributed.is_distributed():
        results |= {"own norms": own_norms(), "followed": count_compilations()}
    with in_float64():
        return results | {name: train(case) for name, case in CASES.items()}


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    alone = everything()
    several = in_several(__file__, "everything", tmp_path)
    _check_own_norms(*(answer["own norms"] for answer in several))
    # The clock of rank 0 decides whether compiling pays.
    assert [answer["followed"] for answer in several] == [[1, 0]] * 2
    for name in CASES:
        _check_training(name, alone[name], [answer[name] for answer in several])


def _check_own_norms(first, second):
    def equal(some, others):
        return [torch.equal(*pair) for pair in zip(some, others, strict=True)]

    assert not any(equal(first[0], second[0])), "the shares differ"
    # The statistics of the first process are evaluated and saved.
    assert all(equal(first[1], first[0]) + equal(second[1], first[0]))
    assert all(equal(first[2], second[2]))


def _check_training(name, alone, several):
    """Weights and figures equal to 1e-8, the same bits in both processes, and the weights have
    changed.
    """
    case = CASES[name]
    with in_float64():
        fresh = build(case)[0].state_dict()
    for rank, answer in enumerate(several):
        # A sharded head is assembled in the first process, as is a network in shards.
        parts = ["loss"] if not rank or not (case.is_sharded or case.has_no_whole) else []
        parts += ["net"] if not rank or not case.has_no_whole else []
        for part in parts:
            assert answer[part].keys() == alone[part].keys()
            for key, expected in alone[part].items():
                found = answer[part][key].double()
                atol = 1e-8 * max(1.0, float(expected.abs().max()))
                message = f"{name}: {part} {key}"
                torch.testing.assert_close(found, expected.double(), rtol=0, atol=atol, msg=message)
                if rank:
                    assert torch.equal(answer[part][key], several[0][part][key]), message
        np.testing.assert_allclose(
            answer["rows"], alone["rows"], rtol=1e-6, atol=1e-6, equal_nan=True, err_msg=name
        )
        if case.is_sharded:
            # Each process holds only its own speakers.
            whole = sum(len(rows) for rows in alone["loss"].values() if rows.ndim)
            assert answer["shard"] == whole * (3, 4)[rank] // CLASSES, name
        # The last process made its request after the third step.
        assert answer["wishes"] == [[number == 2, False] for number in range(STEPS)], name
    moved = {key for key, value in alone["net"].items() if not torch.equal(value, fresh[key])}
    assert bool(moved) != case.head_only, name
