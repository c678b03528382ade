"""Gradient checkpointing of whatever network is given: its repeated blocks are computed again in the backward pass.

Batch-norm statistics and keyed draws must move once a step, though the block runs twice; the second run is undone for
them. Works on any module, so no model needs code for it; one that must not be run twice says so with
`supports_gradient_checkpointing = False`.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speakernet.random import capture_random_state, restore_random_state
from speakernet.training.compiling import repeated_blocks
from speakernet.training.step import BufferGuard

# Weights, their gradients and two moments, in float32.
BYTES_OF_A_WEIGHT = 16
# Gradients of activations live beside these for a while, and kernels want room to work.
BESIDE_ACTIVATIONS = 1.25
OBSERVED_UTTERANCES = 2


def training_bytes(net: nn.Module, num_samples: int, batch_size: int, dtype: torch.dtype) -> int:
    """About what a training step of `net` takes, from the activations that two random utterances leave on a CPU.

    Args:
        net: waveforms (batch, samples) to embeddings; stays as it is.
        num_samples: of a crop.
        batch_size: utterances in a batch.
        dtype: of autocast; float32 for none.
    """
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
