"""Pretrained backbones: every architecture from its folder, the hub, what is trained, and model files without peft."""

from pathlib import Path

import pytest
import torch

from speakernet.checkpoint import CheckpointError, read_own_checkpoint, write_checkpoint
from speakernet.cli import main
from speakernet.models.model_file import load_model_file, model_file_contents
from speakernet.models.options.poolings import CAMHFAOptions, LayerSumOptions, MHFAOptions
from speakernet.models.speaker_net import SpeakerNet
from speakernet.training.optimizers import Freezing, parameter_groups
from speakernet.training.options import TrainingOptions
from tests.hub_server import local_hub
from tests.small_networks import SMALL

transformers = pytest.importorskip("transformers", reason="the extra `ssl` is not installed")

CONVOLUTIONS = {key: value for key, value in SMALL["Pretrained"]["config"].items() if key != "model_type"}
LARGE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
KINDS = {
    "wav2vec2": ("wav2vec2", CONVOLUTIONS),
    "hubert": ("hubert", CONVOLUTIONS),
    "wavlm": ("wavlm", CONVOLUTIONS),
    "wavlm large": ("wavlm", {**CONVOLUTIONS, **LARGE}),
    "data2vec": ("data2vec-audio", CONVOLUTIONS),
    "w2v-bert": (
        "wav2vec2-bert",
        {
            **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
            **{"feature_projection_input_dim": 160, "conv_depthwise_kernel_size": 5},
        },
    ),
}


def make(folder: Path, kind: str, seed: int = 0, sample_rate: int = 16000) -> Path:
    """A random backbone as transformers saves one, with its preprocessor and a card."""
    torch.manual_seed(seed)
    name, sizes = KINDS[kind]
    transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name, **sizes)).save_pretrained(folder)
    of_bert = name == "wav2vec2-bert"
    extractor = transformers.SeamlessM4TFeatureExtractor if of_bert else transformers.Wav2Vec2FeatureExtractor
    extractor(sampling_rate=sample_rate, **({} if of_bert else {"do_normalize": "large" in kind})).save_pretrained(
        folder
    )
    (folder / "README.md").write_text("---\nlicense: mit\n---\nTiny.\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("backbones")
    return {kind: make(root / kind.replace(" ", "_"), kind) for kind in KINDS}


def network(folder, pooling="MHFA", **options):
    torch.manual_seed(1)
    given = {"backbone": str(folder), **options}
    sizes = {"heads": 3, "compression": 5} if pooling.endswith("MHFA") else {}
    return SpeakerNet.named("Pretrained", pooling, 8, model_options=given, pooling_options=sizes)


def waves(*lengths):
    return 0.1 * torch.randn(len(lengths), max(lengths), generator=torch.Generator().manual_seed(2))


def tune(net, **options):
    return net.trunk.tune(net.trunk.options.model_copy(update=options), net)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_transformers(folders, kind):
    net, batch = network(folders[kind]).eval(), waves(8960)
    model = transformers.AutoModel.from_pretrained(folders[kind]).eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folders[kind])
    inputs = extractor(batch[0].numpy(), sampling_rate=16000, return_tensors="pt")
    expected = model(inputs.get("input_values", inputs.get("input_features")), output_hidden_states=True)
    states = net.trunk(batch[:, None])[0]
    assert states.shape[:3] == (1, 3, 16)
    for ours, theirs in zip(states[0], expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs[0].T[:, : ours.shape[1]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_gradients_and_merged_adapters(folders, kind):
    net, batch = network(folders[kind], "CAMHFA").eval(), waves(9000, 7000)
    together = net.embed(batch, torch.tensor([9000, 7000]), sample_rate=16000)
    torch.testing.assert_close(together[1:], net.embed(batch[1:, :7000], sample_rate=16000), atol=1e-5, rtol=1e-5)
    for trained in ("lora", "all"):
        tune(net, trained=trained)
        net.train()(batch).square().sum().backward()
        for name, parameter in net.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
        net.zero_grad()
        if trained == "lora":
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter) * (".lora_B" in name))
            adapted = net.embed(batch[:1], sample_rate=16000)
            weights = net.weights()
            net.trunk.merge()
            assert weights.keys() == net.state_dict().keys() and (adapted - together[:1]).abs().max() > 1e-4
            torch.testing.assert_close(net.embed(batch[:1], sample_rate=16000), adapted, atol=1e-5, rtol=1e-5)
            for name, value in net.state_dict().items():
                torch.testing.assert_close(weights[name], value)


