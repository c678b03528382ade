"""Write a conversation as RTTM, JSON and a page that plays what you click, and add names to a
transcript.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.audio import flac_address
from speakernet.files import FileError, atomic_write, open_text, reading, sha256_of
from speakernet.inference.recordings import Recording
from speakernet.inference.who.conversation import Conversation, Turn

SUFFIXES = (".rttm", ".exclusive.rttm", ".html", ".json")
WRITTEN = "written"
"""Key in the JSON of which recording the files describe, and their SHA-256."""
PAGE = Path(__file__).with_name("page") / "who.html"
MAX_PAGE_SECONDS = 1800.0
"""The page contains recordings up to this length (about 30 MB of FLAC) and links to the file of a
longer one."""
CUE = re.compile(r"(\d+):(\d+):(\d+)[,.](\d+)\s*-->\s*(\d+):(\d+):(\d+)[,.](\d+)")
TRANSCRIPT_FORM = (
    "words in JSON (`word`, `start`, `end` in seconds, as a list or in Whisper's "
    "segments), or a .srt"
)


def name_of(recording: str) -> str:
    """The name of a recording in RTTM: its file name without folder and suffix."""
    return "_".join(Path(recording).stem.split())


def rttm_lines(name: str, turns: Sequence[Turn]) -> list[str]:
    """Format turns as `SPEAKER file 1 start duration <NA> <NA> name <NA> <NA>`; spaces in names
    become underscores.
    """
    return [
        f"SPEAKER {name} 1 {turn.start:.3f} {turn.stop - turn.start:.3f} <NA> <NA> "
        f"{'_'.join(turn.speaker.split())} <NA> <NA>"
        for turn in turns
    ]


def plain(found: Conversation) -> dict[str, Any]:
    """Convert a conversation to plain values, for JSON."""
    return {
        "recording": found.recording,
        "seconds": found.seconds,
        "detector": found.detector,
        "speakers": [
            {
                name: value
                for name, value in vars(one).items()
                if name not in ("embedding", "digest")
            }
            for one in found.speakers
        ],
        "turns": [dataclasses.asdict(one) for one in found.turns],
        "exclusive": [dataclasses.asdict(one) for one in found.exclusive],
    }


def page_of(found: Conversation, recording: Recording) -> str:
    """An HTML page with a timeline (one row per speaker) and a table of turns; it plays what you
    click.
    """
    if recording.seconds <= MAX_PAGE_SECONDS:
        source = flac_address(recording.read(), recording.sample_rate)
    else:
        source = recording.file.absolute().as_uri() if recording.file else ""
    # A `<` in a name must not end the script.
    data = json.dumps(plain(found), ensure_ascii=False).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("__AUDIO__", source).replace("__DATA__", data)


def written_before(folder: Path, recording: str, suffixes: Sequence[str] = ()) -> dict[Path, bool]:
    """The files of a recording in a folder, and whether `write_files` wrote them for it and nobody
    changed them.

    The JSON holds the path of the recording and the SHA-256 of the other files. Another recording
    with the same name, and turns that were corrected by hand, are therefore not replaced.
    """
    name = name_of(recording)
    description = folder / f"{name}.json"
    known = dict[str, str]()
    # Anything may lie at this name; what is not our description does not vouch for any file.
    with contextlib.suppress(FileError, ValueError, KeyError, TypeError):
        with reading(description, "JSON of this command"), open_text(description) as file:
            written = json.load(file)[WRITTEN]
        if Path(written["recording"]) == Path(recording).absolute():
            known = {**written["files"], description.name: sha256_of(description)}
    paths = [folder / f"{name}{suffix}" for suffix in (*SUFFIXES, *suffixes)]
    return {path: path.is_file() and sha256_of(path) == known.get(path.name) for path in paths}


def write_files(
    folder: Path,
    found: Conversation,
    recording: Recording,
    transcript: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write all files, each one atomically; returns their paths."""
    name = name_of(found.recording)
    contents = {
        f"{name}.rttm": "".join(f"{line}\n" for line in rttm_lines(name, found.turns)),
        f"{name}.exclusive.rttm": "".join(
            f"{line}\n" for line in rttm_lines(name, found.exclusive)
        ),
        f"{name}.html": page_of(found, recording),
        **{f"{name}.transcript{suffix}": text for suffix, text in (transcript or {}).items()},
    }
    digests = {
        file_name: hashlib.sha256(content.encode()).hexdigest()
        for file_name, content in contents.items()
    }
    written = {"recording": str(Path(found.recording).absolute()), "files": digests}
    contents[f"{name}.json"] = (
        json.dumps({**plain(found), WRITTEN: written}, ensure_ascii=False, indent=1) + "\n"
    )
    for file_name, content in contents.items():
        with atomic_write(folder / file_name) as file:
            file.write(content)
    return [folder / file_name for file_name in contents]


