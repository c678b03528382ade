"""The checks: defects of audio and lists are found, named and counted, and the machine is
described.
"""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

import speakernet
from speakernet.checks import lists as checks
from speakernet.checks import worst
from speakernet.checks.doctor import (
    CheckRequest,
    augmentation_findings,
    full_check,
    machine_findings,
)
from speakernet.data.audio import write_audio
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.lists import read_training_list, read_trials
from speakernet.data.opening import open_source
from tests.commands import run_command


def noise(seed, seconds=1.0, level=0.1, rate=16000):
    return (level * np.random.default_rng(seed).standard_normal(int(seconds * rate))).astype(
        np.float32
    )


TRAIN = Path("train.txt")
TRIALS = Path("trials.txt")
HERE = Path()


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    """The working directory, with a training list and trials."""
    monkeypatch.chdir(tmp_path)
    for row, name in enumerate(("a/1", "a/2", "b/1", "b/2", "c/1", "c/2", "a/9", "d/1")):
        write_audio(f"{name}.wav", noise(row))
    TRAIN.write_text("a a/1.wav\na a/2.wav\nb b/1.wav\nb b/2.wav\n")
    TRIALS.write_text("1 c/1.wav c/2.wav\n0 c/1.wav a/9.wav\n")


def look(**changes):
    request = {
        "train_list": TRAIN,
        "train_root": HERE,
        "trials": ((TRIALS, HERE),),
        "save_path": Path("exps"),
        "num_jobs": 2,
    }
    return full_check(CheckRequest(**request | changes))


def finding_of(result, check):
    (finding,) = [item for item in result if item.check == check]
    return finding


def write(name, text):
    Path(name).write_text(text)


@pytest.mark.slow
def test_good_corpus():
    result = look()
    assert worst(finding for finding in result if "audio" in finding.check) == "ok"
    assert "all 4 decode" in finding_of(result, "training audio: samples").message