def test_poolings_against_loops():
    states, lengths = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([6, 5])
    from speakernet.models.layer_pooling import CAMHFA, MHFA, LayerSum

    for kind, options in (
        (MHFA, MHFAOptions(heads=2, compression=5)),
        (CAMHFA, CAMHFAOptions(heads=2, compression=5, context=2)),
    ):
        torch.manual_seed(0)
        pooling = kind(options, 4, 3)
        pooling.key_weights.logits.data, pooling.value_weights.logits.data = torch.tensor([[0.5, 1, 2], [3, 0, 1]])
        found, context = pooling(states, lengths), getattr(options, "context", 0)
        for row, length in enumerate(lengths.tolist()):
            key_share, value_share = (
                one.logits.exp() / one.logits.exp().sum() for one in (pooling.key_weights, pooling.value_weights)
            )
            keys, values = [], []
            for frame in range(length):
                keys.append(pooling.keys(sum(key_share[n] * states[row, n, :, frame] for n in range(3))))
                values.append(pooling.values(sum(value_share[n] * states[row, n, :, frame] for n in range(3))))
            expected = []
            for head in range(2):
                kernel, bias = pooling.attention.weight[head], pooling.attention.bias
                logits = torch.zeros(length)
                for frame in range(length):
                    for offset in range(-context, context + 1):
                        if 0 <= frame + offset < length:
                            logits[frame] += (kernel[:, offset + context] * keys[frame + offset]).sum()
                    logits[frame] += 0 if bias is None else bias[head]
                shares = logits.exp() / logits.exp().sum()
                expected.append(sum(share * value for share, value in zip(shares, values, strict=True)))
            torch.testing.assert_close(found[row], torch.cat(expected), atol=1e-5, rtol=1e-5)
    # Weights 1/4 and 3/4 of layers that hold 4 and 8, mean over frames 7.
    pooling = LayerSum(LayerSumOptions(over_frames="TAP"), 1, 2)
    pooling.weights.logits.data = torch.tensor([0.0, 3.0]).log().clamp(min=0) + torch.tensor([0.0, 0.0])
    assert pooling(torch.tensor([[[[4.0, 4.0]], [[8.0, 8.0]]]])).item() == pytest.approx(7.0)