def read_transcript(path: Path) -> Any:
    """Read the words or cues of a `.json` or `.srt` file.

    Raises:
        FileError: the file has a different form; the message names the file.
    """
    with reading(path, TRANSCRIPT_FORM), open_text(path) as file:
        text = file.read()
    if path.suffix.lower() == ".srt":
        blocks = re.split(r"\n\s*\n", text.strip())
        if not all(CUE.search(block) for block in blocks):
            raise FileError(
                f"{path}: a block has no `00:00:01,000 --> 00:00:02,000`; expected "
                f"{TRANSCRIPT_FORM}"
            )
        return blocks
    try:
        given = json.loads(text)
        if not all(float(word["end"]) >= float(word["start"]) for word in _words(given)):
            raise ValueError("a word ends before it starts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        raise FileError(
            f"{path}: not JSON with timed words{reason}; expected {TRANSCRIPT_FORM}"
        ) from error
    return given


def _words(given: Any) -> list[dict[str, Any]]:
    """The words of a list or of Whisper's segments; a segment without words counts as one word."""
    if isinstance(given, list):
        return given
    return [word for segment in given["segments"] for word in segment.get("words") or [segment]]


def named_transcript(given: Any, turns: Sequence[Turn]) -> dict[str, str]:
    """Add a speaker to each word or cue; returns the text by file suffix."""
    if isinstance(given, list) and given and isinstance(given[0], str):
        return {".srt": "\n\n".join(_named_cue(block, turns) for block in given) + "\n"}
    for word in _words(given):
        word["speaker"] = speaker_at(turns, float(word["start"]), float(word["end"]))
    return {".json": json.dumps(given, ensure_ascii=False, indent=1) + "\n"}


def _named_cue(block: str, turns: Sequence[Turn]) -> str:
    found = CUE.search(block)
    assert found is not None, "`read_transcript` checks it"
    hours, minutes, seconds, thousandths = np.array(found.groups(), dtype=int).reshape(2, 4).T
    start, stop = 3600 * hours + 60 * minutes + seconds + thousandths / 1000
    head = block[: found.end()]
    tail = block[found.end() :].lstrip()
    return f"{head}\n{speaker_at(turns, float(start), float(stop)) or 'nobody'}: {tail}"


def speaker_at(turns: Sequence[Turn], start: float, stop: float) -> str | None:
    """Who speaks most between `start` and `stop`, or the speaker nearest in time; None if there are
    no turns.

    >>> turns = [Turn(0.0, 2.0, "Ada"), Turn(2.5, 4.0, "Bo")]
    >>> speaker_at(turns, 1.5, 2.6), speaker_at(turns, 2.3, 2.4)
    ('Ada', 'Bo')
    """
    if not turns:
        return None
    # Negative if they do not overlap, so that the largest is the nearest.
    shared = [min(stop, turn.stop) - max(start, turn.start) for turn in turns]
    return turns[int(np.argmax(shared))].speaker
