"""Real processes of a run: stopped, killed, hung, without data. All end with a reason, and nothing
is lost.
"""

import os
import signal
import sys
from contextlib import contextmanager

import pytest

from tests.started import Started, free_port, saved_step, steps_of, torchrun
from tests.tiny_recipe import MANY_STEPS, write_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc of Linux"),
]


@pytest.fixture(scope="module")
def recipe(tiny_corpus, tmp_path_factory):
    """The recipe of one run, which every test continues."""
    folder = tmp_path_factory.mktemp("stopped")
    changes = {"data": {"num_workers": 1}, "training": {"save_minutes": 0}}
    return write_recipe(folder / "run.yaml", tiny_corpus, folder / "run", MANY_STEPS, changes)


@contextmanager
def training_processes(recipe, *options, command=None):
    """Two processes that have trained for some steps."""
    run = recipe.parent / "run"
    before = steps_of(run)
    full = [*(command or [*torchrun(), "trainSpeakerNet.py"]), "--config", str(recipe), *options]
    with Started(full, recipe.parent / "output.txt") as started:
        started.until(lambda: steps_of(run) >= before + 5, "its fifth step")
        assert sorted(started.ranks()) == [0, 1]
        yield started


def test_restart_by_torchrun(recipe):
    """Under `--max-restarts` only a signal to torchrun itself ends the run."""
    run = recipe.parent / "run"
    with training_processes(
        recipe, command=[*torchrun("--max-restarts=1"), "trainSpeakerNet.py"]
    ) as started:
        resumed = started.output.count("resumed from")
        trained = steps_of(run)
        started.ranks()[1].send_signal(signal.SIGTERM)
        started.until(
            lambda: (
                started.output.count("resumed from") > resumed and steps_of(run) >= trained + 10
            ),
            "its second start",
        )
        started.process.send_signal(signal.SIGTERM)
        assert started.end()
        # All ranks stop after the same step.
        assert started.output.count("stopped by SIGTERM after step") == 2
        assert f"stopped by SIGTERM after step {saved_step(run)};" in started.output


def test_killed_process_without_torchrun(recipe, tmp_path):
    """As under srun, which starts tasks that find each other by SLURM's variables; the other
    process ends.
    """
    run = recipe.parent / "run"
    port = free_port()
    before = steps_of(run)
    variables = (f"MASTER_PORT={port}", "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_TASKS_PER_NODE=2")
    command = f"{sys.executable} trainSpeakerNet.py --config {recipe}".split()
    variables += ("SLURM_STEP_NODELIST=localhost",)
    owns = [(f"SLURM_PROCID={rank}", f"SLURM_LOCALID={rank}") for rank in range(2)]
    tasks = [
        Started(["env", *variables, *own, *command], tmp_path / f"{own[0]}.txt") for own in owns
    ]
    with tasks[0], tasks[1]:
        for task in tasks:
            task.until(lambda: steps_of(run) >= before + 5, "its fifth step")
        # The first task holds the store of the rendezvous.
        lost, other = tasks
        lost.process.kill()
        assert other.end(60) == 75, other.output[-3000:]
        assert lost.end(lingering=30) == -signal.SIGKILL
        assert (
            "rank 0 or the launcher has ended" in other.output
            and "the same command resumes" in other.output
        )
        assert "Traceback" not in other.output


# Rank 0 may name a suspended process before the collective times out; continued in between, it
# would go on training.
@pytest.mark.parametrize(
    ("is_worker", "ends", "named"),
    [
        (False, "the same command resumes", "no heartbeat"),
        (True, "hangs, while rank 0 is at", "last at the data of step"),
    ],
)
def test_hanging_process_is_named(recipe, is_worker, ends, named):
    with training_processes(recipe, "--runtime.distributed_timeout_seconds", "5") as started:
        last = started.ranks()[1]
        suspended = last.children()[0] if is_worker else last
        suspended.suspend()
        started.until(lambda: ends in started.output, "naming the process")
        suspended.resume()
        assert started.end()
        assert f"rank 1 (process {last.pid} on " in started.output and named in started.output


def test_stop_without_torchrun(recipe):
    run = recipe.parent / "run"
    with training_processes(recipe) as started:
        started.process.kill()
        assert started.end(lingering=30) == -signal.SIGKILL
        assert f"stopped by SIGTERM after step {saved_step(run)}" in started.output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, 75)])
def test_end_of_distributed(recipe, number, status):
    """`--distributed` as if with two GPUs: a signal to the command, and a killed process."""
    start = (
        "import sys; from speakernet.parallel.group import launch; sys.exit(launch(2, {}, "
        "sys.argv[1:]))"
    )
    with training_processes(
        recipe, command=[sys.executable, "-c", start.format(free_port()), "train"]
    ) as started:
        killed = started.ranks()[1]
        if number == signal.SIGKILL:
            killed.kill()
        else:
            os.kill(started.process.pid, number)
        assert started.end() == status
        step = saved_step(recipe.parent / "run")
        if number == signal.SIGKILL:
            assert f"rank 1 (process {killed.pid}) was ended by SIGKILL" in started.output
        else:
            assert f"stopped by {number.name} after step {step}" in started.output
            assert "Traceback" not in started.output
