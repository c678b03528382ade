"""Where corpus, noise and RIRs lie: in the training device's memory, where they fit, or with the host."""

import dataclasses
import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from speakernet.assembly.augment import MEASURED_UTTERANCES, measured_seconds
from speakernet.assembly.inputs import Inputs
from speakernet.config.schema import Config
from speakernet.data.audio import crop_samples
from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.augment.banks import ResidentBanks, bytes_of_banks
from speakernet.data.batches import CropMaker, ResidentMaker
from speakernet.data.choices import (
    MAX_WORKERS,
    MEMORY_SHARE,
    Choice,
    choose_augment_device,
    choose_device_banks,
    choose_device_resident,
)
from speakernet.data.packed import PackedRows
from speakernet.data.sources import RowReader
from speakernet.files import human_bytes
from speakernet.machine.facts import usable_cores, usable_memory_bytes
from speakernet.parallel import distributed
from speakernet.training.compiling import training_bytes
from speakernet.training.precision import DTYPES, choose_precision

logger = logging.getLogger(__name__)

GIGABYTE = 1 << 30
SPECTRA_SHARE = 0.25  # of what corpus and banks leave of their bound


@dataclass(frozen=True)
class Placement:
    """What lies on the training device.

    Attributes:
        corpus: whether the training corpus does.
        banks: whether noise and RIRs do.
        left_bytes: of the bound, for spectra.
    """

    corpus: bool
    banks: bool
    left_bytes: int


def decide_placement(
    config: Config,
    reader: RowReader,
    inputs: Inputs,
    augmenter: Augmenter | None,
    eligible: np.ndarray,
    reserved_bytes: int = 0,
) -> Placement:
    """What fits on the device, and of noise and RIRs what is faster there; `eligible` are the rows that are trained on.

    Raises:
        ValueError: as `choose_placement`, and for a file that cannot be read.
    """
    placement = choose_placement(config, reader, inputs, augmenter, reserved_bytes)
    # Where the corpus lies crops are disturbed: nothing is left to choose.
    if augmenter is None or not placement.banks or placement.corpus:
        return placement
    return measured_placement(config, augmenter, placement, eligible, inputs.device)


def choose_placement(
    config: Config, reader: RowReader, inputs: Inputs, augmenter: Augmenter | None, reserved_bytes: int = 0
) -> Placement:
    """Decide what goes to the device; each choice is logged with its reason.

    Noise and RIRs go first: they are small, and without them every batch waits for the host. What training itself
    takes (`reserved_bytes`) is left free.

    Raises:
        ValueError: a corpus on the device was asked for and is impossible.
    """
    data, device = config.data, inputs.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else usable_memory_bytes()
    bound = int(data.device_gigabytes * GIGABYTE) or int(max(0, free - reserved_bytes) * MEMORY_SHARE)
    is_possible = augmenter is not None and data.device_resident != "off" and config.augment.device != "cpu"
    is_considered = is_possible and (device.type == "cuda" or data.device_resident == "on")
    rows = reader if isinstance(reader, PackedRows) else None
    bank_bytes = bytes_of_banks(augmenter.banks, augmenter.rirs, rows) if is_considered and augmenter else 0
    fits = is_considered and bank_bytes <= bound
    corpus_bytes = 2 * int(inputs.training.table.num_samples.sum())
    corpus = choose_device_resident(
        switch=data.device_resident,
        device_type=device.type,
        corpus_bytes=corpus_bytes,
        is_flat=rows is not None,
        augments_elsewhere=augmenter is not None and config.augment.device == "cpu" and device.type != "cpu",
        budget_bytes=bound - (bank_bytes if fits else 0),
    )
    say_choice("corpus on the device", corpus, could_help=device.type == "cuda")
    if not is_considered or augmenter is None:
        return Placement(corpus.value, banks=False, left_bytes=0)
    reads_corpus = any(bank.reader is reader for bank in augmenter.banks.values())
    banks = choose_device_banks(
        bank_bytes=bank_bytes, budget_bytes=bound, needs_corpus=reads_corpus, is_corpus_there=corpus.value
    )
    say_choice("noise and RIRs on the device", banks, could_help=device.type == "cuda")
    return Placement(corpus.value, banks.value, max(0, bound - bank_bytes - (corpus_bytes if corpus.value else 0)))


def reserved_for_training(config: Config, net: nn.Module, device: torch.device) -> int:
    """About the bytes of a GPU that steps of this configuration take, crops at their longest; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    data = config.data
    frames = max(data.crop_frames, data.crop_frames_max)
    # Longer crops come in smaller batches, with as much audio in all.
    batch_size = max(1, data.batch_size * data.utterances_per_speaker * data.crop_frames // frames)
    dtype = DTYPES[choose_precision(config.runtime.precision, device).name]
    needed = training_bytes(net, crop_samples(frames, data.sample_rate), batch_size, dtype)
    logger.debug("training takes about %s of the GPU", human_bytes(needed))
    return needed


def measured_placement(
    config: Config, augmenter: Augmenter, placement: Placement, eligible: np.ndarray, device: torch.device
) -> Placement:
    """Noise and RIRs moved to the device, and given up there where crops are augmented faster with the loading.

    Both ways are measured on a batch of the first rows, before training. They give the same batches but for rounding,
    so that a run that goes on may find another way faster; a deterministic one always takes the device.

    Raises:
        AudioError: a file cannot be read.
    """
    move_banks(augmenter, placement, None, device)
    data, banks = config.data, augmenter.resident
    if config.augment.device != "auto" or config.runtime.deterministic:
        return placement
    rows = np.resize(eligible, data.batch_size * data.utterances_per_speaker)
    num_samples = crop_samples(data.crop_frames, data.sample_rate)
    on_device = measured_seconds(augmenter, rows, num_samples, device)
    augmenter.reside(None)
    few = rows[:MEASURED_UTTERANCES]
    on_host = measured_seconds(augmenter, few, num_samples, torch.device("cpu")) * len(rows) / len(few)
    # All cores of this process but the one that trains.
    most = min(MAX_WORKERS, usable_cores() // distributed.local_world_size() - 1)
    choice = choose_augment_device(
        device_seconds=on_device,
        host_seconds=on_host,
        num_workers=most if data.num_workers == "auto" else data.num_workers,
    )
    # Each process has measured; all take the way of the first.
    choice = distributed.broadcast_object(choice)
    say_choice("augmentation on the device", choice, could_help=True)
    if choice.value:
        augmenter.reside(banks)
        return placement
    return dataclasses.replace(placement, banks=False)


def move_banks(augmenter: Augmenter, placement: Placement, maker: CropMaker | None, device: torch.device) -> None:
    """Move noise and RIRs to the device; babble of a corpus that lies there is `maker`'s.

    Raises:
        AudioError: a file cannot be read.
    """
    there = maker if isinstance(maker, ResidentMaker) else None
    banks = ResidentBanks(
        augmenter.banks,
        augmenter.rirs,
        device,
        spectra_bytes=int(placement.left_bytes * SPECTRA_SHARE),
        corpus=there.corpus if there else None,
        corpus_rows=there.reader if there else None,
        num_threads=usable_cores(),
    )
    augmenter.reside(banks)


def say_choice(what: str, choice: Choice[bool], *, could_help: bool) -> None:
    """What is done is worth a line, and so is why it is not where it would help; else it is a detail."""
    logger.log(logging.INFO if choice.value or could_help else logging.DEBUG, "%s: %s", what, choice)
