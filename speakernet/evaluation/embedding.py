"""From utterances to embeddings: each utterance once, read by threads ahead of the network, batched across utterances.

Crops are cut as voxceleb_trainer cuts them (evenly spaced, short utterances wrapped around); crops of one utterance
that start at the same sample are embedded once. Whole utterances go in buckets of like length with their lengths, so
that the answer is that of one by one. The processes of a distributed run share the work.
"""

import collections
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from speakernet import distributed
from speakernet.data.audio import AudioError, crop_samples, wrap_to_length
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.evaluation.options import EmbeddingOptions
from speakernet.machine.limits import usable_cores
from speakernet.terminal import MAX_NAMED, Bar

logger = logging.getLogger(__name__)

MAX_BATCH_SECONDS_EACH = 4.0
"""A batch of whole utterances holds no more padded audio than batch_size crops of this length."""
MIN_WHOLE_SECONDS = 0.5
"""Whole utterances shorter than this (or than what the network needs) are wrapped around, as crops are."""
MAX_READERS = 8
"""More threads than this wait for each other: cutting crops holds the interpreter's lock."""
READ_AHEAD_UTTERANCES = 64
READ_AHEAD_SAMPLES = 1 << 25
"""Audio that waits for the network: 128 MiB, whatever the length of the recordings."""
LONG_SECONDS = 180.0
"""Recordings longer than this are not read at once: VoxCeleb's longest has 145 s."""
WINDOW_SECONDS = 60.0
"""Long recordings are embedded whole in windows of about this length, whose embeddings are averaged."""


class EmbeddingNet(Protocol):
    """What is needed of a network: SpeakerNet, or anything like it."""

    sample_rate: int

    @property
    def min_samples(self) -> int:
        """Samples of the shortest waveform that it takes."""

    def embed(self, waveforms: Tensor, lengths: Tensor | None = None, *, sample_rate: int) -> Tensor:
        """(batch, samples) in -1..1 at `sample_rate`, and (batch,) samples -> (batch, dim)."""


def crop_starts(num_samples: int, length: int, num_crops: int) -> np.ndarray:
    """First samples of evenly spaced crops, int64 (crops,); an utterance that is too short counts as length + 1.

    >>> crop_starts(100, 40, 3).tolist()
    [0, 30, 60]
    """
    # One sample more than the crop: voxceleb_trainer pads short utterances so.
    available = num_samples if num_samples > length else length + 1
    return np.linspace(0, available - length, num=num_crops).astype(np.int64)


@dataclass(frozen=True)
class Stretch:
    """What is read at once: an utterance, or a window of a long one.

    Attributes:
        row: of the list of names.
        start: first sample of the window.
        num_samples: of the utterance or the window.
        num_windows: of the utterance.
    """

    row: int
    start: int
    num_samples: int
    num_windows: int = 1


@dataclass(frozen=True)
class Piece:
    """What a stretch gives the network: different waveforms, and which of them each of its columns takes.

    Attributes:
        stretch: where they were read.
        waveforms: (waveforms, samples) float32.
        columns: (crops,) row of `waveforms` for each crop.
    """

    stretch: Stretch
    waveforms: np.ndarray
    columns: np.ndarray


def reader_threads(options: EmbeddingOptions) -> int:
    """Threads that read audio ahead of the network."""
    if options.num_workers == "auto":
        return min(MAX_READERS, usable_cores())
    return max(1, options.num_workers)


