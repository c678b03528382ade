"""Results of scores: results.json, `compare`, fusion, score files, cautions, recognised published
lists.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from speakernet.cli import main
from speakernet.data.lists import (
    identify_trials,
    read_trials,
    repeated_trials,
    write_trials,
)
from speakernet.evaluation.figures import (
    Difference,
    cautions,
    figures,
    holm,
    over_seeds,
    p_value_of,
)
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import GroupResult, Results, SliceResult, SweepResult
from speakernet.evaluation.score_files import read_scores, scores_for, write_scores
from speakernet.evaluation.speakers import speakers_of
from tests.commands import run_command
from tests.evaluation.report_runs import make_trials, trials_of
from tests.outcomes import results_of

pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.fixture
def trials(tmp_path):
    return make_trials(tmp_path / "trials.txt")


@pytest.fixture
def systems(tmp_path, trials, random):
    """A system, a worse one and a better one, as folders of scores; their scores by name."""
    found = {}
    for name, distance in (("a", 2.0), ("b", 1.0), ("c", 3.0)):
        found[name] = random.standard_normal(len(trials)) + distance * trials.labels
        write_scores(tmp_path / name / "scores.txt", trials, found[name])
    return found


@pytest.fixture
def run(monkeypatch, tmp_path, trials, capsys):
    """A function that runs a command on the trials in the folder of the systems; its status and
    output.
    """
    monkeypatch.chdir(tmp_path)

    def command(*words):
        status = main([*words, "--trials", trials.source, "--draws", "100"])
        written = capsys.readouterr()
        return status, written.out + written.err

    return command


def test_compare(trials, systems, run):
    status, out = run("compare", "a", "b/scores.txt")
    difference = eer(systems["b"], trials.labels) - eer(systems["a"], trials.labels)
    assert status == 0
    assert (
        f"EER (%): A is better than B by {difference:.3f} (95 % interval " in out
        and "is significant" in out
    )
    out = run("compare", "b", "b/scores.txt")[1]
    assert "A and B are equal (95 % interval 0.000 to 0.000), which is not significant" in out
    for systems, named in ((("a", "a/"), "twice: a, a"), (("a", "nope"), "nope: there is no")):
        status, out = run("compare", *systems)
        assert status == 1 and named in out


@pytest.mark.parametrize("command", ["evaluate --scores a", "compare a b"])
@pytest.mark.parametrize("wrong", ["--priors 1.5", "--priors 0.0", "--draws -1", "--draws 99"])
def test_wrong_options_are_named(command, wrong, trials, systems, run, refuse):
    err = refuse(f"{command} --trials {trials.source} {wrong}")
    assert wrong.removeprefix("--priors ") in err


def test_fusion(trials, run, random):
    # The systems' errors are independent, so their fusion errs less than either of them.
    heard = [trials.labels + 0.8 * random.standard_normal(len(trials)) for _ in "ab"]
    files = ["a.txt", "b.txt"]
    for name, scores in zip(files, heard, strict=True):
        write_scores(Path(name), trials, scores)
    unlabelled = (
        (None, trials.names[int(enrol)], trials.names[int(test)])
        for enrol, test in zip(trials.enrol, trials.test, strict=True)
    )
    write_trials(Path("unlabelled.txt"), unlabelled)
    fitting = ["--fusion_scores", *files, "--fusion_trials", trials.source]
    for wrong, message in (
        ([], "--fusion_trials"),
        (["--fusion_scores", "a.txt", *fitting[3:]], "--fusion_scores has 1 file"),
        ([*fitting[:-1], "unlabelled.txt"], "unlabelled.txt has no labels"),
    ):
        status, out = run("evaluate", "--scores", *files, *wrong)
        assert status == 1 and message in out
    status, out = run("evaluate", "--scores", *files, *fitting, "--save_path", "fused")
    results = results_of(Path("fused"))
    assert status == 0 and "Cllr" in out
    assert results["eer_percent"] < min(eer(scores, trials.labels) for scores in heard)
    assert (
        results["calibration"]["inputs"] == ["a", "b"]
        and min(results["calibration"]["weights"]) > 0
    )
    # Fitting and reporting on one list causes a warning, also on the page.
    assert any("weights were fitted" in warning for warning in results["warnings"])
    # Scores that are already log-likelihood ratios are evaluated without a fit.
    words = "evaluate --scores fused/scores.txt --scores_are_llrs --save_path again"
    assert run(*words.split())[0] == 0
    assert results_of(Path("again"))["cllr"] == pytest.approx(results["cllr"], abs=1e-3)


def test_run_in_its_eval_folder(systems, run):
    Path("run/eval").mkdir(parents=True)
    status, out = run("compare", "run", "b")
    assert status == 1 and "run contains no scores" in out
    Path("a").rename("run/eval/other")
    status, out = run("compare", "run", "b")
    assert status == 0 and "run/eval/other/scores.txt)" in out
    shutil.copytree("b", "run/eval/third")
    status, out = run("compare", "run", "b")
    assert status == 1 and "other, third" in out
    shutil.copytree("b", "run/eval/trials")
    assert "A and B are equal" in run("compare", "run", "b")[1]


def test_several_systems_with_a_stored_list(systems, run, capsys, refuse):
    for name in "abc":
        assert run("evaluate", "--scores", name, "--save_path", f"{name}/eval/trials")[0] == 0
        Path(name, "scores.txt").rename(f"{name}.txt")
    values = results_of(Path("a/eval/trials")) | {
        "warnings": ["the best checkpoint was chosen on this very list: x"]
    }
    Path("a/eval/trials/results.json").write_text(json.dumps(values))
    run_command("compare a b c --draws 100")
    out = capsys.readouterr().out
    assert (
        "A is better than B" in out
        and "C is better than A" in out
        and "A: the best checkpoint was chosen on" in out
    )
    assert [len(line.split()) for line in out.splitlines() if line.startswith("minDCF(0.01) ")] == [
        4
    ]
    # A score file has no labels, so they come from the folder, in any order.
    run_command("compare a.txt b --draws 100")
    assert "--trials" in refuse("compare a.txt b.txt")
    assert "at least two" in refuse("compare a")


def test_other_results_are_not_overwritten(trials, systems, run):
    Path("run").mkdir()
    Path("run/results.json").write_text("kept")
    Path("run/metrics.jsonl").touch()
    before = Path("a/scores.txt").read_bytes()
    fusing = ["--fusion_scores", "a", "b", "--fusion_trials", trials.source]
    for names, folder, named in ((["a"], "run", "run"), (["a", "b", *fusing], "a", "a/scores.txt")):
        status, out = run("evaluate", "--scores", *names, "--save_path", folder)
        assert status == 1 and named in out
    assert (
        Path("run/results.json").read_text() == "kept"
        and Path("a/scores.txt").read_bytes() == before
    )
    # A folder of ours is evaluated again; files of somebody else stay.
    for _ in range(2):
        assert run("evaluate", "--scores", "a", "--out", "ours")[0] == 0
    Path("theirs").mkdir()
    Path("theirs/results.json").write_text("{}")
    assert run("evaluate", "--scores", "b", "--out", "theirs")[0] == 1
    assert Path("theirs/results.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "c b -1 target\na b 3 nontarget\na c 0.5 nontarget\n",
            r"2 of 3 .*trials\.txt, .*'a b'",
        ),
        # b against a is not the same trial as a against b.
        (
            "b c -1\na b 3\na c 0.5\n",
            r"1 pairs of .*trials\.txt .*'c b'; 1 pairs of .*'b c'",
        ),
        ("a b 3\na b 3\na c 0.5\nc b 1\n", r"4 scores .* 3 trials .*repeated"),
        ("a b 0.5\n\na c nan\nc b 1\n", "line 3: found 'a c nan'"),
        ("a b 0.5\nc b -1e308\n", "line 2: found .*; expected"),
        ("modelid\tsegmentid\tside\tLLR\na\tb\ta\t3\n", r"line 1: found 'modelid"),
        ("a b 3 maybe\n", r"line 1: found 'a b 3 maybe'; expected 'enrol test score'"),
        ("a b 1\na b\n", "line 2: found .*; expected"),
        ("\n\n", "no scores"),
        (None, "scores.txt: there is no such file"),
    ],
)
def test_bad_score_files(tmp_path, text, message):
    (tmp_path / "trials.txt").write_text("\n1 a b\n0 a c\n0 c b\n")
    if text is not None:
        (tmp_path / "scores.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        scores_for(read_trials(tmp_path / "trials.txt"), tmp_path / "scores.txt")


def test_scores_are_matched_by_pair(tmp_path):
    """Names may contain spaces of any kind, and lines may end as on Windows."""
    names = ["a\u00a0b.wav", "c\u2028d.wav", "e\u3000f g.wav"]
    rows = [(names[0], names[1]), (names[2], names[0])]
    lines = [f"{1 - row}\t{enrol}\t{test}\n" for row, (enrol, test) in enumerate(rows)]
    (tmp_path / "trials.txt").write_text("".join(lines), encoding="utf-8")
    scores = [f"{enrol}\t{test}\t{row}\r\n\r\n" for row, (enrol, test) in enumerate(rows)][::-1]
    (tmp_path / "scores.txt").write_bytes(("\ufeff" + "".join(scores)).encode())
    trials = read_trials(tmp_path / "trials.txt")
    np.testing.assert_array_equal(scores_for(trials, tmp_path / "scores.txt"), [0, 1])
    write_scores(tmp_path / "again.txt", trials, np.array([0.5, -0.5]))
    np.testing.assert_array_equal(scores_for(trials, tmp_path / "again.txt"), [0.5, -0.5])


def test_published_lists(shared_data, tmp_path):
    for file, name, other in (
        ("veri_test", "O, original", "O, cleaned"),
        ("veri_test2", "O, cleaned", "O, original"),
    ):
        path = shared_data / "voxceleb_lists" / f"{file}.txt"
        found = identify_trials(read_trials(path))
        assert (
            f"this is VoxCeleb1-{name}" in found
            and f"often confused with VoxCeleb1-{other}" in found
        )
        (tmp_path / "moved").write_text("\n" + path.read_text())
        found = identify_trials(read_trials(tmp_path / "moved"))
        assert found.startswith(f"most likely VoxCeleb1-{name}") and f"VoxCeleb1-{other}" in found


def counted(num_trials, num_targets, name="id1{:04d}/abcdefghijk/00001.wav"):
    names = [name.format(row) for row in range(2)]
    pairs = np.tile([0, 1], (num_trials, 1))
    return trials_of(names, pairs, np.arange(num_trials) < num_targets)


def test_published_lists_by_counts_and_names():
    found = identify_trials(counted(579818, 289921))
    assert found.startswith("most likely VoxCeleb1-E, cleaned") and "581,480 trials" in found
    assert identify_trials(counted(579818, 289922)).startswith("as many trials as VoxCeleb1-")
    assert identify_trials(counted(12345, 600)) == ""


def describe_run(folder, seed, rate):
    """Results and the configuration of a run."""
    (folder / "results.json").write_text(json.dumps(Results(num_trials=1).to_dict()))
    text = f"optimizer: {{learning_rate: {rate}}}\nruntime: {{seed: {seed}}}\n"
    (folder / "config.yaml").write_text(text)


def test_two_seeds_of_one_system(systems, run):
    """Another seed of the same recipe is not called a better system; another recipe is."""
    for folder, seed, rate in (("a", 1, 0.1), ("b", 2, 0.1), ("c", 1, 0.2)):
        describe_run(Path(folder), seed, rate)
    out = run("compare", "a", "b", "c")[1]
    seeds, recipes = (
        next(line for line in out.splitlines() if line.startswith("EER (%): ") and name in line)
        for name in ("B", "C")
    )
    assert "two trainings of one system" in seeds and "significant" not in seeds
    assert "significant" in recipes


def make_seeds(trials, random, name, distance, seeds, rate=0.1):
    """Folders of runs of one configuration; their EERs."""
    eers = []
    for seed in seeds:
        scores = random.standard_normal(len(trials)) + distance * trials.labels
        eers.append(eer(scores, trials.labels))
        folder = Path(name, str(seed))
        write_scores(folder / "scores.txt", trials, scores)
        describe_run(folder, seed, rate)
    return np.array(eers)


def test_groups_of_seeds(trials, run, random):
    base = make_seeds(trials, random, "base", 1.0, (1, 2))
    wide = make_seeds(trials, random, "wide", 2.0, (1, 2), rate=0.2)
    make_seeds(trials, random, "mixed", 2.0, (1,), rate=0.3)
    # Runs are paired by their seeds, in whatever order they are named.
    status, out = run("compare", "--group", "base=base/1,base/2", "--group", "wide=wide/2,wide/1")
    means = base.mean(), wide.mean()
    interval, _ = over_seeds(wide, base, is_paired=True)
    assert status == 0 and f"{means[0]:>10.3f}{means[1]:>10.3f}" in out
    assert f"B is better than A by {means[0] - means[1]:.3f} (95 % interval" in out
    assert f"over speakers, {interval[0]:.3f} to {interval[1]:.3f} over seeds)" in out
    assert "another seed" not in out and "--group" not in out
    # A run cannot show what another seed would change.
    out = run("compare", "mixed/1", "--group", "base=base/1,base/2")[1]
    assert "A = base (mean of 2 runs" in out and "over seeds" not in out and "another seed" in out
    # Seeds compared as systems.
    out = run("compare", "mixed/1", "wide/1", "wide/2")[1]
    assert "B and C are one configuration" in out and "--group" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--group", "a=a,b"], "found 1"),
        (["--group", "a=a", "b"], "a=a"),
        (["--group", "a=a,b", "b"], "twice"),
    ],
)
def test_bad_groups(systems, run, words, named):
    status, out = run("compare", *words)
    assert status == 1 and named in out


def test_differences_over_seeds():
    """Welch's t by hand: each mean has variance 1, so there are 2 degrees of freedom and t is
    -3 / sqrt(2), for which p = 1 - t / sqrt(2 + t^2).
    """
    first, second = np.array([8.0, 10.0]), np.array([5.0, 7.0])
    interval, p_value = over_seeds(first, second, is_paired=False)
    assert interval == pytest.approx((-3 - 4.302653 * 2**0.5, -3 + 4.302653 * 2**0.5))
    assert p_value == pytest.approx(1 - 4.5**0.5 / 6.5**0.5)
    assert over_seeds(first, second[:1], is_paired=False) == (None, 0.0)
    # The same difference with every seed.
    assert over_seeds(first, second, is_paired=True) == ((-3.0, -3.0), 0.0)


def test_significance_after_correction():
    """By hand: 2, 3 and 0 of 200 draws on the other side of zero have p-values of 0.02, 0.03 and 0,
    which Holm multiplies by 2, 1 and 3; each is at least as large as a smaller one.
    """
    draws = [np.repeat([-1.0, 1.0], [number, 200 - number]) for number in (2, 3, 0)]
    p_values = [p_value_of(values) for values in draws]
    assert p_values == [0.02, 0.03, 0.0] and holm(p_values) == [0.04, 0.04, 0.0]
    assert holm([0.03, 0.03]) == [0.06, 0.06]
    for p_value, is_significant in ((0.04, True), (0.05, False), (0.06, False)):
        difference = Difference(1.0, (0.1, 2.0), p_value=p_value, num_compared=2)
        assert difference.is_significant == is_significant
        assert "Holm" in difference.sentence("EER", "A", "B")
    # No draws are no evidence; equal systems differ in none.
    assert p_value_of(np.empty(0)) == p_value_of(np.zeros(5)) == 1.0


def test_labels_of_evaluate(systems, trials, run, capsys):
    """Labels come from a folder or the fourth column, as in `compare`."""
    assert run("evaluate", "--scores", "a", "--save_path", "kept")[0] == 0
    kinds = ("nontarget", "target")
    lines = Path("a/scores.txt").read_text().splitlines()
    rows = zip(lines, trials.labels, strict=True)
    Path("labelled.txt").write_text("".join(f"{line} {kinds[label]}\n" for line, label in rows))
    for given in ("kept", "labelled.txt"):
        run_command(f"evaluate --scores {given} --draws 0")
        assert f"EER {eer(systems['a'], trials.labels):.3f} %" in capsys.readouterr().out


def test_scores_keep_their_digits(trials, tmp_path, random):
    """Early in training all scores lie near 1; every float32 stays apart from its neighbours."""
    scores = (1 - 1e-4 * random.random(len(trials))).astype(np.float32)
    write_scores(tmp_path / "scores.txt", trials, scores)
    assert np.array_equal(read_scores(tmp_path / "scores.txt")[1].astype(np.float32), scores)


NEVER_MISSING = {"num_trials", "num_utterances", "eer_percent", "eer_interval_percent", "min_dcf"}
FIGURES = NEVER_MISSING | {
    "num_targets",
    "num_duplicate_trials",
    "eer_threshold",
    "eer_convex_hull_percent",
    "eer_voxceleb_trainer_percent",
    "dcf_costs",
    "area_under_roc",
    "min_cllr",
    "num_speakers_of_half_the_targets",
    "num_speakers",
    "speaker_rule",
}
DRAWN = {"num_draws", "min_dcf_interval", "interval_note", "det_band"}
CALIBRATED = {"cllr", "act_dcf", "calibration_loss"}


@pytest.fixture
def scores(trials, random):
    return random.standard_normal(len(trials)) + 2.0 * trials.labels


def measured(trials, scores, draws=50, llrs=None):
    options = EvaluationOptions(bootstrap_samples=draws, dcf_target_priors=[0.05, 0.2])
    return figures(trials, scores, speakers_of(trials), options, 0, llrs)


def test_keys_of_the_file(trials, scores):
    assert set(measured(trials, scores, draws=0).to_dict()) == FIGURES
    assert set(measured(trials, scores).to_dict()) == FIGURES | DRAWN
    assert set(measured(trials, scores, draws=0, llrs=scores).to_dict()) == FIGURES | CALIBRATED
    assert list(measured(trials, scores).to_dict()["min_dcf"]) == ["0.01", "0.05", "0.2"]
    trials.labels = None
    unlabelled = measured(trials, scores).to_dict()
    assert set(unlabelled) == NEVER_MISSING | {"why_no_eer"}
    assert unlabelled["eer_percent"] is None and unlabelled["eer_interval_percent"] == [None, None]


def test_round_trip_of_results(trials, scores):
    rows = [
        GroupResult("a", 5.0, (4.0, 6.0), "", 40, 8, {"0.01": 0.5}),
        GroupResult("b", 5.0, None, "too few speakers", 40, 8, {"0.01": 0.5}),
        GroupResult("c", note="no targets", num_trials=4, num_targets=0),
    ]
    whole = dataclasses.replace(
        measured(trials, scores),
        slices=[SliceResult("duration", "", rows)],
        sweep=[SweepResult("noise", "dB", "both sides", [GroupResult("none", 5.0, (4.0, 6.0))])],
        checkpoint={"path": "best.pt", "sha256": "0" * 64},
        lists=[{"role": "trials", "name": "trials.txt", "sha256": ""}],
        warnings=[],
        extra={"of_a_later_version": [1]},
    )
    written = json.loads(json.dumps(whole.to_dict()))
    assert Results.from_dict(written) == whole
    assert written["warnings"] == [] and written["of_a_later_version"] == [1]
    assert written["slices"][0]["rows"][1]["eer_interval_percent"] == [None, None]


GOOD = Results(
    num_trials=1100,
    num_targets=100,
    num_same_session_targets=0,
    eer_percent=5.0,
    min_dcf={"0.01": 0.4},
    dcf_costs={"c_miss": 1.0, "c_fa": 1.0},
)


def test_cautions():
    worse = dataclasses.replace(
        GOOD,
        eer_percent=60.0,
        num_duplicate_trials=1200,
        num_contradicting_trials=2,
        interval_note="no interval: few",
    )
    assert cautions(GOOD) == []
    (shared,) = cautions(dataclasses.replace(GOOD, num_same_session_targets=30))
    assert shared.startswith("30 of 100 target trials pair recordings of one session")
    (itself,) = cautions(dataclasses.replace(GOOD, num_self_trials=2))
    assert itself.startswith("2 trials")
    (few,) = cautions(dataclasses.replace(GOOD, num_speakers_of_half_the_targets=9))
    assert "9 speakers" in few
    (unknown,) = cautions(dataclasses.replace(GOOD, num_same_session_targets=None))
    assert "session" in unknown
    swapped, wrong, repeated, interval = cautions(worse)
    assert "swapped" in swapped and wrong.startswith("2 trials")
    assert (
        repeated.startswith("1,200 trials occur more than once") and interval == "no interval: few"
    )


def test_caution_about_min_dcf():
    """At a prior of 0.01 with 99 non-targets, one false accept costs as much as accepting nobody:
    0.99 / 99 is 0.01.
    """
    for nontargets, few in ((98, True), (99, True), (100, False)):
        found = cautions(dataclasses.replace(GOOD, num_trials=100 + nontargets))
        assert bool(found) is few, nontargets
        assert not few or ("minDCF(0.01)" in found[0] and f"{nontargets} " in found[0])
    dear = dataclasses.replace(GOOD, dcf_costs={"c_miss": 1.0, "c_fa": 20.0})
    assert "minDCF(0.01)" in cautions(dear)[0]


def test_repeated_and_contradictory_trials():
    pairs = [(0, 1), (1, 0), (0, 2), (0, 1), (0, 2), (0, 2)]
    number, rows = repeated_trials(trials_of("abc", pairs, [1, 0, 0, 0, 0, 1]))
    assert number == 3 and rows.tolist() == [3, 5]
