"""Two processes give the same bits however they are started, on any number of machines, and after
kills.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from speakernet.cli import main
from tests.hostile.ranks import RankKills, recipe_of
from tests.outcomes import VOLATILE, differences, outcome_of
from tests.parallel.several import ranks_environment
from tests.started import Started, free_port, steps_of, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc of Linux"),
]
SEED = 20260101
SCORED = (
    "--evaluation.score_norm as --evaluation.cohort_size 5 --evaluation.subtract_mean true "
    "--evaluation.slices [duration,snr] --evaluation.sweep [duration,telephone] "
    "--evaluation.embedding both --evaluation.batch_size 3"
)


@pytest.fixture(scope="module")
def kills(tiny_corpus, tmp_path_factory):
    """A `RankKills` with the outcome of an undisturbed run."""
    return RankKills(tmp_path_factory.mktemp("ranks"), tiny_corpus, SEED)


def test_kills(kills):
    """The same weights, moments, scores, figures, metrics and report after a kill."""
    for _ in range(2):
        assert not kills.round(1)
        if kills.num_kills:
            return
    pytest.fail("both runs ended before their kill")


def test_two_nodes_after_a_kill(kills, tiny_corpus, tmp_path):
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
    assert not differences(outcome_of(tmp_path / "run"), kills.expected)


def test_scoring(kills, tiny_corpus, tmp_path):
    found = []
    lines = (tiny_corpus / "trials.txt").read_text().splitlines(keepends=True)
    (tmp_path / "fewer.txt").write_text("".join(line for line in lines if "spk13" not in line))
    for name in ("one", "two"):
        folder = tmp_path / name
        recipe = recipe_of(folder, tiny_corpus)
        (folder / "run").mkdir()
        # A separate copy, because scoring stores its embeddings there.
        shutil.copy(kills.folder / "straight" / "run" / "best.pt", folder / "run" / "best.pt")
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


def test_shares_of_embedding(kills, tiny_corpus, tmp_path):
    model = kills.folder / "straight" / "run" / "best.pt"
    # More than are embedded and stored at once.
    for number in range(150):
        (tmp_path / "voices").mkdir(exist_ok=True)
        os.link(
            tiny_corpus / f"spk{number % 14:02d}" / "utt0.wav",
            tmp_path / "voices" / f"{number}.wav",
        )
    arguments = f"embed {tmp_path}/voices --model {model} --device cpu --out".split()
    assert main([*arguments, str(tmp_path / "one.npz")]) == 0
    command = [sys.executable, "-m", "speakernet", *arguments, str(tmp_path / "two.npz")]
    port = free_port()
    processes = [
        subprocess.Popen(command, env=ranks_environment(rank, 2, port)) for rank in range(2)
    ]
    assert [process.wait(100) for process in processes] == [0, 0]
    assert (tmp_path / "two.npz").read_bytes() == (tmp_path / "one.npz").read_bytes()
