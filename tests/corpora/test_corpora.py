"""Tiny public corpora in their published layouts: rows, parts, sessions, joined utterances,
trials.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml
from preparation_corpora import (
    archive_of,
    catalogue_entry,
    parts_of,
    run_data_prep,
    write_catalogue,
    write_voices,
)
from preparation_server import fake_source

from speakernet.data.audio import audio_info, write_audio
from speakernet.data.lists import read_model_trials, read_training_list, read_trials
from tests.conftest import REPOSITORY
from tests.conftest import tiny_voice as voice

CONFIGS = REPOSITORY / "configs"
pytestmark = pytest.mark.usefixtures("in_tmp_path")


def speakers_of(path, depth):
    return {name.split("/")[depth] for name in read_trials(path).names}


def make_librispeech(root):
    speakers = {"train-clean-100": (0, 1, 2), "dev-clean": (10, 11, 12), "test-clean": (20, 21, 22)}
    lines = ["; a comment | x | y"]
    for part, numbers in speakers.items():
        for speaker, chapter, row in itertools.product(numbers, (1, 2), range(2)):
            name = f"LibriSpeech/{part}/{speaker}/{chapter}/{speaker}-{chapter}-{row:04}.flac"
            write_audio(root / name, voice(speaker, 10 * chapter + row, 0.6))
            lines.append(f"{speaker}  | {'FM'[speaker % 2]} | x | 1.0 | Name")
    (root / "LibriSpeech" / "SPEAKERS.TXT").write_text("\n".join(lines))


def test_librispeech():
    make_librispeech(Path())
    run_data_prep("librispeech", "--save_path . --jobs 2")
    lists = Path("librispeech_lists")
    training = read_training_list(lists / "train_list.txt")
    assert list(training.speakers) == ["0", "1", "2"]
    assert speakers_of(lists / "validation_trials.txt", 2) == {"10", "11", "12"}
    assert speakers_of(lists / "test_trials.txt", 2) == {"20", "21", "22"}
    trials = read_trials(lists / "test_trials.txt")
    chapters = np.array([name.split("/")[3] for name in trials.names])
    is_target = trials.labels == 1
    assert (chapters[trials.enrol[is_target]] != chapters[trials.test[is_target]]).all()


@pytest.mark.slow
def test_vctk():
    root = Path("VCTK-Corpus-0.92")
    for microphone in ("mic1", "mic2"):
        pattern = (
            "wav48_silence_trimmed/p{speaker}/p{speaker}_00{utterance}_" + microphone + ".flac"
        )
        write_voices(root, 10, 3, pattern)
    genders = "\n".join(f"p{row}  23  {'F' if row % 2 else 'M'}    English" for row in range(10))
    (root / "speaker-info.txt").write_text("ID  AGE  GENDER  ACCENTS\n" + genders)
    run_data_prep("vctk", "--save_path . --same_gender --test_share 0")
    training = read_training_list("vctk_lists/train_list.txt")
    assert all(name.endswith("_mic1.flac") for name in training.paths)
    trials = read_trials("vctk_lists/validation_trials.txt")
    is_odd = np.array([int(name.split("/")[2][1:]) % 2 for name in trials.names])
    assert (is_odd[trials.enrol] == is_odd[trials.test]).all()


def test_common_voice():
    lines = ["client_id\tpath\tsentence\tgender"]
    for speaker in range(8):
        for row in range(3 if speaker else 1):
            write_audio(f"clips/{speaker}_{row}.wav", voice(speaker, row, 0.6))
            lines.append(
                f"{speaker:0128x}"[::-1] + f'\t{speaker}_{row}.wav\tHe said "no\tmale_masculine'
            )
    Path("validated.tsv").write_text("\n".join(lines) + "\n")
    run_data_prep("common_voice", "--save_path . --min_utterances 2 --test_share 0")
    training = read_training_list("common_voice_lists/train_list.txt")
    assert len(training.speakers) == 5
    assert all(len(speaker) == 24 for speaker in training.speakers)


def make_cnceleb(root):
    sessions = ("singing-01", "singing-02", "interview-01")
    voices = {seconds: voice(1, 1, seconds) for seconds in (2.0, 6.0)}
    for speaker, session, row in itertools.product(range(8), sessions, range(4)):
        samples = voices[6.0 if row == 3 and session == "singing-01" else 2.0]
        write_audio(root / f"CN-Celeb_flac/data/id0000{speaker}/{session}-{row:03}.flac", samples)
    evaluation = root / "CN-Celeb_flac" / "eval"
    write_voices(evaluation, 2, 1, "enroll/id0000{speaker}-enroll.flac")
    write_voices(evaluation, 2, 2, "test/id0000{speaker}-singing-0{utterance}.flac")
    (evaluation / "lists").mkdir()
    enrolled = "".join(f"id0000{row}-enroll enroll/id0000{row}-enroll.wav\n" for row in range(2))
    (evaluation / "lists" / "enroll.lst").write_text(enrolled)
    # Speaker, then recordings of the corpus; the published list has .wav names too.
    recordings = "".join(
        f"id0000{row}-enroll id0000{row}/singing-01-000.wav id0000{row}/singing-02-001.wav\n"
        for row in range(2)
    )
    (evaluation / "lists" / "enroll.map").write_text(recordings)
    trials = (
        "id00000-enroll test/id00000-singing-00.wav 1\nid00000-enroll "
        "test/id00001-singing-01.wav 0\n"
    )
    (evaluation / "lists" / "trials.lst").write_text(trials)
    (root / "CN-Celeb_flac" / "dev").mkdir()
    (root / "CN-Celeb_flac" / "dev" / "dev.lst").write_text(
        "".join(f"id0000{row}\n" for row in range(2, 8))
    )


def test_cnceleb():
    make_cnceleb(Path())
    words = "--save_path . --join --validation_share 0 --test_share 0"
    run_data_prep("cnceleb", words)
    lists = Path("cnceleb_lists")
    training = read_training_list(lists / "train_list.txt")
    assert set(training.speakers) == {f"id0000{row}" for row in range(2, 8)}, (
        "evaluation speakers are excluded"
    )
    preset = yaml.safe_load((CONFIGS / "preset_cnceleb.yaml").read_text(encoding="utf-8"))["data"]
    for name in ("train_list", "test_list", "enrolment_list"):
        assert Path(preset[name]).relative_to("data").is_file()
    for name in training.paths:
        assert audio_info(name).seconds >= 5
    joined = sorted(Path("CN-Celeb_joined/id00002").iterdir())
    assert [path.name for path in joined] == [
        "interview-01-joined000.flac", "singing-01-joined000.flac", "singing-02-joined000.flac"
    ]  # fmt: skip
    assert [audio_info(path).seconds for path in joined] == [8.0, 6.0, 8.0]
    trials = read_trials(lists / "cnceleb_trials.txt")
    assert trials.labels.tolist() == [1, 0]
    of_models = read_model_trials(lists / "cnceleb_avg_trials.txt", lists / "cnceleb_enrolment.txt")
    assert of_models.labels.tolist() == [1, 0] and of_models.models.counts.tolist() == [2, 1, 1]
    assert of_models.recordings[0] == "CN-Celeb_flac/data/id00000/singing-01-000.flac"
    assert all(Path(name).is_file() for name in of_models.recordings)
    assert all(Path(name).is_file() for name in trials.names)
    before = {path: path.stat().st_mtime_ns for path in joined}
    run_data_prep("cnceleb", words)
    assert {path: path.stat().st_mtime_ns for path in joined} == before


@pytest.mark.parametrize("name", ["librispeech", "vctk", "common_voice", "cnceleb"])
def test_wrong_folder(tmp_path, capsys, name):
    run_data_prep(name, f"--save_path {tmp_path}", status=1)
    assert str(tmp_path) in capsys.readouterr().err


def test_cnceleb_download():
    make_cnceleb(Path("made"))
    first = archive_of(Path("made"), "gztar")
    pattern = "CN-Celeb2_flac/data/id1000{speaker}/vlog-01-00{utterance}.flac"
    write_voices(Path("second"), 3, 3, pattern)
    second = archive_of(Path("second"), "gztar")
    parts = parts_of(second, "cn-celeb2_v2.tar.gz", 3)
    files = {"cn-celeb_v2.tar.gz": first, **parts}
    entry = catalogue_entry(files, {"cn-celeb2_v2.tar.gz": (list(parts), second)})
    entry["joined"]["cn-celeb2_v2.tar.gz"]["md5"] = None
    with fake_source(files) as source:
        table = write_catalogue(Path("table.yaml"), source.address, {"cnceleb": entry})
        options = f"--save_path data --catalogue {table} --download"
        run_data_prep("cnceleb", options)
        asked = sum(source.requests.values())
        run_data_prep("cnceleb", options)
        assert sum(source.requests.values()) == asked
    used = "".join(path.read_text() for path in Path("data/cnceleb_lists").glob("*_list.txt"))
    assert "CN-Celeb2_flac/data/id10000" in used
    assert "id00000/" not in used, "evaluation speakers are excluded"
