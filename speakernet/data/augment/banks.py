"""The audio that augmentation reads from disk: clips of noise, music and talkers, and RIRs with
their spectra.

An RIR is a room impulse response. This file handles folders and files; random choices are made in
`augmenter.py`, and `mixers.py` mixes.
"""

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from speakernet import distributed
from speakernet.data.audio import AudioError, read_audio
from speakernet.data.folders import walk_recordings
from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable, map_arrays
from speakernet.data.packed import PackedRows, PackedSource, RamRows, is_packed
from speakernet.data.sharing import shared_zeros
from speakernet.data.sources import (
    INT16_SCALE,
    AudioCache,
    AudioSource,
    FolderRows,
    FolderSource,
    RowReader,
)
from speakernet.files import own_command, parallel_map
from speakernet.terminal import MAX_NAMED, counted

logger = logging.getLogger(__name__)

CLEAN, REVERB, MUSIC, BABBLE, NOISE = range(5)
KINDS = ("clean", "reverb", "music", "babble", "noise")
# Folder names of MUSAN -> our names for the kinds of noise.
MUSAN_FOLDERS = {"noise": "noise", "music": "music", "speech": "babble"}
# Paths of noises among RIRS_NOISES: a folder, and recordings beside the RIRs of its isotropic
# rooms.
NOISES_AMONG_RIRS = ("/pointsource_noises/", "_noise_")
# Transform lengths are multiples of this: few different lengths, which is faster, with many factors
# of two.
FFT_BLOCK = 1024
# Responses of microphones are stored at this many frequencies, evenly spaced in log frequency.
RESPONSE_POINTS = 64
LOWEST_RESPONSE_HZ = 60.0
RESPONSE_FFT = 1 << 14
# Below the mean; frequencies that a device does not pass would only be silence.
DEEPEST_RESPONSE_DB = 40.0
ENERGY_BLOCK = 64  # samples per stored energy
BLOCKS_AT_ONCE = 1 << 16
MANY_FILES = 1000  # for more files than this, the result of checking them is cached
CHECKED_SECONDS = 0.1  # at both ends of a noise file, before the first step
NUM_CHECKERS = 8  # threads, because most of the time is spent waiting for the disk


class Crop(NamedTuple):
    """Where a crop of a clip is read."""

    row: int
    start: int
    first: int
    """Its first sample in memory; -1 if it has to be read from a file."""
    power: float
    """Its mean square, NaN if that is unknown before it is read."""


@dataclass
class ClipBank:
    """Clips of one kind."""

    reader: RowReader
    rows: ndarray
    lengths: ndarray
    energies: ndarray | None = None
    """`block_energies` of clips in memory."""

    def __len__(self) -> int:
        return len(self.rows)

    def read_whole(self, clip: int) -> ndarray:
        """A clip, int16 (its length,); a clip that has become shorter since its header was read is
        repeated.
        """
        out = np.zeros(self.lengths[clip], dtype=np.int16)
        have = self.reader.read_row(int(self.rows[clip]), 0, out)
        return np.resize(out[:have], len(out)) if have else out

    def crops(self, clips: ndarray, places: ndarray, num_samples: int) -> list[Crop]:
        """Crops of `num_samples` at places in 0..1 of some clips."""
        rows = self.rows[clips]
        starts = crop_starts(places, self.lengths[clips], num_samples)
        firsts = np.full(len(clips), -1)
        powers = np.full(len(clips), np.nan)
        if isinstance(self.reader, PackedRows):
            firsts = self.reader.whole_crops(rows, starts, num_samples)
            if self.energies is not None:
                whole = np.flatnonzero(firsts >= 0)
                ends = np.stack([firsts[whole], firsts[whole] + num_samples])
                energies = np.diff(self._energy_before(ends), axis=0)[0]
                powers[whole] = energies * float(INT16_SCALE) ** 2 / num_samples
        columns = (rows, starts, firsts, powers)
        return list(map(Crop, *(column.tolist() for column in columns)))

    def _energy_before(self, samples: ndarray) -> ndarray:
        """Energy of all samples of the clips in memory before each of some samples, exact, int64 in
        the shape of `samples`.
        """
        assert self.energies is not None and isinstance(self.reader, RamRows)
        assert isinstance(self.reader.samples, ndarray)
        blocks = samples // ENERGY_BLOCK
        places = blocks[..., None] * ENERGY_BLOCK + np.arange(ENERGY_BLOCK)
        is_before = places < samples[..., None]
        # The samples before `samples` in its own block.
        rest = self.reader.samples[np.where(is_before, places, 0)].astype(np.int64) * is_before
        return self.energies[blocks] + np.square(rest).sum(axis=-1)

    def write(self, crop: Crop, out: ndarray) -> float:
        """Write a crop to `out` (samples,) float32; returns the factor that brings it to -1..1.

        A crop in memory costs only a cast.
        """
        if crop.first >= 0 and isinstance(self.reader, PackedRows):
            out[:] = self.reader.samples[crop.first : crop.first + len(out)]
            return float(INT16_SCALE)
        if problem := self.reader.fill_one(crop.row, crop.start, out):
            raise AudioError(f"augmentation: {problem}; remove the file or fix it")
        return 1.0


