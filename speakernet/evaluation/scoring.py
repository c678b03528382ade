"""Scores of trial pairs from embeddings, by blocks that fit the processor's cache, whatever the number of trials.

Two scores: the cosine of mean embeddings, and voxceleb_trainer's minus mean distance over all pairs of crops. Memory
beside embeddings and scores is a few blocks. Normalisation against a cohort is in `score_norm.py`.
"""

import numpy as np
import torch
from torch import Tensor

BLOCK_BYTES = 5 << 20
"""Gathered embeddings of both sides of a block of trials: about a level-2 cache."""
DENSE_SHARE = 0.1
"""Share of all pairs of two blocks of utterances above which a matrix product beats gathering pairs (measured)."""
TILE_UTTERANCES = 2048
EPSILON = 1e-12


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
    rows_at_once = max(1, (64 << 20) // (4 * embeddings.shape[1] * embeddings.shape[2]))
    for start in range(0, len(result), rows_at_once):
        block = embeddings[start : start + rows_at_once]
        centred = block if mean is None else block - mean.astype(np.float32)
        lengths = np.linalg.norm(centred, axis=2, keepdims=True)
        average = (centred / np.maximum(lengths, EPSILON)).mean(axis=1)
        result[start : start + rows_at_once] = average / np.maximum(
            np.linalg.norm(average, axis=1, keepdims=True), EPSILON
        )
    return result


def cosine_scores(embeddings: np.ndarray, enrol: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Dot products of the rows that each trial names.

    Args:
        embeddings: (utterances, dim) of length 1 (then the dot product is the cosine), float32.
        enrol: (trials,) rows.
        test: (trials,) rows.

    Returns:
        (trials,) float32.

    >>> unit = np.eye(2, dtype=np.float32)
    >>> cosine_scores(unit, np.array([0, 0]), np.array([0, 1])).tolist()
    [1.0, 0.0]
    """
    table = torch.from_numpy(np.ascontiguousarray(embeddings, dtype=np.float32))
    enrol_rows, test_rows = _rows(enrol), _rows(test)
    if len(enrol_rows) >= DENSE_SHARE * len(table) ** 2 and len(table) <= TILE_UTTERANCES * 8:
        return _dense_scores(table, enrol_rows, test_rows)
    scores = torch.empty(len(enrol_rows), dtype=torch.float32)
    block = max(1, BLOCK_BYTES // (8 * table.shape[1]))
    for start in range(0, len(scores), block):
        chosen = slice(start, start + block)
        first = table.index_select(0, enrol_rows[chosen])
        second = table.index_select(0, test_rows[chosen])
        torch.linalg.vecdot(first, second, out=scores[chosen])
    return scores.numpy()


def mean_distance_scores(
    embeddings: np.ndarray, enrol: np.ndarray, test: np.ndarray, *, normalize: bool = True
) -> np.ndarray:
    """Minus the mean Euclidean distance over all pairs of crops, voxceleb_trainer's score.

    Args:
        embeddings: (utterances, crops, dim) float32.
        enrol: (trials,) rows.
        test: (trials,) rows.
        normalize: scale every crop's embedding to length 1 first (voxceleb_trainer does so where the loss says).

    Returns:
        (trials,) float32.

    >>> crops = np.array([[[3.0, 4.0]], [[0.0, 0.0]]], dtype=np.float32)
    >>> mean_distance_scores(crops, np.array([0]), np.array([1]), normalize=False).tolist()
    [-5.0]
    """
    table = torch.from_numpy(np.ascontiguousarray(embeddings, dtype=np.float32))
    if normalize:
        table = torch.nn.functional.normalize(table, dim=2, eps=EPSILON)
    squares = table.square().sum(dim=2)  # (utterances, crops)
    enrol_rows, test_rows = _rows(enrol), _rows(test)
    scores = torch.empty(len(enrol_rows), dtype=torch.float32)
    block = max(1, BLOCK_BYTES // (8 * table.shape[1] * table.shape[2]))
    for start in range(0, len(scores), block):
        first, second = enrol_rows[start : start + block], test_rows[start : start + block]
        products = torch.bmm(table[first], table[second].transpose(1, 2))  # (block, crops, crops)
        # |a - b|^2 = |a|^2 + |b|^2 - 2ab; rounding can push it just below zero.
        distances = torch.add(squares[first][:, :, None], products, alpha=-2).add_(squares[second][:, None, :])
        scores[start : start + block] = distances.clamp_(min=0).sqrt_().mean(dim=(1, 2)).neg_()
    return scores.numpy()


def _rows(rows: np.ndarray) -> Tensor:
    # A list's int32 rows index as they are: a copy as int64 would cost 80 MB for ten million trials.
    return torch.from_numpy(np.ascontiguousarray(rows))


def _dense_scores(table: Tensor, enrol: Tensor, test: Tensor) -> np.ndarray:
    """Lists that name most pairs: whole matrix products, from which the trials are picked."""
    scores = torch.empty(len(enrol), dtype=torch.float32)
    order = torch.argsort(enrol, stable=True)
    sorted_enrol = enrol[order].contiguous()
    for start in range(0, len(table), TILE_UTTERANCES):
        end = min(start + TILE_UTTERANCES, len(table))
        low, high = torch.searchsorted(sorted_enrol, torch.tensor([start, end], dtype=enrol.dtype)).tolist()
        if low == high:
            continue
        products = table[start:end] @ table.T  # (tile, utterances)
        trials = order[low:high]
        flat = (sorted_enrol[low:high] - start).long() * len(table) + test[trials]
        scores[trials] = products.view(-1)[flat]
    return scores.numpy()
