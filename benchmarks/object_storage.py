"""Rows per second and bytes per row of a packed corpus in object storage, compared with the same
corpus on disk.

    python -m benchmarks.object_storage --folder /disk/scratch --megabytes 400 --rounds 3

Creates a sharded corpus in the folder if missing, and in an S3 server on this machine (moto's, in a
separate process, which keeps it in memory and delays every answer). Each run is an epoch of batches
of two-second crops in training order, starting with an empty cache that fits half of the corpus;
batches are made in this process and discarded. Needs the extra s3, boto3 and moto[server].
"""

import argparse
import functools
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
import numpy as np

from benchmarks.data import CROP_SAMPLES, UTTERANCE_SAMPLES, Noise
from benchmarks.timing import Way, run_in_turn
from speakernet.data.batches import BatchMaker, BatchRequest, CropMaker
from speakernet.data.mixing import streamed
from speakernet.data.opening import open_source
from speakernet.data.options import DataOptions
from speakernet.data.parts import WHOLE
from speakernet.data.sampling import ShuffledSampler
from speakernet.data.shards import RemoteRows, RemoteSource
from speakernet.data.stores import pack_to_address

NAME = "object_storage"


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


class Course:
    """Epochs from one storage location."""

    def __init__(
        self, address: str, cache_gigabytes: float, batch_size: int, buffer: int, *served: Any
    ) -> None:
        self.address = address
        self.cache_gigabytes = cache_gigabytes
        self.sent, self.delay_seconds, self.wanted_delay = served or (None, None, 0.0)
        self.options = DataOptions(batch_size=batch_size, shuffle_buffer=buffer)
        self.bytes_a_row: list[float] = []

    def way(self) -> Way:
        """For `run_in_turn`."""
        return Way(self._run, self._prepare)

    def _prepare(self) -> list[tuple[CropMaker, list[BatchRequest], Any]]:
        # Kept alive until the run is over.
        cache = tempfile.TemporaryDirectory(prefix="speakernet-")
        os.environ["SPEAKERNET_CACHE"] = cache.name
        if self.delay_seconds:
            self.delay_seconds.value = self.wanted_delay
        source = open_source(self.address, shard_cache_gigabytes=self.cache_gigabytes)
        names = source.index.names  # type: ignore[attr-defined]
        table = source.lookup_table(names)
        sampler = ShuffledSampler(np.zeros(len(names), dtype=np.int32), self.options, seed=1)
        rows = source.rows(names, table)
        maker: CropMaker = BatchMaker(rows, table.num_samples, seed=1)
        if isinstance(source, RemoteSource):
            assert isinstance(rows, RemoteRows)
            sampler.in_parts = functools.partial(streamed, sampler, source.shards_of(table), 1)
            maker = rows.ahead(maker, 0)
        plan = sampler.epoch(0)
        speeds = np.zeros(self.options.batch_size, dtype=np.int64)
        requests = []
        for number in range(len(plan)):
            batch = plan.rows[plan.bounds[number] : plan.bounds[number + 1]]
            requests.append(BatchRequest(0, batch, speeds, CROP_SAMPLES, number))
        return [(maker, requests, cache)]

    def _run(self, ready: list[tuple[CropMaker, list[BatchRequest], Any]]) -> int:
        maker, requests, _cache = ready.pop()
        before = self.sent.value if self.sent else 0
        num_rows = sum(len(request.rows) for request, _, _ in maker.run(requests))
        self.bytes_a_row.append(
            (self.sent.value - before if self.sent else 2 * CROP_SAMPLES * num_rows) / num_rows
        )
        return num_rows


def main() -> int:
    """Create the corpus if missing, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument(
        "--megabytes", type=int, default=400, help="size of the corpus (default %(default)s)"
    )
    parser.add_argument("--shards", type=int, default=16, help="shards (default %(default)s)")
    parser.add_argument(
        "--batch_size", type=int, default=64, help="crops of 2 s per batch (default %(default)s)"
    )
    parser.add_argument(
        "--delays", type=float, nargs="+", default=[0.0, 20.0, 100.0], help="ms before every answer"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default %(default)s)")
    arguments = parser.parse_args()
    corpus = arguments.folder.absolute() / NAME
    num_rows = arguments.megabytes * 1_000_000 // (2 * UTTERANCE_SAMPLES)

    def write(address: str) -> None:
        pack_to_address(
            Noise(num_rows), address, WHOLE, arguments.shards, sample_rate=16_000, num_threads=2
        )

    write(f"file://{corpus}")
    context = multiprocessing.get_context("spawn")
    few = (arguments.megabytes / 1073.74, arguments.batch_size)
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
    courses = {"disk, fully shuffled": Course(str(corpus), *few, num_rows // 4)}
    for delay in arguments.delays:
        served = sent, delay_seconds, delay / 1000
        courses[f"S3, {delay:g} ms"] = Course(address, 0.5 * few[0], few[1], num_rows // 4, *served)
    samples = run_in_turn(
        {name: course.way() for name, course in courses.items()}, rounds=arguments.rounds, warmup=1
    )
    sys.stdout.write("| from | rows per second | bytes per row |\n|---|---:|---:|\n")
    for name, course in courses.items():
        rates = samples[name].rates
        shown = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
        sys.stdout.write(f"| {name} | {shown} | {statistics.median(course.bytes_a_row):,.0f} |\n")
    server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
