"""Memory of each process that trains a random WavLM-Large (318 million parameters), with DDP or
fully sharded.

`torchrun --nproc_per_node=2 -m benchmarks.fully_sharded --parallel fsdp`; without torchrun, a
single process. It takes two steps of AdamW on the CPU in float32, with a one-second crop per
process. `peak` includes building the network.
"""

import argparse
import resource

import numpy as np
import psutil
import torch

from speakernet.losses.options import LOSSES
from speakernet.machine.options import MachineOptions
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import create
from speakernet.parallel import distributed
from speakernet.parallel.group import joined
from speakernet.training.fully_sharded import FullySharded
from speakernet.training.optimizers import create_optimizer
from speakernet.training.options import OPTIMIZERS, RuntimeOptions, TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.ranks import SeveralProcesses
from speakernet.training.step import TrainingStep

LARGE = {
    **{
        "model_type": "wavlm",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    **{"intermediate_size": 4096, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
}
GIGABYTE = 2**30


class Crops:
    """A one-second crop for each process."""

    def __init__(self) -> None:
        self.waveforms = 0.1 * torch.randn(1, 16000)
        self.labels = torch.tensor([distributed.rank()])
        self.indices = self.labels
        self.shares = (1,) * distributed.world_size()
        self.draw_key = 0
        self.warps = self.draw_rows = np.zeros(1, dtype=np.int64)


def main() -> None:
    """Print a line for each process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parallel = parser.parse_args().parallel
    cpu = torch.device("cpu")
    with joined(MachineOptions(device="cpu")):
        torch.manual_seed(0)
        net = SpeakerNet.named(
            "Pretrained", "MHFA", 256, model_options={"config": LARGE, "trained": "all"}
        )
        net.trunk.tune(net.trunk.options, net)
        loss = create(
            LOSSES["aamsoftmax"],
            LOSSES["aamsoftmax"].options(),
            embedding_dim=256,
            num_classes=1000,
            seed=0,
        )
        kind = FullySharded if parallel == "fsdp" else SeveralProcesses
        ranks = kind(net, loss, cpu) if distributed.is_distributed() else None
        step = TrainingStep(
            net,
            loss,
            create_optimizer(OPTIMIZERS["adamw"].options(), [net, loss], cpu),
            Precision(RuntimeOptions(), "no", cpu),
            TrainingOptions(),
            utterances_per_speaker=1,
            gradient_cache=False,
            ranks=ranks,
        )
        step.ranks.requests = lambda: [False, False]
        step.ranks.begin_epoch()
        net.train()
        for _ in range(2):
            step.add(Crops())
            step.finish(1e-5)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGABYTE
        held = psutil.Process().memory_info().rss / GIGABYTE
        count = sum(one.numel() for one in net.parameters())
        for line in distributed.gather_objects(
            f"{count:,} parameters: peak {peak:.2f} GiB, held {held:.2f} GiB"
        ):
            if distributed.is_main():
                print(line)


if __name__ == "__main__":
    main()
