"""A training step reads nothing back from the device and makes no blocking copies; checked without
a GPU.

The device is torch's `meta`: its tensors have shapes but no values, and reading a value is an
error.
"""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speakernet.losses.options import LOSSES
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import create, options_of
from speakernet.training.optimizers import create_optimizer
from speakernet.training.options import OPTIMIZERS, RuntimeOptions
from speakernet.training.precision import Precision
from tests.parallel.test_same_meaning import CPU, Share
from tests.training.training_fakes import make_step

DEVICE = torch.device("meta")
VARIED = {"num_mels": 24, "dither": 1.0, "spec_augment": True}


class Crossings(TorchDispatchMode):
    """Records every value that is read, and every copy between devices."""

    def __init__(self):
        super().__init__()
        self.asked = 0
        self.waited = 0
        self.sent = 0
        self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.asked += func._overloadpacket is torch.ops.aten._local_scalar_dense
        made = func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        given = [tensor.device.type for tensor in leaves if tensor.ndim]
        # A tensor made from Python numbers; on another device, its copy is below what a mode sees.
        self.made += func._overloadpacket is torch.ops.aten.lift_fresh
        if isinstance(made, torch.Tensor) and {made.device.type, *given} == {"cpu", "meta"}:
            is_free = kwargs.get("non_blocking") is True and made.device.type == "meta"
            self.sent += is_free
            self.waited += not is_free
        return made


def test_mode():
    with Crossings() as seen:
        there = torch.zeros(3).to(DEVICE)
        torch.zeros(3).to(DEVICE, non_blocking=True)
        torch.zeros(3).new_tensor([1.0, 2.0])
        with pytest.raises(RuntimeError):
            bool(there.sum() > 0)
    assert (seen.asked, seen.waited, seen.sent, seen.made) == (1, 1, 1, 1)


def step_of(net, loss, per_speaker, device):
    optimizer = create_optimizer(OPTIMIZERS["sgd"].options(learning_rate=0.05), [net, loss], device)
    precision = Precision(RuntimeOptions(), "no", device)
    step = make_step(net, loss, optimizer, per_speaker=per_speaker, precision=precision)
    # As with a fused optimizer on a GPU, whose kernel does not exist for this device.
    step._skips_on_device = True
    optimizer.step = lambda: None
    return step


@pytest.mark.parametrize("device", [DEVICE, CPU])
@pytest.mark.parametrize(
    ("loss", "front_end", "copies", "made"),
    [
        ("aamsoftmax", {"num_mels": 24}, 0, 0),
        ("aamsoftmax", VARIED, 1, 1),
        ("triplet", {"num_mels": 24}, 1, 0),
    ],
)
def test_training_step(monkeypatch, loss, front_end, copies, made, device):
    """The only copies are small and queued: the draws of dither and masks together, the triplets'
    draws.
    """
    per_speaker = LOSSES[loss].options().min_utterances
    labels = torch.arange(3).repeat_interleave(per_speaker)
    rows = torch.arange(len(labels))
    net = SpeakerNet.named(
        "ResNet",
        embedding_dim=8,
        model_options={"channels": 8, "blocks": [1], "stem_stride": 4},
        front_end="fbank",
        front_end_options=front_end,
    )
    head = create(
        LOSSES[loss], options_of(LOSSES, loss, {}, "loss"), embedding_dim=8, num_classes=6, seed=5
    )
    # Autocast does not support this device, and has no effect without mixed precision.
    monkeypatch.setattr(torch, "autocast", lambda *kind, **options: contextlib.nullcontext())
    step = step_of(net.to(device).train(), head.to(device), per_speaker, device)
    waveforms = torch.zeros(len(labels), 4800, device=device)
    batch = Share(waveforms, torch.zeros_like(labels, device=device), rows, (len(labels),))
    with Crossings() as seen:
        step.add(batch)
        step.finish(0.05)
    assert (seen.asked, seen.waited, seen.made) == (0, 0, made) and seen.sent == (
        copies if device is DEVICE else 0
    )
