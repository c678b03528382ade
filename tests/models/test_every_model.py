"""Every model with every pooling it takes: shapes, gradients, lengths, its description, exact parameter counts."""

import pytest
import torch
from torch import nn

from speakernet.frontend.masking import SpecAugment
from speakernet.frontend.options import SpecAugmentOptions
from speakernet.models.options import MODELS, POOLINGS
from speakernet.models.speaker_net import SpeakerNet

SMALL = {"ResNet": {"channels": 8, "blocks": [1, 1, 1]}}
MELS = {"VGGVox": 40}
# Long enough for three strides; unlike each other in every stride's remainder.
LENGTHS = (18000, 13473, 10122)


def make(name, pooling="auto", **others):
    torch.manual_seed(0)
    options = {} if MODELS[name].options.front_end_defaults["name"] == "raw" else {"num_mels": MELS.get(name, 40)}
    net = SpeakerNet.named(
        name, pooling, embedding_dim=32, model_options=SMALL.get(name), front_end_options=options, **others
    )
    randomize_norms(net)
    return net


def randomize_norms(net):
    """Batch norms as training leaves them, so that a forgotten mask or a wrong order shows."""
    generator = torch.Generator().manual_seed(1)
    for part in net.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.copy_(0.2 * torch.randn(part.num_features, generator=generator))
            part.running_var.copy_(0.5 + torch.rand(part.num_features, generator=generator))
            part.bias.data.copy_(0.2 * torch.randn(part.num_features, generator=generator))


