"""A recorder for CPUs that is as strict as a CUDA graph: it keeps operations with their tensors, and nothing else.

Repeating runs the same operations on the same memory. A number that the host read while it was recorded, or a tensor
that was made anew since, is then as wrong as it would be on a GPU.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from speakernet.training.step import StepOutcome

# What a CUDA graph cannot hold: the host would have to wait for the device.
ASKING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
)


class Tape(TorchDispatchMode):
    """Notes every operation inside, with what it was given and what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKING:
            raise RuntimeError(f"operation not permitted while a step is recorded: {func}")
        # As they lie now: what is transposed in place later is another view of the same memory.
        given = tree_map(_view, (args, kwargs or {}))
        made = func(*args, **(kwargs or {}))
        turned = made is args[0] and made.stride() != given[0][0].stride() if args else False
        if not turned:
            self.calls.append((func, *given, tree_map(_view, made)))
        return made

    @torch.no_grad()
    def repeat(self) -> None:
        """The same operations, into the same memory."""
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                # A view shows what lies there now.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _view(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


class TapeRecorder:
    """Records tapes, and counts what was done with them."""

    def __init__(self) -> None:
        self.warmups = self.recordings = self.repeats = 0

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Nothing to prepare."""
        self.warmups += 1
        yield

    def record(self, run: Callable[[], StepOutcome]) -> tuple[StepOutcome, Callable[[], None]]:
        """Run once, and put everything back: a CUDA graph does nothing while it is recorded."""
        tape = Tape()
        with everything_kept(), tape:
            outcome = run()
        self.recordings += 1

        def repeat() -> None:
            self.repeats += 1
            tape.repeat()

        return outcome, repeat


@contextlib.contextmanager
def everything_kept() -> Iterator[None]:
    """Every tensor that there is, and the random state, are afterwards as they were."""
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    # Of an expanded tensor what lies there is another's.
    tensors = [one for one in found if 0 not in one.stride()]
    copies, state = [one.detach().clone() for one in tensors], torch.get_rng_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.detach().copy_(copy)
        torch.set_rng_state(state)