def test_adapters_against_wespeakers_definition():
    from speakernet.models.layer_pooling import AdapterMFA
    from speakernet.models.options.poolings import AdapterMFAOptions

    torch.manual_seed(0)
    pooling, states = AdapterMFA(AdapterMFAOptions(dim=5), 4, 2).eval(), torch.randn(1, 2, 4, 6)
    joined = []
    for adapter, state in zip(pooling.adapters, states[0], strict=True):
        first, norm, _, last = adapter
        hidden = state.T @ first.weight.T + first.bias
        hidden = (hidden - hidden.mean(1, keepdim=True)) / (hidden.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        joined.append((hidden * norm.weight + norm.bias).clamp(min=0) @ last.weight.T + last.bias)
    frames = torch.cat(joined, 1)  # (frames, 10)
    attention = pooling.attentive
    hidden = (frames @ attention.squeeze.weight[:, :, 0].T + attention.squeeze.bias).clamp(min=0) / (1 + 1e-5) ** 0.5
    weights = (hidden @ attention.expand.weight[:, :, 0].T + attention.expand.bias).softmax(0)
    mean = (weights * frames).sum(0)
    deviation = ((weights * frames**2).sum(0) - mean**2).clamp(min=1e-5).sqrt()
    torch.testing.assert_close(pooling(states)[0], torch.cat([mean, deviation]), atol=1e-5, rtol=1e-5)


def test_what_is_trained(folders):
    net = network(folders["wavlm"])
    tune(net, trained="all", unfreeze_epochs=2, layer_decay=0.5)
    freezing, layers = Freezing(net, TrainingOptions()), net.trunk.backbone.encoder.layers
    seen = []
    for epoch in (0, 2, 4, 6):
        freezing.begin_training(epoch)
        seen.append([next(one.parameters()).requires_grad for one in (layers[1], layers[0], net.trunk.backbone)])
    assert seen == [[False] * 3, [True, False, False], [True, True, False], [True] * 3]
    groups = parameter_groups([net], 0.1)
    factors = {id(one): group.get("learning_rate_factor", 1.0) for group in groups for one in group["params"]}
    below = net.trunk.backbone.feature_projection.projection.weight
    found = [factors[id(next(one.parameters()))] for one in (net.embedding, layers[1], layers[0])]
    assert [*found, factors[id(below)]] == [1.0, 0.5, 0.25, 0.125]
    tune(net, trained="all", trained_layers=1, gradient_factor=0.0)
    net.train()(waves(6000, 6000)).sum().backward()
    assert next(layers[1].parameters()).grad.abs().sum() == 0 and next(layers[0].parameters()).grad is None
    assert not net.train().trunk.backbone.config.apply_spec_augment
    tune(net, trained="nothing")
    assert not net.train().trunk.backbone.training


def test_checkpoints_without_what_the_files_hold(folders, tmp_path, capsys):
    folder = make(tmp_path / "wavlm", "wavlm")
    net, batch = network(folder), waves(8000)
    state = tune(net, trained="lora", lora_rank=2)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * (".lora_B" in name))
    last = {**model_file_contents(net, loss_normalizes=True, is_last=True), "training": {"net": state.state_dict()}}
    best = model_file_contents(net, loss_normalizes=True, training_summary={})
    for name, contents in (("last.pt", last), ("best.pt", best)):
        write_checkpoint(tmp_path / name, contents)
    kept = [name for name in read_own_checkpoint(tmp_path / "last.pt")["weights"] if "backbone" in name]
    # Merged weights of the feed-forward layers alone.
    assert len(kept) == 4 and all("dense.weight" in name for name in kept)
    assert not any("q_proj" in name for name in last["training"]["net"])
    assert last["training"]["net"]["source"]["licence"] == "mit"
    expected = net.embed(batch, sample_rate=16000)
    for name in ("last.pt", "best.pt"):
        found = load_model_file(tmp_path / name).net.embed(batch, sample_rate=16000)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert main(["info", str(tmp_path / "best.pt")]) == 0
    shown = capsys.readouterr().out
    assert "backbone licence" in shown and "mit" in shown and "parameters_trained" in shown
    # Other weights under that name: refused. None: those of best.pt.
    make(tmp_path / "other", "wavlm", seed=7)
    twin = network(tmp_path / "other")
    other = tune(twin, trained="lora", lora_rank=2)
    with pytest.raises(CheckpointError, match="SHA-256"):
        other.load_state_dict(last["training"]["net"])
    folder.rename(tmp_path / "away")
    (tmp_path / "other").rename(folder)
    with pytest.raises(CheckpointError, match="SHA-256"):
        load_model_file(tmp_path / "last.pt")
    folder.rename(tmp_path / "other")
    # The adapters are not added to weights that have them already.
    spare = network(folder, spare=str(tmp_path / "best.pt"))
    tune(spare, trained="lora", lora_rank=2).load_state_dict(last["training"]["net"])
    torch.testing.assert_close(spare.embed(batch, sample_rate=16000), expected, atol=1e-5, rtol=1e-5)
    found = load_model_file(tmp_path / "last.pt").net.embed(batch, sample_rate=16000)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), {}, "no .*safetensors"),
        (lambda folder: (folder / "config.json").unlink(), {}, "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), {}, "bert; expected"),
        (lambda folder: make(folder, "hubert", sample_rate=8000), {}, "8000 Hz"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 50), {}, "model.safetensors"),
        (lambda folder: None, {"lora_targets": ["query"]}, "lora_targets: query"),
        (lambda folder: None, {"backbone": "nobody/nothing/no"}, "nobody/nothing/no"),
    ],
    ids=["pickle", "no config", "architecture", "rate", "damaged", "names", "no such model"],
)
def test_bad_input(tmp_path, change, options, message):
    folder = make(tmp_path / "hubert", "hubert")
    change(folder)
    with pytest.raises(ValueError, match=message):
        tune(network(options.get("backbone", folder)), trained="lora", **options)


def test_the_hub(folders, tmp_path, monkeypatch, caplog):
    with local_hub(monkeypatch, tmp_path / "cache") as server:
        server.folders["us/tiny"] = folders["hubert"]
        local, batch = network(folders["hubert"]), waves(8000)
        net = network("us/tiny")
        assert torch.equal(net.embed(batch, sample_rate=16000), local.embed(batch, sample_rate=16000))
        commit = net.spec()["model"]["options"]["source"]["commit"]
        assert len(commit) == 40 and commit in str(next((tmp_path / "cache").rglob("config.json")))
        with pytest.raises(CheckpointError, match="us/other"):
            network("us/other")
    assert torch.equal(network("us/tiny").embed(batch, sample_rate=16000), local.embed(batch, sample_rate=16000))
    assert str(tmp_path / "cache") in caplog.text
    with pytest.raises(CheckpointError, match="us/another"):
        network("us/another")
