"""What augmentation takes from disk: clips of noise, music and talkers, and RIRs with their spectra.

An RIR is a room impulse response. Knows folders and files; makes no random choice and mixes nothing (`augmenter.py`
does). `ResidentBanks` keep all of it on the device where batches are augmented, so that nothing is read for an
utterance; their results are those of the banks on the host (a test compares them).
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
from speakernet.data.packed import PackedRows, RamRows
from speakernet.data.sharing import Shareable, shared_zeros
from speakernet.data.sources import INT16_SCALE, AudioCache, FolderSource, RowReader
from speakernet.files import own_command, parallel_map
from speakernet.parallel import distributed
from speakernet.terminal import MAX_NAMED, Bar, counted

logger = logging.getLogger(__name__)

# Folder names of MUSAN -> our names of the kinds of noise.
MUSAN_FOLDERS = {"noise": "noise", "music": "music", "speech": "babble"}
# Paths of noises among RIRS_NOISES: a folder, and recordings beside the RIRs of its isotropic rooms.
NOISES_AMONG_RIRS = ("/pointsource_noises/", "_noise_")
# Transform lengths are multiples of it: few different ones, which are faster than many, and many factors of two.
FFT_BLOCK = 512
ENERGY_BLOCK = 64  # samples that one kept energy stands for
BLOCKS_AT_ONCE = 1 << 16
SHOWN_BYTES = 64 << 20  # of noise; less is decoded before a bar could be looked at
READ_AT_ONCE = 64  # clips or RIRs of one task
RIRS_AT_ONCE = 256  # transformed together
SHOWN_CLIPS_SAMPLES = 32_000_000


class BlockEnergies(Shareable):
    """Energies of any crop of int16 samples in memory, exact, without reading the crop."""

    shared_arrays = ("sums",)

    def __init__(self, samples: np.ndarray) -> None:
        num_blocks = len(samples) // ENERGY_BLOCK
        blocks = samples[: num_blocks * ENERGY_BLOCK].reshape(-1, ENERGY_BLOCK)
        sums = np.zeros(num_blocks + 1, dtype=np.int64)
        for first in range(0, num_blocks, BLOCKS_AT_ONCE):
            some = blocks[first : first + BLOCKS_AT_ONCE].astype(np.int64)
            sums[first + 1 : first + 1 + len(some)] = (some * some).sum(axis=1)
        # A sum that overflows wraps around, and the difference of two is right all the same.
        self.sums = np.cumsum(sums)
        self.share()

    def of_crops(self, samples: np.ndarray, firsts: np.ndarray, num_samples: int) -> np.ndarray:
        """Sums of squares of `num_samples` (two blocks or more) from each of `firsts` (crops,) on, int64 (crops,)."""
        begins, ends = -(-firsts // ENERGY_BLOCK), (firsts + num_samples) // ENERGY_BLOCK
        # What lies before the first whole block and after the last one.
        places = np.arange(ENERGY_BLOCK)
        heads, tails = firsts[:, None] + places, (ends * ENERGY_BLOCK)[:, None] + places
        is_inside = np.concatenate(
            [heads < (begins * ENERGY_BLOCK)[:, None], tails < (firsts + num_samples)[:, None]], axis=1
        )
        edges = samples[np.where(is_inside, np.concatenate([heads, tails], axis=1), 0)].astype(np.int64) * is_inside
        return self.sums[ends] - self.sums[begins] + (edges * edges).sum(axis=1)


@dataclass
class ClipBank:
    """Clips of one kind."""

    reader: RowReader
    rows: np.ndarray
    lengths: np.ndarray
    energies: BlockEnergies | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def fill(self, clips: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """Write crops into `out` (sources, samples); a place in [0, 1) is the start of the crop in its clip."""
        slack = np.maximum(self.lengths[clips] - out.shape[1], 0)
        problems = self.reader.fill(self.rows[clips], (places * slack).astype(np.int64), out)
        if problems:
            raise AudioError(f"augmentation: {next(iter(problems.values()))}; remove the file or fix it")

    def read_whole(self, clip: int, out: np.ndarray) -> None:
        """Read a clip into `out` (its length,), int16; one that became shorter since its header was read repeats."""
        have = self.reader.read_row(int(self.rows[clip]), 0, out)
        out[have:] = np.resize(out[:have], len(out) - have) if have else 0


class Crops:
    """Crops of one bank, written one by one when they are needed; those in memory cost a cast."""

    def __init__(
        self, bank: ClipBank, clips: np.ndarray, places: np.ndarray, is_wanted: np.ndarray, num_samples: int
    ) -> None:
        clips = np.where(is_wanted, clips, 0)
        self._starts = (places * np.maximum(bank.lengths[clips] - num_samples, 0)).astype(np.int64)
        self._reader, self._rows, self._num_samples = bank.reader, bank.rows[clips], num_samples
        self._firsts = [-1] * len(clips)
        powers = np.full(len(clips), np.nan)
        if isinstance(bank.reader, PackedRows):
            self._samples = bank.reader.samples
            firsts = bank.reader.whole_crops(self._rows, self._starts, num_samples)
            self._firsts = firsts.tolist()
            if bank.energies is not None and num_samples >= 2 * ENERGY_BLOCK:
                whole = np.flatnonzero(firsts >= 0)
                assert isinstance(self._samples, np.ndarray)
                sums = bank.energies.of_crops(self._samples, firsts[whole], num_samples)
                powers[whole] = sums * (float(INT16_SCALE) ** 2)
        self.powers: list[float] = (powers / num_samples).tolist()

    def write(self, source: int, out: np.ndarray) -> float:
        """Write a crop to `out` (samples,) float32; returns the factor that brings it to -1..1."""
        first = self._firsts[source]
        if first >= 0:
            out[:] = self._samples[first : first + self._num_samples]
            return float(INT16_SCALE)
        if problem := self._reader.fill_one(int(self._rows[source]), int(self._starts[source]), out):
            raise AudioError(f"augmentation: {problem}; remove the file or fix it")
        return 1.0


def find_audio_files(root: str | Path) -> list[str]:
    """Names of all audio files below `root`, relative to it, sorted."""
    root = Path(root)
    if not root.is_dir():
        scripts = f"{own_command('prepare musan')}, {own_command('prepare rirs')}"
        raise AudioError(f"{root}: no such folder of noise or RIRs; what makes them: {scripts}")
    found = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.suffix.lower() in AUDIO_SUFFIXES)
    return sorted(found)


def noise_banks(root: str | Path, sample_rate: int, cache: AudioCache | None) -> dict[str, ClipBank]:
    """Banks of MUSAN's kinds found below `root`, by the folders noise, music and speech in the paths.

    Files under none of these folders count as noise, with a warning; empty and unreadable files are skipped with one.
    """
    root = Path(root)
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
        logger.warning("%s: %d noise files cannot be read and are skipped: %s", root, (~usable).sum(), ", ".join(bad))
    # One reader for all kinds: the cache is keyed by its rows.
    reader = source.rows(listed, table, cache)
    folders = ([*name.split("/")[:-1], root.name] for name in names)
    kinds = np.array([next((MUSAN_FOLDERS[one] for one in some if one in MUSAN_FOLDERS), "") for some in folders])
    if unnamed := int((kinds == "").sum()):
        logger.warning("%s: files in no folder noise, music or speech count as noise: %d", root, unnamed)
    banks = {}
    for kind in MUSAN_FOLDERS.values():
        rows = np.flatnonzero(((kinds == kind) | ((kinds == "") & (kind == "noise"))) & usable)
        if len(rows):
            banks[kind] = ClipBank(reader, rows, lengths[rows].astype(np.int64))
    return banks


def clips_into_ram(banks: Mapping[str, ClipBank], budget_bytes: int) -> bool:
    """Decode all clips of noise into shared int16 memory if they fit; returns whether they did.

    Noise is read more often than speech: more than once an utterance with babble.
    """
    total = 2 * sum(int(bank.lengths.sum()) for bank in banks.values())
    if total > budget_bytes:
        return False
    bar = Bar("decoding noise", sum(len(bank) for bank in banks.values()), "clip", is_shown=total > SHOWN_BYTES)
    for bank in banks.values():
        starts = np.cumsum(bank.lengths) - bank.lengths
        shared = shared_zeros((int(bank.lengths.sum()),), np.int16)
        samples = shared.numpy()
        for clip in range(len(bank)):
            bank.read_whole(clip, samples[starts[clip] : starts[clip] + bank.lengths[clip]])
            bar.update()
        bank.reader = RamRows(shared, starts, bank.lengths, {})
        bank.rows = np.arange(len(bank.lengths))
        bank.energies = BlockEnergies(samples)
    bar.close()
    return True


class RirBank:
    """RIRs (room impulse responses), prepared once, with the spectra of the lengths that are asked for.

    Each is divided by the square root of its energy, as is usual. Of one with several channels the first is taken: each
    is one microphone's, and their mean is not the response of any place in the room.
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
        """The prepared RIR, float32 (at most `most_samples`,): later samples cannot reach the crop."""
        found = self.cache.get(("prepared", rir))
        if found is None:
            path = Path(self.source.root, self.names[rir])
            found = read_audio(path, sample_rate=self.source.sample_rate, mixes=False)
            energy = float(np.dot(found, found))
            if not energy > 0:
                raise AudioError(f"{path}: the RIR is empty or silent; remove it")
            found = (found / np.float32(np.sqrt(energy))).astype(np.float32)
            if self.is_aligned:
                found = found[int(np.abs(found).argmax()) :].copy()
            self.cache.put(("prepared", rir), found)
        return found[:most_samples]

    def fft_samples(self, rir: int, num_samples: int) -> int:
        """Length of the transform in which a crop of `num_samples` and this RIR do not wrap around."""
        return _transform_samples(num_samples + len(self.prepared(rir, num_samples)) - 1)

    def spectrum(self, rir: int, num_samples: int, fft_samples: int) -> np.ndarray:
        """The RIR's spectrum, complex64 (fft_samples // 2 + 1,)."""
        key = ("spectrum", rir, num_samples, fft_samples)
        spectrum = self.cache.get(key)
        if spectrum is None:
            spectrum = np.fft.rfft(self.prepared(rir, num_samples), fft_samples).astype(np.complex64)
            self.cache.put(key, spectrum)
        return spectrum


