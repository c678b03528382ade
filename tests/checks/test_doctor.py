"""The doctor: every defect in the audio is found, and the machine is described."""

import json

import numpy as np
import pytest

import speakernet
from speakernet.checks import worst
from speakernet.checks.doctor import CheckRequest, full_check, machine_findings
from speakernet.cli import main
from speakernet.data.audio import write_audio
from speakernet.data.lists import ListError, read_trials


def noise(seed, seconds=1.0, level=0.1, rate=16000):
    return (level * np.random.default_rng(seed).standard_normal(int(seconds * rate))).astype(np.float32)


@pytest.fixture()
def corpus(tmp_path, monkeypatch):
    for row, name in enumerate(("a/1", "a/2", "b/1", "b/2", "c/1", "c/2", "a/9")):
        write_audio(tmp_path / f"{name}.wav", noise(row), 16000)
    (tmp_path / "train.txt").write_text("a a/1.wav\na a/2.wav\nb b/1.wav\nb b/2.wav\n")
    (tmp_path / "trials.txt").write_text("1 c/1.wav c/2.wav\n0 c/1.wav a/9.wav\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def look(corpus, *, is_fast=False):
    trials = ((corpus / "trials.txt", corpus),)
    return full_check(CheckRequest(corpus / "train.txt", corpus, trials, corpus / "exps", is_fast=is_fast, num_jobs=2))


def look_at_trials(corpus, **lists):
    """The findings about lists of trials alone."""
    for name, text in lists.items():
        (corpus / f"{name}.txt").write_text(text)
    return full_check(CheckRequest(None, None, tuple((corpus / f"{name}.txt", corpus) for name in lists)))[0]


def found(result, check):
    (finding,) = [one for one in result[0] if one.check == check]
    return finding


def put(corpus, source, target):
    (corpus / target).parent.mkdir(exist_ok=True)
    (corpus / target).write_bytes((corpus / source).read_bytes())


def test_a_good_corpus(corpus):
    result = look(corpus)
    assert worst(one for one in result[0] if "audio" in one.check) == "ok"
    assert "all 4 decode" in found(result, "training audio: samples").message
    assert set(result[1]) == {"training audio", "trial audio (trials.txt)"}


def test_defects_of_audio(corpus):
    write_audio(corpus / "a/1.wav", noise(1, level=1e-5), 16000)
    write_audio(corpus / "a/2.wav", noise(2, level=2.0), 16000)
    write_audio(corpus / "b/1.wav", noise(3, seconds=0.2), 16000)
    write_audio(corpus / "b/2.wav", np.stack([noise(4, rate=8000), noise(5, rate=8000)], axis=1), 8000)
    whole = (corpus / "c/1.wav").read_bytes()
    (corpus / "c/1.wav").write_bytes(whole[: len(whole) // 2])
    result = look(corpus)
    for check, examples in {
        "training audio: silent": ("a/1.wav",),
        "training audio: clipped": ("a/2.wav",),
        "training audio: short": ("b/1.wav (0.20 s)",),
        "trial audio (trials.txt): truncated": ("c/1.wav",),
    }.items():
        assert found(result, check).examples == examples and found(result, check).message.startswith("1 ")
    assert "8000 Hz (1)" in found(result, "training audio: rate").message
    assert found(result, "training audio: channels").message.startswith("1 file with up to 2 channels")


def test_broken_files_by_header_or_content(corpus):
    (corpus / "a/1.wav").write_bytes(b"")
    (corpus / "a/2.wav").write_bytes((corpus / "a/2.wav").read_bytes()[:44])
    write_audio(corpus / "b/1.flac", noise(7), 16000)
    content = (corpus / "b/1.flac").read_bytes()
    (corpus / "b/1.wav").write_bytes(content[: len(content) // 2] + bytes(len(content) // 2))
    fast = found(look(corpus, is_fast=True), "training audio: headers")
    assert fast.level == "error" and fast.message.startswith("2 ")
    assert "b/1.wav" in found(look(corpus), "training audio: damaged").examples[0]


def test_the_same_audio_twice(corpus):
    put(corpus, "a/1.wav", "b/2.wav")
    result = look(corpus)
    finding = found(result, "training audio: two speakers")
    assert (finding.level, finding.examples) == ("error", ("a/1.wav = b/2.wav",))
    assert not [one for one in result[0] if one.check.endswith("duplicates")]
    put(corpus, "a/2.wav", "b/1.wav")
    (line,) = found(look(corpus), "training audio: two speakers").examples
    assert line.endswith(", and 1 more of these two")
    put(corpus, "a/1.wav", "a/2.wav")
    assert found(look(corpus), "training audio: duplicates").level == "warning"


@pytest.mark.parametrize(
    ("text", "bad_lines"),
    [
        (b"1 a b", []), (b"a b target", []), (b"a b nontarget\r\n", []), (b"a b", []), (b"", []), (b"1\ta b\tc d", []),
        (b"2 a b", [1]), (b"a", [1]), (b"a b c d", [1]), (b"1 a", []), (b"a b\tc", []), (b"\tb", [1]),
        (b"1 a \xff", [1]), (b"1 a b\na b target\n0 a c\na b\n", [2, 4]),
    ],
)  # fmt: skip
def test_rows_of_trials(text, bad_lines, tmp_path):
    """The doctor and the reader that training uses judge a row alike."""
    path = tmp_path / "trials.txt"
    path.write_bytes(text)
    findings = full_check(CheckRequest(trials=((path, None),), is_fast=True))[0]
    malformed = [example for one in findings if one.check == "trial list" for example in one.examples]
    assert [example.split(":")[0] for example in malformed] == [f"line {line}" for line in bad_lines]
    if bad_lines:
        with pytest.raises(ListError):
            read_trials(path)


def test_lists_and_roots_that_are_missing(corpus):
    trials = ((corpus / "none.txt", corpus), (corpus / "trials.txt", corpus / "nowhere"))
    findings = full_check(CheckRequest(corpus / "none.txt", corpus / "nowhere", trials, is_fast=True))[0]
    errors = [finding.check for finding in findings if finding.level == "error"]
    assert errors == ["training list", "training audio", "trial list", "trial audio"]


def test_the_machine(tmp_path, monkeypatch):
    findings = {finding.check: finding for finding in machine_findings(tmp_path / "not" / "made" / "yet")}
    assert {"free space", "processor", "ffmpeg", "torch", "GPU"} <= set(findings)
    assert findings["torch"].level == "ok" and not (tmp_path / "not").exists()
    for flags, shown in ((frozenset({"amx_bf16"}), "(amx_bf16)"), (frozenset(), "no native bf16")):
        monkeypatch.setattr("speakernet.machine.facts.cpu_flags", lambda flags=flags: flags)
        (processor,) = [one for one in machine_findings(tmp_path) if one.check == "processor"]
        assert shown in processor.message


@pytest.mark.parametrize(
    ("train", "config", "status"),
    [
        ("a a/1.wav\na a/1.wav\nb b/1.wav\n", {}, 0),
        ("a a/1.wav\nb\n", {}, 1),
        ("a a/1.wav\nb b/1.wav\n", {"runtime": {"compile": "on", "gradient_checkpointing": True}}, 1),
    ],
    ids=["warnings only", "malformed list", "impossible options"],
)
def test_the_status_is_whether_training_can_start(corpus, train, config, status, capsys):
    (corpus / "train.txt").write_text(train)
    data = {"train_list": "train.txt", "train_path": ".", "validation_list": "trials.txt", "validation_path": "."}
    (corpus / "my.yaml").write_text(json.dumps({"data": data, **config}))
    assert main(["doctor", "--config", "my.yaml", "--fast"]) == status
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["level", "check", "found"] and "options" in table
    assert table.splitlines()[-1].endswith("you can train") == (status == 0)
    assert not list(corpus.glob("*.png"))


def test_json_and_png(corpus, capsys):
    options = ["doctor", "--list", "train.txt", "--root", ".", "--trials", "trials.txt", "--fast"]
    assert main([*options, "--json", "--png", "durations.png"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (
        answer["level"] in ("ok", "warning") and answer["machine"]["versions"]["speakernet"] == speakernet.__version__
    )
    assert {"speakers", "training audio: length", "overlap"} <= {one["check"] for one in answer["findings"]}
    assert (corpus / "durations.png").read_bytes()[:4] == b"\x89PNG"


def test_a_corpus_that_is_made_on_first_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--config", "exp01.yaml", "--fast"]) == 0
    assert "data/synthetic" in " ".join(capsys.readouterr().out.split()) and list(tmp_path.iterdir()) == []
