"""The order of what a command prints: the answer, then the warnings."""

import logging

import pytest

from speakernet.cli.shared import answer_first


class Printed(logging.Handler):
    """Keeps the messages in the order in which they are shown."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def printed():
    handler = Printed()
    logging.root.addHandler(handler)
    yield handler.lines
    logging.root.removeHandler(handler)


@pytest.mark.parametrize(
    ("is_verbose", "expected"),
    [
        (False, ["error", "answer", "warning", "later"]),
        (True, ["info", "warning", "of another library", "error", "answer", "later"]),
    ],
)
def test_warnings_follow_the_answer(printed, is_verbose, expected):
    ours = logging.getLogger("speakernet.models")
    theirs = logging.getLogger("another_library")
    ours.setLevel(logging.INFO)
    with answer_first(is_verbose=is_verbose):
        ours.info("info")
        ours.warning("warning")
        theirs.warning("of another library")
        ours.error("error")
        printed.append("answer")
    ours.warning("later")
    assert printed == expected


def test_warnings_are_not_lost_with_an_error(printed):
    with pytest.raises(ValueError, match="wrong"), answer_first(is_verbose=False):
        logging.getLogger("speakernet").warning("warning")
        raise ValueError("wrong")
    assert printed == ["warning"]
