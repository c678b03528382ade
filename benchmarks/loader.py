"""What `speakernet benchmark` measures: the loader and the step of a configuration, and ours against the classic one.

The timing is `performance/benchmark.py`'s; here the parts are put together that it times.
"""

import dataclasses
import itertools
import logging
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import BenchmarkData
from benchmarks.timing import (
    BatchTimes,
    Comparison,
    Side,
    bare_interpreter_bytes,
    compare,
    on_one_core,
    time_batches,
    unique_bytes,
)
from speakernet.assembly.data import build_source, build_training_loader
from speakernet.assembly.model import build_loss, build_model
from speakernet.assembly.training import build_precision, build_trainer
from speakernet.config.schema import Config, replaced
from speakernet.data.loader import Batch, TrainingLoader
from speakernet.evaluation.embedding import embed_utterances
from speakernet.evaluation.scoring import mean_distance_scores
from speakernet.machine import baseline
from speakernet.training.tracker import PerformanceTracker

logger = logging.getLogger(__name__)

# Batches fetched before the clock starts: more than any queue holds.
WARM_BATCHES = 8
WARM_STEPS = 2
# VoxCeleb2's training part with VoxCeleb1's.
MILLION_ROWS = 1_092_009
CPU = torch.device("cpu")


def benchmark_config(config: Config, data: BenchmarkData, form: str, num_rows: int, **changes: Any) -> Config:
    """The configuration, turned to the benchmark's recordings and to crops as the classic pipeline gives them.

    Args:
        config: the user's.
        data: the recordings.
        form: `wav`, `flac` or `packed`.
        num_rows: length of the training list.
        changes: `augment` (bool), `style`, `num_workers`, `ram_corpus`.
    """
    training = dataclasses.replace(
        config.data,
        train_list=str(data.write_list(form, num_rows)),
        train_path=str(data.folder(form)),
        utterances_per_speaker=1,
        sampler="shuffled",
        min_seconds=0.0,
        max_seconds=0.0,
        crop_frames_max=0,
        num_classes=0,
        num_workers=changes.get("num_workers", 0),
        ram_corpus=changes.get("ram_corpus", "off"),
        device_resident="off",
        persistent_workers=True,
        # A cache would make the corpus of a benchmark, which is small, come from memory.
        cache_megabytes=config.data.cache_megabytes if changes.get("augment") else 0,
    )
    augment = dataclasses.replace(
        config.augment,
        enabled=bool(changes.get("augment")),
        style=changes.get("style", "ours"),
        noise_path=str(data.noise_path),
        rir_path=str(data.rir_path),
        probability=0.8,
        categories=["reverb", "music", "babble", "noise"],
        speed_factors=[1.0],
        volume_db=[0.0, 0.0],
        telephone_probability=0.0,
        codec_probability=0.0,
    )
    return replaced(dataclasses.replace(config, data=training, augment=augment), loss={"name": "amsoftmax"})


def our_side(config: Config, num_batches: int) -> tuple[Side, TrainingLoader]:
    """Batches of our loader on the CPU; every round is an epoch of `num_batches` and those that warm up."""
    loader = build_training_loader(config, CPU)
    epochs = itertools.count()
    running: list[Iterator[Batch]] = []

    def prepare() -> Iterator[Batch]:
        for batches in running:
            for _ in batches:
                pass
        loader.set_epoch(next(epochs))
        running[:] = [iter(loader)]
        _skip(running[0], WARM_BATCHES)
        return running[0]

    def run(batches: Iterator[Batch]) -> int:
        return sum(len(batch.labels) for batch in itertools.islice(batches, num_batches))

    return Side(prepare, run), loader


