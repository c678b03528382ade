"""Pretrained backbones: every architecture from its folder, the hub, trained parameters, model
files without peft.
"""

import functools
import json
import lzma
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.testing import assert_close

from speakernet.assembly.runs import train_experiment
from speakernet.checkpoint import CheckpointError, read_own_checkpoint, write_checkpoint
from speakernet.cli import main
from speakernet.config import load_config
from speakernet.files import sha256_of
from speakernet.models.importers import PUBLISHED, import_network
from speakernet.models.layer_pooling import MHFA
from speakernet.models.model_file import ModelFile, load_model_file, model_file_contents
from speakernet.models.options.poolings import MHFAOptions
from speakernet.models.speaker_net import SpeakerNet
from speakernet.training.compiling import enable_gradient_checkpointing
from speakernet.training.optimizers import Freezing, parameter_groups
from speakernet.training.options import TrainingOptions
from tests.commands import run_command
from tests.hub_server import local_hub
from tests.models.test_published_models import draw, golden_waveforms
from tests.outcomes import digests
from tests.parallel.test_any_number import stopped
from tests.small_networks import SMALL
from tests.tiny_recipe import write_recipe

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install -e '.[test-all]')"
)
pytestmark = pytest.mark.needs("transformers", "peft")

WRONG_CONFIG = '{"model_type": "wavlm", "hidden_size": "x"}'
CONVOLUTIONS = {
    key: value for key, value in SMALL["Pretrained"]["config"].items() if key != "model_type"
}
LARGE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
OF_BERT = yaml.safe_load("""
{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 24,
feature_projection_input_dim: 160, conv_depthwise_kernel_size: 5}
""")
KINDS = {
    "wav2vec2": ("wav2vec2", CONVOLUTIONS),
    # Its published files include the heads of pretraining.
    "xls-r large": (
        "wav2vec2",
        {**CONVOLUTIONS, **LARGE, "architectures": ["Wav2Vec2ForPreTraining"]},
    ),
    "hubert": ("hubert", CONVOLUTIONS),
    "wavlm": ("wavlm", CONVOLUTIONS),
    "wavlm large": ("wavlm", {**CONVOLUTIONS, **LARGE}),
    "data2vec": ("data2vec-audio", CONVOLUTIONS),
    "w2v-bert": ("wav2vec2-bert", OF_BERT),
}
# Fast tests use these two; the others differ in details.
EVERY = [
    pytest.param(kind, marks=[] if kind in ("wavlm", "w2v-bert") else pytest.mark.slow)
    for kind in KINDS
]
GOLDEN = json.loads(
    lzma.decompress(Path(__file__).with_name("golden_pretrained.json.xz").read_bytes())
)


