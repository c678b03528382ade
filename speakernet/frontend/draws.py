"""Random draws of what acts in training only, counted, so that a run that was stopped goes on with the same ones."""

import torch
from torch import Tensor, nn

from speakernet.seeding import derive_seed


class DrawCounter(nn.Module):
    """Keyed random draws of a training-only step: the n-th call always draws the same, also after a resume.

    The count travels in the state dictionary as a tensor, so that a run that was stopped goes on with the draws that
    a straight run would have made.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.count = 0

    def next_seed(self) -> int:
        """A seed for this call alone."""
        self.count += 1
        return derive_seed(self.seed, self.count)

    @torch.compiler.disable
    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator on `device` for this call alone."""
        return torch.Generator(device).manual_seed(self.next_seed())

    @torch.compiler.disable
    def normal_like(self, tensor: Tensor) -> Tensor:
        """Standard normal noise of the tensor's shape, drawn on its device."""
        generator = self.generator(tensor.device)
        return torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)

    def get_extra_state(self) -> Tensor:
        """The number of draws so far."""
        return torch.tensor(self.count, dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        """Go on after so many draws."""
        self.count = int(state)