def classic_side(config: Config, data: BenchmarkData, form: str, num_batches: int) -> Side:
    """The same batches by the classic pipeline."""
    generator = random.Random(config.runtime.seed)
    frames, batch_size = config.data.crop_frames, config.data.batch_size
    augmentation = None
    if config.augment.enabled:
        noise, rooms = str(data.noise_path), str(data.rir_path)
        augmentation = baseline.ClassicAugmentation(noise, rooms, frames, generator)
    dataset = baseline.ClassicTrainingSet(data.paths(form), data.labels, frames, generator, augmentation)
    running: list[Any] = []

    def prepare() -> Any:
        # The workers of the last round end with their iterator.
        running.clear()
        rows = [[generator.randrange(len(data.names))] for _ in range(batch_size * (num_batches + WARM_BATCHES))]
        running.append(iter(baseline.training_loader(dataset, rows, batch_size, int(config.data.num_workers))))
        _skip(running[0], WARM_BATCHES)
        return running[0]

    def run(batches: Any) -> int:
        return sum(len(labels) for _, labels in itertools.islice(batches, num_batches))

    return Side(prepare, run)


def compare_loading(config: Config, data: BenchmarkData, num_batches: int, rounds: int) -> Iterator[Comparison]:
    """Our loader against the classic one, measure by measure, as they are done."""
    num_rows = config.data.batch_size * (num_batches + WARM_BATCHES)

    def measure(name: str, form: str, wanted: float, classic_form: str = "wav", **changes: Any) -> Comparison:
        made = benchmark_config(config, data, form, num_rows, **changes)
        ours, loader = our_side(made, num_batches)
        classic = classic_side(made, data, classic_form, num_batches)
        try:
            return compare(name, classic, ours, rounds=rounds, wanted=wanted)
        finally:
            loader.close()

    with on_one_core():
        yield measure("crops from PCM WAV", "wav", 10)
        if data.has_noise:
            yield measure("crops from PCM WAV, augmented five ways", "wav", 10, augment=True)
            yield measure("the same, in the classic style", "wav", 0, augment=True, style="classic")
        yield measure("crops from FLAC on disk", "flac", 2, "flac")
        yield measure("crops from FLAC, RAM corpus", "flac", 10, "flac", ram_corpus="on")
        yield measure("crops from a packed corpus, int16", "packed", 25)
    for num_workers in (1, 2):
        workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
        yield measure(f"crops from PCM WAV, {workers}", "wav", 7, num_workers=num_workers)
        if data.has_noise:
            yield measure(f"augmented five ways, {workers}", "wav", 7, augment=True, num_workers=num_workers)
        yield measure(f"packed corpus, {workers}", "packed", 12, num_workers=num_workers)
    if data.has_noise:
        yield _compare_worker_counts(config, data, num_batches, rounds)


def _compare_worker_counts(config: Config, data: BenchmarkData, num_batches: int, rounds: int) -> Comparison:
    num_rows = config.data.batch_size * (num_batches + WARM_BATCHES)
    sides, loaders = [], []
    for num_workers in (1, 2):
        made = benchmark_config(config, data, "wav", num_rows, augment=True, num_workers=num_workers)
        side, loader = our_side(made, num_batches)
        sides.append(side)
        loaders.append(loader)
    try:
        names = ("one worker", "two workers")
        return compare("augmented five ways", sides[0], sides[1], rounds=rounds, wanted=1.6, sides=names)
    finally:
        for loader in loaders:
            loader.close()


def compare_evaluation(config: Config, data: BenchmarkData, num_utterances: int, rounds: int) -> Iterator[Comparison]:
    """Embedding one utterance a batch or across utterances; scoring one trial at a time or all at once."""
    net = build_model(config)
    names = [f"{name}.wav" for name in data.names[:num_utterances]]
    paths = data.paths("wav")[:num_utterances]
    source = build_source(config, data.folder("wav"))
    section = config.evaluation
    num_crops, frames = max(2, section.num_crops), section.eval_frames or 300

    def classic(_: None) -> int:
        return len(baseline.embed_one_by_one(net.eval(), paths, num_frames=frames, num_crops=num_crops))

    def ours(autocast: Callable[[], Any]) -> Callable[[None], int]:
        options = dataclasses.replace(section, eval_frames=frames, num_crops=num_crops, num_workers=2)
        return lambda _: len(embed_utterances(net, source, names, options, autocast=autocast))

    with on_one_core():
        for precision in dict.fromkeys(("no", config.runtime.precision)):
            runtime = dataclasses.replace(config.runtime, precision=precision)
            made = build_precision(dataclasses.replace(config, runtime=runtime), CPU)
            title = f"evaluation embedding, {num_crops} crops of {frames} frames, precision {made.name}"
            first, second = Side(_nothing, classic), Side(_nothing, ours(made.autocast))
            yield compare(title, first, second, rounds=rounds, unit="utterances")
        yield _compare_scoring(rounds, num_crops=num_crops)


