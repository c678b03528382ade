"""The document about many machines: its manifests can be used, its arithmetic is right, its facts are the code's."""

import argparse
import contextlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from speakernet.assembly.sharding import FEWEST_SPEAKERS
from speakernet.cli import main
from speakernet.cli.pack import add_arguments
from speakernet.config.loading import load_config
from speakernet.corpora.commands import HelpFormatter
from speakernet.data.workers import BATCHES_AHEAD, NUM_THREADS
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parts import parse_part

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "docs" / "manifests"
TEXT = " ".join((ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").split())


def command_of(script: Path) -> list[str]:
    """The last command of a shell script, with its variables as they are."""
    return shlex.split(script.read_text(encoding="utf-8").splitlines()[-1])


@pytest.mark.parametrize("name", ["slurm.sh", "slurm_pack.sh"])
def test_shell_scripts_parse_and_ask_slurm_for_something(name: str) -> None:
    path = MANIFESTS / name
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    asked = re.findall(r"^#SBATCH (--[a-z-]+)=?\S*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(asked) >= 3 and len(asked) == len(set(asked))


def test_the_commands_of_the_manifests_are_ours() -> None:
    runner, program, script, *options = command_of(MANIFESTS / "slurm.sh")
    assert (runner, program, script) == ("srun", "python", "trainSpeakerNet.py")
    config = load_config(options).config
    assert config.training.mirror and config.data.train_path == "/local/vox2_dev_packed"
    program, command, *options = command_of(MANIFESTS / "slurm_pack.sh")
    assert (program, command) == ("speakernet", "pack")
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    add_arguments(parser)
    given = parser.parse_args(options)
    assert parse_part(given.part.replace("$SLURM_ARRAY_TASK_ID", "16")).is_whole is False
    last = re.search(r"--array=1-(\d+)", (MANIFESTS / "slurm_pack.sh").read_text())
    assert last is not None and given.part.endswith(f"/{last[1]}")


def test_the_kubernetes_manifest() -> None:
    service, job = yaml.safe_load_all((MANIFESTS / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    program, *options = container["command"]
    assert program == "torchrun"
    parsed = get_args_parser().parse_args(options)
    assert int(parsed.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(parsed.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert parsed.rdzv_endpoint == f"{job['metadata']['name']}-0.{pod['subdomain']}:29500"
    assert parsed.training_script == "trainSpeakerNet.py"
    assert load_config(parsed.training_script_args).config.training.mirror.startswith("s3://")
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_the_arithmetic_of_the_document() -> None:
    weights = sum(one.numel() for one in SpeakerNet.named("ResNet34", embedding_dim=256).parameters())
    # VoxCeleb2's published hours are those of dev and test, 1,128,246 utterances.
    hours = 2442 * 1_092_009 / 1_128_246
    facts = [
        f"{weights:,}, {4 * weights / 1e6:.1f} MB of gradients",
        f"{2 * 7 / 8 * 4 * weights / 1e6:.0f} MB with 8, {2 * 63 / 64 * 4 * weights / 1e6:.0f} MB with 64",
        f"5,994 x 256 x 4 = {5994 * 256 * 4 / 1e6:.1f} MB",
        f"{2 * 16000 * 2:,} bytes",
        f"16 kHz int16 is {16000 * 2 * 3600 / 1e6:.1f} MB an hour",
        f"{hours:,.0f} h, of the 2,442 h (published) of dev and test: {hours * 0.1152:.0f} GB | "
        f"{1e7 * 115.2e6 / 1e15:.2f} PB",
        f"{1e7 * 1092009 / hours / 1e9:.1f} billion, if as long as VoxCeleb2's {hours * 3600 / 1092009:.2f} s",
        f"110 MB | {(30 + 35 + 20 + 16) * 1e7 * 1092009 / hours / 1e10:.0f}0 GB",
        f"{1092009 / 5000:.0f} s on one, {1092009 / 40000:.0f} s on eight",
        f"{1e7 * 1092009 / hours / 64 / 5000 / 3600:.1f} hours on 64",
        f"{5000 / 7277:.1f} cores, {64000 * 5000 / 1e6:.0f} MB/s",
        f"`auto` does so from {FEWEST_SPEAKERS:,} speakers",
        f"({1_000_000 * 192 * 4 / 2**20:.0f} MiB for a million)",
        f"16 crops in 1.47 s, {16 / 1.47:.1f} a second",
        f"the packed corpus ({hours * 115.2e6 / 2**30:.1f} GiB) is larger than the memory that is free",
        f"{NUM_THREADS} threads read those of the next {['', '', '', '', 'four'][BATCHES_AHEAD]} batches ahead",
    ]
    assert [fact for fact in facts if fact not in TEXT] == []


def test_every_command_that_the_document_names_takes_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("pack", "embed", "doctor", "prepare folder", "prepare voxceleb"):
        with contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
        assert "--part I/N" in capsys.readouterr().out, command


def test_measured_figures_have_their_origin() -> None:
    """The step stands in models.md, and what is said of a corpus on a disk in performance.md."""
    models = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert "| `ResNet34` | 1.47 s" in models
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    cold = re.search(r"as it gives: ([\d,]+) a second here", TEXT)
    assert cold is not None and f"| {cold[1]} (" in performance.split("## A corpus larger than memory")[1]
