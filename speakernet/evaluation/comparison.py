"""Several systems on one trial list: which is better, and whether the list is long enough to say so."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.evaluation.bootstrap import Difference, SpeakerBootstrap, differences
from speakernet.evaluation.figures import ALWAYS_SHOWN_PRIORS, operating_points
from speakernet.evaluation.headline import headline
from speakernet.evaluation.results import Results
from speakernet.evaluation.speakers import Speakers


@dataclass(frozen=True)
class Comparison:
    """Several systems on one list: EER and minDCFs of each, and the differences of the others from the first."""

    systems: list[Results]
    differences: list[list[Difference]]
    """For every system but the first, one for each figure: EER, then the minDCFs; positive if the first is better."""

    def sentences(self, names: Sequence[str]) -> list[str]:
        """One sentence for each figure of each system but the first."""
        labels = [figure.label for figure in headline(self.systems[0])]
        return [
            difference.sentence(label, names[0], name)
            for name, found in zip(names[1:], self.differences, strict=True)
            for label, difference in zip(labels, found, strict=True)
        ]


def compare_scores(
    trials: TrialList,
    systems: Sequence[np.ndarray],
    speakers: Speakers,
    *,
    num_draws: int,
    seed: int,
    priors: Sequence[float] = ALWAYS_SHOWN_PRIORS,
) -> Comparison:
    """Compare systems by their scores of the same labelled trials, each with the first.

    All are measured on the same draws of speakers: what is common to them cancels in the differences.

    Args:
        trials: labelled.
        systems: scores of each system, (trials,).
        speakers: of the list's utterances.
        num_draws: draws of speakers.
        seed: of the draws.
        priors: target priors of the minDCFs, at costs 1 and 1.

    Raises:
        ValueError: unlabelled trials, scores that are not finite, only targets or only non-targets.
    """
    if trials.labels is None:
        raise ValueError(f"{trials.source}: unlabelled trials have no error rates to compare; give a list with labels")
    enrol, test = speakers.ids[trials.enrol], speakers.ids[trials.test]
    points = operating_points(priors)
    prepared = [SpeakerBootstrap(scores, trials.labels, enrol, test, list(points.values())) for scores in systems]
    results = []
    for one in prepared:
        eer_percent, costs, _ = one.plain_figures()
        results.append(Results(len(trials), eer_percent=eer_percent, min_dcf=dict(zip(points, costs, strict=True))))
    return Comparison(results, [differences(prepared[0], other, num_draws, seed) for other in prepared[1:]])


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
