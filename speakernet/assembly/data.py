"""Build the training loader from the sections data and augment; no other file knows both.

Every automatic choice made here is logged with its reason; choices that change nothing go to
log.txt only.
"""

import logging
from dataclasses import dataclass
from typing import Any, Literal

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
from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.augment.banks import (
    ClipBank,
    ResidentBanks,
    RirBank,
    bytes_of_banks,
    clips_into_ram,
    device_responses,
    noise_banks,
)
from speakernet.data.loader import TrainingLoader
from speakernet.data.options import DataOptions
from speakernet.distributed import refuse_differences
from speakernet.files import human_bytes
from speakernet.machine.facts import usable_cores, usable_memory_bytes
from speakernet.options import Choice
from speakernet.terminal import counted
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
    config: Config, inputs: Inputs, start_method: str | None = None, *, reserved_bytes: int = 0
) -> TrainingLoader:
    """Build the loader described by the sections data and augment."""
    data = config.data
    given = inputs.training
    device = inputs.device
    # Lists and headers are checked before anything is decoded or moved.
    eligible = _checked_rows(config, given)
    voices = voices_of(config)
    # The sampler draws the voice, because it determines the label and how many samples are read.
    sampler = _sampler(config, given, eligible, voices)
    reader = _reader(data, given)
    augmenter = build_augmenter(config, reader, given.table, eligible)
    placement = choose_placement(config, reader, inputs, augmenter, reserved_bytes)
    is_gpu = device.type == "cuda"
    is_there = placement.banks or placement.corpus
    if augmenter and config.augment.device == "cuda" and not (is_gpu and is_there):
        why = (
            "noise and RIRs cannot be kept in the GPU's memory (the log gives the reason; see "
            "data.device_gigabytes)"
            if is_gpu
            else f"training runs on {device.type}"
        )
        raise ValueError(f"augment.device is cuda, but {why}; use auto")
    # The augmenter of the readers; if None, whole batches are augmented later. Workers gather noise
    # in parallel, whereas a GPU would wait for the training process to gather it for every batch.
    with_reading = None if is_there else augmenter
    # Noise is read more often than speech: babble takes three to seven clips per utterance.
    noise = (
        {kind: one for kind, one in augmenter.banks.items() if one.reader is not reader}
        if augmenter
        else {}
    )
    if noise and not placement.banks and not clips_into_ram(noise, data.cache_megabytes << 20):
        logger.info("noise clips are read from disk: they do not fit into data.cache_megabytes")
    # A GPU changes the speed of a whole batch at once; otherwise readers do, before they augment.
    changes_speed = device.type == "cpu" or with_reading is not None
    # Crops travel as 16-bit samples, at half the size, unless they are already augmented.
    is_int16 = with_reading is None and (
        isinstance(reader, packed.PackedRows) or given.table.all_plain
    )
    options = _resolve_auto(
        data,
        sampler,
        device,
        num_workers=0 if placement.corpus else data.num_workers,
        sample_bytes=2 if is_int16 else 4,
        is_reading_free=isinstance(
            reader, packed.PackedRows
        ),  # threads read ahead what is not in memory
        augments_in_workers=with_reading is not None,
        changed_share=voices.share_at_other_speeds if changes_speed else 0.0,
        is_waiting_for_disk=isinstance(reader, sources.FolderRows) and reader.is_on_disk,
        is_spawned=(start_method or workers.DEFAULT_START_METHOD) != "fork",
    )
    maker = batches.BatchMaker(
        reader,
        given.table.num_samples,
        seed=config.runtime.seed,
        speakers=batches.SpeakerIndex(given.rows.labels, eligible)
        if data.on_bad_audio == "skip"
        else None,
        speeds=voices.speeds,
        augmenter=with_reading,
        # If no copy follows, crops are made in the network's own type.
        dtype=np.int16
        if is_int16 and (device.type != "cpu" or options.num_workers != 0)
        else np.float32,
        changes_speed=changes_speed,
    )
    loader = TrainingLoader(
        _placed(maker, options, device, start_method, placement, augmenter),
        sampler,
        given.rows,
        options,
        device=device,
        augmenter=None if with_reading else augmenter,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    if data.corpora:
        logger.info("corpora:\n%s", given.source.summary(given.rows, loader.plan))  # type: ignore[attr-defined]
    return loader


def _placed(
    maker: batches.BatchMaker,
    options: DataOptions,
    device: torch.device,
    start_method: str | None,
    placement: Placement,
    augmenter: Augmenter | None,
) -> batches.CropMaker:
    """Make crops on the device, in worker processes or in this process; keep the banks on the
    device if they fit.
    """
    running: batches.CropMaker = maker
    if placement.corpus:
        assert isinstance(maker.reader, packed.PackedRows)
        running = batches.ResidentMaker(
            maker.reader,
            maker.lengths,
            seed=maker.seed,
            device=device,
            speakers=maker.speakers,
            speeds=maker.speeds,
        )
    elif options.num_workers:
        pins = device.type == "cuda" and bool(options.pin_memory)
        running = workers.Workers(maker, options, start_method, pins=pins)
    in_flight = int(options.num_workers) * int(options.prefetch_factor)
    if maker.reader.is_remote and not placement.corpus:
        running = maker.reader.ahead(running, in_flight)  # type: ignore[attr-defined]
    elif not placement.corpus and maker.reader.is_on_disk:
        logger.info(
            "the corpus is larger than the free memory (%s): %d threads read its crops ahead",
            human_bytes(usable_memory_bytes()),
            workers.NUM_THREADS,
        )
        running = workers.ReadAhead(running, maker, in_flight)
    if augmenter is not None and placement.banks and augmenter.resident is None:
        # Babble mixed from training utterances reads the corpus on the device, if it is there.
        resident = running if isinstance(running, batches.ResidentMaker) else None
        rows = resident.reader if resident else None
        assert rows is None or isinstance(rows, packed.PackedRows), (
            "only a packed corpus is on the device"
        )
        augmenter.resident = ResidentBanks(
            augmenter.banks,
            augmenter.rirs,
            device,
            corpus=resident.corpus if resident else None,
            corpus_rows=rows,
            num_threads=usable_cores(),
        )
    return running


def loading_facts(loader: TrainingLoader) -> choices.LoadingFacts:
    """The facts about a loader from which `data_wait_advice` advises on waiting for data."""
    maker = loader.maker
    reader = loader.maker.reader
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
        augments_on_cpu=maker.augmenter is not None,
        has_gpu=loader.device.type == "cuda",
        read_bytes_a_second=loader.read_bytes_a_second() if is_disk_timed else 0.0,
        is_on_disk=isinstance(reader, packed.PackedRows) and reader.is_on_disk,
    )


