"""The precision of the trunk as one object, so that the trainer has a single code path.

It chooses bf16, fp16 or float32 with a reason, provides the autocast context, and adapts the loss
scale (fp16 only) without synchronising with the device. Parts that need float32 (front end,
statistics, heads) ensure it themselves.
"""

import contextlib
import platform
from typing import Any

import torch
from torch import Tensor

from speakernet.machine.facts import cpu_flags, native_bf16
from speakernet.options import Choice
from speakernet.training.options import RuntimeOptions

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Linux's names for x86 AMX-FP16, AVX512-FP16 and Arm's half precision.
_FP16_FLAGS = ("amx_fp16", "avx512_fp16", "asimdhp", "fphp")


def choose_precision(
    requested: str,
    device: torch.device,
    *,
    flags: frozenset[str] | None = None,
    capability: tuple[int, int] | None = None,
) -> Choice[str]:
    """The precision to train in. `auto` takes bf16 if it is native, else fp16 on a GPU, else
    float32 (`no`).

    `flags` are the CPU's and `capability` is the GPU's; None reads them from this machine.
    ValueError if the device cannot train in the requested precision.
    """
    if requested == "no":
        return Choice("no", "float32 was requested")
    is_gpu = device.type == "cuda"
    if is_gpu:
        capability = capability or torch.cuda.get_device_capability(device)
        shown = f"this GPU, of compute capability {capability[0]}.{capability[1]},"
        # 5.3 is the first capability with half-precision arithmetic.
        has_bf16 = capability >= (8, 0)
        has_fp16 = capability >= (5, 3)
    else:
        flags = cpu_flags() if flags is None else flags
        shown = f"this CPU, {native_bf16(flags) or platform.machine()},"
        has_bf16 = native_bf16(flags) is not None
        has_fp16 = not flags.isdisjoint(_FP16_FLAGS)
    # A CPU can emulate bf16.
    if (requested == "fp16" and not has_fp16) or (requested == "bf16" and is_gpu and not has_bf16):
        raise ValueError(
            f"{requested} was requested, but {shown} does not support it; use --mixed-precision "
            "auto or no"
        )
    if requested != "auto":
        is_emulated = requested == "bf16" and not has_bf16
        more = "; this CPU emulates it, which is slower than float32" if is_emulated else ""
        return Choice(requested, f"{requested} was requested{more}")
    # The largest gain on a CPU: bf16 alone cuts a step of ResNetSE34L to 0.545 of the plain time,
    # everything else together to 0.855.
    if has_bf16:
        return Choice("bf16", f"{shown} computes bfloat16 natively")
    if is_gpu and has_fp16:
        return Choice("fp16", f"{shown} has fp16 but no native bfloat16")
    return Choice("no", f"{shown} has no fast half precision")


class Precision:
    """Autocast and loss scaling behind one interface; in float32 and bf16 the scale is a constant
    1.

    The scale follows torch's GradScaler (halved after an overflow, doubled after `growth_interval`
    good steps), but without host synchronisation.
    """

    def __init__(self, options: RuntimeOptions, name: str, device: torch.device) -> None:
        """Prepare the precision `name`, as returned by `choose_precision`, on `device`."""
        self.name = name
        self.device = device
        self.dtype = DTYPES[name]
        self.scales = name == "fp16"
        self.growth_interval = options.loss_scale_growth_interval
        self.scale = torch.tensor(options.loss_scale if self.scales else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the forward pass (does nothing in float32)."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.name != "no")

    def update(self, is_bad: Tensor) -> None:
        """Adapt the scale after an fp16 step; `is_bad` (0-d bool on the device): loss or gradients
        were not finite.
        """
        # Doubled after a row of good steps, halved after an overflow.
        torch._amp_update_scale_(
            self.scale, self._good_steps, is_bad.float(), 2.0, 0.5, self.growth_interval
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The scale and the count of good steps."""
        return {"scale": self.scale.clone(), "good_steps": self._good_steps.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore an fp16 `state_dict` in an fp16 run; any other is ignored."""
        # Other precisions save a scale of 1 and no steps: at that scale fp16 gradients would
        # vanish.
        is_of_fp16 = float(state["scale"]) != 1.0 or int(state["good_steps"]) > 0
        if self.scales and is_of_fp16:
            self.scale.copy_(state["scale"])
            self._good_steps.copy_(state["good_steps"])
