"""Gradient checkpointing of whatever network is given: its repeated blocks are computed again in the backward pass.

Batch-norm statistics and keyed draws must move once a step, though the block runs twice; the second run is undone for
them. Works on any module, so no model needs code for it; one that must not be run twice says so with
`supports_gradient_checkpointing = False`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speakernet.training.compiling import repeated_blocks
from speakernet.training.step import BufferGuard


def blocks_to_checkpoint(net: nn.Module) -> list[nn.Module]:
    """The network's repeated blocks.

    Raises:
        ValueError: the network forbids it, or has no block that repeats.
    """
    for name, module in net.named_modules():
        if not getattr(module, "supports_gradient_checkpointing", True):
            raise ValueError(
                f"runtime.gradient_checkpointing: {type(module).__name__} ({name or 'the network'}) must not be run "
                "twice; switch it off, or lower data.batch_size and raise training.accumulation_steps"
            )
    blocks = repeated_blocks(net)
    if blocks == [net]:
        raise ValueError(
            f"runtime.gradient_checkpointing: {type(net).__name__} has no blocks that repeat; switch it off, "
            "or lower data.batch_size and raise training.accumulation_steps"
        )
    return blocks


def enable_gradient_checkpointing(net: nn.Module) -> int:
    """Make the repeated blocks of `net` keep only their inputs; returns how many there are.

    Parameter names and results stay as they are. In evaluation nothing changes.

    Raises:
        ValueError: as `blocks_to_checkpoint`.
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
