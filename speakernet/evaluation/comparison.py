"""Two systems on one trial list, told apart or not: paired draws of speakers, and the answer in sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.evaluation.bootstrap import Comparison, SpeakerBootstrap, compare_systems
from speakernet.evaluation.metrics import check_trials
from speakernet.evaluation.speakers import speakers_of

PRIORS = (0.01, 0.05)
NUM_DRAWS = 1000


@dataclass(frozen=True)
class PairedResult:
    """What the comparison of two systems came to.

    Attributes:
        figures: name of each figure that was compared: EER first, then the minDCFs.
        first: figures of the first system.
        second: figures of the second system.
        comparisons: one for each figure.
        speaker_rule: how the speakers of the trials were told.
    """

    figures: list[str]
    first: list[float]
    second: list[float]
    comparisons: list[Comparison]
    speaker_rule: str

    def sentences(self, first_name: str, second_name: str) -> list[str]:
        """One sentence a figure."""
        pairs = zip(self.figures, self.comparisons, strict=True)
        return [comparison.sentence(figure, first_name, second_name) for figure, comparison in pairs]


def compare_scores(
    trials: TrialList,
    first: np.ndarray,
    second: np.ndarray,
    *,
    speaker_table: Mapping[str, str] | None = None,
    priors: Sequence[float] = PRIORS,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> PairedResult:
    """Compare two systems' scores on the same labelled trials, under the same draws of speakers.

    Args:
        trials: labelled.
        first: scores of one system, (trials,).
        second: scores of the other, (trials,).
        speaker_table: path -> speaker, where the names do not tell.
        priors: target priors of the minDCFs.
        num_draws: draws of speakers.
        seed: of the draws.

    Raises:
        ValueError: unlabelled trials, NaN scores, only targets or only non-targets.
    """
    if trials.labels is None:
        raise ValueError(f"{trials.source}: unlabelled trials have no error rates to compare; give a list with labels")
    speakers = speakers_of(trials, speaker_table)
    enrol, test = speakers.ids[trials.enrol], speakers.ids[trials.test]
    points = [(prior, 1.0, 1.0) for prior in priors]
    prepared = []
    for scores in (first, second):
        check_trials(scores, trials.labels)
        prepared.append(SpeakerBootstrap(scores, trials.labels, enrol, test, points))
    comparisons = compare_systems(prepared[0], prepared[1], len(trials), speakers.count, num_draws, seed)
    ones = np.ones(speakers.count, dtype=np.int64)
    figures = [found.figures(ones) for found in prepared]
    assert figures[0] is not None and figures[1] is not None
    names = ["EER (%)", *(f"minDCF at {prior:g}" for prior in priors)]
    values = [[eer, *costs] for eer, costs in (figures[0], figures[1])]
    return PairedResult(names, values[0], values[1], comparisons, speakers.rule)


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
