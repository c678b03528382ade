"""Scores on real speech against those of voxceleb_trainer's own code (f51bab8), of whole and raw embeddings.

The golden scores are of its loader, models and scoring with the weights of `golden_voxceleb_trainer.json`: ten pairs of
five utterances, ten crops of 300 frames each, minus the mean of the hundred Euclidean distances.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from speakernet.data.opening import open_source
from speakernet.evaluation.embedding import embed_utterances
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.scoring import mean_distance_scores
from speakernet.models.importers import translate
from tests.models.test_importers import foreign_state, network_for

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden_classic_scores.json").read_text())
LIGHT = json.loads((HERE / "golden_voxceleb_trainer.json").read_text())[0]
TOLERANCE = 1e-4


@pytest.mark.parametrize("normalize", [True, False])
def test_light_network(shared_data, normalize):
    net = network_for(LIGHT)
    net.load_state_dict(translate(foreign_state(LIGHT), net, "drawn").weights)
    options = EvaluationOptions(eval_frames=GOLDEN["eval_frames"], num_crops=GOLDEN["num_crops"], num_workers=1)
    embeddings = embed_utterances(net, open_source(shared_data / "speechocean_mini"), GOLDEN["names"], options)
    pairs = np.array(list(itertools.combinations(range(len(GOLDEN["names"])), 2)), dtype=np.int32)
    found = mean_distance_scores(embeddings, pairs[:, 0].copy(), pairs[:, 1].copy(), normalize=normalize)
    expected = np.array(GOLDEN["scores"]["ResNetSE34L-SAP" + ("" if normalize else "-raw")])
    # Raw embeddings are about two hundred times as long as normalised ones.
    assert np.abs(found - expected).max() < TOLERANCE * (1 if normalize else np.abs(expected).max())
