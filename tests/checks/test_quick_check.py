"""The quick checks: each defect is found, named and counted, and a good set gives no complaint."""

from pathlib import Path

import numpy as np
import pytest

from speakernet import checks
from speakernet.checks import Finding, worst
from speakernet.checks.findings import exit_code, table
from speakernet.checks.quick import overlap_findings, repeated_rows, speaker_depths
from speakernet.data.audio import write_audio
from speakernet.data.lists import TrainingList, TrialList, read_training_list, read_trials
from speakernet.data.opening import open_source


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def quick_check(
    train_list: Path | TrainingList | None = None,
    train_root: Path | None = None,
    trials: list[tuple[Path | TrialList, Path | None]] | tuple[()] = (),
    min_utterances: int = 1,
    **others: bool,
) -> list[Finding]:
    """`checks.quick_check` of lists and folders that are named by path."""
    return checks.quick_check(
        train_list=read_training_list(train_list) if isinstance(train_list, Path) else train_list,
        train_source=None if train_root is None else open_source(train_root),
        trials=[
            (read_trials(one) if isinstance(one, Path) else one, None if root is None else open_source(root))
            for one, root in trials
        ],
        min_utterances=min_utterances,
        max_bad_share=0.01,
        **others,
    )


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture()
def corpus(tmp_path: Path) -> Path:
    for name in ("a/1", "a/2", "b/1", "b/2", "c/1", "c/2", "d/1", "d/2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_audio(tmp_path / f"{name}.wav", np.full(1600, 0.1, dtype=np.float32), 16000)
    write(tmp_path / "train.txt", "a a/1.wav\na a/2.wav\nb b/1.wav\nb b/2.wav\n")
    write(tmp_path / "trials.txt", "1 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n1 d/1.wav d/2.wav\n")
    return tmp_path


def test_labels_that_contradict_each_other_are_found(corpus):
    (corpus / "trials.txt").write_text("1 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n0 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n")
    finding = by_check(quick_check(trials=[(corpus / "trials.txt", corpus)]))["labels"]
    assert finding.level == "error" and finding.message.startswith("1 trials stand in the list with both labels")
    assert finding.examples == ("c/1.wav c/2.wav",)


def test_exchanged_columns_of_a_training_list_are_told_as_that(corpus):
    write(corpus / "train.txt", "a/1.wav a\na/2.wav a\nb/1.wav b\n")
    (finding,) = quick_check(train_list=corpus / "train.txt", train_root=corpus)
    assert finding.level == "error" and "has the path first and the speaker second" in finding.message


def test_a_good_set_is_all_ok(corpus):
    findings = quick_check(
        train_list=corpus / "train.txt",
        train_root=corpus,
        trials=[(corpus / "trials.txt", corpus)],
        min_utterances=2,
    )
    assert worst(findings) == "ok"
    assert exit_code(findings) == 0
    assert {"speakers", "training files", "trials", "trial files", "overlap"} <= set(by_check(findings))


def test_lists_that_were_read_already_are_taken_too(corpus):
    findings = quick_check(
        train_list=read_training_list(corpus / "train.txt"),
        trials=[(read_trials(corpus / "trials.txt"), None)],
    )
    assert worst(findings) == "ok"


def test_missing_files_are_counted_and_the_first_ten_named(corpus):
    rows = "".join(f"a gone/{row:02}.wav\n" for row in range(25))
    write(corpus / "train.txt", rows + "b b/1.wav\n")
    finding = by_check(quick_check(train_list=corpus / "train.txt", train_root=corpus))["training files"]
    assert finding.level == "error"
    assert finding.message == "25 of 26 are missing"
    assert finding.examples == tuple(f"gone/{row:02}.wav" for row in range(10))


def test_a_few_missing_training_files_only_warn_but_one_missing_trial_file_is_an_error(corpus):
    write(corpus / "train.txt", "a a/1.wav\n" * 300 + "b b/1.wav\n" * 300 + "b gone.wav\n")
    write(corpus / "trials.txt", "1 c/1.wav c/2.wav\n0 c/1.wav gone.wav\n")
    found = by_check(
        quick_check(train_list=corpus / "train.txt", train_root=corpus, trials=[(corpus / "trials.txt", corpus)])
    )
    assert found["training files"].level == "warning"
    assert found["trial files"].level == "error"


def test_one_speaker_cannot_be_trained_on(corpus):
    write(corpus / "train.txt", "a a/1.wav\na a/2.wav\n")
    assert by_check(quick_check(train_list=corpus / "train.txt"))["speakers"].level == "error"


def test_speakers_with_too_few_utterances_are_named(corpus):
    write(corpus / "train.txt", "a a/1.wav\nb b/1.wav\nb b/2.wav\n")
    finding = by_check(quick_check(train_list=corpus / "train.txt", min_utterances=2))["few utterances"]
    assert finding.level == "warning"
    assert finding.examples == ("a (1)",)


def test_repeated_rows_and_self_trials_are_found(corpus):
    write(corpus / "train.txt", "a a/1.wav\na a/1.wav\nb b/1.wav\nb a/1.wav\n")
    write(corpus / "trials.txt", "1 c/1.wav c/1.wav\n0 c/1.wav d/1.wav\n")
    found = by_check(quick_check(train_list=corpus / "train.txt", trials=[(corpus / "trials.txt", None)]))
    assert "2 rows" in found["repeated rows"].message
    assert "1 trials" in found["self trials"].message
    assert repeated_rows(read_training_list(corpus / "train.txt").paths).tolist() == [1, 3]


def test_trials_of_one_kind_give_no_error_rate(corpus):
    write(corpus / "trials.txt", "0 c/1.wav d/1.wav\n0 c/2.wav d/1.wav\n")
    assert by_check(quick_check(trials=[(corpus / "trials.txt", None)]))["trials"].level == "error"
    write(corpus / "trials.txt", "c/1.wav d/1.wav\nc/2.wav d/1.wav\n")
    assert by_check(quick_check(trials=[(corpus / "trials.txt", None)]))["trials"].level == "ok"


@pytest.mark.parametrize(
    ("train", "trials", "shared"),
    [
        ("a a/1.wav\nb b/1.wav\n", "1 b/9.wav b/8.wav\n0 b/9.wav c/1.wav\n", ("b",)),
        ("a x/a/s/1.wav\nb x/b/s/1.wav\n", "1 b/s/9.wav b/s/8.wav\n0 b/s/9.wav c/s/1.wav\n", ("b",)),
        ("a a/1/1.wav\n1 1/1/1.wav\n", "1 c/1/9.wav c/1/8.wav\n0 c/1/9.wav d/1/1.wav\n", ()),
        ("a 0001.wav\nb 0002.wav\n", "1 0002.wav 0003.wav\n0 0002.wav 0004.wav\n", ("0002.wav",)),
        ("a_b a b/1.wav\nc c/1.wav\n", "1\ta b/9.wav\ta b/8.wav\n0\ta b/9.wav\td/1.wav\n", ("a_b",)),
        ("a 0001.wav\nb 0002.wav\n", "1 0005.wav 0003.wav\n0 0005.wav 0004.wav\n", ()),
    ],
)
def test_overlap_is_told_from_the_place_of_the_speaker_in_the_path(tmp_path, train, trials, shared):
    training = read_training_list(write(tmp_path / "train.txt", train))
    (finding,) = overlap_findings(training, read_trials(write(tmp_path / "trials.txt", trials)))
    assert finding.level == ("warning" if shared else "ok")
    assert finding.examples == shared


def test_speaker_depths_counts_from_both_ends(tmp_path):
    training = read_training_list(write(tmp_path / "train.txt", "a x/a/1.wav\nb x/b/1.wav\n"))
    assert speaker_depths(training) == [-2, 1]


def test_published_trial_lists_are_recognised(shared_data):
    for name, expected in {"veri_test.txt": "VoxCeleb1-O, original", "veri_test2.txt": "VoxCeleb1-O, cleaned"}.items():
        found = by_check(quick_check(trials=[(shared_data / "voxceleb_lists" / name, None)]))
        assert expected in found["trial identity"].message


def test_the_real_corpus_is_found_in_order(shared_data):
    root = shared_data / "speechocean_mini"
    findings = quick_check(
        train_list=root / "train_list.txt", train_root=root, trials=[(root / "dev_trials.txt", root)], min_utterances=8
    )
    assert worst(findings) == "ok"
    assert "1,200 utterances of 150 speakers" in by_check(findings)["speakers"].message


def test_the_table_says_what_to_do():
    text = table([Finding("ok", "ffmpeg", "there"), Finding("error", "files", "3 missing", "fetch them", ("a", "b"))])
    assert text.splitlines()[0].split() == ["level", "check", "found"]
    assert "-> fetch them" in text
    assert "- a" in text


def test_headers_are_looked_at_too_but_missing_files_are_told_once(corpus):
    write_audio(corpus / "a/1.wav", np.full(800, 0.1, dtype=np.float32), 8000)
    (corpus / "b/1.wav").write_bytes(b"RIFF")
    (corpus / "b/2.wav").unlink()
    findings = quick_check(train_list=corpus / "train.txt", train_root=corpus)
    files = [finding for finding in findings if finding.check == "training files"]
    assert [finding.message for finding in files] == ["1 of 4 are missing", "1 of 4 files cannot be read"]
    assert "8000 Hz (1)" in by_check(findings)["training files: rate"].message
    assert not any(
        finding.check.endswith(": rate")
        for finding in quick_check(train_list=corpus / "train.txt", train_root=corpus, reads_headers=False)
    )


@pytest.mark.parametrize(
    ("line", "form"),
    [("{label} {one} {other}", "1 enrol test"), ("{one} {other} {kaldi}", "target"), ("{one} {other}", "enrol test")],
)
def test_a_trial_list_in_the_place_of_the_training_list_is_told_as_such(corpus, line, form):
    pairs = [("c/1.wav", "c/2.wav", 1), ("c/1.wav", "d/1.wav", 0)]
    lines = [
        line.format(one=one, other=other, label=label, kaldi="target" if label else "nontarget")
        for one, other, label in pairs
    ]
    mistaken = write(corpus / "mistaken.txt", "\n".join(lines))
    findings = quick_check(mistaken, corpus, [(corpus / "trials.txt", corpus)])
    assert [finding.level for finding in findings] == ["error"]
    assert "mistaken.txt is a list of trials" in str(findings[0]) and form in str(findings[0])
    assert "--test_list" in str(findings[0])


def test_speakers_called_0_and_1_are_speakers(corpus):
    odd = write(corpus / "odd.txt", "0 a/1.wav\n0 a/2.wav\n1 b/1.wav\n1 b/2.wav\n")
    assert worst(quick_check(odd, corpus, [(corpus / "trials.txt", corpus)])) == "ok"
