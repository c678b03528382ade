"""The commands and examples of docs/use.md and README.md, run as written."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.cli import main
from speakernet.data.audio import write_audio
from speakernet.data.ffmpeg import find_ffmpeg


def blocks(page, language):
    return re.findall(
        rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )


@pytest.mark.slow
def test_commands_and_examples(repository, voices, uncalibrated, tmp_path, monkeypatch, capsys):
    page = repository / "docs" / "use.md"
    monkeypatch.chdir(tmp_path)
    shutil.copy(uncalibrated, "best.pt")
    shutil.copytree(voices, "my_voices")
    Path("my_voices/trials.txt").unlink()
    other = read_checkpoint(uncalibrated)
    other["weights"]["embedding.bias"] += 0.1
    write_checkpoint("new.pt", other)
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert len(lines) >= 14
    for line in lines:
        program, *words = shlex.split(line)
        status = main(words)
        out = capsys.readouterr().out
        assert program == "speakernet" and status in ((0, 1) if words[0] == "verify" else (0,)), (
            line
        )
        assert words[0] != "identify" or re.match(r"(Ada|unknown|s\d\d) score \d", out)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, "docs/use.md", "exec"), names)
    assert names["embeddings"].shape == (2, 11) and len(names["track"].start_seconds) == 3


def test_first_commands_on_a_folder_of_people(
    repository, speak, uncalibrated, tmp_path, monkeypatch, capsys
):
    """Eight people, six recordings each, in several formats; a silent one and a copy."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(uncalibrated, "best.pt")
    people = ["anna", "ben", "Cléo", "dan smith", "eva", "fred", "gül", "hal"]
    for speaker, person in enumerate(people):
        for number in range(6):
            write_audio(Path(f"my_voices/{person}/{number}.wav"), speak(speaker, number), 16000)
    for name in ("ben/1.mp3", "Cléo/réunion 2.m4a"):
        source = Path("my_voices", name).with_name(f"{name[-5]}.wav")
        options = ["-nostdin", "-loglevel", "error", "-i", source, Path("my_voices", name)]
        subprocess.run([find_ffmpeg(), *options], check=True)
        source.unlink()
    write_audio(Path("my_voices/eva/silent.wav"), np.zeros(48000), 16000)
    shutil.copy("my_voices/fred/0.wav", "my_voices/fred/copy of 0.wav")
    prepare, calibrate, info = blocks(repository / "docs" / "use.md", "sh")[0].splitlines()
    assert main(shlex.split(prepare)[1:]) == 1, "one recording is silent"
    assert "eva/silent.wav" in Path("data/my_voices/summary.txt").read_text()
    without_audio = calibrate.partition(" --audio")[0]
    assert main(shlex.split(without_audio)[1:]) == 1 and "--audio" in capsys.readouterr().err
    assert main(shlex.split(calibrate)[1:]) == 0
    assert "1,128 trials, 120 of them targets" in capsys.readouterr().out
    assert main(shlex.split(info)[1:]) == 0 and "far_1%" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "docs/models.md"])
def test_examples_in_python(page, repository, voices, calibrated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("exps/exp01").mkdir(parents=True)
    shutil.copy(calibrated, "exps/exp01/best.pt")
    shutil.copy(voices / "s00/3.wav", "a.wav")
    shutil.copy(voices / "s00/4.wav", "b.wav")
    # Examples with other published models need the hub; tests/assembly/test_published.py has a
    # server for them.
    Path("3dspeaker").mkdir()
    shutil.copy(calibrated, "3dspeaker/campplus-zh-en")
    is_playable = re.compile(r'speakernet\.load\("(exps/|3dspeaker/campplus-zh-en)').search
    examples = [block for block in blocks(repository / page, "python") if is_playable(block)]
    samples = 0.1 * np.random.default_rng(0).standard_normal(16000)
    names = {"waveform": samples.astype(np.float32), "features": torch.randn(2, 80, 24)}
    assert examples
    for block in examples:
        exec(compile(block, page, "exec"), names)
