"""Own recordings: folders, tables, patterns, odd names, foreign formats, and the written
configuration.
"""

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from preparation_corpora import run_data_prep, to_m4a, write_voices

from speakernet.config import load_config
from speakernet.corpora import own_folder
from speakernet.corpora.recipes import LITTLE_DATA_UTTERANCES
from speakernet.data.audio import write_audio
from speakernet.data.lists import read_training_list, read_trials
from tests.conftest import tiny_voice as voice


@pytest.fixture
def root(tmp_path):
    """Where the recordings are."""
    return tmp_path / "voices"


@pytest.fixture
def out(tmp_path):
    """Where the lists will be."""
    return tmp_path / "out"


def prepare(folder, save_path, *arguments, status=0):
    common = f"--save_path {save_path} --jobs 2"
    run_data_prep("folder", folder, common, *arguments, status=status)


def training_of(out):
    return read_training_list(out / "train_list.txt")


def contents(out, pattern):
    return {path: path.read_bytes() for path in out.glob(pattern)}


def speakers_of(path, root):
    return {name.split("/")[0] for name in read_trials(path).names if (root / name).is_file()}


def test_lists_trials_and_configurations(root, out, capsys, caplog):
    write_voices(root, 20, 4)
    prepare(root, out)
    # 16 of 20 speakers have four utterances of 0.6 s each: 38.4 s.
    assert "64 utterances of 16 speakers for training, 0.01 hours" in caplog.text
    config = out / "out.yaml"
    fresh, fine_tuned = (line.split()[2:] for line in capsys.readouterr().out.splitlines())
    assert fresh == f"--config small_data.yaml --config {config}".split()
    assert fine_tuned[:4] == f"--config finetune.yaml --config {out}/out_finetune.yaml".split()
    parts = [set(training_of(out).speakers)]
    for part in ("validation", "test"):
        parts.append(speakers_of(out / f"{part}_trials.txt", root))
    assert [len(part) for part in parts] == [16, 2, 2] and len(set.union(*parts)) == 20
    written = yaml.safe_load(config.read_text())
    assert written["data"]["train_list"] == str(out / "train_list.txt")
    assert all(
        Path(value).exists()
        for key, value in written["data"].items()
        if key.endswith(("_list", "_path"))
    )
    lists = yaml.safe_load((out / "out_finetune.yaml").read_text())
    assert set(lists) == {"data", "augment", "training"}
    assert lists["data"]["train_list"] == written["data"]["train_list"]
    # The other values are the recipe's, except for batches and crops, which this little speech does
    # not fill.
    assert set(written) == {"data", "training"} and written["training"] == {"save_path": "exps/out"}
    assert (written["data"]["batch_size"], written["data"]["crop_frames"]) == (8, 50)
    first = contents(out, "*.*")
    prepare(root, out)
    assert contents(out, "*.*") == first


@pytest.mark.parametrize(
    ("num_train", "epochs"), [(1_200, 200), (2_400, 100), (LITTLE_DATA_UTTERANCES, 48), (5_001, 20)]
)
def test_recipe_for_little_data(tmp_path, root, out, capsys, monkeypatch, num_train, epochs):
    """The size is the number of training utterances, faked here."""
    is_little = num_train <= LITTLE_DATA_UTTERANCES
    write_voices(root, 8, 4)
    prepared = own_folder.prepare_lists

    def counted(*arguments):
        return dataclasses.replace(prepared(*arguments), num_train=num_train, median_seconds=4.0)

    monkeypatch.setattr(own_folder, "prepare_lists", counted)
    prepare(root, out, f"--rir_path {tmp_path}")
    command = capsys.readouterr().out.splitlines()[0]
    assert ("--config small_data.yaml --config" in command) == is_little
    written = yaml.safe_load((out / "out.yaml").read_text())
    assert written["augment"]["rir_path"] == str(tmp_path)
    for section, option in (("data", "batch_size"), ("augment", "enabled"), ("model", "name")):
        assert (option in written.get(section, ())) == (not is_little)
    config = load_config(command.split()[2:]).config
    assert config.model.name == "ResNet" and config.training.max_epochs == epochs
    assert config.augment.speed_factors == ((0.9, 1.0, 1.1) if is_little else (1.0,))
    if is_little:
        # With more utterances than the recipe assumes there are fewer epochs; the margin grows over
        # the same share.
        ramp = config.schedule.margin_begin_epoch, config.schedule.margin_end_epoch
        assert ramp == (round(12 * epochs / 200), round(58 * epochs / 200))
        assert config.training.test_interval == epochs


