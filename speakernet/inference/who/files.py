"""Write a conversation as RTTM, JSON and a page that plays what you click."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakernet.data.audio import flac_address
from speakernet.files import FileError, atomic_write, open_text, reading, sha256_of
from speakernet.inference.recordings import Recording
from speakernet.inference.who.conversation import Conversation
from speakernet.inference.who.rttm import EXCLUSIVE, rttm_lines

SUFFIXES = (".rttm", f"{EXCLUSIVE}.rttm", ".html", ".json")
WRITTEN = "written"
"""Key in the JSON of which recording the files describe, and their SHA-256."""
PAGE = Path(__file__).with_name("page") / "who.html"
MAX_PAGE_SECONDS = 1800.0
"""The page contains recordings up to this length (about 30 MB of FLAC) and links to the file of a
longer one."""


def name_of(recording: str) -> str:
    """The name of a recording in RTTM: its file name without folder and suffix."""
    return "_".join(Path(recording).stem.split())


def plain(found: Conversation) -> dict[str, Any]:
    """Convert a conversation to plain values, for JSON."""
    return {
        "recording": found.recording,
        "seconds": found.seconds,
        "detector": found.detector,
        "speakers": [
            {
                name: value
                for name, value in vars(speaker).items()
                if name not in ("embedding", "digest")
            }
            for speaker in found.speakers
        ],
        "turns": [dataclasses.asdict(turn) for turn in found.turns],
        "exclusive": [dataclasses.asdict(turn) for turn in found.exclusive],
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
        f"{name}{EXCLUSIVE}.rttm": "".join(
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
