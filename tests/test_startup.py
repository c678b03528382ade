"""What needs no torch does not wait for it: help, tables, configurations, and everything that is refused at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from speakernet.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
# What takes a second or more to import. A small corpus is not made, a file is not read: these answers are about words.
SLOW_MODULES = ("torch", "torchaudio", "matplotlib", "tensorboard")
MISTYPED = [
    ["trian"],
    ["train", "--data.batch_sze", "3"],
    ["train", "--config", "no_such_recipe.yaml"],
    ["train", "--runtime.device", "mps"],
    ["train", "--help", "data"],
    ["doctor", "--confg", "exp01.yaml"],
    ["find-batch-size", "--modl.name", "ResNet"],
    ["benchmark", "--compare"],
    ["evaluate", "--scores", "scores.txt"],
    ["import-weights", "file.model", "--modl", "ResNetSE34L"],
]
ANSWERED = [[], ["--help"], ["--version"], ["list"], ["list", "models"], ["show-config", "--config", "exp01.yaml"]]
CALLS = [*ANSWERED, *MISTYPED, *([name, "--help"] for name in COMMANDS)]

SCRIPT = """
import contextlib, io, json, sys
from speakernet.cli import main
slow, found = json.loads(sys.argv[1]), []
for call in json.loads(sys.argv[2]):
    before = set(sys.modules)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = main(call)
        except SystemExit as end:
            status = end.code
    found.append([status, [name for name in slow if name in sys.modules and name not in before]])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, list[str]]]:
    """Call -> exit status and the slow modules that it was the first to import; all in one fresh interpreter."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(SLOW_MODULES), json.dumps(CALLS)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(finished.stdout.splitlines()[-1])
    return {" ".join(call): tuple(one) for call, one in zip(CALLS, found, strict=True)}


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_nothing_slow_is_imported(call: list[str], answers: dict[str, tuple[int, list[str]]]) -> None:
    status, imported = answers[" ".join(call)]
    assert imported == []
    is_fine = call in ANSWERED[1:] or "--help" in call
    assert (status == 0) == is_fine


def test_the_script_of_the_checkout_answers_without_torch() -> None:
    for script in ("trainSpeakerNet.py", "benchmark_performance.py"):
        command = [sys.executable, "-X", "importtime", script, "--help"]
        finished = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        imported = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
        assert "speakernet.cli" in imported and not imported & set(SLOW_MODULES)
        assert "usage" in finished.stdout
