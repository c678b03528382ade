"""Rows per second and bytes per row of a packed corpus in object storage, compared with the same
corpus on disk.

    python -m benchmarks.object_storage --folder /disk/scratch --megabytes 400 --rounds 3

Creates a sharded corpus in the folder if missing, and in an S3 server on this machine (moto's, in a
separate process, which keeps it in memory and delays every answer). Each run is an epoch of batches
of two-second crops in training order, starting with an empty cache that fits half of the corpus;
batches are made in this process and discarded. Needs the extra s3, boto3 and moto[server].
"""

import argparse
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import torch

from benchmarks.data import UTTERANCE_SAMPLES, Noise
from benchmarks.timing import Way, markdown_table, run_in_turn
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.config.schema import Config, with_changes
from speakernet.data.lists import write_training_list
from speakernet.data.loader import TrainingLoader
from speakernet.data.parts import WHOLE
from speakernet.data.stores import pack_to_address

NAME = "object_storage"
SHARDS = 16
BATCH_SIZE = 64


def serve(delay_seconds: Any, sent: Any, port: Any) -> None:
    """Run in a separate process: serve S3, delaying each answer, and count the bytes sent."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    storage = DomainDispatcherApplication(create_backend_app)

    def answer(request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        time.sleep(delay_seconds.value)
        body = list(storage(request, start))
        with sent.get_lock():
            sent.value += sum(map(len, body))
        return body

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, answer, threaded=True)
    port.value = server.server_port
    server.serve_forever()


def way_of(
    config: Config, bytes_a_row: list[float], sent: Any, delay_seconds: Any, delay: float
) -> Way:
    """Epochs of a corpus, each with an empty cache and with this delay before every answer."""

    def prepare() -> tuple[TrainingLoader, Any]:
        # Kept alive until the run is over.
        cache = tempfile.TemporaryDirectory(prefix="speakernet-")
        os.environ["SPEAKERNET_CACHE"] = cache.name
        delay_seconds.value = delay / 1000
        return build_training_loader(config, Inputs(config, torch.device("cpu"))), cache

    def run(ready: tuple[TrainingLoader, Any]) -> int:
        loader, _cache = ready
        before = sent.value
        num_rows = sum(len(batch.labels) for batch in loader)
        loader.close()
        bytes_a_row.append((sent.value - before) / num_rows)
        return num_rows

    return Way(run, prepare)


def main() -> int:
    """Create the corpus if missing, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument(
        "--megabytes", type=int, default=400, help="size of the corpus (default %(default)s)"
    )
    parser.add_argument(
        "--delays", type=float, nargs="+", default=[0.0, 20.0, 100.0], help="ms before every answer"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default %(default)s)")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    noise = Noise(arguments.megabytes * 1_000_000 // (2 * UTTERANCE_SAMPLES))
    train_list = folder / f"{NAME}.txt"

    def write(address: str) -> None:
        pack_to_address(noise, address, WHOLE, SHARDS, sample_rate=16_000, num_threads=2)

    folder.mkdir(parents=True, exist_ok=True)
    write_training_list(train_list, ((f"s{int(name[:-4]) % 100}", name) for name in noise.names))
    write(f"file://{folder / NAME}")
    context = multiprocessing.get_context("spawn")
    delay_seconds = context.Value("d", 0.0)
    sent = context.Value("q", 0)
    port = context.Value("i", 0)
    server = context.Process(target=serve, args=(delay_seconds, sent, port), daemon=True)
    server.start()
    while not port.value:
        time.sleep(0.01)
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "benchmark")
    os.environ.update(
        keys, AWS_DEFAULT_REGION="us-east-1", AWS_ENDPOINT_URL=f"http://127.0.0.1:{port.value}"
    )
    boto3.client("s3").create_bucket(Bucket="benchmark")
    write(address := f"s3://benchmark/{NAME}")
    loading = {
        "train_list": str(train_list),
        "batch_size": BATCH_SIZE,
        "num_workers": 0,
        "ram_corpus": "off",
        # Half of the corpus, so that an epoch reads every shard again.
        "shard_cache_gigabytes": arguments.megabytes / 2 / 1073.74,
        "shuffle_buffer": len(noise.names) // 4,
    }
    config = with_changes(Config(), data=loading, augment={"enabled": False})
    places = {"disk, fully shuffled": (str(folder / NAME), 0.0)}
    for delay in arguments.delays:
        places[f"S3, {delay:g} ms"] = address, delay
    ways = {}
    bytes_a_row: dict[str, list[float]] = {}
    for name, (place, delay) in places.items():
        there = with_changes(config, data={"train_path": place})
        bytes_a_row[name] = []
        ways[name] = way_of(there, bytes_a_row[name], sent, delay_seconds, delay)
    samples = run_in_turn(ways, rounds=arguments.rounds)
    rows = []
    for name, runs in samples.items():
        low, median, high = min(runs.rates), statistics.median(runs.rates), max(runs.rates)
        sizes = f"{statistics.median(bytes_a_row[name]):,.0f}"
        rows.append([name, f"{median:,.0f} ({low:,.0f} to {high:,.0f})", sizes])
    columns = ("from", "rows per second", "bytes sent per row")
    sys.stdout.write(markdown_table(columns, rows) + "\n")
    server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
