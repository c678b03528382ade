"""Group windows of speech by speaker, without training.

For each number of speakers, several partitions are refined and the tightest is kept; the number of
speakers is the largest one for which all clusters differ. Everything here works on arrays.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

from speakernet.evaluation.scoring import mean_embeddings

MAX_SPEAKERS = 10
"""Default of `--max-speakers`."""
SAME_VOICE = 0.54
"""Two clusters whose windows are at least this similar are one voice; 1.0 is the similarity within
a cluster."""
MAX_SHARED = 0.25
"""Upper bound of the cosine that all windows share because of the room, regardless of who
speaks."""
MIN_WITHIN = 0.15
"""Lower bound of the cosine within a cluster minus the shared part; matters for clusters of very
few windows."""
COMPONENTS = 10
"""Number of principal components of the windows; most of the difference between speakers is in
them."""
MAX_ROUNDS = 30
"""Upper bound of the rounds that move windows to the nearest centre; they nearly always settle
earlier."""
MAX_POINTS = 1500
BLOCK = 1000
"""Beyond `MAX_POINTS` windows, similar ones are first merged block by block: time and memory grow
quadratically."""


def cluster(
    embeddings: np.ndarray, *, num_speakers: int | None = None, max_speakers: int = MAX_SPEAKERS
) -> tuple[np.ndarray, bool]:
    """Label each window by speaker, (windows,); 0 speaks first. Also whether more than
    `max_speakers` voices differ from each other.

    Args:
        embeddings: (windows, dim) of length 1, in chronological order.
        num_speakers: the number of speakers, if known.
        max_speakers: otherwise the upper bound of their number.
    """
    if len(embeddings) <= (num_speakers or 1):
        return np.arange(len(embeddings)), False
    points, of_window = _condense(embeddings)
    # Without training, windows of similar voices in a room are hard to separate. Spectral or
    # bottom-up clustering, a second pass over whole turns, and a price for each change of voice
    # were no better (docs/decisions.md). The embeddings are the likely limit, not the clustering.
    components = points - points.mean(axis=0)
    components = components @ np.linalg.svd(components, full_matrices=False)[2][:COMPONENTS].T
    # Two trees, because neither is always the better start.
    trees = [linkage(rows, "ward") for rows in (points, components)]
    labels = tightest = np.zeros(len(points), dtype=np.int64)
    has_more = False
    # One more than the bound shows whether the bound is too low.
    most = num_speakers or max_speakers + 1
    for count in range(2, min(most, len(points)) + 1):
        # Ward's trees start from all windows; halving starts from the tightest partition so far,
        # which finds a voice that the trees have merged with a similar one.
        starts = [_cut(tree, count) for tree in trees] + list(_halve(points, tightest))
        partitions = [_settle(points, start) for start in starts if start.max() + 1 == count]
        if not partitions:
            # Identical points cannot be split.
            break
        tightest = max(partitions, key=lambda partition: _tightness(points, partition))
        # The number need not be found in order: two voices may look like one until a third is
        # split off, so every number up to the bound is tried.
        if num_speakers or _are_different(embeddings, tightest[of_window]):
            has_more = num_speakers is None and count > max_speakers
            labels = labels if has_more else tightest
    # Voices are numbered in the order in which they first speak.
    _, begin, labels = np.unique(labels[of_window], return_index=True, return_inverse=True)
    return np.argsort(np.argsort(begin))[labels], has_more


def centres(
    embeddings: np.ndarray, labels: np.ndarray, seconds: np.ndarray | None = None
) -> np.ndarray:
    """Mean of each cluster, (clusters, dim) of length 1, weighted by `seconds` (windows,) if
    given.
    """
    # (windows, clusters): a product with it adds up the windows of each cluster.
    weights = np.eye(labels.max() + 1, dtype=np.float32)[labels]
    if seconds is not None:
        weights = weights * seconds[:, None].astype(np.float32)
    return mean_embeddings(weights.T @ embeddings)


def _condense(embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge windows into at most about `MAX_POINTS` points; return the points and the point of each
    window.
    """
    if len(embeddings) <= MAX_POINTS:
        return embeddings, np.arange(len(embeddings))
    # Average linkage merges the most similar windows first, so a point rarely holds two people.
    blocks = np.array_split(np.arange(len(embeddings)), -(-len(embeddings) // BLOCK))
    each = max(2, MAX_POINTS // len(blocks))
    of_window = np.zeros(len(embeddings), dtype=np.int64)
    num_points = 0
    for rows in blocks:
        of_window[rows] = num_points + _cut(linkage(embeddings[rows], "average", "cosine"), each)
        num_points = int(of_window[rows].max()) + 1
    return centres(embeddings, of_window), of_window


def _cut(tree: np.ndarray, count: int) -> np.ndarray:
    """Cut a linkage into `count` clusters, or fewer if rows are identical."""
    return fcluster(tree, count, "maxclust") - 1  # type: ignore[no-any-return]


def _halve(points: np.ndarray, labels: np.ndarray) -> Iterator[np.ndarray]:
    """The partitions that result from splitting one cluster in two."""
    for row in range(labels.max() + 1):
        inside = np.flatnonzero(labels == row)
        if len(inside) > 1:
            halves = labels.copy()
            halves[inside[_cut(linkage(points[inside], "ward"), 2) == 1]] = labels.max() + 1
            yield halves


def _settle(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Move points to the nearest centre until none changes or a cluster would become empty."""
    for _ in range(MAX_ROUNDS):
        # k-means with cosines, which stops before a cluster becomes empty.
        nearest = (points @ centres(points, labels).T).argmax(axis=1)
        if len(np.unique(nearest)) <= labels.max() or (nearest == labels).all():
            break
        labels = nearest
    return labels


def _tightness(points: np.ndarray, labels: np.ndarray) -> float:
    """Mean cosine between points and the centres of their clusters."""
    return float((points * centres(points, labels)[labels]).sum(axis=1).mean())


def _are_different(embeddings: np.ndarray, labels: np.ndarray) -> bool:
    """Whether any two clusters are different voices: the mean cosine between them is low relative
    to that within, both minus the shared part.
    """
    is_in = np.eye(labels.max() + 1)[labels]
    sums = is_in.T @ embeddings
    sizes = np.diag(is_in.sum(axis=0))
    # Pairs of different windows only: the cosine of a window with itself is 1.
    cosines = (sums @ sums.T - sizes) / np.maximum(
        np.outer(np.diag(sizes), np.diag(sizes)) - sizes, 1
    )
    # A room makes all voices more alike. What the two least similar clusters share is taken to be
    # the room; the bound covers a recording with a single voice.
    beyond = cosines - min(cosines.min(), MAX_SHARED)
    within = np.sqrt(np.maximum(np.diag(beyond), MIN_WITHIN))
    likeness = beyond / np.outer(within, within)  # (clusters, clusters)
    np.fill_diagonal(likeness, -1.0)
    return bool(likeness.max() < SAME_VOICE)


def runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """The (first, last + 1) rows of each run of equal labels.

    >>> runs(np.array([3, 3, 1]))
    [(0, 2), (2, 3)]
    """
    edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    return list(itertools.pairwise(edges))
