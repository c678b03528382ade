"""Windows of speech into speakers: more clusters than people by spectral clustering, then joined two by two.

Arrays in, labels out. The number of speakers is found unless it is given.
"""

import itertools

import numpy as np
import scipy.cluster.hierarchy
import scipy.linalg
from scipy.spatial.distance import squareform

from speakernet.evaluation.scoring import mean_embeddings

MOST_SPEAKERS = 10
"""Unless `--max-speakers` says another number."""
NEIGHBOUR_SHARES = (0.03, 0.05, 0.08, 0.12)
"""Shares of the windows that each one is linked with; the one with the clearest gap is taken."""
FEWEST_NEIGHBOURS = 6
FEWEST_FOR_SPECTRAL = 30
"""Below, neighbours say little: average linkage down to `SAME_WINDOWS`."""
SAME_WINDOWS = 0.3
"""Mean cosine between short windows of one voice in noise."""
SAME_VOICE = 0.52
"""Clusters whose windows are so alike, 1.0 being as alike as those of one cluster, are one voice."""
MOST_SHARED = 0.25
"""Cosine that all windows of a room have in common at most, which says nothing about voices."""
LEAST_WITHIN = 0.15
"""Cosine beyond the shared one within a cluster of hardly more than a window."""
SHARED_WEIGHT = 0.3
"""Of the mean embedding, which is taken from all before neighbours are sought."""
MORE_CLUSTERS, FEWEST_CLUSTERS = 1, 7
"""Found beyond the eigengap, and in all: to join what was split is easier than to split what was joined."""
MOST_POINTS, BLOCK = 1500, 1000
"""More windows are first joined with their like, block by block: time and memory grow with the square."""


def cluster(
    embeddings: np.ndarray, *, num_speakers: int | None = None, max_speakers: int = MOST_SPEAKERS
) -> np.ndarray:
    """A label for each window, (windows,), 0 for who speaks first.

    Args:
        embeddings: (windows, dim) of length 1, in order of time.
        num_speakers: if it is known.
        max_speakers: at most, if it is not.
    """
    least = num_speakers or 1
    if len(embeddings) <= least:
        return np.arange(len(embeddings))
    points, of_window = _condensed(embeddings)
    if len(points) < FEWEST_FOR_SPECTRAL:
        first = _linked(points, num_speakers)
    else:
        first = _spectral(points, max(least, FEWEST_CLUSTERS), max(least, max_speakers, MOST_SPEAKERS) + MORE_CLUSTERS)
    labels = _joined(embeddings, first[of_window], num_speakers, max_speakers)
    _, begin, labels = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(begin))[labels]


def centres(embeddings: np.ndarray, labels: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Of the clusters 0, 1, …, weighted by seconds, (clusters, dim) of length 1."""
    sums = np.zeros((labels.max() + 1, embeddings.shape[1]))
    np.add.at(sums, labels, embeddings * seconds[:, None])
    return mean_embeddings(sums.astype(np.float32))


def _condensed(embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most about `MOST_POINTS` points, and the one of each window."""
    if len(embeddings) <= MOST_POINTS:
        return embeddings, np.arange(len(embeddings))
    blocks = np.array_split(np.arange(len(embeddings)), -(-len(embeddings) // BLOCK))
    each, of_window, found = max(2, MOST_POINTS // len(blocks)), np.zeros(len(embeddings), dtype=np.int64), 0
    for rows in blocks:
        of_window[rows] = _linked(embeddings[rows], each) + found
        found = int(of_window[rows].max()) + 1
    return centres(embeddings, of_window, np.ones(len(embeddings))), of_window


def _linked(points: np.ndarray, num_clusters: int | None) -> np.ndarray:
    """Average linkage, to so many clusters, or while the mean cosine is that of one voice."""
    distances = np.clip(1.0 - points.astype(np.float64) @ points.T, 0.0, 2.0)
    np.fill_diagonal(distances, 0.0)
    tree = scipy.cluster.hierarchy.linkage(squareform(distances, checks=False), "average")
    how = ("distance", 1.0 - SAME_WINDOWS) if num_clusters is None else ("maxclust", num_clusters)
    return scipy.cluster.hierarchy.fcluster(tree, how[1], how[0]) - 1


def _spectral(points: np.ndarray, fewest: int, most: int) -> np.ndarray:
    """Spectral clustering into a few more clusters than the eigengap says, with the neighbours of the clearest gap.

    Source: Park et al., Auto-tuning spectral clustering for speaker diarization using normalized maximum eigengap, 2020
    """
    apart = mean_embeddings(points, SHARED_WEIGHT * points.mean(axis=0))
    similarity, best, most = apart @ apart.T, np.inf, min(most, len(points) - 1)
    for count in sorted({max(FEWEST_NEIGHBOURS, round(share * len(points))) for share in NEIGHBOUR_SHARES}):
        nearest = similarity >= np.partition(similarity, -count, axis=1)[:, -count, None]
        graph = (nearest + nearest.T) / 2.0
        laplacian = np.diag(graph.sum(axis=1)) - graph
        values, found = scipy.linalg.eigh(laplacian, subset_by_index=[0, most])
        gaps = np.diff(values)
        ratio = count / max(gaps.max() / max(values[-1], 1e-10), 1e-10)
        if ratio < best:
            best, vectors, clearest = ratio, found, int(gaps.argmax()) + 1
    chosen = vectors[:, : min(max(clearest + MORE_CLUSTERS, fewest), most)]
    tree = scipy.cluster.hierarchy.linkage(chosen, "ward")
    return scipy.cluster.hierarchy.fcluster(tree, chosen.shape[1], "maxclust") - 1


def _joined(embeddings: np.ndarray, labels: np.ndarray, num_speakers: int | None, most: int) -> np.ndarray:
    """The two most alike joined, and windows moved to the nearest centre, until the number is reached or all differ."""
    while True:
        labels = np.unique(labels, return_inverse=True)[1]
        nearest = (embeddings @ centres(embeddings, labels, np.ones(len(labels))).T).argmax(axis=1)
        if len(np.unique(nearest)) > labels.max():
            labels = nearest
        alike = _alike(embeddings, labels)
        is_apart = num_speakers is None and alike.max() < SAME_VOICE and labels.max() < most
        if is_apart or labels.max() < (num_speakers or 1):
            return labels
        one, other = np.unravel_index(alike.argmax(), alike.shape)
        labels[labels == other] = one


def _alike(embeddings: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(clusters, clusters): mean cosine between their windows, beyond what all share, over that within both."""
    is_in = np.eye(labels.max() + 1)[labels]
    sums, sizes = is_in.T @ embeddings, np.diag(is_in.sum(axis=0))
    # Of different windows: each one has a cosine of 1 with itself.
    cosines = (sums @ sums.T - sizes) / np.maximum(np.outer(np.diag(sizes), np.diag(sizes)) - sizes, 1)
    beyond = cosines - min(cosines.min(), MOST_SHARED)
    within = np.sqrt(np.maximum(np.diag(beyond), LEAST_WITHIN))
    return np.where(np.eye(len(within), dtype=bool), -1.0, beyond / np.outer(within, within))


def runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """First and last + 1 row of each run of equal labels.

    >>> runs(np.array([3, 3, 1]))
    [(0, 2), (2, 3)]
    """
    edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    return list(itertools.pairwise(edges))
