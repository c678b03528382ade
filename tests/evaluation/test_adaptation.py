"""Back ends of the target domain, each against its definition or an independent implementation."""

import struct

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.linalg import sqrtm
from scipy.stats import multivariate_normal
from sklearn.covariance import shrunk_covariance

from speakernet.checkpoint import CheckpointError
from speakernet.evaluation import adaptation
from speakernet.evaluation.adaptation import Covariances, two_covariances
from speakernet.inference.adapt import ForeignFiles, import_plda
from speakernet.models.importers.plda import read_array, read_plda

DIM = 6
SPEAKERS = 40
EACH = 8
RANDOM = np.random.default_rng(30)
LABELS = np.repeat(np.arange(SPEAKERS), EACH)
VOICES = RANDOM.standard_normal((SPEAKERS, DIM)) @ np.diag([3, 2, 1.5, 1, 0.5, 0.2])
ROWS = 5 + VOICES[LABELS] + RANDOM.standard_normal((len(LABELS), DIM)) @ (np.eye(DIM) + 0.4)
OTHERS = RANDOM.standard_normal((300, DIM)) @ np.triu(np.ones((DIM, DIM)))


def mapped(transform, rows):
    """All maps in order, without the final length normalisation."""
    for number, (matrix, offset) in enumerate(transform.maps):
        rows = (
            rows / np.linalg.norm(rows, axis=1, keepdims=True) if number else rows
        ) @ matrix.T + offset
    return rows


def test_statistics_by_hand():
    rows = np.array([[0.0], [2.0], [5.0], [9.0]])
    found = two_covariances(rows, np.array([3, 3, 8, 8]))
    # Means 1 and 7; squared deviations 1 + 1 + 4 + 4 over two degrees of freedom; variance of the
    # means 18 - 5 / 2.
    assert (found.mean[0], found.within[0, 0], found.between[0, 0]) == pytest.approx((4, 5, 15.5))
    # Means closer than their error do not give a negative variance.
    assert two_covariances(rows, np.array([0, 1, 1, 0])).between[0, 0] == pytest.approx(0)
    assert_allclose(adaptation.shrunk(np.cov(ROWS.T), 0.3), shrunk_covariance(np.cov(ROWS.T), 0.3))


def test_linear_maps():
    white = mapped(adaptation.whitening(ROWS, shrinkage=0.0), ROWS)
    assert_allclose(np.cov(white.T, bias=True), np.eye(DIM), atol=1e-9)
    assert_allclose(mapped(adaptation.centring(ROWS), ROWS).mean(axis=0), 0, atol=1e-9)
    coloured = mapped(adaptation.coral(ROWS, others=OTHERS, shrinkage=0.0), ROWS)
    assert_allclose(
        np.cov(coloured.T), np.cov(OTHERS.T) * len(ROWS) / (len(ROWS) - 1) * 299 / 300, rtol=1e-6
    )
    within = two_covariances(
        mapped(adaptation.wccn(ROWS, LABELS, shrinkage=0.0), ROWS), LABELS
    ).within
    assert_allclose(within, np.eye(DIM), atol=1e-9)
    # A direction without variance does not divide by zero.
    flat = ROWS * np.array([1, 1, 1, 1, 1, 0])
    assert np.isfinite(mapped(adaptation.whitening(flat, shrinkage=0.0), flat)).all()


@pytest.mark.parametrize("dim", [None, 3])
def test_plda(dim):
    covariances = two_covariances(ROWS, LABELS).shrunk(0.2)
    (matrix, offset), plda = covariances.plda(dim)
    assert_allclose(matrix @ covariances.within @ matrix.T, np.eye(dim or DIM), atol=1e-9)
    assert_allclose(matrix @ covariances.between @ matrix.T, np.diag(plda.between), atol=1e-9)
    rows = ROWS[:12] @ matrix.T + offset
    enrol, test = np.triu_indices(12, 1)
    found = plda.trial_scores(rows.astype(np.float32), enrol, test)
    # Scores of all pairs are compared with the toolkits' definition below.
    expected = plda.scores(rows, rows)[enrol, test]
    assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_adapted_covariances():
    ours = two_covariances(ROWS, LABELS)
    theirs = Covariances(np.ones(DIM), np.eye(DIM), 2 * np.eye(DIM))
    mixed = ours.interpolate(theirs, 0.25)
    assert_allclose(mixed.within, 0.75 * ours.within + 0.5 * np.eye(DIM))
    assert_array_equal(mixed.mean, ours.mean)
    # In the basis in which the total covariance is the identity, the variance above 1 is shared.
    found = theirs.adapt(OTHERS)
    root = np.real(sqrtm(theirs.between + theirs.within))
    variances, directions = np.linalg.eigh(
        np.linalg.inv(root) @ np.cov(OTHERS.T) @ np.linalg.inv(root)
    )
    excess = root @ (directions * np.maximum(variances - 1, 0)) @ directions.T @ root
    assert_allclose(found.between, theirs.between + excess / 2)
    assert_allclose(found.within, theirs.within + excess / 2)


