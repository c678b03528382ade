"""A calibrated model of synthetic voices, and its server."""

import sys
from pathlib import Path

import httpx
import pytest
import torch

from speakernet.checkpoint import write_checkpoint
from speakernet.evaluation.scoring import VERIFYING, verifying_backend
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet

sys.path.insert(0, str(Path(__file__).parent))
from serve_helpers import RATE, sentence, serving

SPEAKERS = 6
SENTENCES = 4


@pytest.fixture(scope="session")
def voices():
    """Sentences of every speaker, [speaker][number]."""
    return [
        [sentence(speaker, number) for number in range(SENTENCES)] for speaker in range(SPEAKERS)
    ]


@pytest.fixture(scope="session")
def models(tmp_path_factory, voices):
    """A model file with calibration and thresholds, and the same without; (calibrated,
    uncalibrated).
    """
    torch.manual_seed(0)
    sizes = {"channels": 8, "blocks": [1, 1]}
    net = SpeakerNet.named("ResNet", embedding_dim=16, model_options=sizes).eval()
    flat = [clip for clips in voices for clip in clips]
    rows = torch.cat([net.embed(torch.from_numpy(clip)[None], sample_rate=RATE) for clip in flat])
    backend = {**verifying_backend({}).describe(VERIFYING), "subtract_mean": True}
    common = {"backend": backend, "list": "s.txt"}
    # The result of a calibration on all pairs of these clips.
    fit = {"inputs": ["score"], "weights": [7.6], "offset": -1.52, "prior": 0.5, **common}
    threshold = {"threshold": 0.66, "miss_rate": 0.1, "false_accept_rate": 0.01, **common}
    threshold |= {"num_targets": 36, "num_nontargets": 240}
    mean = {"embedding_mean": rows.mean(0), "embedding_mean_of": {"embedding": "whole"}}
    plain = model_file_contents(net, loss_normalizes=True) | mean
    folder = tmp_path_factory.mktemp("models")
    calibration = {
        "calibration": {"fits": [fit]},
        "thresholds": [{"name": name, **threshold} for name in ("eer", "far_1%")],
    }
    write_checkpoint(folder / "calibrated.pt", plain | calibration)
    write_checkpoint(folder / "plain.pt", plain)
    return folder / "calibrated.pt", folder / "plain.pt"


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A client of a calibrated server with a store."""
    store = tmp_path_factory.mktemp("store") / "people.db"
    with serving(models[0], store) as (address, _), httpx.Client(base_url=address) as client:
        client.timeout = 30
        yield client
