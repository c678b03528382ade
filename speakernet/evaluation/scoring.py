"""From embeddings to scores: cosine, PLDA, mean distance, normalisation by a cohort, and back ends
that combine them.

Cosines on a CPU are one sparse matrix product over the distinct trials. Everything else is computed
block by block, so that memory holds only a few blocks besides embeddings and scores. A back end
describes itself in plain values, to which thresholds and calibrations are tied.

Source: Matejka et al., Analysis of score normalization in multilingual speaker recognition, 2017
(adaptive s-norm 1); Auckenthaler et al., Score normalization for text-independent speaker
verification systems, 2000 (z, t).
"""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speakernet.data.lists import TrialList, places_in_runs
from speakernet.evaluation.embedding import way_of
from speakernet.evaluation.metrics import group_starts
from speakernet.evaluation.options import EvaluationOptions
from speakernet.terminal import Bar

WHOLE = EvaluationOptions(embedding="whole")
VERIFYING = EvaluationOptions(embedding="whole", speech="detected")
"""How recordings are embedded for a decision: their speech, in one piece. Before version 0.4.0 it
was `WHOLE`."""
BLOCK_SCORES = 1 << 22
"""Number of scores of a block of utterances against the cohort; 16 MiB in float32."""
MIN_COHORT = 2
SMALLEST_DEVIATION = 1e-6
BLOCK_BYTES = 5 << 20
"""Size of the gathered test-side embeddings of a block of trials: small enough to stay in the
processor's cache."""
GROUP_WIDTHS = (8, 4, 2, 1)
"""Numbers of trials with the same enrolment that share a matrix product; any number of trials
splits into these."""
EPSILON = 1e-12


def mean_embeddings(embeddings: np.ndarray, mean: np.ndarray | None = None) -> np.ndarray:
    """One unit-length embedding for each utterance.

    Crops are centred by `mean` (if given) and scaled to length 1; their average is scaled to length
    1 again.

    Args:
        embeddings: (utterances, crops, dim) or (utterances, dim).
        mean: (dim,).

    Returns:
        (utterances, dim) float32.
    """
    # The length of an embedding says more about the recording (its level, its length, its noise)
    # than about the voice, so it is removed twice. Without the first scaling, a loud crop would
    # outvote the others in the average. After averaging, the length says how much the crops agree,
    # which must not raise a cosine.
    if embeddings.ndim == 2:
        embeddings = embeddings[:, None, :]
    result = np.empty((embeddings.shape[0], embeddings.shape[2]), dtype=np.float32)
    # 64 MiB of float32 at a time: the table of all crops may already fill the memory.
    rows_at_once = max(1, (64 << 20) // (4 * embeddings.shape[1] * embeddings.shape[2]))
    for start in range(0, len(result), rows_at_once):
        block = embeddings[start : start + rows_at_once]
        centred = block if mean is None else block - mean.astype(np.float32)
        average = to_unit_length(centred).mean(axis=1)
        result[start : start + rows_at_once] = to_unit_length(average)
    return result


def to_unit_length(vectors: np.ndarray) -> np.ndarray:
    """Vectors (…, dim) of length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, EPSILON)


def cosine_scores(embeddings: np.ndarray, enrol: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Dot products of the two rows of each trial, always on the CPU.

    Args:
        embeddings: (utterances, dim) float32, of unit length for the dot product to be the cosine.
        enrol: (trials,) rows.
        test: (trials,) rows.

    Returns:
        (trials,) float32.

    >>> unit = np.eye(2, dtype=np.float32)
    >>> cosine_scores(unit, np.array([0, 0]), np.array([0, 1])).tolist()
    [1.0, 0.0]
    """
    table = torch.from_numpy(np.ascontiguousarray(embeddings, dtype=np.float32))
    num_rows = len(table)
    # The distinct trials are the entries of a sparse matrix, and torch computes the product only
    # there. Gathering the rows of both sides would copy two embeddings for every trial.
    entries = enrol.astype(np.int64) * num_rows + test  # counted row after row
    order = np.argsort(entries)
    entries = entries[order]
    starts = group_starts(entries)
    repeats = np.diff(np.append(starts, len(entries)))
    rows, columns = np.divmod(entries[starts], max(1, num_rows))
    del entries
    row_starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))])
    with warnings.catch_warnings():
        # torch warns about every sparse CSR tensor, because it is a beta feature.
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        pattern = torch.sparse_csr_tensor(
            torch.from_numpy(row_starts.astype(np.int32)),
            torch.from_numpy(columns.astype(np.int32)),
            torch.zeros(len(columns)),
            (num_rows, num_rows),
            # Rows beyond the table would read out of bounds.
            check_invariants=True,
        )
    products = torch.sparse.sampled_addmm(pattern, table, table.T, beta=0.0).values().numpy()
    scores = np.empty(len(order), dtype=np.float32)
    # Repeated trials have a single entry in the matrix.
    scores[order] = np.repeat(products, repeats)
    return scores


@dataclass(frozen=True)
class Plda:
    """Two-covariance PLDA in the space where the within-speaker covariance is the identity and the
    other is diagonal.

    Embeddings are rescaled before scoring, z = u sqrt(dim / sum(weights u^2)), so their length does
    not matter. Several recordings of a person are averaged and count as one.

    Source: Ioffe, Probabilistic linear discriminant analysis, 2006 (the ratio between equations 4
    and 5, one recording on each side); Garcia-Romero and Espy-Wilson, Analysis of i-vector length
    normalization, 2011.

    >>> plda = Plda(np.array([3.0]), np.array([1.0]))
    >>> plda.scores(np.array([[1.0]]), np.array([[1.0], [-2.0]])).round(4).tolist()
    [[0.5205, -0.3367]]
    """

    between: np.ndarray
    """(dim,) variances between speakers."""
    weights: np.ndarray
    """(dim,) weights of the squares whose sum is scaled to dim: 1 in wespeaker, 1 / (between + 1)
    in Kaldi."""

    def scores(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Log-likelihood ratios of all pairs, (first, second) float64, of embeddings (…, dim) of
        any length.
        """
        rows, row_terms = self._terms(first)
        columns, column_terms = self._terms(second)
        return rows @ columns.T + (row_terms[:, None] + column_terms)

    def trial_scores(
        self, embeddings: np.ndarray, enrol: np.ndarray, test: np.ndarray
    ) -> np.ndarray:
        """Log-likelihood ratios of trials, (trials,) float32, between rows of embeddings
        (utterances, dim).
        """
        # The ratio is a dot product plus a term of each side, so each embedding is prepared only
        # once for all its trials.
        table, constant = self._terms(embeddings)
        scores = np.empty(len(enrol), dtype=np.float32)
        # In blocks, because the rows of all trials together would not fit into the cache.
        block = max(1, BLOCK_BYTES // (8 * table.shape[1]))
        for first in range(0, len(scores), block):
            rows = enrol[first : first + block]
            columns = test[first : first + block]
            products = np.einsum("td,td->t", table[rows], table[columns])
            scores[first : first + block] = products + constant[rows] + constant[columns]
        return scores

    def _terms(self, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The factors whose product is taken, (rows, dim), and the term that each side adds to the
        score, (rows,).
        """
        rows = np.asarray(embeddings, dtype=np.float64)
        between = self.between
        squares = np.maximum((rows * rows) @ self.weights, EPSILON**2)
        rows = rows * np.sqrt(rows.shape[1] / squares)[:, None]
        # log N([x; y]; 0, [[b+1, b], [b, b+1]]) - log N(x; 0, b+1) - log N(y; 0, b+1), per
        # dimension.
        factors = between**2 / (2 * (1 + between) * (1 + 2 * between))
        constant = (2 * np.log1p(between) - np.log1p(2 * between)).sum() / 4
        return rows * np.sqrt(between / (1 + 2 * between)), constant - (rows * rows) @ factors


def pair_scores(first: np.ndarray, second: np.ndarray, plda: Plda | None = None) -> np.ndarray:
    """Scores of all pairs of unit-length embeddings, (first, second): cosines, or log-likelihood
    ratios by PLDA.
    """
    return first @ second.T if plda is None else plda.scores(first, second)


def plda_of(contents: Mapping[str, Any]) -> Plda | None:
    """The PLDA in an adapted model file; None without one."""
    if (contents.get("adaptation") or {}).get("score") != "plda":
        return None
    weights = contents["weights"]
    # NumPy has no bfloat16.
    between = weights["adaptation.between"].double().numpy()
    return Plda(between, weights["adaptation.weights"].double().numpy())


def mean_distance_scores(
    embeddings: np.ndarray,
    enrol: np.ndarray,
    test: np.ndarray,
    *,
    normalize: bool = True,
) -> np.ndarray:
    """Minus the mean Euclidean distance over all pairs of crops, as in voxceleb_trainer.

    Args:
        embeddings: (utterances, crops, dim) float32.
        enrol: (trials,) rows.
        test: (trials,) rows.
        normalize: first scale every crop's embedding to length 1 (voxceleb_trainer does so for some
            losses).

    Returns:
        (trials,) float32.

    >>> crops = np.array([[[3.0, 4.0]], [[0.0, 0.0]]], dtype=np.float32)
    >>> mean_distance_scores(crops, np.array([0]), np.array([1]), normalize=False).tolist()
    [-5.0]
    """
    table = torch.from_numpy(np.ascontiguousarray(embeddings, dtype=np.float32))
    lengths = torch.linalg.vector_norm(table, dim=2)  # (utterances, crops)
    # Scaling products instead of crops avoids a copy of the whole table.
    scales = torch.ones_like(lengths)
    if normalize:
        scales = lengths.clamp(min=EPSILON).reciprocal()
    squares = (lengths * scales).square()
    enrol_rows = torch.from_numpy(enrol.astype(np.int64))
    test_rows = torch.from_numpy(test.astype(np.int64))
    order = torch.argsort(enrol_rows)
    block = max(1, BLOCK_BYTES // (4 * table.shape[1] * table.shape[2]))
    gathered = torch.empty((max(block, GROUP_WIDTHS[0]), *table.shape[1:]))
    scores = torch.empty(len(order))
    # Trials with the same enrolment share a matrix product, with the crops of up to eight test
    # sides as its columns, because a product of 10 x 10 crops alone is too small to be efficient.
    for width, firsts in _groups(enrol_rows[order].numpy()):
        groups = max(1, block // width)
        for start in range(0, len(firsts), groups):
            positions = torch.from_numpy(firsts[start : start + groups, None] + np.arange(width))
            trials = order[positions]  # (groups, width)
            distances = _mean_distances(
                table,
                scales,
                squares,
                enrol_rows[trials[:, 0]],
                test_rows[trials],
                gathered[: trials.numel()],
            )
            scores[trials] = distances.neg_()
    return scores.numpy()


def _mean_distances(
    table: Tensor, scales: Tensor, squares: Tensor, enrol: Tensor, test: Tensor, gathered: Tensor
) -> Tensor:
    """Mean distances of utterances (groups,) to (groups, width) others; `gathered` is a buffer for
    the latter.
    """
    num_groups, width = test.shape
    crops = table.shape[1]
    first = table[enrol] * (-2 * scales[enrol])[:, :, None]
    torch.index_select(table, 0, test.view(-1), out=gathered)
    # |a - b|^2 = |a|^2 + |b|^2 - 2ab; rounding can push it just below zero. In place, in one tensor
    # (groups, crops, width * crops).
    distances = torch.bmm(first, gathered.view(num_groups, width * crops, -1).transpose(1, 2))
    distances.mul_(scales[test].view(num_groups, 1, -1))
    distances.add_(squares[test].view(num_groups, 1, -1))
    distances.add_(squares[enrol][:, :, None])
    distances.clamp_(min=0).sqrt_()
    return distances.sum(dim=1).view(num_groups, width, crops).sum(dim=2).div_(crops * crops)


def _groups(sorted_rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Cut runs of equal rows into pieces: (width, first positions of all pieces of that width),
    widest first.
    """
    starts = group_starts(sorted_rows)
    counts = np.diff(np.append(starts, len(sorted_rows)))
    for width in GROUP_WIDTHS:
        pieces = counts // width
        yield width, np.repeat(starts, pieces) + width * places_in_runs(pieces)
        # The rest of each run is cut into narrower pieces.
        starts = starts + pieces * width
        counts = counts % width


def cohort_statistics(
    embeddings: np.ndarray,
    cohort: np.ndarray,
    top: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation of every utterance's cohort scores, both (utterances,)
    float32.

    Args:
        embeddings: (utterances, dim), unit length.
        cohort: (members, dim), unit length.
        top: use only this many of the highest scores (adaptive); None uses all.
        device: where to compute, block by block.

    Raises:
        ValueError: fewer than two cohort members.
    """
    if len(cohort) < MIN_COHORT:
        raise ValueError(
            f"the cohort has {len(cohort)} members; score normalisation needs at least {MIN_COHORT}"
        )
    # Computed by torch, whose matrix products respect runtime.threads.
    members = torch.from_numpy(np.ascontiguousarray(cohort, dtype=np.float32)).to(device)
    num_scores = min(top or len(members), len(members))
    table = np.ascontiguousarray(embeddings, dtype=np.float32)
    mean = np.empty(len(table), dtype=np.float32)
    deviation = np.empty(len(table), dtype=np.float32)
    # In blocks of rows, because all scores of VoxCeleb1-E against 6,000 cohort speakers take 3.5
    # GB.
    block = max(1, BLOCK_SCORES // len(members))
    is_shown = len(table) > 2 * block
    bar = Bar("scores against the cohort", len(table), "utterance", is_shown=is_shown)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, bar:
        for start in range(0, len(table), block):
            rows = slice(start, start + block)
            scores = torch.from_numpy(table[rows]).to(device) @ members.T  # (rows, members)
            if num_scores < len(members):
                scores = highest(scores, num_scores, pool, is_on_host=members.device.type == "cpu")
            block_deviation, block_mean = torch.std_mean(scores, dim=1, correction=0)
            mean[rows] = block_mean.cpu().numpy()
            deviation[rows] = block_deviation.cpu().numpy()
            bar.update(len(scores))
    # A cohort whose scores are all equal must not cause a division by zero.
    return mean, np.maximum(deviation, SMALLEST_DEVIATION)


def highest(
    scores: torch.Tensor, top: int, pool: ThreadPoolExecutor, *, is_on_host: bool
) -> torch.Tensor:
    """The `top` highest of each row, (rows, top), in any order; on the host, rows are reordered in
    place.
    """
    if not is_on_host:
        return scores.topk(top, dim=1, sorted=False).values
    # Partition, since the order does not matter; numpy releases the lock, so threads run in
    # parallel.
    edges = np.linspace(0, len(scores), torch.get_num_threads() + 1).astype(int)
    shares = [scores.numpy()[low:high] for low, high in itertools.pairwise(edges)]
    first_of_top = scores.shape[1] - top
    # The list waits for all of them.
    list(pool.map(lambda share: share.partition(first_of_top, axis=1), shares))
    return scores[:, first_of_top:]


def normalize_scores(
    scores: np.ndarray,
    enrol: np.ndarray,
    test: np.ndarray,
    statistics: tuple[np.ndarray, np.ndarray],
    method: str,
) -> np.ndarray:
    """Normalised scores, (trials,) float32: z by the enrolment side, t by the test side, s and as
    by their average.

    For `as`, the statistics come from the nearest cohort members.
    """
    # Both sides have their own statistics, and which of them matters depends on the use. The
    # enrolment (z) is known in advance, so a system in use can store its statistics. The test (t)
    # is measured when it arrives, and its channel and length move its scores most. The average
    # treats both alike, which makes the score of A with B that of B with A.
    mean, deviation = statistics
    by_enrolment = (scores - mean[enrol]) / deviation[enrol]
    by_test = (scores - mean[test]) / deviation[test]
    if method == "z":
        return by_enrolment
    if method == "t":
        return by_test
    return 0.5 * (by_enrolment + by_test)


def speaker_means(embeddings: np.ndarray, speakers: np.ndarray) -> np.ndarray:
    """One unit-length cohort member per speaker, (speakers, dim): the mean of its utterances' unit
    embeddings.
    """
    # float64, since a speaker may have thousands of utterances.
    sums = np.zeros((int(speakers.max()) + 1, embeddings.shape[1]), dtype=np.float64)
    np.add.at(sums, speakers, embeddings)
    # A speaker without utterances has no direction.
    return to_unit_length(sums[sums.any(axis=1)]).astype(np.float32)


@dataclass(frozen=True)
class Backend:
    """A scoring method with everything it needs besides the embeddings."""

    options: EvaluationOptions
    is_normalised: bool = True
    """mean_distance only: scale each crop's embedding to length 1 (as the loss does)."""
    mean: np.ndarray | None = None
    """(dim,) mean embedding, subtracted first."""
    cohort: np.ndarray | None = None
    """(members, dim), unit length: other speakers, against whom scores are normalised."""
    cohort_name: str = ""
    """Name of the cohort's list, with the beginning of its checksum."""
    device: torch.device | str = "cpu"
    plda: Plda | None = None
    """Replaces the cosine for adapted embeddings; None: cosine."""
    adaptation: str = ""
    """Name of the adaptation in the network."""

    def describe(self, embedding: EvaluationOptions) -> dict[str, Any]:
        """The scoring as plain values; every threshold and calibration belongs to exactly one such
        description.
        """
        options = self.options
        described: dict[str, Any] = {
            "score": self.score_name,
            **way_of(embedding),
            "subtract_mean": self.mean is not None,
            "score_norm": options.score_norm,
        }
        if options.score == "mean_distance":
            described["is_normalised"] = self.is_normalised
        if self.adaptation:
            described["adaptation"] = self.adaptation
        num_members = 0 if self.cohort is None else len(self.cohort)
        if num_members:
            described |= {"cohort": self.cohort_name, "cohort_members": num_members}
        if options.score_norm == "as":
            described["cohort_size"] = min(options.cohort_size, num_members)
        return described

    @property
    def score_name(self) -> str:
        """What a trial is scored by: cosine, plda or mean_distance."""
        if self.plda and self.options.score == "cosine":
            return "plda"
        return self.options.score

    def score(
        self, embeddings: np.ndarray, trials: TrialList
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Score every trial from the embeddings (utterances, crops, dim) of the list's names.

        Returns:
            Scores (trials,), unit-length embeddings (utterances, dim), and each utterance's mean
            score against the cohort (utterances,), None without a cohort.
        """
        # What happens to a trial, from the top of this file to its bottom. Both recordings come as
        # tables of crops, (crops, dim). Each crop is centred by the mean of the training set, if
        # there is one, and scaled to length 1, so that loudness and length of a recording do not
        # count; the average of its crops, again at length 1, represents the recording. Two
        # recordings are compared by the cosine, or by PLDA, which also knows how much one voice
        # varies. Some voices are close to everybody's, so their scores with strangers are high
        # too: normalisation expresses a score in standard deviations above the scores of the same
        # recordings against a cohort of strangers. As-norm asks only the nearest strangers. How
        # many of them is best depends on corpus and network; 300 is wespeaker's number, and no
        # measurement of ours says that it is the best.
        #
        # The mean distance of voxceleb_trainer compares all pairs of crops instead. It ignores
        # cohort and PLDA, but the report's embedding map needs the unit lengths with any score.
        units = mean_embeddings(embeddings, self.mean)
        enrol = trials.enrol
        test = trials.test
        method = self.options.score_norm
        if self.score_name == "mean_distance":
            centred = embeddings if self.mean is None else embeddings - self.mean.astype(np.float32)
            scores = mean_distance_scores(centred, enrol, test, normalize=self.is_normalised)
            return scores, units, None
        if self.plda is None:
            scores = cosine_scores(units, enrol, test)
        else:
            scores = self.plda.trial_scores(units, enrol, test)
        if method == "none":
            return scores, units, None
        if self.plda is not None:
            raise ValueError(
                f"score_norm is {method}, but PLDA scores cannot be normalised; set score_norm to "
                "none"
            )
        assert self.cohort is not None, "normalisation needs a cohort"
        nearest = self.options.cohort_size if method == "as" else None
        statistics = cohort_statistics(units, self.cohort, nearest, self.device)
        return normalize_scores(scores, enrol, test, statistics, method), units, statistics[0]


def verifying_backend(contents: Mapping[str, Any]) -> Backend:
    """The back end for verification with a model file: cosine, after subtracting its mean of whole
    utterances.

    In an adapted file, the adaptation subtracts its own mean, and a fitted PLDA replaces the
    cosine.
    """
    name = (contents.get("adaptation") or {}).get("name", "")
    # WHOLE has the default options of scoring; how recordings are embedded is not read here.
    return Backend(
        WHOLE, mean=mean_of_whole_utterances(contents), plda=plda_of(contents), adaptation=name
    )


def mean_of_whole_utterances(contents: Mapping[str, Any]) -> np.ndarray | None:
    """A model file's mean embedding of whole utterances, (dim,); None if it has no mean or one of
    crops.
    """
    mean = contents.get("embedding_mean")
    measured_with = contents.get("embedding_mean_of") or {}
    if mean is None or measured_with.get("embedding") != "whole":
        return None
    return np.asarray(mean, dtype=np.float32)
