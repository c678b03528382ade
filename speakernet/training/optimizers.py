"""Optimizers and their parameter groups, freezing, and the moving average of weights."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from speakernet.options import create, lookup
from speakernet.parallel.sharding import convert_state, is_cut_by_torch, parameters_of
from speakernet.training.options import (
    OPTIMIZERS,
    AdamOptions,
    OptimizerOptions,
    SgdOptions,
    TrainingOptions,
)
from speakernet.training.protocols import TunedTrunk

Groups = list[dict[str, Any]]

EPSILON_FLOAT32 = 1e-8
# Gradients computed in 16 bits carry noise of about 1e-3 of their size; a second moment near zero
# must not turn that noise into full steps.
EPSILON_HALF = 1e-7
LEARNING_RATE_FACTOR = "learning_rate_factor"
"""Key of a group's learning-rate factor; 1 if absent."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of a batch norm."""


def sgd(options: SgdOptions, groups: Groups, fused: bool) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum, by default Nesterov's."""
    optimizer = torch.optim.SGD(
        groups,
        lr=options.learning_rate,
        momentum=options.momentum,
        nesterov=options.nesterov,
        fused=fused,
    )
    _fill_in_momentum(optimizer)
    return optimizer


def adam(
    options: AdamOptions, groups: Groups, is_float32: bool, fused: bool
) -> torch.optim.Optimizer:
    """Adam and its relatives."""
    epsilon = options.epsilon
    if epsilon == "auto":
        epsilon = EPSILON_FLOAT32 if is_float32 else EPSILON_HALF
    settings: dict[str, Any] = {
        "lr": options.learning_rate,
        "betas": (options.beta1, options.beta2),
        "eps": epsilon,
    }
    if fused:
        settings["fused"] = True
    return ADAMS[options.name](groups, **settings)


ADAMS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "radam": torch.optim.RAdam,
    "nadam": torch.optim.NAdam,
}
# torch has a fused update for these, on CPU and CUDA.
FUSED_OPTIMIZERS = frozenset({"sgd", "adam", "adamw"})


def _fill_in_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Create SGD's missing momentum buffers as zeros; the first step is then bitwise the one torch
    would take.

    torch's fused SGD allocates them uninitialised in its first step, and leaves them so if that
    step is skipped.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = zeros


def parameter_groups(
    modules: Sequence[nn.Module],
    weight_decay: float,
    decay_all: bool = False,
    first_factor: float = 1.0,
) -> Groups:
    """Groups with and without weight decay (none for normalisation weights, biases and scalars).

    A parameter with fewer than two dimensions does not decay: every normalisation weight and bias
    has that shape. `first_factor` is the learning-rate factor of the first module, the network, 1
    that of the others; each factor has separate groups.
    """
    # The order must not depend on the modules: a checkpoint identifies groups by number.
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    seen: set[nn.Parameter] = set()
    # A pretrained backbone has factors for its lower layers, which learn more slowly.
    of_layers = dict(cast(TunedTrunk, modules[0].trunk).learning_rate_factors())
    for number, module in enumerate(modules):
        factor = 1.0 if number else first_factor
        for parameter in module.parameters():
            own_factor = factor * of_layers.get(parameter, 1.0)
            for decays in (True, False):
                groups.setdefault((own_factor, decays), [])
            # Skip frozen parameters (RawNet3's norms) and weights that another module shares.
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                groups[own_factor, decay_all or parameter.ndim > 1].append(parameter)
    made: Groups = []
    for (factor, decays), parameters in groups.items():
        if parameters:
            made.append({"params": parameters, "weight_decay": weight_decay if decays else 0.0})
            # A factor of 1 is omitted, as in older checkpoints.
            if factor != 1.0:
                made[-1][LEARNING_RATE_FACTOR] = factor
    return made


def should_fuse(options: OptimizerOptions, device: torch.device) -> bool:
    """Whether to use torch's fused update."""
    has_fused = options.name in FUSED_OPTIMIZERS and device.type in ("cpu", "cuda")
    if options.fused == "on" and not has_fused:
        raise ValueError(
            f"optimizer.fused: on, but torch has no fused {options.name} on {device.type} "
            f"(only {', '.join(sorted(FUSED_OPTIMIZERS))}); set optimizer.fused: auto"
        )
    return has_fused and options.fused != "off"


