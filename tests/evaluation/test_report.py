"""Reports: what stands on the page, that it can be made again from files alone, and several runs side by side."""

import base64
import csv
import json
import re
import shutil
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from speakernet.cli import main
from speakernet.data.audio import read_audio_bytes, write_audio
from speakernet.evaluation.evaluate import Evaluation
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.report import sections, write_report, write_side_by_side
from speakernet.evaluation.results import Results
from speakernet.evaluation.run_data import read_run

sys.path.insert(0, str(Path(__file__).parent))
from report_runs import make_run, make_trials

SECTIONS = ("result", "training", "errors", "slices", "robustness", "hardest", "embeddings", "facts")
VOID = {"meta", "link", "br", "img"}


class Checker(HTMLParser):
    """Counts what a page holds and whether every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if values.get("id") else []
        self.links += [values[name] for name in ("href", "src", "xlink:href") if values.get(name)]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(path: Path) -> tuple[str, Checker]:
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    return text, checker


@pytest.fixture()
def trials(tmp_path):
    return make_trials(tmp_path / "trials.txt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with its report; tests work on copies."""
    folder = tmp_path_factory.mktemp("finished") / "first"
    write_report(folder, **make_run(folder, make_trials(folder.parent / "trials.txt")))
    return folder


@pytest.fixture(autouse=True)
def _pictures_are_made_once(finished, monkeypatch):
    """Only the pictures of `finished` are real: pages made after it are read, and their PNGs took half of the time."""

    def mark(figure, path):
        path.parent.mkdir(exist_ok=True)
        path.touch()

    monkeypatch.setattr(sections, "save_png", mark)


@pytest.fixture()
def run(tmp_path, finished):
    return Path(shutil.copytree(finished, tmp_path / "exps" / "first"))


def test_every_part_is_there_and_nothing_is_loaded_from_anywhere(run):
    text, checker = checked(run / "report.html")
    assert set(SECTIONS) <= set(checker.ids)
    assert len(set(checker.ids)) == len(checker.ids)
    assert all(link.startswith("#") or link == "data:," for link in checker.links)
    assert not checker.tags & {"script", "iframe", "img"} and "@import" not in text and "url(http" not in text
    results = json.loads((run / "results.json").read_text())
    assert f"{results['eer_percent']:.2f} %" in text
    low, high = results["eer_interval_percent"]
    assert f"95 %: {low:.2f} to {high:.2f} %" in text
    for expected in (
        "Held-out EER",
        "Margin",
        "Data wait",
        "minDCF at 0.01",
        "batch_size: 64",
        "8.0 GiB",
        "only 6 targets",
    ):
        assert expected in text
    assert "--config &lt;exp01.yaml&gt;" in text and "<exp01" not in text
    pngs = {path.stem for path in (run / "plots").glob("*.png") if path.read_bytes().startswith(b"\x89PNG")}
    assert {"det", "scores", "calibration", "slices_1", "sweep_noise", "embeddings_1", "training_loss"} <= pngs


def test_the_top_says_what_was_trained_and_what_came_of_it(run):
    text, _ = checked(run / "report.html")
    header = unescape(text[text.index("<header>") : text.index("</header>")])
    for part in ("ResNetSE34L", "1.44 million parameters", "96 training speakers, 1.4 hours", "2026-01-02 10:20"):
        assert part in header
    # 40 steps of 4.5 s and 4 evaluations of 15 s.
    assert "4 epochs in about 4 min" in header and "tested on trials.txt" in header
    results = json.loads((run / "results.json").read_text())
    share = f"{results['eer_percent']:.1f} %"
    sentence = f"At threshold {results['eer_threshold']:.2f}, {share} of impostors pass and {share} of true pairs are"
    assert sentence in header
    tile = text[text.index('<div class="tile main">') : text.index('<div class="tile">')]
    assert '<div class="range"' in tile and "The best checkpoint was chosen on this very list." in tile


