"""The optimizers by name, and the parameter groups they get (no decay on normalisation weights and biases)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from speakernet.registry import create, lookup

Groups = list[dict[str, Any]]


def sgd(
    groups: Groups, learning_rate: float, momentum: float = 0.9, nesterov: bool = True, fused: bool = False
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum, by default Nesterov's."""
    optimizer = torch.optim.SGD(
        groups, lr=learning_rate, momentum=momentum, nesterov=nesterov and momentum > 0, fused=fused
    )
    _fill_in_momentum(optimizer)
    return optimizer


def adam(
    groups: Groups,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Adam; weight decay is an L2 term in the gradient."""
    return torch.optim.Adam(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=fused)


def adamw(
    groups: Groups,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=fused)


def radam(
    groups: Groups, learning_rate: float, betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8
) -> torch.optim.Optimizer:
    """Rectified Adam: its own warm-up of the variance estimate."""
    return torch.optim.RAdam(groups, lr=learning_rate, betas=betas, eps=epsilon)


def nadam(
    groups: Groups, learning_rate: float, betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8
) -> torch.optim.Optimizer:
    """Adam with Nesterov's look-ahead."""
    return torch.optim.NAdam(groups, lr=learning_rate, betas=betas, eps=epsilon)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "radam": radam,
    "nadam": nadam,
}
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


def parameter_groups(modules: Iterable[nn.Module], weight_decay: float, decay_all: bool = False) -> Groups:
    """Two groups: what decays, and what does not (normalisation weights, biases, single numbers).

    A parameter of one dimension or none does not decay: in every normalisation and bias that is the shape.
    """
    decaying: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in modules:
        for parameter in module.parameters():
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            (decaying if decay_all or parameter.ndim > 1 else plain).append(parameter)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def should_fuse(name: str, device: torch.device, requested: str = "auto") -> tuple[bool, str]:
    """Whether to use the one-kernel update, and why.

    Raises:
        ValueError: `on` was asked for and torch has no fused form of this optimizer.
    """
    has_fused = name in FUSED_OPTIMIZERS and device.type in ("cpu", "cuda")
    if requested == "on" and not has_fused:
        raise ValueError(
            f"optimizer.fused: on, but torch has no fused {name} on {device.type}; "
            f"fused exist: {', '.join(sorted(FUSED_OPTIMIZERS))}; set optimizer.fused: auto"
        )
    if requested == "off":
        return False, "switched off"
    return has_fused, f"torch has {'a' if has_fused else 'no'} fused {name} on {device.type}"


def create_optimizer(
    name: str,
    modules: Iterable[nn.Module],
    options: Mapping[str, Any],
    *,
    weight_decay: float = 0.0,
    decay_norms_and_biases: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer `name` over all trainable parameters of `modules`.

    Raises:
        ValueError: unknown name or option, or nothing to train.
    """
    lookup(OPTIMIZERS, name, "optimizer")
    groups = parameter_groups(modules, weight_decay, decay_norms_and_biases)
    if not groups:
        raise ValueError("no trainable parameter: every weight of the model and the loss is frozen")
    return create(OPTIMIZERS, name, {"groups": groups, **options}, "optimizer")


class OptimizerState:
    """An optimizer's moments, to keep and to take up; its options stay those that the resumed run was given.

    (torch's own `load_state_dict` would put the saved options back, whatever the user asks for now.)
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return self.optimizer.state_dict()

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
        groups = [{**one, "params": other["params"]} for one, other in zip(own, saved, strict=True)]
        self.optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
        _fill_in_momentum(self.optimizer)
