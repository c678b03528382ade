"""The complete preparation of VoxCeleb on tiny archives from a real server: parts, zips, m4a, WAV,
lists, one epoch.
"""

import pytest
from preparation_corpora import TRIALS, run_data_prep, write_catalogue
from preparation_server import fake_source

from speakernet.data.audio import audio_info
from speakernet.data.lists import read_training_list, read_trials


def prepare(source, published, folder, line, status=0):
    table = write_catalogue(folder.parent / "catalogue.yaml", source.address, published.corpora)
    common = f"--save_path {folder} --catalogue {table} --jobs 2 --timeout 5"
    run_data_prep("voxceleb", common, line, status=status)


def audio(folder):
    files = [path for path in folder.rglob("*") if path.suffix in (".wav", ".flac", ".m4a")]
    return {path: path.read_bytes() for path in files}


def test_one_command(tmp_path, published, monkeypatch):
    folder = tmp_path / "data"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with fake_source(published.files) as source:
        prepare(source, published, folder, "--all")
        asked = sum(source.requests.values())
        first = audio(folder)
        prepare(source, published, folder, "--all")
        assert sum(source.requests.values()) == asked, "a second run sends no requests"
    assert audio(folder) == first
    training = read_training_list(folder / "lists" / "vox2_dev_list.txt")
    assert (len(training), len(training.speakers)) == (12, 4)
    root = folder / "voxceleb2" / "dev" / "wav"
    for name in training.paths:
        info = audio_info(root / name)
        assert (info.sample_rate, info.num_channels) == (16000, 1)
        assert abs(info.seconds - 1.2) < 0.1
    both = read_training_list(folder / "lists" / "vox1_vox2_dev_list.txt")
    assert len(both) == 21
    assert all((folder / name).is_file() for name in both.paths)
    calibration = read_trials(folder / "lists" / "vox2_dev_calibration.txt")
    assert set(calibration.names) <= set(training.paths) and calibration.labels.any()
    trials = read_trials(folder / "lists" / "veri_test2.txt")
    assert all((folder / "voxceleb1" / "wav" / name).is_file() for name in trials.names)
    assert not list(folder.glob("*part*")), "parts are removed after verification"
    assert "0 broken" in (folder / "summary.txt").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "catalogue.yaml",
        "data",
        "elsewhere",
    ]
    assert list((tmp_path / "elsewhere").iterdir()) == [], "nothing is written outside --save_path"


def test_existing_archives(tmp_path, published):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in published.files.items():
        if not name.endswith(".txt"):
            (folder / name).write_bytes(content)
    (tmp_path / "brought").mkdir()
    (tmp_path / "brought" / "veri_test2.txt").write_bytes(TRIALS)
    with fake_source({}) as source:
        prepare(source, published, folder, f"--all --lists_from {tmp_path}/brought")
        assert not source.requests


@pytest.mark.parametrize(
    "place", ["voxceleb1/id10001/video/00001.wav", "voxceleb2/dev/aac/id00012/video/00001.m4a"]
)
def test_lists_of_audio_that_is_elsewhere(tmp_path, capsys, place):
    path = tmp_path / "data" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    run_data_prep("voxceleb", f"--save_path {tmp_path}/data --lists", status=1)
    assert str(tmp_path / "data" / "voxceleb2/dev/wav") in capsys.readouterr().err
    run_data_prep("voxceleb", f"--save_path {tmp_path}/mistyped --lists", status=1)
    assert not (tmp_path / "mistyped").exists()


def test_links_outside_the_folder(tmp_path, published):
    folder = tmp_path / "data"
    outside = tmp_path / "outside"
    outside.mkdir()
    with fake_source(published.files) as source:
        steps = "--download --concatenate --extract --subsets vox2_dev"
        prepare(source, published, folder, steps)
        (folder / "voxceleb2/dev/wav").mkdir()
        (folder / "voxceleb2/dev/wav/id00001").symlink_to(outside, target_is_directory=True)
        prepare(source, published, folder, "--convert --subsets vox2_dev", status=1)
    assert not list(outside.iterdir())


def test_missing_files(tmp_path, published):
    folder = tmp_path / "data"
    files = dict(published.files)
    del files["vox1_dev_wav_partab"]
    with fake_source(files) as source:
        steps = "--download --concatenate --extract --pack"
        prepare(source, published, folder, steps, status=1)
    for step in ("download", "concatenate", "pack_vox1"):
        assert "vox1_dev_wav_partab" in (folder / f"broken_{step}.txt").read_text()
    assert "vox1_dev_wav.zip" in (folder / "broken_extract.txt").read_text()
    assert (folder / "packed" / "vox2_dev").is_dir()
    others = (folder / "voxceleb2/dev/aac").rglob("*.m4a")
    assert len(list(others)) == 12, "the other archives are done"


def test_no_step_and_no_ffmpeg(tmp_path, published, monkeypatch):
    with fake_source(published.files) as source:
        prepare(source, published, tmp_path / "data", "", status=1)
        monkeypatch.setenv("SPEAKERNET_FFMPEG", "/nowhere/ffmpeg")
        prepare(source, published, tmp_path / "data", "--all", status=1)
        assert not source.requests, "ffmpeg is looked for before the download, not after"
