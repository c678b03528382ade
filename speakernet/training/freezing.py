"""Which parts of a network learn when: the rule by which given weights are kept for some epochs, and nothing else."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from speakernet.training.options import FineTuningOptions


class Freezing:
    """Puts a network into training mode, less what stays as it was given.

    A frozen network gets no gradient, so that the optimizer touches neither its weights nor their moments (not even by
    weight decay), and its batch norm normalises by its running statistics without moving them. All of it follows from
    the epoch alone: a run that goes on finds it as it was.

    Args:
        net: the network, as the optimizer was made for it.
        options: for how long, and whether statistics stay even then.
    """

    def __init__(self, net: nn.Module, options: FineTuningOptions) -> None:
        self.keeps_statistics = options.freeze_norm_statistics
        self._net, self._epochs = net, options.freeze_epochs
        # What a network never trains (RawNet3's idle norms) does not begin to learn when the rest does.
        self._parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]

    def is_frozen(self, epoch: int) -> bool:
        """Whether the network stays as it is in an epoch, counted from 0."""
        return epoch < self._epochs

    def begin_training(self, epoch: int) -> None:
        """Training mode for the steps of an epoch, counted from 0."""
        is_frozen = self.is_frozen(epoch)
        for parameter in self._parameters:
            parameter.requires_grad_(not is_frozen)
        self._net.train()
        if is_frozen or self.keeps_statistics:
            for module in self._net.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
