"""The commands of docs/models.md that start from a published model, as they stand there."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from speakernet.checkpoint import read_own_checkpoint
from speakernet.cli import main
from tests.models.test_published_models import case_of, foreign_state

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SCRIPTS = {"data_prep/folder.py": ["prepare", "folder"], "trainSpeakerNet.py": ["train"]}
# Of the page's command the network and its front end stay; data and run are as small as a test.
SMALL = "--data.batch_size 4 --data.crop_frames 60 --max_epoch 2 --training.freeze_epochs 1 --evaluation.eval_frames 60"
SMALL += " --evaluation.num_crops 1 --evaluation.bootstrap_samples 20 --data.num_workers 0"


def commands() -> list[list[str]]:
    """The section's first block, each line as arguments of `main`."""
    section = PAGE.read_text(encoding="utf-8").split("## Fine-tuning\n")[1]
    block = re.match(r"\n```sh\n(.*?)```", section, flags=re.DOTALL)
    assert block, "the example comes first"
    found = []
    for line in block[1].splitlines():
        program, *arguments = shlex.split(line)
        found.append([*SCRIPTS[arguments[0]], *arguments[1:]] if program == "python" else arguments)
    return found


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_they_stand(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_corpus, tmp_path / "my_voices", ignore=shutil.ignore_patterns("*.txt"))
    torch.save(foreign_state(case_of("3dspeaker", "CAMPPlus")), tmp_path / "campplus.pt")
    imported, prepared, trained = commands()
    assert main(imported) == 0
    capsys.readouterr()
    assert main(prepared) == 0
    # What is printed is what the page says, but for the name of the model.
    assert shlex.split(capsys.readouterr().out.splitlines()[1])[2:] == [*trained[1:-1], "MODEL.pt"]
    assert main([*trained, *shlex.split(SMALL)]) == 0
    run = tmp_path / "exps" / "my_voices_finetune"
    given, best = (read_own_checkpoint(path) for path in (tmp_path / "model.pt", run / "best.pt"))
    assert best["model"] == given["model"] and best["front_end"] == given["front_end"]
    assert best["training_summary"]["initial_model"]["licence"] == "Apache-2.0"
    assert json.loads((run / "results.json").read_text())["initial_model"]["sentences"]
