"""The plain definitions equal our networks and loss, so measurements against them compare the same
work.
"""

import pytest
import torch

from benchmarks.plain_models import PLAIN_MODELS, PlainAMSoftmax, plain_model
from speakernet.losses.classification import AMSoftmax
from speakernet.losses.options import AMSoftmaxOptions
from speakernet.models.importers import translate
from speakernet.models.speaker_net import SpeakerNet

MELS = {"ResNetSE34L": 40, "ResNetSE34V2": 64, "VGGVox": 40}
PARAMETERS = {"ResNetSE34L": 1_437_078, "ResNetSE34V2": 8_028_492, "VGGVox": 4_032_448}


def networks(name):
    """The plain network, and ours with its weights, imported like those of voxceleb_trainer."""
    torch.manual_seed(3)
    ours = SpeakerNet.named(name, embedding_dim=512, front_end_options={"num_mels": MELS[name]})
    plain = plain_model(name, ours.front_end, 512, MELS[name])
    named = {f"__S__.{key}": value for key, value in plain.state_dict().items()}
    ours.load_state_dict(translate(named, ours, "plain").weights)
    return plain, ours


@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_same_parameters_outputs_and_gradients(name):
    plain, ours = networks(name)
    assert sum(p.numel() for p in plain.parameters()) == PARAMETERS[name]
    waveforms = 0.1 * torch.randn(3, 16240, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(waveforms), plain.eval()(waveforms), rtol=1e-4, atol=1e-5
        )
    # In training mode a batch of three is normalised by its statistics, so rounding passes through
    # 36 norms.
    one = plain.train()(waveforms)
    other = ours.train()(waveforms)
    torch.testing.assert_close(other, one, rtol=0, atol=2e-3 * one.std().item())
    weights = torch.randn(one.shape, generator=torch.Generator().manual_seed(2))
    norms = []
    for net, embeddings in ((plain, one), (ours, other)):
        (embeddings * weights).sum().backward()
        norms.append(
            torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        )
    torch.testing.assert_close(norms[1], norms[0], rtol=5e-3, atol=0)


def test_same_loss():
    options = AMSoftmaxOptions(margin=0.2, scale=30.0)
    plain = PlainAMSoftmax(8, 5, margin=0.2, scale=30.0)
    ours = AMSoftmax(options, 8, 5)
    ours.weight.data.copy_(plain.W.data.T)
    random = torch.Generator().manual_seed(1)
    embeddings = torch.randn(6, 8, generator=random)
    labels = torch.randint(5, (6,), generator=random)
    torch.testing.assert_close(ours(embeddings, labels)[0], plain(embeddings, labels))
