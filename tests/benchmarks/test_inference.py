"""The suites of use: that they run and what they give, never how fast."""

import pytest
import torch

from benchmarks.inference import THREADS, measure_runtimes, measure_serving
from speakernet.checkpoint import write_checkpoint
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet


@pytest.mark.slow
def test_every_runtime_is_measured_on_every_number_of_threads():
    before = torch.get_num_threads()
    found = measure_runtimes("ResNet", rounds=1)
    torch.set_num_threads(before)
    assert {(one.runtime, one.threads) for one in found} == {
        (runtime, threads) for runtime in ("torch", "torch, norms merged", "ONNX Runtime") for threads in THREADS
    }
    assert all(one.real_time_factor > 0 for one in found)


def test_every_answer_of_every_client_is_counted(tmp_path):
    net = SpeakerNet.named("ResNet", embedding_dim=8, model_options={"channels": 8, "blocks": [1, 1]})
    write_checkpoint(tmp_path / "model.pt", model_file_contents(net, loss_normalizes=True))
    found = measure_serving(tmp_path / "model.pt", clients=6, rounds=2)
    assert (found.clients, found.answers) == (6, 12)
    assert 0 < found.median_seconds <= found.high_seconds and 1 <= found.clips_a_batch <= 12
