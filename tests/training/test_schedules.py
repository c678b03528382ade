"""Learning-rate and margin schedules against numbers worked out by hand."""

import math

import pytest

from speakernet.training.schedules import (
    SCHEDULES,
    LearningRateSchedule,
    MarginSchedule,
    ScheduleOptions,
    plateau_drops,
)


def rates(name: str, steps: list[int], warmup: float = 0.0, **options) -> list[float]:
    schedule = LearningRateSchedule(
        name, ScheduleOptions(**{"top": 1.0, **options}), steps_per_epoch=10, num_epochs=40, warmup_epochs=warmup
    )
    return [schedule(step) for step in steps]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("constant", {}, [1.0, 1.0, 1.0, 1.0]),
        # epochs 0, 10, 20, 40
        ("step", {"decay": 0.5, "decay_interval": 10}, [1.0, 0.5, 0.25, 0.0625]),
        ("exponential", {"decay": 0.25, "decay_interval": 20}, [1.0, 0.5, 0.25, 0.0625]),
        ("exponential", {"decay": None, "floor": 0.0001}, [1.0, 0.1, 0.01, 0.0001]),
        ("linear", {"floor": 0.2}, [1.0, 0.8, 0.6, 0.2]),
        ("cosine", {"floor": 0.0}, [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, 0.0]),
        ("polynomial", {"power": 2.0}, [1.0, 0.5625, 0.25, 0.0]),
        # cycles of 10, 20, 40 epochs begin at 0, 10, 30; epoch 20 is half of the second, 40 a quarter of the third
        ("cosine_restarts", {}, [1.0, 1.0, 0.5, (1 + math.sqrt(0.5)) / 2]),
        # top after 20 of 40 epochs
        ("one_cycle", {"peak_share": 0.5}, [0.04, 0.52, 1.0, 0.0]),
        ("plateau", {}, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_shapes(name, options, expected):
    assert rates(name, [0, 100, 200, 400], **options) == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_warms_up_linearly(name: str):
    cold = rates(name, [0, 10, 20, 40], warmup=4.0)
    assert cold[0] == pytest.approx(1e-3)
    assert cold[1:3] == pytest.approx([0.25, 0.5])
    assert cold[3] == pytest.approx(0.04 if name == "one_cycle" else 1.0)


def test_a_warm_up_that_overlaps_is_a_factor_on_the_whole_fall():
    options = ScheduleOptions(top=1.0, floor=1e-4, decay=None)
    schedule = LearningRateSchedule(
        "exponential", options, steps_per_epoch=10, num_epochs=40, warmup_epochs=20, warmup_overlaps=True
    )
    expected = [1e-3, 0.5 * 0.1, 0.01, 1e-4]
    assert [schedule(step) for step in (0, 100, 200, 400)] == pytest.approx(expected)


@pytest.mark.parametrize(("name", "floor"), [("step", 0.1), ("plateau", 0.1), ("exponential", 0.0)])
def test_what_needs_a_decay_says_so(name: str, floor: float):
    with pytest.raises(ValueError, match=f"{name} needs a decay"):
        rates(name, [0], decay=None, floor=floor)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_stays_in_range_beyond_the_end(name: str):
    values = rates(name, list(range(0, 1000, 7)), floor=1e-4, warmup=1.5)
    assert all(0.0 < value <= 1.0 for value in values)


def test_step_boundary_survives_rounding():
    """Epoch 0.3 in steps of a tenth is 0.30000000000000004 or 0.29999…: the drop comes at step 3 either way."""
    schedule = LearningRateSchedule(
        "step", ScheduleOptions(top=1.0, decay=0.5, decay_interval=0.1), steps_per_epoch=10, num_epochs=1
    )
    assert [schedule(step) for step in range(4)] == [1.0, 0.5, 0.25, 0.125]


def test_plateau_drops_on_the_eer_and_resumes():
    def make() -> LearningRateSchedule:
        options = ScheduleOptions(top=1.0, floor=0.2, decay=0.5, plateau_patience=2)
        return LearningRateSchedule("plateau", options, steps_per_epoch=10, num_epochs=40)

    schedule = make()
    seen = []
    for eer in [9.0, 8.0, 8.5, 8.2, 8.1, 8.0, 7.0, 7.5, 7.5]:
        schedule.observe(eer)
        seen.append(schedule(5))
    assert seen == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2]
    again = make()
    again.load_state_dict(schedule.state_dict())
    assert again(5) == 0.2
    assert plateau_drops([], 3) == 0


def test_margin_ramps():
    linear = MarginSchedule(0.2, kind="linear", initial=0.1, begin_epoch=2, end_epoch=4, steps_per_epoch=10)
    assert [linear(step) for step in (0, 20, 30, 40, 400)] == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.2])
    steep = MarginSchedule(0.3, kind="exponential", begin_epoch=0, end_epoch=2, steps_per_epoch=10)
    # half way: 1 - 0.001 ** 0.5 = 0.968377 of 0.999
    assert [steep(step) for step in (0, 10, 20)] == pytest.approx([0.0, 0.3 * 0.968377 / 0.999, 0.3], rel=1e-5)
    assert MarginSchedule(0.2)(7) == 0.2
    with pytest.raises(ValueError, match="expected constant"):
        MarginSchedule(0.2, kind="cubic")
