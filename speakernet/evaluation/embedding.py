"""From utterances to embeddings: each utterance once, read by threads ahead of the network, batched across utterances.

Crops are cut as voxceleb_trainer cuts them (evenly spaced, short utterances wrapped around); crops of one utterance
that start at the same sample are embedded once. Whole utterances go in buckets of like length with their lengths, so
that the answer is that of one by one.

Which waveforms share a batch follows from the lengths alone, before anything is read; on an accelerator such batches
are padded to one of few shapes, each of which it prepares for once. The processes of a distributed
run take whole batches of that plan, so that their embeddings are to the last bit those of one process.
"""

import collections
import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePath
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from speakernet.data.audio import AudioError, crop_samples, wrap_to_length
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.evaluation.batching import Plan, Stretch, padded, plan_of
from speakernet.evaluation.options import EvaluationOptions
from speakernet.machine.facts import usable_cores
from speakernet.machine.threads import Stopped, in_lanes, lanes_of
from speakernet.parallel import distributed
from speakernet.terminal import MAX_NAMED, Bar

logger = logging.getLogger(__name__)

MIN_WHOLE_SECONDS = 0.5
"""Whole utterances shorter than this (or than what the network needs) are wrapped around, as crops are."""
CPU_BATCH = 16
"""Waveforms at once on a CPU, at most: with more, what lies between two layers no longer fits its caches (with 64 crops
of 3 s a small ResNet took 1.6 times as long)."""
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


def reader_threads(options: EvaluationOptions) -> int:
    """Threads that read audio ahead of the network."""
    if options.num_workers == "auto":
        return min(MAX_READERS, usable_cores())
    return max(1, options.num_workers)