def _checked_rows(config: Config, given: TrainingInput) -> np.ndarray:
    """Check the list and its files, return the rows to train on, and log how many are left out."""
    data = config.data
    table = given.table
    num_speakers = len(given.rows.speakers)
    if 0 < data.num_classes < num_speakers:
        raise ValueError(
            f"data.num_classes is {data.num_classes}, but {given.rows.source} has {num_speakers} "
            "speakers; set it to 0 to use the number in the list"
        )
    if data.num_classes > num_speakers:
        counts = data.num_classes, num_speakers
        logger.warning(
            "data.num_classes is %d, but the list has only %d speakers: some outputs never train",
            *counts,
        )
    if bad := len(table.problems):
        first = "; ".join(table.problems[row] for row in sorted(table.problems)[:3])
        message = f"{bad} of {len(given.rows)} training files cannot be read: {first}"
        if data.on_bad_audio == "error":
            raise audio.AudioError(
                f"{message}. Fix the list or the files, or set data.on_bad_audio: skip"
            )
        if bad > data.max_bad_share * len(given.rows):
            raise audio.AudioError(
                f"{message}. That is more than data.max_bad_share ({data.max_bad_share}) allows"
            )
    seconds = table.seconds
    is_kept = table.native_samples > 0
    limits = {
        f"shorter than {data.min_seconds:g} s": seconds < data.min_seconds,
        f"longer than {data.max_seconds:g} s": (seconds > data.max_seconds)
        & (data.max_seconds > 0),
    }
    for what, is_out in limits.items():
        if count := int((is_kept & is_out).sum()):
            logger.info("%s %s left out", counted(count, "utterance"), what)
        is_kept &= ~is_out
    if not is_kept.any():
        raise ValueError(
            f"{given.rows.source}: no utterance is long enough for data.min_seconds "
            f"({data.min_seconds:g}) and short enough for data.max_seconds ({data.max_seconds:g}; "
            "0 sets no limit)"
        )
    return np.flatnonzero(is_kept)


