"""Build the training loader from the sections data and augment; no other file knows both.

Every automatic choice made here is logged with its reason; choices that change nothing go to
log.txt only.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from speakernet import distributed
from speakernet.assembly.inputs import Inputs, TrainingInput, voices_of
from speakernet.config.schema import Config
from speakernet.data import (
    audio,
    batches,
    choices,
    lookup,
    packed,
    sampling,
    sharing,
    sources,
    workers,
)
from speakernet.data.augment.augmenter import Augmenter, build_augmenter
from speakernet.data.augment.banks import clips_into_ram
from speakernet.data.augment.mixers import bytes_of_banks
from speakernet.data.loader import TrainingLoader
from speakernet.data.options import DataOptions
from speakernet.files import human_bytes
from speakernet.machine.facts import usable_cores, usable_memory_bytes
from speakernet.options import Choice
from speakernet.training import compiling, precision

logger = logging.getLogger(__name__)

GIGABYTE = 1 << 30
SHARED_MEMORY_SHARE = (
    0.8  # of free shared memory, for the corpus; the workers' ring also needs some
)


@dataclass(frozen=True)
class Placement:
    """What is kept in the memory of the training device."""

    corpus: bool
    banks: bool
    """Noise and RIRs."""


def build_training_loader(
    config: Config, inputs: Inputs, *, reserved_bytes: int = 0
) -> TrainingLoader:
    """Build the loader described by the sections data and augment."""
    # The order is that of the decisions. Lists and headers are checked before anything is decoded
    # or moved. Then the sampler, which draws the voice, because the voice determines the label and
    # how many samples are read. Then what lies where: the corpus on disk or in memory, the corpus
    # and the noise on the device or not. Only then is it clear who augments (readers in parallel,
    # or the device for whole batches), and from that follow the type of the crops on their way
    # (16-bit samples at half the size, unless they are already augmented), who changes the speed
    # (a GPU for a whole batch at once, otherwise the readers, before they augment), and how many
    # workers are worth starting.
    data = config.data
    device = inputs.device
    training = inputs.training
    eligible = lookup.eligible_rows(data, training.rows, training.table)
    voices = voices_of(config)
    sampler = _sampler(config, training, eligible, voices)
    reader = _reader(data, training)
    is_flat = isinstance(reader, packed.PackedRows)
    augmenter = build_augmenter(
        config.augment, data, config.runtime.seed, reader, training.table, eligible
    )
    placement = choose_placement(config, reader, inputs, augmenter, reserved_bytes)
    is_there = placement.banks or placement.corpus
    if augmenter and config.augment.device == "cuda":
        _refuse_augmenting_elsewhere(device, is_there=is_there)
    with_reading = None if is_there else augmenter
    if augmenter and not placement.banks:
        _keep_noise_in_ram(augmenter, reader, data.cache_megabytes << 20)
    changes_speed = device.type == "cpu" or with_reading is not None
    is_int16 = with_reading is None and (is_flat or training.table.all_plain)
    work = choices.CropWork(
        # Threads read ahead what is not in memory.
        is_reading_free=is_flat,
        augments=with_reading is not None,
        changed_share=voices.share_at_other_speeds if changes_speed else 0.0,
    )
    options = _resolve_auto(
        # A corpus on the device needs no workers.
        data.model_copy(update={"num_workers": 0}) if placement.corpus else data,
        sampler,
        device,
        work,
        sample_bytes=2 if is_int16 else 4,
        is_spawned=workers.START_METHOD != "fork",
    )
    # If no copy follows, crops are made in the network's own type.
    is_copied = device.type != "cpu" or options.num_workers != 0
    speakers = None
    if data.on_bad_audio == "skip":
        speakers = batches.SpeakerIndex(training.rows.labels, eligible)
    maker = batches.BatchMaker(
        reader,
        training.table.num_samples,
        seed=config.runtime.seed,
        speakers=speakers,
        speeds=voices.speeds,
        augmenter=with_reading,
        dtype=np.int16 if is_int16 and is_copied else np.float32,
        changes_speed=changes_speed,
    )
    running = _place_maker(maker, options, device, placement, may_grow=data.num_workers == "auto")
    if augmenter is not None and placement.banks:
        # Babble mixed from training utterances reads the corpus on the device, if it is there.
        corpus = None
        if isinstance(running, batches.ResidentMaker):
            corpus = (running.reader, running.corpus)
        augmenter.move_to(device, corpus=corpus)
    loader = TrainingLoader(
        running,
        sampler,
        training.rows,
        options,
        device=device,
        augmenter=None if with_reading else augmenter,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    if summary := training.source.summary(training.rows, loader.plan):
        logger.info("corpora:\n%s", summary)
    return loader


def _refuse_augmenting_elsewhere(device: torch.device, *, is_there: bool) -> None:
    """Refuse `augment.device: cuda` if the noise cannot be on the GPU."""
    if device.type != "cuda":
        raise ValueError(f"augment.device is cuda, but training runs on {device.type}; use auto")
    # Requested explicitly, so it must not silently become slower; `auto` falls back to the CPU.
    if not is_there:
        raise ValueError(
            "augment.device is cuda, but noise and RIRs cannot be kept in the GPU's memory (the "
            "log gives the reason; see data.device_gigabytes); use auto"
        )


def _keep_noise_in_ram(augmenter: Augmenter, reader: sources.RowReader, limit_bytes: int) -> None:
    """Noise is read more often than speech: babble takes three to seven clips per utterance."""
    # Babble may read the corpus itself, which is not copied: it may be far larger than memory.
    noise = {kind: bank for kind, bank in augmenter.banks.items() if bank.reader is not reader}
    if noise and not clips_into_ram(noise, limit_bytes):
        logger.info("noise clips are read from disk: they do not fit into data.cache_megabytes")


def _place_maker(
    maker: batches.BatchMaker,
    options: DataOptions,
    device: torch.device,
    placement: Placement,
    *,
    may_grow: bool,
) -> batches.CropMaker:
    """Make crops on the device, in worker processes or in this process."""
    if placement.corpus:
        assert isinstance(maker.reader, packed.PackedRows)
        return batches.ResidentMaker(
            maker.reader,
            maker.lengths,
            seed=maker.seed,
            device=device,
            speakers=maker.speakers,
            speeds=maker.speeds,
        )
    # Reading ahead comes last, because it wraps whatever makes the crops, workers or this process.
    running: batches.CropMaker = maker
    if options.num_workers:
        pins = device.type == "cuda" and bool(options.pin_memory)
        running = workers.Workers(maker, options, pins=pins, may_grow=may_grow)
    in_flight = int(options.num_workers) * int(options.prefetch_factor)
    if maker.reader.is_remote:
        return maker.reader.ahead(running, in_flight)
    if maker.reader.is_on_disk:
        logger.info(
            "the corpus is larger than the free memory (%s): %d threads read its crops ahead",
            human_bytes(usable_memory_bytes()),
            workers.NUM_THREADS,
        )
        running = workers.ReadAhead(running, in_flight)
    return running


def loading_facts(loader: TrainingLoader) -> choices.LoadingFacts:
    """The facts about a loader from which `data_wait_advice` advises on waiting for data."""
    maker = loader.maker
    reader = loader.maker.reader
    augmenter = maker.augmenter
    is_compressed = isinstance(reader, sources.FolderRows) and not reader.table.all_plain
    # Reading times include decoding and speed changes; with either, they do not measure the disk.
    is_disk_timed = not is_compressed and not (
        maker.changes_speed and any(speed != 1 for speed in maker.speeds)
    )
    return choices.LoadingFacts(
        num_workers=int(loader.options.num_workers),
        cores=usable_cores(),
        is_packed=isinstance(reader, packed.PackedRows),
        is_compressed=is_compressed,
        augments_on_cpu=augmenter is not None,
        needs_cpu=augmenter is not None and bool(augmenter.options.real_codecs),
        has_gpu=loader.device.type == "cuda",
        read_bytes_a_second=loader.read_bytes_a_second() if is_disk_timed else 0.0,
        is_on_disk=isinstance(reader, packed.PackedRows) and reader.is_on_disk,
    )


def _sampler(
    config: Config, training: TrainingInput, eligible: np.ndarray, voices: sampling.Voices
) -> sampling.Sampler:
    data = config.data
    # Metric losses need several utterances per speaker in a batch to form pairs.
    has_pairs = data.utterances_per_speaker > 1 or config.loss.is_metric
    is_balanced = data.sampler == "balanced" or (data.sampler == "auto" and has_pairs)
    kind = sampling.BalancedSampler if is_balanced else sampling.ShuffledSampler
    sampler = kind(
        training.rows.labels, data, seed=config.runtime.seed, eligible=eligible, voices=voices
    )
    world_size = distributed.world_size()
    # A corpus at an address is read shard by shard, so its order has to follow the shards.
    training.source.order(sampler, training.rows, training.table, world_size)
    smallest = sampler.smallest_batch
    usual = sampler.batch_size
    what = "speakers" if sampler.unit > 1 else "utterances"
    if smallest < world_size:
        raise ValueError(
            f"data.batch_size is {usual} {what} ({smallest} of the longest crops), but each of the "
            f"{world_size} processes needs at least one; raise data.batch_size or start fewer "
            "processes"
        )
    if usual % world_size:
        least = usual // world_size
        shares = f"{world_size} processes, which get {least} or {least + 1} each"
        logger.info("a batch of %d %s does not divide evenly among %s", usual, what, shares)
    return sampler


def _reader(data: DataOptions, training: TrainingInput) -> sources.RowReader:
    """The reader of the list's rows: from disk, packed corpus or memory."""
    source = training.source
    table = training.table
    free = usable_memory_bytes() * choices.MEMORY_SHARE
    # Workers share the corpus through shared memory, which containers limit (64 MB by default).
    budget = int(min(free, sharing.free_shared_memory() * SHARED_MEMORY_SHARE))
    choice = choices.choose_ram_corpus(
        switch=data.ram_corpus,
        corpus_bytes=2 * int(table.num_samples.sum()),  # as int16
        is_compressed=not table.all_plain,
        is_packed=isinstance(source, packed.PackedSource),
        # Each process of a distributed run holds the whole corpus.
        budget_bytes=budget // distributed.local_world_size(),
    )
    _log_choice("RAM corpus", choice, could_help=not table.all_plain)
    if choice.value:
        return packed.load_into_ram(source, training.rows.paths, table)
    cache = None
    budget = data.cache_megabytes << 20
    # Plain files are already in the system's page cache; a second copy would waste memory. A cache
    # that holds only part of the corpus rarely has the next utterance, and to fill it whole
    # utterances are decoded where a crop would do.
    if not table.all_plain and 4 * int(table.num_samples.sum()) <= budget:
        cache = sources.AudioCache(budget)
    return source.rows(training.rows.paths, table, cache)


