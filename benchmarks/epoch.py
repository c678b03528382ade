"""The suite `--compare`: a whole epoch of a configuration by the original pipeline and by ours.

Both use the configuration's lists, crops, batch size, network, trials and evaluation crops, each in
its own process. The original is voxceleb_trainer's: it reads whole files, augments them one by one,
trains in float32 with a plain loop, embeds recordings and scores trials one by one. Ours does what
`speakernet train` does between two evaluations.
"""

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import classic
from benchmarks.data import classic_augmentation, write_noise
from benchmarks.plain_models import PlainAMSoftmax, PlainResNetSE34L
from benchmarks.served import ServedProcess, own_command, own_environment, serve
from benchmarks.steps import NETWORK, margin_and_scale
from benchmarks.timing import markdown_table
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs, with_default_paths
from speakernet.assembly.training import (
    Parts,
    build_loss,
    build_model,
    build_trainer,
    prepare_machine,
    refuse_impossible,
)
from speakernet.assembly.validation import build_validation
from speakernet.config.schema import Config, with_changes
from speakernet.data.lists import read_training_list, read_trials, write_training_list
from speakernet.evaluation import metrics
from speakernet.machine.device import find_device, synchronize
from speakernet.machine.facts import usable_cores

ORIGINAL = "original"
OURS = "optimised"
Epoch = tuple[Callable[[], int], Callable[[], object]]
"""Trains on the next epoch and returns the number of utterances; evaluates."""