def make(folder, kind, seed=0, sample_rate=16000):
    """A random backbone saved by transformers, with its preprocessor and a card."""
    torch.manual_seed(seed)
    name, sizes = KINDS[kind]
    kind_of_model = (
        transformers.Wav2Vec2ForPreTraining if "architectures" in sizes else transformers.AutoModel
    )
    make_model = getattr(kind_of_model, "from_config", kind_of_model)
    make_model(transformers.AutoConfig.for_model(name, **sizes)).save_pretrained(folder)
    of_bert = name == "wav2vec2-bert"
    extractor = (
        transformers.SeamlessM4TFeatureExtractor
        if of_bert
        else transformers.Wav2Vec2FeatureExtractor
    )
    extractor(
        sampling_rate=sample_rate, **({} if of_bert else {"do_normalize": "large" in kind})
    ).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nTiny.\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function that returns the folder of a kind, made when first requested."""
    root = tmp_path_factory.mktemp("backbones")
    return functools.cache(lambda kind: make(root / kind.replace(" ", "_"), kind))


def network(folder, context=0, **options):
    torch.manual_seed(1)
    given = {"backbone": str(folder), **options}
    sizes = {"heads": 3, "compression": 5, "context": context}
    return SpeakerNet.named("Pretrained", "MHFA", 8, model_options=given, pooling_options=sizes)


def waves(*lengths):
    return 0.1 * torch.randn(len(lengths), max(lengths), generator=torch.Generator().manual_seed(2))


def embed(net, *inputs):
    return net.embed(*inputs, sample_rate=16000)


def tune(net, **options):
    return net.trunk.tune(net.trunk.options.model_copy(update=options), net)


@pytest.mark.slow
@pytest.mark.needs("onnxruntime", "onnxscript")
@pytest.mark.parametrize(
    ("kind", "ending"), [("w2v-bert", ".onnx"), ("w2v-bert", ".pt2"), ("wavlm", ".pt2")]
)
def test_export_of_a_fixed_length(folders, kind, ending):
    """At one second, the exporter makes w2v-BERT's lookup of positions a constant; WavLM's code
    branches on a batch of one.
    """
    from speakernet.inference.export import FORMATS

    net = network(folders(kind)).eval()
    _, write, open_it = FORMATS[ending]
    if kind == "wavlm":
        with pytest.raises(ValueError, match="wavlm"):
            write(ModelFile(net, {}), None)
    graph = open_it(write(ModelFile(net, {}), 16000))
    expected = embed(net, waves(16000)).numpy()
    actual = graph(waves(16000).numpy())[0]
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", EVERY)
def test_hidden_states(folders, kind):
    net = network(folders(kind)).eval()
    batch = waves(8960)
    model = transformers.AutoModel.from_pretrained(folders(kind)).eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folders(kind))
    inputs = extractor(batch[0].numpy(), sampling_rate=16000, return_tensors="pt")
    expected = model(
        inputs.get("input_values", inputs.get("input_features")), output_hidden_states=True
    )
    states = net.trunk(batch[:, None])[0]
    assert states.shape[:3] == (1, 3, model.config.hidden_size)
    for ours, theirs in zip(states[0], expected.hidden_states, strict=True):
        assert_close(ours, theirs[0].T[:, : ours.shape[1]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", EVERY)
def test_lengths_gradients_and_merged_adapters(folders, kind):
    net = network(folders(kind), context=2).eval()
    batch = waves(9000, 7000)
    together = embed(net, batch, torch.tensor([9000, 7000]))
    assert_close(together[1:], embed(net, batch[1:, :7000]), atol=1e-5, rtol=1e-5)
    for trained in ("lora", "all"):
        tune(net, trained=trained)
        net.train()(batch).square().sum().backward()
        for name, parameter in net.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
        net.zero_grad()
        if trained == "lora":
            add_noise(net, ".lora_B")
            adapted = embed(net, batch[:1])
            weights = net.weights()
            net.trunk.merge()
            assert (
                weights.keys() == net.state_dict().keys()
                and (adapted - together[:1]).abs().max() > 1e-4
            )
            assert_close(embed(net, batch[:1]), adapted, atol=1e-5, rtol=1e-5)
            for name, value in net.state_dict().items():
                assert_close(weights[name], value)


def test_attention_over_neighbours_against_a_loop():
    """Without neighbours, and of adapters: see the golden embeddings of `test_imports`."""
    states = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    pooling = MHFA(MHFAOptions(heads=2, compression=5, context=2), 4, 3)
    pooling.key_weights.logits.data = torch.tensor([0.5, 1, 2])
    pooling.value_weights.logits.data = torch.tensor([3.0, 0, 1])
    found = pooling(states, torch.tensor([6, 5]))
    kernels = pooling.attention.weight  # (heads, channels, offsets -2 … 2)
    for row, length in enumerate((6, 5)):
        shares = torch.tensor([0.5, 1, 2]).softmax(0), torch.tensor([3.0, 0, 1]).softmax(0)
        mixed = [(share[:, None, None] * states[row, :, :, :length]).sum(0).T for share in shares]
        keys, values = pooling.keys(mixed[0]), pooling.values(mixed[1])
        expected = []
        for kernel in kernels:
            logits = torch.zeros(length)
            for frame in range(length):
                for at in range(max(0, frame - 2), min(length, frame + 3)):
                    logits[frame] += kernel[:, at - frame + 2] @ keys[at]
            expected.append(logits.softmax(0) @ values)
        assert_close(found[row], torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_trained_parameters(folders):
    net = network(folders("wavlm"))
    tune(net, trained="all", unfreeze_epochs=2, layer_decay=0.5)
    freezing = Freezing(net, TrainingOptions())
    layers = net.trunk.backbone.encoder.layers
    seen = []
    for epoch in (0, 2, 4, 6):
        freezing.begin_training(epoch)
        seen.append(
            [
                next(module.parameters()).requires_grad
                for module in (layers[1], layers[0], net.trunk.backbone)
            ]
        )
    assert seen == [[False] * 3, [True, False, False], [True, True, False], [True] * 3]
    groups = parameter_groups([net], 0.1)
    factors = {
        id(parameter): group.get("learning_rate_factor", 1.0)
        for group in groups
        for parameter in group["params"]
    }
    below = net.trunk.backbone.feature_projection.projection.weight
    found = [
        factors[id(next(module.parameters()))] for module in (net.embedding, layers[1], layers[0])
    ]
    assert [*found, factors[id(below)]] == [1.0, 0.5, 0.25, 0.125]
    tune(net, trained="all", trained_layers=1, gradient_factor=0.0)
    net.train()(waves(6000, 6000)).sum().backward()
    assert (
        next(layers[1].parameters()).grad.abs().sum() == 0
        and next(layers[0].parameters()).grad is None
    )


def test_gradient_checkpointing_of_adapters(folders):
    net = network(folders("wavlm"))
    batch = waves(8000)
    layers = []
    tune(net, trained="lora")
    add_noise(net, ".lora_B")

    def gradients():
        net.zero_grad()
        net.train()(batch).square().sum().backward()
        return [parameter.grad for parameter in net.parameters() if parameter.requires_grad]

    plain = gradients()
    enable_gradient_checkpointing(net)
    net.trunk.backbone.encoder.layers[1].attention.register_forward_pre_hook(
        lambda *given: layers.append(1)
    )
    for gradient, other in zip(plain, gradients(), strict=True):
        assert_close(gradient, other)
    assert len(layers) == 2
    embed(net, batch)
    assert len(layers) == 3


def test_adapters_of_a_later_stage(folders, tmp_path):
    later = {"trained": "lora", "lora_targets": ["query"]}
    stages = [
        {"name": "first", "epochs": 1},
        {"name": "last", "epochs": 1, "model": {"options": later}},
    ]
    model = {"name": "Pretrained", "pooling": "MHFA"}
    model["options"] = {"backbone": str(folders("wavlm"))}
    changes = {"model": model, "training": {"stages": stages}}
    recipe = write_recipe(tmp_path / "run.yaml", tmp_path, tmp_path / "run", changes)
    with pytest.raises(ValueError, match="lora_targets: query"):
        train_experiment(load_config(["--config", str(recipe)]))


def test_missing_transformers(tmp_path, monkeypatch, refuse):
    monkeypatch.delitem(sys.modules, "speakernet.models.pretrained")
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = f"train --model Pretrained --model.options.backbone x --save_path {tmp_path}/run"
    assert "pip install 'speakernet[ssl]'" in refuse(words)


def test_checkpoints_without_the_backbone(folders, tmp_path, capsys):
    folder = make(tmp_path / "wavlm", "wavlm")
    net = network(folder)
    batch = waves(8000)
    state = tune(net, trained="lora", lora_rank=2)
    add_noise(net, ".lora_B")
    last = {
        **model_file_contents(net, loss_normalizes=True, is_last=True),
        "training": {"net": state.state_dict()},
    }
    best = model_file_contents(net, loss_normalizes=True, training_summary={})
    for name, contents in (("last.pt", last), ("best.pt", best)):
        write_checkpoint(tmp_path / name, contents)
    read = read_own_checkpoint(tmp_path / "last.pt")
    for part in (read["weights"], read["training"]["net"]):
        # Only the two matrices of each adapter, on two feed-forward layers of two blocks.
        kept = [name for name in part if "backbone" in name]
        assert len(kept) == 8 and all("dense.lora_" in name for name in kept)
    assert not any(".lora_" in name for name in best["weights"])
    assert last["training"]["net"]["source"]["licence"] == "mit"
    expected = embed(net, batch)
    for name in ("last.pt", "best.pt"):
        found = embed(load_model_file(tmp_path / name).net, batch)
        assert_close(found, expected, atol=1e-5, rtol=1e-5)
    run_command(f"info {tmp_path}/best.pt")
    shown = capsys.readouterr().out
    assert "backbone licence" in shown and "mit" in shown and "parameters_trained" in shown
    # Other weights under that name are refused, and so are the merged ones in best.pt.
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
    spare = network(folder, spare=str(tmp_path / "best.pt"))
    with pytest.raises(CheckpointError, match=r"best\.pt cannot replace it"):
        tune(spare, trained="lora", lora_rank=2).load_state_dict(last["training"]["net"])
    with pytest.raises(CheckpointError, match=r"best\.pt cannot replace it"):
        load_model_file(tmp_path / "last.pt")


def test_several_files_without_an_index(tmp_path):
    folder = make(tmp_path / "wavlm", "wavlm")
    for name in ("a", "b"):
        shutil.copy(folder / "model.safetensors", folder / f"{name}.safetensors")
    assert list(network(folder).trunk.options.source["files"]) == ["model.safetensors"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors, b\.safetensors; expected model\.safetensors\.index"
    ):
        network(folder)


def test_other_scale_of_adapters(folders):
    net = network(folders("wavlm"))
    options = {"trained": "lora", "lora_rank": 2}
    state = tune(net, **options, lora_alpha=4.0).state_dict()
    tune(network(folders("wavlm")), **options, lora_alpha=4.0).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"lora_alpha.* scaled by 40 .* at 2;"):
        tune(network(folders("wavlm")), **options, lora_alpha=80.0).load_state_dict(state)


def test_best_in_place_of_the_files(folders, tmp_path):
    folder = make(tmp_path / "wavlm", "wavlm")
    net = network(folder)
    batch = waves(8000)
    state = tune(net, trained="nothing").state_dict()
    assert not any("backbone" in name for name in state)
    write_checkpoint(
        tmp_path / "best.pt", model_file_contents(net, loss_normalizes=True, training_summary={})
    )
    shutil.rmtree(folder)
    spare = network(folder, spare=str(tmp_path / "best.pt"))
    tune(spare, trained="nothing").load_state_dict(state)
    assert torch.equal(embed(spare, batch), embed(net, batch))


def test_tuned_backbone_frozen_later(folders):
    # As after starting from the model of a run that trained the backbone.
    net = network(folders("wavlm"))
    add_noise(net, "layers.1.")
    state = tune(net, trained="nothing").state_dict()
    # A resumed run reads the backbone's files first; its own checkpoint must hold the tuned layer
    # again.
    resumed = tune(network(folders("wavlm")), trained="nothing")
    resumed.load_state_dict(state)
    again = resumed.state_dict()
    assert again.keys() == state.keys() and any("layers.1." in name for name in again)


def test_origin_of_trained_weights(folders, tmp_path):
    """Resuming with other files under the same name leaves weights and their recorded origin as
    they were.
    """
    folder = make(tmp_path / "wavlm", "wavlm")
    net = network(folder)
    state = tune(net, trained="all").state_dict()
    make(folder, "wavlm", seed=7)
    other = network(folder)
    tune(other, trained="all").load_state_dict(state)
    origins = [
        network_of_run.spec()["model"]["options"]["source"]["files"]
        for network_of_run in (net, other, network(folder))
    ]
    assert origins[0] == origins[1] != origins[2]
    assert torch.equal(embed(other, waves(6000)), embed(net, waves(6000)))


def add_noise(net, *words):
    """Perturb trained parameters, because adapters initially have no effect."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if any(word in name for word in words):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_file_that_refers_to_its_backbone(tmp_path):
    """`reference: true` with a backbone that has modules named `module`."""
    folder = make(tmp_path / "bert", "w2v-bert")
    batch = waves(8000)
    paths = tmp_path / "whole.pt", tmp_path / "named.pt"
    for path in paths:
        net = network(folder)
        tune(net, reference="named" in path.name)
        write_checkpoint(path, model_file_contents(net, loss_normalizes=True))
        assert torch.equal(
            embed(load_model_file(path).net, batch),
            embed(net, batch),
        )
    whole, named = map(read_own_checkpoint, paths)
    left = {name for name in whole["weights"] if name.startswith("trunk.backbone.")}
    assert named["weights"].keys() == whole["weights"].keys() - left
    assert {f"trunk.backbone.{name}" for name in named["reference"]} == left
    assert named["model"]["options"]["source"]["files"]["model.safetensors"] == sha256_of(
        folder / "model.safetensors"
    )
    # If the folder is gone from its place, a folder of the same name beside the model file is used.
    moved = tmp_path / "elsewhere" / "named.pt"
    moved.parent.mkdir()
    shutil.copy(paths[1], moved)
    folder.rename(moved.parent / folder.name)
    assert torch.equal(
        embed(load_model_file(moved).net, batch),
        embed(net, batch),
    )
    with pytest.raises(CheckpointError, match=f"link to it as {folder}"):
        load_model_file(paths[1])


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["model"] + case.get("note", ""))
def test_imports(case, tmp_path, capsys):
    """Equal to wespeaker dfa7419 and BUT's 34e1343 on tiny configurations, with weights drawn from
    names.
    """
    contents = {name: draw(name, tuple(shape), 1.0) for name, shape in case["tensors"].items()}
    torch.save(contents, tmp_path / "theirs.pt")
    out = tmp_path / "ours.pt"
    words = f"import-weights {tmp_path}/theirs.pt --from {case['toolkit']} --model {case['model']}"
    assert main([*words.split(), "--out", str(out)]) == 0
    assert "the training head" in capsys.readouterr().out
    net = load_model_file(out).net
    # Even numbers of frames, because wespeaker pads an odd last frame and we drop it.
    long, short = golden_waveforms()
    for wave, expected in zip(
        (long, short[:, :19857]), torch.tensor(case["embeddings"]), strict=True
    ):
        found = embed(net, wave)
        assert (found[0] - expected).norm() / expected.norm() < 1e-5
    adapted = {
        **contents,
        "frontend.encoder.base_model.model.layers.0.linear_q.lora_A.default.weight": torch.ones(1),
    }
    if case["toolkit"] == "wespeaker":
        with pytest.raises(CheckpointError, match="merge_lora"):
            import_network(PUBLISHED["wespeaker"], case["model"], adapted, "stage1.pt")


