"""Run the cells of `your_own_voices.ipynb` in order, on synthetic voices with a small model."""

import itertools
import json
import re
import shutil
import subprocess

import pytest
from matplotlib.figure import Figure

from speakernet.data.audio import write_audio
from tests.inference.conftest import spoken
from tests.test_first_hour import shown_by, sources


@pytest.mark.slow
def test_cells(repository, uncalibrated, ffmpeg, tmp_path, monkeypatch, capsys):
    """Names with spaces and accents, two days each, one recording of each day in m4a."""
    folder = tmp_path / "my own voices"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for speaker, number in itertools.product(range(18), range(4)):
        day = folder / "my_voices" / f"Zoë Müller {speaker:02d}" / f"büro {number % 2}"
        day.mkdir(parents=True, exist_ok=True)
        recording = day / f"take {number}.wav"
        write_audio(recording, spoken(speaker, number))
        if number > 1:
            # Lossless, because AAC could look like another speaker to so small a network.
            converted = ["-c:a", "alac", recording.with_suffix(".m4a")]
            options = ["-nostdin", "-loglevel", "error", "-i", recording]
            subprocess.run([ffmpeg, *options, *converted], check=True)
            recording.unlink()
    (folder / "own_voices").mkdir()
    shutil.copy(uncalibrated, folder / "own_voices" / "model.pt")
    names = {}
    cells = sources(repository / "examples" / "your_own_voices.ipynb", "code")
    shown = [shown_by(cell, names) for cell in cells]
    out = capsys.readouterr().out
    assert re.findall(r"exit status (\d)", out) == ["0"] * 5
    # 13 of the 18 people are for fitting, with four recordings each and both days known.
    assert "fitted on 52 recordings of 13 speakers" in out
    assert "to have several sessions" not in out
    (figure,) = (value for value in shown if isinstance(value, Figure))
    assert figure.axes[0].has_data()
    assert re.search(r"trials.txt: EER \d", out)
    assert re.search(r"\d+ of 160 pairs of two people pass\n\d+ of 20 pairs of one person", out)
    assert out.count("same speaker: score") == 1
    assert len(re.findall(r"^Zoë Müller \d\d: 3 recordings added", out, flags=re.MULTILINE)) == 2
    conversation = json.loads((folder / "own_voices/conversation/conversation.json").read_text())
    assert any(turn["speaker"].startswith("Zoë Müller ") for turn in conversation["turns"])
    assert (folder / "own_voices/conversation/conversation.html").is_file()