def test_errors_come_before_training_and_lists_are_told_apart(run):
    text, checker = checked(run / "report.html")
    assert [one for one in checker.ids if one in {*SECTIONS, "data"}][:4] == ["result", "errors", "data", "training"]
    for name, listed in (("Training", "train_list.txt"), ("Validation", "held_out.txt"), ("Test", "trials.txt")):
        assert f"<td>{name}</td><td>{listed}</td>" in text
    assert "96 speakers, 1,440 utterances, 1.4 hours" in text


def test_trials_that_choose_nothing_are_said_to_be_watched(run):
    assert "chooses the best checkpoint</td>" in (run / "report.html").read_text()
    (run / "config.yaml").write_text("training: {final_model: last}\ndata: {batch_size: 64}\n")
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert "is watched while training</td>" in text and "chooses the best checkpoint</td>" not in text


def test_operating_points_are_those_of_the_scores(run):
    text, _ = checked(run / "report.html")
    found = read_run(run)
    targets, others = found.scores[found.labels == 1], found.scores[found.labels == 0]
    cells = re.findall(r"<td>([^<]*)</td>" + r'<td class="number">([^<]*)</td>' * 4, text)
    assert cells[0][0] == "equal error rate" and any(name.startswith("false accepts 1 %") for name, *_ in cells)
    for name, threshold, refused, accepted, cost in cells:
        assert (cost != "–") == name.startswith("lowest cost")
        if threshold == "refuse all" or name == "equal error rate":
            continue
        # The page rounds thresholds to four digits and rates to two.
        low, high = float(threshold) - 6e-5, float(threshold) + 6e-5
        assert np.mean(targets < low) - 6e-5 <= float(refused.split()[0]) / 100 <= np.mean(targets < high) + 6e-5
        assert np.mean(others >= high) - 6e-5 <= float(accepted.split()[0]) / 100 <= np.mean(others >= low) + 6e-5
    assert (run / "plots" / "thresholds.png").is_file()


def test_what_never_changed_is_said_and_not_drawn(run):
    text, _ = checked(run / "report.html")
    assert "The same all the time, and not drawn: Data wait 3 %." in text
    assert not (run / "plots" / "training_data_wait_share.png").exists()
    assert (run / "plots" / "training_margin.png").is_file()


def test_slices_with_few_targets_are_grey_and_checksums_short(run):
    text, _ = checked(run / "report.html")
    assert text.count('<tr class="weak">') == 2 and "Grey: fewer than 30 targets" in text
    assert "c" * 12 + "…" in text and "c" * 13 not in text


def test_what_was_measured_once_and_what_is_not_divided_is_said_and_not_drawn(run):
    shutil.rmtree(run / "plots")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    evaluations = [line for line in lines if '"evaluation"' in line]
    (run / "metrics.jsonl").write_text("\n".join(line for line in lines if line not in evaluations[1:]) + "\n")
    results = json.loads((run / "results.json").read_text())
    del results["slices"][0]["rows"][1]
    (run / "results.json").write_text(json.dumps(results))
    text, checker = checked(write_report(run))
    assert "Measured once: Held-out EER 3 %." in text and not (run / "plots" / "training_eer_percent.png").exists()
    assert "By duration of the shorter side: all trials are in one group, under 2 s." in text
    assert "slices" in checker.ids and not (run / "plots" / "slices_1.png").exists()