def test_table(tmp_path, root, out):
    lines = ["Gender,path,note,speaker,session"]
    for name in write_voices(root, 12, 4, "{speaker}_{utterance}.wav"):
        speaker, utterance = map(int, name.removesuffix(".wav").split("_"))
        lines.append(f"{'mf'[speaker % 2]},{name},x,Anna Maria {speaker},s{utterance % 2}")
    (tmp_path / "voices.csv").write_text("\n".join(lines))
    prepare(root, out, f"--csv {tmp_path}/voices.csv --same_gender")
    trials = read_trials(out / "validation_trials.txt")
    is_odd = np.array([int(name.split("_")[0]) % 2 for name in trials.names])
    assert (is_odd[trials.enrol] == is_odd[trials.test]).all()
    assert training_of(out).speakers[0].startswith("Anna_Maria_")


@pytest.fixture
def prepare_table(tmp_path, root, out):
    """Prepares voices with a table of these rows (path, speaker)."""

    def run(rows, status=0):
        text = "".join(f"{name},{speaker}\n" for name, speaker in rows)
        (tmp_path / "voices.csv").write_text("path,speaker\n" + text)
        prepare(root, out, f"--csv {tmp_path}/voices.csv", status=status)

    return run


def write_rows(root, speakers):
    names = write_voices(root, speakers, 4, "s{speaker}/{utterance}.wav")
    return [(name, name[:2]) for name in names]


def test_repeated_rows_of_a_table(root, out, prepare_table, caplog):
    """A row for every label or annotator, the path spelled in different ways."""
    rows = write_rows(root, 8)
    prepare_table(rows)
    lists = contents(out, "*_*.txt")
    again = [(f"./{name}", speaker) for name, speaker in rows]
    prepare_table([*rows, *rows, *again])
    assert contents(out, "*_*.txt") == lists
    assert "64 rows repeat a path" in caplog.text
    assert "96 found, 32 usable, 64 skipped, 0 left out" in (out / "summary.txt").read_text()


def test_a_path_under_two_speakers(root, out, prepare_table, capsys):
    rows = write_rows(root, 4)
    prepare_table([*rows, (f".//{rows[0][0]}", "s3")], status=1)
    wrong = capsys.readouterr().err
    assert "'.//s0/0.wav'" in wrong and "'s0' and 's3'" in wrong
    assert not out.exists()


def test_copies_in_another_format(root, out, caplog):
    for count, ending in ((3, "wav"), (2, "flac"), (1, "m4a.wav")):
        write_voices(root, 8, count, f"s{{speaker}}/{{utterance}}.{ending}")
    prepare(root, out)
    names = [*training_of(out).paths]
    for part in ("validation", "test"):
        names += read_trials(out / f"{part}_trials.txt").names
    assert len(names) == 24 and len({name.split(".")[0] for name in names}) == 24
    assert "24 files skipped as the same recording" in caplog.text and "s0/0.flac" in caplog.text


def test_speakers_that_look_the_same(root, out, capsys):
    write_voices(root, 1, 4, "Jos\u00e9/{utterance}.wav")
    write_voices(root, 1, 4, "Jose\u0301/{utterance}.wav")
    prepare(root, out, status=1)
    assert "Unicode" in capsys.readouterr().err


def test_pattern(root, out):
    write_voices(root, 8, 4, "rec-{utterance}-spk{speaker}.wav")
    prepare(root, out, "--pattern", r"rec-(?P<session>\d)-(?P<speaker>spk\d+)")
    assert set(training_of(out).speakers) < {f"spk{row}" for row in range(8)}


@pytest.fixture
def split_folder(tmp_path):
    train, dev = (tmp_path / "corpus" / name / "wav" for name in ("train", "dev"))
    write_voices(train, 6, 3, "a{speaker}/{utterance}.wav")
    write_voices(dev, 4, 3, "b{speaker}/{utterance}.wav", take=10)
    return tmp_path / "corpus"


