"""Every family with every pooling it takes: shapes, gradients, lengths, its description, exact parameter counts.

A family is tested in its smallest size, made smaller where an option allows it; the others differ in numbers only.
"""

import copy

import pytest
import torch
from torch import nn

from speakernet.frontend.options import SpecAugmentOptions
from speakernet.frontend.perturbation import SpecAugment, keep_draws_eager
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.options import MODELS, POOLINGS
from speakernet.models.speaker_net import SpeakerNet
from speakernet.training.compiling import enable_gradient_checkpointing
from tests.small_networks import SMALLEST, small_network

# Further options that change how a network works, beside its size.
REDIM_STAGES = [[1, 1, 1, 2, 3, 3, 36], [2, 2, 1, 1, 3, 3, 0], [2, 2, 1, 0.5, 3, 3, 18]]
FORMS = {
    "ResNet": [{"channels": 8, "blocks": [1, 2, 1], "mel_strides": [2, 2, 2], "frame_strides": [1, 2, 1]}],
    "ECAPA_TDNN": [{"channels": 64, "aggregate_channels": 96, "speechbrain": True}],
    "ReDimNetB0": [
        {"block": "basic_resnet_fwse", "aggregate_channels": 24, "two_layers": True},
        {"block": "convnext_like", "group_channels": 2, "context": "att"},
        {"block": "convnext_like_relu", "context": "conv", "embedding_norm": True, "pooled_norm": False},
    ],
    "ReDimNet2B0": [
        {"stages": REDIM_STAGES, "joins_both": True, "map_norm": True, "keeps_mels": True, "aggregate_channels": 8},
        {"stages": REDIM_STAGES, "block": "convnext_like", "aggregate_channels": 0, "grouped_strides": False},
    ],
}
# Long enough for three strides; unlike each other in every stride's remainder.
LENGTHS = (18000, 13473, 10122)
NO_BLOCKS = {"XVector"}
# float16 is emulated on a CPU.
SIXTEEN_BITS = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


def make(name, pooling="auto", model_options=None):
    net = small_network(name, pooling, model_options=model_options)
    randomize_norms(net)
    return net


def randomize_norms(net):
    """Batch norms as training leaves them, so that a forgotten mask or a wrong order shows."""
    generator = torch.Generator().manual_seed(1)
    for part in net.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.copy_(0.2 * torch.randn(part.num_features, generator=generator))
            part.running_var.copy_(0.5 + torch.rand(part.num_features, generator=generator))
            if part.affine:
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


EVERY = [(name, pooling) for name in SMALLEST for pooling in MODELS[name].options.tested_poolings]


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
    assert_one_by_one(make(name, pooling))


@pytest.mark.parametrize(("name", "options"), [(name, options) for name in FORMS for options in FORMS[name]])
def test_a_batch_of_lengths_embeds_as_one_by_one_in_every_form(name, options):
    assert_one_by_one(make(name, model_options=options))


def assert_one_by_one(net):
    batch = waves()
    together = embed(net, batch, torch.tensor(LENGTHS))
    for row, length in enumerate(LENGTHS):
        alone = embed(net, batch[row : row + 1, :length])[0]
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SMALLEST)
def test_spec_makes_the_same_network_again(name):
    net = make(name)
    twin = SpeakerNet.from_spec(net.spec())
    twin.load_state_dict(net.state_dict())
    assert twin.spec() == net.spec()
    assert torch.equal(embed(twin, waves()), embed(net, waves()))


@pytest.mark.parametrize("name", SMALLEST)
def test_embed_is_evaluation_and_puts_the_mode_back(name):
    net = make(name).train()
    first, second = embed(net, waves()), embed(net, waves())
    assert torch.equal(first, second)
    assert net.training and not first.requires_grad


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", SMALLEST)
def test_autocast_stays_close_and_gives_float32(name, dtype):
    net = make(name)
    plain = embed(net, waves())
    with torch.autocast("cpu", dtype=dtype):
        mixed = embed(net, waves())
    assert mixed.dtype == torch.float32
    cosine = nn.functional.cosine_similarity(plain - plain.mean(0), mixed - mixed.mean(0))
    assert cosine.min() > 0.98


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_step_in_16_bits_has_finite_gradients(name, dtype):
    net = make(name).train()
    with torch.autocast("cpu", dtype=dtype):
        embeddings = net(waves((12000, 12000)))
    embeddings.square().sum().backward()
    assert all(torch.isfinite(value.grad).all() for value in net.parameters() if value.grad is not None)


