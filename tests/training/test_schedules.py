"""Learning-rate and margin schedules against numbers worked out by hand."""

import math

import pytest

from speakernet.training.options.schedules import (
    SCHEDULES,
    ExponentialOptions,
    FloorOptions,
    PlateauOptions,
    ScheduleOptions,
    StepOptions,
)
from speakernet.training.schedules import LearningRateSchedule, MarginSchedule, plateau_drops


def rates(name: str, steps: list[int], **options) -> list[float]:
    """The rates of 40 epochs of 10 steps from a top of 1, down to 0 where nothing else is said."""
    owner = SCHEDULES[name].options
    floor = {"final_learning_rate": 0.0} if issubclass(owner, FloorOptions) else {}
    schedule = LearningRateSchedule(owner(**{"name": name, **floor, **options}), 1.0, steps_per_epoch=10, num_epochs=40)
    return [schedule(step) for step in steps]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("constant", {}, [1.0, 1.0, 1.0, 1.0]),
        # epochs 0, 10, 20, 40
        ("step", {"decay": 0.5, "decay_interval": 10}, [1.0, 0.5, 0.25, 0.0625]),
        ("exponential", {"decay": 0.25, "decay_interval": 20}, [1.0, 0.5, 0.25, 0.0625]),
        ("exponential", {"final_learning_rate": 0.0001}, [1.0, 0.1, 0.01, 0.0001]),
        ("linear", {"final_learning_rate": 0.2}, [1.0, 0.8, 0.6, 0.2]),
        ("cosine", {}, [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, 0.0]),
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
    cold = rates(name, [0, 10, 20, 40], warmup_epochs=4.0)
    assert cold[0] == pytest.approx(1e-3)
    assert cold[1:3] == pytest.approx([0.25, 0.5])
    assert cold[3] == pytest.approx(0.04 if name == "one_cycle" else 1.0)


def test_a_warm_up_that_overlaps_is_a_factor_on_the_whole_fall():
    options = ExponentialOptions(final_learning_rate=1e-4, warmup_epochs=20, warmup_overlaps=True)
    schedule = LearningRateSchedule(options, 1.0, steps_per_epoch=10, num_epochs=40)
    expected = [1e-3, 0.5 * 0.1, 0.01, 1e-4]
    assert [schedule(step) for step in (0, 100, 200, 400)] == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_stays_in_range_beyond_the_end(name: str):
    floor = {"final_learning_rate": 1e-4} if issubclass(SCHEDULES[name].options, FloorOptions) else {}
    values = rates(name, list(range(0, 1000, 7)), warmup_epochs=1.5, **floor)
    assert all(0.0 < value <= 1.0 for value in values)


def test_step_boundary_survives_rounding():
    """Epoch 0.3 in steps of a tenth is 0.30000000000000004 or 0.29999…: the drop comes at step 3 either way."""
    options = StepOptions(decay=0.5, decay_interval=0.1)
    schedule = LearningRateSchedule(options, 1.0, steps_per_epoch=10, num_epochs=1)
    assert [schedule(step) for step in range(4)] == [1.0, 0.5, 0.25, 0.125]


def test_plateau_drops_on_the_eer_and_resumes():
    def make() -> LearningRateSchedule:
        options = PlateauOptions(final_learning_rate=0.2, decay=0.5, plateau_patience=2)
        return LearningRateSchedule(options, 1.0, steps_per_epoch=10, num_epochs=40)

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
    ramp = ScheduleOptions(margin="linear", margin_initial=0.1, margin_begin_epoch=2, margin_end_epoch=4)
    linear = MarginSchedule(ramp, 0.2, steps_per_epoch=10)
    assert [linear(step) for step in (0, 20, 30, 40, 400)] == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.2])
    steep = MarginSchedule(ScheduleOptions(margin="exponential", margin_end_epoch=2), 0.3, steps_per_epoch=10)
    # half way: 1 - 0.001 ** 0.5 = 0.968377 of 0.999
    assert [steep(step) for step in (0, 10, 20)] == pytest.approx([0.0, 0.3 * 0.968377 / 0.999, 0.3], rel=1e-5)
    assert MarginSchedule(ScheduleOptions(), 0.2, steps_per_epoch=10)(7) == 0.2
    with pytest.raises(ValueError, match="expected constant"):
        ScheduleOptions(margin="cubic")
