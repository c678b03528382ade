"""docs/evaluation.md: its numbers are those of the code, and what it says of results.json is there."""

import dataclasses
import re
from pathlib import Path

import numpy as np

from speakernet.assembly.evaluation import VALIDATION_DRAWS, VALIDATION_WORK
from speakernet.evaluation.bootstrap import MAX_WORK, MIN_SPEAKERS, ROUGH_SPEAKERS
from speakernet.evaluation.metrics import cllr, error_rates, min_dcf_point
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.report.hardest_section import MAX_PLAYED_SECONDS
from speakernet.evaluation.results import Results

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def test_its_numbers_are_those_of_the_code() -> None:
    facts = [
        f"Fewer than {MIN_SPEAKERS} speakers give no interval, fewer than {ROUGH_SPEAKERS} a rough one",
        f"Above {MAX_WORK / 1e6:,.0f} million trial-draws fewer draws",
        f"{VALIDATION_DRAWS} draws; none where trials times draws pass {VALIDATION_WORK / 1e6:.0f} million",
        f"with the {EvaluationOptions().cohort_size} nearest speakers",
        f"at most {MAX_PLAYED_SECONDS} s of each",
    ]
    assert [fact for fact in facts if fact not in TEXT] == []


def test_what_saying_nothing_and_always_refusing_cost() -> None:
    """The column "good is": a cost of 1 for an answer that looks at nothing."""
    labels = np.array([0, 0, 0, 1])
    assert "1 is what always refusing (or always accepting) costs" in TEXT and "1 is saying nothing" in TEXT
    assert min_dcf_point(error_rates(np.zeros(4), labels), 0.01, 1.0, 1.0)[0] == cllr(np.zeros(4), labels) == 1.0


def test_the_names_of_results_exist() -> None:
    known = {field.name for field in dataclasses.fields(Results)}
    named = {"eer_percent", "eer_convex_hull_percent", "eer_voxceleb_trainer_percent", "num_draws", "speaker_rule"}
    named |= {"det_band", "backend", "precision"}
    assert all(re.search(rf"`{name}`", PAGE) for name in named) and named <= known
