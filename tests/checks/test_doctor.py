"""The doctor: every defect in the audio is found, and the machine is described."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

import speakernet
from speakernet import terminal
from speakernet.checks import Finding, machine, worst
from speakernet.checks.findings import closing_line
from speakernet.checks.full import CheckRequest, CheckResult, full_check
from speakernet.checks.histograms import duration_histogram, write_duration_png
from speakernet.checks.machine import machine_findings
from speakernet.checks.samples import read_facts
from speakernet.cli import main
from speakernet.data.audio import write_audio
from speakernet.data.ffmpeg import FfmpegError
from speakernet.data.lists import ListError, StringTable, read_trials
from speakernet.data.opening import open_source


def noise(seed: int, seconds: float = 1.0, level: float = 0.1, rate: int = 16000) -> np.ndarray:
    return (level * np.random.default_rng(seed).standard_normal(int(seconds * rate))).astype(np.float32)


@pytest.fixture()
def corpus(tmp_path: Path) -> Path:
    for row, name in enumerate(("a/1", "a/2", "b/1", "b/2", "c/1", "c/2")):
        write_audio(tmp_path / f"{name}.wav", noise(row), 16000)
    (tmp_path / "train.txt").write_text("a a/1.wav\na a/2.wav\nb b/1.wav\nb b/2.wav\n")
    (tmp_path / "trials.txt").write_text("1 c/1.wav c/2.wav\n0 c/1.wav a/9.wav\n")
    write_audio(tmp_path / "a/9.wav", noise(99), 16000)
    return tmp_path


def look(corpus: Path, *, is_fast: bool = False) -> CheckResult:
    trials = ((corpus / "trials.txt", corpus),)
    return full_check(CheckRequest(corpus / "train.txt", corpus, trials, corpus / "exps", is_fast=is_fast, num_jobs=2))


def found(result: CheckResult, check: str) -> Finding:
    (finding,) = [one for one in result.findings if one.check == check]
    return finding


def test_a_good_corpus_has_no_complaint_about_its_audio(corpus):
    result = look(corpus)
    audio = [finding for finding in result.findings if finding.check.startswith(("training audio", "trial audio"))]
    assert worst(audio) == "ok"
    assert "all 4 decode" in found(result, "training audio: samples").message
    assert set(result.durations) == {"training audio", "trial audio (trials.txt)"}


def test_silent_clipped_short_wide_and_slow_files_are_found(corpus):
    write_audio(corpus / "a/1.wav", noise(1, level=1e-5), 16000)
    write_audio(corpus / "a/2.wav", noise(2, level=2.0), 16000)
    write_audio(corpus / "b/1.wav", noise(3, seconds=0.2), 16000)
    write_audio(corpus / "b/2.wav", np.stack([noise(4, rate=8000), noise(5, rate=8000)], axis=1), 8000)
    result = look(corpus)
    assert found(result, "training audio: silent").examples == ("a/1.wav",)
    assert found(result, "training audio: clipped").examples == ("a/2.wav",)
    assert found(result, "training audio: short").examples == ("b/1.wav (0.20 s)",)
    assert "8000 Hz (1)" in found(result, "training audio: rate").message
    assert "1 files have up to 2 channels" in found(result, "training audio: channels").message


def test_a_file_without_its_end_is_found(corpus):
    """Of a copy that broke off, say; what is there decodes."""
    whole = (corpus / "a/1.wav").read_bytes()
    (corpus / "a/1.wav").write_bytes(whole[: len(whole) // 2])
    finding = found(look(corpus), "training audio: cut off")
    assert finding.level == "warning" and finding.examples == ("a/1.wav",)


def test_broken_files_are_errors_by_header_or_by_content(corpus):
    (corpus / "a/1.wav").write_bytes(b"")
    (corpus / "a/2.wav").write_bytes((corpus / "a/2.wav").read_bytes()[:44])
    flac = corpus / "b" / "1.flac"
    write_audio(flac, noise(7), 16000)
    content = bytearray(flac.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    (corpus / "b/1.wav").write_bytes(bytes(content))
    fast = look(corpus, is_fast=True)
    assert found(fast, "training audio").level == "error"
    assert found(fast, "training audio").message == "2 of 4 files cannot be read"
    assert "b/1.wav" in found(look(corpus), "training audio: damaged").examples[0]


def test_the_same_audio_twice_warns_and_under_two_speakers_is_an_error(corpus):
    (corpus / "b/2.wav").write_bytes((corpus / "a/1.wav").read_bytes())
    result = look(corpus)
    assert found(result, "training audio: two speakers").level == "error"
    assert found(result, "training audio: two speakers").examples == ("a/1.wav = b/2.wav",)
    # Told once, and a person in two folders in one line.
    assert not [one for one in result.findings if one.check.endswith("duplicates")]
    (corpus / "b/1.wav").write_bytes((corpus / "a/2.wav").read_bytes())
    (line,) = found(look(corpus), "training audio: two speakers").examples
    assert line.endswith(", and 1 more of these two")
    (corpus / "a/2.wav").write_bytes((corpus / "a/1.wav").read_bytes())
    assert found(look(corpus), "training audio: duplicates").level == "warning"


def test_a_person_in_two_folders_is_found_in_trial_lists_too(corpus):
    (corpus / "d").mkdir(exist_ok=True)
    (corpus / "d" / "1.wav").write_bytes((corpus / "c" / "1.wav").read_bytes())
    (corpus / "first.txt").write_text("1 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n")
    write_audio(corpus / "c" / "2.wav", noise(9), 16000)
    lists = tuple((corpus / name, corpus) for name in ("first.txt", "second.txt"))
    result = full_check(CheckRequest(None, None, lists[:1]))
    assert found(result, "trial audio (first.txt): two speakers").examples == ("c/1.wav = d/1.wav",)
    # Between two lists: the same names are the reader's choice, another name for the same audio is an accident.
    (corpus / "first.txt").write_text("1 c/1.wav c/2.wav\n0 c/1.wav a/1.wav\n")
    for name, is_told in (("c/1.wav", False), ("d/1.wav", True)):
        (corpus / "second.txt").write_text(f"1 {name} {name}\n0 {name} b/1.wav\n")
        findings = full_check(CheckRequest(None, None, lists)).findings
        assert [one.examples for one in findings if one.check.endswith("overlap")] == [("d/1.wav = c/1.wav",)] * is_told


def test_swapped_labels_are_told(corpus):
    for labels, is_told in (("10", False), ("01", True)):
        (corpus / "first.txt").write_text(f"{labels[0]} c/1.wav c/2.wav\n{labels[1]} c/1.wav d/1.wav\n")
        findings = full_check(CheckRequest(None, None, ((corpus / "first.txt", None),))).findings
        assert [one.level for one in findings if one.check == "labels"] == ["warning"] * is_told


def test_audio_that_training_hears_under_another_name_is_no_trial(corpus):
    (corpus / "c" / "1.wav").write_bytes((corpus / "a/1.wav").read_bytes())
    write_audio(corpus / "c" / "2.wav", noise(9), 16000)
    (corpus / "others.txt").write_text("1 c/1.wav c/2.wav\n0 c/2.wav d/1.wav\n")
    result = full_check(CheckRequest(corpus / "train.txt", corpus, ((corpus / "others.txt", corpus),)))
    found_one = found(result, "trial audio (others.txt): overlap")
    assert found_one.level == "warning" and found_one.examples == ("c/1.wav = a/1.wav",)
    (corpus / "others.txt").write_text("1 c/2.wav c/2.wav\n0 c/2.wav d/1.wav\n")
    again = full_check(CheckRequest(corpus / "train.txt", corpus, ((corpus / "others.txt", corpus),)))
    assert not [one for one in again.findings if one.check.endswith(": overlap")]


def row_findings(**lists) -> list[Finding]:
    """What the doctor says about the rows of a list."""
    findings = full_check(CheckRequest(**lists, is_fast=True)).findings
    return [one for one in findings if "malformed rows" in one.message]


def test_every_malformed_row_is_named_with_its_line(tmp_path):
    rows = [f"speaker{row} path" if row % 2 else f"lonely{row}" for row in range(40)]
    (tmp_path / "train.txt").write_text("\n".join(rows))
    (finding,) = row_findings(train_list=tmp_path / "train.txt")
    assert finding.level == "error"
    assert finding.message.startswith("20 malformed rows")
    assert [example.split(":")[0] for example in finding.examples] == [f"line {row}" for row in range(1, 21, 2)]


def test_lists_and_roots_that_are_not_there_are_errors_not_a_traceback(corpus):
    trials = ((corpus / "none.txt", corpus), (corpus / "trials.txt", corpus / "nowhere"))
    findings = full_check(CheckRequest(corpus / "none.txt", corpus / "nowhere", trials, is_fast=True)).findings
    errors = [finding.check for finding in findings if finding.level == "error"]
    assert errors == ["training list", "training files", "trial list", "trial files"]


@pytest.mark.parametrize(
    ("line", "is_good"),
    [
        ("1 a b", True), ("0 a b", True), ("a b target", True), ("a b nontarget\r\n", True), ("a b", True), ("", True),
        ("1\ta b\tc d", True), ("2 a b", False), ("a", False), ("a b c d", False), ("1 a", True), ("1 a ", True),
        ("a b\tc", True), ("1\ta b", True), ("\tb", False), ("1 a \udcff", False),
    ],
)  # fmt: skip
def test_rows_of_trials(line, is_good, tmp_path):
    """The doctor and the reader that training uses judge a row alike."""
    path = tmp_path / "trials.txt"
    path.write_bytes(line.encode("utf-8", "surrogateescape"))
    assert (row_findings(trials=((path, None),)) == []) == is_good
    if line:
        try:
            read_trials(path)
        except ListError:
            assert not is_good
        else:
            assert is_good


def test_a_row_of_another_form_than_the_list_is_named_by_the_doctor_too(tmp_path):
    """Training refuses such a list; the doctor once found nothing in it."""
    (tmp_path / "trials.txt").write_text("1 a b\na b target\n0 a c\na b\n")
    (finding,) = row_findings(trials=((tmp_path / "trials.txt", None),))
    assert [example.split(":")[0] for example in finding.examples] == ["line 2", "line 4"]


def test_the_machine_is_described(tmp_path):
    findings = {finding.check: finding for finding in machine_findings(tmp_path / "not" / "made" / "yet")}
    assert {"free space", "ffmpeg", "torch", "GPU"} <= set(findings)
    assert findings["torch"].level == "ok"
    assert not (tmp_path / "not").exists()


def test_histograms(tmp_path):
    seconds = np.array([0.2, 1.5, 1.6, 4.5, 100.0])
    lines = duration_histogram(seconds).splitlines()
    assert [int(line.split("s ")[1].replace("and more", "").split()[0]) for line in lines][:4] == [1, 0, 2, 0]
    assert lines[-1].split()[-2:] == ["1", "#" * 25]
    write_duration_png(tmp_path / "d.png", {"a": seconds, "b": seconds})
    assert (tmp_path / "d.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_prints_a_table_and_its_exit_code_says_the_worst(corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    options = ["--list", "train.txt", "--root", ".", "--trials", "trials.txt", "--fast"]
    code = main(["doctor", *options])
    table = capsys.readouterr().out
    assert code == 1, table
    assert table.splitlines()[0].split() == ["level", "check", "found"]
    assert not list(corpus.glob("*.png")), "a picture is drawn where it is asked for, and only there"
    main(["doctor", *options, "--png", "durations.png"])
    assert (corpus / "durations.png").read_bytes()[:4] == b"\x89PNG"
    (corpus / "train.txt").write_text("a a/1.wav\nb\n")
    assert main(["doctor", *options]) == 2


def test_a_config_is_examined_too(corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    data = {"train_list": "train.txt", "train_path": ".", "validation_list": "trials.txt", "validation_path": "."}
    (corpus / "my.yaml").write_text(json.dumps({"data": data}))
    code = main(["doctor", "--config", "my.yaml", "--fast"])
    table = capsys.readouterr().out
    assert code == 1, table
    assert "training audio" in table and "can be trained on" in table


def test_options_that_cannot_work_together_are_an_error(corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    data = {"train_list": "train.txt", "train_path": ".", "validation_list": "trials.txt", "validation_path": "."}
    runtime = {"compile": "on", "gradient_checkpointing": True}
    (corpus / "my.yaml").write_text(json.dumps({"data": data, "runtime": runtime}))
    assert main(["doctor", "--config", "my.yaml", "--fast"]) == 2
    assert "does not take gradient checkpointing" in " ".join(capsys.readouterr().out.split())


def test_facts_hold_for_names_with_spaces(tmp_path):
    write_audio(tmp_path / "a b/c d.wav", noise(1, level=0.5), 16000)
    facts = read_facts(open_source(tmp_path), StringTable.from_strings(["a b/c d.wav", "gone.wav"]), 2)
    assert facts.rms[0] == pytest.approx(0.5, rel=0.1)
    assert list(facts.problems) == [1]


def without_ffmpeg(monkeypatch) -> None:
    def nowhere(given=None):
        raise FfmpegError("ffmpeg was not found")

    monkeypatch.setattr(machine, "find_ffmpeg", nowhere)


def test_a_missing_ffmpeg_matters_only_to_lists_that_need_it(corpus, monkeypatch, capsys):
    without_ffmpeg(monkeypatch)
    (corpus / "trials.txt").write_text("1 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n")
    write_audio(corpus / "d/1.wav", noise(99), 16000)
    assert found(look(corpus, is_fast=True), "ffmpeg").level == "ok"
    (corpus / "train.txt").write_text("a a/1.m4a\na a/2.wav\nb b/1.wav\nb b/2.wav\n")
    assert found(look(corpus, is_fast=True), "ffmpeg").level == "warning"
    monkeypatch.chdir(corpus)
    main(["doctor"])
    assert "nothing here needs it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([], "nothing to complain of: you can train"),
        (["ok", "warning"], "1 warning: you can train"),
        (["warning", "warning"], "2 warnings: you can train"),
        (["error", "warning"], "1 error, 1 warning: mend the errors first"),
    ],
)
def test_the_last_line_says_what_it_comes_to(levels, said):
    assert closing_line([Finding(level, "check", "message") for level in levels]).startswith(said)


def test_the_command_ends_with_what_it_comes_to(corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    code = main(["doctor", "--list", "train.txt", "--root", "."])
    assert code in (0, 1)
    assert capsys.readouterr().out.splitlines()[-1].endswith(": you can train")


def test_an_object_for_an_issue_holds_the_table_and_the_machine(corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    (corpus / "train.txt").write_text("a a/1.wav\nb\n")
    options = ["doctor", "--list", "train.txt", "--root", ".", "--fast"]
    status = main(options)
    table = " ".join(capsys.readouterr().out.split())
    assert main([*options, "--json", "--png", "durations.png"]) == status == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["level"] == "error" and answer["missing_parts"] == []
    # The rate of the disk is another one each time.
    told = [one for one in answer["findings"] if "disk" not in one["check"]]
    assert len(told) >= 6 and all(one["check"] in table and one["advice"] in table for one in told)
    assert any("train.txt" in one["message"] or one["examples"] for one in told if one["level"] == "error")
    assert answer["machine"]["versions"]["speakernet"] == speakernet.__version__
    assert answer["machine"]["python"] and answer["machine"]["gpus"] is not None


def test_the_object_of_a_part_names_the_others(corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    options = ["doctor", "--list", "train.txt", "--root", ".", "--fast", "--part_folder", "found", "--json"]
    assert main([*options, "--part", "1/2"]) == 0
    assert json.loads(capsys.readouterr().out)["missing_parts"] == ["2/2"]


def test_the_bar_counts_files_not_bundles(corpus, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    names = StringTable.from_strings(["a/1.wav", "a/2.wav"] * 40)
    read_facts(open_source(corpus), names, 2, "reading")
    assert caplog.messages[-1].startswith("reading: 100 %, 80 of 80 file, ") and "file/s" in caplog.messages[-1]


def test_a_corpus_that_is_made_on_first_use_is_not_missed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--config", "exp01.yaml", "--fast"]) < 2
    assert "made in data/synthetic on first use" in " ".join(capsys.readouterr().out.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_files", "level"), [(16, "ok"), (4700, "ok"), (6000, "warning")])
def test_a_slow_disk_is_warned_about_where_reading_everything_takes_a_minute(
    num_files: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    class SlowSource:
        def read(self, name: str) -> None:
            clock[0] += 1 / 80

    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    found = machine.disk_finding(SlowSource(), StringTable.from_strings(["a.wav"] * num_files), "disk")
    assert found.level == level and found.message.startswith("80 files a second")
