"""docs/start.md from the folder of recordings to the last question, as written, with synthetic voices."""

import logging
import re
import shlex
from pathlib import Path

import pytest

from speakernet.checkpoint import read_own_checkpoint
from speakernet.cli import main
from tests.documentation.pages import ROOT, read_page
from tests.documentation.shell import commands_in

PAGE = read_page(ROOT / "docs" / "start.md")
SMALL_VOICES = "--speakers 10 --trial_speakers 2 --trial_utterances 4 --noises 6 --rooms 6 --utterances 6 --workers 0"
SMALL_RUN = """
--max_epoch 2 --test_interval 2 --data.batch_size 8 --data.crop_frames 60 --data.num_workers 0
--augment.speed_factors [1.0]
--model.options '{channels: 8, blocks: [1], stem_stride: 4, mel_strides: [1], frame_strides: [1]}'
--model.embedding_dim 16 --evaluation.bootstrap_samples 20
"""
NAMES = ("anna", "ben")
NO_RECORDINGS = re.findall(r"`my_voices/(syn\S+\.wav)`", PAGE.prose)
"""What stands for their recordings where the reader has none."""


@pytest.mark.slow
def test_every_command_of_the_page_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fine-tuning alone is left out: tests/models/test_fine_tuning_page.py starts from a published model."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    answers: dict[str, tuple[int, str]] = {}
    for command in commands_in(PAGE):
        words = list(command.words)
        if "finetune.yaml" in words:
            continue
        if words[0] == "mv":
            assert NO_RECORDINGS and all(Path(words[1], name).is_file() for name in NO_RECORDINGS)
            # What the page asks for: a folder for each person, with the names that it uses.
            for number, folder in enumerate(sorted(Path(words[1]).iterdir())):
                person = Path(words[2], NAMES[number] if number < len(NAMES) else folder.name)
                person.mkdir(parents=True)
                for row, file in enumerate(sorted(folder.rglob("*.wav")), 1):
                    file.rename(person / f"{row}.wav")
            continue
        if words[0] == "python":
            words = (["train"] if words[1] == "trainSpeakerNet.py" else ["prepare", Path(words[1]).stem]) + words[2:]
        else:
            words = words[1:]
        small = {"train": SMALL_RUN, "prepare synthetic": SMALL_VOICES}
        for start, more in small.items():
            words += shlex.split(more) if " ".join(words).startswith(start) else []
        answers[command.text] = (main(words), capsys.readouterr().out)
    statuses = {text: status for text, (status, _) in answers.items()}
    assert all(status in (0, 1) for status in statuses.values()), statuses
    assert [text for text, status in statuses.items() if status] == [
        text for text in statuses if text.startswith(("speakernet doctor", "speakernet verify")) and statuses[text]
    ]
    assert "speakers are too few for an error rate" in caplog.text
    assert "odds of a calibration on them are far too sure" in caplog.text
    said = {text.split()[1]: out for text, (_, out) in answers.items()}
    assert "you can train" in said["doctor"] and "decides by itself" in said["info"]
    assert said["verify"].split()[0] in ("same", "different")
    assert said["identify"].split()[0] in (*NAMES, "unknown")
    assert Path("exps/my_voices/report.html").is_file()
    assert read_own_checkpoint(Path("exps/my_voices/best.pt"))["calibration"]
    (printed,) = (out for text, (_, out) in answers.items() if "data_prep/folder.py my_voices" in text)
    (training,) = (text for text in answers if "trainSpeakerNet.py --config small_data.yaml" in text)
    assert shlex.split(training)[2:] == shlex.split(printed.splitlines()[0])[2:], "the page says what it prints"
