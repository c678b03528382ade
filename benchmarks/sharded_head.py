"""Memory, traffic and step time of a head with many speakers on two processes, replicated or
sharded.

    python -m benchmarks.sharded_head --speakers 6000 100000 1000000
    python -m benchmarks.sharded_head --network ResNet34                  traffic of a step of the
    network itself

Two processes communicate by gloo over the loopback device, whose byte counter is read before and
after the steps. Replicated heads are trained with torch's DistributedDataParallel, sharded ones as
with `loss.sharded: on`. Results are in benchmarks/measurements.md.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import distributed as torch_distributed
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from speakernet.files import human_bytes
from speakernet.losses.classification import AAMSoftmax
from speakernet.losses.options import AAMSoftmaxOptions
from speakernet.losses.sharded import shard
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.parallel.sync_norm import synchronize_norms

RANKS = 2
LEARNING_RATE = 0.1
MOMENTUM = 0.9
CROP_SAMPLES = 8_000
"""Length of the network's crops, which does not affect its traffic."""


@dataclass(frozen=True)
class Measured:
    """The figures of one process.

    Attributes:
        head_bytes: growth of the process by weights, gradients and momentum.
        peak_bytes: peak growth in a step, including logits.
        sent_bytes: bytes sent per step, the mean of both processes.
        seconds: the fastest step.
    """

    head_bytes: int
    peak_bytes: int
    sent_bytes: int
    seconds: float


def measure(
    rank: int, folder: str, num_speakers: int, is_shared: bool, dim: int, batch: int, steps: int
) -> None:
    """Train a head for some steps, and write the figures to the folder."""
    torch.set_num_threads(1)
    torch_distributed.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    generator = torch.Generator().manual_seed(rank)
    # Warm up: torch's own memory in the first step is not the head's.
    _train(AAMSoftmax(AAMSoftmaxOptions(), dim, 64), dim, batch, 1, generator)
    _train(AAMSoftmax(AAMSoftmaxOptions(), dim, 64), dim, batch, 1, generator, rank)
    gc.collect()
    before = _memory("VmRSS")
    # Created whole even if sharded, as at the start of a run; it is cut before anything is
    # measured.
    head = AAMSoftmax(AAMSoftmaxOptions(), dim, num_speakers)
    times, sent = _train(head, dim, batch, steps, generator, rank if is_shared else None)
    found = Measured(_memory("VmRSS") - before, _memory("VmHWM") - before, sent, min(times))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(asdict(found)))
    distributed.barrier()
    torch_distributed.destroy_process_group()


def _train(
    head: AAMSoftmax,
    dim: int,
    batch: int,
    steps: int,
    generator: torch.Generator,
    rank: int | None = None,
) -> tuple[list[float], int]:
    """Seconds of each step but the first, and bytes sent per process and step; with a rank, the
    head is sharded.
    """
    if rank is not None:
        shard(head, rank, RANKS)
    trained = DistributedDataParallel(head, gradient_as_bucket_view=True) if rank is None else head
    optimizer = torch.optim.SGD(
        head.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True, fused=True
    )
    num_speakers = head.num_classes
    times = []
    sent = 0
    for step in range(steps + 1):
        embeddings = torch.randn((batch, dim), generator=generator, requires_grad=True)
        labels = torch.randint(num_speakers, (batch,), generator=generator)
        distributed.barrier()
        if step == 1:
            sent = _loopback_bytes()
        begin = time.perf_counter()
        rows = embeddings if rank is None else _gathered(embeddings.detach()).requires_grad_()
        value, _ = trained(rows, labels if rank is None else _gathered(labels))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter() - begin)
    distributed.barrier()
    return times[1:], (_loopback_bytes() - sent) // steps // RANKS


def _gathered(rows: torch.Tensor) -> torch.Tensor:
    """The rows of both processes; the head itself exchanges their gradients."""
    gathered = [torch.empty_like(rows) for _ in range(RANKS)]
    torch_distributed.all_gather(gathered, rows)
    return torch.cat(gathered)


def measure_network(rank: int, folder: str, name: str, steps: int) -> None:
    """Train a network for some steps of two crops, and write the bytes sent per process and step to
    the folder.
    """
    torch.set_num_threads(1)
    torch_distributed.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    net = SpeakerNet.named(name)
    synchronize_norms(net, torch.device("cpu"))
    trained = DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)
    sent = 0
    for step in range(steps + 1):
        distributed.barrier()
        if step == 1:
            sent = _loopback_bytes()
        trained(torch.randn(2, CROP_SAMPLES)).square().mean().backward()
        net.zero_grad(set_to_none=False)
    distributed.barrier()
    Path(folder, f"rank{rank}.json").write_text(
        json.dumps((_loopback_bytes() - sent) // steps // RANKS)
    )
    torch_distributed.destroy_process_group()


def sent_by_network(name: str, steps: int) -> int:
    """Bytes sent by each of two processes in a step of a network."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure_network, (folder, name, steps), nprocs=RANKS)  # type: ignore[no-untyped-call]
        return max(int(Path(folder, f"rank{rank}.json").read_text()) for rank in range(RANKS))


def run(num_speakers: int, is_shared: bool, dim: int, batch: int, steps: int) -> list[Measured]:
    """Start both processes and read their figures."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            measure, (folder, num_speakers, is_shared, dim, batch, steps), nprocs=RANKS
        )  # type: ignore[no-untyped-call]
        texts = [Path(folder, f"rank{rank}.json").read_text() for rank in range(RANKS)]
    return [Measured(**json.loads(text)) for text in texts]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--speakers", type=int, nargs="+", default=[6_000, 100_000, 1_000_000])
    parser.add_argument("--dim", type=int, default=192, help="size of the embeddings")
    parser.add_argument("--batch", type=int, default=32, help="utterances per process")
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps, after one warm-up step"
    )
    parser.add_argument(
        "--network", metavar="NAME", help="measure the traffic of this network instead of a head"
    )


def main() -> int:
    """Print a line for each number of speakers, with a replicated and a sharded head."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.network:
        num_bytes = sent_by_network(arguments.network, arguments.steps)
        sys.stdout.write(
            f"{arguments.network}: {num_bytes / 1e6:.1f} MB sent per step and process\n"
        )
        return 0
    sys.stdout.write(
        "| speakers | head | weights, gradients, momentum | peak in a step | sent per step | step "
        "|\n"
    )
    sys.stdout.write("|---:|---|---:|---:|---:|---:|\n")
    for num_speakers in arguments.speakers:
        for is_shared in (False, True):
            ranks = run(num_speakers, is_shared, arguments.dim, arguments.batch, arguments.steps)
            worst = [
                max(getattr(one, name) for one in ranks)
                for name in ("head_bytes", "peak_bytes", "sent_bytes")
            ]
            seconds = max(one.seconds for one in ranks)
            words = " | ".join(human_bytes(one) for one in worst)
            kind = "sharded" if is_shared else "replicated"
            sys.stdout.write(f"| {num_speakers:,} | {kind} | {words} | {seconds:.3f} s |\n")
            sys.stdout.flush()
    return 0


def _memory(name: str) -> int:
    """Memory of this process in bytes: VmRSS is the current value, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _loopback_bytes() -> int:
    """Bytes sent through the loopback device so far, by all processes of the machine."""
    line = next(
        one
        for one in Path("/proc/net/dev").read_text().splitlines()
        if one.strip().startswith("lo:")
    )
    return int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    sys.exit(main())