def _compare_scoring(rounds: int, num_crops: int, num_trials: int = 2000) -> Comparison:
    generator = np.random.default_rng(0)
    embeddings = generator.standard_normal((200, num_crops, 256)).astype(np.float32)
    enrol, test = generator.integers(0, 200, (2, num_trials)).astype(np.int32)
    by_name = {str(row): torch.from_numpy(one) for row, one in enumerate(embeddings)}
    trials = [(str(one), str(two)) for one, two in zip(enrol, test, strict=True)]
    classic = Side(_nothing, lambda _: len(baseline.score_one_by_one(by_name, trials)))
    ours = Side(_nothing, lambda _: len(mean_distance_scores(embeddings, enrol, test)))
    return compare("scoring by mean distance", classic, ours, rounds=rounds, unit="trials")


def measure_worker_memory(config: Config, data: BenchmarkData, num_rows: int = MILLION_ROWS) -> dict[str, Any]:
    """Unique memory of a loader's workers on a packed corpus with a list of a million rows, forked and spawned."""
    found: dict[str, Any] = {"num_rows": num_rows, "bare_interpreter_bytes": bare_interpreter_bytes()}
    made = benchmark_config(config, data, "packed", num_rows, num_workers=2)
    for method in multiprocessing.get_all_start_methods():
        if method not in ("fork", "spawn"):
            continue
        loader = build_training_loader(made, CPU, start_method=method)
        others = {child.pid for child in multiprocessing.active_children()}
        try:
            _skip(iter(loader), 4 * WARM_BATCHES)
            workers = [child.pid for child in multiprocessing.active_children() if child.pid not in others]
            found[f"{method}_bytes"] = [unique_bytes(pid) for pid in workers if pid is not None]
        finally:
            loader.close()
    return found


def measure_loader(loader: TrainingLoader, num_batches: int) -> BatchTimes:
    """Batches of the configuration's own loader, as fast as they come."""
    batches = _endless(loader)
    _skip(batches, WARM_STEPS)
    return time_batches(batches, num_batches, lambda batch: len(batch.labels))


def measure_training(config: Config, loader: TrainingLoader, num_steps: int) -> dict[str, Any]:
    """Real steps on real batches: seconds a step, the share of them spent waiting for data, an epoch, memory."""
    net, loss = build_model(config), build_loss(config, loader.num_classes)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, net, loss, loader, dict, Path(folder))
        net.train()
        loss.train()
        batches = _endless(loader)
        num_batches = len(loader)
        for step in range(WARM_STEPS + num_steps):
            if step == WARM_STEPS:
                # The first steps find memory and kernels; they are not what training is like.
                tracker = trainer.tracker
                trainer.tracker = PerformanceTracker(
                    0,
                    precision=tracker.precision,
                    accumulation_steps=tracker.accumulation_steps,
                    device=tracker.device,
                )
            trainer.state.batch %= num_batches
            trainer._one_step(batches, num_batches)
        summary = trainer.tracker.summary()
    steps_per_epoch = -(-num_batches // config.training.accumulation_steps)
    return {**summary, "epoch_seconds": steps_per_epoch / summary["steps_per_second"]}


def _endless(loader: TrainingLoader) -> Iterator[Batch]:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def _skip(batches: Iterator[Any], count: int) -> None:
    for _ in itertools.islice(batches, count):
        pass


def _nothing() -> None:
    return None