def parts_of(out):
    """First letters of the speakers in each written part."""
    parts = {}
    for path in out.glob("*_list.txt"):
        speakers = read_training_list(path).speakers
        parts[path.name.removesuffix("_list.txt")] = {speaker[0] for speaker in speakers}
    return parts


def test_pooled_splits(tmp_path, split_folder, caplog):
    prepare(split_folder, tmp_path / "pooled", "--layout pooled")
    assert parts_of(tmp_path / "pooled")["train"] == {"a", "b"}
    prepare(split_folder / "train", tmp_path / "part")
    (split_folder / "dev").rename(tmp_path / "dev")
    prepare(split_folder, tmp_path / "single")
    assert "split again" in caplog.text
    assert set(parts_of(tmp_path / "single")) == {"train", "validation"}


def test_splits_that_share_speakers(out, split_folder, capsys):
    (split_folder / "train" / "wav" / "a0").rename(split_folder / "dev" / "wav" / "a1")
    prepare(split_folder, out, status=1)
    errors = capsys.readouterr().err
    assert "first: a1" in errors and "--layout pooled" in errors
    assert not out.exists()


def test_splits_beside_speakers(out, split_folder, capsys):
    write_voices(split_folder / "anna", 2, 3, "{speaker}/{utterance}.wav", take=20)
    prepare(split_folder, out, status=1)
    errors = capsys.readouterr().err
    assert "dev, train" in errors and "anna" in errors and "--layout speakers" in errors
    prepare(split_folder, out, "--layout speakers")
    with pytest.raises(SystemExit):
        prepare(split_folder, out, "--layout mixed")
    prepare(split_folder, out, "--layout parts --speaker_depth 1", status=1)
    prepare(split_folder, out, "--csv table.csv --pattern {speaker}/{utterance}.wav", status=1)
    errors = capsys.readouterr().err
    assert "--csv and --pattern" in errors and "--layout and --speaker_depth" in errors