def embed_utterances(
    net: EmbeddingNet,
    source: AudioSource,
    names: StringTable | Sequence[str],
    options: EvaluationOptions,
    *,
    device: torch.device | str = "cpu",
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    description: str = "embedding",
    wrapped_seconds: float = MIN_WHOLE_SECONDS,
    is_stopped: Callable[[], bool] = lambda: False,
    has_few_shapes: bool | None = None,
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
        is_stopped: whether the work should be left; asked after every batch.
        has_few_shapes: pad batches of whole utterances to one of few shapes; None: but for a CPU.

    Returns:
        (utterances, crops, dim) float32, in the order of the names, on every rank; a whole utterance is one crop.

    Raises:
        ValueError: utterances that cannot be read or embedded, by name; a rate or a crop that the network cannot take.
        Stopped: `is_stopped`, in whichever process.
    """
    table = names if isinstance(names, StringTable) else StringTable.from_strings(names)
    num_threads = reader_threads(options)
    # Neighbours of like length share a batch with little padding.
    lengths = checked_lengths(source, table, num_threads)
    length, num_crops = _crops_of(options, net.sample_rate)
    shortest = max(round(wrapped_seconds * net.sample_rate), net.min_samples)
    stretches = stretches_of(np.argsort(lengths, kind="stable"), lengths, source.sample_rate, are_whole=not length)
    few = torch.device(device).type != "cpu" if has_few_shapes is None else has_few_shapes
    batch_size = min(options.batch_size, CPU_BATCH) if torch.device(device).type == "cpu" else options.batch_size
    plan = plan_of(stretches, length, num_crops, shortest, batch_size, net.sample_rate, has_few_shapes=few)
    read = functools.partial(_read_stretch, source, table, length, num_crops, shortest)
    # A minute is work enough at once, and memory is to be that of one.
    num_lanes = 1 if any(stretch.num_windows > 1 for stretch in stretches) else lanes_of(device)
    embed = functools.partial(_embedded, net, source.sample_rate, device, autocast)
    own, mine, is_left = plan.share(distributed.rank(), distributed.world_size()), [], False
    num_waveforms, total = plan.counts(own)
    bar = Bar(description, total, "utterance", is_shown=bool(description) and distributed.is_main())
    with ThreadPoolExecutor(num_threads) as pool, bar as progress, _evaluating(net):
        for embedded in in_lanes(embed, _read_batches(pool, read, plan, own, description), num_lanes):
            mine.append(embedded)
            progress.update(len(embedded) * total / num_waveforms)
            if is_left := is_stopped():
                break
    return _placed(plan, _of_all(mine, is_left), len(table), length, num_crops)


def _embedded(
    net: EmbeddingNet,
    sample_rate: int,
    device: torch.device | str,
    autocast: Callable[[], contextlib.AbstractContextManager],
    given: tuple[list[np.ndarray], tuple[int, int]],
) -> np.ndarray:
    """(waveforms, dim) of a batch, its waveforms and the shape that it is padded to at least."""
    waveforms, shape = given
    batched, num_samples = padded(waveforms, shape)
    with autocast():
        embedded = net.embed(batched.to(device), num_samples, sample_rate=sample_rate)
    # Scores are float32 whatever the precision of the network; a copy, for a view would keep what it is of.
    return embedded[: len(waveforms)].float().cpu().numpy().copy()


@contextlib.contextmanager
def _evaluating(net: EmbeddingNet) -> Iterator[None]:
    """The network in evaluation mode for all batches: each would put the mode of training back below the others."""
    was_training = isinstance(net, nn.Module) and net.training
    if was_training:
        net.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if was_training:
            net.train()  # type: ignore[attr-defined]


def _crops_of(options: EvaluationOptions, sample_rate: int) -> tuple[int, int]:
    """Samples of a crop, and crops of an utterance; 0 and 1 where it is embedded whole."""
    (mode,) = options.modes
    return (crop_samples(options.eval_frames, sample_rate), options.num_crops) if mode == "crops" else (0, 1)


def _of_all(mine: list[np.ndarray], is_left: bool) -> np.ndarray | None:
    """The embeddings of all processes in the order of the plan, None where there is nothing to embed.

    Raises:
        Stopped: one of them has left the work.
    """
    everybody = distributed.gather_objects((is_left, np.concatenate(mine) if mine else None))
    if any(one for one, _ in everybody):
        raise Stopped
    parts = [part for _, part in everybody if part is not None]
    return np.concatenate(parts) if parts else None


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
        found = f"{len(rows)} of {len(names)} utterances cannot be read from {source.root}"
        # Where not one is good, the folder is another: one example is enough.
        is_all = len(rows) == len(names)
        if is_all:
            found += "; do the paths of the list start from another folder? --test_path names it, or --audio"
        elif not any(PurePath(names[row]).suffix for row in rows):
            found += "; these look like speakers: a list of trials has 'enrol test' or '1 enrol test' a line"
        told = rows[: 1 if is_all else MAX_NAMED]
        shown = "; ".join(f"{names[row]}: {lookup.problems[row]}" for row in told)
        raise AudioError(f"{found}: {shown}" + (" …" if len(rows) > len(told) else ""))
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


def _read_batches(
    pool: ThreadPoolExecutor, read: Callable[[Stretch], np.ndarray], plan: Plan, own: range, description: str
) -> Iterator[tuple[list[np.ndarray], tuple[int, int]]]:
    """Waveforms and shape of each of the batches, read ahead; an utterance that two processes share is read by both."""
    first, last = int(plan.bounds[own.start]), int(plan.bounds[own.stop])
    if first == last:
        return
    wanted = plan.stretch_of[first:last]
    pieces = _ahead(pool, read, (plan.stretches[number] for number in range(wanted[0], wanted[-1] + 1)))
    # Which of its stretch's waveforms each is.
    index = np.arange(len(plan.stretch_of)) - np.searchsorted(plan.stretch_of, plan.stretch_of)
    current, piece = -1, np.empty(0)
    for batch in own:
        waveforms = []
        for number in range(plan.bounds[batch], plan.bounds[batch + 1]):
            if plan.stretch_of[number] != current:
                current, piece = int(plan.stretch_of[number]), next(pieces)
            waveforms.append(piece[index[number]])
        distributed.work.at(f"{description}, batch {batch + 1}")
        yield waveforms, tuple(plan.shapes[batch].tolist())


def _read_stretch(
    source: AudioSource, names: StringTable, length: int, num_crops: int, shortest: int, stretch: Stretch
) -> np.ndarray:
    """(waveforms, samples) that a stretch gives: crops, or itself where they have no length."""
    given = (source, names[stretch.row], stretch)
    return _crops(*given, length, num_crops) if length else _whole(*given, shortest)


def _different_crops(stretch: Stretch, length: int, num_crops: int) -> tuple[np.ndarray, np.ndarray]:
    """First samples of the different crops, and which of them each column takes, (crops,)."""
    return np.unique(crop_starts(stretch.num_samples, length, num_crops), return_inverse=True)


def _crops(source: AudioSource, name: str, stretch: Stretch, length: int, num_crops: int) -> np.ndarray:
    """(different crops, samples) of an utterance."""
    starts, _ = _different_crops(stretch, length, num_crops)
    if stretch.num_samples > max(length, round(LONG_SECONDS * source.sample_rate)):
        # Where they lie: two hours are half a gigabyte.
        return np.stack([read_checked(source, name, int(at), length) for at in starts])
    waveform = read_checked(source, name)
    # Where a header tells another length than there is, the plan holds.
    needed = max(stretch.num_samples, length + 1)
    if len(waveform) < needed:
        waveform = wrap_to_length(waveform, needed)
    return np.stack([waveform[start : start + length] for start in starts])


def _whole(source: AudioSource, name: str, stretch: Stretch, shortest: int) -> np.ndarray:
    """(1, samples) of an utterance or of a window of it."""
    is_window = stretch.num_windows > 1
    part = (stretch.start, stretch.num_samples) if is_window else ()
    waveform = read_checked(source, name, *part)
    return wrap_to_length(waveform, shortest)[None, :] if len(waveform) < shortest else waveform[None, :]


def _ahead(
    pool: ThreadPoolExecutor, read: Callable[[Stretch], np.ndarray], stretches: Iterable[Stretch]
) -> Iterator[np.ndarray]:
    """What was read, in order, with a bounded number of stretches and of samples read ahead."""
    waiting: collections.deque[tuple[int, Future[np.ndarray]]] = collections.deque()
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


def _placed(plan: Plan, embeddings: np.ndarray | None, num_utterances: int, length: int, num_crops: int) -> np.ndarray:
    """From the embeddings of the plan's waveforms to (utterances, crops, dim)."""
    if embeddings is None:
        return np.empty((0, 1, 0), dtype=np.float32)
    values = np.zeros((num_utterances, num_crops, embeddings.shape[1]), dtype=np.float32)
    if not length:
        for stretch, embedding in zip(plan.stretches, embeddings, strict=True):
            # Windows of one recording are as long as each other, so that their plain mean weighs every frame alike.
            values[stretch.row, 0] += embedding / stretch.num_windows
        return values
    first = np.searchsorted(plan.stretch_of, np.arange(len(plan.stretches)))
    for stretch, begin in zip(plan.stretches, first.tolist(), strict=True):
        values[stretch.row] = embeddings[begin + _different_crops(stretch, length, num_crops)[1]]
    return values
