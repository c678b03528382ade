"""When and how the network is compiled, and gradient checkpointing of its repeated blocks.

Compilation is done in place (`Module.compile`), so saved keys never change. Evaluation runs eagerly: its lengths differ
from utterance to utterance, and each would be compiled again. Checkpointing works on any network: batch-norm statistics
and keyed draws move once a step, though a block runs twice; a module that must not be run twice declares
`supports_gradient_checkpointing = False`.
"""

import contextlib
import copy
import logging
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speakernet.files import error_line
from speakernet.machine.device import DeviceClock
from speakernet.random import capture_random_state, restore_random_state
from speakernet.training.options import RuntimeOptions

logger = logging.getLogger(__name__)

# Steps measured eagerly before `auto` decides; the first few warm caches up and are left out.
OBSERVED_STEPS = 20
WARMUP_STEPS = 5
# Measured on two CPU cores (docs/performance.md): the share of a step that compiling saves, and its cost per layer.
ASSUMED_SAVING = 0.10
SECONDS_PER_LAYER = 0.5
# Compile only for a clear gain: the two figures above are estimates.
REQUIRED_GAIN = 2.0
# Weights, their gradients and two moments, in float32.
BYTES_OF_A_WEIGHT = 16
# Gradients of activations live beside these for a while, and kernels need memory to work.
BESIDE_ACTIVATIONS = 1.25
OBSERVED_UTTERANCES = 2


class BufferGuard:
    """Remembers the buffers that a forward pass changes (batch-norm statistics) and can put them back."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers = [
            buffer
            for module in modules
            for owner in module.modules()
            if getattr(owner, "track_running_stats", True)
            for name, buffer in owner.named_buffers(recurse=False)
            if name in ("running_mean", "running_var", "num_batches_tracked")
        ]
        self._copies = [buffer.clone() for buffer in self._buffers]

    def remember(self) -> None:
        """Take the values to which `restore` goes back."""
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def restore(self) -> None:
        """Put the remembered values back."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)

    def restore_where(self, is_bad: torch.Tensor) -> None:
        """Put them back if `is_bad` (0-d bool) is true, without asking the device."""
        for dtype in {buffer.dtype for buffer in self._buffers}:
            now, kept = ([one for one in some if one.dtype == dtype] for some in (self._buffers, self._copies))
            # End to end, chosen at once, copied back at once: a few launches for hundreds of small tensors. Chosen,
            # not mixed by a factor: what was undone may be NaN.
            before, after = (torch.cat([one.reshape(-1) for one in some]) for some in (kept, now))
            chosen = torch.where(is_bad, before, after).split([one.numel() for one in now])
            torch._foreach_copy_(now, [one.view_as(other) for one, other in zip(chosen, now, strict=True)])