def crop_starts(places: ndarray, lengths: ndarray, num_samples: int) -> ndarray:
    """The first sample of crops at places in 0..1 of clips of `lengths`, int64 (crops,)."""
    return (places * np.maximum(lengths - num_samples, 0)).astype(np.int64)


# The power of a crop decides how loud it is mixed. Summing its squares would read the crop once
# more, from memory that it has just left, so the energies before every 64th sample are summed once
# for all clips: two of them and at most 126 samples give the exact energy of any crop. In integers,
# because float sums would depend on where the crop begins.
def block_energies(samples: ndarray) -> ndarray:
    """Energy of all int16 samples before each block, int64 (blocks + 1,).

    Differences of such sums give the exact power of a crop without a pass over its samples, which
    would cost a CPU as much as reading the crop.
    """
    num_blocks = len(samples) // ENERGY_BLOCK
    blocks = samples[: num_blocks * ENERGY_BLOCK].reshape(-1, ENERGY_BLOCK)
    sums = np.zeros(num_blocks + 1, dtype=np.int64)
    for first in range(0, num_blocks, BLOCKS_AT_ONCE):
        some = blocks[first : first + BLOCKS_AT_ONCE].astype(np.int64)
        sums[first + 1 : first + 1 + len(some)] = np.square(some).sum(axis=1)
    # An overflowing sum wraps around, but the difference of two sums is still right.
    return np.cumsum(sums)


def find_audio_files(root: str | Path) -> list[str]:
    """Names of all audio files below `root`, relative to it, sorted."""
    root = Path(root)
    if not root.is_dir():
        scripts = f"{own_command('prepare musan')}, {own_command('prepare rirs')}"
        raise AudioError(f"{root}: no such folder; prepare noise and RIRs with {scripts}")
    return sorted(walk_recordings(root))


class BankFiles(NamedTuple):
    """The audio files of a folder or packed corpus, and those that augmentation cannot use."""

    source: AudioSource
    names: StringTable
    problems: dict[int, str]
    """Row -> what is wrong with the file."""

    def left_out(self) -> str:
        """The number of unusable files and the first problems; empty if all are usable."""
        if not self.problems:
            return ""
        first = "; ".join(self.problems[row] for row in sorted(self.problems)[:MAX_NAMED])
        files = counted(len(self.names), "file")
        return f"{len(self.problems):,} of {files} left out as unusable: {first}"

    def usable_rows(self) -> ndarray:
        """The rows of the other files; a warning names those that are left out."""
        if problem := self.left_out():
            logger.warning("%s: %s", self.source.root, problem)
        return np.setdiff1d(np.arange(len(self.names)), list(self.problems))


def open_noise(root: str | Path, sample_rate: int, *, is_fast: bool = False) -> BankFiles:
    """The noise files of a folder or packed corpus; a few samples at both ends of each are read
    unless `is_fast`.

    Raises:
        AudioError: there is no usable file.
    """
    source, names = _open_bank(root, sample_rate)
    lengths = np.asarray(source.lookup_table(names).num_samples)
    num_samples = round(CHECKED_SECONDS * sample_rate)

    def check(row: int) -> None:
        for start in (0, max(0, int(lengths[row]) - num_samples)):
            source.read(names[row], start, num_samples)

    # The samples of a packed corpus have been read once, when it was packed.
    needs_reading = isinstance(source, FolderSource) and not is_fast
    expected = "noise, in MUSAN's folders noise, music and speech"
    return _check_files(expected, source, names, check, reads_samples=needs_reading)


