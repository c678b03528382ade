"""The precision of the trunk, as one object, so that the trainer has one code path.

Chooses bf16, fp16 or float32 with a reason; gives the autocast context; scales the loss (fp16 only) without ever asking
the device for a number. What must stay float32 (front end, statistics, heads) sees to that itself.
"""

import contextlib
import logging
import platform
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from speakernet.machine.facts import cpu_flags, native_bf16
from speakernet.random import capture_random_state, restore_random_state
from speakernet.training.options import RuntimeOptions

logger = logging.getLogger(__name__)

PRECISIONS = ("no", "bf16", "fp16")
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Linux's names of x86 AMX-FP16, AVX512-FP16 and Arm's half precision.
_FP16_FLAGS = ("amx_fp16", "avx512_fp16", "asimdhp", "fphp")


class PrecisionChoice(NamedTuple):
    """A precision (`no`, `bf16` or `fp16`) and why it was taken."""

    name: str
    reason: str


def choose_precision(
    requested: str,
    device: torch.device,
    *,
    flags: frozenset[str] | None = None,
    capability: tuple[int, int] | None = None,
) -> PrecisionChoice:
    """The precision to train in. `auto` takes bf16 if it is native, else fp16 on a GPU, else float32.

    `flags` are the CPU's, `capability` CUDA's; read from this machine when None. ValueError with the reason if the
    device cannot train in what was requested.
    """
    if requested == "no":
        return PrecisionChoice("no", "float32 was asked for")
    if device.type == "cpu":
        return _choose_on_cpu(requested, cpu_flags() if flags is None else flags)
    if device.type == "cuda":
        return _choose_on_cuda(requested, capability or torch.cuda.get_device_capability(device))
    if requested == "auto":
        return PrecisionChoice("no", f"no measured half precision on a {device.type} device")
    raise ValueError(f"precision {requested} is not supported on a {device.type} device; use --mixed-precision no")


def _choose_on_cpu(requested: str, flags: frozenset[str]) -> PrecisionChoice:
    native = native_bf16(flags)
    if requested == "fp16":
        if not any(flag in flags for flag in _FP16_FLAGS):
            raise ValueError(
                f"fp16 was asked for, but this CPU ({platform.machine()}) has no half-precision arithmetic "
                f"(looked for {', '.join(_FP16_FLAGS)}); use --mixed-precision auto, bf16 or no"
            )
        return PrecisionChoice("fp16", "fp16 was asked for")
    if requested == "bf16":
        note = f"; native ({native})" if native else "; this CPU emulates it, which is slower than float32"
        return PrecisionChoice("bf16", "bf16 was asked for" + note)
    # Most of the gain on a CPU: alone it brings a step of ResNetSE34L to 0.545 of the plain one, and without it all
    # else to 0.855.
    if native:
        return PrecisionChoice("bf16", f"this CPU computes bfloat16 natively ({native})")
    return PrecisionChoice("no", "this CPU has no native bfloat16 (neither AMX, AVX512-BF16 nor Arm BF16)")


def _choose_on_cuda(requested: str, capability: tuple[int, int]) -> PrecisionChoice:
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if requested == "bf16":
        if capability < (8, 0):
            raise ValueError(
                f"bf16 was asked for, but this GPU ({shown}) has none (8.0 and later do); use fp16 or auto"
            )
        return PrecisionChoice("bf16", f"bf16 was asked for ({shown})")
    if requested == "fp16":
        return PrecisionChoice("fp16", f"fp16 was asked for ({shown})")
    if capability >= (8, 0):
        return PrecisionChoice("bf16", f"this GPU computes bfloat16 natively ({shown})")
    # The first with arithmetic in half precision.
    if capability >= (5, 3):
        return PrecisionChoice("fp16", f"this GPU ({shown}) has fp16 but no native bfloat16")
    return PrecisionChoice("no", f"this GPU ({shown}) has no fast half precision")


class Precision:
    """Autocast and loss scaling behind one interface; in float32 and bf16 the scale is a constant 1.

    The scale follows torch's GradScaler (halved after an overflow, doubled after `growth_interval` good steps), but
    stays on the device: an overflow is answered without a host synchronisation.
    """

    BACKOFF: ClassVar[float] = 0.5
    GROWTH: ClassVar[float] = 2.0

    def __init__(self, options: RuntimeOptions, name: str, device: torch.device, *, reason: str = "") -> None:
        """Make the precision `name`, which `choose_precision` chose, on `device`."""
        self.name = name
        self.device = device
        self.dtype = DTYPES[name]
        self.reason = reason
        self.scales = name == "fp16"
        self.growth_interval = options.loss_scale_growth_interval
        self.scale = torch.tensor(options.loss_scale if self.scales else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the forward pass (does nothing in float32)."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.name != "no")

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, multiplied so that small gradients stay representable in fp16."""
        return loss * self.scale if self.scales else loss

    def update(self, is_bad: torch.Tensor) -> None:
        """Adapt the scale after a step; `is_bad` (0-d bool on the device): its gradients were not finite."""
        if not self.scales:
            return
        # Every case by torch.where: an `if` would ask the device, and the host would wait for the step.
        good = torch.where(is_bad, torch.zeros_like(self._good_steps), self._good_steps + 1)
        grown = good >= self.growth_interval
        factor = torch.where(is_bad, self.BACKOFF, torch.where(grown, self.GROWTH, 1.0))
        # As GradScaler: a scale that would itself overflow stays as it is.
        candidate = self.scale * factor
        self.scale.copy_(torch.where(torch.isfinite(candidate), candidate, self.scale))
        self._good_steps.copy_(torch.where(grown, torch.zeros_like(good), good))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Scale and count of good steps."""
        return {"scale": self.scale.clone(), "good_steps": self._good_steps.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take what `state_dict` gave; a state of another precision is ignored."""
        # Other precisions keep a constant 1 and count no steps: with that scale fp16 gradients would vanish.
        is_of_fp16 = float(state["scale"]) != 1.0 or int(state["good_steps"]) > 0
        if self.scales and is_of_fp16:
            self.scale.copy_(state["scale"])
            self._good_steps.copy_(state["good_steps"])


def report_activations(net: nn.Module, precision: Precision, waveforms: torch.Tensor) -> torch.dtype | None:
    """Log, and return, the dtype that the trunk really computes in, from two utterances; leaves no trace in it."""
    counts: dict[torch.dtype, int] = {}

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            counts[output.dtype] = counts.get(output.dtype, 0) + 1

    random_state = capture_random_state()
    # A full copy: a forward pass in training mode moves statistics and counters of draws.
    kept = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in net.state_dict().items()}
    watched = [m for m in net.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear)]
    handles = [module.register_forward_hook(count) for module in watched]
    with torch.no_grad(), precision.autocast():
        net(waveforms[:2])
    for handle in handles:
        handle.remove()
    net.load_state_dict(kept)
    restore_random_state(random_state)
    # The first layer may be kept in float32 on purpose (the front end): most of them decide.
    dtype = max(counts, key=lambda one: counts[one]) if counts else None
    logger.info("precision %s (%s): activations are %s", precision.name, precision.reason, dtype)
    if dtype == torch.float32 and precision.name != "no":
        logger.warning("autocast to %s was set up, but the activations are float32", precision.dtype)
    return dtype
