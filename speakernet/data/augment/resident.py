"""Noise and RIRs that lie on the device where batches are augmented: nothing is read or copied for each utterance.

An RIR is a room impulse response. The choices are `draw.py`'s, the mixing is `Augmenter.apply`'s; this file only gives
them their audio, by indexed reads. Results are those of banks on the host (a test compares them).
"""

import logging
import sys
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from speakernet.data.augment.banks import FFT_BLOCK, ClipBank, RirBank, fast_fft_samples
from speakernet.data.augment.draw import KINDS, Drawn
from speakernet.data.augment.ingredients import Ingredients
from speakernet.data.on_device import DeviceAudio, send, to_float
from speakernet.data.packed.corpus import PackedRows
from speakernet.files import parallel_map
from speakernet.parallel import distributed

logger = logging.getLogger(__name__)

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