def _sampler(
    config: Config, given: TrainingInput, eligible: np.ndarray, voices: sampling.Voices
) -> sampling.Sampler:
    data = config.data
    # Metric losses need several utterances per speaker in a batch to form pairs.
    wants_pairs = data.utterances_per_speaker > 1 or config.loss.is_metric
    is_balanced = data.sampler == "balanced" or (data.sampler == "auto" and wants_pairs)
    if not is_balanced and data.utterances_per_speaker > 1:
        raise ValueError("data.utterances_per_speaker above 1 needs data.sampler: balanced")
    kind = sampling.BalancedSampler if is_balanced else sampling.ShuffledSampler
    sampler = kind(
        given.rows.labels, data, seed=config.runtime.seed, eligible=eligible, voices=voices
    )
    world_size = distributed.world_size()
    if given.source.is_remote or data.corpora:
        given.source.order(sampler, given.rows, given.table, world_size)  # type: ignore[attr-defined]
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
        logger.info(
            "a batch of %d %s does not divide evenly among %d processes, which get %d or %d each",
            usual,
            what,
            world_size,
            usual // world_size,
            usual // world_size + 1,
        )
    return sampler


def _reader(data: DataOptions, given: TrainingInput) -> sources.RowReader:
    """The reader of the list's rows: from disk, packed corpus or memory."""
    source = given.source
    table = given.table
    free = usable_memory_bytes() * choices.MEMORY_SHARE
    budget = int(data.ram_corpus_gigabytes * GIGABYTE) or int(
        min(free, sharing.free_shared_memory() * SHARED_MEMORY_SHARE)
    )
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
        return packed.load_into_ram(
            source,
            given.rows.paths,
            table,
            num_threads=usable_cores(),
            show_progress=distributed.is_main(),
        )
    # Plain files are already in the system's page cache; a second copy would waste memory.
    keeps = bool(data.cache_megabytes) and not table.all_plain
    return source.rows(
        given.rows.paths, table, sources.AudioCache(data.cache_megabytes << 20) if keeps else None
    )


