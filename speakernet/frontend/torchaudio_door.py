"""The only place that imports torchaudio; one that does not fit the installed torch is answered with its cure."""

import torch
from torch import Tensor

from speakernet.machine.facts import TORCH_PAIR

try:
    from torchaudio.compliance.kaldi import get_mel_banks
    from torchaudio.functional import melscale_fbanks as computed_fbanks
except (ImportError, OSError, RuntimeError) as error:
    raise ImportError(
        "torchaudio could not be loaded beside the installed torch; it must be a release built for it. Mend it with:\n"
        "  pip uninstall -y torch torchaudio\n"
        f"  {TORCH_PAIR}\n"
        f"(the loader said: {error})"
    ) from error


def melscale_fbanks(num_bins: int, low_hz: float, high_hz: float, num_mels: int, sample_rate: int) -> Tensor:
    """Torchaudio's bank of triangles (bins, mels), also where tensors are made without memory: it looks at numbers."""
    with torch.device("cpu"):
        bank = computed_fbanks(num_bins, low_hz, high_hz, num_mels, sample_rate)
    return bank.to(torch.get_default_device())


__all__ = ["get_mel_banks", "melscale_fbanks"]
