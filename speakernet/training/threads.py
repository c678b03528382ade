"""Detects that other work keeps the cores busy, and lowers the number of threads if that is faster.

The threads of an operation wait for each other: if one has to wait for a core, all do. Measured on
two busy cores: 4 to 35 utterances/s with two threads, 34 to 83 with one, although one is slower on
idle cores. The symptom is a training thread that runs for only a small part of the step time; a
trial with fewer threads confirms it.
"""

import dataclasses
import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

WINDOW_STEPS = 8
WINDOW_SECONDS = 1.0
# On very busy cores a step can take ten seconds: a whole window would cost the minutes that a
# change saves.
LONG_SECONDS = 8.0
LONG_STEPS = 2
# Caches are cold after a start or a change.
SKIPPED_STEPS = 2
# Undisturbed, the training thread runs (or spins) for nearly all of a step; on busy cores 13 to 40
# % was measured.
BUSY_SHARE = 0.75
UNDISTURBED_SHARE = 0.95
REQUIRED_GAIN = 1.1
# Windows between two trials; doubled after each trial without a gain.
REST_WINDOWS = 4


@dataclasses.dataclass(frozen=True)
class Window:
    """Some steps with one number of threads."""

    threads: int
    share: float
    """Share of the time of forward, backward and update for which the training thread ran."""
    rate: float
    """Utterances per second."""


def decide(now: Window, most: int, before: Window | None) -> int:
    """The number of threads to continue with, at most `most`; after a trial `before` is the window
    preceding it.

    >>> decide(Window(2, 0.2, 17.0), 2, None)  # starts a trial
    1
    >>> decide(Window(1, 0.6, 55.0), 2, Window(2, 0.2, 17.0))  # faster: keep it
    1
    >>> decide(Window(1, 1.0, 160.0), 2, Window(2, 0.7, 300.0))  # slower: go back
    2
    """
    if before is not None:
        return now.threads if now.rate > REQUIRED_GAIN * before.rate else before.threads
    if now.share < BUSY_SHARE:
        return max(1, now.threads // 2)
    if now.share > UNDISTURBED_SHARE:
        return min(most, 2 * now.threads)
    return now.threads


# How it decides. Eight steps are a window. If the training thread ran for less than three quarters
# of a window, something else has its cores, and a window with half the threads is tried; it stays
# if it was a tenth faster, else the old number returns. After that it rests, longer after each
# trial that did not help, because a trial may cost a slow window. If nothing disturbs any more,
# more threads are tried again. The thresholds were measured on two cores; others may need others.
class ThreadWatch:
    """Watches the steps of a run in windows; without `adapts` it only warns and never changes the
    threads.
    """

    def __init__(
        self,
        threads: int,
        *,
        adapts: bool = False,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self.most = self.threads = threads
        self.adapts = adapts
        self._set_threads = set_threads
        self._before: Window | None = None
        self._rest = 0
        self._next_rest = REST_WINDOWS
        self._has_warned = False
        self._begin_window(SKIPPED_STEPS)

    def step(
        self, seconds: float, processor_seconds: float, num_utterances: int, *, is_compiled: bool
    ) -> None:
        """Count one optimizer step: its wall-clock `seconds`, and the CPU seconds of the training
        thread.

        Compiled code is built for a fixed number of threads, so the number then does not change.
        """
        if self._skip:
            self._skip -= 1
            return
        self._steps += 1
        self._seconds += seconds
        self._processor_seconds += processor_seconds
        self._utterances += num_utterances
        is_full = self._steps >= WINDOW_STEPS and self._seconds >= WINDOW_SECONDS
        if is_full or (self._steps >= LONG_STEPS and self._seconds >= LONG_SECONDS):
            share = min(1.0, self._processor_seconds / self._seconds)
            now = Window(self.threads, share, self._utterances / self._seconds)
            self._begin_window(0)
            if self.adapts and not is_compiled:
                self._adapt(now)
            elif share < BUSY_SHARE and now.threads > 1:
                self._warn(
                    share,
                    f"The {now.threads} threads of this run wait for each other; set "
                    "runtime.threads: 1",
                )

    def close(self) -> None:
        """Restore torch's number of threads."""
        if self.threads != self.most:
            self._continue_with(self.most)

    def _begin_window(self, skip: int) -> None:
        self._skip = skip
        self._steps = 0
        self._utterances = 0
        self._seconds = self._processor_seconds = 0.0

    def _adapt(self, now: Window) -> None:
        before = self._before
        self._before = None
        if before is None and self._rest:
            self._rest -= 1
            return
        chosen = decide(now, self.most, before)
        if before is None:
            self._before = now if chosen != now.threads else None
        elif chosen == now.threads:
            # Half of the new number may be faster still.
            self._rest = 0 if 1 < chosen < before.threads else REST_WINDOWS
            self._next_rest = REST_WINDOWS
            if chosen < before.threads:
                rates = (
                    f"{now.rate:.0f} utterances/s with {chosen} threads, {before.rate:.0f} "
                    f"with {before.threads}"
                )
                self._warn(
                    before.share,
                    f"Measured {rates}; continuing with {chosen} (runtime.threads: auto)",
                )
        else:
            self._rest, self._next_rest = self._next_rest, 2 * self._next_rest
        if chosen != now.threads:
            self._continue_with(chosen)

    def _continue_with(self, threads: int) -> None:
        self.threads = threads
        self._set_threads(threads)
        self._begin_window(SKIPPED_STEPS)

    def _warn(self, share: float, what: str) -> None:
        if not self._has_warned:
            logger.warning(
                "other work keeps the cores busy: training ran %.0f %% of the time and would be "
                "faster without it. %s",
                100 * share,
                what,
            )
        self._has_warned = True
