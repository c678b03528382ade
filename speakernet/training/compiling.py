"""Compilation of the network, and gradient checkpointing of its repeated blocks.

Modules are compiled in place (`Module.compile`), so saved keys never change. Evaluation runs
eagerly: utterance lengths differ, and each would trigger a recompilation. Checkpointing works on
any network: although a block runs twice, its batch-norm statistics and keyed draws advance once per
step. A module that cannot run twice declares `supports_gradient_checkpointing = False`.
"""

import contextlib
import copy
import functools
import logging
import statistics
import warnings
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


class Compiler:
    """Compiles `net` in place, immediately or once that is expected to save time; does nothing
    without options.
    """

    def __init__(
        self,
        net: nn.Module,
        options: RuntimeOptions | None,
        *,
        prepare: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.net = net
        self.options = options
        self._prepare = prepare
        self.is_compiled = False
        self._eager_seconds = 0.0
        self._seconds: list[float] = []
        self.is_observing = options is not None and options.compile == "auto"
        if options is not None and options.compile == "on":
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
            # Some networks run slower compiled (VGGVox on a CPU does).
            is_faster = usual < self._eager_seconds
            self.is_observing = False
            verdict = "keeping it" if is_faster else "going back to eager"
            logger.info(
                "compile auto: %.3f s per step, %.3f s eager: %s",
                usual,
                self._eager_seconds,
                verdict,
            )
            if not is_faster:
                self.close()
            return
        saving = ASSUMED_SAVING[next(self.net.parameters()).device.type]
        gain = saving * usual * steps_left
        cost = SECONDS_PER_LAYER * self._layers()
        self._eager_seconds = usual
        self.is_observing = gain > REQUIRED_GAIN * cost
        verdict = "compiling" if self.is_observing else "not compiling"
        logger.info(
            "compile auto: %s (may save %.0f s over the run, costs about %.0f s)",
            verdict,
            gain,
            cost,
        )
        if self.is_observing:
            self._compile()

    def close(self) -> None:
        """Make the network eager again: the next stage may have a different crop length."""
        for module in self._targets():
            if isinstance(module.forward, Checkpointed):
                module.forward.forward = module.forward.eager
            # `Module.compile` sets this; torch has no public way to undo it.
            module._compiled_call_impl = None
        self.is_compiled = self.is_observing = False

    def _compile(self) -> None:
        assert self.options is not None
        logger.info("compiling the network: the next step may take minutes")
        if self._prepare is not None:
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
        mode = None if self.options.compile_mode == "default" else self.options.compile_mode
        for module in targets:
            if isinstance(module.forward, Checkpointed):
                eager = module.forward.eager
                compiled = torch.compile(eager, mode=mode, dynamic=False)
                module.forward.forward = self._or_eager(compiled, eager)
            else:
                module.compile(mode=mode, dynamic=False)
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

    def _layers(self) -> int:
        """Layers to compile; equal blocks share their code."""
        counts = {}
        for module in self._targets():
            form = type(module), tuple(parameter.shape for parameter in module.parameters())
            counts[form] = sum(1 for part in module.modules() if not any(part.children()))
        return sum(counts.values())

    def _targets(self) -> list[nn.Module]:
        assert self.options is not None
        return [self.net] if self.options.compile_scope == "whole" else repeated_blocks(self.net)


def repeated_blocks(net: nn.Module) -> list[nn.Module]:
    """Modules with children whose class occurs several times, such as residual blocks.

    The search descends into a stage, which only chains blocks, but not into a block, even if
    modules repeat inside it. Falls back to the whole network if nothing repeats.
    """
    counts: dict[type, int] = {}
    for module in net.modules():
        if any(module.children()) and not isinstance(
            module, nn.Sequential | nn.ModuleList | nn.ModuleDict
        ):
            counts[type(module)] = counts.get(type(module), 0) + 1

    def collect(module: nn.Module) -> list[nn.Module]:
        if counts.get(type(module), 0) > 1 and not _is_stage(module):
            return [module]
        return [block for child in module.children() for block in collect(child)]

    return collect(net) or [net]


def _is_stage(module: nn.Module) -> bool:
    """Whether a module only holds lists of modules that have children themselves."""
    lists = [
        child for child in module.children() if isinstance(child, nn.Sequential | nn.ModuleList)
    ]
    is_only_lists = len(lists) == len(list(module.children()))
    return is_only_lists and all(any(entry.children()) for one in lists for entry in one)


def training_bytes(net: nn.Module, num_samples: int, batch_size: int, dtype: torch.dtype) -> int:
    """Estimated memory of a training step of `net`, from the activations of two random utterances
    on a CPU.
    """
    count = sum(one.numel() for one in net.parameters())
    activations = activation_bytes(net, num_samples, dtype)
    return BYTES_PER_WEIGHT * count + int(
        ACTIVATION_OVERHEAD * activations * batch_size / OBSERVED_UTTERANCES
    )


def activation_bytes(
    net: nn.Module, num_samples: int, dtype: torch.dtype, num_utterances: int = OBSERVED_UTTERANCES
) -> int:
    """Bytes that a forward pass of random utterances saves for the backward pass, without the
    weights.
    """
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    random_state = capture_random_state()
    observed = copy.deepcopy(net).cpu().train()
    weights = {
        one.untyped_storage().data_ptr() for one in (*observed.parameters(), *observed.buffers())
    }
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        # Kept alive until counted: a freed tensor's address could be reused.
        embeddings = observed(0.1 * torch.randn(num_utterances, num_samples))
    activations = sum(size for address, size in sizes.items() if address not in weights)
    del embeddings
    restore_random_state(random_state)
    return activations


def blocks_to_checkpoint(net: nn.Module) -> list[nn.Module]:
    """The network's repeated blocks; ValueError if it forbids checkpointing or has no repeated
    blocks.
    """
    blocks = repeated_blocks(net)
    why = f"{type(net).__name__} has no repeated blocks" if blocks == [net] else ""
    for name, module in net.named_modules():
        if not getattr(module, "supports_gradient_checkpointing", True):
            why = f"{type(module).__name__} ({name or 'the network'}) cannot be run twice"
    if why:
        raise ValueError(
            f"runtime.gradient_checkpointing is on, but {why}; turn it off, or lower "
            "data.batch_size and raise training.accumulation_steps"
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
        settings: dict[str, Any] = {
            "use_reentrant": False,
            "preserve_rng_state": self._has_dropout,
            "context_fn": self._contexts,
        }
        return checkpoint(functools.partial(self.forward, **named), *inputs, **settings)

    def _contexts(
        self,
    ) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return contextlib.nullcontext(), _preserved_statistics(self._block)


@contextlib.contextmanager
def _preserved_statistics(block: nn.Module) -> Iterator[None]:
    guard = BufferGuard([block])
    guard.remember()
    try:
        yield
    finally:
        guard.restore()
