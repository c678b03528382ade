"""Compilation of the network, and gradient checkpointing of its repeated blocks.

Modules are compiled in place (`Module.compile`), so saved keys never change. Evaluation runs
eagerly: utterance lengths differ, and each would trigger a recompilation. Checkpointing works on
any network: although a block runs twice, its batch-norm statistics and keyed draws advance once per
step.
"""

import contextlib
import copy
import functools
import logging
import platform
import shutil
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speakernet import distributed
from speakernet.training.checkpoints import capture_random_state, restore_random_state
from speakernet.training.optimizers import BufferGuard
from speakernet.training.options import RuntimeOptions

logger = logging.getLogger(__name__)

# Steps measured eagerly before `auto` decides; the first few only warm up caches and are left out.
OBSERVED_STEPS = 20
WARMUP_STEPS = 5
# The share of a step that compilation saves, measured on two CPU cores and on an H200 (0.34 to
# 0.41; benchmarks/measurements.md), and its cost per layer on the two cores.
ASSUMED_SAVING = {"cpu": 0.10, "cuda": 0.30}
SECONDS_PER_LAYER = 0.5
# Compile only for a clear gain: the two figures above are estimates.
REQUIRED_GAIN = 2.0
# A weight, its gradient and two moments, in float32.
BYTES_PER_WEIGHT = 16
# Allows for gradients of activations, which coexist with them for a while, and for the workspace of
# kernels.
ACTIVATION_OVERHEAD = 1.25
OBSERVED_UTTERANCES = 2


def obstacles(
    options: RuntimeOptions,
    device: torch.device,
    *,
    caches_gradients: bool,
    varies_lengths: bool,
    is_safe_in_channels_last: bool,
) -> Iterator[str]:
    """The reasons why a network cannot be compiled here, with their remedies if there are."""
    if platform.system() == "Windows":
        yield "speakernet does not support torch.compile on Windows"
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        yield "compiling for the CPU needs a C++ compiler (g++ or clang++); install one"
    # `on` is reproducible, because it compiles before the first step.
    if options.deterministic and options.compile == "auto":
        yield "runtime.deterministic is on, and the decision when to compile depends on timing"
    if caches_gradients:
        yield (
            "the gradient cache (metric loss under accumulation) runs each micro-batch twice, "
            "first without gradients; set training.accumulation_steps: 1"
        )
    if options.parallel == "fsdp":
        yield "runtime.parallel: fsdp gathers weights between blocks"
    if varies_lengths:
        yield (
            "crops have many lengths, each of which would be compiled separately; set "
            "data.crop_frames_max: 0"
        )
    # Compiled code always uses channels_last, in which the weight gradient of a strided 1 x 1
    # convolution with 8 or 12 input channels crashes the process ("free(): invalid next size").
    if device.type == "cpu" and not is_safe_in_channels_last:
        yield (
            "strided convolutions with fewer than 16 channels crash in oneDNN when compiled for a "
            "CPU; use 16 channels or more"
        )


