"""What moves the weights: the optimizers and their parameter groups, freezing, and the moving average of weights."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from speakernet.options import create, lookup
from speakernet.parallel.sharding import ROW_SHARE, join_state, parameters_of
from speakernet.training.options import (
    OPTIMIZERS,
    AdamOptions,
    OptimizerOptions,
    SgdOptions,
    TrainingOptions,
)

Groups = list[dict[str, Any]]

EPSILON_FLOAT32 = 1e-8
# Gradients that passed through 16 bits carry noise of about 1e-3 of their size; a second moment near zero must not
# turn that noise into whole steps.
EPSILON_HALF = 1e-7
LEARNING_RATE_FACTOR = "learning_rate_factor"
"""Key of a group's factor on the learning rate; a group without it has 1."""


def sgd(options: SgdOptions, groups: Groups, fused: bool) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum, by default Nesterov's."""
    optimizer = torch.optim.SGD(
        groups, lr=options.learning_rate, momentum=options.momentum, nesterov=options.nesterov, fused=fused
    )
    _fill_in_momentum(optimizer)
    return optimizer


def adam(options: AdamOptions, groups: Groups, epsilon: float, fused: bool) -> torch.optim.Optimizer:
    """Adam and its relatives."""
    rates: dict[str, Any] = {"lr": options.learning_rate, "betas": (options.beta1, options.beta2), "eps": epsilon}
    return ADAMS[options.name](groups, **rates, **({"fused": True} if fused else {}))


ADAMS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": torch.optim.RAdam, "nadam": torch.optim.NAdam}
# torch has a one-kernel update for these, on CPU and CUDA.
FUSED_OPTIMIZERS = frozenset({"sgd", "adam", "adamw"})


def _fill_in_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give sgd the momentum that it lacks, as zeros: its first step is then torch's own, to the bit.

    torch's fused SGD makes it in its first step from raw memory, and leaves it raw if that step is skipped.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = zeros


def parameter_groups(
    modules: Iterable[nn.Module], weight_decay: float, decay_all: bool = False, factors: Sequence[float] = ()
) -> Groups:
    """Groups of what decays, and of what does not (normalisation weights, biases, single numbers).

    A parameter of one dimension or none does not decay: in every normalisation and bias that is the shape. `factors`
    are of the learning rate of the first modules, 1 for the others; each factor has groups of its own.
    """
    # In this order whatever the modules hold: a checkpoint knows the groups by their number.
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    seen: set[int] = set()
    for module, factor in zip(modules, itertools.chain(factors, itertools.repeat(1.0)), strict=False):
        # Of a pretrained backbone, whose lower layers learn less.
        parts: list[Any] = [one for one in module.modules() if hasattr(one, "learning_rate_factors")]
        own = {id(one): by for part in parts for one, by in part.learning_rate_factors()}
        for parameter in module.parameters():
            of_layer = factor * own.get(id(parameter), 1.0)
            of_module = [groups.setdefault((of_layer, decays), []) for decays in (True, False)]
            # RawNet3's frozen norms never see the optimizer; a weight that two modules share is moved once.
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            of_module[0 if decay_all or parameter.ndim > 1 else 1].append(parameter)
    return [
        # A factor of 1 is left out, as in checkpoints that have none.
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        | ({} if factor == 1.0 else {LEARNING_RATE_FACTOR: factor})
        for (factor, decays), parameters in groups.items()
        if parameters
    ]


def should_fuse(options: OptimizerOptions, device: torch.device) -> bool:
    """Whether to use the one-kernel update."""
    has_fused = options.name in FUSED_OPTIMIZERS and device.type in ("cpu", "cuda")
    if options.fused == "on" and not has_fused:
        raise ValueError(
            f"optimizer.fused: on, but torch has no fused {options.name} on {device.type}; "
            f"available fused: {', '.join(sorted(FUSED_OPTIMIZERS))}; set optimizer.fused: auto"
        )
    return has_fused and options.fused != "off"


