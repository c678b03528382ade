"""The part of a report page about trials without error rates: scores, log-likelihood ratios and decisions."""

import numpy as np

from speakernet.evaluation.calibration import EER_NAME, threshold_label
from speakernet.evaluation.decisions import LLR_COLUMN
from speakernet.evaluation.report import plots
from speakernet.evaluation.report.data import RunData
from speakernet.evaluation.report.page import Block, Card, Cards, Table
from speakernet.evaluation.report.sections import Drawings
from speakernet.run_folder import DECISIONS, SCORES

NUM_SHOWN = 100
ENOUGH_FOR_A_HISTOGRAM = 30


def trials_part(run: RunData, drawings: Drawings) -> list[Block]:
    """A table of the first trials and, where there are enough, the histogram of all scores."""
    decisions = run.decisions
    if decisions is None:
        return []
    count = min(NUM_SHOWN, len(decisions.trials))
    rows = [decisions.row(number) for number in range(count)]
    names = {
        "enrol": "enrolment",
        LLR_COLUMN: "log-likelihood ratio",
        **{
            str(one["name"]): f"{threshold_label(str(one['name']))}: {one['threshold']:.4f}"
            for one in decisions.thresholds
        },
    }
    file = DECISIONS if decisions.says_more_than_scores else SCORES
    note = (
        f"The first {count} of {len(decisions.trials):,}; all are in {file}." if count < len(decisions.trials) else ""
    )
    numbers = [column for column, name in enumerate(decisions.header) if name in ("score", LLR_COLUMN)]
    table = Table([names.get(name, name) for name in decisions.header], rows, numbers=numbers)
    blocks: list[Block] = [Cards([Card("Scores and decisions", [table], note)], "wide")]
    if len(decisions.scores) >= ENOUGH_FOR_A_HISTOGRAM and np.ptp(decisions.scores) > 0:
        at_eer = [one["threshold"] for one in decisions.thresholds if one["name"] == EER_NAME]
        figure = plots.histogram_figure(decisions.scores, None, at_eer[0] if at_eer else np.nan)
        blocks.append(Cards([drawings.card("scores", "Scores", figure)]))
    return blocks
