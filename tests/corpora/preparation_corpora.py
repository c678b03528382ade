"""Tiny corpora in the published layouts, made on the spot, and a way to run the scripts of data_prep/ in process."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import yaml

from speakernet.cli import main
from speakernet.data.audio import write_audio

SCRIPTS = Path(__file__).resolve().parents[2] / "data_prep"


def run_data_prep(name: str, *arguments: object) -> int:
    """Run a part of `speakernet prepare`, as its script in data_prep/ does, with these arguments; its exit code."""
    return main(["prepare", name, *map(str, arguments)])


def run_in_own_session(*arguments: str) -> None:
    """The same as a process that can be killed together with the ffmpeg that it started."""
    os.setsid()
    sys.exit(run_data_prep(*arguments))


def voice(speaker: int, utterance: int, seconds: float = 1.0) -> np.ndarray:
    """A crude voice, another pitch for every speaker; float32 (samples,) at 16 kHz."""
    times = np.arange(int(seconds * 16000)) / 16000
    random = np.random.default_rng([speaker, utterance])
    pitch = 80 + 15 * speaker + 3 * np.sin(2 * np.pi * 2 * times + random.random())
    phase = 2 * np.pi * np.cumsum(pitch) / 16000
    sound = sum(np.sin(k * phase + random.random()) / (1 + abs(k - 3 - speaker % 5)) for k in range(1, 12))
    return (0.1 * sound + 0.003 * random.standard_normal(len(times))).astype(np.float32)


def write_voices(root: Path, speakers: int, utterances: int, pattern: str, seconds: float = 1.0) -> list[str]:
    """Files named by `pattern` with {speaker} and {utterance}; their names relative to `root`."""
    names = []
    for speaker in range(speakers):
        for utterance in range(utterances):
            name = pattern.format(speaker=speaker, utterance=utterance)
            write_audio(root / name, voice(speaker, utterance, seconds), 16000)
            names.append(name)
    return names


def to_m4a(ffmpeg: str, source: Path, target: Path) -> None:
    """Encode a WAV as the m4a that VoxCeleb2 comes in."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [ffmpeg, "-nostdin", "-loglevel", "error", "-y", "-i", str(source), "-c:a", "aac", "-b:a", "48k"]
    subprocess.run([*command, str(target)], check=True)


def zip_tree(root: Path) -> bytes:
    """All files below `root` as one zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file():
                archive.writestr(path.relative_to(root).as_posix(), path.read_bytes())
    return buffer.getvalue()


def tar_tree(root: Path) -> bytes:
    """All files below `root` as one tar.gz archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file():
                archive.add(path, path.relative_to(root).as_posix())
    return buffer.getvalue()


def parts_of(whole: bytes, name: str, count: int) -> dict[str, bytes]:
    """The archive cut into `count` parts named NAMEaa, NAMEab, …"""
    size = -(-len(whole) // count)
    return {f"{name}a{'abcdefgh'[row]}": whole[row * size : (row + 1) * size] for row in range(count)}


def md5(content: bytes) -> str:
    """MD5 as hex."""
    return hashlib.md5(content).hexdigest()


def catalogue_entry(files: dict[str, bytes], joined: dict[str, tuple[list[str], bytes]] | None = None) -> dict:
    """One corpus of a table of sources."""
    return {
        "access": "ask the owner",
        "base_urls": [],
        "files": {name: {"md5": md5(content)} for name, content in files.items()},
        "joined": {name: {"md5": md5(whole), "parts": parts} for name, (parts, whole) in (joined or {}).items()},
    }


def write_catalogue(path: Path, address: str, corpora: dict[str, dict]) -> Path:
    """A table of sources whose files come from `address`."""
    for entry in corpora.values():
        entry["base_urls"] = [address + "/{name}"]
    path.write_text(yaml.safe_dump(corpora))
    return path
