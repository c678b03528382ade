"""The optimizers by name, and the parameter groups they get (no decay on normalisation weights and biases)."""

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from speakernet.options import create, lookup
from speakernet.parallel.sharding import join_state, parameters_of, take_state
from speakernet.training.options import (
    OPTIMIZERS,
    AdamOptions,
    AdamWOptions,
    NAdamOptions,
    OptimizerOptions,
    RAdamOptions,
    SgdOptions,
)

logger = logging.getLogger(__name__)

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
    """Adam; weight decay is an L2 term in the gradient."""
    return torch.optim.Adam(groups, **_of_adam(options, epsilon), fused=fused)


def adamw(options: AdamWOptions, groups: Groups, epsilon: float, fused: bool) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW(groups, **_of_adam(options, epsilon), fused=fused)


def radam(options: RAdamOptions, groups: Groups, epsilon: float) -> torch.optim.Optimizer:
    """Rectified Adam: its own warm-up of the variance estimate."""
    return torch.optim.RAdam(groups, **_of_adam(options, epsilon))


def nadam(options: NAdamOptions, groups: Groups, epsilon: float) -> torch.optim.Optimizer:
    """Adam with Nesterov's look-ahead."""
    return torch.optim.NAdam(groups, **_of_adam(options, epsilon))


def _of_adam(options: AdamOptions, epsilon: float) -> dict[str, Any]:
    return {"lr": options.learning_rate, "betas": (options.beta1, options.beta2), "eps": epsilon}


# torch has a one-kernel update for these, on CPU and CUDA.
FUSED_OPTIMIZERS = frozenset({"sgd", "adam", "adamw"})


def _fill_in_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give sgd the momentum that it lacks, as zeros: its first step is then torch's own, to the bit.

    torch's fused SGD makes it in its first step from raw memory, and leaves it raw where that step is skipped.
    """
    for group in optimizer.param_groups:
        if not group.get("momentum"):
            continue
        for parameter in group["params"]:
            if optimizer.state[parameter].get("momentum_buffer") is None:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = zeros


def parameter_groups(
    modules: Iterable[nn.Module], weight_decay: float, decay_all: bool = False, factors: Sequence[float] = ()
) -> Groups:
    """Groups of what decays, and of what does not (normalisation weights, biases, single numbers).

    A parameter of one dimension or none does not decay: in every normalisation and bias that is the shape.

    Args:
        modules: what is trained.
        weight_decay: of what decays.
        decay_all: let everything decay.
        factors: of the learning rate of the first modules, 1 for the others; each factor has groups of its own.
    """
    # In this order whatever the modules hold: a checkpoint knows the groups by their number.
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    seen: set[int] = set()
    for module, factor in zip(modules, itertools.chain(factors, itertools.repeat(1.0)), strict=False):
        of_module = [groups.setdefault((factor, decays), []) for decays in (True, False)]
        for parameter in module.parameters():
            # RawNet3's frozen norms never see the optimizer; a weight that two modules share is moved once.
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            of_module[0 if decay_all or parameter.ndim > 1 else 1].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, **_factor(factor)}
        for (factor, decays), parameters in groups.items()
        if parameters
    ]


def _factor(factor: float) -> dict[str, float]:
    # A group without it is what checkpoints of before this option hold.
    return {} if factor == 1.0 else {LEARNING_RATE_FACTOR: factor}


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group of parameters its learning rate: the one given, times the group's factor."""
    for group in optimizer.param_groups:
        value = learning_rate * group.get(LEARNING_RATE_FACTOR, 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def keep_rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let the update read its learning rates from the device, where `set_learning_rate` then fills them in.

    A recorded update goes on with whatever they are when it is repeated. Kernels of CUDA take them in 32 bits.
    """
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=dtype, device=device)
        # Adam asks for leave to be recorded; a fused one needs nothing else for it.
        if "capturable" in group and device.type == "cuda":
            group["capturable"] = True


def should_fuse(options: OptimizerOptions, device: torch.device) -> tuple[bool, str]:
    """Whether to use the one-kernel update, and why.

    Raises:
        ValueError: `on` was asked for and torch has no fused form of this optimizer.
    """
    name = options.name
    has_fused = name in FUSED_OPTIMIZERS and device.type in ("cpu", "cuda")
    if options.fused == "on" and not has_fused:
        raise ValueError(
            f"optimizer.fused: on, but torch has no fused {name} on {device.type}; "
            f"fused exist: {', '.join(sorted(FUSED_OPTIMIZERS))}; set optimizer.fused: auto"
        )
    if options.fused == "off":
        return False, "switched off"
    return has_fused, f"torch has {'a' if has_fused else 'no'} fused {name} on {device.type}"


def create_optimizer(
    options: OptimizerOptions, modules: Iterable[nn.Module], device: torch.device, *, is_float32: bool = True
) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters of `modules`.

    Args:
        options: which one, and how far it moves.
        modules: the network, and the head of the loss.
        device: where they are.
        is_float32: whether gradients are computed in 32 bits; sets what `epsilon: auto` means.

    Raises:
        ValueError: unknown name, a fused form that torch has not, or nothing to train.
    """
    part = lookup(OPTIMIZERS, options.name, "optimizer")
    factors = [options.network_learning_rate_factor]
    groups = parameter_groups(modules, options.weight_decay, options.decay_norms_and_biases, factors)
    if not groups:
        raise ValueError("no trainable parameter: every weight of the model and the loss is frozen")
    fused, reason = should_fuse(options, device)
    logger.debug("optimizer %s, fused: %s (%s)", options.name, fused, reason)
    epsilon = getattr(options, "epsilon", "auto")
    if epsilon == "auto":
        epsilon = EPSILON_FLOAT32 if is_float32 else EPSILON_HALF
    return create(part, options, groups=groups, epsilon=epsilon, fused=fused)  # type: ignore[no-any-return]


class OptimizerState:
    """An optimizer's moments, to keep and to take up; its options stay those that the resumed run was given.

    (torch's own `load_state_dict` would put the saved options back, whatever the user asks for now.)
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; what several ranks share is whole on rank 0, so that each has to ask."""
        state = self.optimizer.state_dict()
        # Plain values, wherever the rates are kept.
        groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
        return {"state": join_state(state["state"], parameters_of(self.optimizer)), "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the moments up.

        Raises:
            ValueError: they are another optimizer's, or of other parameters.
        """
        own = self.optimizer.state_dict()["param_groups"]
        saved = state["param_groups"]
        if len(own) != len(saved):
            raise ValueError(f"{len(saved)} groups of parameters, expected {len(own)}")
        for one, other in zip(own, saved, strict=True):
            if set(one) != set(other):
                differing = ", ".join(sorted(set(one) ^ set(other)))
                raise ValueError(f"the optimizer's options differ: {differing}")
        # torch takes up what the state dictionary says, so ours says the options of now.
        groups = [{**one, "params": other["params"]} for one, other in zip(own, saved, strict=True)]
        own_state = take_state(state["state"], parameters_of(self.optimizer))
        self.optimizer.load_state_dict({"state": own_state, "param_groups": groups})
        _fill_in_momentum(self.optimizer)
