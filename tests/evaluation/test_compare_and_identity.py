"""`speakernet compare`, the score files it reads, and published trial lists known again."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from speakernet.cli import main
from speakernet.data.lists import (
    ListError,
    StringTable,
    TrialList,
    identify_trials,
    read_trials,
    write_trials,
)
from speakernet.evaluation.figures import compare_scores
from speakernet.evaluation.files import read_scores, scores_for, write_scores
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.speakers import speakers_of

sys.path.insert(0, str(Path(__file__).parent))
from report_runs import make_trials


@pytest.fixture()
def trials(tmp_path):
    return make_trials(tmp_path / "trials.txt")


def write_pair(folder, trials, random):
    good = random.standard_normal(len(trials)) + 4.0 * trials.labels
    bad = random.standard_normal(len(trials)) + 1.0 * trials.labels
    for name, scores in (("a", good), ("b", bad)):
        write_scores(folder / name / "scores.txt", trials, scores)
    return good, bad


def test_the_command_says_who_is_better_and_whether_that_is_sure(tmp_path, trials, random, capsys):
    good, bad = write_pair(tmp_path, trials, random)
    files = [str(tmp_path / "a"), str(tmp_path / "b" / "scores.txt")]
    assert main(["compare", *files, "--trials", trials.source, "--draws", "200"]) == 0
    out = capsys.readouterr().out
    difference = eer(bad, trials.labels) - eer(good, trials.labels)
    assert f"EER (%): A is better than B by {difference:.3f}, interval " in out and ": significant" in out
    assert main(["compare", files[1], files[1], "--trials", trials.source]) == 0
    assert "A and B are equal, interval 0.000 … 0.000: not significant" in capsys.readouterr().out
    for wrong in (["--priors", "1.5"], ["--draws", "0"]):
        assert main(["compare", *files, "--trials", trials.source, *wrong]) == 1


def test_systems_are_fused_by_weights_of_another_list(tmp_path, trials, random, capsys):
    # Each hears the half of it that the other does not: together they err less than either.
    heard = [trials.labels + 0.8 * random.standard_normal(len(trials)) for _ in "ab"]
    for name, scores in zip("ab", heard, strict=True):
        write_scores(tmp_path / name / "scores.txt", trials, scores)
    files = [str(tmp_path / name / "scores.txt") for name in "ab"]
    command = ["evaluate", "--scores", *files, "--trials", trials.source, "--draws", "20"]
    assert main(command) == 1
    assert "2 score files are fused with weights that are fitted on another list" in capsys.readouterr().err
    fitting = ["--fusion_scores", *files, "--fusion_trials", trials.source]
    assert main([*command, *fitting[:2], *fitting[3:]]) == 1
    assert "--fusion_scores has 1 files for 2 in --scores" in capsys.readouterr().err
    unlabelled = tmp_path / "unlabelled.txt"
    pairs = zip(trials.enrol, trials.test, strict=True)
    write_trials(unlabelled, ((None, trials.names[int(a)], trials.names[int(b)]) for a, b in pairs))
    assert main([*command, *fitting[:-1], str(unlabelled)]) == 1
    assert "is unlabelled; a fit needs labels" in capsys.readouterr().err
    assert main([*command, *fitting, "--save_path", str(tmp_path / "fused")]) == 0
    assert "Cllr" in capsys.readouterr().out
    results = json.loads((tmp_path / "fused" / "results.json").read_text())
    assert results["eer_percent"] < min(eer(scores, trials.labels) for scores in heard)
    assert results["calibration"]["inputs"] == ["a", "b"] and min(results["calibration"]["weights"]) > 0
    # Fitted and reported on one list: said, and in the page.
    assert any("weights were fitted on the list that is reported" in one for one in results["warnings"])
    assert [one["role"] for one in results["lists"]] == ["trials", "scores", "scores", "fusion trials"]
    # One system is calibrated by the same options, and keeps its own scores.
    one = ["evaluate", "--scores", files[0], "--trials", trials.source, "--fusion_scores", files[0], "--draws", "20"]
    assert main([*one, "--fusion_trials", trials.source, "--save_path", str(tmp_path / "one")]) == 0
    assert read_scores(tmp_path / "one" / "scores.txt")[1] == pytest.approx(heard[0], abs=1e-4)
    # Scores that are log-likelihood ratios already are measured as such, without a fit.
    fused = ["evaluate", "--scores", str(tmp_path / "fused" / "scores.txt"), "--trials", trials.source, "--draws", "20"]
    assert main([*fused, "--scores_are_llrs", "--save_path", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "results.json").read_text())["cllr"] == pytest.approx(
        results["cllr"], abs=1e-3
    )


def test_a_run_that_was_scored_on_its_own_is_found_in_its_eval_folder(tmp_path, trials, random, capsys):
    write_pair(tmp_path, trials, random)
    command = ["compare", str(tmp_path / "run"), str(tmp_path / "b"), "--trials", trials.source, "--draws", "20"]
    (tmp_path / "run").mkdir()
    assert main(command) == 1
    assert "no scores.txt of trials" in capsys.readouterr().err
    (tmp_path / "run" / "eval").mkdir()
    (tmp_path / "a").rename(tmp_path / "run" / "eval" / "other")
    assert main(command) == 0
    assert f"({tmp_path / 'run' / 'eval' / 'other' / 'scores.txt'})" in capsys.readouterr().out
    shutil.copytree(tmp_path / "b", tmp_path / "run" / "eval" / "third")
    assert main(command) == 1
    assert "holds other, third" in capsys.readouterr().err
    shutil.copytree(tmp_path / "b", tmp_path / "run" / "eval" / "trials")
    assert main(command) == 0
    assert "A and B are equal" in capsys.readouterr().out


def test_any_number_of_systems_with_the_list_that_their_folders_keep(tmp_path, trials, random, capsys):
    for number, name in enumerate("abc"):
        scores = random.standard_normal(len(trials)) + (1 + number) * trials.labels
        evaluation = ["--draws", "20", "--save_path", str(tmp_path / name / "eval" / "trials")]
        write_scores(tmp_path / f"{name}.txt", trials, scores)
        assert (
            main(["evaluate", "--scores", str(tmp_path / f"{name}.txt"), "--trials", trials.source, *evaluation]) == 0
        )
    results = tmp_path / "a" / "eval" / "trials" / "results.json"
    values = json.loads(results.read_text())
    results.write_text(json.dumps(values | {"warnings": ["the best checkpoint was chosen on this very list: x"]}))
    capsys.readouterr()
    assert main(["compare", *(str(tmp_path / name) for name in "abc"), "--draws", "20"]) == 0
    out = capsys.readouterr().out
    assert "B is better than A" in out and "C is better than A" in out and "A: the best checkpoint was chosen on" in out
    assert [len(line.split()) for line in out.splitlines() if line.startswith("minDCF(0.01) ")] == [4]
    # A score file keeps no labels, so they come from the folder, whichever comes first.
    assert main(["compare", str(tmp_path / "a.txt"), str(tmp_path / "b"), "--draws", "20"]) == 0
    assert main(["compare", str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]) == 1
    assert main(["compare", str(tmp_path / "a")]) == 1
    assert "--trials" in capsys.readouterr().err


@pytest.mark.parametrize("prior", ["0", "1", "2", "-3", "nan"])
def test_a_prior_is_a_probability(tmp_path, trials, prior, capsys):
    write_scores(tmp_path / "scores.txt", trials, trials.labels + 0.0)
    command = ["evaluate", "--scores", str(tmp_path / "scores.txt"), "--trials", trials.source]
    assert main([*command, "--prior", prior]) == 1
    assert "--prior" in capsys.readouterr().err


def test_results_of_a_training_run_are_not_overwritten(tmp_path, trials, random, capsys):
    write_pair(tmp_path, trials, random)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text("kept")
    (tmp_path / "run" / "metrics.jsonl").touch()
    command = ["evaluate", "--scores", str(tmp_path / "a"), "--trials", trials.source, "--draws", "20"]
    assert main([*command, "--save_path", str(tmp_path / "run")]) == 1
    assert str(tmp_path / "run") in capsys.readouterr().err
    assert (tmp_path / "run" / "results.json").read_text() == "kept"


def test_fused_scores_do_not_replace_those_of_a_system(tmp_path, trials, random, capsys):
    write_pair(tmp_path, trials, random)
    files, before = [str(tmp_path / one) for one in "ab"], (tmp_path / "a" / "scores.txt").read_bytes()
    command = ["evaluate", "--scores", *files, "--trials", trials.source, "--draws", "20", "--fusion_scores", *files]
    assert main([*command, "--fusion_trials", trials.source, "--save_path", str(tmp_path / "a")]) == 1
    assert str(tmp_path / "a" / "scores.txt") in capsys.readouterr().err
    assert (tmp_path / "a" / "scores.txt").read_bytes() == before


def test_score_files_are_split_as_lists_are(tmp_path):
    """Names may hold spaces of any kind."""
    names = ["a\u00a0b.wav", "c\u2028d.wav", "e\u3000f g.wav"]
    (tmp_path / "trials.txt").write_text(f"1 {names[0]} {names[1]}\n0\t{names[2]}\t{names[0]}\n", encoding="utf-8")
    trials = read_trials(tmp_path / "trials.txt")
    write_scores(tmp_path / "s.txt", trials, np.array([0.5, -0.5]))
    np.testing.assert_array_equal(scores_for(trials, tmp_path / "s.txt"), [0.5, -0.5])


def test_scores_are_found_by_their_pairs(tmp_path):
    (tmp_path / "trials.txt").write_text("1 a b\n0 a c\n0 c b\n")
    (tmp_path / "scores.txt").write_text("c b -1 nontarget\na b 3 target\na c 0.5 nontarget\n")
    trials = read_trials(tmp_path / "trials.txt")
    np.testing.assert_array_equal(scores_for(trials, tmp_path / "scores.txt"), [3, 0.5, -1])
    (tmp_path / "scores.txt").write_text("c b -1 target\na b 3 nontarget\na c 0.5 nontarget\n")
    with pytest.raises(ListError, match=r"2 of 3 lines have another label than .*trials\.txt, first line 2: 'a b'"):
        scores_for(trials, tmp_path / "scores.txt")
    # b against a is another trial than a against b.
    (tmp_path / "scores.txt").write_text("b c -1\na b 3\na c 0.5\n")
    with pytest.raises(ListError, match=r"1 are in .*trials\.txt only, first line 3: 'c b'"):
        scores_for(trials, tmp_path / "scores.txt")
    (tmp_path / "scores.txt").write_text("a b 3\na b 3\na c 0.5\nc b 1\n")
    with pytest.raises(ListError, match=r"has 4 scores, .* has 3 trials; .* first line 2: "):
        scores_for(trials, tmp_path / "scores.txt")
    (tmp_path / "scores.txt").write_text("a b 3 maybe\n")
    with pytest.raises(ListError, match=r"line 1: expected 'enrol test score', .* found 'a b 3 maybe'"):
        read_scores(tmp_path / "scores.txt")


def test_the_first_difference_is_named_with_both_lines(tmp_path):
    (tmp_path / "trials.txt").write_text("\n1 a b\n0 a c\n")
    (tmp_path / "scores.txt").write_text("a b 0.5 target\n\n\na d 0.1 nontarget\n")
    trials = read_trials(tmp_path / "trials.txt")
    with pytest.raises(ListError, match=r"first line 3: 'a c'; .*scores\.txt only, first line 4: 'a d'"):
        scores_for(trials, tmp_path / "scores.txt")
    (tmp_path / "scores.txt").write_text("a b 0.5\n")
    with pytest.raises(ListError, match=r"has 1 scores, .* has 2 trials; 1 are in .*trials\.txt"):
        scores_for(trials, tmp_path / "scores.txt")
    (tmp_path / "scores.txt").write_text("a b 0.5\n\na c nan\n")
    with pytest.raises(ValueError, match=r"1 of 2 scores .*: lines 3"):
        scores_for(trials, tmp_path / "scores.txt")


@pytest.mark.parametrize("text", ["a b\n", "a b half\n", "a b 0.1 target more\n", "\n\n"])
def test_malformed_score_files_are_refused(tmp_path, text):
    (tmp_path / "scores.txt").write_text("a b 0.1\n" * bool(text.strip()) + text)
    with pytest.raises(ListError, match="line 2: expected" if text.strip() else "no scores"):
        read_scores(tmp_path / "scores.txt")
    with pytest.raises(ListError, match="cannot be read"):
        read_scores(tmp_path / "none.txt")


def test_published_lists_are_recognised(shared_data, tmp_path):
    for file, name, other in (("veri_test", "O, original", "O, cleaned"), ("veri_test2", "O, cleaned", "O, original")):
        path = shared_data / "voxceleb_lists" / f"{file}.txt"
        found = identify_trials(read_trials(path))
        assert f"this is VoxCeleb1-{name}" in found and f"often confused with VoxCeleb1-{other}" in found
        (tmp_path / "moved").write_text("\n" + path.read_text())
        found = identify_trials(read_trials(tmp_path / "moved"))
        assert found.startswith(f"most likely VoxCeleb1-{name}") and f"VoxCeleb1-{other}" in found


def counted(num_trials, num_targets, name="id1{:04d}/abcdefghijk/00001.wav"):
    names = StringTable.from_strings(name.format(row) for row in range(2))
    labels = (np.arange(num_trials) < num_targets).astype(np.int8)
    zeros = np.zeros(num_trials, np.int32)
    return TrialList(names, zeros, zeros + 1, labels, "nowhere")


def test_lists_recognised_by_counts_and_names():
    found = identify_trials(counted(579818, 289921))
    assert found.startswith("most likely VoxCeleb1-E, cleaned") and "581,480 trials" in found
    for trials in (counted(579818, 289922), counted(550894, 7), counted(550894, 275488, "other/{}.wav")):
        assert "not that list as published" in identify_trials(trials)
    assert identify_trials(counted(12345, 600)) == ""


def test_both_systems_meet_the_same_draws(trials, random):
    scores = random.standard_normal(len(trials)) + 2.0 * trials.labels
    result = compare_scores(trials, [scores, 3 * scores + 1], speakers_of(trials), num_draws=50, seed=0)
    assert len(result.differences[0]) == 3
    for difference in result.differences[0]:
        assert (difference.value, difference.interval) == (0, (0, 0))


def test_a_missing_score_file_is_not_called_a_list(tmp_path):
    with pytest.raises(ListError, match=r"gone: cannot be read .*expected a score file .*or the folder of a run"):
        read_scores(tmp_path / "gone")
