"""From utterances to embeddings: each utterance once, read by threads ahead of the network, batched across utterances.

Crops are cut as voxceleb_trainer cuts them (evenly spaced, short utterances wrapped around); crops of one utterance
that start at the same sample are embedded once. Whole utterances are batched by length, so that the result is that of
one at a time.

The batches follow from the lengths alone, before anything is read. Ranks take whole batches of this plan, so that
embeddings are bit for bit those of one process. An `Embedder` also keeps embeddings on disk while model, audio and
settings are unchanged.
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
from speakernet.evaluation.options import EvaluationOptions, Mode
from speakernet.files import FileError, atomic_write, read_arrays, reading
from speakernet.machine.facts import usable_cores
from speakernet.machine.settings import many_shapes
from speakernet.machine.threads import Stopped, in_lanes, lanes_of
from speakernet.parallel import distributed
from speakernet.terminal import MAX_NAMED, Bar

if TYPE_CHECKING:

    class EmbeddingNet(Protocol):
        """What is needed of a network: SpeakerNet, or anything like it."""

        sample_rate: int

        @property
        def min_samples(self) -> int:
            """Samples of the shortest waveform that it takes."""

        def embed(self, waveforms: Tensor, lengths: Tensor | None = None, *, sample_rate: int) -> Tensor:
            """(batch, samples) in -1..1 at `sample_rate`, and (batch,) samples -> (batch, dim)."""


logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Unions = dict[tuple[int, ...], tuple[StringTable, dict[int, np.ndarray]]]
"""Identities of lists of names -> all their names once, and the rows of each list's names among them."""

MIN_WHOLE_SECONDS = 0.5
"""Whole utterances shorter than this (or than what the network needs) are wrapped around, as crops are."""
CPU_BATCH = 16
"""Largest batch on a CPU: with more, the data between two layers no longer fits its caches (with 64 crops of 3 s a
small ResNet took 1.6 times as long)."""
MAX_READERS = 8
"""More threads than this wait for each other: cutting crops holds the interpreter's lock."""
READ_AHEAD_UTTERANCES = 64
READ_AHEAD_SAMPLES = 1 << 25
"""Audio that waits for the network: 128 MiB, whatever the length of the recordings."""
LONG_SECONDS = 180.0
"""Recordings longer than this are not read at once: VoxCeleb's longest has 145 s."""
WINDOW_SECONDS = 60.0
"""Long recordings are embedded whole in windows of about this length, whose embeddings are averaged."""
MAX_BATCH_SECONDS_EACH = 4.0
"""A batch of whole utterances holds no more padded audio than batch_size crops of this length."""
WIDTHS_AN_OCTAVE = 8
"""For batches of few shapes: at most an eighth of a batch is padding for the sake of its shape."""


@dataclass(frozen=True)
class Stretch:
    """What is read at once: an utterance (row of the list of names), or a window of a long one."""

    row: int
    start: int
    num_samples: int
    num_windows: int = 1


@dataclass(frozen=True)
class Plan:
    """Which waveforms share a batch."""

    stretches: list[Stretch]
    """In the order of reading."""
    stretch_of: np.ndarray
    """(waveforms,) the stretch that each waveform is cut from; those of one are neighbours."""
    bounds: np.ndarray
    """(batches + 1,) batch b is waveforms `bounds[b]` to `bounds[b + 1]`."""
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
    """At most batch_size waveforms in a batch, and a bounded amount of padded audio."""
    samples = np.array([stretch.num_samples for stretch in stretches], dtype=np.int64)
    counts, widths = np.ones(len(samples), dtype=np.int64), np.maximum(samples, shortest)
    if length:
        # Short recordings give equal crops (28 of 40 in speechocean_mini, at 4 s): each is embedded once.
        counts = np.minimum(num_crops, np.where(samples > length, samples - length, 1) + 1)
        widths = np.full(len(samples), length)
    stretch_of = np.repeat(np.arange(len(samples)), counts)
    # Crops have one length, and all their batches but the last are full.
    few = has_few_shapes and not length
    are_windows = np.array([stretch.num_windows > 1 for stretch in stretches], dtype=bool)
    items = zip(stretch_of, widths[stretch_of].tolist(), are_windows[stretch_of].tolist(), strict=True)
    batches = [(len(batch), width) for batch, width in batches_of(items, batch_size, sample_rate, has_few_shapes=few)]
    bounds = np.cumsum([0, *(size for size, _ in batches)])
    shapes = [(1 << (size - 1).bit_length() if few else size, width) for size, width in batches]
    return Plan(stretches, stretch_of, bounds, np.array(shapes, dtype=np.int64).reshape(-1, 2))


