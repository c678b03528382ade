"""A calibrated model of synthetic voices, and its server."""

import os
from pathlib import Path

import httpx
import pytest
import torch

from speakernet.evaluation.scoring import VERIFYING, verifying_backend
from tests.inference.conftest import sentence
from tests.inference.serve.serve_helpers import RATE, serving
from tests.small_networks import tiny_resnet, write_model

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
    net = tiny_resnet(16)
    flat = [clip for clips in voices for clip in clips]
    rows = torch.cat([net.embed(torch.from_numpy(clip)[None], sample_rate=RATE) for clip in flat])
    backend = {**verifying_backend({}).describe(VERIFYING), "subtract_mean": True}
    common = {"backend": backend, "list": "s.txt"}
    # The result of a calibration on all pairs of these clips.
    fit = {"inputs": ["score"], "weights": [7.6], "offset": -1.52, "prior": 0.5, **common}
    threshold = {"threshold": 0.66, "miss_rate": 0.1, "false_accept_rate": 0.01, **common}
    threshold |= {"num_targets": 36, "num_nontargets": 240}
    mean = {"embedding_mean": rows.mean(0), "embedding_mean_of": {"embedding": "whole"}}
    folder = tmp_path_factory.mktemp("models")
    thresholds = [{"name": name, **threshold} for name in ("eer", "far_1%")]
    entries = {"calibration": {"fits": [fit]}, "thresholds": thresholds}
    calibrated = write_model(folder / "calibrated.pt", net, **mean, **entries)
    return calibrated, write_model(folder / "plain.pt", net, **mean)


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A client of a calibrated server with a store."""
    store = tmp_path_factory.mktemp("store") / "people.db"
    with serving(models[0], store) as (address, _), httpx.Client(base_url=address) as client:
        client.timeout = 30
        yield client


@pytest.fixture(scope="session")
def runtime():
    """onnxruntime-web, from ONNXRUNTIME_WEB."""
    folder = Path(os.environ.get("ONNXRUNTIME_WEB", "")).resolve()
    if not (folder / "ort.wasm.min.mjs").is_file():
        pytest.skip(
            "ONNXRUNTIME_WEB is not the folder `dist` of onnxruntime-web (npm pack onnxruntime-web)"
        )
    return folder