def rir_bank(root: str | Path, sample_rate: int, cache: AudioCache | None, *, is_aligned: bool) -> RirBank:
    """All RIRs below `root` (RIRS_NOISES' layout or any other); its noises are skipped with a warning."""
    found = find_audio_files(root)
    names = [name for name in found if not any(mark in f"/{name}" for mark in NOISES_AMONG_RIRS)]
    if not names:
        raise AudioError(f"{root}: no audio files in this folder of RIRs")
    if len(names) < len(found):
        logger.warning("%s: %s skipped: noises, not RIRs", root, counted(len(found) - len(names), "file"))
    return RirBank(FolderSource(root, sample_rate), names, is_aligned=is_aligned, cache=cache)


@functools.lru_cache(maxsize=1 << 16)
def _transform_samples(least: int) -> int:
    """A good length of transform, at least `least`; few different ones, so that many RIRs share one transform."""
    # Few factors of two make a transform a third slower than the next multiple of 256.
    return FFT_BLOCK * fast_fft_samples(-(-least // FFT_BLOCK))


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
    found = [f"{len(bank):,} clips of {kind}" for kind, bank in banks.items()]
    found += [f"{len(rirs):,} RIRs"] if rirs else []
    return ", ".join(found) or "nothing"


def bytes_of_banks(banks: Mapping[str, ClipBank], rirs: RirBank | None, corpus: PackedRows | None) -> int:
    """Bytes that clips (int16) and RIRs (float32) take on a device; none for those read from a corpus that is there."""
    clips = sum(2 * int(bank.lengths.sum()) for bank in banks.values() if bank.reader is not corpus)
    if rirs is None:
        return clips
    lengths = np.asarray(rirs.source.lookup_table(rirs.names).num_samples)
    # Once more at the end, so that a window may reach beyond the last.
    return clips + 4 * int(lengths.sum() + lengths.max(initial=0))


class ResidentBanks:
    """Clips of noise and RIRs on one device."""

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
        # Code of the kind -> the audio that holds its clips, first sample and number of samples of each.
        self._clips: dict[int, tuple[DeviceAudio, np.ndarray, np.ndarray]] = {}
        first = 0
        for kind, bank in banks.items():
            if kind in own:
                starts = first + np.cumsum(bank.lengths) - bank.lengths
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
        kinds = drawn.source_kinds
        firsts, lengths = np.zeros((2, len(kinds)), dtype=np.int64)
        # One read for each tensor that crops lie in.
        members: dict[int, tuple[DeviceAudio, list[np.ndarray]]] = {}
        for code in np.unique(kinds).tolist():
            audio, begins, sizes = self._clips[code]
            some = np.flatnonzero(kinds == code)
            firsts[some], lengths[some] = begins[drawn.clips[some]], sizes[drawn.clips[some]]
            members.setdefault(id(audio), (audio, []))[1].append(some)
        starts = (drawn.places * np.maximum(lengths - num_samples, 0)).astype(np.int64)
        if len(members) == 1:
            audio, _ = next(iter(members.values()))
            return Ingredients(to_float(audio.crops(firsts, starts, lengths, num_samples)), rirs)
        noises = torch.empty(len(kinds), num_samples, device=self.device)
        for audio, groups in members.values():
            some = np.concatenate(groups)
            (places,) = send(self.device, [some])
            noises.index_copy_(0, places, to_float(audio.crops(firsts[some], starts[some], lengths[some], num_samples)))
        return Ingredients(noises, rirs)


class _ResidentRirs:
    """Prepared RIRs end to end, and their spectra at the length of transform that a length of crops takes."""

    def __init__(self, rirs: RirBank, device: torch.device, spectra_bytes: int, num_threads: int) -> None:
        self._spectra_bytes = spectra_bytes
        # Length of crops -> complex64 (RIRs, bins).
        self._spectra: dict[int, Tensor] = {}

        def read(first: int) -> list[np.ndarray]:
            return [rirs.prepared(rir, sys.maxsize) for rir in range(first, min(first + READ_AT_ONCE, len(rirs)))]

        firsts = range(0, len(rirs), READ_AT_ONCE)
        description = "RIRs to the device" if distributed.is_main() and len(rirs) > 1000 else ""
        blocks = parallel_map(read, firsts, num_threads, description, total=len(firsts))
        found = [one for block in blocks for one in block]
        self._lengths = np.array([len(one) for one in found], dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._longest = int(self._lengths.max())
        whole = np.concatenate([*found, np.zeros(self._longest, dtype=np.float32)])
        self._samples = torch.from_numpy(whole).to(device)

    def gather(self, rirs: np.ndarray, num_samples: int) -> tuple[tuple[Tensor, Tensor, int], ...]:
        """See `Ingredients.reverberation`; one group, for a transform of a fitting length costs a GPU a launch more."""
        members = np.flatnonzero(rirs >= 0)
        if not len(members):
            return ()
        reach = min(self._longest, num_samples)
        fft_samples = _transform_samples(num_samples + reach - 1)
        # All spectra for crops of that length are made when they are first asked for, if they fit.
        if num_samples not in self._spectra:
            needed = 8 * len(self._lengths) * (fft_samples // 2 + 1)
            if sum(8 * one.numel() for one in self._spectra.values()) + needed > self._spectra_bytes:
                (rows,) = send(self._samples.device, [members])
                return ((rows, self._transformed(rirs[members], reach, fft_samples), fft_samples),)
            blocks = np.split(np.arange(len(self._lengths)), range(RIRS_AT_ONCE, len(self._lengths), RIRS_AT_ONCE))
            self._spectra[num_samples] = torch.cat([self._transformed(one, reach, fft_samples) for one in blocks])
        rows, ids = send(self._samples.device, [members, rirs[members]])
        return ((rows, self._spectra[num_samples][ids], fft_samples),)

    def _transformed(self, rirs: np.ndarray, reach: int, fft_samples: int) -> Tensor:
        """Spectra of some RIRs, cut to `reach` samples, complex64 (rirs, bins)."""
        starts, lengths = send(self._samples.device, [self._starts[rirs], np.minimum(self._lengths[rirs], reach)])
        windows = self._samples.unfold(0, reach, 1)[starts]
        windows *= torch.arange(reach, device=windows.device) < lengths[:, None]
        return torch.fft.rfft(windows, fft_samples)


def _read_clips(bank: ClipBank, starts: np.ndarray, out: Tensor, num_threads: int) -> None:
    """Copy every clip of a bank to its place in `out`."""

    def read(first: int) -> tuple[int, np.ndarray]:
        lengths = bank.lengths[first : first + READ_AT_ONCE]
        clips = np.empty(int(lengths.sum()), dtype=np.int16)
        for clip, place in enumerate(np.split(clips, np.cumsum(lengths)[:-1]), start=first):
            bank.read_whole(clip, place)
        return int(starts[first]), clips

    firsts = range(0, len(bank), READ_AT_ONCE)
    description = "noise to the device" if distributed.is_main() and len(out) > SHOWN_CLIPS_SAMPLES else ""
    for begin, clips in parallel_map(read, firsts, num_threads, description, total=len(firsts)):
        out[begin : begin + len(clips)] = torch.from_numpy(clips).to(out.device)
