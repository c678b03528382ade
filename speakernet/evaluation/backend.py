"""How embeddings become scores: the back end, and its description that thresholds and calibrations belong to."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from speakernet.data.lists import TrialList
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.score_norm import cohort_statistics, normalize_scores
from speakernet.evaluation.scoring import cosine_scores, mean_distance_scores, mean_embeddings

WHOLE_COSINE = "whole utterances and cosine"
"""`whole_cosine` in words."""


@dataclass(frozen=True)
class Cohort:
    """Other speakers, against whom scores are normalised.

    Attributes:
        members: (members, dim), unit length.
        name: of its list, with the start of its checksum.
    """

    members: np.ndarray
    name: str


@dataclass(frozen=True)
class Backend:
    """A way of scoring with all that it needs beside the embeddings.

    Attributes:
        options: which score, which normalisation.
        is_normalised: mean_distance only: scale each crop's embedding to length 1 (what the loss was trained with).
        mean: (dim,) subtracted first; None subtracts nothing.
        cohort: where `options.score_norm` asks for one.
        device: where scores are computed.
    """

    options: EvaluationOptions
    is_normalised: bool = True
    mean: np.ndarray | None = None
    cohort: Cohort | None = None
    device: torch.device | str = "cpu"

    @property
    def nearest(self) -> int:
        """Cohort members that adaptive normalisation takes."""
        return min(self.options.cohort_size, len(self.cohort.members)) if self.cohort else 0

    def check(self) -> None:
        """Refuse what does not go together, before anything is embedded.

        Raises:
            ValueError: naming the option to change.
        """
        norm, score = self.options.score_norm, self.options.score
        if norm != "none" and score != "cosine":
            raise ValueError(
                f"score_norm {norm} with score {score}: normalisation works on the cosine; set evaluation.score: cosine"
            )

    def describe(self, embedding: EvaluationOptions) -> dict[str, Any]:
        """The scoring in plain values: thresholds and calibrations belong to exactly one of these."""
        options = self.options
        described: dict[str, Any] = {"score": options.score, **embedding.describe()}
        described |= {"subtract_mean": self.mean is not None, "score_norm": options.score_norm}
        if options.score == "mean_distance":
            described["is_normalised"] = self.is_normalised
        if self.cohort is not None:
            described |= {"cohort": self.cohort.name, "cohort_members": len(self.cohort.members)}
        if options.score_norm == "as":
            described["cohort_size"] = self.nearest
        return described

    def score(self, embeddings: np.ndarray, trials: TrialList) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Score every trial.

        Args:
            embeddings: (utterances, crops, dim) of the list's names.
            trials: which pairs.

        Returns:
            Scores (trials,), unit-length embeddings (utterances, dim), and where there is a cohort each utterance's
            mean score against it (utterances,).
        """
        # The map of speakers and the cohort need unit lengths whatever the score.
        units = mean_embeddings(embeddings, self.mean)
        if self.options.score == "mean_distance":
            centred = embeddings if self.mean is None else embeddings - self.mean.astype(np.float32)
            scores = mean_distance_scores(
                centred, trials.enrol, trials.test, normalize=self.is_normalised, device=self.device
            )
            return scores, units, None
        scores = cosine_scores(units, trials.enrol, trials.test, self.device)
        method = self.options.score_norm
        if method == "none":
            return scores, units, None
        assert self.cohort is not None, "normalisation was given a cohort"
        nearest = self.nearest if method == "as" else None
        statistics = cohort_statistics(units, self.cohort.members, nearest, self.device)
        return normalize_scores(scores, trials.enrol, trials.test, statistics, method), units, statistics.mean


def whole_cosine(subtracts_mean: bool) -> dict[str, Any]:
    """The description of the way that two recordings are verified: whole utterances, cosine, no normalisation.

    >>> whole_cosine(False)
    {'score': 'cosine', 'embedding': 'whole', 'subtract_mean': False, 'score_norm': 'none'}
    """
    mean = np.zeros(1) if subtracts_mean else None
    return Backend(EvaluationOptions(score="cosine", score_norm="none"), mean=mean).describe(
        EvaluationOptions(embedding="whole")
    )


def plain_backend(values: Mapping[str, Any]) -> str:
    """A described back end as text that equal back ends share."""
    return json.dumps(values, sort_keys=True)


def verifying_backend(contents: Mapping[str, Any]) -> Backend:
    """The way that two recordings are verified with a model file: the cosine, less the mean where there is one of whole
    utterances.
    """
    return Backend(EvaluationOptions(score="cosine", score_norm="none"), mean=mean_of_whole_utterances(contents))


def mean_of_whole_utterances(contents: Mapping[str, Any]) -> np.ndarray | None:
    """A model file's mean embedding, (dim,), where it was measured on whole utterances; a mean of crops is another."""
    mean = contents.get("embedding_mean")
    is_of_whole = (contents.get("embedding_mean_of") or {}).get("embedding") == "whole"
    return np.asarray(mean, dtype=np.float32) if mean is not None and is_of_whole else None