def create_optimizer(
    options: OptimizerOptions,
    modules: Sequence[nn.Module],
    device: torch.device,
    *,
    is_float32: bool = True,
) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters of `modules`, of which the network is the first;
    `is_float32` decides the value of `epsilon: auto`.
    """
    component = lookup(OPTIMIZERS, options.name, "optimizer")
    groups = parameter_groups(
        modules,
        options.weight_decay,
        options.decay_norms_and_biases,
        options.network_learning_rate_factor,
    )
    if not groups:
        raise ValueError("nothing to train: every weight of the model and the loss is frozen")
    # torch lacks some fused updates for weights that `fully_shard` has sharded.
    is_cut = any(is_cut_by_torch(weights) for group in groups for weights in group["params"])
    fused = should_fuse(options, device) and not is_cut
    return create(component, options, groups=groups, is_float32=is_float32, fused=fused)  # type: ignore[no-any-return]


class OptimizerState:
    """An optimizer's moments, without its options: a resumed run uses its own; torch would restore
    the saved ones.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = parameters_of(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; sharded state is gathered on rank 0, so every rank must call
        it.
        """
        state = self.optimizer.state_dict()
        state["state"] = convert_state(state["state"], self._parameters, to_whole=True)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the moments; ValueError if they belong to a different optimizer or different
        parameters.
        """
        current = self.optimizer.state_dict()["param_groups"]
        saved = state["param_groups"]
        if [set(group) for group in current] != [set(group) for group in saved]:
            raise ValueError(
                f"the {len(saved)} saved parameter groups differ in number or options from the "
                f"optimizer's {len(current)}"
            )
        # torch takes the options from the state dictionary, so put the current ones there.
        for group, of_saved in zip(current, saved, strict=True):
            group["params"] = of_saved["params"]
        moments = convert_state(state["state"], self._parameters, to_whole=False)
        self.optimizer.load_state_dict({"state": moments, "param_groups": current})
        _fill_in_momentum(self.optimizer)


class Freezing:
    """Puts a network into training mode, except for the parts that are frozen.

    A frozen network gets no gradient, so the optimizer changes neither its weights nor their
    moments (not even by weight decay), and its batch norm uses its running statistics without
    updating them. What is frozen depends only on the epoch, so a resumed run continues unchanged.
    """

    def __init__(self, net: nn.Module, options: TrainingOptions) -> None:
        self.keeps_statistics = options.freeze_norm_statistics
        self._net = net
        self._trunk = cast(TunedTrunk, net.trunk)
        self._epochs = options.freeze_epochs
        # Parameters that a network never trains (RawNet3's idle norms) stay frozen when the rest is
        # unfrozen.
        self._parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]

    def begin_training(self, epoch: int) -> None:
        """Set training mode for an epoch (from 0)."""
        # Set in every epoch from its number alone, so that a resumed run needs no further state.
        is_frozen = epoch < self._epochs
        for parameter in self._parameters:
            parameter.requires_grad_(not is_frozen)
        if not is_frozen:
            self._trunk.begin_epoch(epoch)
        self._net.train()
        if is_frozen or self.keeps_statistics:
            for module in self._net.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()