def test_defects_of_audio():
    write_audio("a/1.wav", noise(1, level=1e-5))
    write_audio("a/2.wav", noise(2, level=2.0))
    write_audio("b/1.wav", noise(3, seconds=0.2))
    write_audio("b/2.wav", np.stack([noise(4, rate=8000), noise(5, rate=8000)], axis=1), 8000)
    whole = Path("c/1.wav").read_bytes()
    Path("c/1.wav").write_bytes(whole[: len(whole) // 2])
    result = look()
    for check, example in {
        "training audio: silent": "a/1.wav",
        "training audio: clipped": "a/2.wav",
        "training audio: short": "b/1.wav (0.20 s)",
        "trial audio (trials.txt): truncated": "c/1.wav",
    }.items():
        finding = finding_of(result, check)
        assert finding.examples == (example,) and finding.message.startswith("1 ")
    assert "8000 Hz (1)" in finding_of(result, "training audio: rate").message
    assert finding_of(result, "training audio: channels").message.startswith(
        "1 file with up to 2 channels"
    )


def test_broken_files():
    Path("a/1.wav").write_bytes(b"")
    Path("a/2.wav").write_bytes(Path("a/2.wav").read_bytes()[:44])
    write_audio("b/1.flac", noise(7))
    content = Path("b/1.flac").read_bytes()
    Path("b/1.wav").write_bytes(content[: len(content) // 2] + bytes(len(content) // 2))
    fast = finding_of(look(is_fast=True), "training audio: headers")
    assert fast.level == "error" and fast.message.startswith("2 ")
    assert "b/1.wav" in finding_of(look(), "training audio: damaged").examples[0]


def test_duplicate_audio():
    shutil.copy("a/1.wav", "b/2.wav")
    result = look()
    finding = finding_of(result, "training audio: two speakers")
    assert (finding.level, finding.examples) == ("error", ("a/1.wav = b/2.wav",))
    assert not [finding for finding in result if finding.check.endswith("duplicates")]
    shutil.copy("a/2.wav", "b/1.wav")
    assert len(finding_of(look(), "training audio: two speakers").examples) == 2
    shutil.copy("a/1.wav", "a/2.wav")
    assert finding_of(look(), "training audio: duplicates").level == "warning"


def syllables(seed):
    """Noise whose level changes ten times a second."""
    levels = np.random.default_rng(seed).uniform(-30, 0, 16)
    return noise(seed, 1.6) * np.repeat(10 ** (levels / 20), 1600).astype(np.float32)


@pytest.mark.parametrize("suffix", ["mp3", "ogg", "flac"])
def test_copies_in_another_format(suffix):
    for row, name in enumerate(("a/1", "a/2", "b/1", "b/2", "c/1", "c/2")):
        write_audio(f"{name}.wav", syllables(row))
    # A copy that begins a tenth of a second later, as after AAC; quieter, so that a FLAC has other
    # samples too.
    delayed = 0.9 * np.concatenate([np.zeros(1600, dtype=np.float32), syllables(0)])
    soundfile.write(f"a/3.{suffix}", delayed, 16000)
    soundfile.write(f"c/3.{suffix}", 0.9 * syllables(4), 16000)
    with TRAIN.open("a") as file:
        file.write(f"a a/3.{suffix}\n")
    with TRIALS.open("a") as file:
        file.write(f"1 c/1.wav c/3.{suffix}\n1 c/2.wav c/3.{suffix}\n")
    result = look()
    finding = finding_of(result, "training audio: copies")
    assert finding.level == "warning" and finding.examples in (
        (f"a/1.wav = a/3.{suffix}",),
        (f"a/3.{suffix} = a/1.wav",),
    )
    assert finding_of(result, "trial audio (trials.txt): copies").examples == (
        f"c/1.wav = c/3.{suffix}",
    )


def test_a_list_that_helps_to_decide():
    """Targets are 20 dB louder than non-targets, and half of them are of three speakers."""
    lines = []
    for row in range(6):
        for name, level in (("1", 0.2), ("2", 0.2), ("3", 0.02)):
            write_audio(f"s{row}/{name}.wav", noise(10 * row + int(name), 1, level))
        lines.append(f"1 s{row}/1.wav s{row}/2.wav\n0 s{row}/3.wav s{(row + 1) % 6}/3.wav\n")
    TRIALS.write_text("".join(lines))
    result = look()
    found = [item for item in result if item.check == "shortcuts in trials.txt"]
    assert [item.level for item in found if "the loudness is larger" in item.message] == ["warning"]
    assert "3 speakers" in finding_of(result, "speakers of trials.txt").message
    fast = [item for item in look(is_fast=True) if item.check.startswith("shortcuts")]
    assert not fast


def test_cohort_and_calibration_list():
    """Of the speakers c and d in the trials, c is in the calibration list and d in the cohort."""
    TRIALS.write_text("1 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n")
    write("fit.txt", "1 c/1.wav c/2.wav\n0 c/1.wav b/1.wav\n")
    write("cohort.txt", "d d/1.wav\nb b/1.wav\n")
    request = CheckRequest(
        trials=((TRIALS, HERE),),
        cohort_list=Path("cohort.txt"),
        calibration_list=Path("fit.txt"),
        is_fast=True,
    )
    overlaps = [item for item in full_check(request) if item.check == "overlap"]
    assert [item.examples for item in overlaps] == [("d",), ("c",)]
    own = CheckRequest(trials=request.trials, calibration_list=TRIALS, is_fast=True)
    assert not [item for item in full_check(own) if item.check == "overlap"]


def test_missing_lists_and_roots():
    trials = ((Path("none.txt"), HERE), (TRIALS, Path("nowhere")))
    findings = full_check(CheckRequest(Path("none.txt"), Path("nowhere"), trials, is_fast=True))
    errors = [finding.check for finding in findings if finding.level == "error"]
    assert errors == ["training list", "training audio", "trial list", "trial audio"]


def test_several_corpora():
    for number in (1, 2):
        write_audio(f"e/{number}.wav", noise(10 + number))
    write("more.txt", "a e/1.wav\na e/2.wav\nd d/1.wav\nd nowhere.wav\n")
    corpora = {name: (Path(f"{name}.txt"), HERE) for name in ("train", "more")}
    result = look(train_list=None, corpora=corpora, is_fast=True)
    speakers = finding_of(result, "speakers").message
    assert "4 speakers" in speakers and "train + more" in speakers
    assert "more/nowhere.wav" in str(finding_of(result, "training audio: files"))
    # Each corpus is compared by name; `a` is in the trials.
    overlaps = [finding for finding in result if finding.check == "overlap"]
    assert [finding.level for finding in overlaps] == ["warning", "ok"]
    assert "train.txt" in overlaps[0].message
    missing = full_check(CheckRequest(corpora={"none": (Path("none.txt"), HERE)}, is_fast=True))
    assert [finding.check for finding in missing if finding.level == "error"] == [
        "training list none"
    ]


def test_machine(tmp_path):
    findings = {
        finding.check: finding for finding in machine_findings(tmp_path / "not" / "made" / "yet")
    }
    assert {"free space", "processor", "ffmpeg", "torch", "GPU"} <= set(findings)
    assert findings["torch"].level == "ok" and not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("train", "config", "status"),
    [
        ("a a/1.wav\na a/1.wav\nb b/1.wav\n", {}, 0),
        ("a a/1.wav\nb\n", {}, 1),
        ("a a/1.wav\nb b/1.wav\n", {"loss": {"name": "angleproto"}}, 1),
    ],
    ids=["warnings only", "malformed list", "impossible options"],
)
def test_status(train, config, status, capsys):
    TRAIN.write_text(train)
    data = {
        "train_list": "train.txt",
        "train_path": ".",
        "validation_list": "trials.txt",
        "validation_path": ".",
    }
    write("my.yaml", json.dumps({"data": data, **config}))
    run_command("doctor --config my.yaml --fast", status)
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["level", "check", "found"] and "options" in table
    assert table.splitlines()[-1].endswith("you can train") == (status == 0)
    assert not list(HERE.glob("*.png"))
    # Without a list, nothing was checked that could justify this conclusion.
    run_command("doctor --fast")
    assert "--list" in capsys.readouterr().out.splitlines()[-1]


def test_default_root_is_the_folder_of_the_list(monkeypatch, capsys):
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    run_command("doctor --list ../train.txt --trials ../trials.txt --fast")
    assert "training audio: length" in capsys.readouterr().out
    for number in (1, 2):
        Path(f"../c/{number}.wav").unlink()
    run_command("doctor --trials ../trials.txt --fast", 1)


@pytest.mark.parametrize(("option", "number"), [("--jobs", 0), ("--min_seconds", -1)])
def test_numbers_out_of_range(option, number, capsys):
    with contextlib.suppress(SystemExit):
        run_command(f"doctor {option} {number}", 1)
    assert f"{number}; expected at least" in capsys.readouterr().err


def test_json(capsys):
    run_command("doctor --list train.txt --root . --trials trials.txt --fast --json")
    answer = json.loads(capsys.readouterr().out)
    assert (
        answer["level"] in ("ok", "warning")
        and answer["machine"]["versions"]["speakernet"] == speakernet.__version__
    )
    assert {"speakers", "training audio: length", "overlap"} <= {
        finding["check"] for finding in answer["findings"]
    }


def test_missing_ffmpeg(monkeypatch):
    monkeypatch.setenv("SPEAKERNET_FFMPEG", "/no/such/ffmpeg")
    assert finding_of(look(is_fast=True), "ffmpeg").level == "ok"
    TRAIN.write_text("a a/1.m4a\nb b/1.wav\n")
    assert finding_of(look(is_fast=True), "ffmpeg").level == "warning"


def check(train=None, trials=None, **options):
    """The findings about lists with these lines, by check; None: the list of the corpus."""
    for path, text in ((TRAIN, train), (TRIALS, trials)):
        if text is not None:
            path.write_text(text)
    source = open_source(HERE)
    findings = checks.quick_check(
        train_list=read_training_list(TRAIN),
        train_source=source,
        trials=[(read_trials(TRIALS), source)],
        max_bad_share=0.01,
        min_seconds=0.0,
        **{"min_utterances": 1, **options},
    )
    return {finding.check: finding for finding in findings}


@pytest.mark.parametrize(
    ("train", "trials", "name", "level", "start", "examples"),
    [
        ("a a/1.wav\na a/2.wav\n", None, "speakers", "error", "2 utterances of 1 speaker (", ()),
        (
            "a a/1.wav\nb b/1.wav\nb b/2.wav\n",
            None,
            "few utterances",
            "warning",
            "1 speaker ",
            ("a (1)",),
        ),
        (
            "a a/1.wav\na a/1.wav\nb b/1.wav\nb a/1.wav\n",
            None,
            "repeated rows",
            "warning",
            "2 ",
            ("a/1.wav",) * 2,
        ),
        (
            None,
            "1 c/1.wav c/1.wav\n0 c/1.wav d/1.wav\n",
            "self trials",
            "warning",
            "1 ",
            ("c/1.wav c/1.wav",),
        ),
        (None, "0 c/1.wav d/1.wav\n0 c/2.wav d/1.wav\n", "trials", "error", "2 trials", ()),
        (None, "c/1.wav d/1.wav\nc/2.wav d/1.wav\n", "trials", "ok", "2 trials", ()),
        (
            None,
            "1 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n0 c/1.wav c/2.wav\n",
            "labels",
            "error",
            "1 ",
            ("c/1.wav c/2.wav",),
        ),
    ],
)
def test_defects_of_lists(train, trials, name, level, start, examples):
    finding = check(train, trials, min_utterances=2)[name]
    assert (finding.level, finding.examples) == (level, examples) and finding.message.startswith(
        start
    )


def test_missing_files():
    """A few in the training list cause a warning, one among the trials an error; the first ten are
    named.
    """
    findings = check("".join(f"a gone/{row:02}.wav\n" for row in range(25)) + "b b/1.wav\n")
    finding = findings["training audio: files"]
    assert finding.level == "error" and finding.message.startswith("25 ")
    assert finding.examples == tuple(f"gone/{row:02}.wav" for row in range(10))
    train = "a a/1.wav\n" * 300 + "b b/1.wav\n" * 300 + "b gone.wav\n"
    findings = check(train, "1 c/1.wav c/2.wav\n0 c/1.wav gone.wav\n")
    assert findings["training audio: files"].level == "warning"
    assert findings["trial audio (trials.txt): files"].level == "error"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("{2} {0} {1}", "--test_list"),
        ("{0} {1} {3}", "--test_list"),
        ("{0} {1}", "--test_list"),
        ("{0} c", "the speaker must come first"),
    ],
)
def test_wrong_kind_of_list(line, advice):
    rows = [("c/1.wav", "c/2.wav", 1), ("c/1.wav", "d/1.wav", 0)]
    kinds = ("nontarget", "target")
    text = "\n".join(line.format(*pair, label, kinds[label]) for *pair, label in rows)
    (finding,) = check(text).values()
    assert finding.level == "error" and "train.txt" in finding.message
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("a\\1.wav", "--replace '\\' /"),
        ("D:\\x\\1.wav", "--strip 'D:\\'"),
        ('"a/1.wav"', """--replace '"' ''"""),
    ],
)
def test_paths_of_windows_and_quotes(path, advice):
    finding = check(f"a {path}\nb b/gone.wav\n")["training audio: files"]
    assert finding.level == "error" and advice in finding.advice


