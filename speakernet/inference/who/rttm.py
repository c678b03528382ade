"""Read who speaks when from RTTM, CTM and UEM files, and write RTTM.

Columns are separated by spaces or by tabs. Names with spaces are read where the line shows
unambiguously where they end; otherwise the line is refused, because a column that moves by one
gives two people one name. Recordings, channels and speakers are only names here; `errors.py`
compares them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

import numpy as np

from speakernet.files import FileError, open_text, reading

if TYPE_CHECKING:
    from speakernet.inference.who.conversation import Turn

Channel: TypeAlias = tuple[str, str]
"""A recording and one of its channels."""
SpeakerTurns: TypeAlias = dict[str, np.ndarray]
"""Speaker -> (turns, 2), start and stop in seconds, sorted; turns of a speaker never overlap."""
Content = TypeVar("Content")

EXCLUSIVE = ".exclusive"
"""`who` writes `X.exclusive.rttm`, with one speaker at a time, beside `X.rttm`."""
ONLY_CHANNEL = "1"
UNSET = "<NA>"
OTHER_TYPES = (
    "SEGMENT",
    "NOSCORE",
    "NO_RT_METADATA",
    "LEXEME",
    "NON-LEX",
    "NON-SPEECH",
    "FILLER",
    "EDIT",
    "IP",
    "SU",
    "CB",
    "A/P",
    "SPKR-INFO",
)
"""Types of RTTM lines other than SPEAKER, which are skipped."""
WORD_TYPES = (
    "lex",
    "frag",
    "fp",
    "un-lex",
    "for-lex",
    "non-lex",
    "misc",
    "noscore",
    "<na>",
    "na",
    "-",
)
UNKNOWN_CONFIDENCES = (UNSET, "NA", "-")
TURNS_EXPECTED = (
    "RTTM (`SPEAKER file channel start seconds <NA> <NA> name <NA> <NA>`), CTM with a speaker in "
    "column 8, or a folder of these"
)
REGIONS_EXPECTED = "UEM (`file channel start end` on each line), or a folder of these"
# Python's float would also read `nan`, `1_000` and digits of other scripts.
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
NO_SPACES = "write names of recordings without spaces, or separate the columns by tabs"


class _Row(NamedTuple):
    """One line of a file; `speaker` is None in UEM and for an empty RTTM file."""

    file: Path
    channel: Channel
    start: float
    stop: float
    speaker: str | None


def read_turns(path: Path) -> dict[Channel, SpeakerTurns]:
    """Read the turns in each channel of each recording from a file, or from all files below a
    folder.

    The unpacked folders of VoxConverse (`dev/*.rttm`), AMI (`rttms/*/*.rttm`) and DIHARD
    (`data/rttm/*.rttm`) work. An empty RTTM file means that nobody speaks in the recording it is
    named after.

    Raises:
        FileError: there is no such file, a line is malformed (the message names it), or two files
            of the folder hold turns of one recording.
    """
    read: dict[Channel, dict[str, list[tuple[float, float]]]] = {}
    file_of: dict[Channel, Path] = {}
    for row in _rows(path, {".rttm": _rttm_row, ".ctm": _ctm_row}, TURNS_EXPECTED):
        # A folder may hold the same recording from two systems or annotators; their sum would be
        # neither.
        if (first := file_of.setdefault(row.channel, row.file)) != row.file:
            raise FileError(
                f"{first} and {row.file} both hold turns of {row.channel[0]!r}; give one of the "
                "two files, or a folder with one file for each recording"
            )
        speakers = read.setdefault(row.channel, {})
        # A turn without length adds nothing, but its recording must be known: it may be silent.
        if row.speaker is not None and row.stop > row.start:
            speakers.setdefault(row.speaker, []).append((row.start, row.stop))
    merged = {}
    for channel, speakers in read.items():
        merged[channel] = {
            speaker: merge_turns(np.array(turns)) for speaker, turns in speakers.items()
        }
    return merged


def read_regions(path: Path) -> dict[Channel, np.ndarray]:
    """Read the scored regions of each channel, (regions, 2) in seconds, from UEM files.

    Raises:
        FileError: as for `read_turns`.
    """
    read: dict[Channel, list[tuple[float, float]]] = {}
    for row in _rows(path, {".uem": _uem_row}, REGIONS_EXPECTED):
        read.setdefault(row.channel, []).append((row.start, row.stop))
    return {channel: merge_turns(np.array(regions)) for channel, regions in read.items()}


def merge_turns(turns: np.ndarray) -> np.ndarray:
    """Sort turns, (turns, 2), and merge those that overlap; turns that only touch stay apart.

    >>> merge_turns(np.array([[4.0, 6.0], [0.0, 3.0], [1.0, 2.0], [3.0, 4.0], [5.0, 7.0]])).tolist()
    [[0.0, 3.0], [3.0, 4.0], [4.0, 7.0]]
    """
    turns = turns[np.argsort(turns[:, 0], kind="stable")]
    # How far any turn so far reaches; a turn that begins at or after it starts a new stretch.
    latest = np.maximum.accumulate(turns[:, 1])
    begins = np.append(True, turns[1:, 0] >= latest[:-1])
    ends = np.append(begins[1:], True)
    return np.stack([turns[begins, 0], latest[ends]], axis=1)


def with_channels_of(
    reference: Iterable[Channel], content: Mapping[Channel, Content]
) -> dict[Channel, Content]:
    """Rename the channels of recordings that have a single channel both in `content` and in the
    reference.

    Programs number a single channel 0 or 1 or call it A; only several channels have to be told
    apart.

    >>> with_channels_of([("a", "1"), ("b", "1"), ("b", "2")], {("a", "0"): "x", ("b", "2"): "y"})
    {('a', '1'): 'x', ('b', '2'): 'y'}
    """
    true = _channels(reference)
    channels = _channels(content)
    renamed = {}
    for (recording, channel), value in content.items():
        is_single = len(channels[recording]) == len(true.get(recording, ())) == 1
        renamed[recording, true[recording][0] if is_single else channel] = value
    return renamed


def describe_channels(channels: Iterable[Channel]) -> list[str]:
    """Names for messages: the recording, and the channel where there are several of a recording.

    >>> describe_channels([("a", "1"), ("b", "1"), ("b", "2")])
    ['a', 'b (channel 1)', 'b (channel 2)']
    """
    channels = list(channels)
    several = _channels(channels)
    names = []
    for name, channel in channels:
        names.append(f"{name} (channel {channel})" if len(several[name]) > 1 else name)
    return names


def _channels(channels: Iterable[Channel]) -> dict[str, list[str]]:
    """Recording -> its channels."""
    channels_by_recording: dict[str, list[str]] = {}
    for recording, channel in channels:
        channels_by_recording.setdefault(recording, []).append(channel)
    return channels_by_recording


def rttm_lines(recording: str, turns: Iterable["Turn"]) -> list[str]:
    """Format turns as `SPEAKER recording 1 start duration <NA> <NA> name <NA> <NA>`; `rttm_name`
    writes the name.
    """
    lines = []
    for turn in turns:
        times = f"{turn.start:.3f} {turn.stop - turn.start:.3f}"
        name = rttm_name(turn.speaker)
        lines.append(
            f"SPEAKER {recording} {ONLY_CHANNEL} {times} {UNSET} {UNSET} {name} {UNSET} {UNSET}"
        )
    return lines


def rttm_name(name: str) -> str:
    """A person's name as one word, different for different names: a space becomes `_`, and `_`
    becomes `%5F`.

    `urllib.parse.unquote(word.replace("_", " "))` gives the name back.

    >>> rttm_name("Zoë Lee"), rttm_name("Zoë_Lee"), rttm_name("100 %")
    ('Zoë_Lee', 'Zoë%5FLee', '100_%25')
    """
    # `quote` leaves `_` as it is.
    letters = {" ": "_", "_": "%5F", "%": "%25"}
    return "".join(
        letters.get(letter, quote(letter) if letter.isspace() else letter) for letter in name
    )


def _rows(
    path: Path, forms: Mapping[str, Callable[[list[str]], tuple]], expected: str
) -> Iterator[_Row]:
    """Read the lines of a file, or of all files with these suffixes below a folder."""
    files = _files_below(path, forms) if path.is_dir() else [path]
    if not files:
        raise FileError(f"{path}: no {' or '.join(forms)} file in this folder; expected {expected}")
    for file in files:
        with reading(file, expected), open_text(file) as text:
            lines = text.read().splitlines()
        # The first form is that of files with other suffixes.
        form = forms.get(file.suffix, next(iter(forms.values())))
        if form is _rttm_row and not any(line.strip() for line in lines):
            yield _Row(file, (file.stem.removesuffix(EXCLUSIVE), ONLY_CHANNEL), 0.0, 0.0, None)
        for number, line in enumerate(lines, start=1):
            columns = _columns(line)
            if not columns or columns[0].startswith(";;"):
                continue
            if form is _rttm_row and columns[0] in OTHER_TYPES:
                continue
            try:
                channel, start, stop, speaker = form(columns)
                _check_times(start, stop, may_be_empty=speaker is not None)
            except ValueError as error:
                raise FileError(
                    f"{file}, line {number}: {line[:100]!r}: {error}; expected {expected}"
                ) from None
            yield _Row(file, channel, start, stop, speaker)


def _files_below(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """The files of a folder, without the exclusive turns that `who` writes beside all turns."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in suffixes)
    names = {file.with_suffix("") for file in files}
    kept = []
    for file in files:
        everything = file.with_name(file.stem.removesuffix(EXCLUSIVE))
        if everything == file.with_suffix("") or everything not in names:
            kept.append(file)
    return kept


