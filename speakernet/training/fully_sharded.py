"""Several processes, each with a share of weights, gradients and moments, by torch's `fully_shard`
(FSDP2).
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor

from speakernet.parallel.sharding import RowShare, join_in_state, mark_share
from speakernet.training.compiling import repeated_blocks
from speakernet.training.exchange import SeveralProcesses
from speakernet.training.step import NUM_NUMBERS, NUM_WISHES


class FullySharded(SeveralProcesses):
    """Ranks that share every batch, each with a share of all trainable parameters.

    A repeated block is gathered only while it runs; the whole network is gathered during
    evaluation, since ranks embed unequal numbers of utterances. Checkpoints are gathered on rank 0.
    Messages use a separate all-reduce.
    """

    def __init__(self, net: nn.Module, loss: nn.Module, device: torch.device) -> None:
        super().__init__(net, loss, device)
        refuse_sharding(net, loss)
        self._sum = torch.zeros(NUM_NUMBERS + NUM_WISHES, device=device)
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        mesh = init_device_mesh(device.type, (torch_distributed.get_world_size(),))
        # A loss without weights has nothing to shard.
        roots = [module for module in (net, loss) if list(module.parameters())]
        for module in dict.fromkeys((*repeated_blocks(net), *roots)):
            before = list(module._forward_hooks)
            fully_shard(module, mesh=mesh)
            # Hooks that read a layer's output must run after FSDP's, which gathers weights for the
            # backward pass.
            for hook in before:
                module._forward_hooks[hook] = module._forward_hooks.pop(hook)
        # Before the first forward pass, so that `reset_iter_state` has a state to go back to.
        net._get_fsdp_state()._lazy_init()  # type: ignore[operator]
        modules = self._all.modules()
        self._sharded: list[Any] = [module for module in modules if isinstance(module, FSDPModule)]
        for root in roots:
            join_in_state(root)
            for parameter in root.parameters():
                mark_share(parameter, MeshShare(len(parameter), 0, 1, like=parameter))

    def begin_epoch(self) -> None:
        """Reset FSDP's state after an evaluation, in which each rank runs its own number of
        batches.
        """
        # Gathered weights may have been frozen or unfrozen; their shares have not.
        trained = [parameter.requires_grad for parameter in self._all.parameters()]
        for module in self._sharded:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)
        for parameter, is_trained in zip(self._all.parameters(), trained, strict=True):
            parameter.requires_grad_(is_trained)
        self._all.net.reset_iter_state()  # type: ignore[operator]

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are summed on each rank until the last micro-batch."""
        for module in self._sharded:
            module.set_requires_gradient_sync(is_last, recurse=False)
        return contextlib.nullcontext()

    def backward(self, value: Tensor, numbers: Tensor, *, is_last: bool) -> None:
        """Backward pass; each rank keeps its share of the averaged gradients."""
        self._sum += self._message(numbers, is_last)
        value.backward()  # type: ignore[no-untyped-call]

    def totals(self, numbers: Tensor) -> Tensor:
        """The messages of all ranks, averaged."""
        torch_distributed.all_reduce(self._sum)
        means = self._sum / torch_distributed.get_world_size()
        self._sum = torch.zeros_like(self._sum)
        return self._read_message(means)

    def share_statistics(self) -> None:
        """Share rank 0's statistics, and gather all weights until training continues."""
        super().share_statistics()
        for module in self._sharded:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)


@dataclass(frozen=True)
class MeshShare(RowShare):
    """A rank's share of a parameter as `fully_shard` cuts it; a DTensor already has the shape of
    the whole.
    """

    like: Any = None

    def take(self, whole: Tensor) -> Tensor:
        """This rank's share of a whole tensor that every rank has."""
        return distribute_tensor(
            whole, self.like.device_mesh, self.like.placements, src_data_rank=None
        )

    def join(self, share: Tensor) -> Tensor:
        """The whole tensor in host memory on rank 0, a meta tensor on the others; every rank calls
        it.
        """
        whole = share.detach().full_tensor()  # type: ignore[attr-defined]
        return whole.to("meta" if torch_distributed.get_rank() else "cpu")  # type: ignore[no-any-return]


def refuse_sharding(net: nn.Module, loss: nn.Module) -> None:
    """ValueError if `fully_shard` cannot shard these parameters."""
    reason = ""
    for name, parameter in (*net.named_parameters(), *loss.named_parameters()):
        if not parameter.ndim:
            reason = f"{name} is a scalar"
    # Older versions of torch cannot reset the state after an evaluation.
    if "reset_iter_state" not in dir(FSDPModule):
        reason = f"torch {torch.__version__} lacks FSDPModule.reset_iter_state"
    if reason:
        raise ValueError(
            f"runtime.parallel is fsdp, but {reason}, so the model cannot be sharded; use ddp"
        )