def test_kaldi_folder_without_files():
    write("utt2spk", "u1 a\nu2 b\n")
    result = look(train_list=HERE, trials=(), is_fast=True)
    assert "wav.scp" in finding_of(result, "training audio: files").advice


def test_noise_and_rirs():
    for name in ("noise/1.wav", "noise/2.wav", "rirs/1.wav"):
        write_audio(name, noise(1))
    write_audio("rirs/2.wav", np.zeros(100))
    Path("bad").mkdir()
    Path("bad/1.wav").write_bytes(b"<html>")

    def findings(noise_path, rir_path):
        options = AugmentOptions(noise_path=noise_path, rir_path=rir_path)
        return {finding.check: finding for finding in augmentation_findings(options, 16000)}

    looked = findings("noise", "rirs")
    assert looked["noise"].level == "ok" and looked["noise"].message.startswith("all 2 files")
    assert looked["RIRs"].level == "warning" and "1 of 2 files" in looked["RIRs"].message
    assert "2.wav" in looked["RIRs"].message
    looked = findings("bad", "")
    assert looked["noise"].level == "error" and "RIRs" not in looked


def test_speakers_called_0_and_1():
    trials = "1 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n"
    assert worst(check("0 a/1.wav\n0 a/2.wav\n1 b/1.wav\n1 b/2.wav\n", trials).values()) == "ok"


@pytest.mark.parametrize(
    ("train", "trials", "shared"),
    [
        ("a a/1.wav\nb b/1.wav\n", "1 b/9.wav b/8.wav\n0 b/9.wav c/1.wav\n", ("b",)),
        (
            "a x/a/s/1.wav\nb x/b/s/1.wav\n",
            "1 b/s/9.wav b/s/8.wav\n0 b/s/9.wav c/s/1.wav\n",
            ("b",),
        ),
        ("a 0001.wav\nb 0002.wav\n", "1 0002.wav 0003.wav\n0 0002.wav 0004.wav\n", ("0002.wav",)),
        (
            "a_b a b/1.wav\nc c/1.wav\n",
            "1\ta b/9.wav\ta b/8.wav\n0\ta b/9.wav\td/1.wav\n",
            ("a_b",),
        ),
    ],
)
def test_overlap(train, trials, shared):
    TRAIN.write_text(train)
    TRIALS.write_text(trials)
    (finding,) = checks.overlap_findings(read_training_list(TRAIN), read_trials(TRIALS))
    assert (finding.level, finding.examples) == ("warning" if shared else "ok", shared)
