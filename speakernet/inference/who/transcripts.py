"""Add speakers to a transcript: Whisper's JSON and that of its relatives, lists of words, and .srt
subtitles.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.files import FileError, open_text, reading
from speakernet.inference.who.conversation import Turn

TIME = r"(?<!\d)(\d{1,3}):(\d{1,2}):(\d{1,2})[,.](\d{1,9})(?!\d)"
CUE = re.compile(rf"{TIME}\s*-->\s*{TIME}")
TIMED_LISTS = ("segments", "words", "word_segments")
"""Lists at the top of Whisper's JSON: its own segments (with their words), OpenAI's words,
WhisperX's words."""
EXPECTED = (
    "words in JSON (`word`, `start`, `end` in seconds, as a list or in Whisper's segments), or a "
    ".srt with times such as `00:00:01,000 --> 00:00:02,000`"
)


@dataclass(frozen=True)
class Transcript:
    """The content of a transcript: blocks of text of a `.srt`, otherwise the value of the JSON
    file.
    """

    suffix: str
    content: Any


class SpeakerTimes:
    """Finds who speaks most in a stretch of time.

    >>> times = SpeakerTimes([Turn(0.0, 2.0, "Ada"), Turn(2.0, 5.0, "Bo"), Turn(5.0, 7.5, "Ada")])
    >>> times.between(0.0, 7.5), times.between(1.5, 2.1), times.between(9.0, 9.5)
    ('Ada', 'Ada', 'Ada')
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        names = list(dict.fromkeys(turn.speaker for turn in turns))
        self._names = names
        self._starts = np.array([turn.start for turn in turns])
        self._stops = np.array([turn.stop for turn in turns])
        self._speakers = np.array([names.index(turn.speaker) for turn in turns], dtype=np.int64)

    def between(self, start: float, stop: float) -> str | None:
        """Who speaks most between `start` and `stop`, or the speaker nearest in time; None if
        nobody speaks at all.
        """
        if not self._names:
            return None
        # Seconds that each turn overlaps with the stretch; below 0 for the gap between them.
        overlaps = np.minimum(self._stops, stop) - np.maximum(self._starts, start)
        seconds = np.bincount(self._speakers, weights=np.maximum(overlaps, 0.0))
        speaker = seconds.argmax()
        if seconds[speaker] == 0:
            # A word may lie in a pause, because two programs disagree about where words end; then
            # the nearest speaker is the best guess.
            speaker = self._speakers[overlaps.argmax()]
        return self._names[speaker]


def read_transcript(path: Path) -> Transcript:
    """Read the words or cues of a `.json` or `.srt` file.

    Raises:
        FileError: the file has a different form; the message names the file.
    """
    with reading(path, EXPECTED), open_text(path) as file:
        text = file.read()
        if path.suffix.lower() == ".srt":
            # Blank lines separate cues; the lines within a cue are kept unchanged.
            blocks = re.split(r"\n\s*\n", text.strip())
            for number, block in enumerate(blocks, start=1):
                if not CUE.search(block):
                    raise FileError(
                        f"{path}: block {number}, {block[:50]!r}, has no times; expected {EXPECTED}"
                    )
            return Transcript(".srt", blocks)
        content = json.loads(text)
        _check(content)
    return Transcript(".json", content)


def label_transcript(transcript: Transcript, turns: Sequence[Turn]) -> str:
    """The text of the transcript with a speaker for each segment and word, or for each cue."""
    times = SpeakerTimes(turns)
    if transcript.suffix == ".srt":
        return "\n\n".join(_label_cue(block, times) for block in transcript.content) + "\n"
    # Segments come before their words, so a word without times can take its segment's speaker.
    for elements, parent in _lists(transcript.content):
        _label(elements, times, None if parent is None else parent["speaker"])
    return json.dumps(transcript.content, ensure_ascii=False, indent=1) + "\n"


def _lists(content: Any) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any] | None]]:
    """Each list of segments or words, with the segment if it is the words of one; segments come
    before their words.
    """
    if isinstance(content, list):
        yield content, None
        return
    for name in TIMED_LISTS:
        elements = content.get(name) or []
        yield elements, None
        # Only segments have words.
        for element in elements:
            yield element.get("words") or [], element


def _check(content: Any) -> None:
    """Refuse JSON in which no list has times, or in which an element has one of its two times."""
    if isinstance(content, dict) and not content.keys() & set(TIMED_LISTS):
        raise ValueError(f"none of the lists {', '.join(TIMED_LISTS)}")
    elements = [element for group, _ in _lists(content) for element in group]
    times = [_times(element) for element in elements]
    if elements and not any(times):
        raise ValueError("no segment or word has a time")


def _times(element: dict[str, Any]) -> tuple[float, float] | None:
    """Start and end of a segment or word; None if it has neither, as WhisperX leaves numbers and
    symbols.
    """
    start = element.get("start")
    end = element.get("end")
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise ValueError(f"{str(element)[:60]} has only one of `start` and `end`")
    start, end = float(start), float(end)
    if not (math.isfinite(start) and end >= start):
        raise ValueError(f"{str(element)[:60]} ends before it starts")
    return start, end


def _label(elements: list[dict[str, Any]], times: SpeakerTimes, default: str | None) -> None:
    """Write the speaker into each element; one without times gets that of the element before it, or
    of the next, or `default`.
    """
    speakers = []
    for element in elements:
        stretch = _times(element)
        speakers.append(None if stretch is None else times.between(*stretch))
    # Words before the first one with times go to the first speaker.
    latest = next((speaker for speaker in speakers if speaker is not None), default)
    for element, speaker in zip(elements, speakers, strict=True):
        if speaker is not None:
            latest = speaker
        element["speaker"] = latest


def _label_cue(block: str, times: SpeakerTimes) -> str:
    cue_times = CUE.search(block)
    assert cue_times is not None, "`read_transcript` checks it"
    start = _seconds(cue_times.groups()[:4])
    stop = _seconds(cue_times.groups()[4:])
    head = block[: cue_times.end()]
    tail = block[cue_times.end() :].lstrip()
    return f"{head}\n{times.between(start, stop) or 'nobody'}: {tail}"


def _seconds(groups: Sequence[str]) -> float:
    """Seconds from the hours, minutes, seconds and decimals of a time."""
    hours, minutes, seconds, decimals = groups
    return 3600 * int(hours) + 60 * int(minutes) + float(f"{seconds}.{decimals}")
