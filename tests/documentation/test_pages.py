"""Pages agree with the code: links resolve, Python imports, YAML loads, commands and options
exist.
"""

import ast
import contextlib
import functools
import importlib
import io
import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from speakernet.cli import COMMANDS, main
from speakernet.cli.list_components import HOLDERS
from speakernet.cli.parsing import EXIT_STATUSES, build_parser, load_command
from speakernet.config import load_config
from speakernet.config.schema import CHOICES
from speakernet.data.parts import WHOLE, parse_part
from tests.conftest import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
SCRIPTS = {"trainSpeakerNet.py": ["train"]}
for script in (REPOSITORY / "data_prep").glob("*.py"):
    SCRIPTS[f"data_prep/{script.name}"] = ["prepare", script.stem]
OTHER_PROGRAMS = """pip pytest make curl arecord git export source tensorboard cd head docker mkdir
npm tar cp base64"""
SECTIONS = ("data", "augment", "model", "loss", "training", "frontend")
TAKES_CONFIG = ("train", "doctor", "benchmark", "find-batch-size", "show-config", "study")


def blocks(page, *languages):
    return [
        text
        for language, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if language in languages
    ]


def prose(page):
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """The anchors of a page by GitHub's rule, which the site follows."""
    headings = re.findall(r"^#{1,6} +(.*?)$", prose(page), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def commands(page):
    """The words of every command in a page's shell blocks and of complete commands between
    backticks.
    """
    lines = [line for text in blocks(page, "sh") for line in text.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"(?<!`)`((?:speakernet|python) [^`]+)`", prose(page))
    for line in lines:
        for part in re.split(r" (?:&&|\|) ", line.replace("\\|", "|")):
            words = [word for word in shlex.split(part, comments=True) if word not in ("…", "...")]
            if words and "…" not in part:
                yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links(page):
    for target in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`]*`", "", prose(page))):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not target.startswith("http"):
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_examples(page, tmp_path):
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                assert all(importlib.import_module(alias.name) for alias in node.names)
    for text in blocks(page, "yaml"):
        if next(iter(yaml.safe_load(text))) in SECTIONS:
            (tmp_path / "page.yaml").write_text(text, encoding="utf-8")
            load_config(["--config", str(tmp_path / "page.yaml")])


@functools.cache
def help_of(*words):
    printed = io.StringIO()
    for topic in ("", "all") if words[0] in TAKES_CONFIG else ("",):
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help", *topic.split()])
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands(page):
    for words in commands(page):
        if words[0] == "torchrun":
            script = next(row for row, word in enumerate(words) if word.endswith(".py"))
            words = ["python", *words[script:]]
        if words[0] == "python" and words[1] in SCRIPTS:
            words = [*SCRIPTS[words[1]], *words[2:]]
        elif words[0] == "python":
            path = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
            assert (REPOSITORY / path).exists() or Path(path).stem in ("NAME", "venv"), words
            continue
        elif words[0] == "speakernet":
            words = words[1:]
        else:
            assert words[0] in OTHER_PROGRAMS.split() or "=" in words[0], words
            continue
        if words[0].startswith("-") or words[0].isupper():
            continue
        assert words[0] in COMMANDS, words
        depth = 1
        if words[0] in ("prepare", "people"):
            depth = 3 if words[1] == "trials" else 2
        known = help_of(*(word for word in words[:depth] if not word.isupper()))
        for option in re.findall(r"(?<!\S)--[\w.-]+", " ".join(words)):
            assert re.search(rf"{re.escape(option)}\b", known), f"{' '.join(words)}: {option}"


def test_named_configurations():
    for page in PAGES:
        for words in commands(page):
            for option, name in itertools.pairwise(words):
                is_of_reader = name.startswith(("my", "data/", "exps/", "ResNetSE34L_AP"))
                if option == "--config" and not is_of_reader:
                    assert (REPOSITORY / "configs" / name).is_file(), name


def test_exit_statuses():
    page = (REPOSITORY / "docs" / "runs.md").read_text(encoding="utf-8")
    codes = re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)
    assert [int(code) for code in codes] == sorted(EXIT_STATUSES)


@pytest.mark.parametrize("kind", ["models", "poolings", "features", "losses"])
def test_components_are_described(kind):
    page = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    names = CHOICES[HOLDERS[kind]].table
    assert [name for name in names if f"`{name}`" not in page] == []


MANIFESTS = REPOSITORY / "docs" / "manifests"


def command_of(script):
    return shlex.split(script.read_text(encoding="utf-8").splitlines()[-1])


def test_commands_of_the_manifests():
    runner, program, script, *options = command_of(MANIFESTS / "slurm.sh")
    assert (runner, program, script) == ("srun", "python", "trainSpeakerNet.py")
    config = load_config(options).config
    assert config.training.mirror and config.data.train_path == "/local/vox2_dev_packed"
    program, command, *options = command_of(MANIFESTS / "slurm_pack.sh")
    assert (program, command) == ("speakernet", "pack")
    part = (
        build_parser(load_command("speakernet.cli.pack"), "speakernet pack")
        .parse_args(options)
        .part
    )
    assert parse_part(part.replace("$SLURM_ARRAY_TASK_ID", "16")) != WHOLE
    last = part.partition("/")[2]
    assert f"--array=1-{last}\n" in (MANIFESTS / "slurm_pack.sh").read_text()


def test_kubernetes_manifest():
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
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