# Whether compiling pays is a bet: minutes now against a share of every later step. `auto` looks at
# fifteen ordinary steps, multiplies their time by the share that compiling has saved elsewhere and
# by the steps that are left, and compiles only if that is twice the likely cost. Then it checks its
# bet with as many compiled steps and goes back if they are slower. A network that cannot be
# compiled runs on as it is, with a warning: slow is better than ended.
class Compiler:
    """Compiles `net` in place, immediately or once that is expected to save time; does nothing
    without options.
    """

    def __init__(
        self,
        net: nn.Module,
        options: RuntimeOptions | None,
        *,
        prepare: Callable[[nn.Module], None] = lambda net: None,
    ) -> None:
        self.net = net
        self.options = options or RuntimeOptions(compile="off")
        self._prepare = prepare
        self.is_compiled = False
        self._eager_seconds = 0.0
        self._seconds: list[float] = []
        self.is_observing = self.options.compile == "auto"
        if self.options.compile == "on":
            self._compile()

    def consider(self, seconds: float, steps_left: float) -> None:
        """Called after each step: `auto` measures some steps, decides once, and undoes a
        compilation that is slower.
        """
        self._seconds.append(seconds)
        if len(self._seconds) < OBSERVED_STEPS:
            return
        # Rank 0's clock decides for all: a rank that compiled alone would keep the others waiting.
        usual = distributed.broadcast_object(statistics.median(self._seconds[WARMUP_STEPS:]))
        self._seconds = []
        if self.is_compiled:
            self._judge(usual)
        else:
            self._decide(usual, steps_left)

    def _decide(self, eager_seconds: float, steps_left: float) -> None:
        """Compile if the time saved over the run clearly exceeds the cost."""
        device = next(self.net.parameters()).device
        gain = ASSUMED_SAVING[device.type] * eager_seconds * steps_left
        cost = SECONDS_PER_LAYER * self._num_layers()
        self._eager_seconds = eager_seconds
        self.is_observing = gain > REQUIRED_GAIN * cost
        verdict = "compiling" if self.is_observing else "not compiling"
        reason = f"may save {gain:.0f} s over the run, costs about {cost:.0f} s"
        logger.info("compile auto: %s (%s)", verdict, reason)
        if self.is_observing:
            self._compile()

    def _judge(self, compiled_seconds: float) -> None:
        """Go back to eager if compiled steps are slower: VGGVox on a CPU is."""
        self.is_observing = False
        is_faster = compiled_seconds < self._eager_seconds
        verdict = "keeping it" if is_faster else "going back to eager"
        times = f"{compiled_seconds:.3f} s per step, {self._eager_seconds:.3f} s eager"
        logger.info("compile auto: %s: %s", times, verdict)
        if not is_faster:
            self.close()

    def close(self) -> None:
        """Make the network eager again: the next stage may have a different crop length."""
        for module in self._targets():
            if isinstance(module.forward, Checkpointed):
                module.forward.forward = module.forward.eager
            # `Module.compile` sets this; torch has no public way to undo it.
            module._compiled_call_impl = None
        self.is_compiled = self.is_observing = False

    def _compile(self) -> None:
        logger.info("compiling the network: the next step may take minutes")
        self._prepare(self.net)
        # Inductor's hints (complex numbers in the spectrum run uncompiled, TF32 is off) are for
        # authors of networks.
        warnings.filterwarnings("ignore", module=r"torch\._inductor")
        targets = self._targets()
        config = torch._dynamo.config
        # Blocks of different widths share their code; torch compiles 8 versions of it and runs the
        # rest eagerly.
        config.recompile_limit = max(config.recompile_limit, 2 * len(targets))
        # dynamic=False: all training crops have the same length (a different length compiles
        # another version).
        settings: dict[str, Any] = {"mode": self.options.compile_mode, "dynamic": False}
        for module in targets:
            if isinstance(module.forward, Checkpointed):
                eager = module.forward.eager
                compiled = torch.compile(eager, **settings)
                module.forward.forward = self._or_eager(compiled, eager)
            else:
                module.compile(**settings)
                run = self._or_eager(module._compiled_call_impl, module._call_impl)
                module._compiled_call_impl = run
        self.is_compiled = True

    def _or_eager(self, compiled: Any, eager: Callable[..., Any]) -> Callable[..., Any]:
        """Compiled code that is given up, with the reason in the log, if it cannot be compiled."""

        def run(*inputs: Any, **named: Any) -> Any:
            try:
                return compiled(*inputs, **named)
            except torch._dynamo.exc.TorchDynamoException as error:
                # The first paragraph; the others advise authors of compilers.
                reason = " ".join(str(error).partition("\n\n")[0].split())
                logger.warning("the network is not compiled, and runs eagerly: %s", reason)
                self.close()
                return eager(*inputs, **named)

        return run

    def _num_layers(self) -> int:
        """Layers to compile; equal blocks share their code."""
        counts = {}
        for module in self._targets():
            shapes = tuple(parameter.shape for parameter in module.parameters())
            leaves = [layer for layer in module.modules() if not list(layer.children())]
            counts[type(module), shapes] = len(leaves)
        return sum(counts.values())

    def _targets(self) -> list[nn.Module]:
        return [self.net] if self.options.compile_scope == "whole" else repeated_blocks(self.net)


