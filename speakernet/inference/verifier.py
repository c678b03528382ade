"""A model file in use: audio or features in, embeddings out, as the network gives them.

Knows model files, audio and the network, no training and no configuration. Whoever has audio in a list with trials to
score goes through `speakernet.evaluation` instead.
"""

import os
import re
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from speakernet.data.audio import AudioError, audio_info, audio_of_array, read_audio
from speakernet.machine.device import find_device
from speakernet.machine.options import MachineOptions
from speakernet.models.model_file import ModelFile, load_model_file

Array: TypeAlias = np.ndarray | Tensor


def load(path: str | Path, device: torch.device | str = "auto") -> "SpeakerVerifier":
    """A model file, our own or imported, ready to use.

    Args:
        path: such as `exps/exp01/best.pt`; a checkpoint of another toolkit becomes a model file by
            `speakernet import-weights`.
        device: `cpu`, `cuda`, `cuda:1`, …; `auto` takes a GPU where there is one.

    Raises:
        ValueError: not a model file, a damaged or newer one, or a device that is not here.
    """
    found = _device(device)
    return SpeakerVerifier(load_model_file(path, found), found)


class SpeakerVerifier:
    """A trained network in evaluation mode, on one device.

    Embeddings are what the network's forward pass gives: not of unit length, no mean subtracted. They come as the
    input came: a tensor (on the CPU) for a tensor, else a numpy array.

    Args:
        model: the file that was read, its network already on `device`.
        device: where it runs.

    >>> from speakernet.models.speaker_net import SpeakerNet
    >>> verifier = SpeakerVerifier(ModelFile(SpeakerNet.named("ResNet", embedding_dim=8).eval(), {}))
    >>> verifier.embed(np.zeros(16000, dtype=np.float32), sample_rate=16000).shape
    (1, 8)
    >>> verifier.embed_features(torch.zeros(3, 200, verifier.num_features)).shape
    torch.Size([3, 8])
    """

    def __init__(self, model: ModelFile, device: torch.device | str = "cpu") -> None:
        self.net = model.net
        self.contents = model.contents
        self.device = torch.device(device)

    def __repr__(self) -> str:
        net = self.net
        return f"SpeakerVerifier({net.model_name}, {net.embedding_dim} numbers, {net.sample_rate} Hz, {self.device})"

    @property
    def embedding_dim(self) -> int:
        """Numbers in an embedding."""
        return self.net.embedding_dim

    @property
    def sample_rate(self) -> int:
        """Hz, of the waveforms that the network was trained on."""
        return self.net.sample_rate

    @property
    def num_features(self) -> int:
        """Numbers in a frame of features: mel bands, or 1 where the network hears samples."""
        return int(self.net.front_end.num_features)

    def embed(self, audio: str | os.PathLike | Array, *, sample_rate: int | None = None) -> Any:
        """The embedding of one recording, whole.

        Args:
            audio: a file, or an array `(samples,)` or `(samples, channels)` as soundfile gives it, floating point in
                -1..1 or int16. Channels are mixed down.
            sample_rate: Hz, of the array; any rate, resampled to the network's. A file says its own.

        Returns:
            (1, dim) float32.

        Raises:
            ValueError: audio that is missing, broken, of another shape or type, or shorter than the network can hear.
        """
        waveform = self._waveform(audio, sample_rate)
        if len(waveform) < (shortest := self.net.min_samples):
            raise AudioError(
                f"{len(waveform) / self.sample_rate:.3f} s of audio is too short: {self.net.model_name} needs "
                f"{shortest / self.sample_rate:.3f} s or more ({shortest} samples at {self.sample_rate} Hz)"
            )
        tensor = torch.from_numpy(waveform).unsqueeze(0).to(self.device)
        return _like(audio, self.net.embed(tensor, sample_rate=self.sample_rate))

    def embed_features(self, features: Array) -> Any:
        """The embeddings of features that were computed elsewhere; nothing is done to them.

        Args:
            features: (batch, frames, mels) floating point, as the published code feeds its network: with the mean
                removed where it removes it.

        Returns:
            (batch, dim) float32.

        Raises:
            ValueError: another shape, other numbers than floating-point ones, NaN, or fewer frames than the network can
                hear.
        """
        tensor = torch.as_tensor(features)
        shape = tuple(tensor.shape)
        if tensor.ndim != 3 or shape[2] != self.num_features or 0 in shape:
            is_turned = tensor.ndim == 3 and shape[1] == self.num_features
            raise ValueError(
                f"features of shape {shape}; expected (batch, frames, {self.num_features})"
                f"{': transpose the last two axes' if is_turned else ''}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"features of type {tensor.dtype}; expected floating point")
        tensor = tensor.to(self.device, torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError("features with NaN or infinite values; expected finite ones")
        with torch.inference_mode():
            return _like(features, self.net.from_features(tensor.transpose(1, 2)))

    def _waveform(self, audio: str | os.PathLike | Array, sample_rate: int | None) -> np.ndarray:
        """(samples,) float32 at the network's rate."""
        if isinstance(audio, str | os.PathLike):
            own_rate = audio_info(Path(audio)).sample_rate
            if sample_rate not in (None, own_rate):
                raise AudioError(f"{audio} says {own_rate} Hz, sample_rate says {sample_rate}; leave it out for a file")
            return read_audio(Path(audio), sample_rate=self.sample_rate)
        if not isinstance(audio, np.ndarray | Tensor):
            raise AudioError(f"audio is a {type(audio).__name__}; expected a file or an array of samples")
        if sample_rate is None:
            raise AudioError(f"an array does not say its rate; give sample_rate, such as {self.sample_rate}")
        array = audio.detach().cpu().numpy() if isinstance(audio, Tensor) else audio
        return audio_of_array(array, sample_rate, self.sample_rate)


def _like(given: Any, embeddings: Tensor) -> Any:
    """The embeddings as a tensor where one was given, else as a numpy array."""
    # A copy made outside of inference mode: what is kept of it may be trained on.
    with torch.inference_mode(False):
        found = embeddings.float().cpu().clone()
    return found if isinstance(given, Tensor) else found.numpy()


def _device(asked: torch.device | str) -> torch.device:
    """The device that is meant, if it is here.

    Raises:
        ValueError: no such device.
    """
    if asked == "auto":
        return find_device(MachineOptions())
    # By its text: torch keeps the number in one byte, so that cuda:257 would be the second GPU.
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", str(asked))
    if match is None:
        raise ValueError(f"device {asked!r}; expected auto, cpu, cuda or cuda:1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if match[0] != "cpu" and int(match[1] or 0) >= count:
        raise ValueError(f"device {asked!r}, but torch finds {count} GPUs here; use auto or cpu")
    return torch.device(match[0])
