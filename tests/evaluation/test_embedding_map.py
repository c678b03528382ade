"""The map of embeddings in a report: their main plane, and the speakers that are shown."""

import numpy as np
import pytest

from speakernet.evaluation.run_data import embedding_map


def test_embedding_map_is_the_projection_on_the_main_plane(random):
    plane = np.linalg.qr(random.standard_normal((5, 2)))[0]
    flat = random.standard_normal((12, 2)) * [3.0, 1.0]
    embeddings = (flat @ plane.T).astype(np.float32)
    names = [f"a/s{row // 4}/v/{row}.wav" for row in range(12)]
    drawn = embedding_map(embeddings, np.arange(12) // 4, names)
    assert drawn is not None
    assert sum(drawn.shares) == pytest.approx(1.0, abs=1e-6) and drawn.names == ["v", "v", "v"]
    distances = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    np.testing.assert_allclose(np.linalg.norm(drawn.points[:, None] - drawn.points[None], axis=2), distances, atol=1e-4)


def test_embedding_map_takes_the_speakers_with_most_utterances_and_needs_two():
    random = np.random.default_rng(3)
    speakers = np.array([0, 1, 1, 1, 2, 2, 3])
    names = [f"s{speaker}/{row}.wav" for row, speaker in enumerate(speakers)]
    drawn = embedding_map(random.standard_normal((7, 4)).astype(np.float32), speakers, names)
    assert drawn is not None and drawn.names == ["s1", "s2"] and len(drawn.points) == 5
    assert embedding_map(np.eye(3, dtype=np.float32), np.array([0, 0, 1]), names[:3]) is None
