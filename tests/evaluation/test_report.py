"""Reports: what a page shows, that it can be made again from files alone, several runs, and broken folders."""

import base64
import csv
import json
import re
import shutil
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speakernet.cli import main
from speakernet.data.audio import read_audio_bytes, write_audio
from speakernet.evaluation import plots
from speakernet.evaluation.files import Evaluation, embedding_map, read_run
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.report import write_evaluation, write_report, write_side_by_side
from speakernet.evaluation.results import Results

sys.path.insert(0, str(Path(__file__).parent))
from report_runs import make_run, make_trials

SECTIONS = ("result", "errors", "data", "training", "slices", "robustness", "hardest", "embeddings", "facts")
VOID = {"meta", "link", "br", "img"}
JUNK: list[Any] = [[], {}, "text", 3, 1e400, -1, True, [[]], [{}], {"a": []}, [1, 2, 3], {"rows": 3}]


class Checker(HTMLParser):
    """Counts what a page holds and whether every element is closed."""

    def __init__(self, path):
        super().__init__()
        self.open, self.ids, self.links, self.tags = [], [], [], set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        assert not self.open and len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.add(tag)
        self.ids += [values["id"]] if values.get("id") else []
        self.links += [values[name] for name in ("href", "src", "xlink:href") if values.get(name)]
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def edit(path, **changes):
    """Change a JSON file; None removes a key."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


@pytest.fixture()
def trials(tmp_path):
    return make_trials(tmp_path / "trials.txt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with its report; tests work on copies."""
    folder = tmp_path_factory.mktemp("finished") / "first"
    write_report(folder, make_run(folder, make_trials(folder.parent / "trials.txt")))
    return folder


@pytest.fixture(autouse=True)
def _pictures_are_made_once(finished, monkeypatch):
    """Only the pictures of `finished` are real: drawing the PNGs of all pages took half of the time."""

    def mark(figure, path):
        path.parent.mkdir(exist_ok=True)
        path.touch()

    monkeypatch.setattr(plots, "save_png", mark)


@pytest.fixture()
def run(tmp_path, finished):
    return Path(shutil.copytree(finished, tmp_path / "exps" / "first"))


def test_page(run):
    page, results = Checker(run / "report.html"), json.loads((run / "results.json").read_text())
    text = unescape(page.text)
    assert [one for one in page.ids if one in SECTIONS] == list(SECTIONS)
    assert all(link.startswith("#") or link == "data:," for link in page.links)
    assert not page.tags & {"script", "iframe", "img"} and "@import" not in text and "url(http" not in text
    low, high = results["eer_interval_percent"]
    for expected in (
        *(f"<b>{results['eer_percent']:.2f} %</b>", f"95 %: {low:.2f} to {high:.2f} %"),
        *("Held-out EER", "Margin", "minDCF at 0.01", "batch_size: 64", "8.0 GiB", "only 6 targets"),
        *("<td>Training</td><td>train_list.txt</td>", "<td>Validation</td><td>held_out.txt</td>"),
        *("<td>Test</td><td>trials.txt</td>", "96 speakers, 1,440 utterances, 1.4 hours"),
        "chooses the best checkpoint</td>",
        *("Data wait 3 %", "95 % interval</text>", "1.44 million parameters", "4 epochs in 0:04:00"),
        *("trained on 96 speakers", "tested on trials.txt", f"At threshold {results['eer_threshold']:.2f}"),
    ):
        assert expected in text
    assert "--config &lt;exp01.yaml&gt;" in page.text and "<exp01" not in page.text
    # A constant is not drawn; slices with few targets are grey; checksums are short.
    assert not (run / "plots" / "training_data_wait_share.png").exists()
    assert text.count('<tr class="weak">') == 2
    pngs = {path.stem for path in (run / "plots").glob("*.png") if path.read_bytes().startswith(b"\x89PNG")}
    assert {"det", "scores", "thresholds", "calibration", "slices_1", "sweep_noise", "embeddings_1"} <= pngs
    assert {"training_loss", "training_margin"} <= pngs


