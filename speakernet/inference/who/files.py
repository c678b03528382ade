"""A conversation in files: RTTM, JSON, one page that plays what is clicked, and names in a transcript."""

import base64
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.audio import encode_audio
from speakernet.files import FileError, atomic_write, open_text, reading
from speakernet.inference.recordings import Recording
from speakernet.inference.who.conversation import Conversation, Turn

PAGE = Path(__file__).with_name("page") / "who.html"
MOST_PAGE_SECONDS = 1800.0
"""The page holds the sound of a recording up to this length, about 30 MB of FLAC; of a longer one it names the file."""
CUE = re.compile(r"(\d+):(\d+):(\d+)[,.](\d+)\s*-->\s*(\d+):(\d+):(\d+)[,.](\d+)")
TRANSCRIPT_FORM = "words in JSON (`word`, `start`, `end` in seconds, in a list or in Whisper's segments), or a .srt"


def name_of(recording: str) -> str:
    """A recording's name in RTTM: its file's, without folder and ending."""
    return "_".join(Path(recording).stem.split())


def rttm_lines(name: str, turns: Sequence[Turn]) -> list[str]:
    """Turns as `SPEAKER file 1 start duration <NA> <NA> name <NA> <NA>`; spaces in names become underscores."""
    return [
        f"SPEAKER {name} 1 {turn.start:.3f} {turn.stop - turn.start:.3f} <NA> <NA> {'_'.join(turn.speaker.split())} "
        "<NA> <NA>"
        for turn in turns
    ]


def plain(found: Conversation) -> dict[str, Any]:
    """A conversation in plain values, for JSON."""
    speakers = [{k: v for k, v in vars(one).items() if k not in ("embedding", "digest")} for one in found.speakers]
    turns, exclusive = ([dataclasses.asdict(one) for one in some] for some in (found.turns, found.exclusive))
    facts = {"recording": found.recording, "seconds": found.seconds, "detector": found.detector}
    return {**facts, "speakers": speakers, "turns": turns, "exclusive": exclusive}


def page_of(found: Conversation, recording: Recording) -> str:
    """One HTML file: a timeline with a row for each speaker, and every turn; what is clicked is played."""
    if recording.seconds <= MOST_PAGE_SECONDS:
        sound = base64.b64encode(encode_audio(recording.read(), recording.sample_rate)).decode()
        source = f"data:audio/flac;base64,{sound}"
    else:
        source = recording.file.absolute().as_uri() if recording.file else ""
    # Names are data: no mark of theirs ends the script.
    data = json.dumps(plain(found), ensure_ascii=False).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("__AUDIO__", source).replace("__DATA__", data)


def write_files(
    folder: Path, found: Conversation, recording: Recording, transcript: Mapping[str, str] | None = None
) -> list[Path]:
    """Write everything, each file at once; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    name = name_of(found.recording)
    contents = {
        f"{name}.rttm": "".join(f"{line}\n" for line in rttm_lines(name, found.turns)),
        f"{name}.exclusive.rttm": "".join(f"{line}\n" for line in rttm_lines(name, found.exclusive)),
        f"{name}.json": json.dumps(plain(found), ensure_ascii=False, indent=1) + "\n",
        f"{name}.html": page_of(found, recording),
        **{f"{name}.transcript{suffix}": text for suffix, text in (transcript or {}).items()},
    }
    for file_name, content in contents.items():
        with atomic_write(folder / file_name) as file:
            file.write(content)
    return [folder / file_name for file_name in contents]


def read_transcript(path: Path) -> Any:
    """Words or cues as they stand in a `.json` or `.srt` file.

    Raises:
        FileError: another form; the message names the file.
    """
    with reading(path, TRANSCRIPT_FORM), open_text(path) as file:
        text = file.read()
    if path.suffix.lower() == ".srt":
        blocks = re.split(r"\n\s*\n", text.strip())
        if not all(CUE.search(block) for block in blocks):
            raise FileError(f"{path}: a block without `00:00:01,000 --> 00:00:02,000`; expected {TRANSCRIPT_FORM}")
        return blocks
    try:
        given = json.loads(text)
        if not all(float(word["end"]) >= float(word["start"]) for word in _words(given)):
            raise ValueError("a word ends before it starts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path}: {error!r}; expected {TRANSCRIPT_FORM}") from error
    return given


def _words(given: Any) -> list[dict[str, Any]]:
    """The words of a list, or of Whisper's segments, which count as words where they have none."""
    if isinstance(given, list):
        return given
    return [word for segment in given["segments"] for word in segment.get("words") or [segment]]


def named_transcript(given: Any, turns: Sequence[Turn]) -> dict[str, str]:
    """The transcript with a speaker for each word or cue: suffix of the file, and its text."""
    if isinstance(given, list) and given and isinstance(given[0], str):
        return {".srt": "\n\n".join(_named_cue(block, turns) for block in given) + "\n"}
    for word in _words(given):
        word["speaker"] = speaker_at(turns, float(word["start"]), float(word["end"]))
    return {".json": json.dumps(given, ensure_ascii=False, indent=1) + "\n"}


def _named_cue(block: str, turns: Sequence[Turn]) -> str:
    found = CUE.search(block)
    assert found is not None, "checked when it was read"
    hours, minutes, seconds, thousandths = np.array(found.groups(), dtype=int).reshape(2, 4).T
    start, stop = 3600 * hours + 60 * minutes + seconds + thousandths / 1000
    head, tail = block[: found.end()], block[found.end() :].lstrip()
    return f"{head}\n{speaker_at(turns, float(start), float(stop)) or 'nobody'}: {tail}"


def speaker_at(turns: Sequence[Turn], start: float, stop: float) -> str | None:
    """Who speaks most of so many seconds, else the nearest in time; None if nobody ever speaks.

    >>> turns = [Turn(0.0, 2.0, "Ada"), Turn(2.5, 4.0, "Bo")]
    >>> speaker_at(turns, 1.5, 2.6), speaker_at(turns, 2.3, 2.4)
    ('Ada', 'Bo')
    """
    if not turns:
        return None
    # Negative where they are apart: the largest is the nearest.
    shared = [min(stop, turn.stop) - max(start, turn.start) for turn in turns]
    return turns[int(np.argmax(shared))].speaker
