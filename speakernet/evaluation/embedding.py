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
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from speakernet.data.audio import AudioError, crop_samples, wrap_to_length
from speakernet.data.lists import StringTable, numbers
from speakernet.data.lookup import COLUMNS, LookupTable
from speakernet.data.sources import AudioSource
from speakernet.data.speech import speech_of
from speakernet.data.spoken import spoken
from speakernet.evaluation.options import EvaluationOptions, Mode
from speakernet.files import FileError, atomic_write, read_arrays, reading
from speakernet.machine.facts import usable_cores
from speakernet.machine.settings import many_shapes
from speakernet.machine.threads import Stopped, in_lanes, lanes_of
from speakernet.parallel import distributed
from speakernet.terminal import MAX_NAMED, Bar

if TYPE_CHECKING:

    class EmbeddingNet(Protocol):
        """What embedding needs from a network, such as SpeakerNet."""

        sample_rate: int
        preparation: Mapping[str, Any]
        """See `prepared`; empty for most networks."""

        @property
        def min_samples(self) -> int:
            """Samples in the shortest waveform that it accepts."""

        def embed(
            self, waveforms: Tensor, lengths: Tensor | None = None, *, sample_rate: int
        ) -> Tensor:
            """Waveforms (batch, samples) in -1..1 at `sample_rate` and lengths (batch,) -> (batch,
            dim).
            """


logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Unions = dict[tuple[int, ...], tuple[StringTable, dict[int, np.ndarray]]]
"""Ids of several lists of names -> the union of their names, and the rows of each list in it."""

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
LONG_SECONDS = 180.0
"""Longer recordings are not read in one piece; VoxCeleb's longest lasts 145 s."""
WINDOW_SECONDS = 60.0
"""As whole utterances, long recordings are embedded in windows of about this length and
averaged."""
MAX_BATCH_SECONDS_EACH = 4.0
"""A batch of whole utterances holds no more padded audio than batch_size crops of this length."""
WIDTHS_PER_OCTAVE = 8
"""With few shapes, rounding a width up adds at most one eighth as padding."""


@dataclass(frozen=True)
class Stretch:
    """A unit of reading: an utterance (a row of the list of names), or a window of a long one."""

    row: int
    start: int
    num_samples: int
    num_windows: int = 1


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