# A bad step is undone. The optimizer leaves the weights alone, but the forward pass has already
# moved the running statistics of the batch norms, with the NaN of a broken crop in them; without
# this, one such crop would spoil every evaluation from then on. Copying them before each step costs
# a few launches for hundreds of tensors.
class BufferGuard:
    """Remembers the buffers that a forward pass changes (batch-norm statistics) and can restore
    them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # By dtype: on a GPU, a list of mixed dtypes is copied tensor by tensor.
        self._buffers: dict[torch.dtype, list[Tensor]] = {}
        for module in modules:
            for name, buffer in module.named_buffers():
                if name.rpartition(".")[2] in STATISTICS:
                    self._buffers.setdefault(buffer.dtype, []).append(buffer)
        self._copies = {}
        for dtype, buffers in self._buffers.items():
            self._copies[dtype] = [buffer.clone() for buffer in buffers]

    def remember(self) -> None:
        """Copy the current values, for `restore`."""
        for dtype, buffers in self._buffers.items():
            torch._foreach_copy_(self._copies[dtype], buffers)

    def restore(self) -> None:
        """Restore the remembered values."""
        for dtype, buffers in self._buffers.items():
            torch._foreach_copy_(buffers, self._copies[dtype])

    def restore_where(self, is_bad: Tensor) -> None:
        """Restore the remembered values if `is_bad` (0-d bool) is true, without synchronising with
        the device.
        """
        for dtype, buffers in self._buffers.items():
            # Concatenated, a few launches suffice for hundreds of small tensors. `where` instead of
            # a weighted sum: the values to discard may be NaN.
            before = torch.cat([copy.reshape(-1) for copy in self._copies[dtype]])
            after = torch.cat([buffer.reshape(-1) for buffer in buffers])
            sizes = [buffer.numel() for buffer in buffers]
            chosen = torch.where(is_bad, before, after).split(sizes)
            views = [part.view_as(buffer) for part, buffer in zip(chosen, buffers, strict=True)]
            torch._foreach_copy_(buffers, views)


class WeightAverage:
    """Exponential moving average of a network's weights.

    The decay starts low, `min(decay, (1 + steps) / (10 + steps))`, so that the random initial
    weights fade quickly. Floating-point buffers (batch-norm statistics) are averaged too, other
    buffers copied. `initial_share` is the share of the initial weights in the evaluated ones, so
    that a fine-tuned network forgets less (Wortsman et al. 2022, "Robust fine-tuning of zero-shot
    models"). If both are 0, the object does nothing. (torch's `AveragedModel` starts from a copy of
    the initial weights without this warm-up, copies the whole module including its compiled code,
    and cannot be swapped with the network.)

    >>> net = nn.Linear(1, 1, bias=False); _ = net.weight.data.fill_(1.0)
    >>> average = WeightAverage(net, decay=0.5); average.update(); _ = net.weight.data.fill_(0.0)
    >>> average.update()
    >>> with average.apply():
    ...     round(net.weight.item(), 4)
    0.1818
    """

    def __init__(self, net: nn.Module, decay: float, initial_share: float = 0.0) -> None:
        self.decay = decay
        self.initial_share = initial_share
        self._steps = 0
        self.is_kept = decay > 0 or initial_share > 0
        self._live: list[Tensor] = []
        if self.is_kept:
            # Frozen weights need no average.
            weights = (weight for weight in net.parameters() if weight.requires_grad)
            self._live = [*weights, *net.buffers()]
        self._kept = [tensor.detach().clone() for tensor in self._live]
        # Views of the two lists above: what is averaged, and what is copied.
        is_float = [tensor.is_floating_point() for tensor in self._live]
        self._floats = list(itertools.compress(self._live, is_float))
        self._kept_floats = list(itertools.compress(self._kept, is_float))
        is_other = [not floats for floats in is_float]
        self._others = list(itertools.compress(self._live, is_other))
        self._kept_others = list(itertools.compress(self._kept, is_other))
        self._initial: list[Tensor] = []
        if initial_share:
            self._initial = [tensor.clone() for tensor in self._kept_floats]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        # Random initial weights would otherwise dominate early averages: with a decay of 0.999
        # their share after a thousand steps would be more than a third.
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps))
        self._steps += 1
        torch._foreach_lerp_(self._kept_floats, self._floats, 1.0 - decay)
        # In one call: on a GPU, hundreds of counters would take hundreds of launches.
        if self._others:
            torch._foreach_copy_(self._kept_others, self._others)

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Inside the block the network holds the average, mixed with `initial_share` of its initial
        weights.
        """
        self.swap()
        mixed = self._floats if self._initial else []
        average = [tensor.detach().clone() for tensor in mixed]
        with torch.no_grad():
            if mixed:
                torch._foreach_lerp_(mixed, self._initial, self.initial_share)
            try:
                yield
            finally:
                for live, kept in zip(mixed, average, strict=True):
                    live.copy_(kept)
                self.swap()

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of updates."""
        return {"steps": self._steps, "kept": list(self._kept), "initial": list(self._initial)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; if it has no average, start from the network's current
        weights.
        """
        self._steps = int(state["steps"])
        if self._kept:
            self._copy(self._kept, state["kept"] or self._live)
        initial = state.get("initial") or []
        if self._initial and not initial:
            raise ValueError(
                "training.initial_weight was 0 when this run started, so its initial weights were "
                "not saved; set it to 0, or choose a different --save_path"
            )
        if self._initial:
            self._copy(self._initial, initial)

    @staticmethod
    def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the network's own weights."""
        for live, kept in zip(self._live, self._kept, strict=True):
            # One tensor at a time, to avoid a third copy of the whole network in memory.
            # Swapped rather than copied, so that a second swap restores the trained weights
            # exactly.
            before = live.detach().clone()
            live.copy_(kept)
            kept.copy_(before)
