"""A run folder that cannot be is refused before anything is read, trained or written."""

import os
from pathlib import Path

import pytest

from speakernet.cli import main
from speakernet.run_folder import refuse_unusable


def test_a_run_folder_that_cannot_be_is_refused_and_nothing_made(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    for folder, said in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "a" / "b", "lies below .*file, which")):
        with pytest.raises(ValueError, match=rf"training\.save_path: .* {said}"):
            refuse_unusable(folder)
    refuse_unusable(tmp_path / "a" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"cannot be written: .* is read-only"):
        refuse_unusable(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_training_into_a_file_is_refused_before_anything(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["train", "--save_path", str(tmp_path / "file" / "run"), "--train_list", "nowhere.txt"]) == 1
    said = capsys.readouterr().err
    assert "training.save_path" in said and "lies below" in said and "nowhere" not in said
