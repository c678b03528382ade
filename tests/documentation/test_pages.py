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

from speakernet.cli import COMMANDS, EXIT_STATUSES, build_parser, main, pack
from speakernet.config import load_config
from speakernet.data.parts import WHOLE, parse_part

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
SCRIPTS = {"trainSpeakerNet.py": ["train"]}
SCRIPTS |= {
    f"data_prep/{path.name}": ["prepare", path.stem] for path in (ROOT / "data_prep").glob("*.py")
}
OTHER_PROGRAMS = {
    "pip",
    "pytest",
    "make",
    "curl",
    "arecord",
    "git",
    "export",
    "source",
    "tensorboard",
    "cd",
    "head",
}
OTHER_PROGRAMS |= {"docker", "mkdir", "npm", "tar", "cp", "base64"}


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
    lines += [
        " ".join(one.split())
        for one in re.findall(r"(?<!`)`((?:speakernet|python) [^`]+)`", prose(page))
    ]
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
                assert all(
                    hasattr(importlib.import_module(node.module or ""), one.name)
                    for one in node.names
                )
            elif isinstance(node, ast.Import):
                assert all(importlib.import_module(one.name) for one in node.names)
    for text in blocks(page, "yaml"):
        if next(iter(yaml.safe_load(text))) in (
            "data",
            "augment",
            "model",
            "loss",
            "training",
            "frontend",
        ):
            (tmp_path / "page.yaml").write_text(text, encoding="utf-8")
            load_config(["--config", str(tmp_path / "page.yaml")])


@functools.cache
def help_of(*words):
    takes_config = words[0] in ("train", "doctor", "benchmark", "find-batch-size", "show-config")
    printed = io.StringIO()
    for more in ([], ["all"]) if takes_config else ([],):
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help", *more])
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands(page):
    for words in commands(page):
        if words[0] == "torchrun":
            words = [
                "python",
                *words[next(i for i, word in enumerate(words) if word.endswith(".py")) :],
            ]
        if words[0] == "python" and words[1] in SCRIPTS:
            words = [*SCRIPTS[words[1]], *words[2:]]
        elif words[0] == "python":
            path = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
            assert (ROOT / path).exists() or Path(path).stem in ("NAME", "venv"), words
            continue
        elif words[0] == "speakernet":
            words = words[1:]
        else:
            assert words[0] in OTHER_PROGRAMS or "=" in words[0], words
            continue
        if words[0].startswith("-") or words[0].isupper():
            continue
        assert words[0] in COMMANDS, words
        depth = {"prepare": 3 if words[1:2] == ["trials"] else 2, "people": 2}.get(words[0], 1)
        name = [word for word in words[:depth] if not word.isupper()]
        known = help_of(*name)
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert re.search(rf"{re.escape(option)}\b", known), f"{' '.join(words)}: {option}"


def test_named_configurations():
    for page in PAGES:
        for words in commands(page):
            for option, name in itertools.pairwise(words):
                is_reader_s = name.startswith(("my", "data/", "exps/", "ResNetSE34L_AP"))
                assert option != "--config" or is_reader_s or (ROOT / "configs" / name).is_file(), (
                    name
                )


def test_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = re.findall(r"(\w+\.md)", navigation)
    assert sorted(named) == sorted({path.name for path in (ROOT / "docs").glob("*.md")})


def test_exit_statuses():
    codes = re.findall(
        r"^\| (\d+) \|", (ROOT / "docs" / "runs.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert [int(code) for code in codes] == sorted(EXIT_STATUSES)


MANIFESTS = ROOT / "docs" / "manifests"


def command_of(script):
    return shlex.split(script.read_text(encoding="utf-8").splitlines()[-1])


def test_commands_of_the_manifests():
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
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }
