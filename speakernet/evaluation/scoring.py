"""Scores of trial pairs from embeddings, sorted by enrolment so that trials become matrix products.

Two scores: the cosine of mean embeddings, and voxceleb_trainer's minus mean distance over all pairs of crops. Memory
beside embeddings and scores is a few blocks. Normalisation against a cohort is in `score_norm.py`.
"""

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from speakernet.evaluation.metrics import group_starts

BLOCK_BYTES = 5 << 20
"""Gathered crops of the test side of a block of trials: they stay in the processor's cache until they are used."""
DEVICE_BLOCK_BYTES = 1 << 28
"""The same on an accelerator, which wants much work at once."""
GROUP_WIDTHS = (8, 4, 2, 1)
"""Trials of one enrolment utterance that share a matrix product; every list can be cut into groups of these."""
EPSILON = 1e-12
SAFE_LENGTHS = (1e-15, 1e15)
"""Between these the squares of float32 embeddings neither vanish nor overflow."""


def mean_embeddings(embeddings: np.ndarray, mean: np.ndarray | None = None) -> np.ndarray:
    """One embedding of length 1 for each utterance.

    Each crop is centred by `mean` (where given), scaled to length 1, averaged over crops and scaled again.

    Args:
        embeddings: (utterances, crops, dim) or (utterances, dim).
        mean: (dim,).

    Returns:
        (utterances, dim) float32.
    """
    if embeddings.ndim == 2:
        embeddings = embeddings[:, None, :]
    result = np.empty((embeddings.shape[0], embeddings.shape[2]), dtype=np.float32)
    # 64 MiB of float32 at a time: the table of all crops may fill the memory.
    rows_at_once = max(1, (64 << 20) // (4 * embeddings.shape[1] * embeddings.shape[2]))
    for start in range(0, len(result), rows_at_once):
        block = embeddings[start : start + rows_at_once]
        centred = block if mean is None else block - mean.astype(np.float32)
        with np.errstate(over="ignore"):
            lengths = np.linalg.norm(centred, axis=2, keepdims=True)
        if len(lengths) and not SAFE_LENGTHS[0] < lengths.min() <= lengths.max() < SAFE_LENGTHS[1]:
            # Their squares overflow or vanish; a power of two changes no digit.
            centred = np.ldexp(centred, -np.frexp(np.abs(centred).max(axis=2, keepdims=True))[1])
            lengths = np.linalg.norm(centred, axis=2, keepdims=True)
        average = (centred / np.maximum(lengths, EPSILON)).mean(axis=1)
        result[start : start + rows_at_once] = average / np.maximum(
            np.linalg.norm(average, axis=1, keepdims=True), EPSILON
        )
    return result


def cosine_scores(
    embeddings: np.ndarray, enrol: np.ndarray, test: np.ndarray, device: torch.device | str = "cpu"
) -> np.ndarray:
    """Dot products of the rows that each trial names.

    Args:
        embeddings: (utterances, dim) of length 1 (then the dot product is the cosine), float32.
        enrol: (trials,) rows.
        test: (trials,) rows.
        device: where they are computed; on an accelerator block by block.

    Returns:
        (trials,) float32.

    >>> unit = np.eye(2, dtype=np.float32)
    >>> cosine_scores(unit, np.array([0, 0]), np.array([0, 1])).tolist()
    [1.0, 0.0]
    """
    if torch.device(device).type != "cpu":
        return blocked_cosine_scores(embeddings, enrol, test, device)
    table = torch.from_numpy(np.ascontiguousarray(embeddings, dtype=np.float32))
    num_rows = len(table)
    # By enrolment utterance the trials are the filled places of a sparse matrix, each there once; a product computed at
    # those places alone reads the rows where they lie, without copies.
    places = enrol.astype(np.int64) * num_rows + test
    order = np.argsort(places)
    places = places[order]
    starts = group_starts(places)
    repeats = np.diff(np.append(starts, len(places)))
    rows, columns = np.divmod(places[starts], max(1, num_rows))
    del places
    row_starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        wanted = torch.sparse_csr_tensor(
            torch.from_numpy(row_starts.astype(np.int32)),
            torch.from_numpy(columns.astype(np.int32)),
            torch.zeros(len(columns)),
            (num_rows, num_rows),
            # Rows beyond the table would be read from foreign memory.
            check_invariants=True,
        )
    scores = np.empty(len(order), dtype=np.float32)
    scores[order] = np.repeat(torch.sparse.sampled_addmm(wanted, table, table.T, beta=0.0).values().numpy(), repeats)
    return scores


def blocked_cosine_scores(
    embeddings: np.ndarray, enrol: np.ndarray, test: np.ndarray, device: torch.device | str
) -> np.ndarray:
    """The same as `cosine_scores` from rows that are gathered on a device, in blocks of trials.

    No product of matrices: TF32 has no part in it.

    Raises:
        ValueError: a row beyond the embeddings.
    """
    if len(enrol) and not 0 <= min(enrol.min(), test.min()) <= max(enrol.max(), test.max()) < len(embeddings):
        raise ValueError(f"trials name rows beyond the {len(embeddings)} embeddings")
    table = torch.from_numpy(np.ascontiguousarray(embeddings, dtype=np.float32)).to(device)
    sides = [torch.from_numpy(rows.astype(np.int64)).to(device) for rows in (enrol, test)]
    scores = torch.empty(len(enrol), device=device)
    # Both sides of a trial are gathered.
    block = max(1, DEVICE_BLOCK_BYTES // (2 * 4 * table.shape[1]))
    for first in range(0, len(scores), block):
        some = slice(first, first + block)
        scores[some] = torch.linalg.vecdot(table[sides[0][some]], table[sides[1][some]])
    return scores.cpu().numpy()


def mean_distance_scores(
    embeddings: np.ndarray,
    enrol: np.ndarray,
    test: np.ndarray,
    *,
    normalize: bool = True,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Minus the mean Euclidean distance over all pairs of crops, voxceleb_trainer's score.

    Args:
        embeddings: (utterances, crops, dim) float32.
        enrol: (trials,) rows.
        test: (trials,) rows.
        normalize: scale every crop's embedding to length 1 first (voxceleb_trainer does so where the loss says).
        device: where they are computed, block by block.

    Returns:
        (trials,) float32.

    >>> crops = np.array([[[3.0, 4.0]], [[0.0, 0.0]]], dtype=np.float32)
    >>> mean_distance_scores(crops, np.array([0]), np.array([1]), normalize=False).tolist()
    [-5.0]
    """
    table = torch.from_numpy(np.ascontiguousarray(embeddings, dtype=np.float32)).to(device)
    lengths = torch.linalg.vector_norm(table, dim=2)  # (utterances, crops)
    # Scaling the products instead of the crops saves a copy of the whole table.
    scales = lengths.clamp(min=EPSILON).reciprocal() if normalize else torch.ones_like(lengths)
    squares = (lengths * scales).square()
    enrol_rows, test_rows = torch.from_numpy(enrol.astype(np.int64)), torch.from_numpy(test.astype(np.int64))
    order = torch.argsort(enrol_rows)
    block_bytes = BLOCK_BYTES if table.device.type == "cpu" else DEVICE_BLOCK_BYTES
    block = max(1, block_bytes // (4 * table.shape[1] * table.shape[2]))
    gathered = torch.empty((max(block, GROUP_WIDTHS[0]), *table.shape[1:]), device=device)
    scores = torch.empty(len(order), device=device)
    for width, firsts in _groups(enrol_rows[order].numpy()):
        groups = max(1, block // width)
        for start in range(0, len(firsts), groups):
            positions = torch.from_numpy(firsts[start : start + groups, None] + np.arange(width))
            trials = order[positions]  # (groups, width)
            rows = enrol_rows[trials[:, 0]].to(device), test_rows[trials].to(device)
            distances = _mean_distances(table, scales, squares, *rows, gathered[: trials.numel()])
            scores[trials.to(device)] = distances.neg_()
    return scores.cpu().numpy()


def _mean_distances(
    table: Tensor, scales: Tensor, squares: Tensor, enrol: Tensor, test: Tensor, gathered: Tensor
) -> Tensor:
    """Mean distances of utterances (groups,) to several (groups, width) each; `gathered` is room for the latter."""
    num_groups, width = test.shape
    crops = table.shape[1]
    first = table[enrol] * (-2 * scales[enrol])[:, :, None]
    torch.index_select(table, 0, test.view(-1), out=gathered)
    # |a - b|^2 = |a|^2 + |b|^2 - 2ab; rounding can push it just below zero.
    products = torch.bmm(first, gathered.view(num_groups, width * crops, -1).transpose(1, 2))
    products.mul_(scales[test].view(num_groups, 1, -1)).add_(squares[test].view(num_groups, 1, -1))
    distances = products.add_(squares[enrol][:, :, None]).clamp_(min=0).sqrt_()  # (groups, crops, width * crops)
    return distances.sum(dim=1).view(num_groups, width, crops).sum(dim=2).div_(crops * crops)


def _groups(sorted_rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Runs of equal rows cut into pieces: (width, first positions of all pieces of that width), widest first."""
    starts = group_starts(sorted_rows)
    counts = np.diff(np.append(starts, len(sorted_rows)))
    for width in GROUP_WIDTHS:
        pieces = counts // width
        number_in_run = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        yield width, np.repeat(starts, pieces) + width * number_in_run
        starts, counts = starts + pieces * width, counts % width