def embed_utterances(
    net: EmbeddingNet,
    source: AudioSource,
    names: StringTable | Sequence[str],
    options: EmbeddingOptions,
    *,
    device: torch.device | str = "cpu",
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    description: str = "embedding",
    wrapped_seconds: float = MIN_WHOLE_SECONDS,
) -> np.ndarray:
    """Embeddings of all named utterances, in one way: crops or whole utterances.

    Args:
        net: the network; `embed` puts it into evaluation mode and inference mode itself.
        source: where the audio lies.
        names: utterances, each once.
        options: what is embedded, and how much at once.
        device: where the waveforms go.
        autocast: gives the context that the network runs in.
        description: what is shown while it takes; empty shows nothing.
        wrapped_seconds: whole utterances that are shorter are repeated from their start up to this length.

    Returns:
        (utterances, crops, dim) float32, in the order of the names, on every rank; a whole utterance is one crop.

    Raises:
        ValueError: utterances that cannot be read or embedded, by name; a rate or a crop that the network cannot take.
    """
    (mode,) = options.modes
    table = names if isinstance(names, StringTable) else StringTable.from_strings(names)
    num_threads = reader_threads(options)
    # Neighbours of like length share a batch with little padding.
    lengths = checked_lengths(source, table, num_threads)
    order = np.argsort(lengths, kind="stable")
    # Every world_size-th of the order by length: all ranks get as much audio.
    mine = order[distributed.rank() :: distributed.world_size()]
    length = crop_samples(options.eval_frames, net.sample_rate) if mode == "crops" else 0

    shortest = max(round(wrapped_seconds * net.sample_rate), net.min_samples)

    def read(stretch: Stretch) -> Piece:
        given = (source, table[stretch.row], stretch)
        return _crops(*given, length, options.num_crops) if length else _whole(*given, shortest)

    values: np.ndarray | None = None
    position = {int(row): index for index, row in enumerate(mine)}
    bar = Bar(description, len(mine), "utt", is_shown=bool(description) and distributed.is_main())
    with ThreadPoolExecutor(num_threads) as pool, bar as progress:
        stretches = stretches_of(mine, lengths, source.sample_rate, are_whole=not length)
        for batch in batches_of(_ahead(pool, read, stretches), options.batch_size, net.sample_rate):
            waveforms, num_samples = padded([piece.waveforms[index] for piece, index in batch])
            with autocast():
                embedded = net.embed(waveforms.to(device), num_samples, sample_rate=source.sample_rate)
            if values is None:
                num_columns = options.num_crops if length else 1
                values = np.zeros((len(mine), num_columns, embedded.shape[1]), dtype=np.float32)
            # Scores are float32 whatever the precision of the network.
            _add(values, position, batch, embedded.float().cpu().numpy(), progress)
    return _gather(mine, values, len(table))


def _add(
    values: np.ndarray, position: dict[int, int], batch: list[tuple[Piece, int]], embedded: np.ndarray, progress: Bar
) -> None:
    """Put the embeddings of a batch, (waveforms, dim), where they belong in (utterances, columns, dim)."""
    for (piece, index), embedding in zip(batch, embedded, strict=True):
        stretch = piece.stretch
        # Windows of one recording are as long as each other, so that their plain mean weighs every frame alike.
        values[position[stretch.row], piece.columns == index] += embedding / stretch.num_windows
        progress.update((index == len(piece.waveforms) - 1) / stretch.num_windows)


