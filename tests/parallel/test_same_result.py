"""Two processes give the same bits however they are started, on any number of machines, and after
kills.
"""

import json
import shutil
import sys

import pytest

from speakernet.cli import main
from tests.outcomes import VOLATILE, differences, outcome_of
from tests.started import Started, free_port, steps_of, torchrun
from tests.tiny_recipe import EVERY_STAGE, write_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc of Linux"),
]
SCORED = (
    "--evaluation.score_norm as --evaluation.cohort_size 5 --evaluation.subtract_mean true "
    "--evaluation.slices [duration,snr] --evaluation.sweep [duration,telephone] "
    "--evaluation.embedding both --evaluation.batch_size 3"
)


def recipe_of(folder, corpus):
    """The recipe of a run into `folder`/run, with every stage."""
    return write_recipe(folder / "run.yaml", corpus, folder / "run", EVERY_STAGE)


@pytest.fixture(scope="module")
def straight(tiny_corpus, tmp_path_factory):
    """The folder of an undisturbed run of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    recipe = recipe_of(folder, tiny_corpus)
    command = [*torchrun(), "trainSpeakerNet.py", "--config", str(recipe)]
    with Started(command, folder / "output.txt") as started:
        assert started.end() == 0, started.output[-3000:]
    return folder / "run"


def test_two_nodes_after_a_kill(straight, tiny_corpus, tmp_path):
    """A failure on one node restarts the processes of both, but torchrun's restart counts
    differ.
    """
    recipe = recipe_of(tmp_path, tiny_corpus)
    meet = (
        f"--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:{free_port()} "
        "--local_addr=localhost --max-restarts=2"
    )
    run = f"trainSpeakerNet.py --config {recipe} --runtime.distributed_timeout_seconds 30"
    command = [*torchrun(*meet.split(), count=1), *run.split()]
    with (
        Started(command, tmp_path / "first.txt") as first,
        Started(command, tmp_path / "second.txt") as second,
    ):
        second.until(lambda: steps_of(tmp_path / "run") >= 3, "its third step")
        (killed,) = second.ranks().values()
        killed.kill()
        output = first.output[-2000:] + second.output[-2000:]
        assert (first.end(), second.end()) == (0, 0), output
        output = first.output + second.output
        assert "2 processes (1 on this machine), joined by gloo" in output
        assert f"(pid: {killed.pid})" in second.output and "resumed from" in output
    assert not differences(outcome_of(tmp_path / "run"), outcome_of(straight))


def test_scoring(straight, tiny_corpus, tmp_path):
    found = []
    lines = (tiny_corpus / "trials.txt").read_text().splitlines(keepends=True)
    (tmp_path / "fewer.txt").write_text("".join(line for line in lines if "spk13" not in line))
    for name in ("one", "two"):
        folder = tmp_path / name
        recipe = recipe_of(folder, tiny_corpus)
        (folder / "run").mkdir()
        # A separate copy, because scoring stores its embeddings there.
        shutil.copy(straight / "best.pt", folder / "run" / "best.pt")
        line = f"--config {recipe} {SCORED} --data.test_lists "
        arguments = [*line.split(), f"{{E: {tmp_path / 'fewer.txt'}}}"]
        if name == "one":
            assert main(["evaluate", *arguments]) == 0
        else:
            command = [*torchrun(), "trainSpeakerNet.py", *arguments, "--eval"]
            with Started(command, folder / "output.txt") as started:
                assert started.end() == 0, started.output[-3000:]
        written = folder / "run" / "eval" / "trials"
        results = json.loads((written / "results.json").read_text())
        assert results["sweep"] and results["slices"] and results["backend"]["score_norm"] == "as"
        scores = [(place / "scores.txt").read_text() for place in (written, written.parent / "E")]
        same = {key: value for key, value in results.items() if key not in VOLATILE}
        found.append([scores, same])
    assert found[0] == found[1]