def test_facts_are_in_words(run):
    results = json.loads((run / "results.json").read_text())
    sha = "d" * 64
    results |= {
        "backend": {"score": "cosine", "eval_frames": 400, "subtract_mean": False},
        "thresholds": [{"name": "far_1%", "threshold": 0.5, "list": "held_out.txt"}],
        "timings_seconds": {"embedding": 2.0, "scoring": 0.25},
        "seconds": 2.5,
        "machine": {"cpu_cores": 16, "gpus": [{"name": "a GPU", "memory_bytes": 2**36}], "versions": {"torch": "2.9"}},
        "versions": {"torch": "2.9"},
        "checkpoint": {"path": "best.pt", "sha256": sha},
    }
    # Nothing of it is a fact, and drawing it takes time.
    (run / "metrics.jsonl").unlink()
    del results["slices"], results["sweep"]

    def facts() -> dict[str, str]:
        (run / "results.json").write_text(json.dumps(results))
        text, _ = checked(write_report(run))
        return dict(re.findall("<tr><th>([^<]*)</th><td>([^<]*)</td></tr>", unescape(text)))

    found = facts()
    assert found["Model"] == "ResNetSE34L (pooling SAP)" and found["Parameters"] == "1,437,080"
    assert found["Scoring"] == "score cosine, frames of 10 ms a crop 400, mean subtracted no"
    assert found["Kept thresholds"] == "0.5000: false accepts 1 % at most on held_out.txt"
    assert found["Checkpoint"] == f"best.pt ({sha[:12]}…)" and found["Costs"] == "of a miss 1, of a false accept 1"
    assert (found["Processor cores"], found["GPUs"]) == ("16", "name a GPU, memory 64.0 GiB")
    assert found["Time"] == "embedding 2 s (24 utterances/s), scoring 0.25 s, in all 2.5 s"
    # Read, not made: no rate, no time that would look like one.
    results["timings_seconds"] = {"reading_kept_embeddings": 2.0, "scoring": 0.25}
    assert facts()["Time"] == "embeddings kept from before, not made anew, scoring 0.25 s"


def test_an_evaluation_of_its_own_takes_the_facts_of_the_run_that_it_scored(run, trials):
    folder = run / "eval" / "other"
    given = make_run(folder, trials)
    results = json.loads((folder / "results.json").read_text())
    del results["training"]
    results["checkpoint"]["path"] = str(run / "best.pt")
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "metrics.jsonl").unlink()
    text, _ = checked(write_report(folder, **given))
    assert "96 training speakers, 1.4 hours" in text


def test_the_hardest_trials_are_named_worst_first(run, trials):
    text = unescape((run / "report.html").read_text())
    scores = read_run(run).scores
    for label, worst in ((0, np.argmax), (1, np.argmin)):
        rows = np.flatnonzero(trials.labels == label)
        row = int(rows[worst(scores[rows])])
        pair = [trials.names[int(trials.enrol[row])], trials.names[int(trials.test[row])]]
        cells = ""
        for name in pair:
            # `dev/s03/2.wav` is utterance 14 of the list: 2.4 s by `make_run`.
            seconds = list(trials.names).index(name) / 10 + 1
            cells += f'<td>{name}<div class="quiet">speaker {name.split("/")[1]}, {seconds:.1f} s</div></td>'
        assert f'{cells}<td class="number">{scores[row]:.4f}</td>' in text


def test_the_hardest_trials_can_be_played_where_that_is_asked_for(run, trials, tmp_path):
    text, checker = checked(run / "report.html")
    assert "audio" not in checker.tags and "To listen to them: speakernet report" in text
    for row, name in enumerate(trials.names):
        write_audio(tmp_path / "corpus" / name, np.full(1600 + row, 0.25, dtype=np.float32))
    assert main(["report", str(run), "--audio", str(tmp_path / "corpus")]) == 0
    text, checker = checked(run / "report.html")
    sounds = [link for link in checker.links if link.startswith("data:audio/flac;base64,")]
    assert len(sounds) == 48 and "media-src data:" in text
    first = trials.names.index(re.findall(r"<td>([^<]*)<div", text)[0])
    played = read_audio_bytes(base64.b64decode(sounds[0].partition(",")[2]), "first")
    assert len(played) == 1600 + first and np.allclose(played, 0.25, atol=1e-4)


def test_audio_that_is_not_there_is_told_and_the_page_stays(run, tmp_path, capsys):
    before = (run / "report.html").read_text()
    (tmp_path / "empty").mkdir()
    for folder, said in (("nowhere", "no such folder"), ("empty", "No such file")):
        assert main(["report", str(run), "--audio", str(tmp_path / folder)]) == 1
        assert said in capsys.readouterr().err
    assert main(["report", str(run), str(run.parent), "--audio", str(tmp_path)]) == 1
    assert "--audio is for one run" in capsys.readouterr().err
    (run / "report_arrays.npz").unlink()
    assert main(["report", str(run), "--audio", str(tmp_path)]) == 1
    assert "no labelled scores" in capsys.readouterr().err
    assert (run / "report.html").read_text() == before


