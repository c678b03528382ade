"""Every family in its smallest size with every pooling: shapes, gradients, lengths, description."""

import copy

import pytest
import torch
import yaml
from torch import nn
from torch.testing import assert_close

from speakernet.frontend.perturbation import keep_draws_eager
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet, fold_batch_norms
from speakernet.training.compiling import enable_gradient_checkpointing
from tests.small_networks import SMALLEST, small_network

# Options that change how a network works, not only its size.
FORMS = yaml.safe_load("""
ResNet:
  - {channels: 8, blocks: [1, 2, 1], mel_strides: [2, 2, 2], frame_strides: [1, 2, 1]}
ECAPA_TDNN:
  - {channels: 64, aggregate_channels: 96, speechbrain: true}
ReDimNetB0:
  - {block: basic_resnet_fwse, aggregate_channels: 24, two_layers: true}
  - {block: convnext_like, group_channels: 2, context: att}
  - {block: convnext_like_relu, context: conv, embedding_norm: true, pooled_norm: false}
ReDimNet2B0:
  - stages: &stages [[1, 1, 1, 2, 3, 3, 36], [2, 2, 1, 1, 3, 3, 0], [2, 2, 1, 0.5, 3, 3, 18]]
    joins_both: true
    map_norm: true
    keeps_mels: true
    aggregate_channels: 8
  - {stages: *stages, block: convnext_like, aggregate_channels: 0, grouped_strides: false}
""")
# Long enough for three strides, with different remainders for every stride.
LENGTHS = (12600, 11373, 10122)
# A CPU without bf16 takes seconds for each of these.
LARGER = ("CAMPPlus", "Gemini_DF_ResNet60", "RawNet3", "ReDimNetB0", "ReDimNet2B0", "ResNetSE34V2")
EACH = [pytest.param(name, marks=[pytest.mark.slow] if name in LARGER else []) for name in SMALLEST]
SIXTEEN_BITS = [
    pytest.param(name, torch.bfloat16, marks=param.marks) for param in EACH for name in param.values
] + [
    # float16 is emulated on a CPU; these have special code for it.
    pytest.param(name, torch.float16, marks=pytest.mark.slow)
    for name in ("ResNetSE34L", "SimAM_ResNet34", "CAMPPlus", "ECAPA_TDNN")
]


def make(name, pooling="auto", model_options=None):
    net = small_network(name, pooling, model_options=model_options)
    randomize_norms(net)
    return net


def randomize_norms(net):
    """Trained-looking batch norms, so that a missing mask or a wrong order is noticed."""
    generator = torch.Generator().manual_seed(1)
    for part in norms_of(net):
        part.running_mean.normal_(0, 0.2, generator=generator)
        part.running_var.uniform_(0.5, 1.5, generator=generator)
        if part.affine:
            part.bias.data.normal_(0, 0.2, generator=generator)


