"""A teacher: another network's embeddings as a second training target besides the speakers.

By default, the teacher's embeddings of whole, unaugmented recordings are computed once before the
first step and kept in the run folder. The student sees augmented crops, so it learns to ignore the
augmentation.

Source: Wang et al. 2019, "Knowledge distillation for small foot-print deep speaker embedding"
(embedding level).
"""

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.assembly.evaluation import build_embedder, load_for_scoring
from speakernet.assembly.inputs import Inputs
from speakernet.config import Config, ConfigError
from speakernet.evaluation.embedding import weights_digest
from speakernet.losses.options import LossOptions
from speakernet.models.speaker_net import SpeakerNet
from speakernet.run_folder import EMBEDDINGS

if TYPE_CHECKING:
    from speakernet.training.step import BatchLike

logger = logging.getLogger(__name__)


class Teacher(nn.Module):
    """The distance of embeddings to a teacher's; if the sizes differ, a learned linear layer maps
    one to the other.

    >>> teacher = Teacher(LossOptions(teacher_weight=2.0), 2, torch.tensor([[0.0, 3.0], [4.0, 0.0]]), num_speakers=1)
    >>> embeddings, labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0, 1])
    >>> teacher(embeddings, teacher.kept[[0, 1, 0]], labels)  # distances 1 and 0; the third row is a changed voice
    tensor(0.6667)
    """

    def __init__(
        self,
        options: LossOptions,
        embedding_dim: int,
        kept: Tensor | None = None,
        net: SpeakerNet | None = None,
        num_speakers: int = 0,
    ) -> None:
        super().__init__()
        self.options = options
        self.kept = kept
        self.num_speakers = num_speakers
        # A list hides the network from torch: it is neither trained nor part of a checkpoint.
        self._nets = [one for one in (net,) if one is not None]
        dim = self._nets[0].embedding_dim if kept is None else kept.shape[1]
        self.translate = (
            nn.Linear(embedding_dim, dim, bias=False) if dim != embedding_dim else nn.Identity()
        )

    def wanted(self, batch: "BatchLike") -> Tensor:
        """The teacher's embeddings for a batch, (batch, dim), either of whole recordings or of the
        crops.
        """
        if self.kept is not None:
            kept = self.kept[batch.indices]
            device = batch.waveforms.device
            # Only page-locked memory can be copied while the GPU computes.
            return (kept.pin_memory() if device.type == "cuda" else kept).to(
                device, non_blocking=True
            )
        lengths = torch.full((len(batch.waveforms),), batch.waveforms.shape[1])
        (net,) = self._nets
        with torch.autocast(batch.waveforms.device.type, enabled=False):
            return net.embed(batch.waveforms, lengths, sample_rate=net.sample_rate)

    def forward(self, embeddings: Tensor, wanted: Tensor, labels: Tensor) -> Tensor:
        """The weighted mean distance, 0-d, between embeddings and targets, both (batch, dim).

        Embeddings of recordings apply to the recorded voice only: rows whose label, (batch,), is a
        changed speed or warp count as 0.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            found = self.translate(embeddings.float())
            if self.options.teacher_distance == "cosine":
                distances = 1 - functional.cosine_similarity(found, wanted)
            else:
                distances = (found - wanted).square().mean(dim=1)
            counts = (labels < self.num_speakers) | (self.kept is None)
            # The mean is over the whole batch, because the number of rows that count differs
            # between ranks and micro-batches.
            return self.options.teacher_weight * (distances * counts).mean()


def add_teacher(config: Config, loss: nn.Module, inputs: Inputs) -> None:
    """Attach the teacher named in a loss's options."""
    options = config.loss
    given = inputs.training
    student = config.model.embedding_dim
    model = load_for_scoring(config, options.teacher)
    net = model.net.eval().requires_grad_(False)
    rate = config.data.sample_rate
    if net.sample_rate != rate:
        raise ConfigError(
            f"loss.teacher: {options.teacher} was trained at {net.sample_rate} Hz, but "
            f"data.sample_rate is {rate}; use a different teacher or set data.sample_rate"
        )
    if options.teacher_input == "crops":
        loss.teacher = Teacher(options, student, net=net.to(inputs.device))
    else:
        embedder = dataclasses.replace(
            build_embedder(
                config, net.to(inputs.device), inputs.device, config.evaluation.precision
            ),
            stores=(Path(config.training.save_path) / EMBEDDINGS,),
            model_digest=weights_digest(model.contents["weights"]) + str(net.spec()),
        )
        embeddings, _ = embedder.embed(given.rows.paths, given.source, "whole", "teacher")
        kept = torch.from_numpy(embeddings[:, 0])
        # The mean over all recordings carries no speaker information.
        loss.teacher = Teacher(
            options, student, kept - kept.mean(dim=0), num_speakers=len(given.rows.speakers)
        )
    logger.info(
        "teacher %s: %d dimensions, %s distance, on %s, weight %g",
        options.teacher,
        net.embedding_dim,
        options.teacher_distance,
        options.teacher_input,
        options.teacher_weight,
    )