def waves(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(2)
    batch = 0.1 * torch.randn(len(lengths), max(lengths), generator=generator)
    for row, length in enumerate(lengths):
        batch[row, length:] = 0
    return batch


def embed(net, batch, lengths=None):
    """Full waveforms unless `lengths` says otherwise."""
    lengths = torch.full((len(batch),), batch.shape[1]) if lengths is None else lengths
    return net.embed(batch, lengths, sample_rate=net.sample_rate)


EVERY = [(name, pooling) for name in MODELS for pooling in MODELS[name].options.tested_poolings]


@pytest.mark.parametrize(("name", "pooling"), EVERY)
def test_gradient_reaches_every_parameter(name, pooling):
    net = make(name, pooling).train()
    embeddings = net(waves((16000, 16000, 16000)))
    assert embeddings.shape == (3, 32) and embeddings.dtype == torch.float32
    (embeddings * torch.randn(3, 32, generator=torch.Generator().manual_seed(0))).sum().backward()
    trained = [(key, parameter) for key, parameter in net.named_parameters() if parameter.requires_grad]
    for key, parameter in trained:
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key
        # All of a narrow gate's few ReLUs may happen to be off.
        assert parameter.grad.abs().sum() > 0 or ".gate." in key, key


@pytest.mark.parametrize(("name", "pooling"), EVERY)
def test_a_batch_of_lengths_embeds_as_one_by_one(name, pooling):
    net = make(name, pooling)
    batch = waves()
    together = embed(net, batch, torch.tensor(LENGTHS))
    for row, length in enumerate(LENGTHS):
        alone = embed(net, batch[row : row + 1, :length])[0]
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_spec_makes_the_same_network_again(name):
    net = make(name)
    twin = SpeakerNet.from_spec(net.spec())
    twin.load_state_dict(net.state_dict())
    assert twin.spec() == net.spec()
    assert torch.equal(embed(twin, waves()), embed(net, waves()))


@pytest.mark.parametrize("name", MODELS)
def test_embed_is_evaluation_and_puts_the_mode_back(name):
    net = make(name).train()
    first, second = embed(net, waves()), embed(net, waves())
    assert torch.equal(first, second)
    assert net.training and not first.requires_grad


@pytest.mark.parametrize("name", MODELS)
def test_autocast_stays_close_and_gives_float32(name):
    net = make(name)
    plain = embed(net, waves())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = embed(net, waves())
    assert mixed.dtype == torch.float32
    cosine = nn.functional.cosine_similarity(plain - plain.mean(0), mixed - mixed.mean(0))
    assert cosine.min() > 0.98


@pytest.mark.parametrize(
    ("name", "pooling", "num_mels", "dim", "count"),
    [
        ("ResNetSE34L", "SAP", 40, 512, 1_437_078),
        ("ResNetSE34V2", "ASP", 64, 512, 8_028_492),
        ("VGGVox", "SAP", 40, 512, 4_032_448),
        ("RawNet3", "ECA", None, 256, 16_280_322),
    ],
)
def test_exact_parameter_counts(name, pooling, num_mels, dim, count):
    options = {"num_mels": num_mels} if num_mels else {}
    net = SpeakerNet.named(name, pooling, embedding_dim=dim, front_end_options=options)
    assert sum(parameter.numel() for parameter in net.parameters()) == count


def test_spec_augment_works_in_training_only_and_is_no_part_of_the_model():
    net = make("ResNetSE34L").train()
    net.spec_augment = SpecAugment(SpecAugmentOptions(frame_masks=2, frame_mask_width=40), seed=1)
    for part in net.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()
    batch = waves((16000, 16000))
    assert not torch.equal(net(batch), net(batch))
    assert torch.equal(embed(net, batch), embed(make("ResNetSE34L"), batch))
    assert not [name for name in net.weights() if name.startswith("spec_augment")]


def test_every_pooling_of_the_table_works_on_a_residual_network():
    for pooling in POOLINGS:
        assert embed(make("ResNet", pooling), waves()).shape == (3, 32)


@pytest.mark.parametrize(
    ("make_net", "message"),
    [
        (lambda: SpeakerNet.named("ResNetSE34"), "unknown model 'ResNetSE34'; did you mean 'ResNetSE34L'"),
        (lambda: SpeakerNet.named(pooling="SPA"), "unknown pooling 'SPA'"),
        (lambda: SpeakerNet.named("ResNet", model_options={"width": 3}), "model 'ResNet' has no option 'width'"),
        (
            lambda: SpeakerNet.named("ResNet", model_options={"channels": 2}),
            "channels is 2; expected int from 8 to 4096",
        ),
        (lambda: SpeakerNet.named(front_end="raw"), "ResNetSE34L needs the front end log_mel or fbank, found raw"),
        (lambda: SpeakerNet.named("RawNet3", front_end="log_mel"), "RawNet3 needs the front end raw"),
        (lambda: embed(make("VGGVox"), waves((9000,))), "VGGVox needs 63 frames or more, found an utterance of 57"),
        (lambda: SpeakerNet.named("VGGVox", front_end_options={"num_mels": 64}), "VGGVox .* 40 mel bands, found 64"),
    ],
)
def test_parts_that_do_not_fit_are_named(make_net, message):
    with pytest.raises(ValueError, match=message):
        make_net()


def test_the_shortest_utterance_of_a_model_is_known_to_the_sample():
    net = make("VGGVox")
    assert net.min_samples == 62 * 160
    assert embed(net, waves((net.min_samples,))).shape == (1, 32)
    with pytest.raises(ValueError, match="VGGVox needs 63 frames or more, found an utterance of 62"):
        embed(net, waves((net.min_samples - 1,)))
    assert make("ResNetSE34L").min_samples <= 400


@pytest.mark.parametrize(
    ("waveforms", "lengths", "rate", "message"),
    [
        (torch.zeros(1, 16000), None, 48000, "waveforms at 48000 Hz, but this network was trained at 16000 Hz"),
        (torch.zeros(2, 16000), None, 16000, r"2 rows.*no lengths.*mean\(0, keepdim=True\).*lengths"),
        (torch.zeros(16000), None, 16000, r"shape \(16000,\); expected \(batch, samples\)"),
        (torch.zeros(1, 2, 16000), None, 16000, r"shape \(1, 2, 16000\); expected \(batch, samples\)"),
        (torch.zeros(1, 16000, dtype=torch.int16), None, 16000, "torch.int16; expected floating point in -1..1"),
        (torch.zeros(2, 16000), torch.tensor([16000]), 16000, r"lengths of shape \(1,\); expected \(2,\)"),
        (torch.zeros(1, 16000), torch.tensor([16001]), 16000, "lengths from 16001 to 16001; expected 1 to 16000"),
    ],
)
def test_waveforms_of_another_kind_never_become_embeddings(waveforms, lengths, rate, message):
    with pytest.raises(ValueError, match=message):
        make("ResNet").embed(waveforms, lengths, sample_rate=rate)


def test_equal_lengths_are_no_padding():
    net = make("ResNet")
    batch = waves((16000, 16000))
    with torch.inference_mode():
        assert torch.equal(embed(net, batch), net.eval()(batch))
