"""Diarization error rates against a reference, computed by pyannote.metrics, with intervals over
recordings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pyannote.core import Annotation, Segment, Timeline
from pyannote.metrics.diarization import DiarizationErrorRate, JaccardErrorRate

from speakernet.files import FileError, open_text, reading

FORMS = {".rttm": (1, 3, 4, 7), ".ctm": (0, 2, 3, 7), ".uem": (0, 2, 3, None)}
"""Suffix -> columns of recording, start, duration (end in .uem) and speaker."""
EXPECTED = (
    "RTTM (`SPEAKER file 1 start seconds <NA> <NA> name …`), CTM with a speaker in column "
    "8, or a folder of these"
)
COLUMNS = (
    "missed detection",
    "false alarm",
    "confusion",
    "total",
    "speaker error",
    "speaker count",
)
"""Components in pyannote.metrics: seconds, then the sum of Jaccard errors over speakers and the
number of speakers."""


@dataclass(frozen=True)
class DiarizationErrors:
    """Errors of one system.

    Attributes:
        names: names of the recordings.
        parts: (recordings, 6), in the order of `COLUMNS`.
        num_right: number of recordings in which the right number of speakers was found.
    """

    names: tuple[str, ...]
    parts: np.ndarray
    num_right: int

    def rates(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """DER, missed speech, false alarms, confusion and JER, in percent over the chosen
        recordings, (…, 5).
        """
        sums = self.parts[rows].sum(axis=-2)
        wrong = np.concatenate([sums[..., :3].sum(axis=-1, keepdims=True), sums[..., :3]], axis=-1)
        jaccard = sums[..., 4:5] / np.maximum(sums[..., 5:6], 1)
        return 100 * np.concatenate([wrong / np.maximum(sums[..., 3:4], 1e-9), jaccard], axis=-1)

    def draws(self, num_draws: int, seed: int) -> np.ndarray:
        """Rates of `num_draws` bootstrap draws of recordings, (draws, 5); every system gets the
        same draws.
        """
        count = len(self.names)
        return self.rates(np.random.default_rng(seed).integers(count, size=(num_draws, count)))


def read_turns(path: Path) -> dict[str, Annotation]:
    """Read the turns of each recording from a file, or from all files below a folder.

    The unpacked folders of VoxConverse (`dev/*.rttm`), AMI (`rttms/*/*.rttm`) and DIHARD
    (`data/rttm/*.rttm`) work.

    Raises:
        FileError: there is no such file, or a line is malformed (the message names it).
    """
    found: dict[str, Annotation] = {}
    for name, begin, end, speaker in _rows(path, (".rttm", ".ctm")):
        turns = found.setdefault(name, Annotation(uri=name))
        if speaker is not None and end > begin:
            turns[Segment(begin, end), turns.new_track(Segment(begin, end))] = speaker
    return found


def read_uem(path: Path) -> dict[str, Timeline]:
    """Read the scored regions of each recording."""
    found: dict[str, Timeline] = {}
    for name, begin, end, _ in _rows(path, (".uem",)):
        found.setdefault(name, Timeline(uri=name)).add(Segment(begin, end))
    return found


def _rows(path: Path, suffixes: Sequence[str]) -> Iterator[tuple[str, float, float, str | None]]:
    """Recording, start and end in seconds, and speaker, which is None in .uem and for an empty
    file.
    """
    expected = (
        EXPECTED
        if suffixes[0] != ".uem"
        else "UEM (`file channel start end` on each line), or a folder of these"
    )
    files = (
        sorted(one for one in path.rglob("*") if one.suffix in suffixes)
        if path.is_dir()
        else [path]
    )
    if not files:
        raise FileError(
            f"{path}: no {' or '.join(suffixes)} file in this folder; expected {expected}"
        )
    for file in files:
        with reading(file, expected), open_text(file) as text:
            lines = text.read().splitlines()
        name_at, begin_at, length_at, speaker_at = FORMS.get(file.suffix, FORMS[suffixes[0]])
        # An empty RTTM means that nobody speaks in the recording it is named after.
        if not any(line.strip() for line in lines) and suffixes[0] == ".rttm":
            yield file.stem, 0.0, 0.0, None
        for number, line in enumerate(lines, start=1):
            fields = line.split()
            if (
                not fields
                or fields[0].startswith(";;")
                or (file.suffix == ".rttm" and fields[0] != "SPEAKER")
            ):
                continue
            try:
                begin = float(fields[begin_at])
                length = float(fields[length_at])
                speaker = None if speaker_at is None else fields[speaker_at]
            except (IndexError, ValueError):
                raise FileError(
                    f"{file}, line {number}: {line[:100]!r} lacks a column, or a time is not a "
                    f"number; expected {expected}"
                ) from None
            end = length if speaker_at is None else begin + length
            if not (
                begin >= 0
                and np.isfinite(end)
                and (end > begin if speaker_at is None else length >= 0)
            ):
                last, least = (
                    ("end", "an end after it")
                    if speaker_at is None
                    else ("duration", "no negative duration")
                )
                raise FileError(
                    f"{file}, line {number}: the start is {begin:g} and the {last} {length:g}; "
                    f"expected seconds, with a start of at least 0 and {least}"
                )
            yield fields[name_at], begin, end, speaker


def diarization_errors(
    reference: Mapping[str, Annotation],
    hypothesis: Mapping[str, Annotation],
    scored: Mapping[str, Timeline] | None = None,
    *,
    collar: float,
    skips_overlap: bool = False,
) -> DiarizationErrors:
    """Compute the errors in each recording of the reference.

    Args:
        reference: turns of each recording.
        hypothesis: turns found by the system; in recordings that it lacks, all speech counts as
            missed.
        scored: scored regions; by default from the first to the last turn in reference or
            hypothesis.
        collar: unscored seconds on each side of each border of the reference.
        skips_overlap: leave out regions in which two people speak.

    Raises:
        ValueError: `scored` lacks a recording of the reference, or leaves none of its speech, as a
            wide collar may do.
    """
    if scored is not None and (lacking := sorted(reference.keys() - scored.keys())):
        raise ValueError(
            f"the UEM has no line for {lacking[0]}, which is in the reference ({len(lacking)} such "
            "in all); add the regions to score in every recording of the reference"
        )
    parts = []
    num_right = 0
    for name, true in reference.items():
        given = hypothesis.get(name, Annotation(uri=name))
        # In pyannote.metrics, a collar is the total width around a border.
        extent = Timeline([one.get_timeline().extent() for one in (true, given) if one]).extent()
        region = Timeline([extent] if extent else []) if scored is None else scored[name]
        found = {
            key: value
            for metric in (DiarizationErrorRate(2 * collar, skips_overlap), JaccardErrorRate())
            for key, value in metric.compute_components(true, given, uem=region).items()
        }
        parts.append([found[column] for column in COLUMNS])
        num_right += len(true.crop(region).labels()) == len(given.crop(region).labels())
    if any(reference.values()) and not any(part[COLUMNS.index("total")] for part in parts):
        raise ValueError(
            f"no speech of the reference is left to score in {', '.join([*reference][:3])}, with a "
            f"collar of {collar:g} s around each boundary; use a narrower collar, and check the "
            "UEM if there is one"
        )
    return DiarizationErrors(tuple(reference), np.array(parts, dtype=np.float64), num_right)
