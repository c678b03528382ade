"""Several test lists in one run: a column and a folder for each, every utterance embedded once,
mistakes.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from speakernet.cli import main
from speakernet.config import load_config
from speakernet.data.lists import read_trials
from speakernet.data.opening import open_source
from speakernet.evaluation.embedding import Embedder, one_pass
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.systems import find_scores
from speakernet.training.trackers import scalars
from tests.evaluation.test_embedding import Counting
from tests.outcomes import records_of, results_of, scores_of
from tests.tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("blank_figures")
SHORT = {
    "training": {"max_epochs": 2, "test_interval": 1},
    "evaluation": {"eval_frames": 60, "bootstrap_samples": 20},
}


@pytest.fixture(scope="module")
def lists(tiny_corpus, tmp_path_factory):
    """A folder with parts of the trial list: each without one speaker, one without labels, one with
    targets only.
    """
    folder = tmp_path_factory.mktemp("lists")
    lines = (tiny_corpus / "trials.txt").read_text().splitlines(keepends=True)
    (folder / "easy.txt").write_text("".join(line for line in lines if "spk13" not in line))
    (folder / "hard.txt").write_text("".join(line for line in lines if "spk08" not in line))
    (folder / "pairs.txt").write_text("".join(line[2:] for line in lines))
    (folder / "targets.txt").write_text("".join(line for line in lines if line[0] == "1"))
    return folder


@pytest.fixture(scope="module")
def run(tiny_corpus, lists, tmp_path_factory):
    """The folder of a run of two epochs; its first list is the reported one, the last two are
    missing.
    """
    named = {
        "O": str(tiny_corpus / "trials.txt"),
        "E": {"list": str(lists / "easy.txt"), "test_interval": 2},
        "H": str(lists / "hard.txt"),
        "gone": {"list": "nowhere.txt", "optional": True},
        "silent": {"list": str(lists / "easy.txt"), "path": str(lists), "optional": True},
    }
    folder = tmp_path_factory.mktemp("finished")
    data = {"data": {"test_list": "", "test_lists": named}}
    recipe = write_recipe(folder / "run.yaml", tiny_corpus, folder / "run", SHORT, data)
    assert main(["train", "--config", str(recipe)]) == 0
    return folder / "run"


def score(run, folder, words):
    """Score the model of the run with these words; the status."""
    audio = load_config(["--config", str(run / "config.yaml")]).config.data.test_path
    command = f"train --config {run}/config.yaml --eval --initial_model {run}/best.pt"
    return main(f"{command} --test_path {audio} --save_path {folder} {words}".split())


def columns_of(run):
    """Epoch -> list -> figures."""
    return {record["epoch"]: record["test_lists"] for record in records_of(run, "evaluation")}


def test_utterances_are_embedded_once(tiny_corpus, lists):
    source = open_source(tiny_corpus)
    options = EvaluationOptions(eval_frames=0)
    net = Counting()
    unions = {}
    one, two, other = (
        read_trials(lists / f"{name}.txt").names for name in ("easy", "hard", "targets")
    )
    for _ in range(2):
        net.count = 0
        embedder = Embedder(
            net, options, embed_with=one_pass([(one, source), (two, source)], unions)
        )
        found = [embedder.embed(names, source, "whole", "")[0] for names in (one, two)]
        assert net.count == len({*one, *two}) == 18 < len(one) + len(two) and len(unions) == 1
    for names, embeddings in ((one, found[0]), (two, found[1])):
        assert np.array_equal(
            embeddings, Embedder(net, options).embed(names, source, "whole", "")[0]
        )
    net.count = 0
    embedder.embed(other, source, "whole", "")
    assert net.count == len(other), "other utterances are embedded separately"


def test_columns_and_folders(run, lists):
    columns = columns_of(run)
    results = results_of(run)
    log = (run / "log.txt").read_text()
    # O chooses the checkpoint, so its figures are in the run's main column.
    assert [[*columns[epoch]] for epoch in (1, 2)] == [["H"], ["E", "H"]]
    eer = columns[1]["H"]["eer_percent"]
    assert (
        dict(scalars("evaluation", {"test_lists": columns[1]}))[
            "evaluation/test_lists/H/eer_percent"
        ]
        == eer
    )
    assert f", H {eer:.2f} %," in log and "leaving out gone" in log and "leaving out silent" in log
    assert (
        {*results["test_lists"]} == {path.name for path in (run / "eval").iterdir()} == {"E", "H"}
    )
    assert (
        len(scores_of(run)) == results["num_trials"] == 153
        and "Test lists" in (run / "report.html").read_text()
    )
    for name, row in results["test_lists"].items():
        own = results_of(run / "eval" / name)
        assert (own["eer_percent"], own["num_trials"]) == (
            row["eer_percent"],
            105,
        ) and "test_lists" not in own
    assert find_scores(run, read_trials(lists / "hard.txt"))[0] == run / "eval" / "H" / "scores.txt"


@pytest.mark.parametrize(("name", "file"), [("E", "easy"), ("H", "hard")])
def test_scores(run, lists, tmp_path, name, file):
    words = f"--test_list {lists}/{file}.txt --data.test_lists {{}}"
    assert score(run, tmp_path, words) == 0
    alone = tmp_path / "eval" / file
    together = run / "eval" / name
    assert scores_of(together) == pytest.approx(scores_of(alone), abs=2e-6)
    assert results_of(together)["eer_percent"] == results_of(alone)["eer_percent"]


@pytest.mark.slow
def test_resuming_and_scoring(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "eval" / "E" / "report.html").unlink()
    command = ["train", "--config", str(copy / "config.yaml")]
    assert main(command) == 0 and (copy / "eval" / "E" / "report.html").is_file()
    assert main([*command, "--max_epoch", "3"]) == 0
    assert [*columns_of(copy)[3]] == ["H"] and columns_of(copy)[2] == columns_of(run)[2]
    before = {path: path.read_bytes() for path in copy.iterdir() if path.is_file()}
    assert main([*command, "--eval"]) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert {*results_of(copy / "eval" / "trials")["test_lists"]} == {"E", "H"}


MISTAKES = {
    "{a/b: easy.txt}": "letters, digits",
    "{trials: easy.txt}": "test_list: ",
    "{E: {test_interval: 5}}": "E: list is missing",
    "{E: pairs.txt}": "E (pairs.txt) has no labels",
    "{E: targets.txt}": "targets.txt",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_mistakes(
    given,
    tiny_corpus,
    lists,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(lists)
    recipe = write_recipe(tmp_path / "run.yaml", tiny_corpus, tmp_path / "run", SHORT)
    (tmp_path / "file.yaml").write_text(
        recipe.read_text().replace("data:\n", f"data:\n  test_lists: {given}\n")
    )
    for options in ([str(recipe), "--data.test_lists", given], [str(tmp_path / "file.yaml")]):
        assert main(["train", "--config", *options]) == 1
        assert (
            MISTAKES[given] in capsys.readouterr().err
            and not (tmp_path / "run" / "last.pt").exists()
        )