def open_responses(root: str | Path, sample_rate: int, *, is_fast: bool = False) -> BankFiles:
    """The RIRs of a folder or packed corpus; each is read once unless `is_fast`, and silent ones
    are problems.

    Raises:
        AudioError: there is no usable file.
    """
    source, listed = _open_bank(root, sample_rate)
    names = StringTable.from_strings(name for name in listed if not _is_noise(name))
    if num_noises := len(listed) - len(names):
        logger.warning("%s: %s skipped: noises, not RIRs", root, counted(num_noises, "file"))

    def check(row: int) -> None:
        _read_response(source, names[row])

    expected = "room impulse responses"
    return _check_files(expected, source, names, check, reads_samples=not is_fast)


def _is_noise(name: str) -> bool:
    return any(mark in f"/{name}" for mark in NOISES_AMONG_RIRS)


def _open_bank(root: str | Path, sample_rate: int) -> tuple[AudioSource, StringTable]:
    """Open a folder or a packed corpus, which all processes of a machine map; also returns the
    names of its audio files.
    """
    if is_packed(root):
        packed = PackedSource(root, sample_rate)
        return packed, packed.index.names
    source = FolderSource(root, sample_rate, show_progress=distributed.is_main())
    return source, StringTable.from_strings(find_audio_files(root))


def _check_files(
    expected: str,
    source: AudioSource,
    names: StringTable,
    check: Callable[[int], None],
    *,
    reads_samples: bool,
) -> BankFiles:
    """The problem of each file whose header or, by `check` if that `reads_samples`, whose samples
    cannot be read; AudioError if there is no other file.

    Of many files the result is kept in the cache folder until one of them changes.
    """
    table = source.lookup_table(names)
    problems = dict(table.problems)
    readable = [row for row in range(len(names)) if reads_samples and row not in problems]

    def problem_of(row: int) -> str:
        try:
            check(row)
        except AudioError as error:
            return str(error)
        return ""

    def find_bad() -> dict[str, ndarray]:
        description = f"checking {source.root}" if distributed.is_main() else ""
        texts = parallel_map(problem_of, readable, NUM_CHECKERS, description, total=len(readable))
        bad = [row for row, text in zip(readable, texts, strict=True) if text]
        return {"rows": np.array(bad, dtype=np.int64)}

    bad: dict[str, ndarray] | None = None
    if len(readable) > MANY_FILES:
        # A cache folder that cannot be written only costs time.
        with contextlib.suppress(OSError):
            bad = map_arrays(_key_of(f"checked {expected}", source.root, names, table), find_bad)
    for row in (bad or find_bad())["rows"].tolist():
        problems[row] = problem_of(row) or f"{names[row]}: could not be read"
    if len(problems) == len(names):
        problem = f"{source.root}: none of {counted(len(names), 'audio file')} is usable"
        first = f"; the first: {problems[0]}" if problems else ""
        raise AudioError(f"{problem}; expected {expected}{first}")
    return BankFiles(source, names, problems)


def _read_response(source: AudioSource, name: str) -> ndarray:
    """An RIR divided by the square root of its energy, float32 (samples,); AudioError if it is
    silent.
    """
    path = source.path_of(name)
    # Of several channels the first: each is one microphone.
    samples = (
        read_audio(path, sample_rate=source.sample_rate, channel=0) if path else source.read(name)
    )
    energy = float(np.dot(samples, samples))
    if not energy > 0:
        raise AudioError(f"{path or name}: the RIR is empty or silent; remove it")
    return (samples / np.float32(np.sqrt(energy))).astype(np.float32)