def test_operating_points_are_those_of_the_scores(run):
    found = read_run(run)
    targets, others = found.scores[found.labels == 1], found.scores[found.labels == 0]
    pattern = r"<td>([^<]*)</td>" + r'<td class="number">([^<]*)</td>' * 4
    cells = re.findall(pattern, (run / "report.html").read_text())
    assert cells[0][0] == "equal error rate" and any(name.startswith("false accepts 1 %") for name, *_ in cells)
    for name, threshold, refused, accepted, cost in cells:
        assert (cost != "–") == name.startswith("lowest cost")
        if threshold == "refuse all" or name == "equal error rate":
            continue
        # The page rounds thresholds to four digits and rates to two.
        low, high = float(threshold) - 6e-5, float(threshold) + 6e-5
        assert np.mean(targets < low) - 6e-5 <= float(refused.split()[0]) / 100 <= np.mean(targets < high) + 6e-5
        assert np.mean(others >= high) - 6e-5 <= float(accepted.split()[0]) / 100 <= np.mean(others >= low) + 6e-5


def test_facts(run):
    sha = "d" * 64
    (run / "metrics.jsonl").unlink()
    edit(
        run / "results.json",
        backend={"score": "cosine", "subtract_mean": False},
        thresholds=[{"name": "far_1%", "threshold": 0.5, "list": "held_out.txt"}],
        machine={"cpu_cores": 16, "gpus": [{"name": "a GPU", "memory_bytes": 2**36}]},
        checkpoint={"path": "best.pt", "sha256": sha},
        performance={"utterances_per_second": 812.5, "process_peak_bytes": 2**31},
        of_a_later_version=7,
    )
    found = dict(re.findall("<tr><th>([^<]*)</th><td>([^<]*)</td></tr>", unescape(write_report(run).read_text())))
    expected = {
        "model.options.pooling": "SAP",
        "num_parameters": "1,437,080",
        "backend.subtract_mean": "no",
        "kept_thresholds": "0.5000: false accepts 1 % at most on held_out.txt",
        "checkpoint.sha256": sha,
        "gpus.1.memory_bytes": "64.0 GiB",
        "of_a_later_version": "7",
        "process_peak_bytes": "2.0 GiB",
    }
    assert {name: found.get(name) for name in expected} == expected


def test_hardest_trials(run, trials, tmp_path):
    text, scores, corpus = unescape((run / "report.html").read_text()), read_run(run).scores, tmp_path / "corpus"
    for label, worst in ((0, np.argmax), (1, np.argmin)):
        rows = np.flatnonzero(trials.labels == label)
        row = int(rows[worst(scores[rows])])
        cells = ""
        for name in (trials.names[int(trials.enrol[row])], trials.names[int(trials.test[row])]):
            # `dev/s03/2.wav` is utterance 14 of the list: 2.4 s by `make_run`.
            seconds = list(trials.names).index(name) / 10 + 1
            cells += f'<td>{name}<div class="quiet">speaker {name.split("/")[1]}, {seconds:.1f} s</div></td>'
        assert f'{cells}<td class="number">{scores[row]:.4f}</td>' in text
    for row, name in enumerate(trials.names):
        write_audio(corpus / name, np.full(1600 + row, 0.25, dtype=np.float32))
    assert main(["report", str(run), "--audio", str(corpus)]) == 0
    page = Checker(run / "report.html")
    sounds = [link for link in page.links if link.startswith("data:audio/flac;base64,")]
    assert len(sounds) == 48
    first = trials.names.index(re.findall(r"<td>([^<]*)<div", page.text)[0])
    played = read_audio_bytes(base64.b64decode(sounds[0].partition(",")[2]), "first")
    assert len(played) == 1600 + first and np.allclose(played, 0.25, atol=1e-4)