def norms_of(net):
    return [part for part in net.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def convolutions_of(net):
    return [part for part in net.trunk.modules() if isinstance(part, nn.Conv2d)]


def waves(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(2)
    batch = 0.1 * torch.randn(len(lengths), max(lengths), generator=generator)
    return batch * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def embed(net, batch, lengths=None):
    """Full waveforms unless `lengths` is given."""
    lengths = torch.full((len(batch),), batch.shape[1]) if lengths is None else lengths
    return net.embed(batch, lengths, sample_rate=net.sample_rate)


EVERY = [(name, pooling) for name in SMALLEST for pooling in MODELS[name].options.poolings]


@pytest.mark.parametrize(("name", "pooling"), EVERY)
def test_gradients(name, pooling):
    net = make(name, pooling).train()
    embeddings = net(waves((16000, 16000, 16000)))
    assert embeddings.shape == (3, 32) and embeddings.dtype == torch.float32
    (embeddings * torch.randn(3, 32, generator=torch.Generator().manual_seed(0))).sum().backward()
    trained = [
        (key, parameter) for key, parameter in net.named_parameters() if parameter.requires_grad
    ]
    for key, parameter in trained:
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key
        # All of a narrow gate's few ReLUs may be off by chance.
        assert parameter.grad.abs().sum() > 0 or ".gate." in key, key


@pytest.mark.parametrize(
    ("name", "pooling", "options"),
    [(*pair, None) for pair in EVERY]
    + [(name, "auto", options) for name in FORMS for options in FORMS[name]],
)
def test_lengths(name, pooling, options):
    net = make(name, pooling, options)
    batch = waves()
    together = embed(net, batch, torch.tensor(LENGTHS))
    for row, length in enumerate(LENGTHS):
        alone = embed(net, batch[row : row + 1, :length])[0]
        assert_close(together[row], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SMALLEST)
def test_spec(name):
    net = make(name).train()
    batch = waves((10200,))
    first = embed(net, batch)
    twin = SpeakerNet.from_spec(net.spec())
    twin.load_state_dict(net.state_dict())
    assert twin.spec() == net.spec() and torch.equal(embed(twin, batch), first)
    assert net.training and not first.requires_grad


# Families whose norms all follow an activation.
NOTHING_TO_MERGE = {"Pretrained", "RawNet3", "XVector", "ECAPA_TDNN"}


@pytest.mark.parametrize("name", SMALLEST)
def test_folding(name):
    """Batch norms merged into the layers before them give the same numbers."""
    net = make(name).eval()
    for part in norms_of(net):
        if part.affine:
            # Some channels negated, one ignored.
            part.weight.data.uniform_(-1.5, 1.5)[0] = 0
    folded = copy.deepcopy(net)
    count = fold_batch_norms(folded)
    strides = [
        [part.weight.stride() for part in convolutions_of(network)] for network in (net, folded)
    ]
    assert strides[0] == strides[1]
    assert count == len(norms_of(net)) - len(norms_of(folded))
    assert (count == 0) == (name in NOTHING_TO_MERGE)
    batch = waves()
    lengths = torch.tensor(LENGTHS)
    ours = embed(net, batch, lengths)
    assert (embed(folded, batch, lengths) - ours).norm() <= 1e-5 * ours.norm()


@pytest.mark.parametrize(("name", "dtype"), SIXTEEN_BITS, ids=str)
def test_16_bits(name, dtype):
    net = make(name)
    batch = waves()
    plain = embed(net, batch)
    with torch.autocast("cpu", dtype=dtype):
        mixed = embed(net, batch)
        trained = net.train()(waves((10200, 10200)))
    assert mixed.dtype == torch.float32
    assert (
        nn.functional.cosine_similarity(plain - plain.mean(0), mixed - mixed.mean(0)).min() > 0.98
    )
    trained.square().sum().backward()
    assert all(
        torch.isfinite(value.grad).all() for value in net.parameters() if value.grad is not None
    )


@pytest.mark.parametrize("name", EACH)
def test_memory_layout(name, monkeypatch):
    # In evaluation mode, because batch statistics of two utterances amplify rounding errors.
    net = make(name).eval()
    if not is_safe_in_channels_last(net.trunk):
        # Without 2-D convolutions, or with too narrow ones, the layout does not change.
        assert all(part.weight.is_contiguous() for part in convolutions_of(net))
        return
    features = net.front_end(waves((10200, 10200)))
    contiguous = outputs_and_gradients(net.to(memory_format=torch.contiguous_format), features)
    channels_last = outputs_and_gradients(net.to(memory_format=torch.channels_last), features)
    exact = exact_outputs_and_gradients(net, features, monkeypatch)
    # In either layout, ReLUs near zero flip with the rounding of some processors' kernels.
    assert distance(channels_last, exact) < max(1e-3, 3 * distance(contiguous, exact))


# One network per backend in the default tests; the others take a minute or more each.
SOON = [("ResNet", "inductor"), ("XVector", "aot_eager")]
LATER = [pytest.param(name, "inductor", marks=pytest.mark.compiled) for name in SMALLEST]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "backend"), [pytest.param(*pair, marks=pytest.mark.slow) for pair in SOON] + LATER
)
def test_compiled(name, backend, monkeypatch):
    net = make(name).train()
    features = net.front_end(waves((16000,) * 4))
    eager = outputs_and_gradients(net, features)
    compiled = outputs_and_gradients(net, features, backend)
    # Statistics of a small batch and ReLUs amplify rounding errors, in eager code too: ERes2NetV2's
    # eager gradients differ by 0.23 from float64, its compiled ones by 0.04. A wrong kernel differs
    # by more.
    exact = exact_outputs_and_gradients(net, features, monkeypatch)
    found = distances(compiled, exact)
    rounding = distances(eager, exact)
    assert found[0] < max(5e-3, 3 * rounding[0])
    assert max(found) < max(0.15, 3 * max(rounding))