def test_the_det_curve_has_a_band(run):
    band = json.loads((run / "results.json").read_text())["det_band"]
    for low, high in zip(band["miss_low_percent"], band["miss_high_percent"], strict=True):
        assert 0 <= low <= high <= 100
    text, _ = checked(run / "report.html")
    assert "95 % interval</text>" in text and "Bands: 95 % intervals of the misses, over speakers." in text


def without_curves(text: str) -> str:
    # Scores are written with six digits: a curve may move by less than a thousandth of its width.
    return re.sub(r"<svg.*?</svg>", "<svg>", text, flags=re.DOTALL)


def test_a_report_made_again_from_files_alone_is_the_same(run):
    first = without_curves((run / "report.html").read_text())
    assert main(["report", str(run)]) == 0
    assert without_curves((run / "report.html").read_text()) == first


def test_an_unlabelled_list_gets_a_page_without_error_rates(tmp_path, trials):
    folder = tmp_path / "scores_only"
    given = make_run(folder, trials)
    trials.labels = None
    facts = {"num_trials": len(trials), "eer_percent": None, "why_no_eer": "the list is unlabelled"}
    (folder / "results.json").write_text(json.dumps(facts))
    text, checker = checked(write_report(folder, trials=trials, scores=given["scores"]))
    assert "No error rates: the list is unlabelled." in text and "errors" not in checker.ids


def test_pairs_without_labels_show_scores_ratios_and_decisions(tmp_path, trials, run):
    folder = run / "eval" / "pairs"
    given = make_run(folder, trials)
    for name in ("metrics.jsonl", "config.yaml", "results.json"):
        (folder / name).unlink()
    trials.labels = None
    kept = [{"name": "eer", "threshold": 0.2, "list": "held_out.txt"}, {"name": "far_1%", "threshold": 0.5}]
    facts = {"num_trials": len(trials), "why_no_eer": "the list is unlabelled", "thresholds": kept}
    facts["lists"] = [{"role": "trials", "name": "pairs.txt", "sha256": ""}]
    results = Results.from_dict({**facts, "checkpoint": {"path": str(run / "best.pt"), "sha256": ""}})
    llrs = 10 * given["scores"] - 3
    (folder / "report_arrays.npz").write_bytes(b"of an earlier evaluation")
    evaluation = Evaluation(trials, given["scores"], results, llrs, given["embeddings"], given["speakers"])
    written = evaluation.write(folder)
    assert sorted(written) == sorted(path.name for path in folder.iterdir() if path.is_file())
    assert set(written) == {"results.json", "scores.txt", "report.html", "decisions.csv"}
    assert [path.name for path in (folder / "plots").iterdir()] == ["scores.png"]
    rows = list(csv.reader((folder / "decisions.csv").open()))
    assert rows[0] == ["enrol", "test", "score", "llr", "eer", "far_1%"] and len(rows) == 1 + len(trials)
    for (*pair, score, llr, at_eer, at_far), wanted in zip(rows[1:], given["scores"], strict=True):
        assert len(pair) == 2 and float(score) == pytest.approx(wanted, abs=1e-6)
        assert float(llr) == pytest.approx(10 * wanted - 3, abs=1e-3)
        assert (at_eer, at_far) == tuple("accept" if wanted >= limit else "refuse" for limit in (0.2, 0.5))
    first = (folder / "report.html").read_text()
    text, checker = checked(folder / "report.html")
    accepted = np.count_nonzero(given["scores"] >= 0.2)
    assert f"{accepted:,} of 1,128 pairs accepted at threshold 0.2000 (equal error rate on held_out.txt)." in text
    assert {"result", "trials", "facts"} <= set(checker.ids) and not {"training", "errors"} & set(checker.ids)
    assert f'<td class="number">{rows[1][2]}</td><td class="number">{rows[1][3]}</td><td>{rows[1][4]}</td>' in text
    assert "The first 100 of 1,128; all are in decisions.csv." in text
    assert main(["report", str(folder)]) == 0
    again = (folder / "report.html").read_text()
    assert without_curves(again) == without_curves(first)


