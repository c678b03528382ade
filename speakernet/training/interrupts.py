"""Ctrl-C, SIGTERM and SIGHUP as a polite request: the step under way is finished, last.pt is written, the run ends."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

from speakernet.machine.signals import HANGUP, STOP_SIGNALS

logger = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP) and has written last.pt."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number
        """Of the command, as shells give it for a process that the signal ended."""


class StopRequest:
    """Remembers the first signal; the second one ends the run at once."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return self.number != 0

    @property
    def name(self) -> str:
        """The signal's name."""
        return signal.Signals(self.number).name

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals inside the block; does nothing outside the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # `nohup` starts a run that ignores the end of its terminal, and is to outlive it.
        ignored = {HANGUP} if HANGUP and signal.getsignal(HANGUP) == signal.SIG_IGN else set()
        before = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS if number not in ignored}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _frame: Any) -> None:
        if self.number:
            # A terminal that is closed may say so twice, and a service manager sends it beside SIGTERM.
            if number == HANGUP:
                return
            raise KeyboardInterrupt
        # Nothing more in a handler: it may have interrupted torch or the writing of a file at any line.
        self.number = number
        logger.warning("stopping after this step (again: at once)")
