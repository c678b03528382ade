"""Back ends fitted on recordings of the target domain: mean, whitening, CORAL, LDA, WCCN and
two-covariance PLDA.

These functions turn arrays of embeddings and labels into affine maps (with scaling to unit length
between them) and PLDA variances. All accept labels, even if they ignore them, so that callers can
treat them alike. `speakernet.inference.adapt` chooses among them and writes the choice into a model
file.

Source: Sun, Feng and Saenko, Return of frustratingly easy domain adaptation, 2016 (CORAL); Hatch,
Kajarekar and Stolcke, Within-class covariance normalization, 2006; Ioffe, Probabilistic linear
discriminant analysis, 2006; Prince and Elder, Probabilistic linear discriminant analysis for
inferences about identity, 2007; Garcia-Romero and McCree, Supervised domain adaptation for i-vector
based speaker recognition, 2014 (interpolation of covariances).
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from scipy.linalg import eigh

from speakernet.evaluation.scoring import Plda, mean_embeddings, to_unit_length

MIN_VARIANCE = 1e-9
"""A direction with a smaller share of the mean variance than this counts as having no variance."""


@dataclass(frozen=True)
class Transform:
    """Affine maps of embeddings, with scaling to unit length between them, and a PLDA if it scores
    the results.

    >>> centred = Transform(((np.eye(2), np.array([-1.0, 0.0])),))
    >>> centred.apply(np.array([[1.0, 2.0]])).tolist()
    [[0.0, 1.0]]
    """

    maps: tuple[tuple[ndarray, ndarray], ...]
    """Matrices (outputs, inputs) and offsets (outputs,)."""
    plda: Plda | None = None
    """None: results are scored by cosine."""

    def apply(self, embeddings: ndarray) -> ndarray:
        """Map the network's embeddings (utterances, dim) to adapted ones of unit length,
        float32.
        """
        # In float64, because whitening divides by small deviations, which magnifies rounding errors
        # of float32.
        rows = np.asarray(embeddings, dtype=np.float64)
        for number, (matrix, offset) in enumerate(self.maps):
            rows = (to_unit_length(rows) if number else rows) @ matrix.T + offset
        return mean_embeddings(rows.astype(np.float32))


@dataclass(frozen=True)
class Covariances:
    """The two-covariance model: an embedding is a speaker's mean plus a deviation, both normally
    distributed.
    """

    mean: ndarray
    """(dim,)"""
    between: ndarray
    """(dim, dim), of the speakers' means."""
    within: ndarray
    """(dim, dim), of one speaker's embeddings."""

    def shrunk(self, shrinkage: float) -> "Covariances":
        """Both covariances, each shrunk towards the identity times its mean variance.

        The one between speakers is estimated from less data, so it keeps only half the weight that
        the other keeps.
        """
        return Covariances(
            self.mean, shrunk(self.between, (1 + shrinkage) / 2), shrunk(self.within, shrinkage)
        )

    def interpolate(self, other: "Covariances", share: float) -> "Covariances":
        """A mixture of `share` of the other model's covariances and the rest of this model's,
        around this model's mean.

        Source: Garcia-Romero and McCree 2014, equations 6 and 7.
        """
        between = (1 - share) * self.between + share * other.between
        within = (1 - share) * self.within + share * other.within
        return Covariances(self.mean, between, within)

    def adapt(self, rows: ndarray) -> "Covariances":
        """Adapted to unlabelled embeddings, whose excess variance is divided equally between the
        two covariances.

        Source: wespeaker's `adapt_plda`; Kaldi's PldaUnsupervisedAdaptor gives 0.7 to the one
        between speakers.
        """
        # Excess variance is what this model does not explain of the new recordings. Without labels
        # it may come from voices or from channels, so each covariance gets half.
        total = self.between + self.within
        variances, directions = eigh(np.cov(rows.T), total)
        # Columns of the inverse transpose; over all of them, total = basis basis^T.
        basis = np.linalg.inv(directions.T)[:, variances > 1]
        half = 0.5 * (basis * (variances[variances > 1] - 1)) @ basis.T
        return Covariances(rows.mean(axis=0), self.between + half, self.within + half)

    def plda(self, dim: int | None = None) -> tuple[tuple[ndarray, ndarray], Plda]:
        """The map to the `dim` directions that separate speakers best, and PLDA in that space."""
        # Generalised eigenvectors make the covariance within speakers the identity and the one
        # between speakers diagonal, so that a score is a sum over dimensions.
        variances, directions = eigh(self.between, self.within)
        matrix = directions[:, ::-1][:, :dim].T
        variances = np.maximum(variances[::-1][:dim], 0.0)
        return (matrix, -matrix @ self.mean), Plda(variances, 1 / (1 + variances))


def two_covariances(rows: ndarray, labels: ndarray) -> Covariances:
    """Estimate the covariances between and within speakers, (dim, dim) each, by moments.

    If all speakers have equally many recordings, this is the maximum-likelihood estimate (Prince
    and Elder 2007 use EM). Directions in which speaker means vary less than their estimation error
    get no variance between speakers.

    Args:
        rows: (utterances, dim).
        labels: (utterances,) speaker numbers.
    """
    # By moments rather than EM: if speakers have about equally many recordings, both give nearly
    # the same covariances, and this is a few matrix products without a number of iterations to
    # choose.
    _, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sums = np.add.reduceat(rows[np.argsort(numbers, kind="stable")], np.cumsum(counts) - counts)
    means = sums / counts[:, None]
    deviations = rows - means[numbers]
    within = deviations.T @ deviations / max(1, len(rows) - len(counts))
    of_means = np.cov(means.T, bias=True) * len(counts) / max(1, len(counts) - 1)
    # Means vary between speakers, and because each is an estimate.
    variances, directions = np.linalg.eigh(of_means - within * np.mean(1 / counts))
    between = (directions * np.maximum(variances, 0.0)) @ directions.T
    return Covariances(means.mean(axis=0), between, within)