def repeated_blocks(net: nn.Module) -> list[nn.Module]:
    """Modules with children whose class occurs several times, such as residual blocks.

    The search descends into a stage, which only chains blocks, but not into a block, even if
    modules repeat inside it. Falls back to the whole network if nothing repeats.
    """
    counts = Counter(type(module) for module in net.modules() if list(module.children()))
    blocks = []

    def search(module: nn.Module) -> None:
        is_list = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if counts[type(module)] > 1 and not is_list and not _is_stage(module):
            blocks.append(module)
        else:
            for child in module.children():
                search(child)

    search(net)
    return blocks or [net]


def _is_stage(module: nn.Module) -> bool:
    """Whether a module only holds lists of modules that have children themselves."""
    for child in module.children():
        if not isinstance(child, nn.Sequential | nn.ModuleList):
            return False
        if not all(list(entry.children()) for entry in child):
            return False
    return True


# The memory of a step cannot be known without running one, and running it on the device would
# fragment its memory. But what autograd saves for the backward pass has the same size on every
# device and grows with the batch. So two random utterances pass through a copy on the CPU, and each
# storage that autograd keeps is counted once, however many views of it there are.
def training_bytes(net: nn.Module, num_samples: int, batch_size: int, dtype: torch.dtype) -> int:
    """Estimated memory of a training step of `net`, from the activations of two random utterances
    on a CPU.
    """
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    random_state = capture_random_state()
    observed = copy.deepcopy(net).cpu().train()
    weights = (*observed.parameters(), *observed.buffers())
    addresses = {tensor.untyped_storage().data_ptr() for tensor in weights}
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        # Kept alive until counted: a freed tensor's address could be reused.
        embeddings = observed(0.1 * torch.randn(OBSERVED_UTTERANCES, num_samples))
    activations = sum(size for address, size in sizes.items() if address not in addresses)
    del embeddings
    restore_random_state(random_state)
    count = sum(parameter.numel() for parameter in net.parameters())
    share = batch_size / OBSERVED_UTTERANCES
    return BYTES_PER_WEIGHT * count + int(ACTIVATION_OVERHEAD * share * activations)


def blocks_to_checkpoint(net: nn.Module) -> list[nn.Module]:
    """The network's repeated blocks; ValueError if it has none."""
    blocks = repeated_blocks(net)
    if blocks == [net]:
        raise ValueError(
            f"runtime.gradient_checkpointing is on, but {type(net).__name__} has no repeated "
            "blocks; turn it off, or lower data.batch_size and raise training.accumulation_steps"
        )
    return blocks


def enable_gradient_checkpointing(net: nn.Module) -> int:
    """Make the repeated blocks of `net` keep only their inputs; returns the number of blocks.

    Parameter names, results and evaluation do not change.
    """
    blocks = blocks_to_checkpoint(net)
    for block in blocks:
        # On the instance, not the class, so other networks are unaffected. Once only: later stages
        # call this again.
        if not isinstance(block.forward, Checkpointed):
            block.forward = Checkpointed(block)  # type: ignore[method-assign]
    return len(blocks)


class Checkpointed:
    """The forward pass of a block that keeps only its inputs.

    Only the computation is compiled: torch's compiler does not accept a `context_fn` that restores
    statistics.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.eager = block.forward
        self.forward: Callable[..., Any] = block.forward
        """The current function, eager or compiled."""
        # Restoring the random state costs a copy per block; only dropout needs it.
        self._has_dropout = any(
            isinstance(module, nn.modules.dropout._DropoutNd) for module in block.modules()
        )

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The output of the block."""
        # Not by `training`: blocks with adapters are trained in evaluation mode.
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **named)
        # The reentrant variant has no `context_fn`, which keeps the statistics from being updated
        # twice.
        return checkpoint(
            functools.partial(self.forward, **named),
            *inputs,
            use_reentrant=False,
            preserve_rng_state=self._has_dropout,
            context_fn=lambda: (contextlib.nullcontext(), _preserved_statistics(self._block)),
        )


@contextlib.contextmanager
def _preserved_statistics(block: nn.Module) -> Iterator[None]:
    guard = BufferGuard([block])
    guard.remember()
    try:
        yield
    finally:
        guard.restore()
