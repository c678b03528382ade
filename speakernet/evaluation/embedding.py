"""From utterances to embeddings: each utterance is embedded once, in batches, while threads read
ahead.

Crops are cut as in voxceleb_trainer (evenly spaced, short utterances wrapped around); crops of an
utterance that start at the same sample are embedded once. Whole utterances are batched by length,
with the same result as one at a time.

Batches are planned from the lengths alone, before anything is read. Each rank takes whole batches
of this plan, so that embeddings equal those of a single process bit for bit. An `Embedder` also
keeps embeddings on disk and reuses them while model, audio and settings are unchanged.
"""

import collections
import contextlib
import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from speakernet import distributed
from speakernet.data import windows
from speakernet.data.audio import AudioError, crop_samples, wrap_to_length
from speakernet.data.lists import StringTable, numbers, places_in_runs
from speakernet.data.lookup import COLUMNS, LookupTable
from speakernet.data.sources import AudioSource
from speakernet.data.speech import cut_to_speech, speech_of
from speakernet.data.windows import Stretch, stretches_of
from speakernet.evaluation.options import EvaluationOptions, Mode
from speakernet.files import FileError, atomic_write, read_arrays, reading
from speakernet.machine.facts import usable_cores
from speakernet.machine.settings import many_shapes
from speakernet.machine.threads import Stopped, in_lanes, lanes_of
from speakernet.terminal import MAX_NAMED, Bar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Unions = dict[tuple[int, ...], tuple[StringTable, dict[int, np.ndarray]]]
"""Ids of several lists of names -> the union of their names, and for the id of each list its rows
in the union."""

MIN_WHOLE_SECONDS = 0.5
"""Whole utterances shorter than this (or than the network's minimum) are wrapped around, like
crops."""
CPU_BATCH = 16
"""Largest batch on a CPU: activations of a larger one do not fit its caches (with 64 crops of 3 s,
a small ResNet was 1.6x slower)."""
MAX_READERS = 8
"""More threads would wait for each other, since cutting crops holds the interpreter lock."""
READ_AHEAD_UTTERANCES = 64
READ_AHEAD_SAMPLES = 1 << 25
"""Limit on the audio that waits for the network, 128 MiB; the last recording read may exceed it."""
MAX_MEAN_SECONDS = 4.0
"""A batch of whole utterances holds no more padded audio than batch_size crops of this length."""
WIDTHS_PER_OCTAVE = 8
"""With few shapes, rounding a width up adds at most one eighth as padding."""


class EmbeddingNet(Protocol):
    """What embedding needs from a network, such as SpeakerNet."""

    sample_rate: int
    preparation: Mapping[str, Any]
    """See `prepare_waveform`; empty for most networks."""

    @property
    def min_samples(self) -> int:
        """Samples in the shortest waveform that it accepts."""

    def embed(
        self, waveforms: Tensor, lengths: Tensor | None = None, *, sample_rate: int
    ) -> Tensor:
        """Waveforms (batch, samples) in -1..1 at `sample_rate` and lengths (batch,) -> (batch,
        dim).
        """


@dataclass(frozen=True)
class Forward:
    """How a network is run over batches."""

    device: torch.device | str = "cpu"
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    is_stopped: Callable[[], bool] = lambda: False
    """Asked after each batch; `Stopped` is raised on all ranks soon after it is true on one."""


@dataclass(frozen=True)
class Cut:
    """Which waveforms are cut from an utterance: crops of equal length, or the whole."""

    length: int
    """Samples in a crop; 0: whole utterances."""
    num_crops: int
    shortest: int = 0
    """Whole utterances with fewer samples are wrapped around."""
    preparation: Mapping[str, Any] = field(default_factory=dict)
    """Of whole utterances, see `prepare_waveform`."""

    def starts(self, num_samples: int) -> np.ndarray:
        """First samples of the distinct crops."""
        return np.unique(crop_starts(num_samples, self.length, self.num_crops))


@dataclass(frozen=True)
class Plan:
    """Which waveforms share a batch."""

    stretches: list[Stretch]
    """In reading order."""
    stretch_of: np.ndarray
    """(waveforms,) the stretch that each waveform is cut from; waveforms of a stretch are
    adjacent."""
    bounds: np.ndarray
    """(batches + 1,) batch b holds waveforms `bounds[b]` to `bounds[b + 1]`."""
    shapes: np.ndarray
    """(batches, 2) rows and samples of each batch."""

    def stretch_of_waveforms(self, batches: range) -> np.ndarray:
        """`stretch_of` the waveforms in adjacent batches."""
        return self.stretch_of[self.bounds[batches.start] : self.bounds[batches.stop]]


