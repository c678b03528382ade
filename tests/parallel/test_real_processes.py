"""Two processes under torchrun: one that is asked to stop stops both, one that is killed ends the run and is named."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from several import free_port

from speakernet.checkpoint import read_own_checkpoint

pytestmark = pytest.mark.slow
SECONDS = 150
RECIPE = """# many short steps
data:
  train_list: {root}/train_list.txt
  train_path: {root}
  test_list: {root}/trials.txt
  test_path: {root}
  batch_size: 4
  crop_frames: 40
  num_workers: 0
model: {{name: ResNet, embedding_dim: 8, options: {{channels: 8, blocks: [1], stem_stride: 4}}}}
loss: {{name: amsoftmax}}
training: {{max_epochs: 5000, test_interval: 5000, save_path: {run}, log_interval: 1, save_steps: 5}}
runtime: {{device: cpu, precision: "no", compile: "off", deterministic: true}}
augment: {{enabled: false}}
"""


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def signalled(recipe: Path, repository: Path, number: signal.Signals) -> tuple[int, str, int]:
    """Status, words and steps of a run of two whose second process got a signal some steps after its start."""
    run, begin = recipe.parent / "run", steps_of(recipe.parent / "run")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    process = subprocess.Popen(
        [*command, "trainSpeakerNet.py", "--config", str(recipe)], cwd=repository, stderr=subprocess.PIPE, text=True
    )
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + SECONDS
        while steps_of(run) < begin + 7:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        children = psutil.Process(process.pid).children()
        ranks = {one.environ()["RANK"]: one for one in children}
        ranks["1"].send_signal(number)
        said = process.communicate(timeout=60)[1]
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children)
    finally:
        for one in [*children, process]:
            if one.is_running() if isinstance(one, psutil.Process) else one.poll() is None:
                one.kill()
    return process.returncode, said, int(read_own_checkpoint(run / "last.pt")["training"]["state"]["step"])


def test_one_process_is_stopped_or_killed(tiny_corpus: Path, tmp_path: Path, repository: Path) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text(RECIPE.format(root=tiny_corpus, run=tmp_path / "run"))
    status, said, stopped_at = signalled(recipe, repository, signal.SIGTERM)
    assert status and f"stopped by SIGTERM after step {stopped_at}; the same command goes on" in said
    status, said, _ = signalled(recipe, repository, signal.SIGKILL)
    assert status and said.count("resumed from") == 1 and f"step {stopped_at}" in said
    assert "Signal 9 (SIGKILL)" in said and "rank      : 1 " in said
