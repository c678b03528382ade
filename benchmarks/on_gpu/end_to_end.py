"""Parts `pipeline` and `evaluation`: training from disk with augmentation and speeds, and a
complete evaluation.
"""

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import BenchmarkData, prepare_data
from benchmarks.on_gpu.record import Row, Setup, row
from benchmarks.on_gpu.step_costs import VARIANTS, batch_size_of, host_and_busy
from benchmarks.steps import published_config
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.training import (
    Parts,
    build_loss,
    build_model,
    build_trainer,
    prepare_machine,
)
from speakernet.config.schema import Config, with_changes
from speakernet.data.batches import ReadyCrops
from speakernet.data.lists import StringTable
from speakernet.data.opening import open_source
from speakernet.evaluation.embedding import Forward, embed_utterances
from speakernet.evaluation.options import EvaluationOptions, Mode
from speakernet.evaluation.scoring import (
    cohort_statistics,
    cosine_scores,
    mean_embeddings,
    normalize_scores,
)
from speakernet.training.timing import QUIET_STEPS, WARM_STEPS, time_steps

MODEL = "ResNet34"
QUICK_MODEL = "ResNet"
UTTERANCES = 4000
QUICK_UTTERANCES = 24
STEPS = 100
QUICK_STEPS = 4
# Speeds are part of it, because resampling moves to the GPU with the rest of augmentation.
SPEEDS = [0.9, 1.0, 1.1]
# Less than any corpus, which therefore stays in the host's memory.
LOW_GIGABYTES = 0.001
# Where the corpus is -> its form and the options of the section data.
CORPORA: dict[str, tuple[str, dict[str, Any]]] = {
    "packed, on the device": ("packed", {"device_resident": "on"}),
    "packed, larger than the device's share": ("packed", {"device_gigabytes": LOW_GIGABYTES}),
    "FLAC with workers": ("flac", {"ram_corpus": "off", "num_workers": "auto"}),
}
# Utterances and trials of VoxCeleb1-E, and the speakers of VoxCeleb2 as cohort.
LIST = (145_160, 579_818, 5994)
QUICK_LIST = (2000, 5000, 200)
DIM = 256
TOP = 300


def benchmark_data(setup: Setup) -> tuple[BenchmarkData, Config]:
    """Recordings of 4 to 12 s, as in VoxCeleb, in every form, with noise and RIRs; made once."""
    paths = setup.corpus()
    # Lookup tables belong to the generated corpus, not into the user's cache.
    os.environ["SPEAKERNET_CACHE"] = str(setup.folder / "kept")
    config = setup.config(
        data={"train_list": str(paths.train_list), "train_path": str(paths.train_path)},
        augment={
            "enabled": True,
            "noise_path": str(paths.noise_path),
            "rir_path": str(paths.rir_path),
        },
    )
    number = QUICK_UTTERANCES if setup.is_quick else UTTERANCES
    return prepare_data(config, setup.folder / "recordings", number), config


def pipeline(setup: Setup) -> Iterator[Row]:
    """Utterances per second from disk to weights, and the share of a step spent waiting for
    data.
    """
    data, config = benchmark_data(setup)
    batch_size = batch_size_of(setup)
    # The fastest setting that needs no compilation: the faster a step, the sooner the loader is the
    # bottleneck, and it is the loader that is measured here.
    runtime = VARIANTS["bf16, channels_last" if setup.is_cuda else "channels_last"]
    config = with_changes(
        published_config(config, QUICK_MODEL if setup.is_quick else MODEL), runtime=runtime
    )
    config = with_changes(
        config,
        loss={"name": "aamsoftmax"},
        optimizer={"name": "sgd", "learning_rate": 0.1},
        training={"log_interval": 1000},
        augment={"speed_factors": SPEEDS},
    )
    prepare_machine(config)
    steps = QUICK_STEPS if setup.is_quick else STEPS
    # Rows for warm-up and measurement, so that the run never reaches the end of its epoch, where it
    # would evaluate.
    num_rows = (steps + WARM_STEPS[setup.device.type] + QUIET_STEPS) * batch_size
    for name, (form, options) in CORPORA.items():
        section = {
            "train_list": str(data.write_list(form, num_rows)),
            "train_path": str(data.root / form),
            "batch_size": batch_size,
            "crop_frames": 200,
            **options,
        }
        with tempfile.TemporaryDirectory(dir=setup.folder) as folder:
            yield _end_to_end(setup, name, with_changes(config, data=section), Path(folder), steps)