def _columns(line: str) -> list[str]:
    """The columns of a line: between tabs if there are at least three tabs, otherwise words."""
    # Names may contain spaces if tabs separate the columns; fewer than three tabs are strays.
    by_tabs = [column.strip() for column in line.strip().split("\t")]
    return by_tabs if len(by_tabs) > 3 else line.split()


def _rttm_row(columns: list[str]) -> tuple[Channel, float, float, str]:
    if columns[0] != "SPEAKER":
        raise ValueError(f"a line begins with {columns[0]!r}, not with SPEAKER")
    if len(columns) < 8:
        raise ValueError(f"{len(columns)} columns instead of 8 to 10")
    start, seconds = _numbers(columns[3:5])
    # Column 6 should be `<NA>`. A number there means that a space in the recording's name has moved
    # the columns, so every turn would get a wrong start and speaker.
    if _is_number(columns[5]):
        raise ValueError(
            f"three numbers follow each other, as if the recording's name had spaces ({NO_SPACES})"
        )
    # Two columns follow the name, or one in older files, so a name with spaces ends before them.
    name = columns[7:]
    for _ in range(2):
        if len(name) > 1 and (name[-1] == UNSET or _is_number(name[-1])):
            name.pop()
    return (columns[1], columns[2]), start, start + seconds, _speaker(name)


