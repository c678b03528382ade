"""The audio that augmentation reads from disk: clips of noise, music and talkers, and RIRs with
their spectra.

An RIR is a room impulse response. This file handles folders and files; random choices and mixing
are in `augmenter.py`. `ResidentBanks` keep everything on the device where batches are augmented, so
that no utterance needs a read; their results equal those of the banks on the host (a test compares
them).
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
from torch import Tensor

from speakernet import distributed
from speakernet.data.audio import AudioError, read_audio
from speakernet.data.folders import find_recordings
from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable, mapped
from speakernet.data.on_device import DeviceAudio, send, to_float
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
DEEPEST_RESPONSE_DB = (
    40.0  # below the mean; frequencies that a device does not pass would only be silence
)
ENERGY_BLOCK = 64  # samples per stored energy
BLOCKS_AT_ONCE = 1 << 16
SHOWN_BYTES = 64 << 20  # of noise; less is decoded before anyone could look at a progress bar
SHOWN_CLIPS_SAMPLES = 32_000_000
SHOWN_RIRS = 1000
CHECKED_SECONDS = 0.1  # at both ends of a noise file, before the first step
NUM_CHECKERS = 8  # threads, because most of the time is spent waiting for the disk


@dataclass(frozen=True)
class Drawn:
    """Every choice for one batch. Sources are the clips to add, in the order of their
    utterances.
    """

    kinds: np.ndarray
    rirs: np.ndarray
    source_rows: np.ndarray
    source_kinds: np.ndarray
    clips: np.ndarray
    places: np.ndarray
    snr_db: np.ndarray
    gains_db: np.ndarray
    telephone: np.ndarray
    codec: np.ndarray
    microphones: np.ndarray
    """Utterances with a different microphone, and its response in dB (these utterances,
    RESPONSE_POINTS)."""
    responses_db: np.ndarray


class Ingredients(NamedTuple):
    """The audio that the choices need, on the device where it is mixed."""

    noises: Tensor
    reverberated: Tensor | None = None
    """Utterances to reverberate, if any, and for each the spectrum of its RIR at `fft_samples`."""
    spectra: Tensor | None = None
    fft_samples: int = 0


def block_energies(samples: np.ndarray) -> np.ndarray:
    """Energy of all int16 samples before each block, int64 (blocks + 1,); for
    `energies_of_crops`.
    """
    num_blocks = len(samples) // ENERGY_BLOCK
    blocks = samples[: num_blocks * ENERGY_BLOCK].reshape(-1, ENERGY_BLOCK)
    sums = np.zeros(num_blocks + 1, dtype=np.int64)
    for first in range(0, num_blocks, BLOCKS_AT_ONCE):
        some = blocks[first : first + BLOCKS_AT_ONCE].astype(np.int64)
        sums[first + 1 : first + 1 + len(some)] = (some * some).sum(axis=1)
    # An overflowing sum wraps around, but the difference of two sums is still right.
    return np.cumsum(sums)


def energies_of_crops(
    sums: np.ndarray, samples: np.ndarray, firsts: np.ndarray, num_samples: int
) -> np.ndarray:
    """Sums of squares of `num_samples` (two blocks or more) from each of `firsts` on, exact, int64
    (crops,).
    """
    begins = -(-firsts // ENERGY_BLOCK)
    ends = (firsts + num_samples) // ENERGY_BLOCK
    # The samples before the first whole block and after the last one.
    places = np.arange(ENERGY_BLOCK)
    heads = firsts[:, None] + places
    tails = (ends * ENERGY_BLOCK)[:, None] + places
    is_inside = np.concatenate(
        [heads < (begins * ENERGY_BLOCK)[:, None], tails < (firsts + num_samples)[:, None]], axis=1
    )
    edges = (
        samples[np.where(is_inside, np.concatenate([heads, tails], axis=1), 0)].astype(np.int64)
        * is_inside
    )
    return sums[ends] - sums[begins] + (edges * edges).sum(axis=1)


@dataclass
class ClipBank:
    """Clips of one kind."""

    reader: RowReader
    rows: np.ndarray
    lengths: np.ndarray
    energies: np.ndarray | None = None
    """`block_energies` of clips in memory."""

    def __len__(self) -> int:
        return len(self.rows)

    def read_whole(self, clip: int) -> np.ndarray:
        """A clip, int16 (its length,); a clip that has become shorter since its header was read is
        repeated.
        """
        out = np.zeros(self.lengths[clip], dtype=np.int16)
        have = self.reader.read_row(int(self.rows[clip]), 0, out)
        return np.resize(out[:have], len(out)) if have else out


class Crops:
    """Crops of one bank, written one by one as needed; those already in memory cost only a cast."""

    def __init__(
        self,
        bank: ClipBank,
        clips: np.ndarray,
        places: np.ndarray,
        is_wanted: np.ndarray,
        num_samples: int,
    ) -> None:
        clips = np.where(is_wanted, clips, 0)
        self._starts = (places * np.maximum(bank.lengths[clips] - num_samples, 0)).astype(np.int64)
        self._reader = bank.reader
        self._rows = bank.rows[clips]
        self._num_samples = num_samples
        self._firsts = [-1] * len(clips)
        powers = np.full(len(clips), np.nan)
        if isinstance(bank.reader, PackedRows):
            self._samples = bank.reader.samples
            firsts = bank.reader.whole_crops(self._rows, self._starts, num_samples)
            self._firsts = firsts.tolist()
            if bank.energies is not None and num_samples >= 2 * ENERGY_BLOCK:
                whole = np.flatnonzero(firsts >= 0)
                assert isinstance(self._samples, np.ndarray)
                sums = energies_of_crops(bank.energies, self._samples, firsts[whole], num_samples)
                powers[whole] = sums * (float(INT16_SCALE) ** 2)
        self.powers: list[float] = (powers / num_samples).tolist()

    def write(self, source: int, out: np.ndarray) -> float:
        """Write a crop to `out` (samples,) float32; returns the factor that brings it to -1..1."""
        first = self._firsts[source]
        if first >= 0:
            out[:] = self._samples[first : first + self._num_samples]
            return float(INT16_SCALE)
        if problem := self._reader.fill_one(
            int(self._rows[source]), int(self._starts[source]), out
        ):
            raise AudioError(f"augmentation: {problem}; remove the file or fix it")
        return 1.0


def find_audio_files(root: str | Path) -> list[str]:
    """Names of all audio files below `root`, relative to it, sorted."""
    root = Path(root)
    if not root.is_dir():
        scripts = f"{own_command('prepare musan')}, {own_command('prepare rirs')}"
        raise AudioError(f"{root}: no such folder; prepare noise and RIRs with {scripts}")
    return find_recordings(root)


def _open_bank(root: str | Path, sample_rate: int) -> tuple[AudioSource, list[str]]:
    """Open a folder or a packed corpus, which all processes of a machine map; also returns its
    audio files' names.
    """
    if is_packed(root):
        packed = PackedSource(root, sample_rate)
        return packed, list(packed.index.names)
    return FolderSource(root, sample_rate, show_progress=distributed.is_main()), find_audio_files(
        root
    )


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


def open_noise(root: str | Path, sample_rate: int, *, is_fast: bool = False) -> BankFiles:
    """The noise files of a folder or packed corpus; a few samples at both ends of each are read
    unless `is_fast`.

    Raises:
        AudioError: there is no usable file.
    """
    source, listed = _open_bank(root, sample_rate)
    names = StringTable.from_strings(listed)
    lengths = np.asarray(source.lookup_table(names).num_samples)
    num_samples = round(CHECKED_SECONDS * sample_rate)

    def check(row: int) -> None:
        for start in (0, max(0, int(lengths[row]) - num_samples)):
            source.read(names[row], start, num_samples)

    # The samples of a packed corpus have been read once, when it was packed.
    needs_reading = isinstance(source, FolderSource) and not is_fast
    files = BankFiles(
        source, names, _problems_of("noise", source, names, check if needs_reading else None)
    )
    if len(files.problems) == len(names):
        first_problem = f"; the first: {files.problems[0]}" if len(names) else ""
        raise AudioError(
            f"{root} contains {len(names):,} noise files, none of them readable{first_problem}; "
            "expected MUSAN's folders noise, music and speech"
        )
    return files


def open_responses(root: str | Path, sample_rate: int, *, is_fast: bool = False) -> BankFiles:
    """The RIRs of a folder or packed corpus; each is read once unless `is_fast`, and silent ones
    are problems.

    Raises:
        AudioError: there is no usable file.
    """
    source, listed = _open_bank(root, sample_rate)
    names = [name for name in listed if not any(mark in f"/{name}" for mark in NOISES_AMONG_RIRS)]
    if not names:
        raise AudioError(f"{root}: no audio files in this folder of RIRs")
    if num_noises := len(listed) - len(names):
        logger.warning("%s: %s skipped: noises, not RIRs", root, counted(num_noises, "file"))
    table = StringTable.from_strings(names)

    def check(row: int) -> None:
        _read_response(source, table[row])

    files = BankFiles(
        source, table, _problems_of("responses", source, table, None if is_fast else check)
    )
    if len(files.problems) == len(names):
        raise AudioError(
            f"{root}: none of the {len(names):,} RIRs is usable; the first: {files.problems[0]}"
        )
    return files


def _problems_of(
    what: str, source: AudioSource, names: StringTable, check: Callable[[int], None] | None
) -> dict[int, str]:
    """The problem of each file whose header or, by `check`, whose samples cannot be read.

    Of many files the result is kept in the cache folder until one of them changes.
    """
    table = source.lookup_table(names)
    problems = dict(table.problems)
    readable = [row for row in range(len(names)) if row not in problems]

    def problem_of(row: int) -> str:
        try:
            check(row)  # type: ignore[misc]
        except AudioError as error:
            return str(error)
        return ""

    def find_bad() -> dict[str, np.ndarray]:
        description = (
            f"checking {what}" if distributed.is_main() and len(readable) > SHOWN_RIRS else ""
        )
        texts = parallel_map(problem_of, readable, NUM_CHECKERS, description, total=len(readable))
        return {
            "rows": np.array(
                [row for row, text in zip(readable, texts, strict=True) if text], dtype=np.int64
            )
        }

    if check is None:
        return problems
    bad: dict[str, np.ndarray] | None = None
    if len(readable) > SHOWN_RIRS:
        # A cache folder that cannot be written only costs time.
        with contextlib.suppress(OSError):
            bad = mapped(_key_of(f"checked {what}", source.root, names, table), find_bad)
    for row in (bad or find_bad())["rows"].tolist():
        problems[row] = problem_of(row) or f"{names[row]}: could not be read"
    return problems


def _read_response(source: AudioSource, name: str) -> np.ndarray:
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
    root = Path(root)
    files = open_noise(root, sample_rate)
    table = files.source.lookup_table(files.names)
    lengths = np.asarray(table.num_samples)
    usable = np.ones(len(files.names), dtype=bool)
    usable[list(files.problems)] = False
    if problem := files.left_out():
        logger.warning("%s: %s", root, problem)
    # One reader for all kinds, because the cache is keyed by its rows.
    reader = files.source.rows(files.names, table, cache)
    folders = ([*name.split("/")[:-1], root.name] for name in files.names)
    kinds = np.array(
        [next((MUSAN_FOLDERS[one] for one in some if one in MUSAN_FOLDERS), "") for some in folders]
    )
    if unnamed := int((kinds == "").sum()):
        logger.warning(
            "%s: %s outside folders noise, music and speech count as noise",
            root,
            counted(unnamed, "file"),
        )
    banks = {}
    for kind in MUSAN_FOLDERS.values():
        rows = np.flatnonzero(((kinds == kind) | ((kinds == "") & (kind == "noise"))) & usable)
        if len(rows):
            banks[kind] = ClipBank(reader, rows, lengths[rows].astype(np.int64))
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
            kept = mapped(key, functools.partial(_with_energies, bank))
            samples = torch.from_numpy(kept["samples"])
            bank.energies = kept["energies"]
        else:
            samples = _decoded(bank)
            bank.energies = block_energies(samples.numpy())
        starts = np.cumsum(bank.lengths) - bank.lengths
        bank.reader, bank.rows = RamRows(samples, starts, bank.lengths, {}), np.arange(len(bank))
    return True


def _decoded(bank: ClipBank) -> Tensor:
    """Decode all clips of a bank end to end into shared memory, int16 (samples,)."""
    shared = shared_zeros((int(bank.lengths.sum()),), np.int16)
    place = 0
    description = "decoding noise" if 2 * len(shared) > SHOWN_BYTES else ""
    for clip in parallel_map(bank.read_whole, range(len(bank)), 2, description, total=len(bank)):
        shared.numpy()[place : place + len(clip)] = clip
        place += len(clip)
    return shared


def _with_energies(bank: ClipBank) -> dict[str, np.ndarray]:
    samples = _decoded(bank).numpy()
    return {"samples": samples, "energies": block_energies(samples)}


def _key_of(what: str, root: str, names: StringTable, table: LookupTable) -> str:
    """A key of everything decoded files depend on: folder, names, rate, sizes and times."""
    found = hashlib.sha256(f"{Path(root).resolve()} {table.sample_rate} {names.checksum}".encode())
    for column in (table.file_bytes, table.modified_ns):
        # The columns of a packed corpus may repeat one value without storing it again.
        found.update(np.ascontiguousarray(column).data)
    return f"{what} {found.hexdigest()}"


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
        self.source, self.names = files.source, files.names
        if problem := files.left_out():
            logger.warning("%s: %s", root, problem)
            self.names = files.names.take(
                np.setdiff1d(np.arange(len(files.names)), list(files.problems))
            )
        self.is_aligned = is_aligned
        self.cache = cache or AudioCache(0)
        self._kept: dict[str, np.ndarray] = {}
        if distributed.local_world_size() > 1 and isinstance(self.source, FolderSource):
            table = self.source.lookup_table(self.names)
            if 4 * int(table.num_samples.sum()) <= self.cache.budget_bytes:
                key = _key_of(f"responses {is_aligned}", self.source.root, self.names, table)
                self._kept = mapped(key, self._all_prepared)

    def __len__(self) -> int:
        return len(self.names)

    def _all_prepared(self) -> dict[str, np.ndarray]:
        found = list(parallel_map(self.prepared, range(len(self)), 2))
        return {"samples": np.concatenate(found), "bounds": np.cumsum([0, *map(len, found)])}

    def prepared(self, rir: int) -> np.ndarray:
        """The prepared RIR, float32 (samples,); the processes of a machine map one copy if it fits
        the cache.
        """
        if self._kept:
            first, stop = self._kept["bounds"][rir : rir + 2].tolist()
            return self._kept["samples"][first:stop]
        found = self.cache.get(("prepared", rir))
        if found is None:
            found = _read_response(self.source, self.names[rir])
            if self.is_aligned:
                found = found[int(np.abs(found).argmax()) :].copy()
            self.cache.put(("prepared", rir), found)
        return found

    def spectrum(self, rir: int, num_samples: int) -> np.ndarray:
        """The RIR's spectrum, complex64 (bins,), at a length at which a crop of `num_samples` does
        not wrap around.
        """
        key = ("spectrum", rir, num_samples)
        spectrum = self.cache.get(key)
        if spectrum is None:
            # Later samples cannot reach the crop.
            found = self.prepared(rir)[:num_samples]
            spectrum = np.fft.rfft(found, transform_samples(num_samples + len(found) - 1)).astype(
                np.complex64
            )
            self.cache.put(key, spectrum)
        return spectrum


def device_responses(root: str | Path, sample_rate: int) -> np.ndarray:
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
    found = []
    for name in names:
        samples = read_audio(Path(root) / name, sample_rate=sample_rate, channel=0)[:RESPONSE_FFT]
        bands = np.add.reduceat(np.abs(np.fft.rfft(samples, RESPONSE_FFT)) ** 2, first)
        bands /= np.diff(first, append=RESPONSE_FFT // 2 + 1)
        if not bands.any():
            raise AudioError(f"{Path(root) / name}: the impulse response is silent; remove it")
        level = 10 * np.log10(np.maximum(bands / bands.mean(), 1e-12))
        level -= level.mean()
        found.append(np.maximum(level, -DEEPEST_RESPONSE_DB))
    return np.stack(found)


def transform_samples(least: int) -> int:
    """A fast transform length of at least `least`, one of few, so that many RIRs share a transform.

    >>> transform_samples(33_000), transform_samples(36_865)
    (36864, 40960)
    """
    # Late: only banks of RIRs need it, and it imports half of scipy.
    from scipy.fft import next_fast_len

    # A length with few factors of two is a third slower than the next multiple of 256.
    return FFT_BLOCK * next_fast_len(-(-least // FFT_BLOCK), real=True)


def bytes_of_banks(
    banks: Mapping[str, ClipBank], rirs: RirBank | None, corpus: PackedRows | None
) -> int:
    """Bytes that clips (int16) and RIRs (float32) take on a device, except clips of a corpus that
    is there already.
    """
    clips = sum(2 * int(bank.lengths.sum()) for bank in banks.values() if bank.reader is not corpus)
    if rirs is None:
        return clips
    lengths = np.asarray(rirs.source.lookup_table(rirs.names).num_samples)
    # The longest once more at the end, so that a window may extend beyond the last RIR.
    return clips + 4 * int(lengths.sum() + lengths.max(initial=0))


class ResidentBanks:
    """Noise clips and RIRs on one device; clips read from `corpus_rows` are in `corpus`, which is
    there already.
    """

    def __init__(
        self,
        banks: Mapping[str, ClipBank],
        rirs: RirBank | None,
        device: torch.device,
        *,
        corpus: DeviceAudio | None = None,
        corpus_rows: PackedRows | None = None,
        num_threads: int = 4,
    ) -> None:
        self.device = device
        is_there = {
            kind: corpus is not None and bank.reader is corpus_rows for kind, bank in banks.items()
        }
        total = sum(int(bank.lengths.sum()) for kind, bank in banks.items() if not is_there[kind])
        own = DeviceAudio(torch.empty(total, dtype=torch.int16, device=device))
        first = 0
        # Code of the kind -> the audio with its clips, the first sample and the number of samples
        # of each.
        self._clips: dict[int, tuple[DeviceAudio, np.ndarray, np.ndarray]] = {}
        is_shown = distributed.is_main()
        for kind, bank in banks.items():
            if is_there[kind]:
                assert corpus is not None and corpus_rows is not None
                self._clips[KINDS.index(kind)] = (
                    corpus,
                    corpus_rows.starts_of(bank.rows),
                    corpus_rows.lengths[bank.rows],
                )
                continue
            self._clips[KINDS.index(kind)] = (
                own,
                first + np.cumsum(bank.lengths) - bank.lengths,
                bank.lengths,
            )
            description = "noise to the device" if is_shown and total > SHOWN_CLIPS_SAMPLES else ""
            for clip in parallel_map(
                bank.read_whole, range(len(bank)), num_threads, description, total=len(bank)
            ):
                own.samples[first : first + len(clip)] = torch.from_numpy(clip).to(device)
                first += len(clip)
        description = "RIRs to the device" if is_shown and rirs and len(rirs) > SHOWN_RIRS else ""
        numbers = range(len(rirs or ()))
        found = list(parallel_map(rirs.prepared, numbers, num_threads, description)) if rirs else []
        self._rir_lengths = np.array([len(one) for one in found], dtype=np.int64)
        self._rir_starts = np.cumsum(self._rir_lengths) - self._rir_lengths
        self._longest_rir = int(self._rir_lengths.max(initial=0))
        # Zeros at the end, so that a window may extend beyond the last RIR.
        whole = np.concatenate([*found, np.zeros(self._longest_rir, dtype=np.float32)])
        self._rirs = torch.from_numpy(whole).to(device)

    def gather(self, drawn: Drawn, num_samples: int) -> Ingredients:
        """The audio that the choices need for utterances of `num_samples`, without waiting for the
        device.
        """
        kinds = drawn.source_kinds
        firsts, lengths = np.zeros((2, len(kinds)), dtype=np.int64)
        # One read per tensor that has crops.
        members: dict[int, tuple[DeviceAudio, list[np.ndarray]]] = {}
        for code in np.unique(kinds).tolist():
            audio, begins, sizes = self._clips[code]
            some = np.flatnonzero(kinds == code)
            firsts[some] = begins[drawn.clips[some]]
            lengths[some] = sizes[drawn.clips[some]]
            members.setdefault(id(audio), (audio, []))[1].append(some)
        starts = (drawn.places * np.maximum(lengths - num_samples, 0)).astype(np.int64)
        noises = torch.empty(len(kinds), num_samples, device=self.device)
        for audio, groups in members.values():
            some = np.concatenate(groups)
            crops = to_float(audio.crops(firsts[some], starts[some], lengths[some], num_samples))
            (places,) = send(self.device, [some])
            noises.index_copy_(0, places, crops)
        wet = np.flatnonzero(drawn.rirs >= 0)
        if not len(wet):
            return Ingredients(noises)
        # RIRs are cut to what can reach the crop and share one transform; each additional length
        # would cost a launch.
        reach = min(self._longest_rir, num_samples)
        rirs = drawn.rirs[wet]
        fft_samples = transform_samples(num_samples + reach - 1)
        rows, heads, ends = send(
            self.device, [wet, self._rir_starts[rirs], np.minimum(self._rir_lengths[rirs], reach)]
        )
        windows = self._rirs.unfold(0, reach, 1)[heads]
        windows *= torch.arange(reach, device=self.device) < ends[:, None]
        return Ingredients(noises, rows, torch.fft.rfft(windows, fft_samples), fft_samples)
