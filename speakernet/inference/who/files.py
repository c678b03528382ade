"""Write a conversation as RTTM, JSON and a page that plays what you click."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speakernet.data.audio import flac_address
from speakernet.files import atomic_write
from speakernet.inference.recordings import Recording
from speakernet.inference.who.conversation import Conversation
from speakernet.inference.who.rttm import EXCLUSIVE, rttm_lines

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
        f"{name}.json": json.dumps(plain(found), ensure_ascii=False, indent=1) + "\n",
        f"{name}.html": page_of(found, recording),
        **{f"{name}.transcript{suffix}": text for suffix, text in (transcript or {}).items()},
    }
    for file_name, content in contents.items():
        with atomic_write(folder / file_name) as file:
            file.write(content)
    return [folder / file_name for file_name in contents]
