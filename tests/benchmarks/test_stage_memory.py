"""Memory of stages: extrapolated from few layers, it equals that counted with all of them."""

import pytest
import torch

from benchmarks.stage_memory import count
from speakernet.config import Config
from speakernet.config.schema import replaced
from speakernet.data.audio import crop_samples
from speakernet.models.speaker_net import SpeakerNet
from speakernet.training.compiling import activation_bytes
from tests.small_networks import SMALL

pytest.importorskip("peft", reason="the extra `ssl` is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["nothing", "lora", "all"])
@pytest.mark.parametrize("pooling", ["MHFA", "AdapterMFA"])
def test_few_layers(trained, pooling):
    backbone = {**SMALL["Pretrained"]["config"], "num_hidden_layers": 5}
    options = {"config": backbone, "trained": trained, "lora_rank": 2}
    model = {"name": "Pretrained", "pooling": pooling, "embedding_dim": 8, "options": options}
    config = replaced(Config(), model=model, frontend={"name": "raw"}, data={"crop_frames": 60})
    net = SpeakerNet(config.model, config.frontend, 16000)
    net.trunk.tune(config.model.options, net)
    parameters = [one.numel() for one in net.parameters()]
    moved = [one.numel() for one in net.parameters() if one.requires_grad]
    two, six = (
        activation_bytes(net, crop_samples(60, 16000), torch.bfloat16, utterances)
        for utterances in (2, 6)
    )
    found = count(config, backbone)
    assert found[:2] == (sum(parameters), sum(moved))
    assert [found.kept_once + n * found.kept_each for n in (2, 6)] == pytest.approx(
        [two, six], rel=0.01
    )
