"""Windows of speech into speakers: spectral clustering by the eigengap, small and equal clusters joined.

Arrays in, labels out. The number of speakers is found unless it is given.
"""

import itertools

import numpy as np
import scipy.cluster.hierarchy
import scipy.cluster.vq
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
SAME_VOICE = 0.6
"""Clusters whose centres have this cosine are one voice."""
LEAST_SECONDS = 4.0
"""A cluster of less speech goes to the nearest voices: mostly it is noise or two at once."""
LEAST_SHARE = 0.05
"""The same, of a short recording's speech."""
MOST_POINTS, BLOCK = 1500, 1000
"""More windows are first joined with their like, block by block: time and memory grow with the square."""
MOST_ROUNDS = 30


def cluster(
    embeddings: np.ndarray,
    seconds: np.ndarray,
    *,
    num_speakers: int | None = None,
    max_speakers: int = MOST_SPEAKERS,
) -> np.ndarray:
    """A label for each window, (windows,), 0 for who speaks first.

    Args:
        embeddings: (windows, dim) of length 1, in order of time.
        seconds: (windows,) of speech in each.
        num_speakers: if it is known.
        max_speakers: at most, if it is not.
    """
    if len(embeddings) <= (num_speakers or 1):
        return np.arange(len(embeddings))
    points, of_window = _condensed(embeddings)
    if len(points) < FEWEST_FOR_SPECTRAL:
        first = _linked(points, num_speakers)
    else:
        # Those that are too many are joined afterwards.
        first = _spectral(points, num_speakers, min(max(max_speakers, MOST_SPEAKERS), len(points) - 1))
    labels = first[of_window]
    labels = _settled(embeddings, labels, seconds, num_speakers, max_speakers)
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


def _spectral(points: np.ndarray, num_clusters: int | None, most: int) -> np.ndarray:
    """Spectral clustering with the number of neighbours and of clusters by the normalised eigengap.

    Source: Park et al., Auto-tuning spectral clustering for speaker diarization using normalized maximum eigengap, 2020
    """
    similarity, best = points @ points.T, np.inf
    for count in sorted({max(FEWEST_NEIGHBOURS, round(share * len(points))) for share in NEIGHBOUR_SHARES}):
        nearest = similarity >= np.partition(similarity, -count, axis=1)[:, -count, None]
        graph = (nearest + nearest.T) / 2.0
        np.fill_diagonal(graph, 0.0)
        laplacian = np.diag(graph.sum(axis=1)) - graph
        values, vectors = scipy.linalg.eigh(laplacian, subset_by_index=[0, max(most, num_clusters or 1)])
        gaps = np.diff(values)
        number = num_clusters or int(gaps[:most].argmax()) + 1
        ratio = count / max(gaps[number - 1] / max(values[-1], 1e-10), 1e-10)
        if ratio < best:
            best, chosen = ratio, vectors[:, :number]
    if chosen.shape[1] == 1:
        return np.zeros(len(points), dtype=np.int64)
    return scipy.cluster.vq.kmeans2(chosen, chosen.shape[1], minit="++", seed=0)[1]


def _settled(
    embeddings: np.ndarray, labels: np.ndarray, seconds: np.ndarray, num_speakers: int | None, most: int
) -> np.ndarray:
    """Small clusters dissolved, those of one voice joined, and every window with the nearest centre."""
    least = min(LEAST_SECONDS, LEAST_SHARE * seconds.sum())
    for _ in range(MOST_ROUNDS + int(labels.max())):
        labels = np.unique(labels, return_inverse=True)[1]
        middle, size = centres(embeddings, labels, seconds), np.bincount(labels, seconds)
        alike = middle @ middle.T - 2.0 * np.eye(len(middle))
        is_free = num_speakers is None and len(middle) > 1
        if is_free and size.min() < least:
            smallest = int(size.argmin())
            nearest = np.delete(np.arange(len(middle)), smallest)
            lost = labels == smallest
            labels[lost] = nearest[(embeddings[lost] @ middle[nearest].T).argmax(axis=1)]
        elif is_free and (alike.max() > SAME_VOICE or len(middle) > most):
            one, other = np.unravel_index(alike.argmax(), alike.shape)
            labels[labels == other] = one
        else:
            again = (embeddings @ middle.T).argmax(axis=1)
            if (again == labels).all() or len(np.unique(again)) < len(middle):
                break
            labels = again
    return labels


def runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """First and last + 1 row of each run of equal labels.

    >>> runs(np.array([3, 3, 1]))
    [(0, 2), (2, 3)]
    """
    edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    return list(itertools.pairwise(edges))
