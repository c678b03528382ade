"""Tiny corpora in the published layouts, and a function that runs the scripts of data_prep/ in this
process.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import yaml

from speakernet.cli import main
from speakernet.data.audio import write_audio
from tests.conftest import REPOSITORY
from tests.conftest import tiny_voice as voice

PATTERN = "spk{speaker}/{utterance}.wav"
SCRIPTS = REPOSITORY / "data_prep"


def run_data_prep(name, *arguments, status=0):
    """Run a part of `speakernet prepare`, as its script in data_prep/ does; it must end with this
    status. An argument that is text may hold several words.
    """
    words = ["prepare", name]
    for argument in arguments:
        words += argument.split() if isinstance(argument, str) else [str(argument)]
    ended = main(words)
    assert ended == status, f"status {ended}: {words}"


def run_in_own_session(*arguments):
    """`run_data_prep` in its own session, so that it can be killed together with its ffmpeg."""
    os.setsid()
    run_data_prep(*arguments)


def write_voices(root, speakers, utterances, pattern=PATTERN, seconds=0.6, take=0):
    """Write files named by `pattern` with {speaker} and {utterance}; returns their names relative
    to `root`. Another `take` (10, 20, …) gives other recordings of the same voices.
    """
    names = []
    for speaker in range(speakers):
        for utterance in range(utterances):
            name = pattern.format(speaker=speaker, utterance=utterance)
            write_audio(root / name, voice(speaker, take + utterance, seconds))
            names.append(name)
    return names


def to_m4a(ffmpeg, source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    options = "-c:a aac -b:a 48k"
    command = [ffmpeg, "-nostdin", "-loglevel", "error", "-y", "-i", str(source)]
    subprocess.run([*command, *options.split(), str(target)], check=True)


def archive_of(root, kind):
    """The content of an archive of a folder, `zip` or `gztar`."""
    return Path(shutil.make_archive(f"{root}-{kind}", kind, root)).read_bytes()


def parts_of(whole, name, count):
    """The archive cut into `count` parts named NAMEaa, NAMEab, …"""
    size = -(-len(whole) // count)
    return {
        f"{name}a{'abcdefgh'[row]}": whole[row * size : (row + 1) * size] for row in range(count)
    }


def md5(content):
    return hashlib.md5(content).hexdigest()


def catalogue_entry(files, joined=None):
    return {
        "access": "ask the owner",
        "base_urls": [],
        "files": {name: {"md5": md5(content)} for name, content in files.items()},
        "joined": {
            name: {"md5": md5(whole), "parts": parts}
            for name, (parts, whole) in (joined or {}).items()
        },
    }


def write_catalogue(path, address, corpora):
    """Write a catalogue whose files come from `address`."""
    for entry in corpora.values():
        entry["base_urls"] = [address + "/{name}"]
    path.write_text(yaml.safe_dump(corpora))
    return path


TRIALS = (
    b"1 id10040/video0/00000.wav id10040/video0/00001.wav\n0 id10040/video0/00000.wav "
    b"id10041/video0/00000.wav\n"
    b"1 id10041/video0/00000.wav id10041/video0/00001.wav\n"
)


class Published(NamedTuple):
    """The files of a source of VoxCeleb, its lists, MUSAN and RIRS_NOISES, and their catalogue
    entries.
    """

    files: dict[str, bytes]
    corpora: dict[str, dict]


def publish(root, ffmpeg, copies=1):
    """Tiny archives in the published layouts, VoxCeleb's development sets in parts; each m4a
    `copies` times.
    """
    below = "video0/{utterance:05}.wav"
    write_voices(root / "vox1_dev", 3, 3 * copies, f"wav/id1000{{speaker}}/{below}", 1.2)
    write_voices(root / "vox1_test", 2, 2, f"wav/id1004{{speaker}}/{below}", 1.2)
    for name in write_voices(root / "plain", 4, 3, f"id0000{{speaker}}/{below}", 1.2):
        for folder in ("vox2_dev/dev/aac", "vox2_test/aac"):
            target = root / folder / name.replace(".wav", ".m4a")
            to_m4a(ffmpeg, root / "plain" / name, target)
            for copy in range(1, copies):
                target.with_name(f"{copy}{target.name}").write_bytes(target.read_bytes())
    write_voices(root / "musan", 2, 1, "musan/noise/free{speaker}/{utterance}.wav", 6.0 * copies)
    write_voices(
        root / "rirs",
        2,
        2,
        "RIRS_NOISES/simulated_rirs/smallroom/Room00{speaker}/{utterance}.wav",
        0.2,
    )
    write_voices(
        root / "rirs",
        1,
        1,
        "RIRS_NOISES/real_rirs_isotropic_noises/RWCP_rir_{speaker}_{utterance}.wav",
        0.2,
    )
    whole = {
        kind: archive_of(root / kind, "zip")
        for kind in ("vox1_dev", "vox1_test", "vox2_dev", "vox2_test")
    }
    vox1 = parts_of(whole["vox1_dev"], "vox1_dev_wav_part", 4)
    vox2 = parts_of(whole["vox2_dev"], "vox2_dev_aac_part", 8)
    archives = {
        **vox1,
        **vox2,
        "vox1_test_wav.zip": whole["vox1_test"],
        "vox2_test_aac.zip": whole["vox2_test"],
    }
    joined = {
        "vox1_dev_wav.zip": (list(vox1), whole["vox1_dev"]),
        "vox2_dev_aac.zip": (list(vox2), whole["vox2_dev"]),
    }
    lists = {"veri_test.txt": TRIALS, "veri_test2.txt": TRIALS}
    musan = {"musan.tar.gz": archive_of(root / "musan", "gztar")}
    rirs = {"rirs_noises.zip": archive_of(root / "rirs", "zip")}
    corpora = {
        "voxceleb": catalogue_entry(archives, joined),
        "voxceleb_trials": catalogue_entry(lists),
    }
    corpora |= {"musan": catalogue_entry(musan), "rirs": catalogue_entry(rirs)}
    return Published(archives | lists | musan | rirs, corpora)
