"""What `speakernet adapt` puts behind the embedding layer: affine maps, unit length between them, PLDA's variances.

It is a part of the network, so that every command, the store of people and an export use it. Fitting it is the work of
`speakernet.evaluation.adaptation`; scores by PLDA are computed in `speakernet.evaluation.scoring`.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

EPSILON = 1e-12


class Adaptation(nn.Module):
    """Embeddings of the network to embeddings of the domain.

    Args:
        spec: plain values: `name`, by which thresholds and stores recognise it; `maps`, the numbers of inputs and
            outputs of each affine map; `score`, cosine or plda.

    >>> adaptation = Adaptation({"name": "example", "maps": [[2, 2], [2, 1]], "score": "cosine"})
    >>> adaptation(torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        sizes = spec["maps"]
        if any(first[1] != second[0] for first, second in itertools.pairwise(sizes)):
            raise ValueError(f"an adaptation of maps {sizes}; expected each to take what the one before gives")
        self.maps = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in sizes)
        if spec["score"] == "plda":
            # Variances between speakers, where those within are 1, and the weights of the length that PLDA sets to 1.
            self.register_buffer("between", torch.ones(sizes[-1][1]))
            self.register_buffer("weights", torch.ones(sizes[-1][1]))

    def forward(self, embeddings: Tensor) -> Tensor:
        """(batch, dim) of the network to (batch, dim) adapted, not of unit length."""
        for number, one in enumerate(self.maps):
            if number:
                embeddings = embeddings / embeddings.norm(dim=1, keepdim=True).clamp(min=EPSILON)
            embeddings = one(embeddings)
        return embeddings
