"""Heads that two processes can share; `tests/parallel/test_same_meaning.py` trains with them."""

from speakernet.losses import LOSSES
from speakernet.losses.options import (
    AAMSoftmaxOptions,
    CombinedOptions,
    HAMSoftmaxOptions,
    SphereFace2Options,
    TripletOptions,
)

HEADS = [
    *(
        LOSSES[name].options()
        for name in ("softmax", "amsoftmax", "aamsoftmax", "sphereface2", "softmaxproto")
    ),
    AAMSoftmaxOptions(easy_margin=True, margin=0.4),
    AAMSoftmaxOptions(sub_centers=3),
    AAMSoftmaxOptions(inter_top_k=3, inter_top_k_penalty=0.1),
    AAMSoftmaxOptions(inter_top_k=50, sub_centers=2),
    SphereFace2Options(margin_type="A", margin=0.15),
    # At its usual scale the gradient's norm is large, and steps would amplify rounding errors.
    HAMSoftmaxOptions(scale=2.0),
    CombinedOptions(classification=AAMSoftmaxOptions(sub_centers=2), metric=TripletOptions()),
]
