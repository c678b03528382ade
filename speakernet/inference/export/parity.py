"""Whether an exported network gives what ours gives, on speech."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from speakernet.evaluation.backend import mean_of_whole_utterances
from speakernet.inference.export.formats import Run
from speakernet.models.model_file import ModelFile

LEAST_COSINE = 0.99999
"""An export whose embeddings point elsewhere by more is refused."""
EPSILON = 1e-12


@dataclass(frozen=True)
class Parity:
    """How far the embeddings of an exported network lie from ours.

    Attributes:
        cosine: the least, over recordings, outputs, and one by one as well as in a batch.
        difference: the largest absolute one of any number of an embedding.
        scale: the largest absolute number of our embeddings, beside which the difference is to be seen.
        num_recordings: that were compared.
    """

    cosine: float
    difference: float
    scale: float
    num_recordings: int

    @property
    def holds(self) -> bool:
        """Whether the export is as good as the network; NaN is not."""
        return self.cosine > LEAST_COSINE

    def __str__(self) -> str:
        return (
            f"least cosine {self.cosine:.8f}, largest difference {self.difference:.2g} of numbers up to "
            f"{self.scale:.3g}, over {self.num_recordings} recordings"
        )


def compare(model: ModelFile, run: Run, speech: Sequence[np.ndarray]) -> Parity:
    """Embed recordings with the network and with its export, each alone and all together as a batch of one length.

    Args:
        model: the network.
        run: its export.
        speech: recordings at the network's rate, (samples,) float32 each, no shorter than the network can hear.
    """
    shortest = min(len(one) for one in speech)
    batches = [one[None, :] for one in speech] + [np.stack([one[:shortest] for one in speech])]
    mean = mean_of_whole_utterances(model.contents)
    centre = 0.0 if mean is None else mean
    cosines, differences, scale = [], [], 0.0
    for batch in batches:
        ours = _embed(model, batch)
        theirs = run(np.ascontiguousarray(batch, dtype=np.float32))
        pairs = [(theirs[0], ours), (theirs[0] - centre, ours - centre)]
        # The second output of a graph is ready to be compared.
        pairs += [(one, ours - centre) for one in theirs[1:]]
        cosines += [float(_cosines(*pair).min()) for pair in pairs]
        differences.append(float(np.abs(theirs[0] - ours).max()))
        scale = max(scale, float(np.abs(ours).max()))
    # Not `min`, which passes over NaN.
    return Parity(float(np.min(cosines)), float(np.max(differences)), scale, len(speech))


def _embed(model: ModelFile, batch: np.ndarray) -> np.ndarray:
    tensor = torch.from_numpy(np.ascontiguousarray(batch, dtype=np.float32))
    lengths = torch.full((len(tensor),), tensor.shape[1])
    return model.net.embed(tensor, lengths, sample_rate=model.net.sample_rate).float().numpy()


def _cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    first, second = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.asarray((first * second).sum(axis=1) / np.maximum(lengths, EPSILON))
