"""Threads beside other work: decisions from numbers, trials in a made-up run, and what the trainer hands over."""

from collections.abc import Callable
from pathlib import Path

import pytest

from speakernet.training.threads import SKIPPED_STEPS, WINDOW_STEPS, ThreadWatch, Window, decide
from tests.training.training_fakes import make_trainer

BUSY, ALONE = 0.3, 0.99


@pytest.mark.parametrize(
    ("now", "most", "before", "expected"),
    [
        (Window(2, 0.99, 300), 2, None, 2),
        (Window(2, 0.3, 17), 2, None, 1),
        (Window(16, 0.5, 17), 16, None, 8),
        (Window(1, 0.5, 55), 2, None, 1),
        (Window(1, 0.99, 55), 2, None, 2),
        (Window(3, 0.99, 55), 5, None, 5),
        (Window(2, 0.85, 200), 4, None, 2),
        (Window(1, 0.6, 55), 2, Window(2, 0.3, 17), 1),
        (Window(1, 0.99, 18), 2, Window(2, 0.3, 17), 2),
        (Window(2, 0.99, 300), 2, Window(1, 0.99, 160), 2),
        (Window(2, 0.3, 17), 2, Window(1, 0.99, 55), 1),
    ],
)
def test_decisions_from_numbers(now: Window, most: int, before: Window | None, expected: int) -> None:
    assert decide(now, most, before) == expected


class Run:
    """Steps whose speed is a function of the number of threads: (utterances a second, share that training ran)."""

    def __init__(self, threads: int, speeds: Callable[[int], tuple[float, float]], adapts: bool = True) -> None:
        self.speeds = speeds
        self.used: list[int] = []
        self.set: list[int] = []
        self.watch = ThreadWatch(threads, adapts=adapts, set_threads=self.set.append)

    def go(self, steps: int, is_compiled: bool = False) -> None:
        for _ in range(steps):
            rate, share = self.speeds(self.watch.threads)
            self.used.append(self.watch.threads)
            self.watch.step(64 / rate, share * 64 / rate, 64, is_compiled=is_compiled)


def disturbed(threads: int) -> tuple[float, float]:
    return (17.0, BUSY) if threads > 1 else (55.0, 0.6)


def alone(threads: int) -> tuple[float, float]:
    return (60.0 * threads, ALONE)


def test_a_disturbed_run_goes_down_within_its_first_steps_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(2, disturbed)
    run.go(SKIPPED_STEPS + WINDOW_STEPS + 1)
    assert run.used[-1] == 1
    run.go(500)
    assert set(run.used[20:]) == {1} and run.set == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "55 utterances/s with 1 threads, 17 with 2; continuing with 1" in caplog.text
    run.watch.close()
    assert run.set == [1, 2]


@pytest.mark.parametrize(("adapts", "is_compiled"), [(False, False), (True, True)])
def test_where_the_number_must_stay_only_the_cure_is_said(
    adapts: bool, is_compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(2, disturbed, adapts)
    run.go(100, is_compiled)
    assert run.set == []
    assert len(caplog.records) == 1 and "runtime.threads: 1" in caplog.text


def test_the_trainer_hands_over_every_step_and_restores_the_threads(tmp_path: Path) -> None:
    run = Run(2, alone)
    trainer = make_trainer(tmp_path)
    trainer.threads, seen = run.watch, []
    run.watch.step = lambda *numbers, is_compiled: seen.append(numbers)  # type: ignore[method-assign]
    run.watch.threads = 1
    trainer.train()
    assert len(seen) == trainer.state.step and sum(step[2] for step in seen) == trainer.state.utterances
    assert run.set == [2]