def _resolve_auto(
    data: DataOptions,
    sampler: sampling.Sampler,
    device: torch.device,
    work: choices.CropWork,
    *,
    sample_bytes: int,
    is_spawned: bool,
) -> DataOptions:
    """The section with every `auto` for workers and queues resolved."""
    # The length of crops may vary, and the queues must have room for the longest.
    samples = audio.crop_samples(max(data.crop_frames, data.crop_frames_max), data.sample_rate)
    batch_bytes = data.batch_size * sampler.unit * samples * sample_bytes
    free_shared = sharing.free_shared_memory()
    num_workers = data.num_workers
    if num_workers == "auto":
        choice = choices.choose_num_workers(
            work,
            cores=usable_cores(),
            num_batches=len(sampler.eligible) // (data.batch_size * sampler.unit),
            trains_on_cpu=device.type == "cpu",
            batch_bytes=batch_bytes,
            free_shared_bytes=free_shared,
            processes_on_machine=distributed.local_world_size(),
            is_spawned=is_spawned,
        )
        num_workers = choice.value
        logger.info("loader workers: %s", choice)
    decided: dict[str, Any] = {"num_workers": num_workers}
    if data.prefetch_factor == "auto":
        decided["prefetch_factor"] = choices.choose_prefetch(
            num_workers=int(num_workers), batch_bytes=batch_bytes, free_shared_bytes=free_shared
        )
    if data.pin_memory == "auto":
        decided["pin_memory"] = device.type == "cuda"
    return data.model_copy(update=decided)


