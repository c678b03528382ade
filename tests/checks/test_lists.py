"""The quick checks: each defect is found, named and counted, and a good set gives no complaint."""

import numpy as np
import pytest

from speakernet.checks import lists as checks
from speakernet.checks import worst
from speakernet.data.audio import write_audio
from speakernet.data.lists import read_training_list, read_trials
from speakernet.data.opening import open_source


def check(corpus, train=None, trials=None, **others):
    """The findings about lists of these lines, by check; `None` is the list of the corpus."""
    for name, text in (("train.txt", train), ("trials.txt", trials)):
        if text is not None:
            (corpus / name).write_text(text)
    source = open_source(corpus)
    findings = checks.quick_check(
        train_list=read_training_list(corpus / "train.txt"),
        train_source=source,
        trials=[(read_trials(corpus / "trials.txt"), source)],
        max_bad_share=0.01,
        min_seconds=0.0,
        **{"min_utterances": 1, **others},
    )
    return {finding.check: finding for finding in findings}


@pytest.fixture()
def corpus(tmp_path):
    for name in ("a/1", "a/2", "b/1", "b/2", "c/1", "c/2", "d/1", "d/2"):
        write_audio(tmp_path / f"{name}.wav", np.full(1600, 0.1, dtype=np.float32), 16000)
    (tmp_path / "train.txt").write_text("a a/1.wav\na a/2.wav\nb b/1.wav\nb b/2.wav\n")
    (tmp_path / "trials.txt").write_text("1 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n1 d/1.wav d/2.wav\n")
    return tmp_path


def test_a_good_set(corpus):
    found = check(corpus, min_utterances=2)
    assert worst(found.values()) == "ok"
    assert {"speakers", "training audio: files", "trials", "trial audio (trials.txt): files", "overlap"} <= set(found)


@pytest.mark.parametrize(
    ("train", "trials", "name", "level", "start", "examples"),
    [
        ("a a/1.wav\na a/2.wav\n", None, "speakers", "error", "2 utterances of 1 speaker,", ()),
        ("a a/1.wav\nb b/1.wav\nb b/2.wav\n", None, "few utterances", "warning", "1 speaker ", ("a (1)",)),
        ("a a/1.wav\na a/1.wav\nb b/1.wav\nb a/1.wav\n", None, "repeated rows", "warning", "2 ", ("a/1.wav",) * 2),
        (None, "1 c/1.wav c/1.wav\n0 c/1.wav d/1.wav\n", "self trials", "warning", "1 ", ("c/1.wav c/1.wav",)),
        (None, "0 c/1.wav d/1.wav\n0 c/2.wav d/1.wav\n", "trials", "error", "2 trials", ()),
        (None, "c/1.wav d/1.wav\nc/2.wav d/1.wav\n", "trials", "ok", "2 trials", ()),
        (None, "0 c/1.wav c/2.wav\n1 c/1.wav d/1.wav\n", "labels", "warning", "", ()),
        (None, "1 c/1.wav c/2.wav\n0 c/1.wav d/1.wav\n0 c/1.wav c/2.wav\n", "labels", "error", "1 ",
         ("c/1.wav c/2.wav",)),
    ],
)  # fmt: skip
def test_defects_of_lists(corpus, train, trials, name, level, start, examples):
    finding = check(corpus, train, trials, min_utterances=2)[name]
    assert (finding.level, finding.examples) == (level, examples) and finding.message.startswith(start)


def test_missing_files(corpus):
    """A few only warn in training, one is an error among trials; the first ten are named."""
    found = check(corpus, "".join(f"a gone/{row:02}.wav\n" for row in range(25)) + "b b/1.wav\n")
    finding = found["training audio: files"]
    assert finding.level == "error" and finding.message.startswith("25 ")
    assert finding.examples == tuple(f"gone/{row:02}.wav" for row in range(10))
    train = "a a/1.wav\n" * 300 + "b b/1.wav\n" * 300 + "b gone.wav\n"
    found = check(corpus, train, "1 c/1.wav c/2.wav\n0 c/1.wav gone.wav\n")
    assert found["training audio: files"].level == "warning"
    assert found["trial audio (trials.txt): files"].level == "error"


@pytest.mark.parametrize("line", ["{label} {one} {other}", "{one} {other} {kaldi}", "{one} {other}", "{one} {speaker}"])
def test_another_list_for_the_training_list(corpus, line):
    rows = [("c/1.wav", "c/2.wav", 1), ("c/1.wav", "d/1.wav", 0)]
    text = "\n".join(
        line.format(one=one, other=other, label=label, speaker="c", kaldi="target" if label else "nontarget")
        for one, other, label in rows
    )
    (finding,) = check(corpus, text).values()
    assert finding.level == "error" and "train.txt" in finding.message


def test_speakers_called_0_and_1(corpus):
    assert worst(check(corpus, "0 a/1.wav\n0 a/2.wav\n1 b/1.wav\n1 b/2.wav\n").values()) == "ok"


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
def test_overlap(tmp_path, train, trials, shared):
    (tmp_path / "train.txt").write_text(train)
    (tmp_path / "trials.txt").write_text(trials)
    (finding,) = checks.overlap_findings(
        read_training_list(tmp_path / "train.txt"), read_trials(tmp_path / "trials.txt")
    )
    assert (finding.level, finding.examples) == ("warning" if shared else "ok", shared)