def plan_of(
    stretches: list[Stretch],
    cut: Cut,
    batch_size: int,
    sample_rate: int,
    *,
    has_few_shapes: bool = False,
) -> Plan:
    """Plan batches of at most batch_size waveforms and a bounded amount of padded audio."""
    # The plan depends on lengths, batch size and device alone: not on how fast files are read, nor
    # on how many ranks share the work. A batch of other neighbours has other padding, and on a GPU
    # other kernels, so its last bits would differ; a plan that is the same everywhere gives the
    # same embeddings everywhere.
    samples = np.array([stretch.num_samples for stretch in stretches], dtype=np.int64)
    are_windows = np.array([stretch.num_windows > 1 for stretch in stretches], dtype=bool)
    if cut.length:
        # Crops of a short recording (28 of 40 in speechocean_mini, at 4 s) may start at the same
        # sample (`crop_starts`); equal crops are embedded once.
        num_starts = np.maximum(samples - cut.length, 1) + 1
        counts = np.minimum(cut.num_crops, num_starts)
        widths = np.full(len(samples), cut.length)
        # Crops all have the same length, and only their last batch is not full.
        has_few_shapes = False
    else:
        counts = np.ones(len(samples), dtype=np.int64)
        widths = np.maximum(samples, cut.shortest)
    stretch_of = np.repeat(np.arange(len(samples)), counts)
    items = zip(
        stretch_of, widths[stretch_of].tolist(), are_windows[stretch_of].tolist(), strict=True
    )
    bounds = [0]
    shapes = []
    for batch, width in batches_of(items, batch_size, sample_rate, has_few_shapes=has_few_shapes):
        bounds.append(bounds[-1] + len(batch))
        rows = len(batch)
        if has_few_shapes:
            # Rounded up to a power of two.
            rows = 1 << (rows - 1).bit_length()
        shapes.append((rows, width))
    table = np.array(shapes, dtype=np.int64).reshape(-1, 2)
    return Plan(stretches, stretch_of, np.array(bounds), table)


