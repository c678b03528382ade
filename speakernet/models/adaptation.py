"""The adaptation that `speakernet adapt` appends to the embedding layer: normalised affine maps,
PLDA's variances.

It is part of the network, so every command, the store of people and exports use it.
`speakernet.evaluation.adaptation` fits it; `speakernet.evaluation.scoring` computes PLDA scores.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

EPSILON = 1e-12


class Adaptation(nn.Module):
    """Maps embeddings of the network to embeddings adapted to a domain.

    Args:
        spec: plain values: `name`, which identifies it in thresholds and stores; `maps`, the
            numbers of inputs and outputs of each affine map; `score`, cosine or plda.

    >>> adaptation = Adaptation({"name": "example", "maps": [[2, 2], [2, 1]], "score": "cosine"})
    >>> adaptation(torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        sizes = spec["maps"]
        for (_, outputs), (next_inputs, _) in itertools.pairwise(sizes):
            if outputs != next_inputs:
                raise ValueError(
                    f"adaptation maps have sizes {sizes}; expected each input to match the "
                    "previous output"
                )
        self.maps = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in sizes)
        if spec["score"] == "plda":
            # Between-speaker variances (within-speaker ones are 1), and the weights of the length
            # that PLDA normalises.
            self.register_buffer("between", torch.ones(sizes[-1][1]))
            self.register_buffer("weights", torch.ones(sizes[-1][1]))

    def forward(self, embeddings: Tensor) -> Tensor:
        """(batch, dim) from the network to (batch, dim) adapted, not normalised."""
        for index, affine_map in enumerate(self.maps):
            # Between two maps the length is normalised, as between LDA and PLDA; the first map
            # takes embeddings as the network gives them.
            if index > 0:
                embeddings = embeddings / embeddings.norm(dim=1, keepdim=True).clamp(min=EPSILON)
            embeddings = affine_map(embeddings)
        return embeddings
