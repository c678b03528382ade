"""Training with a teacher: distances to its embeddings, what a run stores, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from speakernet.assembly.runs import train_experiment
from speakernet.assembly.teaching import Teacher
from speakernet.checkpoint import read_own_checkpoint, write_checkpoint
from speakernet.config import ConfigError, load_config
from speakernet.losses.options import LossOptions
from speakernet.models.model_file import model_file_contents
from tests.assembly.test_stages import skip_report
from tests.small_networks import small_network
from tests.tiny_recipe import write_recipe

EMBEDDINGS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
WANTED = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("distance", "speakers", "expected"),
    [
        ("cosine", 9, (1 + 0 + (1 - 0.5**0.5)) / 3),
        ("mse", 9, (1 + 0.5 + 2.5) / 3),
        # Labels from 1 on are perturbed voices.
        ("cosine", 1, 1 / 3),
        ("cosine", 0, 0.0),
    ],
)
def test_distances_by_hand(distance, speakers, expected):
    options = LossOptions(teacher_distance=distance, teacher_weight=3.0)
    teacher = Teacher(options, 2, WANTED, num_speakers=speakers)
    batch = SimpleNamespace(indices=torch.arange(3), waveforms=EMBEDDINGS)
    found = teacher(EMBEDDINGS, teacher.wanted(batch), torch.arange(3))
    assert found.item() == pytest.approx(3 * expected, rel=1e-6)


@pytest.fixture
def run(tiny_corpus, tmp_path, monkeypatch):
    skip_report(monkeypatch)
    teacher = tmp_path / "teacher.pt"
    net = small_network("ResNet")
    write_checkpoint(teacher, model_file_contents(net, loss_normalizes=True))

    def make(name, *options, **loss):
        given = {
            "loss": {"name": "aamsoftmax", "teacher": str(teacher), **loss},
            "training": {"max_epochs": 3},
        }
        recipe = write_recipe(tmp_path / f"{name}.yaml", tiny_corpus, tmp_path / name, given)
        train_experiment(load_config(["--config", str(recipe), *options]))
        return tmp_path / name

    make.net = net
    return make


@pytest.mark.parametrize("source", ["recordings", "crops"])
def test_run_with_a_teacher(run, caplog, source):
    caplog.set_level("INFO", "speakernet")
    folder = run("run", teacher_input=source)
    assert f"cosine distance, on {source}, weight 1" in caplog.text
    kept = folder / "embeddings" / "teacher.whole.npz"
    assert kept.is_file() == (source == "recordings")
    last = read_own_checkpoint(folder / "last.pt")
    # The map from 8 dimensions to the teacher's is trained and resumed, but in no model file.
    assert last["training"]["loss"]["teacher.translate.weight"].shape == (run.net.embedding_dim, 8)
    assert not any(
        "teacher" in name
        for name in (*last["weights"], *read_own_checkpoint(folder / "best.pt")["weights"])
    )
    before = kept.stat().st_mtime_ns if kept.is_file() else 0
    run("run", "--max_epoch", "4", teacher_input=source)
    assert (kept.stat().st_mtime_ns if kept.is_file() else 0) == before
    assert read_own_checkpoint(folder / "last.pt")["training"]["state"]["epoch"] == 4


def test_refused_teachers(run):
    with pytest.raises(ConfigError, match=r"loss\.teacher: no such file nothing\.pt"):
        run("none", teacher="nothing.pt")
    with pytest.raises(ConfigError, match=r"warp_factors: \[1\.0, 1\.1\]"):
        run(
            "warps",
            "--augment.enabled",
            "true",
            "--augment.warp_factors",
            "[1.0, 1.1]",
            teacher_input="crops",
        )
