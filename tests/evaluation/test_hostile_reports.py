"""Reports of folders whose files a person or a program broke: an error that names the file, or the page."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speakernet.evaluation.report.page import render

from speakernet.evaluation.report import write_report
from speakernet.evaluation.results import Results

sys.path.insert(0, str(Path(__file__).parent))
from report_runs import make_run, make_trials

JUNK: list[Any] = [[], {}, "text", 3, 1e400, -1, True, [[]], [{}], {"a": []}, [1, 2, 3], {"rows": 3}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    make_run(root / "run", make_trials(root / "trials.txt", 4, 3))
    return root / "run"


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"', "[" * 100_000, "{", "", "\udcff"])
def test_results_that_are_none_are_named(run: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"results\.json: .*evaluate again to write them anew"):
        write_report(tmp_path)


def test_junk_in_any_field_is_refused_or_taken_as_it_is(run: Path) -> None:
    whole = json.loads((run / "results.json").read_text())
    for name in whole:
        for junk in JUNK:
            try:
                Results.from_dict({**whole, name: junk})
            except ValueError as error:
                assert len(str(error)) < 500
    with pytest.raises(ValueError, match="eer_percent is 'text'; expected float"):
        Results.from_dict({**whole, "eer_percent": "text"})


INCOMPLETE: dict[str, Any] = {
    "thresholds": [{"threshold": 0.1}],
    "dcf_costs": {"c_miss": 1.0},
    "det_band": {"miss_low_percent": [1.0]},
    "calibration": {"weights": 3, "offset": 0.0, "inputs": [], "prior": 0.1},
    "training": {"hours": "many"},
    "min_dcf": {"half": 0.5},
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_what_a_page_would_look_for_in_vain_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}|half"):
        Results.from_dict({name: INCOMPLETE[name]})


def test_metrics_of_another_kind_are_left_out(tmp_path: Path) -> None:
    lines = [
        {"kind": "step", "step": {}, "epoch": "x", "loss": 1.0, "step_seconds": "slow", "second_stage_from": 3},
        {"kind": "evaluation", "step": 2, "epoch": 1, "eer_percent": 9.0, "eer_interval_percent": 3},
        {"kind": "epoch", "step": 2, "epoch": None, "evaluation_seconds": []},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Held-out EER 9 %" in write_report(tmp_path).read_text()


ARRAYS = {
    "labels of text": {"labels": np.array(["a", "b"])},
    "labels in a table": {"labels": np.zeros((3, 3), dtype=np.int8)},
    "points without names": {"map_points": np.zeros((3, 2))},
    "points in a row": {"map_points": np.zeros(3)},
    "speakers beyond the names": {
        "map_points": np.zeros((3, 2)),
        "map_speakers": np.array([0, 1, 9]),
        "map_names": np.array(["a", "b"]),
        "map_shares": np.array([0.5, 0.2]),
    },
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_junk_arrays_are_named(run: Path, kind: str) -> None:
    path = run / "report_arrays.npz"
    np.savez(path, **ARRAYS[kind])
    with pytest.raises(ValueError, match=r"report_arrays\.npz: .*expected the arrays of a report; evaluate again"):
        write_report(run)
    path.write_bytes(b"PK no archive")
    with pytest.raises(ValueError, match=r"report_arrays\.npz: damaged"):
        write_report(run)


def test_a_name_cannot_turn_the_order_of_what_is_shown() -> None:
    page = render("exp\u202etxt.exe\u2066", "", "a\x07b\tc", [])
    assert "exp\\u202etxt.exe\\u2066" in page and "a\\u0007b\tc" in page
