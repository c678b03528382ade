"""Shared by the steps of data preparation: counts of results, names that stay in one folder,
conversion.

A step (download, extract, convert, …) counts into one `StepSummary`. Broken items go straight to a
text file, one per line with the reason, so that a million bad files cost no memory.
"""

import itertools
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from speakernet.data.audio import SAMPLE_RATE, AudioError, audio_info
from speakernet.data.ffmpeg import Decoded, FfmpegError, decode_batch, find_ffmpeg
from speakernet.files import FileError, atomic_write, human_bytes, parallel_map, temporary_beside
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)

# Starting ffmpeg costs 20 ms, decoding a four-second m4a 3 ms: one call for 16 files is about four
# times as fast.
BATCH_FILES = 16
#: A codec pads a frame or two (1024 samples each) at either end; a larger difference is missing
# audio.
TOLERANCE_SECONDS = 0.15
TOLERANCE_SHARE = 0.01
#: For containers without a duration, ffmpeg estimates it from the bit rate, which may be far off.
ESTIMATE_SHARE = 0.5
#: If ffmpeg fails with less free space than this, the disk is full.
MIN_FREE_BYTES = 64 << 20
Arguments = dict[str, dict[str, Any]]
"""Options of a command -> the keyword arguments of `add_argument`."""
Conversion = tuple[Path, Path]
"""Source and target."""
FFMPEG_ARGUMENT = {"--ffmpeg": {"help": "ffmpeg to use (default: the one on the PATH)"}}


class UnsafeNameError(ValueError):
    """A name that would lead outside the target folder."""


class DiskFullError(FileError):
    """Not enough disk space; the run stops."""


class StepSummary:
    """Counts of one step: items made, skipped (such as those that exist already) and broken. Broken
    items are also written to a file; that of an earlier run is deleted.

    `made`, `skipped` and `left_out` are the step's own words for the three counts. Counting is
    thread-safe.
    """

    def __init__(
        self,
        step: str,
        folder: str | Path,
        made: str = "made",
        skipped: str = "skipped",
        left_out: str = "broken",
    ) -> None:
        self.step = step
        self.broken_path = Path(folder) / f"broken_{step}.txt"
        self.broken_path.unlink(missing_ok=True)
        self.made = self.skipped = self.broken = 0
        self.first_broken: list[str] = []
        self.made_word = made
        self.skipped_word = skipped
        self.broken_word = left_out
        self._lock = threading.Lock()

    @property
    def found(self) -> int:
        return self.made + self.skipped + self.broken

    def add(self, made: int = 0, skipped: int = 0) -> None:
        """Count items that were made now and items that were skipped."""
        with self._lock:
            self.made += made
            self.skipped += skipped

    def add_broken(self, item: str, reason: str) -> None:
        item = one_line(item)
        reason = one_line(reason)
        with self._lock:
            self.broken += 1
            if len(self.first_broken) < MAX_NAMED:
                self.first_broken.append(f"{item}: {reason}")
            self.broken_path.parent.mkdir(parents=True, exist_ok=True)
            with self.broken_path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(f"{item}\t{reason}\n")

    def count_each(
        self,
        work: Callable[[str], tuple[int, int]],
        names: Iterable[str],
        num_jobs: int,
        description: str,
    ) -> None:
        """Call `work(name) -> (made, skipped)` from several threads; an AudioError counts the name
        as broken.
        """

        def count(name: str) -> None:
            try:
                self.add(*work(name))
            except AudioError as error:
                self.add_broken(name, str(error))

        list(parallel_map(count, names, num_jobs, description))

    def text(self) -> str:
        text = (
            f"{self.step}: {self.found:,} found, {self.made:,} {self.made_word}, "
            f"{self.skipped:,} {self.skipped_word}, {self.broken:,} {self.broken_word}"
        )
        return f"{text} (listed in {self.broken_path})" if self.broken else text


def one_line(text: str) -> str:
    r"""Escape line breaks, tabs and other control characters, so that the text fits one line of a
    file or log.

    >>> one_line("two\nlines")
    'two\\nlines'
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def name_problem(name: str) -> str:
    """Why a path cannot go into a list; empty if it can."""
    is_one_line = len(name.splitlines()) == 1 and "\t" not in name and name == name.strip()
    # Bytes that are not UTF-8 arrive as surrogates.
    if is_one_line and not any("\ud800" <= letter <= "\udfff" for letter in name):
        return ""
    return (
        "a list cannot contain this name (line break, tab, leading or trailing space, or not "
        "UTF-8); rename the file"
    )


def finish(summaries: Sequence[StepSummary], report_path: str | Path | None = None) -> int:
    """Log every step's counts, write them to `report_path`, and return the exit code: 1 if anything
    is broken.
    """
    for summary in summaries:
        logger.info("%s", summary.text())
        for line in summary.first_broken:
            logger.warning("%s: %s: %s", summary.step, summary.broken_word, line)
    if report_path is not None:
        with atomic_write(report_path) as file:
            for summary in summaries:
                lines = [summary.text(), *(f"  {item}" for item in summary.first_broken)]
                file.writelines(f"{line}\n" for line in lines)
    return int(any(summary.broken for summary in summaries))


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise DiskFullError if the disk has less free space than `num_bytes`."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise DiskFullError(
            f"{folder}: {human_bytes(num_bytes)} needed, but only {human_bytes(free)} free; "
            "free some space or choose another --save_path"
        )


def checked_relative(name: str) -> PurePosixPath:
    """An untrusted name (archive, server, table) as a relative path with forward slashes, or
    UnsafeNameError.

    >>> checked_relative("id1/a b/00001.wav").as_posix()
    'id1/a b/00001.wav'
    """
    # Backslashes are separators only on Windows, but in an archive they mean the same everywhere.
    pieces = [piece for piece in name.replace("\\", "/").split("/") if piece not in ("", ".")]
    first = pieces[0] if pieces else ""
    # `C:` is a drive of Windows.
    is_absolute = name.startswith(("/", "\\")) or (len(first) == 2 and first[1] == ":")
    if not pieces or is_absolute or ".." in pieces or "\0" in name:
        raise UnsafeNameError(
            f"refused: the name {name!r} is empty, absolute or leads outside the folder; expected "
            "a path in the folder"
        )
    return PurePosixPath(*pieces)


class Folder:
    """A target folder: makes subfolders on demand and refuses any path that leaves it, even through
    a link.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._resolved_root = self.root.resolve()
        # A million files are in thousands of folders; each folder is checked once.
        self._checked: set[Path] = set()

    def path(self, name: str) -> Path:
        """The path of `name` below the root, or UnsafeNameError; its folder exists afterwards."""
        path = self.root / checked_relative(name)
        folder = path.parent
        if folder not in self._checked:
            # Resolved before anything is made, so that not even an empty folder appears outside.
            resolved = folder.resolve()
            if not resolved.is_relative_to(self._resolved_root):
                raise UnsafeNameError(
                    f"{folder} leads to {resolved}, outside {self.root}; use the real folder as "
                    "the target"
                )
            folder.mkdir(parents=True, exist_ok=True)
            self._checked.add(folder)
        if path.is_symlink():
            raise UnsafeNameError(
                f"{path} is a link; remove it, so that nothing outside {self.root} is written"
            )
        return path


