"""Requests to stop a run: the first signal ends it after the current step, the second at once."""

import contextlib
import dataclasses
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

from speakernet import distributed
from speakernet.distributed import CommandEnd
from speakernet.machine.threads import HANGUP, STOP_SIGNALS

logger = logging.getLogger(__name__)

STOP_KEY = "request/stop"
"""Under which a rank passes on the number of its signal."""


class Interrupted(CommandEnd, KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) and has written last.pt."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number
        """The command's exit status, as shells report it for a process ended by the signal."""


@dataclasses.dataclass(eq=False)
class StopRequest:
    """Remembers the first signal: the current step finishes, last.pt is written, the run ends.

    A second signal (except SIGHUP) ends the run immediately. Any rank may receive the signal; all
    ranks end after the same step.
    """

    known: int = 0
    """The number of the signal that this rank knows of, its own or another rank's; 0 if none."""
    agreed: int = 0
    """The number of the signal that ends the run, the same on all ranks; 0 if none."""
    _is_passed_on: bool = False

    def is_requested(self) -> bool:
        """Whether any rank has a signal, which the ranks tell each other here; for work that can
        stop at any moment.
        """
        if self.known:
            if not self._is_passed_on:
                distributed.mail.write(STOP_KEY, str(self.known))
                self._is_passed_on = True
        # A signal may arrive during this query: an empty answer must not erase it.
        elif received := distributed.mail.read(STOP_KEY):
            self.known = int(received)
        return self.known != 0

    def agree(self) -> None:
        """Learn the signal of any rank; every rank calls it after the same step."""
        self.agreed = self.agreed or max(distributed.gather_objects(self.known))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block; does nothing outside the main thread, where Python
        forbids it.
        """
        handlers = {}
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                # `nohup` makes a run ignore SIGHUP so that it outlives its terminal.
                if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN:
                    handlers[number] = signal.signal(number, self._remember)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _frame: Any) -> None:
        if not self.known:
            # The handler only records and logs it: it may have interrupted torch or a file write at
            # any line.
            self.known = number
            logger.warning("stopping after this step; a second signal stops immediately")
        # A closing terminal may send SIGHUP twice, and a service manager sends it along with
        # SIGTERM.
        elif number != HANGUP:
            raise KeyboardInterrupt