def without_curves(path):
    # Scores are written with six digits: a curve may move by less than a thousandth of its width.
    return re.sub(r"<svg.*?</svg>", "<svg>", path.read_text(), flags=re.DOTALL)


def test_page_again_from_files_alone(run):
    first, results = without_curves(run / "report.html"), json.loads((run / "results.json").read_text())
    assert main(["report", str(run)]) == 0
    assert without_curves(run / "report.html") == first
    found = read_run(run)
    assert eer(found.scores, found.labels) == pytest.approx(results["eer_percent"], abs=1e-3)


def test_unlabelled_pairs(tmp_path, trials, run):
    folder = run / "eval" / "pairs"
    given = make_run(folder, trials)
    for name in ("metrics.jsonl", "config.yaml", "results.json"):
        (folder / name).unlink()
    trials.labels = None
    kept = [{"name": "eer", "threshold": 0.2, "list": "held_out.txt"}, {"name": "far_1%", "threshold": 0.5}]
    facts = {"num_trials": len(trials), "why_no_eer": "the list is unlabelled", "thresholds": kept}
    facts["lists"] = [{"role": "trials", "name": "pairs.txt", "sha256": ""}]
    results = Results.from_dict({**facts, "checkpoint": {"path": str(run / "best.pt"), "sha256": ""}})
    (folder / "report_arrays.npz").write_bytes(b"of an earlier evaluation")
    llrs = 10 * given.scores - 3
    evaluation = Evaluation(trials, given.scores, results, llrs, given.units, given.speakers)
    written = write_evaluation(folder, evaluation)
    assert sorted(written) == sorted(path.name for path in folder.iterdir() if path.is_file())
    assert [path.name for path in (folder / "plots").iterdir()] == ["scores.png"]
    rows = list(csv.reader((folder / "decisions.csv").open()))
    assert rows[0] == ["enrol", "test", "score", "llr", "eer", "far_1%"] and len(rows) == 1 + len(trials)
    for (*pair, score, llr, at_eer, at_far), wanted in zip(rows[1:], given.scores, strict=True):
        assert len(pair) == 2 and float(score) == pytest.approx(wanted, abs=1e-6)
        assert float(llr) == pytest.approx(10 * wanted - 3, abs=1e-3)
        assert (at_eer, at_far) == tuple("accept" if wanted >= limit else "refuse" for limit in (0.2, 0.5))
    first, page = without_curves(folder / "report.html"), Checker(folder / "report.html")
    assert f"{np.count_nonzero(given.scores >= 0.2):,} of 1,128 pairs accepted at threshold 0.2000" in page.text
    assert "No error rates: the list is unlabelled." in page.text
    assert {"result", "trials", "facts"} <= set(page.ids) and not {"training", "errors"} & set(page.ids)
    assert f'<td class="number">{rows[1][2]}</td><td class="number">{rows[1][3]}</td><td>{rows[1][4]}</td>' in page.text
    assert "The first 100 of 1,128; all are in decisions.csv." in page.text
    assert main(["report", str(folder)]) == 0
    assert without_curves(folder / "report.html") == first


def test_run_that_still_trains(run):
    for name in ("results.json", "scores.txt", "report_arrays.npz"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    page = Checker(write_report(run))
    assert "Not evaluated yet" in page.text and "training" in page.ids and "errors" not in page.ids


def test_two_runs(run, trials, tmp_path, monkeypatch, capsys):
    second = tmp_path / "exps" / "second"
    make_run(second, trials, noise=3.0, seed=2)
    shutil.copy(run / "report_arrays.npz", second)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(second)]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    page = Checker(tmp_path / "comparison.html")
    assert "EER (%): first is better than second by" in page.text and ": significant" in page.text
    assert "<td>data.batch_size</td><td>64</td><td>128</td>" in page.text and "model.name" not in page.text
    assert (tmp_path / "comparison_plots" / "det.png").is_file()
    with pytest.raises(ValueError, match="twice"):
        write_side_by_side([run, run.parent / "first"], tmp_path / "both.html")
    assert main(["report", str(run), "--output", str(tmp_path / "x.html")]) == 1


