"""The manifests for clusters parse, and their commands and options exist."""

import re
import shlex
from pathlib import Path

import yaml
from torch.distributed.run import get_args_parser

from speakernet.cli import build_parser, pack
from speakernet.config.loading import load_config
from speakernet.files import WHOLE, parse_part

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "docs" / "manifests"


def command_of(script: Path) -> list[str]:
    """The last command of a shell script, with its variables as they are."""
    return shlex.split(script.read_text(encoding="utf-8").splitlines()[-1])


def test_the_commands_of_the_manifests_are_ours() -> None:
    runner, program, script, *options = command_of(MANIFESTS / "slurm.sh")
    assert (runner, program, script) == ("srun", "python", "trainSpeakerNet.py")
    config = load_config(options).config
    assert config.training.mirror and config.data.train_path == "/local/vox2_dev_packed"
    program, command, *options = command_of(MANIFESTS / "slurm_pack.sh")
    assert (program, command) == ("speakernet", "pack")
    given = build_parser(pack, "speakernet pack").parse_args(options)
    assert parse_part(given.part.replace("$SLURM_ARRAY_TASK_ID", "16")) != WHOLE
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
