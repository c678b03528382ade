"""Two processes give the same results compiled and eager, to 1e-5; graph breaks are counted."""

import functools
from unittest.mock import patch

import pytest
import torch
from torch import nn

from speakernet.frontend.perturbation import keep_draws_eager
from speakernet.losses.options import LOSSES
from speakernet.models.layers import Trunk
from speakernet.options import create, options_of
from speakernet.parallel.sync_norm import synchronize_norms
from speakernet.training.compiling import Compiler, enable_gradient_checkpointing
from speakernet.training.exchange import SeveralProcesses
from speakernet.training.optimizers import create_optimizer
from speakernet.training.options import OPTIMIZERS, RuntimeOptions, TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.step import StepTools, TrainingStep
from tests.parallel.several import in_several
from tests.parallel.test_same_meaning import CASES, CLASSES, CPU, batch_of

STEPS = 3
# Name -> scope, whether norms are shared, whether blocks are checkpointed; graphs and breaks of a
# compiled run. Equal blocks share graphs; with shared norms the graphs are the stem, a block before
# and after its norm, and the rest.
WAYS = {
    "whole": ("whole", False, False, 1, 0),
    "checkpointed": ("regional", False, True, 1, 0),
    "shared norms": ("whole", True, False, 4, 2),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, hidden):
        return hidden + self.norm(self.conv(hidden)).relu_()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.stem = nn.Conv1d(1, 4, 16, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(4, 8)

    def forward(self, waveforms):
        return self.last(self.blocks(self.stem(waveforms[:, None])).square().mean(-1))


def train(scope, shares_norms, checkpoints, when):
    """Weights, statistics and losses after some steps, and torch's counters."""
    counters = torch._dynamo.utils.counters
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(1)
    net = Net().train()
    loss = create(
        LOSSES["amsoftmax"],
        options_of(LOSSES, "amsoftmax", {}, "loss"),
        embedding_dim=8,
        num_classes=CLASSES,
        seed=5,
    )
    if shares_norms:
        synchronize_norms(net, CPU)
    if checkpoints:
        enable_gradient_checkpointing(net)
    step = TrainingStep(
        net,
        loss,
        create_optimizer(OPTIMIZERS["sgd"].options(learning_rate=0.05), [net, loss], CPU),
        Precision(RuntimeOptions(), "no", CPU),
        TrainingOptions(),
        utterances_per_speaker=1,
        tools=StepTools(
            SeveralProcesses(net, loss, CPU),
            Compiler(
                net, RuntimeOptions(compile=when, compile_scope=scope), prepare=keep_draws_eager
            ),
        ),
    )
    step.exchange.begin_epoch()
    losses = []
    for number in range(STEPS):
        step.add(batch_of(CASES["amsoftmax"], number))
        losses.append(step.finish(0.05).loss)
    state = {**net.state_dict(), "losses": torch.stack(losses)}
    return state, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def everything():
    found = {"whole": [train(*WAYS["whole"][:3], when) for when in ("off", "on")]}
    # Late: importing it takes seconds, which default tests do not need.
    from torch._dynamo.backends.registry import lookup_backend

    # Code is generated only once; the other cases differ in graphs and in what surrounds them.
    traced = functools.partial(patch, "torch._inductor.compile_fx.compile_fx")
    with traced(lambda graph, inputs, **options: lookup_backend("aot_eager")(graph, inputs)):
        found |= {
            name: [train(*WAYS[name][:3], when) for when in ("off", "on")]
            for name in WAYS
            if name not in found
        }
    return found


@pytest.mark.slow
def test_compiled_equals_eager(tmp_path):
    for answer in in_several(__file__, "everything", tmp_path):
        for name, (*_, graphs, breaks) in WAYS.items():
            (eager, *none), (compiled, *counted) = answer[name]
            assert none == [0, 0] and counted == [graphs, breaks], name
            for key, value in eager.items():
                torch.testing.assert_close(
                    compiled[key], value, rtol=1e-5, atol=1e-5, msg=f"{name}: {key}"
                )
            assert eager["blocks.0.norm.num_batches_tracked"] == STEPS
