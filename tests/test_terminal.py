"""Progress of long work: a bar that fits the terminal, log lines without a terminal, no long
silence.
"""

import io
import logging
import sys

import pytest

from speakernet import terminal
from speakernet.terminal import LINE_SECONDS, Bar, TerminalHandler


class Screen(io.StringIO):
    """A terminal of `columns` columns, reconstructed from what is written."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    encoding = "utf-8"

    def isatty(self):
        return True

    def drawn(self):
        """Everything written, split at carriage returns and newlines."""
        return [part for part in self.getvalue().replace("\n", "\r").split("\r") if part.strip()]

    def rows(self):
        """The final content of the screen: text after a carriage return overwrites the line."""
        rows = []
        for row in self.getvalue().split("\n"):
            shown = ""
            for part in row.split("\r"):
                shown = part + shown[len(part) :]
            rows.append(shown.rstrip())
        return rows


@pytest.fixture
def screen(monkeypatch):
    def make(columns):
        made = Screen(columns)
        monkeypatch.setattr(sys, "stderr", made)
        monkeypatch.setattr(terminal, "_columns", lambda: columns)
        return made

    return make


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("columns", [30, 60, 80, 120, 200])
def test_line_width(screen, columns):
    shown = screen(columns)
    with Bar(
        "training", 16, done=2, note=lambda: "epoch 3/16, loss 3.412, 312 utt/s, 0:12:31 left"
    ):
        pass
    lines = [line for line in shown.drawn() if "training" in line]
    assert lines and all(len(line) <= columns - 1 for line in lines)
    if columns >= 80:
        assert len(lines[0]) == columns - 1 and lines[0].endswith("0:12:31 left")
        assert lines[0].count("█") == pytest.approx(2 / 16 * (columns - 1 - 67), abs=2)


def test_log_lines_beside_the_bar(screen):
    shown = screen(80)
    handler = TerminalHandler(sys.stderr)
    logger = logging.Logger("alone")
    logger.addHandler(handler)
    with Bar("training", 4, done=1) as bar:
        for number in range(3):
            logger.info("epoch %d: loss 1.0", number)
        assert [row for row in shown.rows() if "epoch" in row] == [
            f"epoch {number}: loss 1.0" for number in range(3)
        ]
        assert shown.rows()[-1].startswith("training")
        # A nested bar, like that of an evaluation during training.
        with Bar("embedding trials", 4):
            assert shown.rows()[-1].startswith("embedding")
            bar.update()
            logger.info("and another line")
            assert shown.rows()[-2] == "and another line" and shown.rows()[-1].startswith(
                "embedding"
            )
        assert shown.rows()[-1].startswith("training  50 %")
    assert shown.rows()[-1] == ""


def test_without_a_terminal(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    seconds = []
    with Bar("embedding trials", 1000, "utterance", clock=clock) as bar:
        for second in range(1, 301):
            clock.now = float(second)
            bar.update()
            if len(caplog.records) > len(seconds):
                seconds.append(second)
    assert LINE_SECONDS <= 60 and seconds == list(range(30, 301, 30))
    assert caplog.messages[0] == "embedding trials: 3 %, 30 of 1,000 utterances, 1/s, 0:16:10 left"
    with Bar("extract", clock=clock) as unknown:
        clock.now += 31
        unknown.update(5)
    assert caplog.messages[-1] == "extract: 5 files, 0.2/s"


def test_notebook_bar(monkeypatch, capsys):
    for name in ("ipykernel", "ipywidgets"):
        monkeypatch.setitem(sys.modules, name, sys)
    with Bar("reading", 4, note=lambda: "epoch 1") as bar:
        bar.update(3)
    printed = capsys.readouterr().err
    # tqdm's bar, as text because there are no widgets.
    assert "reading" in printed and " 75%" in printed and "epoch 1" in printed
