"""Reports and figures: the content of pages, remaking them from files, several runs, broken
folders.
"""

import csv
import dataclasses
import html
import json
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import speakernet
from speakernet.data.audio import AudioError, write_audio
from speakernet.evaluation.calibration import BY_QUALITY
from speakernet.evaluation.files import Evaluation, read_run
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.plots import PALETTE
from speakernet.evaluation.report import write_evaluation, write_report
from speakernet.evaluation.report.page import WORDS
from speakernet.evaluation.results import Results
from tests.commands import run_command
from tests.evaluation.report_runs import make_run, make_trials
from tests.outcomes import results_of

SECTIONS = [
    "result",
    "errors",
    "data",
    "training",
    "slices",
    "robustness",
    "hardest",
    "embeddings",
    "facts",
    "words",
]
VOID = {"meta", "link", "br", "img", "wbr"}


class Checker(HTMLParser):
    """Counts the elements of a page and checks that every one is closed."""

    def __init__(self, path):
        super().__init__()
        self.open = []
        self.ids = []
        self.links = []
        self.tags = set()
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


@pytest.fixture
def trials(tmp_path):
    return make_trials(tmp_path / "trials.txt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with its report; tests use copies."""
    folder = tmp_path_factory.mktemp("finished") / "first"
    write_report(folder, make_run(folder, make_trials(folder.parent / "trials.txt")))
    return folder


@pytest.fixture(autouse=True)
def _draw_figures_of_finished(finished, blank_figures):
    """The figures of `finished` are drawn."""


@pytest.fixture
def run(tmp_path, finished):
    return Path(shutil.copytree(finished, tmp_path / "exps" / "first"))


def test_page(run):
    page = Checker(run / "report.html")
    results = results_of(run)
    text = unescape(page.text)
    assert [anchor for anchor in page.ids if anchor in SECTIONS] == SECTIONS
    anchors = {link.removeprefix("#") for link in page.links} - {"data:,"}
    assert anchors | set(re.findall(r"url\(#([^)]+)\)", page.text)) <= set(page.ids)
    assert not any(light in page.text.split("</style>")[-1] for light, _ in PALETTE.values())
    assert (
        not page.tags & {"script", "iframe", "img"}
        and "@import" not in text
        and "url(http" not in text
    )
    low, high = results["eer_interval_percent"]
    for expected in (
        f"<b>{results['eer_percent']:.2f} %</b>",
        f"95 %: {low:.2f} to {high:.2f} %",
        "Held-out EER",
        "Margin",
        "minDCF at 0.01",
        "batch_size: 64",
        '"memory_bytes": 8589934592',
        "only 6 targets",
        "<td>Training</td><td>train_list.txt</td>",
        "<td>Validation</td><td>held_out.txt</td>",
        "<td>Test</td><td>trials.txt</td>",
        "96 speakers, 1,440 utterances, 1.4 hours",
        "chooses the best checkpoint</td>",
        "95 % interval</text>",
        "1.44 million parameters",
        "4 epochs in 0:04:00",
        "trained on 96 speakers",
        "tested on trials.txt",
        f"At threshold {results['eer_threshold']:.4f}",
    ):
        assert expected in text
    assert "--config &lt;exp01.yaml&gt;" in page.text and "<exp01" not in page.text
    # A verdict on top, warnings in one box, details folded.
    assert (
        text.index("Not usable yet")
        < text.index("The best checkpoint was chosen on this very list")
        < text.index("<h3>")
    )
    folded = re.findall(r'id="(\w+)"><details>', text)
    assert folded == ["data", "training", "hardest", "embeddings", "facts", "words"]
    # Constants are not plotted; slices with few targets are grey; checksums are shortened.
    assert not (run / "plots" / "training_data_wait_share.png").exists()
    assert text.count('<tr class="weak">') == 2
    for name in [
        "det",
        "scores",
        "slices_1",
        "sweep_noise",
        "embeddings",
        "training_loss",
    ]:
        assert (run / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("cost", "moved", "embedding", "notes", "verdict"),
    [
        (1.2, 0.0, "whole", [], "Calibrate again before use"),
        (0.3, 5.0, "whole", [], "Of limited use"),
        (0.3, 0.0, "crops", [], "Usable, but"),
        (0.3, 0.0, "whole", [f"{BY_QUALITY}: EER 1 %"], "Usable, but"),
        (0.3, None, "whole", [], "Not ready for decisions"),
    ],
)
def test_verdict_agrees_with_the_figures(tmp_path, trials, cost, moved, embedding, notes, verdict):
    given = make_run(tmp_path / "run", trials, noise=0.5)
    limit = given.results.eer_threshold + (moved or 0.0)
    kept = [] if moved is None else [{"name": "far_1%", "threshold": limit, "list": "held_out.txt"}]
    backend = {"score": "cosine", "embedding": embedding, "score_norm": "none"}
    facts = {"act_dcf": {"0.01": cost}, "thresholds": kept, "backend": backend, "warnings": notes}
    results = dataclasses.replace(given.results, **facts)
    text = write_report(tmp_path / "run", dataclasses.replace(given, results=results)).read_text()
    assert f"would fail. {verdict}" in text and f"<b>{cost:.3f}</b>" in text
    is_target = trials.labels == 1
    missed = 100 * np.mean(given.scores[is_target] < limit)
    accepted = 100 * np.mean(given.scores[~is_target] >= limit)
    name = (
        "threshold used by verify"
        if (embedding, notes) == ("whole", [])
        else "calibrated threshold"
    )
    cells = "".join(
        f'<td class="number">{text}</td>'
        for text in (f"{limit:.4f}", f"{missed:.2f} %", f"{accepted:.2f} %")
    )
    row = f"<td>{name}: at most 1 % false accepts on held_out.txt</td>{cells}"
    assert (
        (row in text)
        == (f'<p class="lead">At the {name} ({limit:.4f}), ' in text)
        == (moved is not None)
    )


def test_in_a_notebook(run, tmp_path):
    report = speakernet.Report(run)
    page = (run / "report.html").read_text()
    assert (
        html.unescape(report._repr_html_().partition('srcdoc="')[2].partition('" style')[0]) == page
    )
    figure = report.plot_det()
    assert figure.axes[0].get_xlabel() == "false accepts (%)" and figure._repr_png_().startswith(
        b"\x89PNG"
    )
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    table = report.frame()
    lines = [line.split() for line in (run / "scores.txt").read_text().splitlines()]
    assert isinstance(table, pandas.DataFrame) and list(table.columns)[:4] == [
        "enrol",
        "test",
        "score",
        "label",
    ]
    assert [[row.enrol, row.test, f"{row.score:.9g}"] for row in table.itertuples()] == lines
    assert table.label.sum() == report.results.num_targets
    (run / "scores.txt").unlink()
    with pytest.raises(ValueError, match=r"no .*scores"):
        speakernet.Report(run).plot_det()


def test_hardest_trials(run, trials, tmp_path):
    text = unescape((run / "report.html").read_text())
    scores = read_run(run).scores
    corpus = tmp_path / "corpus"
    for label, worst in ((0, np.argmax), (1, np.argmin)):
        rows = np.flatnonzero(trials.labels == label)
        row = int(rows[worst(scores[rows])])
        cells = ""
        for name in trials.pair(row):
            # `dev/s03/2.wav` is utterance 14 of the list, which `make_run` makes 2.4 s long.
            seconds = list(trials.names).index(name) / 10 + 1
            facts = f"speaker {name.split('/')[1]}, {seconds:.1f} s"
            cells += f'<td>{name}<div class="quiet">{facts}</div></td>'
        assert f'{cells}<td class="number">{scores[row]:.4f}</td>' in text
    for row, name in enumerate(trials.names):
        write_audio(corpus / name, np.full(1600 + row, 0.25, dtype=np.float32))
    with pytest.raises(AudioError, match=f"cannot be read from {tmp_path}; .*--audio"):
        write_report(run, audio=tmp_path)
    assert "<details open>" not in text
    # The last cell of the first row is of a silent recording.
    silent = re.findall(r"<td>([^<]*)<div", text)[1]
    write_audio(corpus / silent, np.zeros(16000, dtype=np.float32))
    run_command(f"report {run} --audio {corpus}")
    number = trials.names.index(silent)
    num_spoilt = np.count_nonzero((trials.enrol == number) | (trials.test == number))
    page = Checker(run / "report.html")
    assert page.text.count("<details open>") == 1 and f"silent: {num_spoilt} trial" in page.text
    sounds = [link for link in page.links if link.startswith("data:audio/flac;base64,")]
    assert len(sounds) == 48


def without_curves(path):
    # Scores are read back from text with nine digits, so a curve may move by less than a thousandth
    # of its width.
    return re.sub(r"<svg.*?</svg>\n?", "<svg>", path.read_text(), flags=re.DOTALL)


def test_page_again_from_files_alone(run):
    first = without_curves(run / "report.html")
    results = results_of(run)
    run_command(f"report {run}")
    assert without_curves(run / "report.html") == first
    read = read_run(run)
    assert eer(read.scores, read.labels) == pytest.approx(results["eer_percent"], abs=1e-3)


def test_unlabelled_pairs(tmp_path, trials, run):
    folder = run / "eval" / "pairs"
    given = make_run(folder, trials)
    for name in ("metrics.jsonl", "config.yaml", "results.json"):
        (folder / name).unlink()
    trials.labels = None
    kept = [
        {"name": "eer", "threshold": 0.2, "list": "held_out.txt"},
        {"name": "far_1%", "threshold": 0.5},
    ]
    facts = {
        "num_trials": len(trials),
        "why_no_eer": "expected `1 a b`",
        "thresholds": kept,
    }
    facts["lists"] = [{"role": "trials", "name": "pairs.txt", "sha256": ""}]
    results = Results.from_dict(
        {**facts, "checkpoint": {"path": str(run / "best.pt"), "sha256": ""}}
    )
    (folder / "report_arrays.npz").write_bytes(b"of an earlier evaluation")
    llrs = 10 * given.scores - 3
    evaluation = Evaluation(trials, given.scores, results, llrs, given.units, given.speakers)
    written = write_evaluation(folder, evaluation)
    assert sorted(written) == sorted(path.name for path in folder.iterdir() if path.is_file())
    rows = list(csv.reader((folder / "decisions.csv").open()))
    assert rows[0] == ["enrol", "test", "score", "llr", "eer", "far_1%"] and len(rows) == 1 + len(
        trials
    )
    for row, wanted in zip(rows[1:], given.scores.tolist(), strict=True):
        assert float(row[3]) == pytest.approx(10 * wanted - 3, abs=1e-3)
        assert row[4] == ("accept" if wanted >= 0.2 else "refuse")
    first = without_curves(folder / "report.html")
    page = Checker(folder / "report.html")
    assert (
        f"{np.count_nonzero(given.scores >= 0.2):,} of 1,128 pairs accepted at threshold 0.2000"
        in page.text
    )
    assert "No error rates: expected <code>1 a b</code>." in page.text
    assert {"result", "trials", "facts"} <= set(page.ids) and not {"training", "errors"} & set(
        page.ids
    )
    run_command(f"report {folder}")
    assert without_curves(folder / "report.html") == first


def test_run_that_still_trains(run):
    for name in ("results.json", "scores.txt", "report_arrays.npz"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    page = Checker(write_report(run))
    assert "Not evaluated yet" in page.text and "training" in page.ids and "errors" not in page.ids


def test_export(run, tmp_path, refuse):
    command = f"report {run} --export {tmp_path}/paper"
    run_command(command)
    names = {path.name for path in (tmp_path / "paper").iterdir()}
    # Nothing that somebody changed or wrote is replaced without --force.
    run_command(command)
    changed = tmp_path / "paper" / "result_1_all_figures.csv"
    before = changed.read_text()
    changed.write_text("corrected\n")
    assert str(changed.parent) in refuse(command)
    assert changed.read_text() == "corrected\n"
    run_command(f"{command} --force")
    assert changed.read_text() == before
    assert names == {path.name for path in (tmp_path / "paper").iterdir()}
    plotted = {name.removesuffix(".svg") for name in names if name.endswith(".svg")}
    assert {f"{name}.pdf" for name in plotted} <= names
    assert before.startswith("figure,value,95 % interval\nEER,")
    lines = (tmp_path / "paper" / "result_1_all_figures.tex").read_text().splitlines()
    assert lines[0] == r"\begin{tabular}{lrr}" and lines[2] == r"figure & value & 95 \% interval \\"


def test_stages_continue_the_curves(run):
    before = read_run(run).metrics
    last = max(record["epoch"] for record in before)
    for folder in ("large_margin", "2_joint", "2_joint.before-1"):
        (run / folder).mkdir()
        record = {"kind": "evaluation", "epoch": 1, "step": 5, "eer_percent": 1.5}
        (run / folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    after = read_run(run).metrics
    assert [record["epoch"] for record in after[len(before) :]] == [last + 1, last + 2]


@pytest.mark.parametrize("content", [None, "[]", "[" * 100_000, "{", "\udcff"])
def test_broken_results_are_named(tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"results\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eer_interval_percent", 3),
        ("min_dcf", {"half": 0.5}),
        ("slices", [{"by": "x"}]),
        ("thresholds", [{"threshold": 0.1}]),
    ],
)
def test_incomplete_results_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Results.from_dict({name: value})


def test_the_glossary_agrees_with_the_page(run):
    page = unescape((run / "report.html").read_text())
    glossary = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    for word, meaning in WORDS:
        assert f"| {word} | {meaning} |" in glossary
        assert f"<td>{meaning}</td>" in page
