"""The published CAM++ on real speech: enrolled by three recordings each, people are known and strangers are not."""

import re
from pathlib import Path

import pytest

import speakernet
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


@pytest.mark.slow
def test_its_onnx_file_gives_its_embeddings_of_real_speech(campplus, shared_data, tmp_path, capsys):
    files = [str(path) for path in sorted((shared_data / "speechocean_mini" / "dev").glob("*/*.flac"))[:90:30]]
    pytest.importorskip("onnxruntime")
    assert main(["export", str(campplus), "--out", str(tmp_path / "cam.onnx"), "--speech", *files]) == 0
    said = capsys.readouterr().out
    assert "compared on recordings: least cosine" in said and "over 3 recordings" in said
    # The command refuses above a hundred thousandth; float32 on speech keeps another two digits.
    assert float(re.search(r"least cosine ([0-9.]+)", said)[1]) > 0.999999


@pytest.mark.slow
def test_one_voice_scores_above_two(campplus, shared_data):
    folders = sorted((shared_data / "speechocean_mini" / "dev").iterdir())[:2]
    (one, other), (third, _) = (sorted(folder.glob("*.flac"))[:2] for folder in folders)
    verifier = speakernet.load(campplus, "cpu")
    same = verifier.verify(one, other, threshold="default")
    different = verifier.verify(one, third, threshold="default")
    assert same.same_speaker and not different.same_speaker and same.score - different.score > 0.2
