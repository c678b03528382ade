"""The choice of precision with its reason, and the loss scale against torch's own scaler."""

import pytest
import torch
from torch import nn

from speakernet.training.options import RuntimeOptions
from speakernet.training.precision import Precision, choose_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("requested", "device", "flags", "capability", "expected"),
    [
        ("auto", CPU, {"avx512_bf16"}, None, "bf16"),
        ("auto", CPU, {"amx_bf16", "amx_tile"}, None, "bf16"),
        ("auto", CPU, {"bf16"}, None, "bf16"),
        ("auto", CPU, {"avx2"}, None, "no"),
        ("bf16", CPU, {"avx2"}, None, "bf16"),
        ("fp16", CPU, {"avx512_fp16"}, None, "fp16"),
        ("no", CPU, {"avx512_bf16"}, None, "no"),
        ("auto", CUDA, set(), (8, 0), "bf16"),
        ("auto", CUDA, set(), (7, 5), "fp16"),
        ("auto", CUDA, set(), (5, 0), "no"),
        ("fp16", CUDA, set(), (9, 0), "fp16"),
    ],
)
def test_choice(requested, device, flags, capability, expected):
    choice = choose_precision(requested, device, flags=frozenset(flags), capability=capability)
    assert choice.name == expected
    assert choice.reason


def test_impossible_precisions_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="fp16"):
        choose_precision("fp16", CPU, flags=frozenset({"avx2"}))
    with pytest.raises(ValueError, match=r"7\.5"):
        choose_precision("bf16", CUDA, capability=(7, 5))


def test_scale_follows_torchs_scaler():
    """The same overflows give the same scale after every step."""
    ours = Precision(RuntimeOptions(loss_scale=256.0, loss_scale_growth_interval=3), "fp16", CPU)
    theirs = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for is_bad in [False, False, False, True, False, True, True, False, False, False, False, False, False]:
        scaled = theirs.scale(weight.sum())
        weight.grad = torch.full_like(weight, float("inf") if is_bad else float(scaled.detach()))
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(is_bad))
        assert float(ours.scale) == theirs.get_scale()


def test_scale_survives_a_checkpoint():
    one = Precision(RuntimeOptions(loss_scale=8.0, loss_scale_growth_interval=2), "fp16", CPU)
    one.update(torch.tensor(False))
    other = Precision(RuntimeOptions(loss_scale_growth_interval=2), "fp16", CPU)
    other.load_state_dict(one.state_dict())
    other.update(torch.tensor(False))
    assert float(other.scale) == 16.0


@pytest.mark.parametrize("before", ["no", "bf16"])
def test_a_run_that_changes_to_fp16_begins_with_the_scale_of_its_options(before):
    other = Precision(RuntimeOptions(loss_scale=1024.0), "fp16", CPU)
    other.load_state_dict(Precision(RuntimeOptions(), before, CPU).state_dict())
    assert float(other.scale) == 1024.0