def _end_to_end(setup: Setup, name: str, config: Config, folder: Path, steps: int) -> Row:
    inputs = Inputs(config, setup.device)
    net = build_model(config)
    loader = build_training_loader(config, inputs)
    loss = build_loss(config, loader.num_classes)
    parts = Parts(net, loss, loader, setup.device)
    trainer = build_trainer(config, parts, lambda epoch: {"eer_percent": 50.0}, folder)
    net.train()
    loss.train()
    try:
        trainer.step.exchange.begin_epoch()
        batches = iter(loader)

        def run() -> None:
            trainer.run_step(batches)

        # First with the loader as it is, then with crops that are ready in memory: what the second
        # is faster by is time in which the GPU has waited, however the host has felt about it.
        timed = time_steps(run, steps, setup.device, trainer.speed.take_window)
        host = trainer.speed.take_window()
        # From here on the loader yields the same crops again and again, without reading or mixing.
        loader.maker = ReadyCrops(loader.maker)
        loader.set_epoch(1)
        batches = iter(loader)
        trainer.state.micro_batch = 0
        ready = time_steps(run, steps, setup.device)["step_seconds"]
    finally:
        loader.close()
    return row(
        name,
        utterances_per_second=config.data.batch_size / timed["step_seconds"],
        # A GPU works asynchronously, so this is how much longer a step takes than one on crops
        # already prepared, with the same copy, speeds and augmentation.
        data_wait_share=max(0.0, 1 - ready / timed["step_seconds"]),
        step_seconds_ready=ready,
        **timed,
        host_data_share=host["data_wait_share"],
        host_forward_backward_share=host["forward_backward_share"],
        host_optimizer_share=host["optimizer_share"],
    )


def evaluation(setup: Setup) -> Iterator[Row]:
    """Embedding recordings, whole and in crops; scoring a list of VoxCeleb1-E's size with adaptive
    s-norm.
    """
    data, config = benchmark_data(setup)
    model = QUICK_MODEL if setup.is_quick else MODEL
    config = published_config(config, model)
    prepare_machine(config)
    net = build_model(config).to(setup.device).eval()
    source = open_source(data.root / "packed")
    names = StringTable.from_strings([f"{name}.wav" for name in data.names])
    modes: tuple[Mode, ...] = ("whole", "crops")
    for mode in modes:
        options = EvaluationOptions(embedding=mode, num_crops=2 if setup.is_quick else 10)
        # The first run chooses kernels and allocates memory; only the second counts.
        embed = functools.partial(
            embed_utterances, net, source, names, options, Forward(setup.device), description=""
        )
        embed()
        # Whole recordings have many lengths, so they are padded to a few; crops have one.
        yield _timed(f"{model}, {mode}", embed, setup.device, len(names))
    utterances, trials, cohort_size = QUICK_LIST if setup.is_quick else LIST
    generator = np.random.default_rng(0)
    # Random embeddings: scoring does not look at their values.
    units = mean_embeddings(generator.standard_normal((utterances, DIM), dtype=np.float32))
    cohort = mean_embeddings(generator.standard_normal((cohort_size, DIM), dtype=np.float32))
    enrol, test = generator.integers(0, utterances, (2, trials), dtype=np.int32)
    score = functools.partial(cosine_scores, units, enrol, test)
    yield _timed(f"cosine, {trials:,} trials", score, setup.device, trials)
    scores = score()

    def normalize() -> None:
        top = min(TOP, cohort_size)
        statistics = cohort_statistics(units, cohort, top, setup.device)
        normalize_scores(scores, enrol, test, statistics, "as")

    name = f"adaptive s-norm, {utterances:,} utterances, {cohort_size:,} members"
    yield _timed(name, normalize, setup.device, trials)


def _timed(name: str, run: Callable[[], object], device: torch.device, count: int) -> Row:
    """Run once over `count` utterances or trials."""
    begin = time.perf_counter()
    shares = host_and_busy(run, 1, device)
    seconds = time.perf_counter() - begin
    return row(name, items_per_second=count / seconds, seconds=seconds, **shares)
