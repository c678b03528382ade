"""Kaldi folders: wav.scp and utt2spk as training list and as audio; refusals name file and line."""

import numpy as np
import pytest

from speakernet.data.audio import AudioError, write_audio
from speakernet.data.lists import ListError, StringTable, audio_folder_of, read_training_list
from speakernet.data.opening import KaldiSource, open_source
from speakernet.files import sha256_of

IDS = [f"spk{row // 3}-utt{row}" for row in range(9)]


@pytest.fixture
def kaldi(tmp_path, random, monkeypatch):
    """Nine utterances; the path of every third is relative to the working directory, one name has a
    space.
    """
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "train"
    audio = tmp_path / "audio"
    folder.mkdir(parents=True)
    rows = []
    for row, name in enumerate(IDS):
        path = audio / ("two words.wav" if row == 4 else f"{row}.wav")
        write_audio(path, 0.1 * random.standard_normal(2000 + 100 * row))
        rows.append(f"{name} {path.relative_to(tmp_path) if row % 3 == 0 else path}\n")
    (folder / "wav.scp").write_text("".join(rows))
    (folder / "utt2spk").write_text(
        "".join(f"{name} {name.split('-')[0]}\n" for name in reversed(IDS))
    )
    return folder


def test_training_list(kaldi):
    found = read_training_list(kaldi)
    assert list(found.paths) == IDS[::-1]
    assert list(found.speakers) == ["spk0", "spk1", "spk2"]
    assert found.labels.tolist() == [2, 2, 2, 1, 1, 1, 0, 0, 0]
    assert found.sha256 == sha256_of(kaldi / "utt2spk")
    assert audio_folder_of(kaldi) == kaldi
    assert audio_folder_of(kaldi / "trials") == kaldi


def test_audio(kaldi, tmp_path):
    source = open_source(kaldi)
    assert isinstance(source, KaldiSource)
    names = StringTable.from_strings([IDS[4], "absent", IDS[0]])
    table = source.lookup_table(names)
    assert table.native_samples.tolist() == [2400, 0, 2000]
    assert list(table.problems) == [1] and "'absent'" in table.problems[1]
    assert source.missing(names).tolist() == [1]
    (tmp_path / "audio" / "0.wav").unlink()
    assert open_source(kaldi).missing(names).tolist() == [1, 2]
    out = np.empty((1, 3000), dtype=np.float32)
    assert source.rows(names, table).fill(np.array([0]), np.array([0]), out) == {}
    whole = source.read(IDS[4])
    np.testing.assert_array_equal(out[0, :2400], whole)
    np.testing.assert_array_equal(source.read(IDS[4], 100, 50), whole[100:150])
    with pytest.raises(AudioError, match=r"wav\.scp.* 'absent'"):
        source.read("absent")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "b sph2pipe -f wav b.sph |",
            r"wav\.scp, line 2: 'sph2pipe -f wav b\.sph \|' is a command",
        ),
        ("b corpus.ark:1234", r"line 2: 'corpus\.ark:1234' is .* a Kaldi archive"),
        ("b", r"line 2: found 'b'; expected 'utterance file'"),
        ("a other.wav", r"wav\.scp: 'a' appears twice"),
    ],
)
def test_bad_wav_scp(tmp_path, row, message):
    (tmp_path / "wav.scp").write_text(f"a a.wav\n{row}\nc c.wav\n")
    with pytest.raises(ListError, match=message):
        open_source(tmp_path)


def test_other_mistakes(kaldi, tmp_path):
    (kaldi / "utt2spk").write_text("a spk 1\n")
    with pytest.raises(
        ListError, match=r"utt2spk, line 1: found 'a spk 1'; expected 'utterance speaker'"
    ):
        read_training_list(kaldi)
    (kaldi / "utt2spk").write_text("\nlonely\nb spk1\n")
    found = read_training_list(kaldi, malformed := [])
    assert list(found.paths) == ["b"]
    assert malformed == ["line 2: found 'lonely'; expected 'utterance speaker'"]
    (kaldi / "segments").write_text("a rec 0 1\n")
    with pytest.raises(ListError, match=r"segments: "):
        open_source(kaldi)
    with pytest.raises(ListError, match=r"audio: a folder without utt2spk"):
        read_training_list(tmp_path / "audio")
    with pytest.raises(ListError, match=r"utt2spk: .*Kaldi folder; .*train"):
        read_training_list(kaldi / "utt2spk")
