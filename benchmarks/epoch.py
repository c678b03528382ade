"""The suite `--epoch`: loading with augmentation, training steps, evaluation; ours against the classic pipeline.

Both have the configuration's lists, crops, batch size, trials and evaluation crops, and a process each. The classic one
reads whole files, augments them one by one, trains the plain network in float32, embeds the recordings and scores the
trials one by one; ours is what `speakernet train` does between two evaluations.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import classic
from benchmarks.data import write_noise
from benchmarks.plain_models import PlainAMSoftmax, plain_model
from benchmarks.served import own_command, own_environment, serve, time_processes
from benchmarks.steps import margin_and_scale
from benchmarks.timing import Timing
from speakernet.assembly.checks import refuse_impossible
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.evaluation import build_validation
from speakernet.assembly.inputs import Inputs, with_default_paths
from speakernet.assembly.model import build_loss, build_model
from speakernet.assembly.training import build_trainer, prepare_machine
from speakernet.config.schema import Config, replaced
from speakernet.data.lists import read_training_list, read_trials
from speakernet.evaluation import metrics
from speakernet.machine.device import choose_device, find_device
from speakernet.machine.facts import usable_cores

CLASSIC, OURS = "classic", "ours"


def measure_epochs(arguments: Sequence[str], rounds: int) -> list[Timing]:
    """Time a classic epoch and one of ours in turn.

    Args:
        arguments: the configuration's, as on the command line.
        rounds: epochs of each, after one that does not count.

    Raises:
        ValueError: either failed, with what it said.
    """
    commands = {
        name: (own_command(*arguments, "--epoch_of", name), own_environment(huge_pages=name == OURS))
        for name in (CLASSIC, OURS)
    }
    return time_processes(commands, rounds=rounds)


def serve_epochs(config: Config, name: str) -> None:
    """In a process of its own: an epoch of that pipeline for every line that comes in."""
    config = with_default_paths(config)
    with tempfile.TemporaryDirectory() as folder:
        serve((our_epoch if name == OURS else classic_epoch)(config, Path(folder)))


def our_epoch(config: Config, folder: Path) -> Callable[[], None]:
    """The trainer's next epoch and its evaluation."""
    prepare_machine(config)
    # Without end: schedules do not run out, and no epoch is the last.
    config = replaced(config, training={"max_epochs": 1 << 20})
    inputs = Inputs(config, choose_device(config.runtime))
    net = build_model(config)
    refuse_impossible(config, net, inputs.device)
    loader = build_training_loader(config, inputs)
    loss = build_loss(config, loader.num_classes)
    validate = build_validation(config, inputs, net)
    trainer = build_trainer(config, net, loss, loader, validate, folder, inputs.device)

    def run() -> None:
        trainer.train_epoch()
        trainer.evaluate()

    return run


def classic_epoch(config: Config, folder: Path) -> Callable[[], None]:
    """The same work by the classic pipeline: as many utterances, the same recordings to embed, the same trials."""
    data, section = config.data, config.evaluation
    generator = random.Random(config.runtime.seed)
    augmentation = None
    if config.augment.enabled:
        write_noise(config, folder)
        noise, rooms = str(folder / "musan"), str(folder / "rirs")
        augmentation = classic.ClassicAugmentation(noise, rooms, data.crop_frames, generator)
    training = read_training_list(data.train_list)
    paths = [str(Path(data.train_path) / name) for name in training.paths]
    labels = [int(label) for label in training.labels]
    dataset = classic.ClassicTrainingSet(paths, labels, data.crop_frames, generator, augmentation)
    trials = read_trials(data.validation_list)
    names = list(trials.names)
    recordings = [str(Path(data.validation_path) / name) for name in names]
    pairs = [(recordings[one], recordings[other]) for one, other in zip(trials.enrol, trials.test, strict=True)]
    if trials.labels is None:
        raise ValueError(f"{data.validation_list} is unlabelled; the benchmark computes the EER of its trials")
    trial_labels = trials.labels
    torch.manual_seed(config.runtime.seed)
    dim = config.model.embedding_dim
    front_end = build_model(config).front_end
    device = find_device(config.runtime)
    net = plain_model(config.model.name, front_end, dim, front_end.num_features).to(device)
    loss = PlainAMSoftmax(dim, max(labels) + 1, *margin_and_scale(config.loss)).to(device)
    optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()], lr=config.optimizer.learning_rate)

    def run() -> None:
        net.train()
        # Utterances one by one in any order, as the shuffled sampler has them: as many steps as ours.
        rows = [[row] for row in torch.randperm(len(paths)).tolist()]
        for crops, speakers in classic.training_loader(dataset, rows, data.batch_size, usable_cores()):
            optimizer.zero_grad()
            value = loss(net(crops.squeeze(1).to(device)), speakers.to(device))
            value.backward()
            optimizer.step()
            # The original shows the loss of every step, and so waits for the device.
            value.item()
        net.eval()
        embeddings = classic.embed_one_by_one(
            lambda crops: net(crops.to(device)),
            recordings,
            num_frames=section.eval_frames,
            num_crops=section.num_crops,
            num_workers=usable_cores(),
        )
        metrics.eer(torch.tensor(classic.score_one_by_one(embeddings, pairs)).numpy(), trial_labels)

    return run