def test_pairs_without_labels_say_what_is_missing(tmp_path, trials):
    trials.labels = None
    scores = np.linspace(0, 1, len(trials))
    evaluation = Evaluation(trials, scores, Results(num_trials=len(trials), why_no_eer="the list is unlabelled"))
    assert set(evaluation.write(tmp_path / "eval")) == {"results.json", "scores.txt", "report.html"}
    text, _ = checked(tmp_path / "eval" / "report.html")
    assert "No decisions: there is no threshold for this way of scoring." in text
    assert "No log-likelihood ratios: there is no calibration for this way of scoring." in text
    assert "--evaluation.calibration_list" in text
    lines = evaluation.decisions.lines()
    assert lines[0].split() == ["enrol", "test", "score"] and lines[11] == "… and 1,118 more"


def test_a_run_that_still_trains_shows_its_curves(run):
    for name in ("results.json", "scores.txt", "report_arrays.npz"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    text, checker = checked(write_report(run))
    assert "Not evaluated yet" in text and "training" in checker.ids and "errors" not in checker.ids


def test_an_evaluation_shows_the_training_of_its_checkpoint(run, trials, tmp_path):
    folder = run / "eval" / "other"
    given = make_run(folder, trials)
    (folder / "metrics.jsonl").unlink()
    (folder / "config.yaml").unlink()
    results = json.loads((folder / "results.json").read_text())
    del results["slices"], results["sweep"]
    for checkpoint in (str(run / "best.pt"), {"path": str(run / "best.pt"), "sha256": ""}):
        (folder / "results.json").write_text(json.dumps({**results, "checkpoint": checkpoint}))
        text, checker = checked(write_report(folder, **given))
        assert "training" in checker.ids and "batch_size: 64" in text


def test_an_empty_folder_and_broken_results_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"neither results\.json nor metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json: damaged .*evaluate again to write them anew"):
        write_report(tmp_path)


def test_two_runs_side_by_side(run, trials, tmp_path, monkeypatch, capsys):
    second = tmp_path / "exps" / "second"
    make_run(second, trials, noise=3.0, seed=2)
    shutil.copy(run / "report_arrays.npz", second)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(second)]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    text, checker = checked(tmp_path / "comparison.html")
    assert "EER (%): first is better than second by" in text and ": significant" in text
    assert "<td>data.batch_size</td><td>64</td><td>128</td>" in text and "model.name" not in text
    assert (tmp_path / "comparison_plots" / "det.png").is_file()
    assert len(set(checker.ids)) == len(checker.ids)


def test_runs_on_different_lists_are_not_compared(run, tmp_path):
    second = tmp_path / "exps" / "second"
    trials = make_trials(tmp_path / "short.txt", num_speakers=8)
    make_run(second, trials)
    np.savez(second / "report_arrays.npz", labels=trials.labels)
    text, _ = checked(write_side_by_side([run, second], tmp_path / "both.html"))
    assert "must not be compared" in text and "better than" not in text


def test_a_run_named_twice_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="the same folder twice"):
        write_side_by_side([run, run.parent / "first"], tmp_path / "both.html")
    assert main(["report", str(run), "--output", str(tmp_path / "x.html")]) == 1


def test_scores_are_read_back_as_they_were_evaluated(run):
    found = read_run(run)
    results = json.loads((run / "results.json").read_text())
    assert eer(found.scores, found.labels) == pytest.approx(results["eer_percent"], abs=1e-3)


def test_the_large_margin_stage_goes_on_in_the_curves(run):
    before = read_run(run).metrics
    last = max(record["epoch"] for record in before)
    (run / "large_margin").mkdir()
    record = {"kind": "evaluation", "epoch": 1, "step": 5, "eer_percent": 1.5}
    (run / "large_margin" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    after = read_run(run).metrics
    assert len(after) == len(before) + 1 and after[-1]["epoch"] == last + 1
    assert main(["report", str(run)]) == 0
    text, _ = checked(run / "report.html")
    assert f"After epoch {last}: the large-margin stage." in text