def batches_of(
    items: Iterable[tuple[Item, int, bool]],
    batch_size: int,
    sample_rate: int,
    *,
    has_few_shapes: bool = False,
) -> Iterator[tuple[list[Item], int]]:
    """Group items, given as (item, samples, whether it is a window of a long one), into batches and
    their widths.

    Items should come in order of length. With few shapes there are eight widths per octave, and the
    size of a full batch is a power of two.
    """
    batch: list[Item] = []
    longest = 0
    # Short recordings that share a batch with one of a minute would be padded to a minute each, so
    # a budget of padded audio ends the batch first.
    budget = int(batch_size * MAX_MEAN_SECONDS * sample_rate)
    for item, samples, is_window in items:
        width = usual_width(samples) if has_few_shapes else samples
        max_items = min(batch_size, max(1, budget // max(longest, width)))
        if has_few_shapes:
            # Rounded down to a power of two.
            max_items = 1 << (max_items.bit_length() - 1)
        # Each one-minute window is a batch by itself: four of them needed a gigabyte with CAM++.
        if batch and (is_window or len(batch) >= max_items):
            yield batch, longest
            batch = []
            longest = 0
        batch.append(item)
        longest = max(longest, width)
    if batch:
        yield batch, longest


def usual_width(samples: int) -> int:
    """Round up to the next of `WIDTHS_PER_OCTAVE` lengths per octave.

    >>> [usual_width(samples) for samples in (7, 16, 17, 1000, 1024, 1025)]
    [7, 16, 18, 1024, 1024, 1152]
    """
    unit = max(1, (1 << (samples.bit_length() - 1)) // WIDTHS_PER_OCTAVE)
    return -(-samples // unit) * unit


def pad(waveforms: list[np.ndarray], shape: tuple[int, int] = (0, 0)) -> tuple[Tensor, Tensor]:
    """A zero-padded tensor (rows, samples) of at least this shape, and lengths (rows,); additional
    rows are silent.
    """
    lengths = [len(waveform) for waveform in waveforms]
    # An accelerator prepares kernels for each shape, so a smaller batch is filled up with silent
    # rows, which the caller drops.
    rows = max(shape[0], len(waveforms))
    samples = max(shape[1], *lengths)
    table = np.zeros((rows, samples), dtype=np.float32)
    for row, waveform in enumerate(waveforms):
        table[row, : len(waveform)] = waveform
    lengths += [samples] * (rows - len(lengths))
    return torch.from_numpy(table), torch.tensor(lengths)


def prepare_waveform(
    waveform: np.ndarray, sample_rate: int, preparation: Mapping[str, Any]
) -> np.ndarray:
    """A whole recording as an adapted network expects it: only its speech, repeated until it is
    long enough.

    Args:
        waveform: (samples,).
        sample_rate: in Hz.
        preparation: `speech` is whole or detected; a shorter recording is repeated to
            `repeat_seconds`. May lack both.

    >>> prepare_waveform(np.array([1.0, 2.0, 3.0]), 2, {"repeat_seconds": 2.0}).tolist()
    [1.0, 2.0, 3.0, 1.0]
    """
    if preparation.get("speech") == "detected":
        # Every pause is cut out, since it would be repeated with the speech.
        speech = speech_of(waveform, sample_rate, min_gap_seconds=0.0)
        # Callers that decide refuse a recording without speech; here it stays whole.
        waveform = speech if len(speech) else waveform
    return _repeated(waveform, round(preparation.get("repeat_seconds", 0.0) * sample_rate))


def _repeated(waveform: np.ndarray, min_samples: int) -> np.ndarray:
    """The waveform, repeated from its start if it is shorter."""
    return wrap_to_length(waveform, max(len(waveform), min_samples))


def preparation_in_words(preparation: Mapping[str, Any]) -> str:
    """What `prepare_waveform` does.

    >>> preparation_in_words({"speech": "detected", "repeat_seconds": 16.0})
    'recordings are cut to their speech and repeated to 16 s'
    """
    steps = []
    if preparation.get("speech") == "detected":
        steps.append("cut to their speech")
    if seconds := preparation.get("repeat_seconds"):
        steps.append(f"repeated to {seconds:g} s")
    return "recordings are " + " and ".join(steps)


def crop_starts(num_samples: int, length: int, num_crops: int) -> np.ndarray:
    """First samples of evenly spaced crops, int64 (crops,); a shorter utterance counts as length +
    1 samples.

    >>> crop_starts(100, 40, 3).tolist()
    [0, 30, 60]
    """
    # voxceleb_trainer pads short utterances to one sample more than the crop.
    available = num_samples if num_samples > length else length + 1
    return np.linspace(0, available - length, num=num_crops).astype(np.int64)


def reader_threads(options: EvaluationOptions) -> int:
    """Threads that read audio ahead of the network."""
    if options.num_workers == "auto":
        return min(MAX_READERS, usable_cores())
    return max(1, options.num_workers)


def modes_of(options: EvaluationOptions) -> tuple[Mode, ...]:
    """The modes to embed in, one or two."""
    if options.embedding == "both":
        return ("crops", "whole")
    if options.embedding == "auto":
        return ("crops",) if options.eval_frames else ("whole",)
    return (options.embedding,)


def way_of(options: EvaluationOptions) -> dict[str, Any]:
    """How utterances are embedded, as plain values; calibrations and thresholds are tied to it."""
    modes = modes_of(options)
    way: dict[str, Any] = {"embedding": modes[0] if len(modes) == 1 else "both"}
    if "crops" in modes:
        way |= {"eval_frames": options.eval_frames, "num_crops": options.num_crops}
    # Files of versions before 0.4.0 do not name `whole`.
    if options.speech != "whole":
        way["speech"] = options.speech
    return way


def as_heard(source: AudioSource, options: EvaluationOptions) -> AudioSource:
    """The source to embed from: its speech if the options ask for it."""
    return cut_to_speech(source) if options.speech == "detected" else source


# Three things overlap: threads read audio ahead, `_read_batches` puts it together, and the network
# computes, on a CPU in several lanes of one thread each, because threads within a batch would wait
# for each other after every layer (docs/decisions.md).
def embed_utterances(
    net: EmbeddingNet,
    source: AudioSource,
    names: StringTable | Sequence[str],
    options: EvaluationOptions,
    forward: Forward = Forward(),
    *,
    description: str = "embedding",
    wrapped_seconds: float = MIN_WHOLE_SECONDS,
) -> np.ndarray:
    """Embed all named utterances in one mode, as crops or whole.

    Returns:
        (utterances, crops, dim) float32, in the order of the names, on every rank; a whole
        utterance counts as one crop.
    """
    if not isinstance(names, StringTable):
        names = StringTable.from_strings(names)
    # Batches are planned from lengths alone. Those come from headers, so no audio has to be read
    # first, unless only speech is embedded.
    source = as_heard(source, options)
    num_threads = reader_threads(options)
    lengths = checked_lengths(source, names, num_threads)
    cut = _cut_of(net, options, wrapped_seconds)
    # In order of length, utterances share a batch with little padding.
    order = np.argsort(lengths, kind="stable")
    stretches = stretches_of(order, lengths, source.sample_rate, are_whole=not cut.length)
    batch_size = options.batch_size
    has_few_shapes = is_accelerator(forward.device)
    if not has_few_shapes:
        batch_size = min(batch_size, CPU_BATCH)
    plan = plan_of(stretches, cut, batch_size, net.sample_rate, has_few_shapes=has_few_shapes)
    batches_here = _batches_of_this_rank(plan)
    stretch_of_waveform = plan.stretch_of_waveforms(batches_here)
    num_stretches = len(np.unique(stretch_of_waveform))
    # A one-minute window is enough work by itself, and only one should be in memory.
    has_windows = any(stretch.num_windows > 1 for stretch in stretches)
    num_lanes = 1 if has_windows else lanes_of(forward.device)

    embed = functools.partial(_embed_batch, net, forward, source.sample_rate)
    parts = []
    was_stopped = False
    is_shown = bool(description) and distributed.is_main()
    bar = Bar(description, num_stretches, "utterance", is_shown=is_shown)
    with ThreadPoolExecutor(num_threads) as pool, bar as progress, _in_evaluation_mode(net):
        levels_db = source.levels_db(names)
        read = functools.partial(_read, source, names, cut, levels_db)
        batches = _read_batches(pool, read, plan, batches_here, description)
        for embedded in in_lanes(embed, batches, num_lanes):
            parts.append(embedded)
            # From waveforms to utterances.
            progress.update(len(embedded) * num_stretches / len(stretch_of_waveform))
            was_stopped = forward.is_stopped()
            if was_stopped:
                break
    embedded_here = np.concatenate(parts) if parts else None
    # A rank that stopped still takes part, otherwise the others would wait for it forever.
    gathered = distributed.gather_objects((was_stopped, embedded_here, levels_db))
    if any(stopped for stopped, _, _ in gathered):
        raise Stopped
    # Each rank knows the levels of what it has read, and has NaN for the others.
    np.fmax.reduce([levels for _, _, levels in gathered], out=levels_db)
    shares = [share for _, share, _ in gathered if share is not None]
    embeddings = np.concatenate(shares) if shares else np.empty((0, 0), dtype=np.float32)
    return _by_utterance(embeddings, plan, cut, len(names))


def _embed_batch(
    net: EmbeddingNet,
    forward: Forward,
    sample_rate: int,
    batch: tuple[list[np.ndarray], tuple[int, int]],
) -> np.ndarray:
    """Embeddings (waveforms, dim) of waveforms that are padded to a shape."""
    waveforms, shape = batch
    table, lengths = pad(waveforms, shape)
    if is_accelerator(forward.device):
        # Only page-locked memory can be copied while the device computes.
        table = table.pin_memory()
    with forward.autocast():
        embedded = net.embed(
            table.to(forward.device, non_blocking=True), lengths, sample_rate=sample_rate
        )
    # Embeddings are float32 at any precision of the network; copied, since a view would keep the
    # batch alive.
    return embedded[: len(waveforms)].float().cpu().numpy().copy()


def _cut_of(net: EmbeddingNet, options: EvaluationOptions, wrapped_seconds: float) -> Cut:
    if modes_of(options) == ("crops",):
        return Cut(crop_samples(options.eval_frames, net.sample_rate), options.num_crops)
    seconds = max(wrapped_seconds, net.preparation.get("repeat_seconds", 0.0))
    shortest = max(round(seconds * net.sample_rate), net.min_samples)
    return Cut(length=0, num_crops=1, shortest=shortest, preparation=net.preparation)


def is_accelerator(device: torch.device | str) -> bool:
    """Whether a device is not a CPU."""
    return torch.device(device).type != "cpu"


@contextlib.contextmanager
def _in_evaluation_mode(net: EmbeddingNet) -> Iterator[None]:
    """Set the mode once for all batches: otherwise a batch would restore training mode while others
    are still running.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(net, nn.Module) and net.training:
            net.eval()
            stack.callback(net.train)
        yield


def _batches_of_this_rank(plan: Plan) -> range:
    """Adjacent batches, with about the same amount of audio on every rank."""
    # Not the same number of batches, because the last ones hold the longest recordings.
    samples_before = np.concatenate([[0], np.cumsum(plan.shapes.prod(axis=1))])
    total = samples_before[-1]
    rank = distributed.rank()
    world_size = distributed.world_size()
    edges = [total * rank / world_size, total * (rank + 1) / world_size]
    first, last = np.searchsorted(samples_before, edges).tolist()
    return range(first, last)


def _by_utterance(embeddings: np.ndarray, plan: Plan, cut: Cut, num_utterances: int) -> np.ndarray:
    """From waveforms (waveforms, dim) to utterances (utterances, crops, dim)."""
    values = np.zeros((num_utterances, cut.num_crops, embeddings.shape[1]), dtype=np.float32)
    if not cut.length:
        # Windows of a long recording are equally long, so their mean needs no weights.
        for stretch, embedding in zip(plan.stretches, embeddings, strict=True):
            values[stretch.row, 0] += embedding / stretch.num_windows
        return values
    first_rows = np.searchsorted(plan.stretch_of, np.arange(len(plan.stretches)))
    for stretch, first_row in zip(plan.stretches, first_rows.tolist(), strict=True):
        starts = crop_starts(stretch.num_samples, cut.length, cut.num_crops)
        # Equal crops were embedded only once.
        _, places = np.unique(starts, return_inverse=True)
        values[stretch.row] = embeddings[first_row + places]
    return values


def checked_lengths(source: AudioSource, names: StringTable, num_threads: int) -> np.ndarray:
    """Samples in each utterance, int64 (utterances,), from headers; AudioError names those that
    cannot be read.
    """
    lookup = source.lookup_table(names, num_threads)
    if not lookup.problems:
        return np.asarray(lookup.num_samples)
    rows = sorted(lookup.problems)
    examples = [f"{names[row]}: {lookup.problems[row]}" for row in rows[:MAX_NAMED]]
    raise AudioError(
        f"{len(rows):,} of {len(names):,} utterances cannot be read from {source.root}, where the "
        f"list's paths start: {'; '.join(examples)}"
    )


def _read_batches(
    pool: ThreadPoolExecutor,
    read: Callable[[Stretch], np.ndarray],
    plan: Plan,
    batches: range,
    description: str,
) -> Iterator[tuple[list[np.ndarray], tuple[int, int]]]:
    """Waveforms and shape of each batch; an utterance shared by two ranks is read by both."""
    stretch_of = plan.stretch_of_waveforms(batches)
    stretches = plan.stretches[stretch_of[0] : stretch_of[-1] + 1] if len(stretch_of) else []
    tables = _read_ahead(pool, read, stretches)
    rows = places_in_runs(np.bincount(plan.stretch_of))
    # Waveforms of a stretch are adjacent, so only one stretch has to be held at a time.
    current = -1
    table = np.empty(0)
    for batch in batches:
        waveforms = []
        for number in range(plan.bounds[batch], plan.bounds[batch + 1]):
            if plan.stretch_of[number] != current:
                current = plan.stretch_of[number]
                table = next(tables)
            waveforms.append(table[rows[number]])
        distributed.work.at(f"{description}, batch {batch + 1}")
        yield waveforms, tuple(plan.shapes[batch].tolist())


def _read_ahead(
    pool: ThreadPoolExecutor, read: Callable[[Stretch], np.ndarray], stretches: Sequence[Stretch]
) -> Iterator[np.ndarray]:
    """The waveforms of each stretch, in order; a bounded number of stretches and samples waits."""
    # Bounded, because files may be read faster than the network computes, and would fill the
    # memory.
    to_come = collections.deque(stretches)
    waiting: collections.deque[tuple[int, Future[np.ndarray]]] = collections.deque()
    while to_come or waiting:
        while to_come and len(waiting) <= READ_AHEAD_UTTERANCES:
            if len(waiting) > 1 and sum(size for size, _ in waiting) > READ_AHEAD_SAMPLES:
                break
            stretch = to_come.popleft()
            waiting.append((stretch.num_samples, pool.submit(read, stretch)))
        yield waiting.popleft()[1].result()


def _read(
    source: AudioSource, names: StringTable, cut: Cut, levels_db: np.ndarray, stretch: Stretch
) -> np.ndarray:
    """The waveforms of a stretch, (waveforms, samples): its distinct crops, or all of it; writes
    the level of what it reads (of a long recording, of its last piece).
    """
    row = stretch.row
    read = functools.partial(_read_finite, source, names[row], levels_db[row : row + 1])
    long_samples = round(windows.LONG_SECONDS * source.sample_rate)
    if cut.length and stretch.num_samples > max(cut.length, long_samples):
        # Crops of a long recording are read one by one: two hours would take half a gigabyte.
        starts = cut.starts(stretch.num_samples).tolist()
        return np.stack([read(start, cut.length) for start in starts])
    if stretch.num_windows > 1:
        waveform = read(stretch.start, stretch.num_samples)
    else:
        # To the end, even if the header gave a shorter length.
        waveform = read()
    if not cut.length:
        waveform = prepare_waveform(waveform, source.sample_rate, cut.preparation)
        return _repeated(waveform, cut.shortest)[None, :]
    # If it gave a longer one, the crops are still those of the plan.
    waveform = _repeated(waveform, max(stretch.num_samples, cut.length + 1))
    starts = cut.starts(stretch.num_samples).tolist()
    return np.stack([waveform[start : start + cut.length] for start in starts])


def _read_finite(
    source: AudioSource,
    name: str,
    level_db: np.ndarray,
    start: int = 0,
    num_samples: int | None = None,
) -> np.ndarray:
    """Samples of an utterance, whose level is written into `level_db`, (1,)."""
    waveform = source.read(name, start, num_samples)
    if not len(waveform):
        raise AudioError(f"{name}: no samples")
    # The energy is as fast as looking at each sample, and finite if all samples are, unless huge
    # ones overflow.
    energy = float(np.dot(waveform, waveform))
    if not (math.isfinite(energy) or np.isfinite(waveform).all()):
        raise AudioError(f"{name}: NaN or infinite samples")
    level_db[0] = 10 * math.log10(energy / len(waveform)) if energy else -math.inf
    return waveform


@dataclass(frozen=True)
class Embedder:
    """A network, how it is run, and the folders in which its embeddings are kept."""

    net: EmbeddingNet
    options: EvaluationOptions
    forward: Forward = Forward()
    precision: str = "no"
    """The precision that `forward.autocast` sets."""
    stores: tuple[Path, ...] = ()
    """Folders searched for kept embeddings; new ones are written into the first."""
    model_digest: str = ""
    """Identifies the network's weights."""
    embed_with: Callable[..., np.ndarray] = embed_utterances
    """For example `one_pass` over several lists."""

    def embed(
        self, names: StringTable, source: AudioSource, mode: Mode, list_name: str
    ) -> tuple[np.ndarray, bool]:
        """The embeddings (utterances, crops, dim) in one mode, and whether they were read from a
        store.
        """
        options = self.options.model_copy(update={"embedding": mode})
        suffix = ".speech.npz" if options.speech == "detected" else ".npz"
        path = f"{list_name}.{mode}{suffix}"
        heard = as_heard(source, options)
        levels_db = heard.levels_db(names)
        key = ""
        if self.stores:
            settings = {"frames": 0, "crops": 1, "precision": self.precision}
            if mode == "crops":
                settings |= {"frames": options.eval_frames, "crops": options.num_crops}
            lookup = heard.lookup_table(names, reader_threads(options))
            key = store_key(self.model_digest, names, lookup, settings)
            # Only rank 0 searches, so that all ranks agree on the collectives that follow.
            kept = distributed.from_main(lambda: self._find_kept(path, key))
            if kept is not None:
                levels_db[:] = kept.levels_db
                return kept.embeddings, True
        description = f"embedding {list_name.replace('_', ' ')}"
        # Whole utterances may all have different lengths.
        with many_shapes() if mode == "whole" else contextlib.nullcontext():
            embeddings = self.embed_with(
                self.net, source, names, options, self.forward, description=description
            )
        # Every rank has all embeddings, but only one may write the file.
        if self.stores and distributed.is_main():
            save_embeddings(self.stores[0] / path, key, names, Kept(embeddings, levels_db))
        return embeddings, False

    def _find_kept(self, path: str, key: str) -> "Kept | None":
        for store in self.stores:
            kept = load_embeddings(store / path, key)
            if kept is not None:
                return kept
        return None


def one_pass(
    lists: Sequence[tuple[StringTable, AudioSource]], unions: Unions
) -> Callable[..., np.ndarray]:
    """A replacement for `embed_utterances` that embeds each utterance of several lists over the
    same audio once.

    Embedding a list also embeds the utterances of the lists after it. Names that belong to no list
    are embedded as usual. Pass the same `unions`, empty at first, to every pass, so that the audio
    headers of a union are read once.
    """
    # The test lists of VoxCeleb overlap: O, E and H are drawn from the same recordings. Which lists
    # follow is known only to the caller, who embeds one after the other, so this replaces the
    # function that embeds and looks ahead, instead of making every caller join its lists first.
    kept: dict[tuple[int, str], tuple[dict[int, np.ndarray], np.ndarray]] = {}
    """Source and mode -> for each list its rows in the last union, and the union's embeddings."""

    def embed(
        net: EmbeddingNet,
        source: AudioSource,
        names: StringTable,
        options: EvaluationOptions,
        forward: Forward,
        *,
        description: str,
    ) -> np.ndarray:
        key = id(source), options.embedding
        if key in kept:
            rows, embeddings = kept[key]
            if id(names) in rows:
                return embeddings[rows[id(names)]]
        tables = [table for table, its_source in lists if its_source is source]
        # Earlier lists were embedded already or found in a store.
        while tables and tables[0] is not names:
            del tables[0]
        if len(tables) < 2:
            # No later list shares this audio.
            return embed_utterances(net, source, names, options, forward, description=description)
        union, rows = _union_of(tables, unions)
        embeddings = embed_utterances(net, source, union, options, forward, description=description)
        heard = as_heard(source, options)
        for table in tables:
            heard.levels_db(table)[:] = heard.levels_db(union)[rows[id(table)]]
        kept[key] = rows, embeddings
        return embeddings[rows[id(names)]]

    return embed


def _union_of(
    tables: Sequence[StringTable], unions: Unions
) -> tuple[StringTable, dict[int, np.ndarray]]:
    """The union of several lists of names, and the rows of each list in it."""
    key = tuple(map(id, tables))
    if key not in unions:
        known = numbers()
        rows = {}
        for table in tables:
            rows[id(table)] = np.array([known[name] for name in table.raws()])
        unions[key] = StringTable.from_bytes(known), rows
    return unions[key]


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names and values of a state dictionary, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        # As bytes, because numpy has no bf16.
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def store_key(
    model_digest: str, names: StringTable, lookup: LookupTable, settings: Mapping[str, Any]
) -> str:
    """One SHA-256 over everything that embeddings depend on."""
    # A stale embedding would be worse than none: the error rate would look right and belong to
    # another model or other audio. So everything that could change one is in the key, and a key
    # that does not match is not examined further.
    digest = hashlib.sha256(model_digest.encode())
    digest.update(json.dumps(settings, sort_keys=True).encode())
    # The lookup table holds sizes and modification times, so audio replaced under the same name is
    # embedded again.
    for array in (names.content, names.offsets, *(getattr(lookup, name) for name in COLUMNS)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class Kept(NamedTuple):
    """What a file of embeddings holds."""

    embeddings: np.ndarray
    """(utterances, crops, dim)."""
    levels_db: np.ndarray | float = math.nan
    """`AudioSource.levels_db`, which files of earlier versions do not have."""


def load_embeddings(path: Path, key: str) -> Kept | None:
    """The kept embeddings; None if there are none, their key differs, or the file is damaged."""
    if not path.is_file():
        return None
    try:
        with reading(path, "kept embeddings"):
            kept = read_arrays(path, "kept embeddings")
            values = Kept(kept["embeddings"], kept.get("levels_db", math.nan))
            return values if str(kept["key"]) == key else None
    except FileError as error:
        # Not an error, because the embeddings can be computed again.
        logger.warning("%s; embedding again", error)
        return None


def save_embeddings(path: Path, key: str, names: StringTable, kept: Kept) -> None:
    """Save embeddings with their names (UTF-8 bytes and offsets) and a key."""
    with atomic_write(path, "wb") as file:
        np.savez(
            file,
            key=np.array(key),
            names=names.content,
            name_offsets=names.offsets,
            embeddings=kept.embeddings,
            levels_db=kept.levels_db,
        )