REFUSED = {
    "no folder": ("spk{speaker}/{utterance}.wav", "", "nothing does not"),
    "a malformed pattern": ("spk{speaker}/{utterance}.wav", "--pattern (", "not a regular"),
    "a pattern without a speaker": ("spk{speaker}/{utterance}.wav", "--pattern (a)", "speaker"),
    "no splits": ("spk{speaker}/{utterance}.wav", "--layout parts", "spk0"),
    "a speaker's own folder": ("{speaker}-{utterance}.wav", "", "--pattern"),
    "one level too high": ("mine/spk{speaker}/{utterance}.wav", "", "voices/mine"),
    "two levels too high": ("all/mine/spk{speaker}/{utterance}.wav", "", "voices/all/mine"),
    "two names that would become one": ("a{speaker}b/{utterance}.wav", "", "rename"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_folders(root, out, capsys, case):
    pattern, options, word = REFUSED[case]
    write_voices(root, 2, 3, pattern)
    if word == "rename":
        (root / "a0b").rename(root / "a b")
        (root / "a1b").rename(root / "a_b")
    if case == "no folder":
        root = root.with_name("nothing")
    prepare(root, out, options, status=1)
    assert word in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_converted_files_keep_their_split(out, split_folder, ffmpeg, caplog):
    for path in sorted(split_folder.rglob("*.wav")):
        to_m4a(ffmpeg, path, path.with_suffix(".m4a"))
        path.unlink()
    prepare(split_folder, out)
    assert parts_of(out) == {"train": {"a"}, "validation": {"b"}}
    assert "keep their splits" in caplog.text
    assert "30 found, 30 usable, 0 skipped, 0 left out" in caplog.text
    training = training_of(out)
    assert all(Path(name).is_file() and name.endswith(".m4a.wav") for name in training.paths)
    assert not list(split_folder.rglob("*.wav")), "nothing is written beside the originals"
    assert "data_prep/musan.py" in caplog.text


@pytest.mark.parametrize(
    ("patterns", "errors"),
    [
        (["spk{speaker}/{utterance}.wav"], "no sessions are known of the held-out speakers"),
        (["spk{speaker}/monday/{utterance}.wav"], "only one session"),
        (["spk{speaker}/monday/{utterance}.wav", "spk{speaker}/tuesday/{utterance}.wav"], ""),
    ],
)
def test_warnings(root, out, caplog, patterns, errors):
    for number, pattern in enumerate(patterns):
        write_voices(root, 6, 3, pattern, take=10 * number)
    (root / "peter").mkdir()
    prepare(root, out)
    assert re.search("1 of 7 speakers' folders .*: peter", caplog.text)
    warnings = "".join(
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    )
    assert errors in warnings and bool(errors) == ("session" in warnings)


def test_unusable_files_are_listed(root, out, caplog):
    write_voices(root, 10, 3)
    write_audio(root / "spk0/short.wav", voice(0, 9, 0.1))
    (root / "spk0/empty.wav").write_bytes(b"")
    (root / "spk0/text.flac").write_text("no audio")
    (root / "beside.wav").write_bytes(b"")
    (root / "spk1/line\nbreak.wav").write_bytes((root / "spk1/0.wav").read_bytes())
    prepare(root, out, status=1)
    listed = (out / "broken_scan.txt").read_text()
    for name in ("short.wav", "empty.wav", "text.flac", "beside.wav", r"line\nbreak.wav"):
        assert name in listed
    assert len(listed.splitlines()) == 5
    assert "scan: left out: spk0/short.wav: 0.10 s is shorter than 0.5 s" in caplog.text
    parts = ("train", "validation", "test")
    assert sum(len((out / f"{part}_list.txt").read_text().splitlines()) for part in parts) == 30


def test_samples_that_no_list_needs(root, out, caplog):
    """Silence, damage, a copy under another name, and one recording of two people."""
    root /= "my voices"
    write_voices(root, 8, 6, "é {speaker}/{utterance}.wav")
    write_audio(root / "é 0/silent.wav", np.zeros(16000))
    write_audio(root / "é 0/noise.wav", np.full(16000, 1e-4))
    shutil.copy(root / "é 1/0.wav", root / "é 1/copy of 0.wav")
    shutil.copy(root / "é 2/0.wav", root / "é 3/9.wav")
    write_audio(root / "é 4/damaged.flac", voice(4, 9, 2.0))
    damaged = bytearray((root / "é 4/damaged.flac").read_bytes())
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    (root / "é 4/damaged.flac").write_bytes(damaged)
    prepare(root, out, status=1)
    left_out = dict(line.split("\t") for line in (out / "broken_scan.txt").read_text().splitlines())
    assert sorted(left_out) == [
        "é 0/noise.wav", "é 0/silent.wav", "é 2/0.wav", "é 3/9.wav", "é 4/damaged.flac"
    ]  # fmt: skip
    assert "é 3/9.wav" in left_out["é 2/0.wav"] and "é 2/0.wav" in left_out["é 3/9.wav"]
    summary = (out / "summary.txt").read_text()
    assert "53 found, 47 usable, 1 skipped, 5 left out" in summary
    assert all(name in summary for name in left_out)
    assert "é 1/copy of 0.wav" in caplog.text
    everyone = read_trials(out / "everyone_trials.txt")
    # Seven speakers have 15 pairs of their six recordings, one has 10 of five, among 47 * 46 / 2.
    assert (len(everyone), everyone.labels.sum(), len(everyone.names)) == (1081, 115, 47)
    prepare(root, out, "--fast")
    assert "53 found, 53 usable, 0 skipped, 0 left out" in (out / "summary.txt").read_text()


def test_trials_are_all_pairs_while_they_are_few(tmp_path, root):
    write_voices(root, 8, 6)
    num_trials = {}
    for most in (15, 14):
        out = tmp_path / str(most)
        prepare(root, out, f"--targets_per_speaker {most}")
        for name in ("validation", "everyone"):
            labels = read_trials(out / f"{name}_trials.txt").labels
            num_trials[name, most] = (int(labels.sum()), int((labels == 0).sum()))
    # A speaker has 6 * 5 / 2 = 15 pairs; 48 recordings have 1,128. Two speakers share 36 pairs.
    assert num_trials["everyone", 15] == (120, 1008) and num_trials["validation", 15] == (30, 36)
    assert num_trials["everyone", 14] == (112, 560) and num_trials["validation", 14][0] == 28


@pytest.mark.slow
def test_real_speech(tmp_path, shared_data):
    out = tmp_path / "speechocean"
    prepare(shared_data / "speechocean_mini", out)
    assert "1,440 found, 1,440 usable, 0 skipped, 0 left out" in (out / "summary.txt").read_text()