def choose_placement(
    config: Config,
    reader: sources.RowReader,
    inputs: Inputs,
    augmenter: Augmenter | None,
    reserved_bytes: int = 0,
) -> Placement:
    """Decide what to keep on the device, and log each choice with its reason.

    Noise and RIRs have priority: they are small, and without them every batch waits for the host.
    The memory that training itself needs (`reserved_bytes`) is left free.
    """
    data = config.data
    device = inputs.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else usable_memory_bytes()
    bound = int(data.device_gigabytes * GIGABYTE) or int(
        max(0, free - reserved_bytes) * choices.MEMORY_SHARE
    )
    place = config.augment.device
    is_possible = (
        augmenter is not None
        and place != "cpu"
        and not config.augment.real_codecs
        and (data.device_resident != "off" or place == "cuda")
    )
    is_considered = is_possible and (device.type == "cuda" or data.device_resident == "on")
    rows = reader if isinstance(reader, packed.PackedRows) else None
    bank_bytes = (
        bytes_of_banks(augmenter.banks, augmenter.rirs, rows) if is_considered and augmenter else 0
    )
    # Noise gets its memory first: if the corpus took the last of it, noise would stay on the host,
    # and crops on the device could not be augmented.
    fits = is_considered and bank_bytes <= bound
    corpus_bytes = 2 * int(inputs.training.table.num_samples.sum())
    corpus = choices.choose_device_resident(
        switch=data.device_resident,
        device_type=device.type,
        corpus_bytes=corpus_bytes,
        is_flat=rows is not None,
        augments_elsewhere=augmenter is not None and not fits and device.type != "cpu",
        budget_bytes=bound - (bank_bytes if fits else 0),
    )
    _log_choice("corpus on the device", corpus, could_help=device.type == "cuda")
    if not is_considered or augmenter is None:
        return Placement(corpus.value, banks=False)
    reads_corpus = any(bank.reader is reader for bank in augmenter.banks.values())
    banks = choices.choose_device_banks(
        bank_bytes=bank_bytes,
        budget_bytes=bound,
        needs_corpus=reads_corpus,
        is_corpus_there=corpus.value,
    )
    _log_choice("noise and RIRs on the device", banks, could_help=device.type == "cuda")
    return Placement(corpus.value, banks.value)


def reserved_for_training(config: Config, net: nn.Module, device: torch.device) -> int:
    """An estimate of the GPU memory in bytes that a step with the longest crops takes; 0 without a
    GPU.
    """
    if device.type != "cuda":
        return 0
    data = config.data
    frames = max(data.crop_frames, data.crop_frames_max)
    # Longer crops come in smaller batches, so that a batch holds the same amount of audio.
    batch_size = max(1, data.utterances_per_batch * data.crop_frames // frames)
    dtype = precision.DTYPES[precision.choose_precision(config.runtime.precision, device).value]
    return compiling.training_bytes(
        net, audio.crop_samples(frames, data.sample_rate), batch_size, dtype
    )


def _log_choice(what: str, choice: Choice[bool], *, could_help: bool) -> None:
    """Log a choice; if it is "no" and "yes" could not have helped, it goes to log.txt only."""
    logger.log(
        logging.INFO if choice.value or could_help else logging.DEBUG, "%s: %s", what, choice
    )