@pytest.mark.parametrize("name", SMALLEST)
def test_the_memory_layout_of_convolutions_changes_no_gradient(name):
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        # In evaluation, where two utterances are no batch whose statistics blow up what rounding leaves.
        net = make(name).eval()
        planes = [part.weight for part in net.trunk.modules() if isinstance(part, nn.Conv2d)]
        if not is_safe_in_channels_last(net.trunk):
            # No 2-D convolutions, or too narrow ones: left as they were made.
            assert all(weight.is_contiguous() for weight in planes)
            return
        net.to(memory_format=layout)
        embeddings = net(waves((12000, 12000)))
        embeddings.square().sum().backward()
        found.append([embeddings, *(value.grad for value in net.parameters() if value.grad is not None)])
    assert_near(found, 1e-3)


def assert_near(found, allowed):
    """Two lists of tensors, each near its fellow, or nought beside the largest."""
    largest = max(one.norm() for one in found[0])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= allowed * (one.norm() + 0.01 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_training_step_is_traced_whole(name):
    net = make(name).train()
    features = net.front_end(waves((16000, 16000)))
    settle_norms(net, features)
    eager = outputs_and_gradients(net, features)
    traced = outputs_and_gradients(net, features, backend="aot_eager")
    # The norms add up in another order, which statistics of two utterances blow up: by 0.001 in ReDimNet2.
    assert distance(traced[:1], eager[:1]) < 5e-3
    assert distance(traced, eager) < 0.15


# Compiling takes one to five minutes a network. These four (gates, plain residual blocks, none, frames without a mel
# axis) are slow tests; the others are `make compiled`. All are traced above.
SOON_COMPILED = ("ResNetSE34L", "ResNet", "VGGVox", "XVector")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SOON_COMPILED else pytest.mark.compiled)
        for name in SMALLEST
    ],
)
def test_the_smallest_size_compiled_has_the_outputs_and_gradients_of_the_eager_one(name):
    owner = MODELS[name].options
    mels = {"num_mels": owner.published_mels} if owner.published_mels else {}
    torch.manual_seed(0)
    net = SpeakerNet.named(name, embedding_dim=32, front_end_options=mels).train()
    randomize_norms(net)
    features = net.front_end(waves((16000, 16000, 16000, 16000)))
    settle_norms(net, features)
    eager = outputs_and_gradients(net, features)
    compiled = outputs_and_gradients(net, features, backend="inductor")
    # Statistics of so small a batch and every ReLU blow up what rounding leaves: gradients of torch's own compiled code
    # are up to 0.08 away (ResNetSE34V2, whose pooling takes a variance as a difference) and 0.25 in RawNet3, embeddings
    # 0.02, as far as features that differ by a millionth take them. A wrong kernel is far off.
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(3))
    nudged = outputs_and_gradients(net, features * (1 + 1e-6 * noise))
    assert distance(compiled[:1], eager[:1]) < max(5e-3, 3 * distance(nudged[:1], eager[:1]))
    pairs = zip(distances(compiled, eager), distances(nudged, eager), strict=True)
    assert all(one < max(0.15, 3 * other) for one, other in pairs)


