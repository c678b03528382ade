"""`report.html`: the results of a run in a single self-contained file.

It is written at the end of an evaluation from the arrays in memory, or later by `speakernet report`
from the files alone. No figure is recomputed: figures come from `results.json`, curves from
`scores.txt` and `metrics.jsonl`.
"""

import functools
import json
from pathlib import Path

import numpy as np

from speakernet.data.audio import SAMPLE_RATE
from speakernet.data.opening import open_source
from speakernet.evaluation.files import ARRAYS_NAME, Evaluation, RunData, read_run, seconds_of_steps
from speakernet.evaluation.report.page import WORDS, Card, Section, draw_card, write_page
from speakernet.evaluation.report.sections import (
    USUAL_RATE,
    data_section,
    embeddings_section,
    errors_section,
    facts_section,
    hardest_section,
    model_threshold,
    result_section,
    robustness_section,
    slices_section,
    training_section,
    trials_section,
)
from speakernet.evaluation.results import Results
from speakernet.evaluation.score_files import write_scores
from speakernet.files import atomic_write
from speakernet.run_folder import (
    DECISIONS,
    EVALUATION_FILES,
    METRICS,
    PLOTS,
    REPORT,
    RESULTS,
    SCORES,
)
from speakernet.terminal import counted, duration

LARGEST_USABLE_PERCENT = 20.0
"""Of errors of either kind."""
LARGEST_CROWD = 1_000_000
"""In the words of a decision."""


def write_evaluation(folder: str | Path, evaluation: Evaluation) -> list[str]:
    """Write results.json, scores.txt, report.html and, if there are no error rates, decisions.csv;
    return the names.
    """
    folder = Path(folder)
    decisions = evaluation.decisions
    # Files of an earlier evaluation in this folder must not get into the page of this one.
    for name in (DECISIONS, ARRAYS_NAME):
        (folder / name).unlink(missing_ok=True)
    has_decisions = decisions is not None and decisions.says_more_than_scores
    if decisions is not None and has_decisions:
        decisions.write(folder / DECISIONS)
    # The page is last: if drawing fails, `speakernet report` can make it from the files.
    write_scores(folder / SCORES, evaluation.trials, evaluation.scores)
    with atomic_write(folder / RESULTS) as file:
        json.dump(evaluation.results.to_dict(), file, indent=2)
    write_report(folder, evaluation)
    return [*EVALUATION_FILES, *[DECISIONS] * has_decisions]


def write_report(
    folder: str | Path,
    evaluation: Evaluation | None = None,
    *,
    audio: str | Path | None = None,
    export: Path | None = None,
) -> Path:
    """Write `report.html` for a run or evaluation folder, and its plots as PNGs under `plots/`.

    Args:
        folder: a run folder or an evaluation folder.
        evaluation: the evaluation just made, with arrays that the files lack; None reads everything
            from the files.
        audio: folder or packed corpus from which the audio of the hardest trials is embedded in the
            page.
        export: folder for each table as CSV and LaTeX and each plot as SVG and PDF.

    Returns:
        The path of the page.
    """
    run = read_run(folder, evaluation=evaluation)
    source = None
    if audio is not None:
        if run.labels is None:
            raise ValueError(
                f"{run.folder}: without labelled scores there are no trials to play; leave out "
                "--audio"
            )
        source = open_source(
            audio, (run.configuration.get("data") or {}).get("sample_rate", SAMPLE_RATE)
        )
    # Before drawing, so that a plot that fails does not lose them.
    _keep_arrays(run)
    draw = functools.partial(draw_card, run.folder / PLOTS)
    results = run.results
    amount = _amount_of_training(results)
    decisions = run.decisions
    sections = {
        "result": result_section(run),
        "trials": trials_section(decisions) if decisions else Section(),
        "errors": errors_section(run, draw),
        "data": data_section(run, amount),
        "training": Section(),
        "slices": slices_section(run, draw),
        "robustness": robustness_section(run, draw),
        "hardest": hardest_section(run, source),
        "embeddings": embeddings_section(run, draw),
        "facts": facts_section(run),
        "words": Section([Card("What the words mean", facts=WORDS, is_wide=True)]),
    }
    # A page about a list leaves the training curves to the page of the run: they take as long to
    # draw as everything else.
    if (run.folder / METRICS).is_file():
        sections["training"] = training_section(run, draw)
    # The result in plain words, for readers new to the field.
    lead = decisions.sentences() if decisions else []
    if results.eer_percent is not None and results.eer_threshold is not None:
        lead = _verdict(run, results, bool(sections["result"].warnings))
    subtitle = _subtitle(run, results, amount)
    return write_page(run.folder / REPORT, run.name, subtitle, lead, sections, export)


