"""From the sections data and augment to the training loader and to sources: the only file that knows both.

Every automatic choice made here is logged with its reason.
"""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import torch

from speakernet import distributed
from speakernet.assembly.augment import augments_on_device, build_augmenter
from speakernet.config.schema import Config
from speakernet.corpora.synthetic import make_corpus
from speakernet.data.audio import AudioError, crop_samples
from speakernet.data.batches import BatchMaker, SpeakerIndex
from speakernet.data.cache import AudioCache
from speakernet.data.choices import (
    MEMORY_SHARE,
    choose_device_resident,
    choose_num_workers,
    choose_prefetch,
    choose_ram_corpus,
    free_shared_memory,
    spawns_workers,
)
from speakernet.data.lists import TrainingList, read_training_list
from speakernet.data.loader import TrainingLoader
from speakernet.data.lookup import LookupTable
from speakernet.data.options import LoadingOptions
from speakernet.data.packed.corpus import PackedRows
from speakernet.data.ram import load_into_ram
from speakernet.data.resident import ResidentMaker
from speakernet.data.sampling import BalancedSampler, Sampler, ShuffledSampler, speed_fractions
from speakernet.data.sources import PCM_S16, AudioSource, FolderSource, RowReader, list_names, open_source
from speakernet.machine.limits import usable_cores, usable_memory_bytes
from speakernet.training.data_wait import LoadingFacts

logger = logging.getLogger(__name__)

GIGABYTE = 1 << 30
HEADER_THREADS = 16


def make_synthetic_corpus(config: Config) -> Config:
    """Make the synthetic corpus where the config names one and it is not there; lists left empty are taken from it."""
    folder = config.data.synthetic_corpus
    if not folder:
        return config
    if distributed.is_main():
        made = make_corpus(folder, show_progress=True)
    distributed.barrier()
    if not distributed.is_main():
        made = make_corpus(folder, show_progress=False)
    data, augment = config.data, config.augment
    data = dataclasses.replace(
        data,
        train_list=data.train_list or str(made.train_list),
        train_path=data.train_path or ("" if data.train_list else str(made.train_path)),
        test_list=data.test_list or str(made.test_list),
        test_path=data.test_path or ("" if data.test_list else str(made.test_path)),
    )
    augment = dataclasses.replace(
        augment, noise_path=augment.noise_path or str(made.noise_path), rir_path=augment.rir_path or str(made.rir_path)
    )
    return dataclasses.replace(config, data=data, augment=augment)


def build_source(config: Config, root: str | Path) -> AudioSource:
    """The source of audio at `root` (a folder or a packed corpus), at the config's rate."""
    source = open_source(root, config.data.sample_rate)
    if isinstance(source, FolderSource):
        source.show_progress = distributed.is_main()
    return source


def loading_facts(loader: TrainingLoader) -> LoadingFacts:
    """What advice about waiting for data needs to know of a loader (`speakernet.training.data_wait`)."""
    reader = loader.maker.reader
    return LoadingFacts(
        num_workers=int(loader.options.num_workers),
        cores=usable_cores(),
        is_packed=isinstance(reader, PackedRows),
        is_compressed=not isinstance(reader, PackedRows) and not loader.maker.is_plain,
        augments_on_cpu=loader.maker.augmenter is not None,
        has_gpu=loader.device.type == "cuda",
        read_bytes_a_second=loader.read_bytes_a_second(),
    )


def build_training_loader(config: Config, device: torch.device, start_method: str | None = None) -> TrainingLoader:
    """The loader that the sections data and augment describe.

    Raises:
        ValueError: lists, audio or numbers that make no epoch; see each part.
    """
    data = config.data
    training = read_training_list(data.train_list)
    source = build_source(config, data.train_path or Path(data.train_list).parent)
    table = source.lookup(training.paths, HEADER_THREADS)
    _refuse_bad_files(config, training, table)
    eligible = _eligible(config, table)
    speeds = speed_fractions(config.augment.speed_factors if config.augment.enabled else [1.0])
    sampler = _sampler(config, training, eligible, len(speeds))
    reader = _reader(config, source, training, table)
    augmenter = build_augmenter(config, reader, table, eligible)
    augments_elsewhere = augmenter is not None and config.augment.device == "cpu" and device.type != "cpu"
    speakers = SpeakerIndex(training.labels, eligible) if data.on_bad_audio == "skip" else None
    resident = _resident(
        config, reader, table, device, speakers, has_speeds=len(speeds) > 1, augments_elsewhere=augments_elsewhere
    )
    on_device = augmenter is not None and augments_on_device(config, device, is_resident=resident is not None)
    maker = BatchMaker(
        reader,
        table.num_samples,
        seed=config.runtime.seed,
        speakers=speakers,
        speeds=speeds,
        augmenter=None if on_device else augmenter,
        is_plain=_is_plain(table),
        is_int16=(augmenter is None or on_device) and (isinstance(reader, PackedRows) or _is_plain(table)),
    )
    options = _loader_options(config, maker, sampler, reader, device, is_resident=resident is not None)
    if options.num_workers == 0 and device.type == "cpu":
        # Nothing is handed over: crops are made as the network wants them at once.
        maker.dtype = np.float32
    if distributed.world_size() > data.batch_size:
        raise ValueError(f"data.batch_size is {data.batch_size}, fewer than the {distributed.world_size()} processes")
    return TrainingLoader(
        maker,
        sampler,
        training.paths,
        num_speakers=_num_speakers(config, len(training.speakers)),
        device=device,
        samples_of=_CropSamples(data.sample_rate),
        augmenter=augmenter if on_device else None,
        options=options,
        start_method=start_method,
        speakers=training.speakers,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        resident=resident,
    )


