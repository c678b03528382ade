"""What augmentation takes from disk: clips of noise, music and talkers, and RIRs with their spectra.

An RIR is a room impulse response. Knows folders and files; makes no random choice and mixes nothing (`augmenter.py`
does).
"""

import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speakernet.data.audio import AUDIO_SUFFIXES, AudioError, read_audio
from speakernet.data.augment.draw import KINDS, Drawn, Ingredients
from speakernet.data.lists import StringTable
from speakernet.data.on_device import DeviceAudio, send, to_float
from speakernet.data.packed import PackedRows, RamRows, Samples
from speakernet.data.sharing import SharedArray
from speakernet.data.sources import INT16_SCALE, AudioCache, FolderSource, RowReader
from speakernet.files import own_command, parallel_map
from speakernet.parallel import distributed
from speakernet.terminal import MAX_NAMED, Bar

logger = logging.getLogger(__name__)

# Folder names of MUSAN -> our names of the kinds of disturbance.
MUSAN_FOLDERS = {"noise": "noise", "music": "music", "speech": "babble"}
# What in a path of RIRS_NOISES tells a noise: a folder, and recordings beside the RIRs of its isotropic rooms.
NOISES_AMONG_RIRS = ("/pointsource_noises/", "_noise_")
# Transform lengths are multiples of it: few different ones, which are faster than many, and many factors of two.
FFT_BLOCK = 512
ENERGY_BLOCK = 64  # samples that one kept energy stands for
BLOCKS_AT_ONCE = 1 << 16


SHOWN_BYTES = 64 << 20  # of noise; less is decoded before a bar could be looked at


