"""The suite `--loading`: our loader against the classic one."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import classic
from benchmarks.data import BenchmarkData, classic_augmentation
from benchmarks.timing import Way, compare, on_one_core
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.config.schema import Config, with_changes
from speakernet.data.batches import Batch
from speakernet.data.loader import TrainingLoader

# Batches fetched before timing starts, more than fit in any queue.
WARM_BATCHES = 8
CPU = torch.device("cpu")


def benchmark_config(
    config: Config,
    data: BenchmarkData,
    form: str,
    num_rows: int,
    *,
    augment: bool = False,
    style: str = "ours",
    num_workers: int = 0,
    ram_corpus: str = "off",
) -> Config:
    """The configuration, changed to the benchmark's recordings and to the classic pipeline's crops.

    Args:
        config: the user's configuration.
        data: the recordings.
        form: `wav`, `flac` or `packed`.
        num_rows: length of the training list.
        augment: whether to augment, in five equally likely ways.
        style: augmentation style.
        num_workers: loader workers.
        ram_corpus: whether the corpus is first decoded into memory.
    """
    # Whatever the classic pipeline lacks is switched off, so that both make the same batches: one
    # utterance per speaker, one length of crop, every file of any length, no cache of decoded
    # audio, nothing on a GPU. What is left on is how we do the same work.
    loading = {
        "train_list": str(data.write_list(form, num_rows)),
        "train_path": str(data.root / form),
        "utterances_per_speaker": 1,
        "sampler": "shuffled",
        "min_seconds": 0.0,
        "crop_frames_max": 0,
        "num_classes": 0,
        "num_workers": num_workers,
        "ram_corpus": ram_corpus,
        "device_resident": "off",
        "persistent_workers": True,
        # With a cache, the benchmark's small corpus would come from memory.
        "cache_megabytes": config.data.cache_megabytes if augment else 0,
    }
    # Four of five crops are disturbed, in one of four ways: the classic draw among five ways, one
    # of which is to leave the crop alone.
    mixing = {
        "enabled": augment,
        "style": style,
        "noise_path": str(data.root / "musan"),
        "rir_path": str(data.root / "rirs"),
        "probability": 0.8,
        "categories": ["reverb", "music", "babble", "noise"],
        "speed_factors": [1.0],
        "telephone_probability": 0.0,
        "codec_probability": 0.0,
        "microphone_probability": 0.0,
        "components": {},
    }
    return with_changes(config, data=loading, augment=mixing, loss={"name": "amsoftmax"})


def our_side(config: Config, num_batches: int) -> tuple[Way, TrainingLoader]:
    """Batches of our loader on the CPU; every round is an epoch of warm-up batches and
    `num_batches` more.
    """
    loader = build_training_loader(config, Inputs(config, CPU))
    # A loader with workers is a pipeline that fills up while nobody looks. So a round begins with
    # untimed batches, more than all queues hold, and ends by emptying what is left; between the two
    # the batches arrive as fast as they are made.
    epochs = itertools.count()
    running: list[Iterator[Batch]] = []

    def prepare() -> Iterator[Batch]:
        # Exhaust the last round, or its workers would take time from this one.
        for batches in running:
            for _ in batches:
                pass
        loader.set_epoch(next(epochs))
        running[:] = [iter(loader)]
        _skip(running[0], WARM_BATCHES)
        return running[0]

    def run(batches: Iterator[Batch]) -> int:
        return sum(len(batch.labels) for batch in itertools.islice(batches, num_batches))

    return Way(run, prepare), loader


def classic_side(config: Config, data: BenchmarkData, form: str, num_batches: int) -> Way:
    """The same batches by the classic pipeline."""
    generator = random.Random(config.runtime.seed)
    batch_size = config.data.batch_size
    augmentation = None
    if config.augment.enabled:
        augmentation = classic_augmentation(config, data.root, generator)
    dataset = classic.ClassicTrainingSet(
        data.paths(form), data.labels, config.data.crop_frames, generator, augmentation
    )
    running: list[Any] = []

    def prepare() -> Any:
        # Deleting the iterator ends the workers of the last round.
        running.clear()
        # Drawn before the clock starts, as our sampler plans an epoch before its first batch.
        rows = [
            [generator.randrange(len(data.names))]
            for _ in range(batch_size * (num_batches + WARM_BATCHES))
        ]
        running.append(
            iter(classic.training_loader(dataset, rows, batch_size, int(config.data.num_workers)))
        )
        _skip(running[0], WARM_BATCHES)
        return running[0]

    def run(batches: Any) -> int:
        return sum(len(labels) for _, labels in itertools.islice(batches, num_batches))

    return Way(run, prepare)


def compare_loading(
    config: Config, data: BenchmarkData, num_batches: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Our loader against the classic one; yields each measure as it is done."""
    # The list is as long as a round, so that a round is an epoch on both sides.
    num_rows = config.data.batch_size * (num_batches + WARM_BATCHES)

    def measure(name: str, form: str, classic_form: str = "wav", **changes: Any) -> dict[str, Any]:
        made = benchmark_config(config, data, form, num_rows, **changes)
        ours, loader = our_side(made, num_batches)
        theirs = classic_side(made, data, classic_form, num_batches)
        try:
            return compare(name, theirs, ours, rounds=rounds)
        finally:
            loader.close()

    # In this process, so one core does all the work on both sides. With workers, below, every
    # process may have its own.
    with on_one_core():
        yield measure("crops from PCM WAV", "wav")
        yield measure("crops from PCM WAV, augmented five ways", "wav", augment=True)
        yield measure("the same, in the classic style", "wav", augment=True, style="classic")
        yield measure("crops from FLAC on disk", "flac", "flac")
        yield measure("crops from FLAC, RAM corpus", "flac", "flac", ram_corpus="on")
        yield measure("crops from a packed corpus, int16", "packed")
    for num_workers in (1, 2):
        # Up to two: the machines on which this was tuned have two cores.
        workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
        yield measure(f"crops from PCM WAV, {workers}", "wav", num_workers=num_workers)
        yield measure(
            f"augmented five ways, {workers}", "wav", augment=True, num_workers=num_workers
        )
        yield measure(f"packed corpus, {workers}", "packed", num_workers=num_workers)


def _skip(batches: Iterator[Any], count: int) -> None:
    for _ in itertools.islice(batches, count):
        pass