def _resolve_auto(
    data: DataOptions,
    sampler: sampling.Sampler,
    device: torch.device,
    *,
    num_workers: int | Literal["auto"],
    sample_bytes: int,
    is_reading_free: bool,
    augments_in_workers: bool,
    changed_share: float,
    is_waiting_for_disk: bool,
    is_spawned: bool,
) -> DataOptions:
    """The section with every `auto` for workers and queues resolved."""
    samples = audio.crop_samples(max(data.crop_frames, data.crop_frames_max), data.sample_rate)
    batch_bytes = data.batch_size * sampler.unit * samples * sample_bytes
    free_shared = sharing.free_shared_memory()
    if num_workers == "auto":
        choice = choices.choose_num_workers(
            cores=usable_cores(),
            num_batches=len(sampler.eligible) // (data.batch_size * sampler.unit),
            is_reading_free=is_reading_free,
            augments_in_workers=augments_in_workers,
            trains_on_cpu=device.type == "cpu",
            batch_bytes=batch_bytes,
            free_shared_bytes=free_shared,
            processes_on_machine=distributed.local_world_size(),
            is_spawned=is_spawned,
            changed_share=changed_share,
            is_waiting_for_disk=is_waiting_for_disk,
        )
        num_workers = choice.value
        logger.info("loader workers: %s", choice)
    decided: dict[str, Any] = {"num_workers": num_workers}
    if data.prefetch_factor == "auto":
        memory = {"batch_bytes": batch_bytes, "free_shared_bytes": free_shared}
        decided["prefetch_factor"] = choices.choose_prefetch(
            num_workers=int(num_workers), **memory
        ).value
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
    wanted = config.augment.device
    is_possible = (
        augmenter is not None
        and wanted != "cpu"
        and (data.device_resident != "off" or wanted == "cuda")
    )
    is_considered = is_possible and (device.type == "cuda" or data.device_resident == "on")
    rows = reader if isinstance(reader, packed.PackedRows) else None
    bank_bytes = (
        bytes_of_banks(augmenter.banks, augmenter.rirs, rows) if is_considered and augmenter else 0
    )
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
    batch_size = max(1, data.batch_size * data.utterances_per_speaker * data.crop_frames // frames)
    dtype = precision.DTYPES[precision.choose_precision(config.runtime.precision, device).value]
    return compiling.training_bytes(
        net, audio.crop_samples(frames, data.sample_rate), batch_size, dtype
    )


def _log_choice(what: str, choice: Choice[bool], *, could_help: bool) -> None:
    """Log a choice; if it is "no" and "yes" could not have helped, it goes to log.txt only."""
    logger.log(
        logging.INFO if choice.value or could_help else logging.DEBUG, "%s: %s", what, choice
    )


def build_augmenter(
    config: Config, reader: sources.RowReader, table: lookup.LookupTable, eligible: np.ndarray
) -> Augmenter | None:
    """The augmenter, or None if it is switched off or has nothing to do."""
    section = config.augment
    sample_rate = config.data.sample_rate
    if not section.enabled:
        return None
    cache = sources.AudioCache(config.data.cache_megabytes << 20)
    banks = noise_banks(section.noise_path, sample_rate, cache) if section.noise_path else {}
    if banks and "babble" not in banks and "babble" in section.categories and not reader.is_remote:
        banks["babble"] = ClipBank(reader, eligible, table.num_samples[eligible])
        logger.info("the noise has no folder 'speech': babble is mixed from training utterances")
    rirs: RirBank | None = None
    if section.rir_path:
        # The classic pipeline keeps the delay of the direct path, which shifts the speech in its
        # crop.
        rirs = RirBank(section.rir_path, sample_rate, cache, is_aligned=section.style == "ours")
    devices = (
        device_responses(section.microphone_path, sample_rate) if section.microphone_path else None
    )
    # All processes draw from the same clips, by number.
    refuse_differences(
        {
            "the noise of augment.noise_path (clips and samples)": {
                kind: [len(bank), int(bank.lengths.sum())] for kind, bank in banks.items()
            },
            "the names of augment.rir_path (CRC-32)": f"{rirs.names.checksum:08x}" if rirs else "",
            "the devices of augment.microphone_path": 0 if devices is None else len(devices),
        }
    )
    augmenter = Augmenter(
        banks, rirs, section, sample_rate=sample_rate, seed=config.runtime.seed, devices=devices
    )
    if augmenter.missing and (section.noise_path or section.rir_path):
        logger.warning(
            "augmentation: found no files for %s; their share goes to %s",
            ", ".join(augmenter.missing),
            ", ".join(dict.fromkeys(augmenter.available)) or "clean speech",
        )
    if not augmenter.has_effect:
        logger.warning(
            "augmentation is skipped, because augment.noise_path and augment.rir_path contain "
            "nothing to mix in; `speakernet prepare musan` and `speakernet prepare rirs` fetch "
            "noise and RIRs"
        )
        return None
    found = [f"{len(bank):,} clips of {kind}" for kind, bank in banks.items()] + (
        [f"{len(rirs):,} RIRs"] if rirs else []
    )
    if section.microphone_probability:
        found.append(f"frequency responses of {section.microphone_db:g} dB")
    if devices is not None:
        found.append(f"{len(devices)} real microphones")
    effects = {"telephone": section.telephone_probability, "codec": section.codec_probability}
    found += [name for name, probability in effects.items() if probability] + ["volume"] * any(
        section.volume_db
    )
    logger.info("augmentation: %s", ", ".join([*found, *section.components]))
    return augmenter
