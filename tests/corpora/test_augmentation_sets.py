"""MUSAN pieces and RIRs: by hand, completing the classic tools' folders, resumed, broken."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from preparation_corpora import archive_of, catalogue_entry, run_data_prep, write_catalogue
from preparation_server import fake_source

from speakernet.corpora.rirs import trimmed_response
from speakernet.data.audio import audio_info, read_audio, write_audio

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def noise(seconds, seed=1, channels=0):
    shape = (int(16000 * seconds), channels) if channels else int(16000 * seconds)
    return (0.1 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def make_musan(root):
    for row, (kind, seconds) in enumerate(
        {"noise/free": 14.0, "music/jazz": 11.0, "speech/gov": 3.0}.items()
    ):
        write_audio(root / "musan" / kind / f"{row}.wav", noise(seconds, row))


def make_responses(root):
    decay = np.exp(-np.arange(16000 * 3) / 800)
    single = (noise(3.0) * decay).astype(np.float32)
    several = (noise(3.0, 2, channels=4) * decay[:, None]).astype(np.float32)
    write_audio(
        root / "RIRS_NOISES/simulated_rirs/smallroom/Room001/Room001-00001.wav",
        single[:8000],
    )
    write_audio(root / "RIRS_NOISES/real_rirs_isotropic_noises/RWCP_type1_rir_a.wav", several)
    write_audio(
        root / "RIRS_NOISES/real_rirs_isotropic_noises/RVB2014_type1_noise_a.wav",
        noise(1.0, 5, 4),
    )


def prepare_from_archive(part, name, archive):
    with fake_source({name: archive}) as source:
        entries = {part: catalogue_entry({name: archive})}
        table = write_catalogue(Path("table.yaml"), source.address, entries)
        run_data_prep(part, f"--save_path data --catalogue {table}")


def test_musan():
    make_musan(Path("made"))
    prepare_from_archive("musan", "musan.tar.gz", archive_of(Path("made"), "gztar"))
    split = Path("data/musan_split")
    pieces = sorted(path.relative_to(split).as_posix() for path in split.rglob("*.wav"))
    assert pieces == [
        "music/jazz/1/00000.wav",
        "music/jazz/1/00003.wav",
        "music/jazz/1/00006.wav",
        "noise/free/0/00000.wav",
        "noise/free/0/00003.wav",
        "noise/free/0/00006.wav",
        "noise/free/0/00009.wav",
        "speech/gov/2/00000.wav",
    ]
    whole = read_audio("made/musan/noise/free/0.wav")
    assert np.array_equal(read_audio(split / "noise/free/0/00003.wav"), whole[48000:128000])


def test_folder_of_the_classic_tool():
    make_musan(Path())
    run_data_prep("musan", "--save_path . --split")
    split = Path("musan_split")
    first = {path: path.read_bytes() for path in split.rglob("*.wav")}
    kept = split / "noise/free/0/00000.wav"
    before = kept.stat().st_mtime_ns
    (split / "noise/free/0/00003.wav").unlink()
    (split / "noise/free/0/00006.wav").write_bytes(first[split / "noise/free/0/00006.wav"][:44])
    shutil.rmtree(split / "music")
    run_data_prep("musan", "--save_path . --split")
    assert {path: path.read_bytes() for path in split.rglob("*.wav")} == first
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "wrong", ["--hop_seconds=0", "--hop_seconds=0.5", "--hop_seconds=nan", "--piece_seconds=0"]
)
def test_bad_pieces(wrong, capsys):
    make_musan(Path())
    run_data_prep("musan", f"--save_path . --split {wrong}", status=1)
    assert wrong.split("=")[0] in capsys.readouterr().err and not Path("musan_split").exists()


def test_responses():
    make_responses(Path("made"))
    prepare_from_archive("rirs", "rirs_noises.zip", archive_of(Path("made"), "zip"))
    mono = sorted(Path("data/RIRS_NOISES/real_rirs_mono").rglob("*.wav"))
    assert [path.name for path in mono] == [
        f"RWCP_type1_rir_a_ch{channel}.wav" for channel in (1, 2, 3, 4)
    ]
    for path in mono:
        info = audio_info(path)
        assert info.num_channels == 1
        # An amplitude of exp(-t / 800 samples) falls by 60 dB in 800 ln(1000) = 5526 samples.
        assert info.num_samples == pytest.approx(5526, rel=0.05)
        channel = int(path.stem[-1]) - 1
        whole, _ = soundfile.read(
            "data/RIRS_NOISES/real_rirs_isotropic_noises/RWCP_type1_rir_a.wav"
        )
        prepared = read_audio(path)
        expected = whole[: info.num_samples, channel]
        np.testing.assert_allclose(
            prepared / np.abs(prepared).max(), expected / np.abs(expected).max(), atol=1e-3
        )
    run_data_prep("rirs", "--save_path data --prepare")


def test_trimming():
    response = np.zeros(10000, dtype=np.float32)
    response[100] = 1.0
    response[5000] = 0.00101
    response[9000] = 0.0009
    assert len(trimmed_response(response)) == 5001, "up to the last echo above -60 dB"


@pytest.mark.parametrize(
    ("part", "step", "make", "bad"),
    [
        ("musan", "split", make_musan, "musan/noise/free/bad.wav"),
        ("rirs", "prepare", make_responses, "RIRS_NOISES/simulated_rirs/smallroom/Room001/bad.wav"),
    ],
)
def test_broken_files(part, step, make, bad):
    make(Path())
    Path(bad).write_bytes(b"no audio")
    run_data_prep(part, f"--save_path . --{step}", status=1)
    assert "bad.wav" in Path(f"broken_{step}_{part}.txt").read_text()
    made = [
        *Path().glob("musan_split/**/*.wav"),
        *Path().glob("RIRS_NOISES/real_rirs_mono/**/*.wav"),
    ]
    assert len(made) == {"musan": 8, "rirs": 4}[part]