def _keep_arrays(run: RunData) -> None:
    """Write the arrays that `read_run` finds in no other file.

    Without labels, decisions.csv holds the ratios, and speakers are unknown.
    """
    if "labels" not in run.arrays:
        return
    # Single precision is enough for drawing and halves the file.
    halved = {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array
        for name, array in run.arrays.items()
    }
    with atomic_write(run.folder / ARRAYS_NAME, "wb") as file:
        np.savez_compressed(file, **halved)  # type: ignore[arg-type]


def _amount_of_training(results: Results) -> str:
    """How much speech the network was trained on, in words; empty if unknown."""
    # An imported model has none of these figures.
    training = results.training or {}
    amounts = []
    for name, digits in (("speakers", 0), ("utterances", 0), ("hours", 1)):
        if value := training.get(name):
            amounts.append(f"{value:,.{digits}f} {name}")
    return ", ".join(amounts)


def _subtitle(run: RunData, results: Results, amount: str) -> str:
    """What the run is, in one line."""
    parts = [str((results.model or {}).get("name") or "")]
    if results.num_parameters:
        parts.append(f"{results.num_parameters / 1e6:.2f} million parameters")
    if results.training:
        parts.append(f"trained on {amount}")
    epochs, seconds = _time_of_training(run)
    if epochs:
        parts.append(f"{counted(epochs, 'epoch')} in {duration(seconds)}")
    if not results.is_empty:
        verb = "tested on" if run.decisions is None else "scored:"
        parts.append(f"{verb} {run.list_name}")
    parts.append(results.date)
    return " · ".join(filter(None, parts))


def _time_of_training(run: RunData) -> tuple[int, float]:
    """Epochs, and the seconds spent on steps and evaluations, without interruptions."""
    epochs = 0
    seconds = seconds_of_steps(run.metrics)
    for record in run.metrics:
        if record.get("kind") == "epoch":
            epochs = max(epochs, record.get("epoch", 0))
        elif record.get("kind") == "evaluation":
            seconds += record.get("evaluation_seconds", 0.0)
    return epochs, seconds


def _verdict(run: RunData, results: Results, has_warnings: bool) -> list[str]:
    """The errors at the threshold that `verify` would use, and whether the model can be used."""
    assert results.eer_percent is not None and results.eer_threshold is not None
    limit = model_threshold(run)
    if limit is None:
        place = f"threshold {results.eer_threshold:.4f}"
        false_accepts = misses = results.eer_percent / 100
    else:
        place = f"the {limit.name} ({limit.point.threshold:.4f})"
        false_accepts = limit.point.false_accept
        misses = limit.point.miss
    # From the worst case to the best, so that the first problem that applies is named. The limit of
    # twenty percent is our opinion, not a standard.
    cost = (results.act_dcf or {}).get(f"{USUAL_RATE:g}", 0.0)
    if results.eer_percent > LARGEST_USABLE_PERCENT:
        verdict = (
            f"not usable yet: an error rate of {results.eer_percent:.1f} % is too close to chance; "
            "train longer or on more speakers, or use a published model"
        )
    elif not results.thresholds:
        verdict = (
            "not ready for decisions: the model has no thresholds; fit them with speakernet "
            "calibrate"
        )
    elif cost >= 1:
        verdict = (
            "calibrate again before use, on recordings like these (speakernet calibrate): with "
            "its present calibration the model decides no better than a constant answer (actual "
            f"DCF({USUAL_RATE:g}) {cost:.2f})"
        )
    elif 100 * max(false_accepts, misses) > LARGEST_USABLE_PERCENT:
        verdict = (
            f"of limited use: more than {LARGEST_USABLE_PERCENT:g} % of same- or different-speaker "
            "pairs get the wrong decision"
        )
    elif has_warnings:
        verdict = "usable, but its figures are optimistic or uncertain; see the box below"
    else:
        verdict = "usable: the model is calibrated"
    errors = (
        f"at {place}, {_of_many(false_accepts)} strangers would pass and {_of_many(misses)} true "
        "attempts would fail"
    )
    return [errors, verdict]


def _of_many(share: float) -> str:
    """A share as a number of cases, of so many that neither it nor the rest seems to be 0.

    >>> [_of_many(share) for share in (0.0, 0.123, 0.004, 0.9996)]
    ['0 of 100', '12 of 100', '4 of 1,000', '9,996 of 10,000']
    """
    size = 100
    if 0 < share < 1:
        while size < LARGEST_CROWD and min(share, 1 - share) * size < 1:
            size *= 10
    return f"{round(share * size):,} of {size:,}"