def compare_epochs(
    arguments: Sequence[str], num_batches: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Medians of every pipeline's figures; one process each, run in turn.

    Args:
        arguments: the configuration, as command-line arguments.
        num_batches: limit on batches per epoch; for a longer list a part is used and the epoch time
            extrapolated.
        rounds: measured epochs of each, after one warm-up epoch.
    """
    # Both processes stay alive and take turns, epoch by epoch, so that a slow minute of the machine
    # hits both. The first epoch of each is dropped: it reads files for the first time and allocates
    # memory.
    with contextlib.ExitStack() as stack:
        processes = {}
        for name in (ORIGINAL, OURS):
            command = own_command(*arguments, "--num_batches", str(num_batches), "--epoch_of", name)
            # Huge pages are one of our speed-ups, and torch reads the switch when it is imported,
            # so the original's process has to start without.
            process = ServedProcess(name, command, own_environment(huge_pages=name != ORIGINAL))
            processes[name] = stack.enter_context(contextlib.closing(process))
        for _ in range(rounds + 1):
            for process in processes.values():
                process.run()
    medians: dict[str, dict[str, float]] = {}
    for name, process in processes.items():
        epochs = process.figures[1:]
        medians[name] = {}
        for key in epochs[0]:
            medians[name][key] = statistics.median(epoch[key] for epoch in epochs)
    return medians


def epoch_table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """The figures of `compare_epochs` as a Markdown table."""
    rows = []
    for name, epoch in figures.items():
        # Ratio of the medians, not median of ratios: an epoch is long enough to average the
        # machine's moods.
        speed_up = figures[ORIGINAL]["epoch_seconds"] / epoch["epoch_seconds"]
        cells = [
            name,
            f"{epoch['epoch_seconds']:.2f} s",
            f"{epoch['utterances_per_second']:,.0f}",
            f"{epoch['evaluation_seconds']:.2f} s",
            f"{speed_up:.2f}",
        ]
        rows.append(cells)
    return markdown_table(("pipeline", "epoch", "utterances/s", "evaluation", "speed-up"), rows)


def serve_epochs(config: Config, name: str, num_batches: int) -> None:
    """Run in a separate process: an epoch of one pipeline for every line of input."""
    config = with_default_paths(config)
    with tempfile.TemporaryDirectory() as folder:
        config, share = _shortened(config, Path(folder), num_batches)
        build = original_epoch if name == ORIGINAL else our_epoch
        train, evaluate = build(config, Path(folder))
        serve(lambda: _measured(config, train, evaluate, share))


def _shortened(config: Config, folder: Path, num_batches: int) -> tuple[Config, float]:
    """The configuration with at most `num_batches` batches of its list, and their share of the
    list.
    """
    training = read_training_list(config.data.train_list)
    most = num_batches * config.data.utterances_per_batch
    if len(training) <= most:
        return config, 1.0
    # A random part, with the same seed on both sides: the first rows of a list are often one
    # speaker's.
    rows = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))[:most].tolist()
    names = [training.speakers[int(training.labels[row])] for row in rows]
    write_training_list(
        folder / "part.txt", zip(names, (training.paths[row] for row in rows), strict=True)
    )
    return with_changes(config, data={"train_list": str(folder / "part.txt")}), most / len(training)


def _measured(
    config: Config, train: Callable[[], int], evaluate: Callable[[], object], share: float
) -> dict[str, float]:
    """Figures of one epoch; `train` returns the number of utterances."""
    device = find_device(config.runtime)
    start = time.perf_counter()
    utterances = train()
    # Without waiting for the device, the last steps of training would count as evaluation.
    synchronize(device)
    middle = time.perf_counter()
    evaluate()
    synchronize(device)
    end = time.perf_counter()
    return {
        # Only training grows with the length of the list: the trials are never shortened.
        "epoch_seconds": (middle - start) / share + end - middle,
        "utterances_per_second": utterances / (middle - start),
        "evaluation_seconds": end - middle,
    }


def our_epoch(config: Config, folder: Path) -> Epoch:
    """The trainer's next epoch, and its evaluation."""
    # `build_trainer` is what `speakernet train` calls, so logging, the check for non-finite
    # numbers, the schedules and the progress bar are part of what is measured.
    device = prepare_machine(config)
    # Practically endless, so that schedules do not run out and no epoch is the last.
    config = with_changes(config, training={"max_epochs": 1 << 20})
    inputs = Inputs(config, device)
    net = build_model(config)
    refuse_impossible(config, net, inputs.device)
    loader = build_training_loader(config, inputs)
    loss = build_loss(config, loader.num_classes)
    validate = build_validation(config, inputs, net)
    trainer = build_trainer(config, Parts(net, loss, loader, inputs.device), validate, folder)
    utterances = len(read_training_list(config.data.train_list))
    in_batch = config.data.utterances_per_batch

    def train() -> int:
        trainer.train_epoch()
        return min(utterances, len(loader) * in_batch)

    return train, trainer.evaluate


def original_epoch(config: Config, folder: Path) -> Epoch:
    """The same work by the original pipeline: same number of utterances, same recordings to embed,
    same trials.

    For networks without a plain definition it uses ours, in float32 and without channels_last.
    """
    data = config.data
    section = config.evaluation
    generator = random.Random(config.runtime.seed)
    augmentation = None
    if config.augment.enabled and config.augment.noise_path and config.augment.rir_path:
        write_noise(config, folder)
        augmentation = classic_augmentation(config, folder, generator)
    training = read_training_list(data.train_list)
    paths = [str(Path(data.train_path) / name) for name in training.paths]
    labels = [int(label) for label in training.labels]
    dataset = classic.ClassicTrainingSet(paths, labels, data.crop_frames, generator, augmentation)
    trials = read_trials(data.validation_list)
    recordings = [str(Path(data.validation_path) / name) for name in trials.names]
    sides = zip(trials.enrol, trials.test, strict=True)
    pairs = [(recordings[enrol], recordings[test]) for enrol, test in sides]
    trial_labels = trials.labels
    if trial_labels is None:
        raise ValueError(f"{data.validation_list} has no labels to compute an EER with")
    torch.manual_seed(config.runtime.seed)
    dim = config.model.embedding_dim
    device = find_device(config.runtime)
    # voxceleb_trainer has this network only in its sizes; for another one ours stands in, without
    # the memory layout that is one of our speed-ups.
    net: torch.nn.Module = build_model(with_changes(config, runtime={"channels_last": "off"}))
    if config.model.name == NETWORK:
        net = PlainResNetSE34L(build_model(config).front_end, dim)
    net = net.to(device)
    loss = PlainAMSoftmax(dim, max(labels) + 1, *margin_and_scale(config.loss)).to(device)
    optimizer = torch.optim.Adam(
        [*net.parameters(), *loss.parameters()], lr=config.optimizer.learning_rate
    )

    def train() -> int:
        net.train()
        # Utterances in random order, like the shuffled sampler, so there are as many steps as in
        # ours.
        rows = [[row] for row in torch.randperm(len(paths)).tolist()]
        # As many workers as cores, so that no smaller setting holds the original back.
        loader = classic.training_loader(dataset, rows, data.batch_size, usable_cores())
        for crops, speakers in loader:
            optimizer.zero_grad()
            value = loss(net(crops.squeeze(1).to(device)), speakers.to(device))
            value.backward()
            optimizer.step()
            # The original prints the loss of every step and therefore waits for the device.
            value.item()
        return len(paths)

    def evaluate() -> None:
        net.eval()
        # Batch norms of the original are in evaluation mode too; only how recordings reach the
        # network differs.
        embeddings = classic.embed_one_by_one(
            lambda crops: net(crops.to(device)),
            recordings,
            num_frames=section.eval_frames,
            num_crops=section.num_crops,
            num_workers=usable_cores(),
        )
        metrics.eer(torch.tensor(classic.score_one_by_one(embeddings, pairs)).numpy(), trial_labels)

    return train, evaluate