# A kill does no harm: a target appears under its name only when ffmpeg has finished it and its
# length agrees with the source's, so the next run looks at the header of each target and makes what
# is missing. Several machines can share the work in the same way. A damaged source is listed as
# broken and skipped; a full disk stops the run, because every further file would be listed too. The
# length is a weak check: damage in the middle of a file goes unnoticed if ffmpeg fills the gap.
def convert_all(
    pairs: Iterable[Conversion],
    file_format: str,
    num_jobs: int,
    summary: StepSummary,
    *,
    keep_sources: bool = True,
    description: str = "convert",
) -> None:
    """Convert sources whose targets do not exist yet to mono WAV or FLAC at 16 kHz; `pairs` are
    (source, target).

    A target gets its final name when it is complete. Takes an iterator and keeps a few batches in
    flight, so a million files need no more memory than a hundred.
    """
    ffmpeg = find_ffmpeg()

    def convert(batch: list[Conversion]) -> int:
        """Returns the size of the batch, by which the bar moves on."""
        # A truncated file or a bare header, as left by a killed tool, counts as missing.
        missing = [pair for pair in batch if audio_seconds(pair[1], SAMPLE_RATE) is None]
        broken = _decode(ffmpeg, missing, file_format) if missing else {}
        for source, reason in broken.items():
            summary.add_broken(str(source), reason)
        summary.add(len(missing) - len(broken), len(batch) - len(missing))
        if not keep_sources:
            for source, _ in batch:
                if source not in broken:
                    source.unlink(missing_ok=True)
        return len(batch)

    list(parallel_map(convert, _batches(pairs), num_jobs, description, units_of=int))


def _batches(pairs: Iterable[Conversion]) -> Iterator[list[Conversion]]:
    iterator = iter(pairs)
    while batch := list(itertools.islice(iterator, BATCH_FILES)):
        yield batch


def _decode(ffmpeg: str, batch: list[Conversion], file_format: str) -> dict[Path, str]:
    """Decode a batch and rename complete files; returns the reason for each source that failed."""
    sources, targets = zip(*batch, strict=True)
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
    partial = [temporary_beside(target) for target in targets]
    broken: dict[Path, str] = {}
    try:
        facts = decode_batch(ffmpeg, sources, partial, file_format, SAMPLE_RATE)
        for (source, target), file, of_source in zip(batch, partial, facts, strict=True):
            problem = _length_problem(audio_seconds(file, SAMPLE_RATE) or 0.0, of_source)
            if problem:
                broken[source] = problem
            else:
                # Not flushed: a million flushes take hours on a spinning disk, and a process kill
                # loses nothing.
                file.replace(target)
    except FfmpegError as error:
        # With a full disk every further file would fail: stop, rather than list a million as
        # broken.
        check_space(targets[0].parent, MIN_FREE_BYTES)
        if len(batch) == 1:
            return {sources[0]: str(error)}
        # One bad file fails the whole call, so decode the files one by one.
        for pair in batch:
            broken |= _decode(ffmpeg, [pair], file_format)
    finally:
        for file in partial:
            file.unlink(missing_ok=True)
    return broken


def audio_seconds(path: Path, sample_rate: int | None = None) -> float | None:
    """Duration of a complete, non-empty audio file from its header, or None; `sample_rate` None
    accepts any rate.
    """
    try:
        info = audio_info(path)
    except (AudioError, OSError):
        return None
    is_complete = info.num_samples > 0 and not info.is_truncated
    has_rate = sample_rate in (None, info.sample_rate)
    return info.seconds if is_complete and has_rate else None


def _length_problem(seconds: float, source: Decoded) -> str:
    """What is wrong with a decoded length, by the duration in the source's header; empty if
    nothing. Too short means truncated audio, too long a damaged header.
    """
    if seconds <= 0:
        return "decoded no audio"
    if source.seconds is None:
        return ""
    share = ESTIMATE_SHARE if source.is_guess else TOLERANCE_SHARE
    tolerance = max(TOLERANCE_SECONDS, share * source.seconds)
    if abs(seconds - source.seconds) <= tolerance:
        return ""
    return f"decoded {seconds:.2f} of {source.seconds:.2f} s; the source is damaged"
