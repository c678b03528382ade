"""Every loss in the table: scalars, gradients to embeddings and parameters, state dictionary,
declared properties.
"""

import pytest
import torch

from speakernet.losses import LOSSES
from speakernet.options import create

DIM = 6
CLASSES = 9
SPEAKERS = 4
UTTERANCES = 2


def make(name):
    return create(
        LOSSES[name], LOSSES[name].options(), embedding_dim=DIM, num_classes=CLASSES, seed=0
    )


def embeddings_for(loss):
    generator = torch.Generator().manual_seed(0)
    shape = (SPEAKERS, UTTERANCES, DIM) if loss.options.is_metric else (SPEAKERS, DIM)
    return torch.randn(shape, generator=generator), torch.tensor([3, 0, 8, 5])


@pytest.mark.parametrize("name", LOSSES)
def test_scalars_and_gradients(name):
    loss = make(name)
    embeddings, labels = embeddings_for(loss)
    embeddings.requires_grad_()
    value, accuracy = loss(embeddings, labels)
    assert value.shape == accuracy.shape == ()
    assert torch.isfinite(value) and 0 <= accuracy <= 100
    assert not accuracy.requires_grad
    value.backward()
    assert embeddings.grad.abs().sum() > 0
    for parameter_name, parameter in loss.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
    assert LOSSES[name].options().name == name and loss.options.min_utterances == (
        2 if loss.is_metric else 1
    )
    twin = make(name)
    twin.load_state_dict(loss.state_dict())
    assert torch.equal(twin(embeddings, labels)[0], loss(embeddings, labels)[0])