def _ctm_row(columns: list[str]) -> tuple[Channel, float, float, str]:
    if len(columns) < 8:
        raise ValueError(f"{len(columns)} columns instead of 8")
    start, seconds = _numbers(columns[2:4])
    # The speaker comes last, so the columns before it show whether a name with spaces moved them.
    is_moved = len(columns) > 8 and columns[6].lower() not in WORD_TYPES
    if is_moved or not (_is_number(columns[5]) or columns[5].upper() in UNKNOWN_CONFIDENCES):
        raise ValueError(
            "columns 6 and 7 are not confidence and type of word, so the columns are shifted "
            f"({NO_SPACES})"
        )
    return (columns[0], columns[1]), start, start + seconds, _speaker(columns[7:])


def _uem_row(columns: list[str]) -> tuple[Channel, float, float, None]:
    if len(columns) != 4:
        raise ValueError(f"{len(columns)} columns instead of 4 ({NO_SPACES})")
    start, stop = _numbers(columns[2:4])
    return (columns[0], columns[1]), start, stop, None


def _speaker(words: Sequence[str]) -> str:
    name = " ".join(words)
    if not name:
        raise ValueError("the column of the speaker is empty")
    return name


def _numbers(columns: Sequence[str]) -> list[float]:
    for column in columns:
        if not _is_number(column):
            raise ValueError(f"{column!r} is not a time in seconds ({NO_SPACES})")
    return [float(column) for column in columns]


def _is_number(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None


def _check_times(start: float, stop: float, *, may_be_empty: bool) -> None:
    is_long_enough = stop >= start if may_be_empty else stop > start
    if not (start >= 0 and np.isfinite(stop) and is_long_enough):
        raise ValueError(
            f"from {start:g} to {stop:g} s is not a time span that begins at 0 or later"
        )
