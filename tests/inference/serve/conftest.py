"""A calibrated model of synthetic voices, and a server of it."""

import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from speakernet.checkpoint import write_checkpoint
from speakernet.evaluation.calibration import fit_calibration
from speakernet.evaluation.scoring import mean_embeddings, whole_cosine
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet

sys.path.insert(0, str(Path(__file__).parent))
from serve_helpers import RATE, sentence, serving

SPEAKERS, SENTENCES = 6, 4


@pytest.fixture(scope="session")
def voices():
    """Sentences of every speaker, [speaker][number]."""
    return [[sentence(speaker, number) for number in range(SENTENCES)] for speaker in range(SPEAKERS)]


@pytest.fixture(scope="session")
def models(tmp_path_factory, voices):
    """A model file with calibration and thresholds, and the same without; (calibrated, uncalibrated)."""
    torch.manual_seed(0)
    net = SpeakerNet.named("ResNet", embedding_dim=16, model_options={"channels": 8, "blocks": [1, 1]}).eval()
    flat = [clip for clips in voices for clip in clips]
    rows = np.concatenate([net.embed(torch.from_numpy(clip)[None], sample_rate=RATE).numpy() for clip in flat])
    units = mean_embeddings(rows, rows.mean(0))
    speaker = np.repeat(np.arange(SPEAKERS), SENTENCES)
    first, second = np.triu_indices(len(flat), 1)
    scores, labels = (units @ units.T)[first, second], (speaker[first] == speaker[second]).astype(int)
    backend = whole_cosine(True)
    fit = {**fit_calibration(scores, labels, 0.5).to_dict(), "backend": backend, "list": "synthetic.txt"}
    limit = float(np.quantile(scores[labels == 0], 0.99))
    threshold = {"threshold": limit, "miss_rate": 0.1, "false_accept_rate": 0.01, "backend": backend, "list": "s.txt"}
    plain = model_file_contents(
        net,
        loss_normalizes=True,
        embedding_mean=torch.from_numpy(rows.mean(0)),
        embedding_mean_of={"embedding": "whole"},
    )
    folder = tmp_path_factory.mktemp("models")
    thresholds = [{"name": name, **threshold} for name in ("eer", "far_1%")]
    write_checkpoint(folder / "calibrated.pt", {**plain, "calibration": {"fits": [fit]}, "thresholds": thresholds})
    write_checkpoint(folder / "plain.pt", plain)
    return folder / "calibrated.pt", folder / "plain.pt"


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A client of a calibrated server with a store."""
    store = tmp_path_factory.mktemp("store") / "people.db"
    with serving(models[0], store) as (address, _), httpx.Client(base_url=address, timeout=30) as client:
        yield client
