"""SIGKILL at random moments of every step of a preparation: the next run ends like an undisturbed
one.
"""

import contextlib
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from preparation_corpora import TRIALS, publish, run_in_own_session, write_catalogue
from preparation_server import fake_source

# The first file of each step: download, unpack, cut, join, unpack, convert, link.
SIGNS = (
    "musan.tar.gz.part",
    "musan",
    "musan_split",
    "rirs_noises.zip",
    "vox1_dev_wav_partaa",
    "vox1_dev_wav.zip",
    "voxceleb1/dev",
    "voxceleb2/dev/wav",
    "voxceleb1/wav",
)
RANDOM = np.random.default_rng(20260101)
pytestmark = pytest.mark.slow


def tree(folder):
    """All files by name, without records, locks and summaries of the last run."""
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {
        name: path.read_bytes()
        for name, path in files.items()
        if ".prep" not in name and name != "summary.txt"
    }


def run_until(folder, table, lists, sign=""):
    """Run in a process that is killed at a random moment after `sign` appears; returns whether it
    was killed.
    """
    line = f"--save_path {folder} --catalogue {table} --lists_from {lists} --jobs 2"
    context = multiprocessing.get_context("forkserver")
    # Makes processes start immediately.
    context.set_forkserver_preload(["speakernet.corpora.voxceleb", "preparation_corpora"])
    words = ("voxceleb", "--all --augment", line)
    process = context.Process(target=run_in_own_session, args=words)
    process.start()
    while sign and process.is_alive() and not (folder / sign).exists():
        time.sleep(0.001)
    process.join(RANDOM.uniform(0, 0.05) if sign else 300)
    was_killed = process.is_alive()
    if was_killed:
        # Kills its ffmpeg too, which would go on writing; before the process has its own session,
        # there is no ffmpeg.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()
    assert was_killed or process.exitcode == 0
    return was_killed


def test_kills(tmp_path, ffmpeg):
    files, corpora = publish(tmp_path / "made", ffmpeg, copies=6)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "veri_test2.txt").write_bytes(TRIALS)
    with fake_source(files, behaviour="slow") as source:
        table = write_catalogue(tmp_path / "table.yaml", source.address, corpora)
        assert not run_until(tmp_path / "straight", table, tmp_path / "lists")
        expected = tree(tmp_path / "straight")
        assert sum(name.endswith(".wav") for name in expected) > 200
        kills = 0
        for sign in SIGNS:
            kills += run_until(tmp_path / "killed", table, tmp_path / "lists", sign)
            check_finished_files(tmp_path / "killed", expected)
        assert kills >= len(SIGNS) - 2
        assert not run_until(tmp_path / "killed", table, tmp_path / "lists")
        assert tree(tmp_path / "killed") == expected


def check_finished_files(folder, expected):
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.name.startswith(".") and name in expected:
            assert path.read_bytes() == expected[name], name