def plan_of(
    stretches: list[Stretch],
    length: int,
    num_crops: int,
    shortest: int,
    batch_size: int,
    sample_rate: int,
    *,
    has_few_shapes: bool = False,
) -> Plan:
    """Plan batches of at most batch_size waveforms and a bounded amount of padded audio."""
    samples = np.array([stretch.num_samples for stretch in stretches], dtype=np.int64)
    counts = np.ones(len(samples), dtype=np.int64)
    widths = np.maximum(samples, shortest)
    if length:
        # Short recordings give equal crops (28 of 40 in speechocean_mini, at 4 s), which are
        # embedded once.
        counts = np.minimum(num_crops, np.where(samples > length, samples - length, 1) + 1)
        widths = np.full(len(samples), length)
    stretch_of = np.repeat(np.arange(len(samples)), counts)
    # Crops all have the same length, and only their last batch is not full.
    few = has_few_shapes and not length
    are_windows = np.array([stretch.num_windows > 1 for stretch in stretches], dtype=bool)
    items = zip(
        stretch_of, widths[stretch_of].tolist(), are_windows[stretch_of].tolist(), strict=True
    )
    batches = [
        (len(batch), width)
        for batch, width in batches_of(items, batch_size, sample_rate, has_few_shapes=few)
    ]
    bounds = np.cumsum([0, *(size for size, _ in batches)])
    shapes = [(1 << (size - 1).bit_length() if few else size, width) for size, width in batches]
    return Plan(stretches, stretch_of, bounds, np.array(shapes, dtype=np.int64).reshape(-1, 2))


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
    budget = int(batch_size * MAX_BATCH_SECONDS_EACH * sample_rate)
    for item, samples, is_window in items:
        width = usual_width(samples) if has_few_shapes else samples
        # Memory holds the padded audio, so one long recording can fill a batch.
        most = min(batch_size, max(1, budget // max(longest, width)))
        most = 1 << (most.bit_length() - 1) if has_few_shapes else most
        # Each one-minute window is a batch by itself: four of them needed a gigabyte with CAM++.
        if batch and (is_window or len(batch) >= most):
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


def padded(waveforms: list[np.ndarray], shape: tuple[int, int] = (0, 0)) -> tuple[Tensor, Tensor]:
    """A zero-padded tensor (rows, samples) of at least this shape, and lengths (rows,); additional
    rows are silent.
    """
    lengths = [len(waveform) for waveform in waveforms]
    rows = max(shape[0], len(waveforms))
    samples = max(shape[1], *lengths)
    table = np.zeros((rows, samples), dtype=np.float32)
    for row, waveform in enumerate(waveforms):
        table[row, : len(waveform)] = waveform
    return torch.from_numpy(table), torch.tensor(lengths + [samples] * (rows - len(lengths)))


def prepared(waveform: np.ndarray, sample_rate: int, preparation: Mapping[str, Any]) -> np.ndarray:
    """A whole recording as an adapted network expects it: only its speech, repeated until it is
    long enough.

    Args:
        waveform: (samples,).
        sample_rate: in Hz.
        preparation: `speech` is whole or detected; a shorter recording is repeated to
            `repeat_seconds`. May lack both.

    >>> prepared(np.array([1.0, 2.0, 3.0]), 2, {"repeat_seconds": 2.0}).tolist()
    [1.0, 2.0, 3.0, 1.0]
    """
    if preparation.get("speech") == "detected":
        # Every pause is cut out, since it would be repeated with the speech.
        speech = speech_of(waveform, sample_rate, min_gap_seconds=0.0)
        # Callers that decide refuse a recording without speech; here it stays whole.
        waveform = speech if len(speech) else waveform
    length = round(preparation.get("repeat_seconds", 0.0) * sample_rate)
    return waveform if len(waveform) >= length else wrap_to_length(waveform, length)


def preparation_in_words(preparation: Mapping[str, Any]) -> str:
    """What `prepared` does.

    >>> preparation_in_words({"speech": "detected", "repeat_seconds": 16.0})
    'recordings are cut to their speech and repeated to 16 s'
    """
    steps = {
        "cut to their speech": preparation.get("speech") == "detected",
        f"repeated to {preparation.get('repeat_seconds', 0.0):g} s": bool(
            preparation.get("repeat_seconds")
        ),
    }
    return "recordings are " + " and ".join(words for words, is_done in steps.items() if is_done)


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
    return (
        min(MAX_READERS, usable_cores())
        if options.num_workers == "auto"
        else max(1, options.num_workers)
    )


def modes_of(options: EvaluationOptions) -> tuple[Mode, ...]:
    """The modes to embed in, one or two."""
    auto: tuple[Mode, ...] = ("crops",) if options.eval_frames else ("whole",)
    return {"auto": auto, "both": ("crops", "whole")}.get(options.embedding, (options.embedding,))  # type: ignore


def way_of(options: EvaluationOptions) -> dict[str, Any]:
    """How utterances are embedded, as plain values; calibrations and thresholds are tied to it."""
    modes = modes_of(options)
    crops = (
        {}
        if modes == ("whole",)
        else {"eval_frames": options.eval_frames, "num_crops": options.num_crops}
    )
    # Files of versions before 0.4.0 do not name `whole`.
    speech = {} if options.speech == "whole" else {"speech": options.speech}
    return {"embedding": modes[0] if len(modes) == 1 else "both", **crops, **speech}


def as_heard(source: AudioSource, options: EvaluationOptions) -> AudioSource:
    """The source to embed from: its speech if the options ask for it."""
    return spoken(source) if options.speech == "detected" else source


def embed_utterances(
    net: "EmbeddingNet",
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
    """Embed all named utterances in one mode, as crops or whole.

    Returns:
        (utterances, crops, dim) float32, in the order of the names, on every rank; a whole
        utterance counts as one crop.
    """
    table = names if isinstance(names, StringTable) else StringTable.from_strings(names)
    source = as_heard(source, options)
    is_on_cpu = torch.device(device).type == "cpu"
    num_threads = reader_threads(options)
    lengths = checked_lengths(source, table, num_threads)
    are_crops = modes_of(options) == ("crops",)
    length = crop_samples(options.eval_frames, net.sample_rate) if are_crops else 0
    num_crops = options.num_crops if are_crops else 1
    preparation = {} if are_crops else net.preparation
    shortest_seconds = max(wrapped_seconds, preparation.get("repeat_seconds", 0.0))
    shortest = max(round(shortest_seconds * net.sample_rate), net.min_samples)
    # In order of length, utterances share a batch with little padding.
    stretches = stretches_of(
        np.argsort(lengths, kind="stable"), lengths, source.sample_rate, are_whole=not length
    )
    few = not is_on_cpu if has_few_shapes is None else has_few_shapes
    batch_size = min(options.batch_size, CPU_BATCH) if is_on_cpu else options.batch_size
    plan = plan_of(
        stretches, length, num_crops, shortest, batch_size, net.sample_rate, has_few_shapes=few
    )
    # A one-minute window is enough work by itself, and only one should be in memory.
    num_lanes = 1 if any(stretch.num_windows > 1 for stretch in stretches) else lanes_of(device)
    # Adjacent batches, with about the same amount of audio on every rank.
    done = np.concatenate([[0], np.cumsum(plan.shapes.prod(axis=1))])
    rank = distributed.rank()
    world_size = distributed.world_size()
    own = range(
        *np.searchsorted(done, [done[-1] * one / world_size for one in (rank, rank + 1)]).tolist()
    )
    waveforms_of_own = plan.stretch_of[plan.bounds[own.start] : plan.bounds[own.stop]]
    total = len(np.unique(waveforms_of_own))
    prepare = functools.partial(prepared, sample_rate=source.sample_rate, preparation=preparation)
    read = functools.partial(_read, source, table, length, num_crops, shortest, prepare)

    def embed(given: tuple[list[np.ndarray], tuple[int, int]]) -> np.ndarray:
        batched, num_samples = padded(*given)
        # Only page-locked memory can be copied while the device computes.
        batched = batched if is_on_cpu else batched.pin_memory()
        with autocast():
            embedded = net.embed(
                batched.to(device, non_blocking=True), num_samples, sample_rate=source.sample_rate
            )
        # Embeddings are float32 at any precision of the network; copied, since a view would keep
        # the batch alive.
        return embedded[: len(given[0])].float().cpu().numpy().copy()

    mine = []
    was_stopped = False
    bar = Bar(description, total, "utterance", is_shown=bool(description) and distributed.is_main())
    with ThreadPoolExecutor(num_threads) as pool, bar as progress, contextlib.ExitStack() as stack:
        # Set once for all batches: otherwise a batch would restore training mode while others are
        # still running.
        if isinstance(net, nn.Module) and net.training:
            net.eval()
            stack.callback(net.train)
        for embedded in in_lanes(
            embed, _read_batches(pool, read, plan, own, description), num_lanes
        ):
            mine.append(embedded)
            progress.update(len(embedded) * total / len(waveforms_of_own))
            if was_stopped := is_stopped():
                break
    gathered = distributed.gather_objects((was_stopped, np.concatenate(mine) if mine else None))
    if any(stopped for stopped, _ in gathered):
        raise Stopped
    shares = [share for _, share in gathered if share is not None]
    embeddings = np.concatenate(shares) if shares else np.empty((0, 0), dtype=np.float32)
    values = np.zeros((len(table), num_crops, embeddings.shape[1]), dtype=np.float32)
    if not length:
        for stretch, embedding in zip(plan.stretches, embeddings, strict=True):
            values[stretch.row, 0] += embedding / stretch.num_windows
        return values
    first = np.searchsorted(plan.stretch_of, np.arange(len(plan.stretches)))
    for stretch, begin in zip(plan.stretches, first.tolist(), strict=True):
        starts = crop_starts(stretch.num_samples, length, num_crops)
        values[stretch.row] = embeddings[begin + np.unique(starts, return_inverse=True)[1]]
    return values


def checked_lengths(source: AudioSource, names: StringTable, num_threads: int) -> np.ndarray:
    """Samples in each utterance, int64 (utterances,), from headers; AudioError names those that
    cannot be read.
    """
    lookup = source.lookup_table(names, num_threads)
    if not lookup.problems:
        return np.asarray(lookup.num_samples)
    rows = sorted(lookup.problems)
    found = f"{len(rows):,} of {len(names):,} utterances cannot be read from {source.root}"
    # If all fail, the folder is probably wrong, and one example is enough.
    if len(rows) == len(names):
        found = f"{found}; give the folder that the list's paths start from"
        rows = rows[:1]
    # Most problems begin with the path of the file.
    found_in = ((names[row], lookup.problems[row]) for row in rows[:MAX_NAMED])
    shown = "; ".join(
        problem if name in problem else f"{name}: {problem}" for name, problem in found_in
    )
    raise AudioError(f"{found}: {shown}" + " …" * (len(rows) > MAX_NAMED))


def window_edges(num_samples: int, sample_rate: int) -> list[int]:
    """First samples of a recording's windows, then its end; there is a single window unless it is
    long.
    """
    is_long = num_samples > round(LONG_SECONDS * sample_rate)
    count = math.ceil(num_samples / (WINDOW_SECONDS * sample_rate)) if is_long else 1
    # Equally long, so that their plain mean gives every frame the same weight.
    return [int(edge) for edge in np.linspace(0, num_samples, count + 1).astype(np.int64)]


def stretches_of(
    rows: np.ndarray, lengths: np.ndarray, sample_rate: int, *, are_whole: bool = True
) -> list[Stretch]:
    """The stretches to read for these rows of `lengths` (samples), in order: an utterance, or
    windows of a long one.
    """
    # Crops of long recordings are read one by one, so they need no windows.
    edges = [
        (row, window_edges(int(lengths[row]), sample_rate) if are_whole else [0, int(lengths[row])])
        for row in rows.tolist()
    ]
    if num_long := sum(len(one) > 2 for _, one in edges):
        logger.info(
            "%d recordings longer than %g s are embedded in windows of about %g s, whose "
            "embeddings are averaged",
            num_long,
            LONG_SECONDS,
            WINDOW_SECONDS,
        )
    return [
        Stretch(row, start, stop - start, len(one) - 1)
        for row, one in edges
        for start, stop in itertools.pairwise(one)
    ]


def _read_batches(
    pool: ThreadPoolExecutor,
    read: Callable[[Stretch], np.ndarray],
    plan: Plan,
    own: range,
    description: str,
) -> Iterator[tuple[list[np.ndarray], tuple[int, int]]]:
    """Waveforms and shape of each batch in `own`; an utterance shared by two ranks is read by both.

    A bounded number of stretches and samples is read ahead.
    """
    wanted = plan.stretch_of[plan.bounds[own.start] : plan.bounds[own.stop]]
    to_come = collections.deque(plan.stretches[wanted[0] : wanted[-1] + 1] if len(wanted) else ())
    waiting: collections.deque[tuple[int, Future[np.ndarray]]] = collections.deque()
    # The position of each waveform in its stretch.
    index = np.arange(len(plan.stretch_of)) - np.searchsorted(plan.stretch_of, plan.stretch_of)
    current = -1
    piece = np.empty(0)
    for batch in own:
        waveforms = []
        for number in range(plan.bounds[batch], plan.bounds[batch + 1]):
            if plan.stretch_of[number] != current:
                while to_come and len(waiting) <= READ_AHEAD_UTTERANCES:
                    if len(waiting) > 1 and sum(size for size, _ in waiting) > READ_AHEAD_SAMPLES:
                        break
                    stretch = to_come.popleft()
                    waiting.append((stretch.num_samples, pool.submit(read, stretch)))
                current = int(plan.stretch_of[number])
                piece = waiting.popleft()[1].result()
            waveforms.append(piece[index[number]])
        distributed.work.at(f"{description}, batch {batch + 1}")
        yield waveforms, tuple(plan.shapes[batch].tolist())


def _read(
    source: AudioSource,
    names: StringTable,
    length: int,
    num_crops: int,
    shortest: int,
    prepare: Callable[[np.ndarray], np.ndarray],
    stretch: Stretch,
) -> np.ndarray:
    """The waveforms of a stretch, (waveforms, samples): its distinct crops, or all of it if
    `length` is 0.
    """
    name = names[stretch.row]
    starts = [stretch.start]
    places: list[tuple[int, int | None]] = [
        (stretch.start, stretch.num_samples) if stretch.num_windows > 1 else (0, None)
    ]
    # Crops of a long recording are read one by one: two hours would take half a gigabyte.
    is_long = length > 0 and stretch.num_samples > max(
        length, round(LONG_SECONDS * source.sample_rate)
    )
    if length:
        starts = np.unique(crop_starts(stretch.num_samples, length, num_crops)).tolist()
    if is_long:
        places = [(start, length) for start in starts]
    waveforms = [source.read(name, *place) for place in places]
    for waveform in waveforms:
        if not len(waveform) or not np.isfinite(waveform).all():
            raise AudioError(f"{name}: {'NaN or infinite' if len(waveform) else 'no'} samples")
    if is_long:
        return np.stack(waveforms)
    # If the header gave a wrong length, the crops are still those of the plan.
    needed = max(stretch.num_samples, length + 1) if length else shortest
    waveform = prepare(waveforms[0])
    waveform = waveform if len(waveform) >= needed else wrap_to_length(waveform, needed)
    return (
        np.stack([waveform[start : start + length] for start in starts])
        if length
        else waveform[None, :]
    )


@dataclass(frozen=True)
class Embedder:
    """A network, how it is run, and the folders in which its embeddings are kept."""

    net: "EmbeddingNet"
    options: EvaluationOptions
    device: torch.device | str = "cpu"
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    precision: str = "no"
    """The precision that `autocast` sets."""
    stores: tuple[Path, ...] = ()
    """Folders searched for kept embeddings; new ones are written into the first."""
    model_digest: str = ""
    """Identifies the network's weights."""
    is_stopped: Callable[[], bool] = lambda: False
    embed_with: Callable[..., np.ndarray] | None = None
    """Replaces `embed_utterances`, for example with `one_pass` over several lists."""

    def embed(
        self, names: StringTable, source: AudioSource, mode: Mode, list_name: str
    ) -> tuple[np.ndarray, bool]:
        """The embeddings (utterances, crops, dim) in one mode, and whether they were read from a
        store.
        """
        options = self.options.model_copy(update={"embedding": mode})
        path = f"{list_name}.{mode}{'.speech' if options.speech == 'detected' else ''}.npz"
        key = ""
        if self.stores:
            frames = options.eval_frames if mode == "crops" else 0
            settings = {
                "frames": frames,
                "crops": options.num_crops if frames else 1,
                "precision": self.precision,
            }
            table = as_heard(source, options).lookup_table(names, reader_threads(options))
            key = store_key(self.model_digest, names, table, settings)
            found = (load_embeddings(store / path, key) for store in self.stores)
            # Only rank 0 searches, so that all ranks agree on the collectives that follow.
            kept = distributed.from_main(
                lambda: next((one for one in found if one is not None), None)
            )
            if kept is not None:
                return kept, True
        how: dict[str, Any] = {
            "device": self.device,
            "autocast": self.autocast,
            "is_stopped": self.is_stopped,
        }
        description = f"embedding {list_name.replace('_', ' ')}"
        # Whole utterances may all have different lengths.
        with many_shapes() if mode == "whole" else contextlib.nullcontext():
            embed = self.embed_with or embed_utterances
            embeddings = embed(self.net, source, names, options, description=description, **how)
        if self.stores and distributed.is_main():
            save_embeddings(self.stores[0] / path, key, names, embeddings)
        return embeddings, False


def one_pass(
    lists: Iterable[tuple[StringTable, AudioSource]], unions: Unions
) -> Callable[..., np.ndarray]:
    """A replacement for `embed_utterances` that embeds each utterance of several lists over the
    same audio once.

    Embedding a list also embeds the utterances of the lists after it. Names that belong to no list
    are embedded as usual. Pass the same `unions`, empty at first, to every pass, so that the audio
    headers of a union are read once.
    """
    given = list(lists)
    made: dict[tuple[int, str], tuple[dict[int, np.ndarray], np.ndarray]] = {}

    def embed(
        net: "EmbeddingNet",
        source: AudioSource,
        names: StringTable,
        options: EvaluationOptions,
        **how: Any,
    ) -> np.ndarray:
        key = id(source), options.embedding
        if key not in made or id(names) not in made[key][0]:
            same = [one for one, its in given if its is source]
            place = next((place for place, one in enumerate(same) if one is names), len(same))
            wanted = same[place:]
            if len(wanted) < 2:
                return embed_utterances(net, source, names, options, **how)
            union = tuple(map(id, wanted))
            if union not in unions:
                known = numbers()
                rows = {id(one): np.array([known[name] for name in one.raws()]) for one in wanted}
                unions[union] = StringTable.from_bytes(known), rows
            table, rows = unions[union]
            made[key] = rows, embed_utterances(net, source, table, options, **how)
        rows, embeddings = made[key]
        return embeddings[rows[id(names)]]

    return embed


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names and values of a state dictionary, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(
            value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
    return digest.hexdigest()


def store_key(
    model_digest: str, names: StringTable, lookup: LookupTable, settings: Mapping[str, Any]
) -> str:
    """One SHA-256 over everything that embeddings depend on."""
    digest = hashlib.sha256(model_digest.encode())
    digest.update(json.dumps(settings, sort_keys=True).encode())
    # The lookup table holds sizes and modification times, so audio replaced under the same name is
    # embedded again.
    for array in (names.content, names.offsets, *(getattr(lookup, name) for name in COLUMNS)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def load_embeddings(path: Path, key: str) -> np.ndarray | None:
    """The kept embeddings; None if there are none, their key differs, or the file is damaged."""
    if not path.is_file():
        return None
    try:
        with reading(path, "kept embeddings"):
            kept = read_arrays(path, "kept embeddings")
            return kept["embeddings"] if str(kept["key"]) == key else None
    except FileError as error:
        logger.warning("%s; embedding again", error)
        return None


def save_embeddings(path: Path, key: str, names: StringTable, embeddings: np.ndarray) -> None:
    """Save embeddings (utterances, crops, dim) with their names (UTF-8 bytes and offsets) and a
    key.
    """
    with atomic_write(path, "wb") as file:
        np.savez(
            file,
            key=np.array(key),
            names=names.content,
            name_offsets=names.offsets,
            embeddings=embeddings,
        )
