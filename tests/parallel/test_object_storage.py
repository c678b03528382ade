"""Two processes, each with its own cache, stream from a real S3 interface; one is killed, and the
run resumes.
"""

import contextlib
import signal
import sys
from contextlib import contextmanager

import pytest

from tests.commands import run_command
from tests.data.object_store import object_store
from tests.outcomes import digests
from tests.started import Started, free_port, saved_step, steps_of
from tests.tiny_recipe import write_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc of Linux"),
]
ADDRESS = "s3://bucket/corpus"
NUM_SHARDS = 16
NUM_STEPS = 8
SMALL_CACHE = 190_000 / 2**30
"""Gigabytes: two shards of two utterances each."""


@contextmanager
def two_machines(recipe):
    """A process each on two machines, as far as caches are concerned."""
    folder = recipe.parent
    port = free_port()
    group = f"WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT={port}"
    command = f"{sys.executable} trainSpeakerNet.py --config {recipe}"
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            line = f"env {group} RANK={rank} SPEAKERNET_CACHE={folder}/cache{rank} {command}"
            started = Started(line.split(), folder / f"output{rank}.txt")
            ranks.append(stack.enter_context(started))
        yield ranks


def end(ranks):
    for started in ranks:
        assert started.end() == 0, started.output[-3000:]


def recipe_of(folder, corpus, **data):
    """One epoch of eight steps."""
    changes = {"training": {"max_epochs": 1, "save_steps": 1}, "runtime": {"deterministic": True}}
    changes["evaluation"] = {"eval_frames": 40, "num_crops": 1, "bootstrap_samples": 0}
    changes["data"] = {"train_path": ADDRESS, "shuffle_buffer": 4, **data}
    return write_recipe(folder / "run.yaml", corpus, folder / "run", changes)


def test_kill(tiny_corpus, tmp_path, monkeypatch):
    with object_store(monkeypatch) as faults:
        packing = f"--source {tiny_corpus} --list {tiny_corpus}/train_list.txt"
        run_command(f"pack {ADDRESS} {packing} --shards {NUM_SHARDS}")
        straight = recipe_of(tmp_path / "straight", tiny_corpus)
        with two_machines(straight) as ranks:
            end(ranks)
        held = [
            {path.stem for path in straight.parent.glob(f"cache{rank}/*/*/samples/*.npy")}
            for rank in range(2)
        ]
        assert [*map(len, held)] == 2 * [NUM_SHARDS // 2] and not held[0] & held[1]
        killed = recipe_of(tmp_path / "killed", tiny_corpus, shard_cache_gigabytes=SMALL_CACHE)
        # Slow from the ninth shard on, so that the run does not finish before the kill.
        faults.kinds = 8 * [""] + 2 * NUM_SHARDS * ["slow"]
        with two_machines(killed) as (other, lost):
            other.until(lambda: steps_of(killed.parent / "run") >= 2, "its second step")
            lost.process.kill()
            assert lost.end() == -signal.SIGKILL
            assert other.end(60) == 75, other.output[-3000:]
        assert 1 <= saved_step(killed.parent / "run") < NUM_STEPS
        faults.kinds = []
        with two_machines(killed) as ranks:
            end(ranks)
            assert "resumed from" in ranks[0].output
    found = [digests(recipe.parent / "run" / "last.pt") for recipe in (straight, killed)]
    assert found[0] == found[1] and saved_step(killed.parent / "run") == NUM_STEPS