def noise_banks(
    root: str | Path, sample_rate: int, cache: AudioCache | None
) -> dict[str, ClipBank]:
    """Banks of MUSAN's kinds in a folder or packed corpus, by the folders noise, music and speech
    in the paths.

    Files in none of these folders count as noise, and empty and unreadable files are skipped, each
    with a warning.
    """
    files = open_noise(root, sample_rate)
    usable = files.usable_rows()
    table = files.source.lookup_table(files.names)
    lengths = np.asarray(table.num_samples, dtype=np.int64)
    # One reader for all kinds, because the cache is keyed by its rows.
    reader = files.source.rows(files.names, table, cache)
    kinds = np.full(len(files.names), "", dtype=object)
    for row, name in enumerate(files.names):
        for folder in (Path(root).name, *reversed(name.split("/")[:-1])):
            kinds[row] = MUSAN_FOLDERS.get(folder, kinds[row])
    if unnamed := int((kinds == "").sum()):
        logger.warning(
            "%s: %s outside folders noise, music and speech count as noise",
            root,
            counted(unnamed, "file"),
        )
        kinds[kinds == ""] = "noise"
    banks = {}
    for kind in MUSAN_FOLDERS.values():
        rows = usable[kinds[usable] == kind]
        if len(rows):
            banks[kind] = ClipBank(reader, rows, lengths[rows])
    return banks


def clips_into_ram(banks: Mapping[str, ClipBank], budget_bytes: int) -> bool:
    """Decode all noise clips into shared int16 memory if they fit; returns whether they are in
    memory.

    Those of a packed corpus already are. Several processes of a machine map one copy, which the
    first of them decodes. Noise is read more often than speech: several times for an utterance with
    babble.
    """
    if all(isinstance(bank.reader, PackedRows) for bank in banks.values()):
        return True
    total = 2 * sum(int(bank.lengths.sum()) for bank in banks.values())
    if total > budget_bytes:
        return False
    for kind, bank in banks.items():
        if distributed.local_world_size() > 1 and isinstance(bank.reader, FolderRows):
            key = _key_of(f"noise {kind}", bank.reader.root, bank.reader.names, bank.reader.table)
            kept = map_arrays(key, functools.partial(_decode_with_energies, bank))
            samples = torch.from_numpy(kept["samples"])
            bank.energies = kept["energies"]
        else:
            samples = _decode(bank)
            bank.energies = block_energies(samples.numpy())
        starts = np.cumsum(bank.lengths) - bank.lengths
        bank.reader = RamRows(samples, starts, bank.lengths, {})
        bank.rows = np.arange(len(bank))
    return True


def _decode(bank: ClipBank) -> Tensor:
    """Decode all clips of a bank end to end into shared memory, int16 (samples,)."""
    shared = shared_zeros((int(bank.lengths.sum()),), np.int16)
    clips = parallel_map(bank.read_whole, range(len(bank)), 2, "decoding noise", total=len(bank))
    first = 0
    for clip in clips:
        shared.numpy()[first : first + len(clip)] = clip
        first += len(clip)
    return shared


def _decode_with_energies(bank: ClipBank) -> dict[str, ndarray]:
    samples = _decode(bank).numpy()
    return {"samples": samples, "energies": block_energies(samples)}


def _key_of(what: str, root: str, names: StringTable, table: LookupTable) -> str:
    """A key of everything decoded files depend on: folder, names, rate, sizes and times."""
    digest = hashlib.sha256(f"{Path(root).resolve()} {table.sample_rate} {names.checksum}".encode())
    for column in (table.file_bytes, table.modified_ns):
        # The columns of a packed corpus may repeat one value without storing it again.
        digest.update(np.ascontiguousarray(column).data)
    return f"{what} {digest.hexdigest()}"