def read_checked(source: AudioSource, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
    """A whole utterance, or a stretch of it, (samples,) float32.

    Raises:
        AudioError: it cannot be read, holds no samples, or NaN.
    """
    waveform = source.read(name, start, num_samples)
    if not len(waveform):
        raise AudioError(f"{name}: holds no samples")
    if not np.isfinite(waveform).all():
        raise AudioError(f"{name}: holds NaN or infinite samples")
    return waveform


def checked_lengths(source: AudioSource, names: StringTable, num_threads: int) -> np.ndarray:
    """Samples of each utterance, int64 (utterances,), read from headers.

    Raises:
        AudioError: utterances that are missing or cannot be read, the first ten by name, and how many there are.
    """
    lookup = source.lookup_table(names, num_threads)
    if lookup.problems:
        rows = sorted(lookup.problems)
        shown = "; ".join(f"{names[row]}: {lookup.problems[row]}" for row in rows[:MAX_NAMED])
        raise AudioError(
            f"{len(rows)} of {len(names)} utterances cannot be read from {source.root}: {shown}"
            f"{' …' if len(rows) > MAX_NAMED else ''}"
        )
    return np.asarray(lookup.num_samples)


def window_edges(num_samples: int, sample_rate: int) -> list[int]:
    """First samples of the windows in which a recording is read whole, and its end; one window unless it is long."""
    is_long = num_samples > round(LONG_SECONDS * sample_rate)
    count = math.ceil(num_samples / (WINDOW_SECONDS * sample_rate)) if is_long else 1
    # Equally long: their plain mean then weighs every frame alike.
    return [int(edge) for edge in np.linspace(0, num_samples, count + 1).astype(np.int64)]


def stretches_of(rows: np.ndarray, lengths: np.ndarray, sample_rate: int, *, are_whole: bool = True) -> list[Stretch]:
    """What is read for these rows, in their order: an utterance, or windows of a long one; said where there are such.

    Args:
        rows: (rows,) of `lengths`.
        lengths: samples of each utterance.
        sample_rate: Hz, of these samples.
        are_whole: whether utterances are embedded whole; crops of long ones are read where they lie.
    """
    stretches: list[Stretch] = []
    num_long = 0
    for row in rows.tolist():
        total = int(lengths[row])
        edges = window_edges(total, sample_rate) if are_whole else [0, total]
        windows = itertools.pairwise(edges)
        stretches += [Stretch(row, start, stop - start, len(edges) - 1) for start, stop in windows]
        num_long += len(edges) > 2
    if num_long:
        logger.info(
            "%d recordings are longer than %g s: embedded in windows of %g s, the mean of whose embeddings is theirs",
            *(num_long, LONG_SECONDS, WINDOW_SECONDS),
        )
    return stretches


def _crops(source: AudioSource, name: str, stretch: Stretch, length: int, num_crops: int) -> Piece:
    is_long = stretch.num_samples > max(length, round(LONG_SECONDS * source.sample_rate))
    waveform = np.empty(0, dtype=np.float32) if is_long else read_checked(source, name)
    starts = crop_starts(stretch.num_samples if is_long else len(waveform), length, num_crops)
    # Short recordings give equal crops (28 of 40 in speechocean_mini, at 4 s): each is embedded once.
    different, columns = np.unique(starts, return_inverse=True)
    if is_long:
        # Where they lie: two hours are half a gigabyte.
        return Piece(stretch, np.stack([read_checked(source, name, int(at), length) for at in different]), columns)
    if len(waveform) <= length:
        waveform = wrap_to_length(waveform, length + 1)
    return Piece(stretch, np.stack([waveform[start : start + length] for start in different]), columns)


def _whole(source: AudioSource, name: str, stretch: Stretch, shortest: int) -> Piece:
    is_window = stretch.num_windows > 1
    part = (stretch.start, stretch.num_samples) if is_window else ()
    waveform = read_checked(source, name, *part)
    if len(waveform) < shortest:
        waveform = wrap_to_length(waveform, shortest)
    return Piece(stretch, waveform[None, :], np.zeros(1, dtype=np.int64))


def _ahead(pool: ThreadPoolExecutor, read: Callable[[Stretch], Piece], stretches: Iterable[Stretch]) -> Iterator[Piece]:
    """Pieces in order, with a bounded number of stretches and of samples read ahead."""
    waiting: collections.deque[tuple[int, Future[Piece]]] = collections.deque()
    samples = 0
    for stretch in stretches:
        while waiting and (len(waiting) >= READ_AHEAD_UTTERANCES or samples + stretch.num_samples > READ_AHEAD_SAMPLES):
            taken, future = waiting.popleft()
            yield future.result()
            samples -= taken
        waiting.append((stretch.num_samples, pool.submit(read, stretch)))
        samples += stretch.num_samples
    for _, future in waiting:
        yield future.result()


def batches_of(pieces: Iterable[Piece], batch_size: int, sample_rate: int) -> Iterator[list[tuple[Piece, int]]]:
    """Lists of (piece, waveform of it): at most batch_size waveforms and a bounded amount of padded audio.

    Args:
        pieces: those of like length beside each other, so that little is padded.
        batch_size: waveforms, at most.
        sample_rate: Hz.
    """
    budget = batch_size * MAX_BATCH_SECONDS_EACH * sample_rate
    batch: list[tuple[Piece, int]] = []
    longest = 0
    for piece in pieces:
        for index in range(len(piece.waveforms)):
            longest = max(longest, piece.waveforms.shape[1])
            # Padded audio is what memory holds: one long recording fills a batch on its own.
            is_full = len(batch) >= batch_size or (len(batch) + 1) * longest > max(budget, longest)
            # A minute is work enough at once, and four of them took CAM++ a gigabyte.
            is_full |= piece.stretch.num_windows > 1
            if batch and is_full:
                yield batch
                batch, longest = [], piece.waveforms.shape[1]
            batch.append((piece, index))
    if batch:
        yield batch


def padded(waveforms: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """One zero-padded tensor (waveforms, samples), and the lengths (waveforms,)."""
    lengths = np.array([len(waveform) for waveform in waveforms])
    padded = np.zeros((len(waveforms), int(lengths.max())), dtype=np.float32)
    for row, waveform in enumerate(waveforms):
        padded[row, : len(waveform)] = waveform
    return torch.from_numpy(padded), torch.from_numpy(lengths)


def _gather(mine: np.ndarray, values: np.ndarray | None, num_utterances: int) -> np.ndarray:
    """The embeddings of all ranks in the order of the names."""
    shares = [share for share in distributed.gather_objects((mine, values)) if share[1] is not None]
    if not shares:
        return np.empty((0, 1, 0), dtype=np.float32)
    first = shares[0][1]
    assert first is not None
    if len(shares) == 1 and len(shares[0][0]) == num_utterances:
        inverse = np.empty(num_utterances, dtype=np.int64)
        inverse[mine] = np.arange(num_utterances)
        return first[inverse]
    result = np.empty((num_utterances, *first.shape[1:]), dtype=np.float32)
    for rows, share in shares:
        result[rows] = share
    return result