def settle_norms(net, features):
    """Running means near those of the batch, as some steps of training leave them: compiled norms count on it."""
    norms = [part for part in net.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        net.from_features(features)
    for norm in norms:
        norm.momentum = 0.1


def outputs_and_gradients(net, features, backend=None):
    """What a training step runs, the whole of it from features to embedding."""
    twin = copy.deepcopy(net)
    part = FromFeatures(twin)
    if backend is not None:
        torch._dynamo.reset()
        keep_draws_eager(twin)
        part.compile(backend=backend, fullgraph=backend == "aot_eager")
    embeddings = part(features)
    (embeddings * torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    return [embeddings.detach(), *(value.grad for value in twin.parameters() if value.grad is not None)]


def distance(found, expected):
    """The largest relative distance of a tensor from its fellow; small ones count beside the largest."""
    return max(distances(found, expected))


def distances(found, expected):
    largest = max(one.norm() for one in expected)
    pairs = zip(found, expected, strict=True)
    return [float((one - other).norm() / (other.norm() + 0.01 * largest)) for one, other in pairs]


class FromFeatures(nn.Module):
    """A network without its front end."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, features):
        return self.net.from_features(features)


@pytest.mark.parametrize("name", SMALLEST)
def test_gradient_checkpointing_changes_no_gradient(name):
    gradients = []
    for is_checkpointed in (False, True):
        net = make(name).train()
        try:
            if is_checkpointed:
                enable_gradient_checkpointing(net)
        except ValueError as error:
            assert "has no blocks that repeat" in str(error) and name in NO_BLOCKS
            return
        net(waves((12000, 12000))).square().sum().backward()
        gradients.append({key: value.grad for key, value in net.named_parameters() if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, msg=key)


@pytest.mark.parametrize(
    ("name", "pooling", "num_mels", "dim", "count"),
    [
        ("ResNetSE34L", "SAP", 40, 512, 1_437_078),
        ("ResNetSE34V2", "ASP", 64, 512, 8_028_492),
        ("VGGVox", "SAP", 40, 512, 4_032_448),
        ("RawNet3", "ECA", None, 256, 16_280_322),
        ("XVector", "TSTP", 80, 512, 4_610_524),
        ("ECAPA_TDNN", "GlobalASTP", 80, 192, 6_190_720),
        ("ECAPA_TDNN_1024", "GlobalASTP", 80, 192, 14_657_088),
        ("ResNet18", "TSTP", 80, 256, 4_105_440),
        ("ResNet34", "TSTP", 80, 256, 6_634_336),
        ("ResNet50", "TSTP", 80, 256, 11_131_360),
        ("ResNet101", "TSTP", 80, 256, 15_892_448),
        ("ResNet152", "TSTP", 80, 256, 19_814_880),
        ("ResNet221", "TSTP", 80, 256, 23_792_224),
        ("ResNet293", "TSTP", 80, 256, 28_626_016),
        ("SimAM_ResNet34", "ASP", 80, 256, 25_213_760),
        ("SimAM_ResNet100", "ASP", 80, 256, 50_232_896),
        ("Gemini_DF_ResNet60", "TSTP", 80, 256, 4_047_840),
        ("Gemini_DF_ResNet114", "TSTP", 80, 256, 6_531_552),
        ("Res2Net34", "TSTP", 80, 256, 4_689_024),
        ("CAMPPlus", "TSTP", 80, 512, 7_176_224),
        ("ERes2NetBase", "TSTP", 80, 192, 6_610_688),
        ("ERes2NetLarge", "TSTP", 80, 192, 22_462_784),
        ("ERes2NetV2", "TSTP", 80, 192, 17_859_632),
        # 1.25 and 4.89 million in wespeaker's form, which sees the context and has no norm behind the pooling.
        ("ReDimNetB0", "ASTP", 72, 192, 1_068_271),
        ("ReDimNetB1", "ASTP", 72, 192, 1_905_753),
        ("ReDimNetB2", "ASTP", 72, 192, 4_597_937),
        ("ReDimNetB3", "ASTP", 72, 192, 2_930_109),
        ("ReDimNetB4", "ASTP", 72, 192, 5_851_697),
        ("ReDimNetB5", "ASTP", 72, 192, 7_069_937),
        ("ReDimNetB6", "ASTP", 72, 192, 14_425_649),
        ("ReDimNet2B0", "GlobalASTP", 72, 192, 703_060),
        ("ReDimNet2B1", "GlobalASTP", 72, 192, 1_254_992),
        ("ReDimNet2B2", "GlobalASTP", 72, 192, 2_530_208),
        ("ReDimNet2B3", "GlobalASTP", 72, 192, 2_364_712),
        ("ReDimNet2B4", "GlobalASTP", 72, 192, 6_659_744),
        ("ReDimNet2B5", "GlobalASTP", 72, 192, 7_900_456),
        ("ReDimNet2B6", "GlobalASTP", 72, 192, 12_394_784),
    ],
)
def test_exact_parameter_counts(name, pooling, num_mels, dim, count):
    options = {"num_mels": num_mels} if num_mels else {}
    # The counts of the published definitions, whose goldens in test_published_models.py are of fewer dimensions.
    # Without memory for the weights, where the front end can be made so.
    with torch.device("meta" if MODELS[name].options.front_end_defaults["name"] == "fbank" else "cpu"):
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
        (lambda: SpeakerNet.named("ResNet", "SPA"), "unknown pooling 'SPA'"),
        (lambda: SpeakerNet.named("ResNet", model_options={"width": 3}), "model 'ResNet' has no option 'width'"),
        (
            lambda: SpeakerNet.named("ResNet", model_options={"channels": 2}),
            "channels is 2; expected int from 8 to 4096",
        ),
        (
            lambda: SpeakerNet.named("ResNetSE34L", front_end="raw"),
            "ResNetSE34L needs the front end log_mel or fbank, found raw",
        ),
        (lambda: SpeakerNet.named("RawNet3", front_end="log_mel"), "RawNet3 needs the front end raw"),
        (lambda: embed(make("VGGVox"), waves((9000,))), "VGGVox needs 63 frames or more, found an utterance of 57"),
        (lambda: SpeakerNet.named("VGGVox", front_end_options={"num_mels": 64}), "VGGVox .* 40 mel bands, found 64"),
        (lambda: embed(make("RawNet3"), waves((390,))), "RawNet3 needs 391 samples or more, found an utterance of 390"),
        (lambda: embed(make("XVector"), waves((2000,))), "XVector needs 15 frames or more, found an utterance of 11"),
        (
            lambda: embed(make("ReDimNet2B0"), waves((479,))),
            "ReDimNet2 needs 4 frames or more, found an utterance of 3",
        ),
        (
            lambda: embed(make("ECAPA_TDNN", model_options=FORMS["ECAPA_TDNN"][0]), waves((900,))),
            "ECAPA-TDNN with mirrored edges needs 5 frames or more, found an utterance of 4",
        ),
        (
            lambda: SpeakerNet.named("ReDimNetB1", front_end_options={"num_mels": 80}),
            "stride of 3 does not divide 40 mel bands",
        ),
        (
            lambda: SpeakerNet.named("ReDimNetB0", model_options={"block": "resnet"}),
            "block is 'resnet'; expected basic_resnet or",
        ),
        (
            lambda: SpeakerNet.named("ReDimNetB0", model_options={"context": "gru"}),
            "context is 'gru'; expected att or conv or",
        ),
        (
            lambda: SpeakerNet.named("ReDimNet2B0", front_end_options={"num_mels": 40}),
            "4 heads among its channels, found 13",
        ),
        (lambda: SpeakerNet.named("XVector", "MQMHASTP"), "MQMHASTP shares 8 heads among channels, found 1500"),
    ],
)
def test_parts_that_do_not_fit_are_named(make_net, message):
    with pytest.raises(ValueError, match=message):
        make_net()


@pytest.mark.parametrize("name", SMALLEST)
def test_the_shortest_utterance_of_a_model_is_known_to_the_sample(name):
    net = make(name)
    shortest = net.min_samples
    assert torch.isfinite(embed(net, waves((shortest,)))).all()
    with pytest.raises(ValueError, match=r"needs \d+"):
        embed(net, waves((shortest - 1,)))
    # Beside a longer one it is what it is alone.
    batch = waves((shortest, 12000))
    together = embed(net, batch, torch.tensor([shortest, 12000]))
    torch.testing.assert_close(together[:1], embed(net, batch[:1, :shortest]), atol=1e-5, rtol=1e-4)


def test_the_shortest_utterance_in_numbers():
    found = {name: make(name).min_samples for name in ("ResNetSE34L", "VGGVox", "RawNet3", "XVector", "ReDimNet2B0")}
    assert found == {"ResNetSE34L": 257, "VGGVox": 9920, "RawNet3": 391, "XVector": 2640, "ReDimNet2B0": 480}


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
