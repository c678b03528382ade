"""Progress of long work: a bar in a terminal, log lines without one, no long silence."""

import io
import logging
import sys
from types import SimpleNamespace

from speakernet import terminal
from speakernet.terminal import LINE_SECONDS, Bar, TerminalHandler


class Screen(io.StringIO):
    """A terminal, reconstructed from what is written."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def rows(self):
        """The final content of the screen: text after a carriage return overwrites the line."""
        rows = []
        for row in self.getvalue().split("\n"):
            shown = ""
            for part in row.split("\r"):
                shown = part + shown[len(part) :]
            rows.append(shown.rstrip())
        return rows


def test_log_lines_beside_the_bar(monkeypatch):
    shown = Screen()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(terminal, "_columns", lambda: 80)
    logger = logging.Logger("alone")
    logger.addHandler(TerminalHandler(sys.stderr))
    with Bar("training", 4, done=1, note=lambda: "epoch 2") as bar:
        for number in range(3):
            logger.info("epoch %d: loss 1.0", number)
        assert shown.rows()[:3] == [f"epoch {number}: loss 1.0" for number in range(3)]
        assert shown.rows()[-1].startswith("training:  25%")
        # Assigned, as after a resume, and drawn at once.
        bar.done = 2
        bar._line.mininterval = 0
        bar.update()
        assert shown.rows()[-1].startswith("training:  75%") and "epoch 2" in shown.rows()[-1]
    assert shown.rows()[-1] == ""


def test_without_a_terminal(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: clock.now))
    seconds = []
    with Bar("embedding trials", 1000, "utterance") as bar:
        for second in range(1, 301):
            clock.now = float(second)
            bar.update()
            if len(caplog.records) > len(seconds):
                seconds.append(second)
    assert LINE_SECONDS <= 60 and seconds == list(range(30, 301, 30))
    assert caplog.messages[0] == "embedding trials: 3 %, 30 of 1,000 utterances, 1/s, 0:16:10 left"
    with Bar("extract") as unknown:
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
