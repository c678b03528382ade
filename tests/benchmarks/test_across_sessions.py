"""Error rates across calls: training speakers, trained models, the table."""

import itertools
import subprocess

import numpy as np
import pytest

from benchmarks import across_sessions
from speakernet.checkpoint import write_checkpoint
from speakernet.cli import run_command
from speakernet.data.audio import write_audio
from speakernet.data.lists import read_training_list, read_trials
from speakernet.models.model_file import model_file_contents
from tests.conftest import tiny_voice
from tests.small_networks import small_network

PEOPLE = 11
CALLS = 2


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Eleven people with two calls, from different phones if their number is odd; the last is in no
    trial.
    """
    root = tmp_path_factory.mktemp("calls")
    found = list(itertools.product(range(PEOPLE), range(CALLS)))
    rows = [(f"{who}/{call}.wav", who, ("home", "cell")[call * who % 2]) for who, call in found]
    for (name, who, _), (_, call) in zip(rows, found, strict=True):
        (root / name).parent.mkdir(exist_ok=True)
        write_audio(root / name, tiny_voice(who, call, 0.5), 16000)
    lines = [f"{name},{who},{phone}" for name, who, phone in rows]
    (root / "utterances.csv").write_text("\n".join(["path,speaker,phone", *lines]) + "\n")
    pairs = itertools.combinations([row for row in rows if row[1] < PEOPLE - 1], 2)
    (root / "trials.txt").write_text("".join(f"{a[1] == b[1]:d} {a[0]} {b[0]}\n" for a, b in pairs))
    return root


@pytest.fixture()
def model(tmp_path):
    path = tmp_path / "model.pt"
    write_checkpoint(
        path, model_file_contents(small_network("ResNet", front_end="fbank"), loss_normalizes=True)
    )
    return path


def test_the_table(calls, model, tmp_path, capsys, monkeypatch):
    """With fake training that copies the given model; nobody is trained on and scored in the same
    part.
    """
    trained = {}

    def play(command, **_):
        words = dict(itertools.pairwise(command))
        folder = tmp_path / "S" / "division_0" / f"part_{len(trained)}"
        assert (
            words["--training.save_path"] == str(folder)
            and words["--training.final_model"] == "last"
        )
        learned = {
            name.split("/")[0] for name in read_training_list(folder / "train_list.txt").paths
        }
        scored = {name.split("/")[0] for name in read_trials(folder / "trials.txt").names}
        trained[folder.name] = learned, scored
        (folder / "best.pt").write_bytes(model.read_bytes())

    monkeypatch.setattr(subprocess, "run", play)
    monkeypatch.setattr(across_sessions, "NUM_DRAWS", 20)
    options = ["--fine_tune", "options.yaml", "--also", f"twin={model}"]
    given = [str(tmp_path / "S"), "--model", str(model), "--calls", str(calls), *options]
    assert run_command("benchmarks.across_sessions", "across_sessions", given) == 0
    table = (tmp_path / "S" / "table.md").read_text()
    assert table in capsys.readouterr().out
    everybody = {str(who) for who in range(PEOPLE)}
    for learned, scored in trained.values():
        # Two people per part; the one without trials is in all five training lists.
        assert len(everybody - learned) == 2 and scored <= everybody - learned
    assert set.union(*(everybody - learned for learned, _ in trained.values())) == everybody - {
        str(PEOPLE - 1)
    }
    rows = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in table.splitlines()[4:]
    }
    assert (
        list(rows)[:3] == ["as published", "twin", "energy floor, as it is"]
        and len(rows) == 2 + 3 * 5
    )
    # The same model has a difference of zero; the untrained one too, except for the floor.
    assert rows["as published"][:3] == rows["twin"][:3] and rows["twin"][3].startswith(
        "0.00 (0.00 to 0.00)"
    )
    assert rows["fine-tuned, as it is"][:3] == rows["twin"][:3]
    # Everything is stored, so nothing is trained again.
    assert (
        run_command("benchmarks.across_sessions", "across_sessions", given) == 0
        and len(trained) == 5
    )


def test_scores_of_the_back_end(calls):
    found = across_sessions.read_calls(calls)
    parts = found.parts(0)
    assert sorted(np.bincount(parts + 1)) == [2, 4, 4, 4, 4, 4] and not np.array_equal(
        parts, found.parts(1)
    )
    rows = np.random.default_rng(1).standard_normal((len(found.names), 3))
    trials = found.trials_within(parts, 2)
    centred = rows - rows[parts != 2].mean(axis=0)
    units = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    by_hand = (units[found.enrol[trials]] * units[found.test[trials]]).sum(axis=1)
    np.testing.assert_allclose(
        across_sessions.scores(found, rows, parts, 2, "mean"), by_hand, atol=1e-5
    )
