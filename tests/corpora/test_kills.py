"""SIGKILL at random moments in download, join, extract, convert and split: the next run ends as an undisturbed one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from preparation_corpora import (
    SCRIPTS,
    catalogue_entry,
    parts_of,
    tar_tree,
    to_m4a,
    write_catalogue,
    write_voices,
    zip_tree,
)
from preparation_server import played_source

from speakernet.files import RUNNING_NAME

NUM_KILLS = 20
# A new folder after so many, so that early and late steps are hit alike.
KILLS_PER_FOLDER = 5
START_SECONDS = 120
pytestmark = pytest.mark.slow


def tree(folder: Path) -> dict[str, bytes]:
    """Everything that is kept, by name; notes, locks and summaries of the last run aside."""
    kept = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(".prep") and "/.prep" not in name and path.name != "summary.txt":
            kept[name] = path.read_bytes()
    return kept


def start(folder: Path, table: Path, lists: Path) -> subprocess.Popen[bytes]:
    options = ["--all", "--augment", "--save_path", folder, "--catalogue", table, "--lists_from", lists, "--jobs", 2]
    command = [sys.executable, SCRIPTS / "voxceleb.py", *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder.parent / "stderr.txt").open("wb") as log:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)


def phase(folder: Path) -> str:
    """How far a run came: the folders and files that its steps have begun to leave."""
    return " ".join(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))


def wait_until_running(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until the folder is held: a kill during the imports would test nothing."""
    begin, end = time.time(), time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        # One that a killed run left has an older time.
        with contextlib.suppress(FileNotFoundError):
            if (folder / RUNNING_NAME).stat().st_mtime > begin:
                return
        time.sleep(0.01)


def publish(root: Path, ffmpeg: str) -> tuple[dict[str, bytes], dict[str, dict]]:
    write_voices(root / "vox1_dev", 4, 40, "wav/id1000{speaker}/video0/000{utterance:02}.wav", 0.5)
    write_voices(root / "vox1_test", 1, 10, "wav/id1004{speaker}/video0/0000{utterance}.wav", 0.5)
    names = write_voices(root / "plain", 4, 3, "id0000{speaker}/video0/0000{utterance}.wav", 0.5)
    for name in names:
        target = root / "vox2_dev/dev/aac" / name.replace(".wav", ".m4a")
        to_m4a(ffmpeg, root / "plain" / name, target)
        for copy in range(20):
            target.with_name(f"1{copy:02}{target.name}").write_bytes(target.read_bytes())
        short = root / "vox2_test/aac" / name.replace(".wav", ".m4a")
        short.parent.mkdir(parents=True, exist_ok=True)
        short.write_bytes(target.read_bytes())
    write_voices(root / "musan_made", 3, 2, "musan/noise/free{speaker}/{utterance}.wav", 60.0)
    write_voices(root / "rirs_made", 2, 20, "RIRS_NOISES/simulated_rirs/room{speaker}/{utterance}.wav", 0.3)
    whole = {kind: zip_tree(root / kind) for kind in ("vox1_dev", "vox1_test", "vox2_dev", "vox2_test")}
    vox1, vox2 = (
        parts_of(whole["vox1_dev"], "vox1_dev_wav_part", 4),
        parts_of(whole["vox2_dev"], "vox2_dev_aac_part", 8),
    )
    archives = {**vox1, **vox2, "vox1_test_wav.zip": whole["vox1_test"], "vox2_test_aac.zip": whole["vox2_test"]}
    joined = {
        "vox1_dev_wav.zip": (list(vox1), whole["vox1_dev"]),
        "vox2_dev_aac.zip": (list(vox2), whole["vox2_dev"]),
    }
    musan, rirs = {"musan.tar.gz": tar_tree(root / "musan_made")}, {"rirs_noises.zip": zip_tree(root / "rirs_made")}
    corpora = {
        "voxceleb": catalogue_entry(archives, joined),
        "voxceleb_trials": catalogue_entry({"veri_test2.txt": b"1 a/b/c.wav a/b/d.wav\n0 a/b/c.wav e/f/g.wav\n"}),
        "musan": catalogue_entry(musan),
        "rirs": catalogue_entry(rirs),
    }
    return archives | musan | rirs, corpora


def test_twenty_kills_and_a_last_run_give_the_undisturbed_result(tmp_path, ffmpeg):
    files, corpora = publish(tmp_path / "made", ffmpeg)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "veri_test2.txt").write_text("1 a/b/c.wav a/b/d.wav\n0 a/b/c.wav e/f/g.wav\n")
    random = np.random.default_rng(20260101)
    kills, runs, rounds = 0, 0, 0
    phases: Counter[str] = Counter()
    with played_source(files, behaviour="steady") as source:
        table = write_catalogue(tmp_path / "table.yaml", source.address, corpora)
        process = start(tmp_path / "straight", table, tmp_path / "lists")
        wait_until_running(process, tmp_path / "straight")
        began = time.monotonic()
        assert process.wait(300) == 0
        seconds = time.monotonic() - began
        expected = tree(tmp_path / "straight")
        assert sum(name.endswith(".wav") for name in expected) > 500
        while kills < NUM_KILLS:
            rounds += 1
            folder = tmp_path / f"killed{rounds}"
            while True:
                process = start(folder, table, tmp_path / "lists")
                runs += 1
                wait_until_running(process, folder)
                if kills < rounds * KILLS_PER_FOLDER:
                    time.sleep(random.uniform(0, 0.8 * seconds))
                    if process.poll() is None:
                        process.send_signal(signal.SIGKILL)
                        process.wait()
                        kills += 1
                        phases[phase(folder)] += 1
                        check_finished_files(folder, expected)
                        continue
                assert process.wait(300) == 0
                break
            assert tree(folder) == expected
    print(f"{kills} kills in {runs} runs over {rounds} folders: {dict(phases)}; undisturbed: {seconds:.1f} s")
    assert len(phases) >= 3, f"the kills fell into too few steps: {phases}"


def check_finished_files(folder: Path, expected: dict[str, bytes]) -> None:
    """Every audio file, archive and list under a final name is whole at any moment."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.name.startswith(".") and name in expected:
            assert path.read_bytes() == expected[name], name
