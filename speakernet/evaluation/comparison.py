"""Two systems on one trial list, told apart or not: paired draws of speakers, and the answer in sentences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.evaluation.bootstrap import Difference, SpeakerBootstrap, differences
from speakernet.evaluation.figures import ALWAYS_SHOWN_PRIORS, operating_points
from speakernet.evaluation.headline import headline
from speakernet.evaluation.metrics import check_trials
from speakernet.evaluation.results import Results
from speakernet.evaluation.speakers import Speakers


@dataclass(frozen=True)
class PairedResult:
    """What the comparison of two systems came to.

    Attributes:
        first: EER and minDCFs of the first system.
        second: those of the second system.
        differences: one for each figure: EER first, then the minDCFs.
    """

    first: Results
    second: Results
    differences: list[Difference]

    def sentences(self, first_name: str, second_name: str) -> list[str]:
        """One sentence a figure."""
        pairs = zip(headline(self.first), self.differences, strict=True)
        return [difference.sentence(figure.label, first_name, second_name) for figure, difference in pairs]


def compare_scores(
    trials: TrialList,
    first: np.ndarray,
    second: np.ndarray,
    speakers: Speakers,
    *,
    num_draws: int,
    seed: int,
    priors: Sequence[float] = ALWAYS_SHOWN_PRIORS,
) -> PairedResult:
    """Compare two systems' scores on the same labelled trials, under the same draws of speakers.

    Args:
        trials: labelled.
        first: scores of one system, (trials,).
        second: scores of the other, (trials,).
        speakers: of the list's utterances.
        num_draws: draws of speakers.
        seed: of the draws.
        priors: target priors of the minDCFs, at costs 1 and 1.

    Raises:
        ValueError: unlabelled trials, NaN scores, only targets or only non-targets.
    """
    if trials.labels is None:
        raise ValueError(f"{trials.source}: unlabelled trials have no error rates to compare; give a list with labels")
    enrol, test = speakers.ids[trials.enrol], speakers.ids[trials.test]
    points = operating_points(priors)
    prepared, results = [], []
    # Both systems meet the same draws: what is common to them cancels in the difference.
    for scores in (first, second):
        check_trials(scores, trials.labels)
        one = SpeakerBootstrap(scores, trials.labels, enrol, test, list(points.values()))
        eer_percent, costs, _ = one.plain_figures()
        prepared.append(one)
        results.append(Results(len(trials), eer_percent=eer_percent, min_dcf=dict(zip(points, costs, strict=True))))
    return PairedResult(results[0], results[1], differences(prepared[0], prepared[1], num_draws, seed))


def short_names(paths: Sequence[str]) -> list[str]:
    """Names that tell paths apart: the last part in which any two of them differ, else numbered.

    >>> short_names(["exps/a/scores.txt", "exps/b/scores.txt"])
    ['a', 'b']
    """
    parts = [path.replace("\\", "/").rstrip("/").split("/") for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [part[-depth] if depth <= len(part) else "" for part in parts]
        if len(set(names)) == len(names):
            return [name or "." for name in names]
    return [f"{part[-1]} ({number})" for number, part in enumerate(parts, start=1)]