def outputs_and_gradients(net, features, backend=None):
    """The forward and backward pass of a training step, from features to embedding."""
    twin = copy.deepcopy(net)
    run = twin.from_features
    if backend is not None:
        torch._dynamo.reset()
        keep_draws_eager(twin)
        run = torch.compile(run, backend=backend, fullgraph=backend == "aot_eager")
    embeddings = run(features)
    (
        embeddings * torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))
    ).sum().backward()
    return [
        embeddings.detach(),
        *(value.grad for value in twin.parameters() if value.grad is not None),
    ]


def exact_outputs_and_gradients(net, features, monkeypatch):
    """The same in float64."""
    with monkeypatch.context() as patch:
        # The casts that protect 16-bit runs would round to float32.
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor)
        return outputs_and_gradients(net.double(), features.double())


def distance(found, expected):
    """The largest relative distance between corresponding tensors; small ones are relative to the
    largest tensor.
    """
    return max(distances(found, expected))


def distances(found, expected):
    largest = max(value.norm() for value in expected)
    pairs = zip(found, expected, strict=True)
    return [
        float((value - other).norm() / (other.norm() + 0.01 * largest)) for value, other in pairs
    ]


@pytest.mark.parametrize("name", [name for name in SMALLEST if name != "XVector"])
def test_gradient_checkpointing(name):
    gradients = []
    for is_checkpointed in (False, True):
        net = make(name).train()
        if is_checkpointed:
            enable_gradient_checkpointing(net)
        net(waves((10200, 10200))).square().sum().backward()
        gradients.append(
            {key: value.grad for key, value in net.named_parameters() if value.grad is not None}
        )
    assert_close(*gradients)


def named(name, pooling="auto", mels=None, **options):
    front_end = {} if mels is None else {"num_mels": mels}
    return lambda: SpeakerNet.named(
        name, pooling, model_options=options, front_end_options=front_end
    )


def given(waveforms, lengths=None, rate=16000):
    return lambda: make("ResNet").embed(waveforms, lengths, sample_rate=rate)


@pytest.mark.parametrize(
    ("make_net", "words"),
    [
        (named("ResNetSE34"), "'ResNetSE34'; did you mean 'ResNetSE34L'"),
        (named("ResNet", frame_strides=[1, 2]), r"frame_strides is \[1, 2\]"),
        (lambda: SpeakerNet.named("RawNet3", front_end="log_mel"), "raw"),
        (lambda: enable_gradient_checkpointing(make("XVector")), "blocks"),
        (lambda: embed(make("VGGVox"), waves((9000,))), "63 .* 57"),
        (named("VGGVox", mels=64), "40 .* 64"),
        (named("ReDimNetB1", mels=80), "stride of 3 .* 40"),
        (named("ReDimNet2B0", mels=40), "4 heads .* 13"),
        (named("XVector", "MQMHASTP"), "8 heads .* 1500"),
        (given(torch.zeros(1, 16000), rate=48000), "48000 Hz.*16000 Hz"),
        (given(torch.zeros(2, 16000)), "2 rows"),
        (given(torch.zeros(16000)), r"\(16000,\)"),
        (given(torch.zeros(1, 16000, dtype=torch.int16)), "int16"),
        (given(torch.zeros(1, 16000), torch.tensor([16001])), "16001"),
    ],
)
def test_incompatible_components(make_net, words):
    with pytest.raises(ValueError, match=words):
        make_net()


@pytest.mark.parametrize("name", SMALLEST)
def test_shortest_utterance(name):
    net = make(name)
    shortest = net.min_samples
    assert torch.isfinite(embed(net, waves((shortest,)))).all()
    with pytest.raises(ValueError, match=r"needs \d+"):
        embed(net, waves((shortest - 1,)))
    batch = waves((shortest, 10200))
    together = embed(net, batch, torch.tensor([shortest, 10200]))
    assert_close(together[:1], embed(net, batch[:1, :shortest]), atol=1e-5, rtol=1e-4)
