"""Part `correctness`: the device against the CPU in float32, and repeated and resumed runs against
a first one.
"""

import copy
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.on_gpu.record import NEEDS_CUDA, Row, Setup, left_out, row
from benchmarks.steps import SMALLEST, RandomBatch, published_config
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.runs import train_experiment
from speakernet.assembly.training import build_loss, build_model, build_precision, prepare_machine
from speakernet.checkpoint import read_own_checkpoint
from speakernet.config import load_config
from speakernet.config.schema import Config, with_changes
from speakernet.models.options import MODELS
from speakernet.run_folder import BEST, METRICS
from speakernet.training.optimizers import create_optimizer
from speakernet.training.step import TrainingStep
from speakernet.training.stopping import Interrupted

# Allowed relative errors. float32 sums in a different order; the mantissa has 10 bits in TF32 and
# fp16, 7 in bf16.
TOLERANCES = {"float32": 1e-3, "tf32": 2e-2, "bf16": 1e-1, "fp16": 3e-2}
STEP_TOLERANCE = 1e-2
CROP_TOLERANCE = 1e-4
QUICK_SAMPLES = 11440
SAMPLES = 32240
NUM_CLASSES = 20
LEARNING_RATE = 0.01
PRESET = Path(__file__).resolve().parents[2] / "configs" / "preset_reproducible.yaml"
STOP_AFTER_LINES = 2


def correctness(setup: Setup) -> Iterator[Row]:
    """One row per comparison: its error, the tolerance, and whether it passed."""
    # The cheap comparisons come first. If embeddings differ, nothing after them is worth the time.
    yield from _embeddings(setup)
    yield from _steps(setup)
    yield _resident_batches(setup)
    yield from _same_bits(setup)


def compared(name: str, error: float, tolerance: float) -> Row:
    """The row of a comparison; an error of NaN does not pass."""
    return row(name, error=error, tolerance=tolerance, passed=bool(error <= tolerance))


def _embeddings(setup: Setup) -> Iterator[Row]:
    # Random weights are enough: what is compared is arithmetic, and layers do not know whether they
    # were trained. The reference is the CPU in float32, which the tests compare with published
    # networks.
    names = SMALLEST if setup.is_quick else tuple(MODELS)
    samples = QUICK_SAMPLES if setup.is_quick else SAMPLES
    waveforms = 0.1 * torch.randn(2, samples, generator=torch.Generator().manual_seed(0))
    for name in names:
        config = published_config(setup.config(runtime={"tf32": False}), name)
        prepare_machine(config)
        torch.manual_seed(0)
        net = build_model(config).eval()
        with torch.inference_mode():
            expected = net(waveforms)
            # Moved after the CPU has computed the reference, so the weights are the same by
            # construction.
            net.to(setup.device)
            for kind, tolerance in TOLERANCES.items():
                title = f"{name}, {kind}"
                if kind in ("tf32", "fp16") and not setup.is_cuda:
                    yield left_out(title, NEEDS_CUDA)
                    continue
                precision = kind if kind in ("bf16", "fp16") else "no"
                changed = with_changes(
                    config, runtime={"tf32": kind == "tf32", "precision": precision}
                )
                # TF32 is a switch of the process, so it is set for every row, and back by the next
                # one.
                prepare_machine(changed)
                with build_precision(changed, setup.device).autocast():
                    embeddings = net(waveforms.to(setup.device))
                yield compared(title, _error(embeddings, expected), tolerance)


def _steps(setup: Setup) -> Iterator[Row]:
    """One SGD step from the same weights on the same batch: the loss and the update of the
    weights.
    """
    names = ("ResNet",) if setup.is_quick else SMALLEST
    for name in names:
        config = published_config(setup.config(runtime={"tf32": False, "precision": "no"}), name)
        # Plain gradient descent, because its update is proportional to the gradient. Adam divides
        # by the gradient's own size, and rounding in a tiny gradient would become a whole step.
        config = with_changes(config, optimizer={"name": "sgd", "learning_rate": LEARNING_RATE})
        prepare_machine(config)
        torch.manual_seed(0)
        net = build_model(config)
        loss = build_loss(config, NUM_CLASSES)
        start = [weight.detach().clone() for weight in net.parameters()]
        updates = []
        losses = []
        for device in (torch.device("cpu"), setup.device):
            step = _step(
                config, copy.deepcopy(net).to(device), copy.deepcopy(loss).to(device), device
            )
            # One micro-batch, then the update, as `TrainingStep.run` does with a loader.
            step.add(_batch(setup, device))
            losses.append(float(step.finish(LEARNING_RATE).loss))
            pairs = zip(step.net.parameters(), start, strict=True)
            updates.append(
                torch.cat([(after.detach().cpu() - before).flatten() for after, before in pairs])
            )
        yield compared(
            f"{name}, loss of a step", abs(losses[1] - losses[0]) / abs(losses[0]), STEP_TOLERANCE
        )
        yield compared(
            f"{name}, update of the weights", _error(updates[1], updates[0]), STEP_TOLERANCE
        )