def create_optimizer(
    options: OptimizerOptions, modules: Iterable[nn.Module], device: torch.device, *, is_float32: bool = True
) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters of `modules`; `is_float32` sets what `epsilon: auto` means."""
    part = lookup(OPTIMIZERS, options.name, "optimizer")
    factors = [options.network_learning_rate_factor]
    groups = parameter_groups(modules, options.weight_decay, options.decay_norms_and_biases, factors)
    if not groups:
        raise ValueError("no trainable parameter: every weight of the model and the loss is frozen")
    epsilon = getattr(options, "epsilon", "auto")
    if epsilon == "auto":
        epsilon = EPSILON_FLOAT32 if is_float32 else EPSILON_HALF
    # torch has not every fused update for weights that `fully_shard` has cut.
    is_cut = any(hasattr(one, "to_local") for group in groups for one in group["params"])
    fused = should_fuse(options, device) and not is_cut
    return create(part, options, groups=groups, epsilon=epsilon, fused=fused)  # type: ignore[no-any-return]


class OptimizerState:
    """An optimizer's moments; its options stay those that the resumed run was given (torch would restore the saved)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._parameters = optimizer, parameters_of(optimizer)
        self._is_sharded = any(hasattr(one, ROW_SHARE) for one in self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; what several ranks share is whole on rank 0, so that each has to ask."""
        state = self.optimizer.state_dict()
        return {**state, "state": join_state(state["state"], self._parameters)} if self._is_sharded else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the moments up; ValueError if they are another optimizer's, or of other parameters."""
        own, saved = self.optimizer.state_dict()["param_groups"], state["param_groups"]
        if [set(one) for one in own] != [set(one) for one in saved]:
            raise ValueError(f"{len(saved)} groups of parameters with other options, expected {len(own)}")
        # torch takes the options from the state dictionary, so ours holds the present ones.
        groups = [{**one, "params": other["params"]} for one, other in zip(own, saved, strict=True)]
        own_state = join_state(state["state"], self._parameters, back=True)
        self.optimizer.load_state_dict({"state": own_state, "param_groups": groups})
        _fill_in_momentum(self.optimizer)


class Freezing:
    """Puts a network into training mode, less what stays as it was given.

    A frozen network gets no gradient, so that the optimizer touches neither its weights nor their moments (not even by
    weight decay), and its batch norm normalises by its running statistics without moving them. All of it follows from
    the epoch alone, so a resumed run finds it unchanged.
    """

    def __init__(self, net: nn.Module, options: TrainingOptions) -> None:
        self.keeps_statistics = options.freeze_norm_statistics
        self._net, self._epochs = net, options.freeze_epochs
        # What a network never trains (RawNet3's idle norms) does not begin to learn when the rest does.
        self._parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]

    def begin_training(self, epoch: int) -> None:
        """Training mode for the steps of an epoch, counted from 0."""
        is_frozen = epoch < self._epochs
        for parameter in self._parameters:
            parameter.requires_grad_(not is_frozen)
        modules: list[Any] = list(self._net.modules())
        for module in modules:
            if hasattr(module, "begin_epoch") and not is_frozen:
                module.begin_epoch(epoch)
        self._net.train()
        for module in modules if is_frozen or self.keeps_statistics else ():
            if isinstance(module, _BatchNorm):
                module.eval()


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


class WeightAverage:
    """Exponential moving average of a network's weights, kept beside it.

    Early on the average follows more closely, `min(decay, (1 + steps) / (10 + steps))`, so that the random start is
    soon forgotten. Buffers (batch-norm statistics) are averaged too if they are floating point, else copied.
    `initial_share` is the share of the first weights in what is evaluated, so that a fine-tuned network forgets less
    (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models"). With both 0 it keeps nothing and does nothing.
    (torch's `AveragedModel` begins with a copy of the first weights and has no such early stretch, copies the whole
    module with what was compiled into it, and cannot change places.)

    >>> net = nn.Linear(1, 1, bias=False); _ = net.weight.data.fill_(1.0)
    >>> average = WeightAverage(net, decay=0.5); average.update(); _ = net.weight.data.fill_(0.0)
    >>> average.update()
    >>> with average.applied():
    ...     round(net.weight.item(), 4)
    0.1818
    """

    def __init__(self, net: nn.Module, decay: float, initial_share: float = 0.0) -> None:
        self.decay, self.initial_share = decay, initial_share
        self._steps, self.is_kept = 0, decay > 0 or initial_share > 0
        # What never moves is its own average.
        moving = (one for one in net.parameters() if one.requires_grad)
        self._live = [*moving, *net.buffers()] if self.is_kept else []
        self._floats = [index for index, tensor in enumerate(self._live) if tensor.is_floating_point()]
        self._kept = [tensor.detach().clone() for tensor in self._live]
        self._initial = [self._kept[index].clone() for index in self._floats] if initial_share else []

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights."""
        # The first update is the start itself: (1 + 0) / (10 + 0) of the old would be a share of nothing learned.
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps))
        self._steps += 1
        floats = [self._kept[index] for index in self._floats]
        torch._foreach_lerp_(floats, [self._live[index] for index in self._floats], 1.0 - decay)
        for index, tensor in enumerate(self._live):
            if not tensor.is_floating_point():
                self._kept[index].copy_(tensor)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the network holds the average, with its share of the first weights; then its own again."""
        self.swap()
        floats = [self._live[index] for index in self._floats] if self._initial else []
        average = [one.detach().clone() for one in floats]
        with torch.no_grad():
            if floats:
                torch._foreach_lerp_(floats, self._initial, self.initial_share)
            try:
                yield
            finally:
                for live, held in zip(floats, average, strict=True):
                    live.copy_(held)
                self.swap()

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of updates."""
        return {"steps": self._steps, "kept": list(self._kept), "initial": list(self._initial)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave; if that kept no average, begin with the network's present weights."""
        self._steps = int(state["steps"])
        for kept, saved in zip(self._kept, state["kept"] or self._live, strict=bool(self._live)):
            kept.copy_(saved)
        if self._initial and not state.get("initial"):
            raise ValueError(
                "training.initial_weight was 0 when this run began, so its first weights are not kept; set it to 0, or "
                "choose another --save_path"
            )
        for initial, saved in zip(self._initial, state.get("initial") or [], strict=bool(self._initial)):
            initial.copy_(saved)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the network's own weights."""
        for live, kept in zip(self._live, self._kept, strict=True):
            # One tensor at a time: the whole network would be in memory three times.
            held = live.detach().clone()
            live.copy_(kept)
            kept.copy_(held)