class Compiler:
    """Compiles `net` in place when its time has come; with no options it does nothing."""

    def __init__(
        self,
        net: nn.Module,
        options: RuntimeOptions | None,
        *,
        prepare: Callable[[nn.Module], None] | None = None,
        clock: DeviceClock | None = None,
    ) -> None:
        self.net, self.options, self._prepare = net, options, prepare
        self.is_compiled = self.is_new = False
        self._eager_seconds = 0.0
        self._clock = DeviceClock(torch.device("cpu")) if clock is None else clock
        self.is_observing = options is not None and options.compile == "auto"
        if options is not None and options.compile == "on":
            self._compile()

    def succeed(self, seconds: float) -> None:
        """The first compiled micro-batch has run."""
        assert self.options is not None
        self.is_new = False
        logger.info("compiled (%s, %s) in %.1f s", self.options.compile_scope, self.options.compile_mode, seconds)

    def fail(self, error: Exception) -> None:
        """The first compiled micro-batch has failed: run eagerly."""
        self._uncompile()
        logger.warning("compilation failed, continuing without it: %s", error_line(error))

    def consider(self, steps_left: int) -> None:
        """After a step: `auto` measures some steps, decides once, and takes a compilation back that does not pay."""
        if not self.is_observing:
            return
        self._clock.mark()
        if len(self._clock) < OBSERVED_STEPS:
            return
        # The median: an evaluation or a save between two steps counts for one of them.
        usual = sorted(self._clock.take()[WARMUP_STEPS:])[(OBSERVED_STEPS - WARMUP_STEPS) // 2]
        if not self.is_compiled:
            layers = sum(1 for module in self.net.modules() if not any(module.children()))
            gain, cost = ASSUMED_SAVING * usual * steps_left, SECONDS_PER_LAYER * layers
            self._eager_seconds = usual
            self.is_observing = gain > REQUIRED_GAIN * cost
            verdict = "compiling" if self.is_observing else "not compiling"
            logger.info("compile auto: %s (it may save %.0f s of the run and takes about %.0f s)", verdict, gain, cost)
            if self.is_observing:
                self._compile()
            return
        # Some networks run slower compiled (VGGVox on a CPU does).
        self.is_observing = False
        verdict = "kept" if usual < self._eager_seconds else "going back to eager"
        logger.info("compile auto: a step takes %.3f s, before %.3f s: %s", usual, self._eager_seconds, verdict)
        if usual >= self._eager_seconds:
            self._uncompile()

    def paused(self) -> contextlib.AbstractContextManager[Any]:
        """Inside the block everything runs eagerly; compiled code is kept."""
        return torch.compiler.set_stance("force_eager") if self.is_compiled else contextlib.nullcontext()

    def close(self) -> None:
        """Leave an eager network: a second stage has other lengths."""
        if self.is_compiled:
            self._uncompile()

    def _compile(self) -> None:
        assert self.options is not None
        logger.info("compiling the network: the next step may take minutes")
        if self._prepare is not None:
            self._prepare(self.net)
        mode = None if self.options.compile_mode == "default" else self.options.compile_mode
        for module in self._targets():
            # dynamic=False: training crops have one length (a second length compiles a second version).
            module.compile(mode=mode, dynamic=False)
        self.is_compiled = self.is_new = True

    def _uncompile(self) -> None:
        for module in self._targets():
            # What `Module.compile` sets; torch has no public way back.
            module._compiled_call_impl = None
        self.is_compiled = self.is_new = self.is_observing = False

    def _targets(self) -> list[nn.Module]:
        assert self.options is not None
        return [self.net] if self.options.compile_scope == "whole" else repeated_blocks(self.net)


def repeated_blocks(net: nn.Module) -> list[nn.Module]:
    """The modules of classes that occur several times and have children: residual blocks and the like.

    A stage, which only strings blocks together, is looked into; a block is taken whole, with whatever repeats inside.
    Falls back to the whole network when nothing repeats.
    """
    counts: dict[type, int] = {}
    for module in net.modules():
        if any(module.children()) and not isinstance(module, nn.Sequential | nn.ModuleList):
            counts[type(module)] = counts.get(type(module), 0) + 1

    def collect(module: nn.Module) -> list[nn.Module]:
        if counts.get(type(module), 0) > 1 and not _is_stage(module):
            return [module]
        return [block for child in module.children() for block in collect(child)]

    return collect(net) or [net]


def _is_stage(module: nn.Module) -> bool:
    """Whether a module only holds lists of modules that have children themselves."""
    lists = [child for child in module.children() if isinstance(child, nn.Sequential | nn.ModuleList)]
    is_only_lists = len(lists) == len(list(module.children()))
    return is_only_lists and all(any(entry.children()) for one in lists for entry in one)


def platform_obstacle(device: torch.device) -> str:
    """Why this machine cannot compile for the device, empty if it can."""
    if platform.system() == "Windows":
        return "torch.compile is not supported on Windows here"
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "compiling for the CPU needs a C++ compiler (g++ or clang++), and none is in the PATH; install one"
    return ""


def training_bytes(net: nn.Module, num_samples: int, batch_size: int, dtype: torch.dtype) -> int:
    """About what a training step of `net` takes, from the activations that two random utterances leave on a CPU."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    random_state = capture_random_state()
    observed = copy.deepcopy(net).cpu().train()
    weights = {one.untyped_storage().data_ptr() for one in (*observed.parameters(), *observed.buffers())}
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        # Held until it is counted: what is freed gives its address to another.
        embeddings = observed(0.1 * torch.randn(OBSERVED_UTTERANCES, num_samples))
    activations = sum(size for address, size in sizes.items() if address not in weights)
    del embeddings
    restore_random_state(random_state)
    count = sum(one.numel() for one in net.parameters())
    return BYTES_OF_A_WEIGHT * count + int(BESIDE_ACTIVATIONS * activations * batch_size / OBSERVED_UTTERANCES)


def blocks_to_checkpoint(net: nn.Module) -> list[nn.Module]:
    """The network's repeated blocks; ValueError if it forbids checkpointing, or has no block that repeats."""
    blocks = repeated_blocks(net)
    why = f"{type(net).__name__} has no blocks that repeat" if blocks == [net] else ""
    for name, module in net.named_modules():
        if not getattr(module, "supports_gradient_checkpointing", True):
            why = f"{type(module).__name__} ({name or 'the network'}) must not be run twice"
    if why:
        raise ValueError(
            f"runtime.gradient_checkpointing: {why}; switch it off, or lower data.batch_size and raise "
            "training.accumulation_steps"
        )
    return blocks


def enable_gradient_checkpointing(net: nn.Module) -> int:
    """Make the repeated blocks of `net` keep only their inputs; returns how many there are.

    Parameter names and results stay as they are. In evaluation nothing changes.
    """
    blocks = blocks_to_checkpoint(net)
    for block in blocks:
        # On the instance, not the class: other networks of this process stay as they are.
        block.forward = _checkpointed(block, block.forward)  # type: ignore[method-assign]
    return len(blocks)


def _checkpointed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    # Restoring the random state costs a copy per block; only dropout needs it.
    has_dropout = any(isinstance(module, nn.modules.dropout._DropoutNd) for module in block.modules())

    def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return contextlib.nullcontext(), _statistics_kept(block)

    def run(*inputs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*inputs)
        # Not reentrant: that kind takes no `context_fn`, which keeps the statistics from moving twice.
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=has_dropout, context_fn=contexts)

    return run


@contextlib.contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    guard = BufferGuard([block])
    guard.remember()
    try:
        yield
    finally:
        guard.restore()
