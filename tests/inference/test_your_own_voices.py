"""Run the cells of `your_own_voices.ipynb` in order, on synthetic voices with a small model."""

import itertools
import json
import re
import shutil
from typing import Any

import pytest
from matplotlib.figure import Figure

from speakernet.data.audio import write_audio
from tests.test_first_hour import shown_by, sources


@pytest.mark.slow
def test_cells(repository, speak, uncalibrated, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for speaker, number in itertools.product(range(18), range(4)):
        folder = tmp_path / "my_voices" / f"s{speaker:02d}" / f"day{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        write_audio(folder / f"{number}.wav", speak(speaker, number))
    (tmp_path / "own_voices").mkdir()
    shutil.copy(uncalibrated, tmp_path / "own_voices" / "model.pt")
    names: dict[str, Any] = {}
    cells = sources(repository / "examples" / "your_own_voices.ipynb", "code")
    shown = [shown_by(cell, names) for cell in cells]
    out = capsys.readouterr().out
    assert re.findall(r"exit status (\d)", out) == ["0"] * 5
    (figure,) = (value for value in shown if isinstance(value, Figure))
    assert figure.axes[0].has_data()
    assert re.search(r"trials.txt: EER \d", out)
    assert re.search(r"of pairs of two people pass, .* of pairs of one person are refused", out)
    assert out.count("same speaker: score") == 1
    turns = json.loads((tmp_path / "own_voices" / "conversation" / "conversation.json").read_text())
    assert turns and (tmp_path / "own_voices" / "conversation" / "conversation.html").is_file()
