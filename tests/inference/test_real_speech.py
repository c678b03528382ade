"""The published CAM++ on real speech: enrolled by three recordings each, people are known and strangers are not."""

from pathlib import Path

import pytest

from speakernet.cli import main

NUM_PEOPLE = 8


@pytest.fixture(scope="module")
def campplus(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = repository.parent / "shared" / "reference" / "campplus_3dspeaker_192.pt"
    if not weights.is_file():
        pytest.skip("the published CAM++ of ../shared/reference is not on this machine")
    path = tmp_path_factory.mktemp("campplus") / "model.pt"
    words = ["import-weights", weights, "--from", "3dspeaker", "--model", "CAMPPlus", "--licence", "Apache-2.0"]
    assert main([str(word) for word in [*words, "--out", path]]) == 0
    return path


@pytest.mark.slow
def test_people_are_known_and_strangers_are_not(campplus, shared_data, tmp_path, capsys):
    folders = sorted((shared_data / "speechocean_mini" / "dev").iterdir())[: NUM_PEOPLE + 4]
    recordings = {folder.name: sorted(folder.glob("*.flac")) for folder in folders}
    words = ["--model", str(campplus), "--store", str(tmp_path / "people.db")]
    for name in list(recordings)[:NUM_PEOPLE]:
        assert main(["enroll", name, *map(str, recordings[name][:3]), *words]) == 0
    answers = {}
    for name, files in recordings.items():
        capsys.readouterr()
        assert main(["identify", str(files[4]), *words, "--threshold", "default"]) == 0
        answers[name] = capsys.readouterr().out.split(" score ")[0]
    known, strangers = list(recordings)[:NUM_PEOPLE], list(recordings)[NUM_PEOPLE:]
    assert sum(answers[name] == name for name in known) >= NUM_PEOPLE - 1
    assert sum(answers[name] == "unknown" for name in strangers) >= len(strangers) - 1
