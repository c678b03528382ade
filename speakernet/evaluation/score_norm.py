"""Score normalisation against a cohort of other speakers: z, t, s and adaptive s-norm, for all trials at once.

What the cohort says about an utterance (mean and deviation of its scores) is computed once for each, in blocks; then a
trial's score is shifted and scaled by its two sides. Works on unit-length embeddings and the cosine.

Source: Matejka et al., Analysis of score normalization in multilingual speaker recognition, 2017 (adaptive s-norm 1);
Auckenthaler et al., Score normalization for text-independent speaker verification systems, 2000 (z, t).
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch

from speakernet.evaluation.options import ScoreNorm
from speakernet.terminal import Bar

METHODS = get_args(ScoreNorm)
BLOCK_SCORES = 1 << 22
"""Scores of a block of utterances against the cohort: 16 MB."""
MIN_COHORT = 2
SMALLEST_DEVIATION = 1e-6


@dataclass(frozen=True)
class CohortStatistics:
    """Scores of each utterance against the cohort (or its nearest members), summed up.

    Attributes:
        mean: (utterances,) float32.
        deviation: (utterances,) float32, the population's (divided by the number of scores, not one less).
    """

    mean: np.ndarray
    deviation: np.ndarray


def cohort_statistics(
    embeddings: np.ndarray, cohort: np.ndarray, top: int | None = None, device: torch.device | str = "cpu"
) -> CohortStatistics:
    """Mean and deviation of every utterance's cohort scores.

    Args:
        embeddings: (utterances, dim), unit length.
        cohort: (members, dim), unit length.
        top: take only so many highest scores (adaptive); None takes all.
        device: where the scores are computed, block by block.

    Raises:
        ValueError: fewer than two cohort members.
    """
    if len(cohort) < MIN_COHORT:
        raise ValueError(f"the cohort has {len(cohort)} members; score normalisation needs at least {MIN_COHORT}")
    # torch, whose product takes the threads that runtime.threads allows.
    members = _float32(cohort, device)
    takes_all = top is None or top >= len(members)
    mean = np.empty(len(embeddings), dtype=np.float32)
    deviation = np.empty(len(embeddings), dtype=np.float32)
    block = max(1, BLOCK_SCORES // len(members))
    num_threads = torch.get_num_threads()
    # A small list is done before anybody could look.
    bar = Bar("scores against the cohort", len(embeddings), "utterance", is_shown=len(embeddings) > 2 * block)
    with ThreadPoolExecutor(num_threads) as pool, bar:
        for start in range(0, len(embeddings), block):
            rows = slice(start, start + block)
            scores = _float32(embeddings[rows], device) @ members.T
            if not takes_all:
                assert top is not None
                scores = highest(scores, top, pool, num_threads, is_on_host=members.device.type == "cpu")
            block_deviation, block_mean = torch.std_mean(scores, dim=1, correction=0)
            mean[rows], deviation[rows] = block_mean.cpu().numpy(), block_deviation.cpu().numpy()
            bar.update(len(scores))
    # A cohort whose scores are all equal must not divide by zero.
    return CohortStatistics(mean, np.maximum(deviation, SMALLEST_DEVIATION))


def highest(
    scores: torch.Tensor, top: int, pool: ThreadPoolExecutor, num_threads: int, *, is_on_host: bool
) -> torch.Tensor:
    """The `top` highest of every row in any order, (rows, top); on the host the rows are reordered in place."""
    if not is_on_host:
        return scores.topk(top, dim=1, sorted=False).values
    # Partition instead of a sort: only the set of the highest matters. Threads work at once, numpy lets them.
    edges = np.linspace(0, len(scores), num_threads + 1).astype(int)
    parts = [scores.numpy()[low:high] for low, high in itertools.pairwise(edges)]
    for _ in pool.map(lambda part: part.partition(scores.shape[1] - top, axis=1), parts):
        pass
    return scores[:, -top:]


def _float32(rows: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32)).to(device)


def normalize_scores(
    scores: np.ndarray, enrol: np.ndarray, test: np.ndarray, statistics: CohortStatistics, method: str
) -> np.ndarray:
    """Normalised scores, (trials,) float32.

    z uses the enrolment side, t the test side, s and as the mean of both; for `as` the statistics come from the
    nearest cohort members.

    Raises:
        ValueError: an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"unknown score normalisation {method!r}; expected one of {', '.join(METHODS)}")
    if method == "none":
        return scores
    mean, deviation = statistics.mean, statistics.deviation
    if method == "z":
        return (scores - mean[enrol]) / deviation[enrol]
    if method == "t":
        return (scores - mean[test]) / deviation[test]
    return 0.5 * ((scores - mean[enrol]) / deviation[enrol] + (scores - mean[test]) / deviation[test])


def speaker_means(embeddings: np.ndarray, speakers: np.ndarray) -> np.ndarray:
    """One unit-length cohort member a speaker: the mean of its utterances' unit embeddings.

    Args:
        embeddings: (utterances, dim), unit length.
        speakers: (utterances,) numbers from 0.

    Returns:
        (speakers, dim) float32.
    """
    sums = np.zeros((int(speakers.max()) + 1, embeddings.shape[1]), dtype=np.float64)
    # float64 sums: a speaker may have thousands of utterances.
    np.add.at(sums, speakers, embeddings)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return (sums / np.maximum(norms, 1e-12)).astype(np.float32)[norms[:, 0] > 0]