class _CropSamples:
    """`crop_samples` at one rate."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate

    def __call__(self, frames: int) -> int:
        return crop_samples(frames, self.sample_rate)


def _num_speakers(config: Config, in_list: int) -> int:
    """Classes before speed perturbation: what the list has, or the larger number that was asked for."""
    wanted = config.data.num_classes
    if wanted and wanted < in_list:
        raise ValueError(
            f"data.num_classes is {wanted}, but {config.data.train_list} has {in_list} speakers; leave it at 0"
        )
    if wanted > in_list:
        logger.warning(
            "data.num_classes is %d, the list has %d speakers: some outputs will never train", wanted, in_list
        )
    return max(wanted, in_list)


def _refuse_bad_files(config: Config, training: TrainingList, table: LookupTable) -> None:
    """With on_bad_audio: error, unreadable files are an error before anything is trained."""
    data = config.data
    if table.problems:
        rows = np.array(sorted(table.problems))
        share = len(rows) / len(training)
        first = "; ".join(table.problems[int(row)] for row in rows[:3])
        message = f"{len(rows)} of {len(training)} training files cannot be read: {first}"
        if data.on_bad_audio == "error":
            raise AudioError(
                f"{message} (files: {list_names(training.paths, rows)}). Mend the list or the files, or set "
                "data.on_bad_audio: skip"
            )
        if share > data.max_bad_share:
            raise AudioError(f"{message}; that is more than data.max_bad_share ({data.max_bad_share}) allows")
        logger.warning("%s; they are left out (data.on_bad_audio: skip)", message)
    other_rate = int(((table.sample_rates != data.sample_rate) & (table.native_samples > 0)).sum())
    if other_rate:
        logger.warning("%d training files are not at %d Hz and are resampled", other_rate, data.sample_rate)
    several = int((table.num_channels > 1).sum())
    if several:
        logger.warning("%d training files have several channels and are mixed down", several)


def _eligible(config: Config, table: LookupTable) -> np.ndarray:
    """Rows within the length limits; what is left out is said."""
    data = config.data
    seconds = table.seconds
    readable = table.native_samples > 0
    too_short = readable & (seconds < data.min_seconds)
    too_long = readable & (seconds > data.max_seconds) if data.max_seconds else np.zeros(len(seconds), dtype=bool)
    if too_short.any():
        logger.info("%d utterances shorter than %g s are left out", too_short.sum(), data.min_seconds)
    if too_long.any():
        logger.info("%d utterances longer than %g s are left out", too_long.sum(), data.max_seconds)
    kept = np.flatnonzero(readable & ~too_short & ~too_long)
    if not len(kept):
        raise ValueError(
            f"{data.train_list}: no utterance is left between data.min_seconds ({data.min_seconds}) and "
            f"data.max_seconds ({data.max_seconds})"
        )
    return kept


def _sampler(config: Config, training: TrainingList, eligible: np.ndarray, num_speeds: int) -> Sampler:
    data = config.data
    loss = config.loss
    needed = loss.min_utterances
    if data.utterances_per_speaker < needed:
        raise ValueError(
            f"the loss {loss.name!r} compares utterances of the same speaker: data.utterances_per_speaker is "
            f"{data.utterances_per_speaker}, expected at least {needed}"
        )
    is_balanced = data.sampler == "balanced" or (
        data.sampler == "auto" and (data.utterances_per_speaker > 1 or loss.is_metric)
    )
    if not is_balanced:
        if data.utterances_per_speaker > 1:
            raise ValueError("data.utterances_per_speaker above 1 needs data.sampler: balanced")
        return ShuffledSampler(
            training.labels, data, seed=config.runtime.seed, eligible=eligible, num_speeds=num_speeds
        )
    return BalancedSampler(training.labels, data, seed=config.runtime.seed, eligible=eligible, num_speeds=num_speeds)


def _reader(config: Config, source: AudioSource, training: TrainingList, table: LookupTable) -> RowReader:
    """Rows of the list from disk, packed corpus or memory."""
    data = config.data
    is_packed = not isinstance(source, FolderSource)
    free = usable_memory_bytes() * MEMORY_SHARE
    budget = int(data.ram_corpus_gigabytes * GIGABYTE) or int(min(free, free_shared_memory() * 0.8))
    choice = choose_ram_corpus(
        switch=data.ram_corpus,
        corpus_bytes=2 * int(table.num_samples.sum()),
        is_compressed=not _is_plain(table),
        is_packed=is_packed,
        budget_bytes=budget // max(1, distributed.world_size()),
    )
    logger.info("RAM corpus: %s (%s)", "yes" if choice.value else "no", choice.reason)
    if choice.value:
        return load_into_ram(
            source, training.paths, table, num_threads=usable_cores(), show_progress=distributed.is_main()
        )
    if isinstance(source, FolderSource) and data.cache_megabytes and not _is_plain(table):
        source.cache = AudioCache(data.cache_megabytes << 20)
    return source.rows(training.paths, table)


def _is_plain(table: LookupTable) -> bool:
    """Whether every readable file is 16-bit mono PCM at the rate asked for."""
    return bool((~_needs_decoding(table)).all())


def _needs_decoding(table: LookupTable) -> np.ndarray:
    is_plain = (table.data_offsets >= 0) & (table.num_channels == 1) & (table.sample_rates == table.sample_rate)
    return (table.native_samples > 0) & ~(is_plain & (table.formats == PCM_S16))


def _resident(
    config: Config,
    reader: RowReader,
    table: LookupTable,
    device: torch.device,
    speakers: SpeakerIndex | None,
    *,
    has_speeds: bool,
    augments_elsewhere: bool,
) -> ResidentMaker | None:
    data = config.data
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else usable_memory_bytes()
    choice = choose_device_resident(
        switch=data.device_resident,
        device_type=device.type,
        corpus_bytes=2 * int(table.num_samples.sum()),
        is_flat=isinstance(reader, PackedRows),
        has_speeds=has_speeds,
        augments_elsewhere=augments_elsewhere,
        budget_bytes=int(data.device_gigabytes * GIGABYTE) or int(free * MEMORY_SHARE),
    )
    logger.info("corpus on the device: %s (%s)", "yes" if choice.value else "no", choice.reason)
    if not choice.value:
        return None
    assert isinstance(reader, PackedRows)
    return ResidentMaker(reader, table.num_samples, seed=config.runtime.seed, device=device, speakers=speakers)


def _loader_options(
    config: Config, maker: BatchMaker, sampler: Sampler, reader: RowReader, device: torch.device, *, is_resident: bool
) -> LoadingOptions:
    data = config.data
    samples = max(crop_samples(frames, data.sample_rate) for frames in (data.crop_frames, data.crop_frames_max))
    batch_bytes = data.batch_size * sampler.unit * samples * np.dtype(maker.dtype).itemsize
    free_shared = free_shared_memory()
    if is_resident:
        num_workers = 0
    elif data.num_workers == "auto":
        choice = choose_num_workers(
            cores=usable_cores(),
            num_batches=len(sampler.eligible) // (data.batch_size * sampler.unit),
            is_reading_free=isinstance(reader, PackedRows),
            augments_in_workers=maker.augmenter is not None,
            trains_on_cpu=device.type == "cpu",
            batch_bytes=batch_bytes,
            free_shared_bytes=free_shared,
            processes_on_machine=distributed.world_size(),
            is_spawned=spawns_workers(),
            changed_share=sum(speed != 1 for speed in maker.speeds) / len(maker.speeds),
        )
        num_workers = choice.value
        logger.info("loader workers: %d (%s)", num_workers, choice.reason)
    else:
        num_workers = int(data.num_workers)
    if data.prefetch_factor == "auto":
        prefetch = choose_prefetch(
            num_workers=num_workers, batch_bytes=batch_bytes, free_shared_bytes=free_shared
        ).value
    else:
        prefetch = int(data.prefetch_factor)
    pin_memory = device.type == "cuda" if data.pin_memory == "auto" else bool(data.pin_memory)
    return dataclasses.replace(data, num_workers=num_workers, prefetch_factor=prefetch, pin_memory=pin_memory)