def shrunk(matrix: ndarray, share: float) -> ndarray:
    """A covariance mixed with `share` of the identity times its mean variance.

    >>> shrunk(np.diag([1.0, 3.0]), 0.5).tolist()
    [[1.5, 0.0], [0.0, 2.5]]
    """
    return (1 - share) * matrix + share * np.trace(matrix) / len(matrix) * np.eye(len(matrix))


def centring(rows: ndarray, labels: ndarray | None = None) -> Transform:
    """Subtract the mean of the domain's embeddings, (utterances, dim)."""
    return Transform(((np.eye(rows.shape[1]), -rows.mean(axis=0)),))


def whitening(rows: ndarray, labels: ndarray | None = None, *, shrinkage: float) -> Transform:
    """Zero mean and, apart from shrinkage, unit variance in all directions."""
    return _transform_by(rows, _power(shrunk(np.cov(rows.T, bias=True), shrinkage), -0.5))


def coral(
    rows: ndarray, labels: ndarray | None = None, *, others: ndarray, shrinkage: float
) -> Transform:
    """Give the domain's embeddings the covariance of `others`, embeddings like those that the
    network was trained on.

    Source: Sun et al. 2016, algorithm 1, with the domains exchanged, since target-domain embeddings
    are mapped here.
    """
    here = shrunk(np.cov(rows.T, bias=True), shrinkage)
    there = shrunk(np.cov(others.T, bias=True), shrinkage)
    return _transform_by(rows, _power(there, 0.5) @ _power(here, -0.5))


def wccn(rows: ndarray, labels: ndarray, *, shrinkage: float, total: float = 0.0) -> Transform:
    """Zero mean, unit length, and the identity as within-speaker covariance, apart from shrinkage.

    With few speakers this covariance is uncertain: a share `total` of it is replaced by the
    covariance of all embeddings, scaled to the same mean variance.
    """
    first, lengths = _centred_units(rows)
    within = two_covariances(lengths, labels).within
    everything = np.cov(lengths.T, bias=True)
    mixed = (1 - total) * within + total * everything * (np.trace(within) / np.trace(everything))
    return Transform((first, *_transform_by(lengths, _power(shrunk(mixed, shrinkage), -0.5)).maps))


def lda(rows: ndarray, labels: ndarray, *, shrinkage: float, dim: int) -> Transform:
    """Zero mean, unit length, and the `dim` directions that separate speakers best."""
    first, lengths = _centred_units(rows)
    covariances = two_covariances(lengths, labels)
    within = shrunk(covariances.within, shrinkage)
    (matrix, _), _ = Covariances(covariances.mean, covariances.between, within).plda(dim)
    return Transform((first, *_transform_by(lengths, matrix).maps))


def plda(rows: ndarray, labels: ndarray, *, shrinkage: float, dim: int | None = None) -> Transform:
    """Zero mean, unit length, and two-covariance PLDA."""
    first, lengths = _centred_units(rows)
    return with_plda(first, two_covariances(lengths, labels).shrunk(shrinkage), dim)


def adapted_plda(
    rows: ndarray,
    labels: ndarray | None,
    *,
    others: ndarray,
    other_labels: ndarray,
    shrinkage: float,
    share: float = 0.5,
) -> Transform:
    """PLDA of other labelled embeddings, adapted to the domain: by interpolation with labels, or by
    excess variance.
    """
    first, lengths = _centred_units(rows)
    theirs = two_covariances(_centred_units(others)[1], other_labels).shrunk(shrinkage)
    if labels is None:
        return with_plda(first, theirs.adapt(lengths))
    ours = two_covariances(lengths, labels).shrunk(shrinkage)
    return with_plda(first, ours.interpolate(theirs, share))


def with_plda(
    first: tuple[ndarray, ndarray], covariances: Covariances, dim: int | None = None
) -> Transform:
    """A map, unit length, and PLDA with these covariances."""
    last, plda = covariances.plda(dim)
    return Transform((first, last), plda)


def _centred_units(rows: ndarray) -> tuple[tuple[ndarray, ndarray], ndarray]:
    """The map that subtracts the mean, and the mapped rows at unit length."""
    ((matrix, offset),) = centring(rows).maps
    return (matrix, offset), to_unit_length(rows + offset)


def _transform_by(rows: ndarray, matrix: ndarray) -> Transform:
    return Transform(((matrix, -matrix @ rows.mean(axis=0)),))


def _power(covariance: ndarray, exponent: float) -> ndarray:
    """A symmetric matrix to a power; variances near zero count as a tiny positive one."""
    variances, directions = np.linalg.eigh(covariance)
    least = max(MIN_VARIANCE * variances.mean(), np.finfo(float).tiny)
    return (directions * np.maximum(variances, least) ** exponent) @ directions.T
