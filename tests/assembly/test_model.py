"""From the sections frontend, model and loss to network and loss, and from a file to the network to score with."""

import pytest
import torch

from speakernet.assembly.evaluation import load_for_scoring
from speakernet.assembly.training import build_loss, build_model
from speakernet.checkpoint import write_checkpoint
from speakernet.config.loading import load_config
from speakernet.frontend.features import KaldiFbank, LogMel
from speakernet.frontend.options import LogMelOptions
from speakernet.losses.options import LOSSES, AMSoftmaxOptions, TripletOptions
from speakernet.models.model_file import model_file_contents
from speakernet.models.options import FAMILIES, ModelOptions


def config_of(*options):
    return load_config(["--model.embedding_dim", "16", *options]).config


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_from_the_config(name):
    taken = list(LOSSES[name].options.model_fields)
    given = {"margin": "0.35", "scale": "20"}
    options = [text for key, value in given.items() if key in taken for text in (f"--loss.{key}", value)]
    loss = build_loss(config_of("--loss.name", name, *options), 7)
    assert type(loss) is LOSSES[name].load()
    if "margin" in taken:
        assert loss.margin == 0.35
    if name in ("amsoftmax", "aamsoftmax"):
        assert loss.scale == 20 and loss.weight.shape == (7, 16)


@pytest.mark.parametrize("name", [next(iter(sizes)) for sizes in FAMILIES.values()])
def test_every_family_from_the_config(name):
    # RawNet3 takes the waveform itself.
    mels = {"VGGVox": ["--frontend.num_mels", "40"], "RawNet3": []}.get(name, ["--frontend.num_mels", "72"])
    net = build_model(config_of("--model.name", name, *mels))
    assert net.model_name == name and net.embedding_dim == 16 and net.spec_augment is None


def test_front_end_options_arrive():
    options = [
        "--frontend.name",
        "fbank",
        "--frontend.dither",
        "1",
        "--frontend.scale",
        "1",
        "--frontend.window",
        "povey",
    ]
    front_end = build_model(config_of("--model.name", "ResNet", *options)).front_end
    assert isinstance(front_end, KaldiFbank)
    assert (front_end.options.dither, front_end.options.scale, front_end.options.normalize) == (1.0, 1.0, "mean")
    plain = build_model(config_of("--frontend.preemphasis", "0.5", "--frontend.normalize", "mean")).front_end
    assert isinstance(plain, LogMel) and (plain.options.preemphasis, plain.options.normalize) == (0.5, "mean")


def test_spec_augment_arrives_and_follows_the_seed():
    options = ["--frontend.spec_augment", "true", "--frontend.frame_masks", "2", "--frontend.mel_mask_width", "5"]
    first, other = build_model(config_of(*options)), build_model(config_of(*options, "--runtime.seed", "11"))
    masks = first.spec_augment.options
    assert (masks.frame_masks, masks.mel_mask_width) == (2, 5)
    assert first.spec_augment.draws.seed != other.spec_augment.draws.seed


def test_unknown_names_suggest():
    with pytest.raises(ValueError, match="unknown model 'ResnetSE34L'; did you mean 'ResNetSE34L'"):
        build_model(config_of("--model.name", "ResnetSE34L"))
    with pytest.raises(ValueError, match="unknown loss 'aamsoftmx'; did you mean 'aamsoftmax'"):
        build_loss(config_of("--loss.name", "aamsoftmx"), 3)


def test_a_model_file_scores_as_what_it_says_it_is(tmp_path):
    net = build_model(config_of("--model.name", "ResNet", "--frontend.num_mels", "40"))
    write_checkpoint(tmp_path / "best.pt", model_file_contents(net, loss_normalizes=False))
    loaded = load_for_scoring(config_of("--model.name", "VGGVox"), tmp_path / "best.pt")
    waves = torch.randn(1, 8000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(*(one.embed(waves, sample_rate=16000) for one in (loaded.net, net)))
    assert loaded.contents["loss_normalizes"] is False


def test_a_foreign_checkpoint_scores_as_what_the_config_says(tmp_path):
    torch.save({"__S__.netcnn.0.weight": torch.zeros(1)}, tmp_path / "their.model")
    with pytest.raises(ValueError, match=r"^[^(]*their\.model is a VGGVox .*ResNetSE34L"):
        load_for_scoring(config_of(), tmp_path / "their.model")


@pytest.mark.parametrize(
    ("section", "values", "field"),
    [
        (LogMelOptions, {"num_mels": 0}, "num_mels"),
        (LogMelOptions, {"preemphasis": 1.5}, "preemphasis"),
        (LogMelOptions, {"frame_masks": -1}, "frame_masks"),
        (ModelOptions, {"embedding_dim": 0}, "embedding_dim"),
        (AMSoftmaxOptions, {"margin": -0.1}, "margin"),
        (AMSoftmaxOptions, {"scale": 0.0}, "scale"),
        (TripletOptions, {"hard_probability": 1.5}, "hard_probability"),
    ],
)
def test_values_out_of_range_are_named(section, values, field):
    section()
    with pytest.raises(ValueError, match=f"{section.__name__}: {field} is .*; expected"):
        section(**values)