def batches_of(
    items: Iterable[tuple[Item, int, bool]], batch_size: int, sample_rate: int, *, has_few_shapes: bool = False
) -> Iterator[tuple[list[Item], int]]:
    """Batches of items and the samples of each batch, of (item, its samples, whether it is a window of a long one).

    Those of like length adjoin. With few shapes lengths are eight in each octave, and full batches a power of two.
    """
    batch: list[Item] = []
    longest, budget = 0, int(batch_size * MAX_BATCH_SECONDS_EACH * sample_rate)
    for item, samples, is_window in items:
        width = usual_width(samples) if has_few_shapes else samples
        # Padded audio is what memory holds: one long recording fills a batch on its own.
        most = min(batch_size, max(1, budget // max(longest, width)))
        most = 1 << (most.bit_length() - 1) if has_few_shapes else most
        # A window of a minute is a batch: four of them took CAM++ a gigabyte.
        if batch and (is_window or len(batch) >= most):
            yield batch, longest
            batch, longest = [], 0
        batch.append(item)
        longest = max(longest, width)
    if batch:
        yield batch, longest


def usual_width(samples: int) -> int:
    """The next of `WIDTHS_AN_OCTAVE` lengths in each octave.

    >>> [usual_width(samples) for samples in (7, 16, 17, 1000, 1024, 1025)]
    [7, 16, 18, 1024, 1024, 1152]
    """
    unit = max(1, (1 << (samples.bit_length() - 1)) // WIDTHS_AN_OCTAVE)
    return -(-samples // unit) * unit


def padded(waveforms: list[np.ndarray], shape: tuple[int, int] = (0, 0)) -> tuple[Tensor, Tensor]:
    """One zero-padded tensor (rows, samples) of at least this shape, and the lengths (rows,); more rows are silence."""
    lengths = [len(waveform) for waveform in waveforms]
    rows, samples = max(shape[0], len(waveforms)), max(shape[1], *lengths)
    table = np.zeros((rows, samples), dtype=np.float32)
    for row, waveform in enumerate(waveforms):
        table[row, : len(waveform)] = waveform
    return torch.from_numpy(table), torch.tensor(lengths + [samples] * (rows - len(lengths)))


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
    return min(MAX_READERS, usable_cores()) if options.num_workers == "auto" else max(1, options.num_workers)


def modes_of(options: EvaluationOptions) -> tuple[Mode, ...]:
    """What is embedded, one or two ways."""
    auto: tuple[Mode, ...] = ("crops",) if options.eval_frames else ("whole",)
    return {"auto": auto, "both": ("crops", "whole")}.get(options.embedding, (options.embedding,))  # type: ignore


def way_of(options: EvaluationOptions) -> dict[str, Any]:
    """The way of embedding in plain values; calibrations and thresholds belong to one of these."""
    modes = modes_of(options)
    crops = {} if modes == ("whole",) else {"eval_frames": options.eval_frames, "num_crops": options.num_crops}
    return {"embedding": modes[0] if len(modes) == 1 else "both", **crops}


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
    """Embeddings of all named utterances, in one way: crops or whole utterances.

    Returns:
        (utterances, crops, dim) float32, in the order of the names, on every rank; a whole utterance is one crop.
    """
    table = names if isinstance(names, StringTable) else StringTable.from_strings(names)
    is_on_cpu, num_threads = torch.device(device).type == "cpu", reader_threads(options)
    lengths = checked_lengths(source, table, num_threads)
    are_crops = modes_of(options) == ("crops",)
    length = crop_samples(options.eval_frames, net.sample_rate) if are_crops else 0
    num_crops = options.num_crops if are_crops else 1
    shortest = max(round(wrapped_seconds * net.sample_rate), net.min_samples)
    # Neighbours of like length share a batch with little padding.
    stretches = stretches_of(np.argsort(lengths, kind="stable"), lengths, source.sample_rate, are_whole=not length)
    few = not is_on_cpu if has_few_shapes is None else has_few_shapes
    batch_size = min(options.batch_size, CPU_BATCH) if is_on_cpu else options.batch_size
    plan = plan_of(stretches, length, num_crops, shortest, batch_size, net.sample_rate, has_few_shapes=few)
    # A window of a minute is enough work at once, and memory is to be that of one.
    num_lanes = 1 if any(stretch.num_windows > 1 for stretch in stretches) else lanes_of(device)
    # Neighbouring batches, with about as much audio as every other rank has.
    done = np.concatenate([[0], np.cumsum(plan.shapes.prod(axis=1))])
    rank, world_size = distributed.rank(), distributed.world_size()
    own = range(*np.searchsorted(done, [done[-1] * one / world_size for one in (rank, rank + 1)]).tolist())
    waveforms_of_own = plan.stretch_of[plan.bounds[own.start] : plan.bounds[own.stop]]
    total = len(np.unique(waveforms_of_own))
    read = functools.partial(_read, source, table, length, num_crops, shortest)

    def embed(given: tuple[list[np.ndarray], tuple[int, int]]) -> np.ndarray:
        batched, num_samples = padded(*given)
        # Only page-locked memory is copied while the device works.
        batched = batched if is_on_cpu else batched.pin_memory()
        with autocast():
            embedded = net.embed(batched.to(device, non_blocking=True), num_samples, sample_rate=source.sample_rate)
        # Scores are float32 whatever the precision of the network; a copy, since a view would keep the batch.
        return embedded[: len(given[0])].float().cpu().numpy().copy()

    mine, is_left = [], False
    bar = Bar(description, total, "utterance", is_shown=bool(description) and distributed.is_main())
    with ThreadPoolExecutor(num_threads) as pool, bar as progress, contextlib.ExitStack() as stack:
        # Set once for all batches: each would put the mode of training back while others run.
        if isinstance(net, nn.Module) and net.training:
            net.eval()
            stack.callback(net.train)
        for embedded in in_lanes(embed, _read_batches(pool, read, plan, own, description), num_lanes):
            mine.append(embedded)
            progress.update(len(embedded) * total / len(waveforms_of_own))
            if is_left := is_stopped():
                break
    gathered = distributed.gather_objects((is_left, np.concatenate(mine) if mine else None))
    if any(left for left, _ in gathered):
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
    """Samples of each utterance, int64 (utterances,), read from headers; AudioError names those that cannot be read."""
    lookup = source.lookup_table(names, num_threads)
    if not lookup.problems:
        return np.asarray(lookup.num_samples)
    rows = sorted(lookup.problems)
    found = f"{len(rows)} of {len(names)} utterances cannot be read from {source.root}"
    # If none is good, the folder is the wrong one: one example is enough.
    if len(rows) == len(names):
        found, rows = f"{found}; do the paths start from another folder? --test_path names it, or --audio", rows[:1]
    shown = "; ".join(f"{names[row]}: {lookup.problems[row]}" for row in rows[:MAX_NAMED])
    raise AudioError(f"{found}: {shown}" + " …" * (len(rows) > MAX_NAMED))


def window_edges(num_samples: int, sample_rate: int) -> list[int]:
    """First samples of the windows in which a recording is read whole, and its end; one window unless it is long."""
    is_long = num_samples > round(LONG_SECONDS * sample_rate)
    count = math.ceil(num_samples / (WINDOW_SECONDS * sample_rate)) if is_long else 1
    # Equally long: their plain mean then weighs every frame alike.
    return [int(edge) for edge in np.linspace(0, num_samples, count + 1).astype(np.int64)]


def stretches_of(rows: np.ndarray, lengths: np.ndarray, sample_rate: int, *, are_whole: bool = True) -> list[Stretch]:
    """What is read for these rows of `lengths` (samples), in their order: an utterance, or windows of a long one."""
    # Crops of long recordings are read at their places.
    edges = [
        (row, window_edges(int(lengths[row]), sample_rate) if are_whole else [0, int(lengths[row])])
        for row in rows.tolist()
    ]
    if num_long := sum(len(one) > 2 for _, one in edges):
        logger.info(
            "%d recordings longer than %g s are embedded in windows of %g s, whose embeddings are averaged",
            *(num_long, LONG_SECONDS, WINDOW_SECONDS),
        )
    return [
        Stretch(row, start, stop - start, len(one) - 1) for row, one in edges for start, stop in itertools.pairwise(one)
    ]


def _read_batches(
    pool: ThreadPoolExecutor, read: Callable[[Stretch], np.ndarray], plan: Plan, own: range, description: str
) -> Iterator[tuple[list[np.ndarray], tuple[int, int]]]:
    """Waveforms and shape of each of the batches; an utterance that two ranks share is read by both.

    A bounded number of stretches and of samples is read ahead.
    """
    wanted = plan.stretch_of[plan.bounds[own.start] : plan.bounds[own.stop]]
    to_come = collections.deque(plan.stretches[wanted[0] : wanted[-1] + 1] if len(wanted) else ())
    waiting: collections.deque[tuple[int, Future[np.ndarray]]] = collections.deque()
    # Which of its stretch's waveforms each is.
    index = np.arange(len(plan.stretch_of)) - np.searchsorted(plan.stretch_of, plan.stretch_of)
    current, piece = -1, np.empty(0)
    for batch in own:
        waveforms = []
        for number in range(plan.bounds[batch], plan.bounds[batch + 1]):
            if plan.stretch_of[number] != current:
                while to_come and len(waiting) <= READ_AHEAD_UTTERANCES:
                    if len(waiting) > 1 and sum(size for size, _ in waiting) > READ_AHEAD_SAMPLES:
                        break
                    stretch = to_come.popleft()
                    waiting.append((stretch.num_samples, pool.submit(read, stretch)))
                current, piece = int(plan.stretch_of[number]), waiting.popleft()[1].result()
            waveforms.append(piece[index[number]])
        distributed.work.at(f"{description}, batch {batch + 1}")
        yield waveforms, tuple(plan.shapes[batch].tolist())


def _read(
    source: AudioSource, names: StringTable, length: int, num_crops: int, shortest: int, stretch: Stretch
) -> np.ndarray:
    """(waveforms, samples) of a stretch: its different crops, or itself if crops have no length."""
    name, starts = names[stretch.row], [stretch.start]
    places: list[tuple[int, int | None]] = [
        (stretch.start, stretch.num_samples) if stretch.num_windows > 1 else (0, None)
    ]
    # Crops of a long recording are read at their places: two hours are half a gigabyte.
    is_long = length > 0 and stretch.num_samples > max(length, round(LONG_SECONDS * source.sample_rate))
    if length:
        starts = np.unique(crop_starts(stretch.num_samples, length, num_crops)).tolist()
    if is_long:
        places = [(start, length) for start in starts]
    waveforms = [source.read(name, *place) for place in places]
    for waveform in waveforms:
        if not len(waveform) or not np.isfinite(waveform).all():
            raise AudioError(f"{name}: holds {'NaN or infinite' if len(waveform) else 'no'} samples")
    if is_long:
        return np.stack(waveforms)
    # If a header gives another length than there is, the plan of the crops holds.
    needed = max(stretch.num_samples, length + 1) if length else shortest
    waveform = waveforms[0] if len(waveforms[0]) >= needed else wrap_to_length(waveforms[0], needed)
    return np.stack([waveform[start : start + length] for start in starts]) if length else waveform[None, :]


@dataclass(frozen=True)
class Embedder:
    """A network with how it is run, and the folders in which its embeddings are kept."""

    net: "EmbeddingNet"
    options: EvaluationOptions
    device: torch.device | str = "cpu"
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    precision: str = "no"
    """Name of what `autocast` does."""
    stores: tuple[Path, ...] = ()
    """Folders in which kept embeddings are looked for; new ones are written into the first."""
    model_digest: str = ""
    """Identifies the network's weights."""
    is_stopped: Callable[[], bool] = lambda: False
    embed_with: Callable[..., np.ndarray] | None = None
    """In place of `embed_utterances`, such as `one_pass` of several lists."""

    def embed(self, names: StringTable, source: AudioSource, mode: Mode, list_name: str) -> tuple[np.ndarray, bool]:
        """Embeddings (utterances, crops, dim) in one mode, and whether they were read from a store."""
        options = self.options.model_copy(update={"embedding": mode})
        path, key = f"{list_name}.{mode}.npz", ""
        if self.stores:
            frames = options.eval_frames if mode == "crops" else 0
            settings = {"frames": frames, "crops": options.num_crops if frames else 1, "precision": self.precision}
            key = store_key(self.model_digest, names, source.lookup_table(names, reader_threads(options)), settings)
            found = (load_embeddings(store / path, key) for store in self.stores)
            # Rank 0 alone looks, so that all ranks take the same way through the collectives that follow.
            kept = distributed.from_main(lambda: next((one for one in found if one is not None), None))
            if kept is not None:
                return kept, True
        how: dict[str, Any] = {"device": self.device, "autocast": self.autocast, "is_stopped": self.is_stopped}
        description = f"embedding {list_name.replace('_', ' ')}"
        # Whole utterances have as many lengths as there are utterances.
        with many_shapes() if mode == "whole" else contextlib.nullcontext():
            embed = self.embed_with or embed_utterances
            embeddings = embed(self.net, source, names, options, description=description, **how)
        if self.stores and distributed.is_main():
            save_embeddings(self.stores[0] / path, key, names, embeddings)
        return embeddings, False


def one_pass(lists: Iterable[tuple[StringTable, AudioSource]], unions: Unions) -> Callable[..., np.ndarray]:
    """`embed_utterances` for several lists: the first that asks is embedded with the utterances of those after it.

    So each utterance of lists over the same audio is embedded once. Names of no list are embedded as ever. Keep
    `unions`, empty at first, for the next pass: the headers of a union's audio are then read once.
    """
    given = list(lists)
    made: dict[tuple[int, str], tuple[dict[int, np.ndarray], np.ndarray]] = {}

    def embed(
        net: "EmbeddingNet", source: AudioSource, names: StringTable, options: EvaluationOptions, **how: Any
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
    """SHA-256 over names and values of a state dictionary, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def store_key(model_digest: str, names: StringTable, lookup: LookupTable, settings: Mapping[str, Any]) -> str:
    """What embeddings depend on, as one SHA-256."""
    digest = hashlib.sha256(model_digest.encode())
    digest.update(json.dumps(settings, sort_keys=True).encode())
    # The lookup table holds sizes and times of change: audio that was replaced under its name is embedded again.
    for array in (names.content, names.offsets, *(getattr(lookup, name) for name in COLUMNS)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def load_embeddings(path: Path, key: str) -> np.ndarray | None:
    """The kept embeddings; None if there are none, they have another key, or the file is damaged."""
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
    """Keep embeddings (utterances, crops, dim) with their names (UTF-8 bytes and offsets) and a key."""
    with atomic_write(path, "wb") as file:
        np.savez(file, key=np.array(key), names=names.content, name_offsets=names.offsets, embeddings=embeddings)
