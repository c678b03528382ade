"""The commands and examples of docs/use.md and README.md, run as written."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.inference.test_commands_of_use import with_other_bias


def blocks(page, language):
    return re.findall(
        rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )


@pytest.mark.slow
def test_commands_and_examples(repository, voices, uncalibrated, tmp_path, monkeypatch, call):
    page = repository / "docs" / "use.md"
    monkeypatch.chdir(tmp_path)
    shutil.copy(uncalibrated, "best.pt")
    shutil.copytree(voices, "my_voices")
    Path("my_voices/trials.txt").unlink()
    with_other_bias(uncalibrated, Path("new.pt"))
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert len(lines) >= 14
    for line in lines:
        program, command, _ = line.split(maxsplit=2)
        status, out, _ = call(line.removeprefix(program))
        assert program == "speakernet" and status <= (command == "verify"), line
        assert command != "identify" or re.match(r"(Ada|unknown|s\d\d) score \d", out)
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block, "docs/use.md", "exec"), names)
    assert names["embeddings"].shape == (2, 11) and len(names["track"].start_seconds) == 3


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