def test_runs_on_different_lists_are_not_compared(run, tmp_path):
    second = tmp_path / "exps" / "second"
    trials = make_trials(tmp_path / "short.txt", num_speakers=8)
    make_run(second, trials)
    np.savez(second / "report_arrays.npz", labels=trials.labels)
    text = write_side_by_side([run, second], tmp_path / "both.html").read_text()
    assert "must not be compared" in text and "better than" not in text


def test_large_margin_stage_continues_the_curves(run):
    before = read_run(run).metrics
    last = max(record["epoch"] for record in before)
    (run / "large_margin").mkdir()
    record = {"kind": "evaluation", "epoch": 1, "step": 5, "eer_percent": 1.5}
    (run / "large_margin" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    after = read_run(run).metrics
    assert len(after) == len(before) + 1 and after[-1]["epoch"] == last + 1
    assert f"After epoch {last}: the large-margin stage." in write_report(run).read_text()


def test_map_is_the_projection_on_the_main_plane(random):
    plane = np.linalg.qr(random.standard_normal((5, 2)))[0]
    flat = random.standard_normal((12, 2)) * [3.0, 1.0]
    embeddings = (flat @ plane.T).astype(np.float32)
    drawn = embedding_map(embeddings, np.arange(12) // 4, [f"a/s{row // 4}/v/{row}.wav" for row in range(12)])
    points = drawn["map_points"]
    assert sum(drawn["map_shares"]) == pytest.approx(1.0, abs=1e-6) and drawn["map_names"].tolist() == ["v", "v", "v"]
    distances = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    np.testing.assert_allclose(np.linalg.norm(points[:, None] - points[None], axis=2), distances, atol=1e-4)


@pytest.mark.parametrize("content", [None, "[]", "3", "null", '"text"', "[" * 100_000, "{", "", "\udcff"])
def test_broken_results_are_named(tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"results\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("eer_percent", "text"), ("eer_interval_percent", 3), ("min_dcf", {"half": 0.5}), ("slices", [{"by": "x"}])),
        *(("thresholds", [{"threshold": 0.1}]), ("dcf_costs", {"c_miss": 1.0}), ("training", {"hours": "many"})),
        *(("det_band", {"miss_low_percent": [1.0]}), ("calibration", {"weights": 3, "offset": 0.0, "inputs": []})),
    ],
)
def test_incomplete_results_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Results.from_dict({name: value})


def test_unusable_metrics_are_skipped(tmp_path):
    lines = [
        {"kind": "step", "step": {}, "epoch": "x", "loss": 1.0, "step_seconds": "slow", "second_stage_from": 3},
        {"kind": "evaluation", "step": 2, "epoch": 1, "eer_percent": 9.0, "eer_interval_percent": 3},
        {"kind": "epoch", "step": 2, "epoch": None, "evaluation_seconds": []},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Held-out EER 9 %" in write_report(tmp_path).read_text()


MAP = {"map_points": np.zeros((3, 2)), "map_names": np.array(["a", "b"]), "map_shares": np.array([0.5, 0.2])}


@pytest.mark.parametrize(
    "arrays",
    [{"labels": np.array(["a", "b"])}, {"map_points": np.zeros((3, 2))}, MAP | {"map_speakers": [0, 1, 9]}, None],
)
def test_junk_arrays_are_named(run, arrays):
    path = run / "report_arrays.npz"
    path.write_bytes(b"PK no archive")
    if arrays is not None:
        np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"report_arrays\.npz"):
        write_report(run)


def test_invisible_characters_are_written_out(run):
    edit(run / "results.json", command="exp\u202etxt.exe\u2066 a\x07b\tc")
    text = write_report(run).read_text()
    assert "exp\\u202etxt.exe\\u2066" in text and "a\\u0007b\tc" in text
