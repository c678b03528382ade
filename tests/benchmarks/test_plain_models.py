"""The plain definitions equal our network and loss, so measurements against them compare the same
work.
"""

import torch

from benchmarks.plain_models import PlainAMSoftmax, PlainResNetSE34L
from speakernet.losses.classification import AMSoftmax
from speakernet.losses.options import AMSoftmaxOptions
from speakernet.models.importers import translate
from speakernet.models.speaker_net import SpeakerNet


def networks():
    """The plain network, and ours with its weights, imported like those of voxceleb_trainer."""
    torch.manual_seed(3)
    ours = SpeakerNet.named("ResNetSE34L", embedding_dim=512, front_end_options={"num_mels": 40})
    plain = PlainResNetSE34L(ours.front_end, 512)
    named = {f"__S__.{key}": value for key, value in plain.state_dict().items()}
    ours.load_state_dict(translate(named, ours, "plain").weights)
    return plain, ours


def test_same_parameters_outputs_and_gradients():
    plain, ours = networks()
    assert sum(p.numel() for p in plain.parameters()) == 1_437_078
    waveforms = 0.1 * torch.randn(3, 16240, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain.eval()(waveforms)
        torch.testing.assert_close(ours.eval()(waveforms), expected, rtol=1e-4, atol=1e-5)
    # In training mode a batch of three is normalised by its statistics, so rounding passes through
    # 36 norms.
    expected = plain.train()(waveforms)
    embeddings = ours.train()(waveforms)
    torch.testing.assert_close(embeddings, expected, rtol=0, atol=2e-3 * expected.std().item())
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    norms = []
    for net, output in ((plain, expected), (ours, embeddings)):
        (output * weights).sum().backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients))
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