def reference(rows, plda, *, is_kaldi):
    """Scores of all pairs as defined by the toolkits, p(test | enrolment) / p(test)."""
    transform, offset, psi = plda
    rows = np.sqrt(DIM) * rows / np.linalg.norm(rows, axis=1, keepdims=True) @ transform.T + offset
    squares = rows**2 / (psi + 1) if is_kaldi else rows**2
    rows *= np.sqrt(DIM / squares.sum(axis=1, keepdims=True))
    known = [
        multivariate_normal(psi / (psi + 1) * row, np.diag(1 + psi / (psi + 1))) for row in rows
    ]
    anybody = multivariate_normal(np.zeros(DIM), np.diag(1 + psi))
    return np.array([of_speaker.logpdf(rows) - anybody.logpdf(rows) for of_speaker in known])


def kaldi_text(*arrays):
    rows = [
        " [ " + " ".join(map(repr, a.tolist())) + " ]\n"
        if a.ndim == 1
        else " [\n  " + "\n  ".join(" ".join(map(repr, row)) for row in a.tolist()) + " ]\n"
        for a in arrays
    ]
    return "".join(rows).encode()


def kaldi_binary(*arrays):
    def encoded(a):
        sizes = b"".join(b"\4" + struct.pack("<i", size) for size in a.shape)
        return (b"DV " if a.ndim == 1 else b"DM ") + sizes + a.astype("<f8").tobytes()

    return b"".join(map(encoded, arrays))


@pytest.mark.parametrize(
    "kind", ["text", "binary", pytest.param("hdf5", marks=pytest.mark.needs("h5py"))]
)
def test_scores_of_imported_plda(tmp_path, kind):
    mean, transform = RANDOM.standard_normal(DIM), RANDOM.standard_normal((DIM, DIM))
    psi, offset = RANDOM.uniform(0, 5, DIM), -transform @ mean
    path = tmp_path / "plda"
    if kind == "hdf5":
        import h5py

        with h5py.File(path, "w") as file:
            parts = {"mu": mean, "transform": transform, "psi": psi, "offset": offset}
            for name, value in parts.items():
                file.create_dataset(name, data=value, compression="gzip", fletcher32=True)
    elif kind == "text":
        path.write_bytes(b"<Plda> " + kaldi_text(mean, transform, psi) + b"</Plda> ")
    else:
        path.write_bytes(b"\0B<Plda> " + kaldi_binary(mean, transform, psi) + b"</Plda> ")
    # Also after Kaldi's mean and a transform with an offset.
    lda = np.c_[RANDOM.standard_normal((DIM, 9)), np.arange(DIM)]
    centre = RANDOM.standard_normal(9)
    (tmp_path / "lda").write_bytes(b"\0B" + kaldi_binary(lda))
    (tmp_path / "mean").write_bytes(kaldi_text(centre))
    others = RANDOM.standard_normal((8, 9))
    for rows, prepared, files in (
        (ROWS, ROWS - ROWS.mean(axis=0), ForeignFiles(path)),
        (
            others,
            (others - centre) @ lda[:, :9].T + lda[:, 9],
            ForeignFiles(path, tmp_path / "mean", tmp_path / "lda"),
        ),
    ):
        found = import_plda(rows, files)
        units = found.apply(rows[:8])
        expected = reference(prepared[:8], (transform, offset, psi), is_kaldi=kind != "hdf5")
        assert_allclose(found.plda.scores(units, units), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="its embeddings"):
        import_plda(ROWS[:, :4], ForeignFiles(path))
    # A vector is not a transform.
    with pytest.raises(ValueError, match="its embeddings"):
        import_plda(others, ForeignFiles(path, tmp_path / "mean", tmp_path / "mean"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0B<Plda> DV \4\xff\xff\xff\x7f",
        b"\0B<Plda> CM \4\1\0\0\0",
        b"<Plda> [ 1 2 ]\n [\n 1 0\n 0 1 ]\n [ 1 nan ]\n</Plda>",
        b"<Plda> [ 1 2 ]\n [\n 1 0\n 0 1 ]\n [ 1 -1 ]\n</Plda>",
        b"<Plda> [ 1 2 3 ]\n [\n 1 0\n 0 1 ]\n [ 1 1 ]\n</Plda>",
        b"\x80\x04\x95 a pickle",
        b"\x89HDF\r\n\x1a\n broken",
    ],
)
def test_damaged_files(tmp_path, content):
    (tmp_path / "plda").write_bytes(content)
    for read in (read_plda, read_array):
        with pytest.raises(CheckpointError, match="plda"):
            read(tmp_path / "plda")
