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
"""Key in the JSON of the recording's path and the SHA-256 of every other file."""
PAGE = Path(__file__).with_name("page") / "who.html"
MAX_PAGE_SECONDS = 1800.0
"""The page contains recordings up to this length (about 30 MB of FLAC) and links to the file of a
longer one."""


def name_of(recording: str) -> str:
    """The name of a recording in RTTM: its file name without folder and suffix."""
    return "_".join(Path(recording).stem.split())


def to_plain(conversation: Conversation) -> dict[str, Any]:
    """Convert a conversation to plain values, for JSON."""
    content = dataclasses.asdict(conversation)
    for speaker in content["speakers"]:
        del speaker["embedding"]
    return content


def page_of(conversation: Conversation, recording: Recording) -> str:
    """An HTML page with a timeline (one row per speaker) and a table of turns; it plays what you
    click.
    """
    # Sound inside the page also plays from a mail attachment; a link would only work on this
    # computer.
    source = ""
    if recording.seconds <= MAX_PAGE_SECONDS:
        source = flac_address(recording.read(), recording.sample_rate)
    elif recording.file:
        source = recording.file.absolute().as_uri()
    # A `<` in a name must not end the script.
    data = json.dumps(to_plain(conversation), ensure_ascii=False).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("__AUDIO__", source).replace("__DATA__", data)


def find_outputs(folder: Path, recording: str, further_suffixes: Sequence[str]) -> dict[Path, bool]:
    """The files of a recording in a folder, each with whether `write_files` wrote it for this
    recording and nobody changed it since.

    The JSON holds the path of the recording and the SHA-256 of the other files. Another recording
    with the same name, and turns that were corrected by hand, are therefore not replaced.
    """
    name = name_of(recording)
    description = folder / f"{name}.json"
    known = dict[str, str]()
    # Any file may have this name; if it is not a description of ours, no file counts as written.
    with contextlib.suppress(FileError, ValueError, KeyError, TypeError):
        with reading(description, "JSON of this command"), open_text(description) as file:
            written = json.load(file)[WRITTEN]
        if Path(written["recording"]) == Path(recording).absolute():
            known = {**written["files"], description.name: sha256_of(description)}
    paths = [folder / f"{name}{suffix}" for suffix in (*SUFFIXES, *further_suffixes)]
    return {path: path.is_file() and sha256_of(path) == known.get(path.name) for path in paths}


def write_files(
    folder: Path,
    conversation: Conversation,
    recording: Recording,
    transcript: Mapping[str, str] | None,
) -> list[Path]:
    """Write all files, each one atomically; returns their paths."""
    name = name_of(conversation.recording)
    contents = {
        f"{name}.rttm": _join_lines(rttm_lines(name, conversation.turns)),
        f"{name}{EXCLUSIVE}.rttm": _join_lines(rttm_lines(name, conversation.exclusive)),
        f"{name}.html": page_of(conversation, recording),
    }
    for suffix, text in (transcript or {}).items():
        contents[f"{name}.transcript{suffix}"] = text
    digests = {}
    for file_name, content in contents.items():
        digests[file_name] = hashlib.sha256(content.encode()).hexdigest()
    written = {"recording": str(Path(conversation.recording).absolute()), "files": digests}
    description = {**to_plain(conversation), WRITTEN: written}
    # Written last, so that every file it lists exists.
    contents[f"{name}.json"] = json.dumps(description, ensure_ascii=False, indent=1) + "\n"
    paths = []
    for file_name, content in contents.items():
        paths.append(folder / file_name)
        with atomic_write(paths[-1]) as file:
            file.write(content)
    return paths


def _join_lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