FINE_TUNING = """
model:
  name: Pretrained
  pooling: MHFA
  pooling_options: {heads: 3}
  options: {lora_rank: 2, lora_dropout: 0.1, layer_decay: 0.9}
training: {max_epochs: 2, test_interval: 1, ema_decay: 0.9}
optimizer: {name: adamw, learning_rate: 0.001}
evaluation: {eval_frames: 40, num_crops: 1, bootstrap_samples: 0}
runtime: {deterministic: true}
"""


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["nothing", "lora", "all", "lora, then all"])
def test_resuming(trained, tiny_corpus, tmp_path, refuse):
    folder, (trained, *later) = make(tmp_path / "wavlm", "wavlm"), trained.split(", then ")
    changes = yaml.safe_load(FINE_TUNING)
    changes["model"]["options"] |= {"backbone": str(folder), "trained": trained}
    if trained == "all":
        changes["model"]["options"]["unfreeze_epochs"] = 1
    if trained == "nothing":
        changes["training"]["ema_decay"] = 0.0
    changes["runtime"]["gradient_checkpointing"] = trained == "lora"
    if later:
        del changes["training"]["max_epochs"]
        last = {"name": "last", "epochs": 1, "model": {"options": {"trained": later[0]}}}
        changes["training"]["stages"] = [{"name": "first", "epochs": 1}, last]
    recipe = str(write_recipe(tmp_path / "run.yaml", tiny_corpus, tmp_path / "unused", changes))
    given = [
        ["--config", recipe, "--save_path", str(tmp_path / name)]
        for name in ("straight", "stopped")
    ]
    train_experiment(load_config(given[0]))
    # With stages, the run is stopped in the first, between stages, and in the last.
    for step in (5, 0, 3) if later else (11,):
        with stopped(step):
            train_experiment(load_config(given[1]))
    shutil.copytree(tmp_path / "stopped", tmp_path / "spare")
    train_experiment(load_config(given[1]))
    for name in ("2_last/last.pt" if later else "last.pt", "best.pt"):
        assert digests(tmp_path / "stopped" / name) == digests(tmp_path / "straight" / name)
    # A different backbone under that name.
    make(folder, "wavlm", seed=7)
    if trained != "all" and not later:
        assert "SHA-256" in refuse(f"train --config {recipe} --save_path {tmp_path}/spare")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            {},
            "no .*safetensors",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'),
            {},
            "bert; expected",
        ),
        (
            lambda folder: (folder / "config.json").write_text(WRONG_CONFIG),
            {},
            "config.json.*of transformers",
        ),
        (lambda folder: make(folder, "wavlm", sample_rate=8000), {}, "8000 Hz"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 50),
            {},
            "model.safetensors",
        ),
        (
            lambda folder: None,
            {"trained": "all", "trained_layers": 3},
            "trained_layers: 3, .* has 2 layers",
        ),
    ],
    ids=["pickle", "architecture", "value", "rate", "damaged", "layers"],
)
def test_bad_input(tmp_path, change, options, message):
    folder = make(tmp_path / "wavlm", "wavlm")
    change(folder)
    with pytest.raises(ValueError, match=message):
        net = network(folder)
        net.trunk.refuse_impossible(
            net.trunk.options.model_copy(update={"trained": "lora", **options})
        )


def test_hub(folders, tmp_path, monkeypatch, caplog):
    with local_hub(monkeypatch, tmp_path / "cache") as server:
        server.folders["us/tiny"] = folders("wavlm")
        local = network(folders("wavlm"))
        batch = waves(8000)
        net = network("us/tiny")
        assert torch.equal(embed(net, batch), embed(local, batch))
        commit = net.spec()["model"]["options"]["source"]["commit"]
        assert len(commit) == 40 and commit in str(next((tmp_path / "cache").rglob("config.json")))
        with pytest.raises(CheckpointError, match="us/other"):
            network("us/other")
    assert torch.equal(embed(network("us/tiny"), batch), embed(local, batch))
    assert str(tmp_path / "cache") in caplog.text
    with pytest.raises(CheckpointError, match="us/another"):
        network("us/another")
