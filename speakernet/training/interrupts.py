"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 as a polite request: the step under way is finished, last.pt is written, the run
ends. Of several processes any may be asked; all end after the same step.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from speakernet.machine.threads import HANGUP, STOP_SIGNALS
from speakernet.parallel import distributed
from speakernet.parallel.group import request_everywhere, requested

logger = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) and has written last.pt."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number
        """Of the command, as shells give it for a process that the signal ended."""


STOP = "stop"
"""Under this name the number of a signal is left for the other processes."""


class StopRequest:
    """Remembers the first signal; the second one ends the run at once.

    Attributes:
        number: of the signal that this process got; 0: none.
        agreed: of the one that ends the run, known to all processes.
    """

    def __init__(self) -> None:
        self.number = self.agreed = 0
        self._is_passed_on = False

    def __bool__(self) -> bool:
        return self.agreed != 0

    @property
    def name(self) -> str:
        """The agreed signal's name."""
        return signal.Signals(self.agreed).name

    def wishes(self) -> list[bool]:
        """For each signal whether this process got it, as the processes tell each other with a step."""
        return [self.number == number for number in STOP_SIGNALS]

    def take(self, wishes: Sequence[bool]) -> None:
        """Agree on what some process got."""
        self.agreed = self.agreed or next((int(n) for n, one in zip(STOP_SIGNALS, wishes, strict=False) if one), 0)

    def agree(self) -> None:
        """Agree between two pieces of work; every process calls it."""
        self.agreed = self.agreed or max(distributed.gather_objects(self.number))

    def is_heard_of(self) -> bool:
        """Whether some process was asked, as far as is known here: for work that can be left at any moment."""
        if self.number:
            if not self._is_passed_on:
                request_everywhere(STOP, self.number)
                self._is_passed_on = True
        elif asked := requested(STOP):
            self.number = asked
        return self.number != 0

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