class BlockEnergies:
    """Energies of any crop of int16 samples in memory, exact, without reading the crop.

    Args:
        samples: in shared memory, int16 (samples,).
    """

    def __init__(self, samples: SharedArray) -> None:
        self._samples = samples
        num_blocks = len(samples.array) // ENERGY_BLOCK
        blocks = samples.array[: num_blocks * ENERGY_BLOCK].reshape(-1, ENERGY_BLOCK)
        sums = np.zeros(num_blocks + 1, dtype=np.int64)
        for first in range(0, num_blocks, BLOCKS_AT_ONCE):
            some = blocks[first : first + BLOCKS_AT_ONCE].astype(np.int64)
            sums[first + 1 : first + 1 + len(some)] = (some * some).sum(axis=1)
        # A sum that overflows wraps around, and the difference of two is right all the same.
        self._sums = SharedArray(np.cumsum(sums)).share()

    def of_crops(self, firsts: np.ndarray, num_samples: int) -> np.ndarray:
        """Sums of squares of `num_samples` (two blocks or more) from each of `firsts` (crops,) on, int64 (crops,)."""
        samples, sums = self._samples.array, self._sums.array
        begins, ends = -(-firsts // ENERGY_BLOCK), (firsts + num_samples) // ENERGY_BLOCK
        # What lies before the first whole block and after the last one.
        places = np.arange(ENERGY_BLOCK)
        heads, tails = firsts[:, None] + places, (ends * ENERGY_BLOCK)[:, None] + places
        is_inside = np.concatenate(
            [heads < (begins * ENERGY_BLOCK)[:, None], tails < (firsts + num_samples)[:, None]], axis=1
        )
        edges = samples[np.where(is_inside, np.concatenate([heads, tails], axis=1), 0)].astype(np.int64) * is_inside
        return sums[ends] - sums[begins] + (edges * edges).sum(axis=1)


@dataclass
class ClipBank:
    """Clips of one kind of disturbance.

    Attributes:
        reader: reads rows, wrapping short ones.
        rows: rows of the reader that belong to this kind, int64 (clips,).
        lengths: samples of each of them, int64 (clips,).
        energies: of the reader's samples, where they are in memory.
    """

    reader: RowReader
    rows: np.ndarray
    lengths: np.ndarray
    energies: BlockEnergies | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def fill(self, clips: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """Write crops into `out` (sources, samples); a place in [0, 1) says where in the clip the crop begins.

        Raises:
            AudioError: a clip cannot be read.
        """
        slack = np.maximum(self.lengths[clips] - out.shape[1], 0)
        problems = self.reader.fill(self.rows[clips], (places * slack).astype(np.int64), out)
        if problems:
            raise AudioError(f"augmentation: {next(iter(problems.values()))}; remove the file or mend it")

    def read_whole(self, clip: int, out: np.ndarray) -> None:
        """Read a clip into `out` (its length,), int16; one that became shorter since its header was read repeats.

        Raises:
            AudioError: the clip cannot be read.
        """
        have = self.reader.read_row(int(self.rows[clip]), 0, out)
        out[have:] = np.resize(out[:have], len(out) - have) if have else 0

    def crops(self, clips: np.ndarray, places: np.ndarray, is_wanted: np.ndarray, num_samples: int) -> "Crops":
        """The crops of many sources, to be written one by one.

        Args:
            clips: of every source, int64 (sources,).
            places: as for `fill`, (sources,).
            is_wanted: which sources are this bank's, bool (sources,); the others are not looked at.
            num_samples: length of each.
        """
        clips = np.where(is_wanted, clips, 0)
        starts = (places * np.maximum(self.lengths[clips] - num_samples, 0)).astype(np.int64)
        return Crops(self, self.rows[clips], starts, num_samples)


class Crops:
    """Crops of one bank, written where and when they are needed; those in memory at the price of a cast.

    Attributes:
        powers: mean square of each crop, NaN where it is not known before the crop is read.
    """

    def __init__(self, bank: ClipBank, rows: np.ndarray, starts: np.ndarray, num_samples: int) -> None:
        self._reader, self._rows, self._starts = bank.reader, rows, starts
        self._num_samples = num_samples
        self._samples: Samples | None = None
        self._firsts: list[int] = []
        powers = np.full(len(rows), np.nan)
        if isinstance(bank.reader, PackedRows):
            self._samples = bank.reader.samples
            firsts = bank.reader.whole_crops(rows, starts, num_samples)
            self._firsts = firsts.tolist()
            if bank.energies is not None and num_samples >= 2 * ENERGY_BLOCK:
                whole = np.flatnonzero(firsts >= 0)
                powers[whole] = bank.energies.of_crops(firsts[whole], num_samples) * (float(INT16_SCALE) ** 2)
        self.powers: list[float] = (powers / num_samples).tolist()

    def write(self, source: int, out: np.ndarray) -> float:
        """Write a crop to `out` (samples,) float32; returns the factor that brings it to -1..1.

        Raises:
            AudioError: the clip cannot be read.
        """
        if self._samples is not None and self._firsts[source] >= 0:
            first = self._firsts[source]
            out[:] = self._samples[first : first + self._num_samples]
            return float(INT16_SCALE)
        some = slice(source, source + 1)
        problems = self._reader.fill(self._rows[some], self._starts[some], out[None])
        if problems:
            raise AudioError(f"augmentation: {next(iter(problems.values()))}; remove the file or mend it")
        return 1.0


def find_audio_files(root: str | Path) -> list[str]:
    """Names of all audio files below `root`, relative to it, sorted.

    Raises:
        AudioError: no such folder.
    """
    root = Path(root)
    if not root.is_dir():
        scripts = f"{own_command('prepare musan')}, {own_command('prepare rirs')}"
        raise AudioError(f"{root}: no such folder of noise or RIRs; what makes them: {scripts}")
    found = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.suffix.lower() in AUDIO_SUFFIXES)
    return sorted(found)


def noise_banks(root: str | Path, sample_rate: int, cache: AudioCache | None) -> dict[str, ClipBank]:
    """Banks of MUSAN's kinds found below `root`: a folder noise, music or speech somewhere in the path tells the kind.

    Files under none of these folders count as noise, which is said. Empty and unreadable files are left out, and said.

    Raises:
        AudioError: no such folder, or no usable audio in it.
    """
    names = find_audio_files(root)
    source = FolderSource(root, sample_rate, show_progress=distributed.is_main())
    listed = StringTable.from_strings(names)
    table = source.lookup_table(listed)
    lengths = np.asarray(table.num_samples)
    usable = lengths > 0
    if not usable.any():
        raise AudioError(f"{root}: no readable audio in this noise folder ({len(names)} files); is it MUSAN's layout?")
    if not usable.all():
        bad = [names[row] for row in np.flatnonzero(~usable)[:MAX_NAMED]]
        logger.warning("%s: %d noise files cannot be read and are left out: %s", root, (~usable).sum(), ", ".join(bad))
    # One reader for all kinds: the cache is keyed by its rows.
    reader = source.rows(listed, table, cache)
    kinds = np.array([_kind_of(name, Path(root)) for name in names], dtype="U8")
    unnamed = int((kinds == "").sum())
    if unnamed:
        logger.warning("%s: %d files lie under no folder noise, music or speech and count as noise", root, unnamed)
        kinds[kinds == ""] = "noise"
    banks = {}
    for kind in MUSAN_FOLDERS.values():
        rows = np.flatnonzero((kinds == kind) & usable)
        if len(rows):
            banks[kind] = ClipBank(reader, rows, lengths[rows].astype(np.int64))
    return banks


def _kind_of(name: str, root: Path) -> str:
    for part in [*name.split("/")[:-1], root.name]:
        if part in MUSAN_FOLDERS:
            return MUSAN_FOLDERS[part]
    return ""


class RirBank:
    """RIRs (room impulse responses), prepared once, with the spectra of the lengths that are asked for.

    Args:
        source: where the files are.
        names: the files.
        is_aligned: drop what comes before the direct path (the largest sample), so that speech stays where it was.
        cache: keeps RIRs and spectra.

    Each is divided by the square root of its energy, as is usual. Of one with several channels the first
    is taken: each is one microphone's, and their mean is the response of no place in the room.
    """

    def __init__(
        self, source: FolderSource, names: Sequence[str], *, is_aligned: bool = True, cache: AudioCache | None = None
    ) -> None:
        self.source = source
        self.names = StringTable.from_strings(names)
        self.is_aligned = is_aligned
        self.cache = cache or AudioCache(0)

    def __len__(self) -> int:
        return len(self.names)

    def prepared(self, rir: int, most_samples: int) -> np.ndarray:
        """The prepared RIR, float32 (at most `most_samples`,): later samples cannot reach the crop.

        Raises:
            AudioError: unreadable, empty or silent.
        """
        found = self.cache.get(("prepared", rir))
        if found is None:
            path = self.source.path_of(self.names[rir])
            found = read_audio(path, sample_rate=self.source.sample_rate, mixes=False)
            energy = float(np.dot(found, found)) if len(found) else 0.0
            if not energy > 0:
                raise AudioError(f"{path}: the RIR is empty or silent; remove it")
            found = (found / np.float32(np.sqrt(energy))).astype(np.float32)
            if self.is_aligned:
                found = found[int(np.abs(found).argmax()) :].copy()
            self.cache.put(("prepared", rir), found)
        return found[:most_samples]

    def fft_samples(self, rir: int, num_samples: int) -> int:
        """Length of the transform in which a crop of `num_samples` and this RIR do not wrap around.

        Lengths are rounded up to a few good ones, so that many RIRs share one transform.
        """
        reach = len(self.prepared(rir, num_samples))
        # Few factors of two make a transform a third slower than the next multiple of 256.
        return FFT_BLOCK * fast_fft_samples(-(-(num_samples + reach - 1) // FFT_BLOCK))

    def spectrum(self, rir: int, num_samples: int, fft_samples: int) -> np.ndarray:
        """The RIR's spectrum, complex64 (fft_samples // 2 + 1,)."""
        key = ("spectrum", rir, num_samples, fft_samples)
        spectrum = self.cache.get(key)
        if spectrum is None:
            spectrum = np.fft.rfft(self.prepared(rir, num_samples), fft_samples).astype(np.complex64)
            self.cache.put(key, spectrum)
        return spectrum


def rir_bank(root: str | Path, sample_rate: int, cache: AudioCache | None, *, is_aligned: bool) -> RirBank:
    """All RIRs below `root` (RIRS_NOISES' layout or any other); its noises are left out, and said.

    Raises:
        AudioError: no such folder, or no audio in it.
    """
    found = find_audio_files(root)
    names = [name for name in found if not any(part in f"/{name}" for part in NOISES_AMONG_RIRS)]
    if not names:
        raise AudioError(f"{root}: no audio files in this folder of RIRs")
    if len(names) < len(found):
        logger.warning("%s: %d files are noises, no RIRs, and are left out", root, len(found) - len(names))
    return RirBank(FolderSource(root, sample_rate), names, is_aligned=is_aligned, cache=cache)


@functools.lru_cache(maxsize=256)
def fast_fft_samples(least: int) -> int:
    """The smallest even length of at least `least` whose only prime factors are 2, 3 and 5."""
    best = 1 << (least - 1).bit_length()
    fives = 1
    while fives < best:
        threes = fives
        while threes < best:
            length = threes << max((-(-least // threes) - 1).bit_length(), 1)
            if least <= length < best:
                best = length
            threes *= 3
        fives *= 5
    return best


def describe_banks(banks: Mapping[str, ClipBank], rirs: RirBank | None) -> str:
    """What there is to augment with, for the log."""
    parts = [f"{len(bank):,} clips of {kind}" for kind, bank in banks.items()]
    parts += [f"{len(rirs):,} RIRs"] if rirs else []
    return ", ".join(parts) or "nothing"


def clips_into_ram(banks: Mapping[str, ClipBank], budget_bytes: int) -> bool:
    """Decode all clips of noise into shared int16 memory, when they fit; returns whether they did.

    Noise is read more often than speech: more than once an utterance with babble.
    """
    total = 2 * sum(int(bank.lengths.sum()) for bank in banks.values())
    if total > budget_bytes:
        return False
    bar = Bar("decoding noise", sum(len(bank) for bank in banks.values()), "clip", is_shown=total > SHOWN_BYTES)
    for bank in banks.values():
        starts = np.concatenate([[0], np.cumsum(bank.lengths)[:-1]])
        samples = SharedArray.allocate((int(bank.lengths.sum()),), np.int16)
        for clip in range(len(bank)):
            bank.read_whole(clip, samples.array[starts[clip] : starts[clip] + bank.lengths[clip]])
            bar.update()
        bank.reader = RamRows(samples, starts, bank.lengths, {})
        bank.rows = np.arange(len(bank.lengths))
        bank.energies = BlockEnergies(samples)
    bar.close()
    return True


READ_AT_ONCE = 64  # clips or RIRs of one task
RIRS_AT_ONCE = 256  # transformed together
SECOND_BYTES = 2 * 16_000


def bytes_of_banks(banks: Mapping[str, ClipBank], rirs: RirBank | None, corpus: PackedRows | None) -> int:
    """Bytes that clips (int16) and RIRs (float32) take on a device; those read from the corpus that lies there none."""
    clips = sum(2 * int(bank.lengths.sum()) for bank in banks.values() if bank.reader is not corpus)
    if rirs is None:
        return clips
    lengths = np.asarray(rirs.source.lookup_table(rirs.names).num_samples)
    # Once more at the end, so that a window may reach beyond the last.
    return clips + 4 * int(lengths.sum() + lengths.max(initial=0))


class ResidentBanks:
    """Clips of noise and RIRs on one device.

    Args:
        banks: clips by kind; those read from `corpus_rows` are read from `corpus`.
        rirs: room impulse responses; None for no reverberation.
        device: where they go.
        spectra_bytes: most memory for kept spectra; where they take more they are made anew for each batch.
        corpus: the training corpus where that lies on the device too (babble may be mixed of its utterances).
        corpus_rows: the rows of that corpus.
        num_threads: that read files.

    Raises:
        AudioError: a clip or an RIR cannot be read.
    """

    def __init__(
        self,
        banks: Mapping[str, ClipBank],
        rirs: RirBank | None,
        device: torch.device,
        *,
        spectra_bytes: int = 0,
        corpus: DeviceAudio | None = None,
        corpus_rows: PackedRows | None = None,
        num_threads: int = 4,
    ) -> None:
        self.device = device
        own = {kind: bank for kind, bank in banks.items() if corpus is None or bank.reader is not corpus_rows}
        samples = torch.empty(sum(int(bank.lengths.sum()) for bank in own.values()), dtype=torch.int16, device=device)
        clips = DeviceAudio(samples)
        # Code of the kind -> where its clips lie: the audio, first sample and number of samples of each.
        self._clips: dict[int, tuple[DeviceAudio, np.ndarray, np.ndarray]] = {}
        first = 0
        for kind, bank in banks.items():
            if kind in own:
                starts = first + np.concatenate([[0], np.cumsum(bank.lengths)[:-1]])
                first += int(bank.lengths.sum())
                _read_clips(bank, starts, samples, num_threads)
                self._clips[KINDS.index(kind)] = clips, starts, bank.lengths
            else:
                assert corpus is not None and corpus_rows is not None
                starts, lengths = corpus_rows.starts[bank.rows], corpus_rows.lengths[bank.rows]
                self._clips[KINDS.index(kind)] = corpus, starts, lengths
        self._rirs = _ResidentRirs(rirs, device, spectra_bytes, num_threads) if rirs is not None else None

    def gather(self, drawn: Drawn, num_samples: int) -> Ingredients:
        """What the choices need for utterances of `num_samples`, see `Augmenter.gather`; nothing is waited for."""
        rirs = self._rirs.gather(drawn.rirs, num_samples) if self._rirs is not None else ()
        return Ingredients(self._noises(drawn, num_samples), rirs)

    def _noises(self, drawn: Drawn, num_samples: int) -> Tensor:
        """Crops of all sources, float32 (sources, samples): one read for each tensor that they lie in."""
        kinds = drawn.source_kinds
        firsts, starts, lengths = (np.zeros(len(kinds), dtype=np.int64) for _ in range(3))
        by_audio: dict[int, tuple[DeviceAudio, list[int]]] = {}
        for code in np.unique(kinds).tolist():
            audio, begins, sizes = self._clips[code]
            some = np.flatnonzero(kinds == code)
            clips = drawn.clips[some]
            firsts[some], lengths[some] = begins[clips], sizes[clips]
            by_audio.setdefault(id(audio), (audio, []))[1].append(code)
        starts = (drawn.places * np.maximum(lengths - num_samples, 0)).astype(np.int64)
        if len(by_audio) == 1:
            audio, _ = next(iter(by_audio.values()))
            return to_float(audio.crops(firsts, starts, lengths, num_samples))
        noises = torch.empty(len(kinds), num_samples, device=self.device)
        for audio, codes in by_audio.values():
            some = np.flatnonzero(np.isin(kinds, codes))
            (places,) = send(self.device, [some])
            noises.index_copy_(0, places, to_float(audio.crops(firsts[some], starts[some], lengths[some], num_samples)))
        return noises


class _ResidentRirs:
    """Prepared RIRs end to end, and their spectra at the length of transform that a length of crops takes."""

    def __init__(self, rirs: RirBank, device: torch.device, spectra_bytes: int, num_threads: int) -> None:
        self._spectra_bytes, self._kept_bytes = spectra_bytes, 0
        # Length of crops -> complex64 (RIRs, bins).
        self._spectra: dict[int, Tensor] = {}
        found = _prepared(rirs, num_threads)
        self._lengths = np.array([len(one) for one in found], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)[:-1]])
        self._longest = int(self._lengths.max())
        whole = np.concatenate([*found, np.zeros(self._longest, dtype=np.float32)])
        self._samples = torch.from_numpy(whole).to(device)

    def gather(self, rirs: np.ndarray, num_samples: int) -> tuple[tuple[Tensor, Tensor, int], ...]:
        """See `Ingredients.reverberation`; one group, for a transform of a fitting length costs a GPU a launch more."""
        members = np.flatnonzero(rirs >= 0)
        if not len(members):
            return ()
        reach = min(self._longest, num_samples)
        fft_samples = FFT_BLOCK * fast_fft_samples(-(-(num_samples + reach - 1) // FFT_BLOCK))
        kept = self._kept(num_samples, reach, fft_samples)
        chosen = rirs[members]
        if kept is None:
            (rows,) = send(self._samples.device, [members])
            return ((rows, self._transformed(chosen, reach, fft_samples), fft_samples),)
        rows, ids = send(self._samples.device, [members, chosen])
        return ((rows, kept[ids], fft_samples),)

    def _kept(self, num_samples: int, reach: int, fft_samples: int) -> Tensor | None:
        """All spectra for crops of that length, made when they are first asked for; None where they do not fit."""
        if num_samples not in self._spectra:
            needed = 8 * len(self._lengths) * (fft_samples // 2 + 1)
            if self._kept_bytes + needed > self._spectra_bytes:
                return None
            blocks = np.split(np.arange(len(self._lengths)), range(RIRS_AT_ONCE, len(self._lengths), RIRS_AT_ONCE))
            self._spectra[num_samples] = torch.cat([self._transformed(one, reach, fft_samples) for one in blocks])
            self._kept_bytes += needed
        return self._spectra[num_samples]

    def _transformed(self, rirs: np.ndarray, reach: int, fft_samples: int) -> Tensor:
        """Spectra of some RIRs, cut to `reach` samples, complex64 (rirs, bins)."""
        starts, lengths = send(self._samples.device, [self._starts[rirs], np.minimum(self._lengths[rirs], reach)])
        windows = self._samples.unfold(0, reach, 1)[starts]
        windows *= torch.arange(reach, device=windows.device) < lengths[:, None]
        return torch.fft.rfft(windows, fft_samples)


def _prepared(rirs: RirBank, num_threads: int) -> list[np.ndarray]:
    """Every RIR, prepared, whole."""

    def read(first: int) -> list[np.ndarray]:
        return [rirs.prepared(rir, sys.maxsize) for rir in range(first, min(first + READ_AT_ONCE, len(rirs)))]

    firsts = range(0, len(rirs), READ_AT_ONCE)
    description = "RIRs to the device" if distributed.is_main() and len(rirs) > 1000 else ""
    return [one for some in parallel_map(read, firsts, num_threads, description, total=len(firsts)) for one in some]


def _read_clips(bank: ClipBank, starts: np.ndarray, out: Tensor, num_threads: int) -> None:
    """Copy every clip of a bank to its place in `out`."""

    # Several threads share the reader: int16 goes where it belongs, without the reader's own scratch memory.
    def read(first: int) -> tuple[int, np.ndarray]:
        last = min(first + READ_AT_ONCE, len(bank))
        clips = np.empty(int(bank.lengths[first:last].sum()), dtype=np.int16)
        at = 0
        for clip in range(first, last):
            bank.read_whole(clip, clips[at : at + int(bank.lengths[clip])])
            at += int(bank.lengths[clip])
        return first, clips

    firsts = range(0, len(bank), READ_AT_ONCE)
    description = "noise to the device" if distributed.is_main() and len(out) > SECOND_BYTES * 1000 else ""
    for first, clips in parallel_map(read, firsts, num_threads, description, total=len(firsts)):
        begin = int(starts[first])
        out[begin : begin + len(clips)] = torch.from_numpy(clips).to(out.device)