def _step(config: Config, net: nn.Module, loss: nn.Module, device: torch.device) -> TrainingStep:
    precision = build_precision(config, device)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            # Each device has its own generator, so dropout would differ.
            module.p = 0.0
    return TrainingStep(
        net.train(),
        loss.train(),
        create_optimizer(config.optimizer, [net, loss], device, is_float32=precision.name == "no"),
        precision,
        config.training,
        utterances_per_speaker=1,
    )


def _batch(setup: Setup, device: torch.device) -> RandomBatch:
    # Four utterances: enough for batch norms, little for the CPU, which computes every network too.
    batch = RandomBatch.of(4, device)
    samples = QUICK_SAMPLES if setup.is_quick else SAMPLES
    return dataclasses.replace(batch, waveforms=batch.waveforms[:, :samples].clone())


def _resident_batches(setup: Setup) -> Row:
    """Crops from corpus, noise and RIRs on the device against those made on the host, speeds
    included, by sample.
    """
    paths = setup.corpus()
    # What is on the device is drawn with the same keys as on the host, so the crops must be equal
    # sample by sample, up to the order of sums in convolutions and resampling.
    worst = 0.0
    batches: list[list[Any]] = []
    for device, resident in ((torch.device("cpu"), "off"), (setup.device, "on")):
        config = setup.config(
            data={
                "train_list": str(paths.train_list),
                "train_path": str(paths.train_path),
                "batch_size": 8,
                "crop_frames": 100,
                "num_workers": 0,
                "ram_corpus": "on",
                "device_resident": resident,
            },
            augment={
                "enabled": True,
                "noise_path": str(paths.noise_path),
                "rir_path": str(paths.rir_path),
                "speed_factors": [0.9, 1.0, 1.1],
            },
            loss={"name": "softmax"},
        )
        loader = build_training_loader(config, Inputs(config, device))
        batches.append(list(loader))
        loader.close()
    for on_host, on_device in zip(*batches, strict=True):
        worst = max(worst, float((on_host.waveforms - on_device.waveforms.cpu()).abs().max()))
    return compared("resident corpus and banks, samples", worst, CROP_TOLERANCE)


def _same_bits(setup: Setup) -> Iterator[Row]:
    """Two runs of the reproducible preset, and one that was stopped and resumed."""
    # Atomic additions and kernels that are chosen by timing are the usual reasons why two runs
    # differ on a GPU. The preset turns both off, and this shows whether it does so completely; the
    # stopped run shows that a checkpoint holds everything that the next step needs.
    first, again, stopped = (_weights(setup, name) for name in ("first", "again", "stopped"))
    for name, found in (("twice", again), ("resumed after SIGTERM", stopped)):
        different = sum(not torch.equal(value, found[key]) for key, value in first.items())
        yield compared(f"preset_reproducible {name}: tensors that differ", float(different), 0.0)


def _weights(setup: Setup, name: str) -> dict[str, torch.Tensor]:
    paths = setup.corpus()
    folder = setup.folder / "runs" / name
    options = {
        "data.train_list": paths.train_list,
        "data.train_path": paths.train_path,
        "data.test_list": paths.test_list,
        "data.test_path": paths.test_path,
        "data.crop_frames": 60,
        "data.batch_size": 4,
        "data.num_workers": 0,
        "model.name": "ResNet",
        "model.embedding_dim": 8,
        "evaluation.eval_frames": 60,
        "evaluation.num_crops": 1,
        "augment.enabled": "false",
        "training.max_epochs": 1,
        "training.log_interval": 1,
        "training.save_path": folder,
        "runtime.device": setup.device.type,
        "runtime.keep_memory": not setup.is_quick,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    loaded = load_config(["--config", str(PRESET), *words])
    if name == "stopped":
        _stop_while(lambda: train_experiment(loaded), folder / METRICS)
    train_experiment(loaded)
    return dict(read_own_checkpoint(folder / BEST)["weights"])


def _stop_while(train: Callable[[], Any], metrics: Path) -> None:
    """Send this process SIGTERM after some steps of `train`.

    Raises:
        ValueError: the run ended before the signal.
    """
    is_over = threading.Event()

    # Lines of metrics are the only sign of progress that a run shows to others. The signal comes
    # from a thread, since the run occupies the main one, which is also the only one that may handle
    # signals.
    def watch() -> None:
        while not is_over.wait(0.01):
            if metrics.exists() and len(metrics.read_bytes().splitlines()) >= STOP_AFTER_LINES:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        train()
    except Interrupted:
        return
    finally:
        is_over.set()
        watcher.join()
    raise ValueError("the run ended before SIGTERM was sent; use more data")


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    # Relative to the length of the whole vector: single entries near zero have any relative error.
    return float((found.float().cpu() - expected).norm() / expected.norm())