class RirBank:
    """All RIRs (room impulse responses) below a folder, with their spectra at the requested
    lengths.

    Any layout of files works; the noises of RIRS_NOISES are skipped with a warning. Each RIR is
    divided by the square root of its energy, as is usual. If it has several channels, the first is
    used: each is one microphone, and their mean is not the response at any place in the room.
    """

    def __init__(
        self,
        root: str | Path,
        sample_rate: int,
        cache: AudioCache | None = None,
        *,
        is_aligned: bool,
    ) -> None:
        files = open_responses(root, sample_rate)
        self.source = files.source
        usable = files.usable_rows()
        # The same table of names has its lookup table already.
        self.names = files.names.take(usable) if files.problems else files.names
        self.is_aligned = is_aligned
        self.cache = cache or AudioCache(0)
        self._kept: dict[str, ndarray] = {}
        if distributed.local_world_size() > 1 and isinstance(self.source, FolderSource):
            table = self.source.lookup_table(self.names)
            if 4 * int(table.num_samples.sum()) <= self.cache.budget_bytes:
                key = _key_of(f"responses {is_aligned}", self.source.root, self.names, table)
                self._kept = map_arrays(key, self._prepare_all)

    def __len__(self) -> int:
        return len(self.names)

    def _prepare_all(self) -> dict[str, ndarray]:
        responses = list(parallel_map(self.prepare, range(len(self)), 2))
        bounds = np.cumsum([0, *map(len, responses)])
        return {"samples": np.concatenate(responses), "bounds": bounds}

    def prepare(self, rir: int) -> ndarray:
        """The prepared RIR, float32 (samples,); the processes of a machine map one copy if it fits
        the cache.
        """
        if self._kept:
            first, stop = self._kept["bounds"][rir : rir + 2].tolist()
            return self._kept["samples"][first:stop]
        response = self.cache.get(("prepared", rir))
        if response is None:
            response = _read_response(self.source, self.names[rir])
            if self.is_aligned:
                response = response[int(np.abs(response).argmax()) :].copy()
            self.cache.put(("prepared", rir), response)
        return response

    def spectrum(self, rir: int, num_samples: int) -> ndarray:
        """The RIR's spectrum, complex64 (bins,), at a length at which a crop of `num_samples` does
        not wrap around.
        """
        key = ("spectrum", rir, num_samples)
        spectrum = self.cache.get(key)
        if spectrum is None:
            # Later samples cannot reach the crop.
            response = self.prepare(rir)[:num_samples]
            fft_samples = transform_samples(num_samples + len(response) - 1)
            spectrum = np.fft.rfft(response, fft_samples).astype(np.complex64)
            self.cache.put(key, spectrum)
        return spectrum


def device_responses(root: str | Path, sample_rate: int) -> ndarray:
    """The magnitude responses of all devices whose impulse responses are below a folder.

    Returns:
        dB relative to each device's mean, float64 (devices, RESPONSE_POINTS).

    Raises:
        AudioError: there are no audio files, or one cannot be read or is silent.
    """
    names = find_audio_files(root)
    if not names:
        raise AudioError(
            f"{root}: no audio files; expected impulse responses of microphones or telephones"
        )
    points = np.geomspace(LOWEST_RESPONSE_HZ, sample_rate / 2, RESPONSE_POINTS)
    # The power of the bins nearest to each point.
    borders = np.sqrt(points[1:] * points[:-1])
    first = np.searchsorted(
        np.fft.rfftfreq(RESPONSE_FFT, 1 / sample_rate), np.concatenate([points[:1], borders])
    )
    responses = []
    for name in names:
        samples = read_audio(Path(root) / name, sample_rate=sample_rate, channel=0)[:RESPONSE_FFT]
        bands = np.add.reduceat(np.abs(np.fft.rfft(samples, RESPONSE_FFT)) ** 2, first)
        bands /= np.diff(first, append=RESPONSE_FFT // 2 + 1)
        if not bands.any():
            raise AudioError(f"{Path(root) / name}: the impulse response is silent; remove it")
        level = 10 * np.log10(np.maximum(bands / bands.mean(), 1e-12))
        level -= level.mean()
        responses.append(np.maximum(level, -DEEPEST_RESPONSE_DB))
    return np.stack(responses)


def transform_samples(least: int) -> int:
    """A fast transform length of at least `least`, one of few, so that many RIRs share a transform.

    >>> transform_samples(33_000), transform_samples(36_865)
    (36864, 40960)
    """
    # Late: only banks of RIRs need it, and it imports half of scipy.
    from scipy.fft import next_fast_len

    # A length with few factors of two is a third slower than the next multiple of 256.
    return FFT_BLOCK * next_fast_len(-(-least // FFT_BLOCK), real=True)
