"""The command line at its edges: commands that do not import torch, closed streams, errors of the
system.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from speakernet.assembly import inputs
from speakernet.assembly.inputs import make_synthetic_corpus
from speakernet.cli import BROKEN_PIPE, COMMANDS
from speakernet.config import ConfigError, load_config
from speakernet.corpora.synthetic import FILES

ROOT = Path(__file__).resolve().parents[1]
# These take a second or more to import.
SLOW_MODULES = ("torch", "torchaudio", "matplotlib", "tensorboard")
MISTYPED = [
    line.split()
    for line in """
trian
train --data.batch_sze 3
train --config no_such_recipe.yaml
train --runtime.device mps
train --help data
doctor --confg exp01.yaml
find-batch-size --modl.name ResNet
benchmark --compare
evaluate --scores scores.txt
import-weights file.model --modl ResNetSE34L
""".strip().splitlines()
]
ANSWERED = ["", "--help", "--version", "list", "list models", "show-config --config exp01.yaml"]
ANSWERED = [line.split() for line in ANSWERED]
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
def answers():
    """Call -> exit status and the slow modules it was the first to import; all in one fresh
    interpreter.
    """
    printed = answer_of(SCRIPT, SLOW_MODULES, CALLS)
    found = json.loads(printed.splitlines()[-1])
    return {" ".join(call): tuple(answer) for call, answer in zip(CALLS, found, strict=True)}


def answer_of(script, *values):
    """What a script prints in a fresh interpreter."""
    command = [sys.executable, "-c", script, *map(json.dumps, values)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


SCORING = """
import gc, json, sys
import speakernet.assembly.runs
from speakernet.machine.options import MachineOptions
from speakernet.machine.settings import optimize_torch_settings
optimize_torch_settings(MachineOptions())
print(json.dumps([name for name in json.loads(sys.argv[1]) if name in sys.modules]))
"""


@pytest.mark.slow
def test_a_run_starts_without_compiler_and_plots():
    """The compiler of torch takes seconds to import, and scoring needs none; plots are drawn at the
    end of a run.
    """
    slow = ["torch", "torch._dynamo", "sympy", "matplotlib", "scipy.optimize"]
    assert json.loads(answer_of(SCORING, slow)) == ["torch"]


@pytest.mark.slow
def test_decisions_need_no_scipy():
    """Each import counts for a command that answers in two seconds; scipy takes a tenth of it."""
    code = "import sys; import speakernet.inference.verifier; print('scipy' in sys.modules)"
    assert answer_of(code) == "False\n"


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_no_slow_imports(call, answers):
    status, imported = answers[" ".join(call)]
    assert imported == []
    is_fine = call in ANSWERED[1:] or "--help" in call
    assert (status == 0) == is_fine


def test_script_without_torch():
    for script in ("trainSpeakerNet.py", "benchmark_performance.py"):
        command = [sys.executable, "-X", "importtime", script, "--help"]
        finished = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        imported = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
        assert "speakernet.cli" in imported and not imported & set(SLOW_MODULES)
        assert "usage" in finished.stdout


SPEAKERNET = f"{sys.executable} -m speakernet"


def shell(command, **environment):
    ended = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("command", "status", "has_message"),
    [
        ("--help >&-", 0, False),
        ("list <&- >&- 2>&-", 0, False),
        ("--help >/dev/full", 1, True),
        ("list | true; exit ${PIPESTATUS[0]}", BROKEN_PIPE, False),
        # argparse ignores errors when it prints help.
        ("train --help all | true; exit ${PIPESTATUS[0]}", 0, False),
    ],
)
def test_unusable_streams(command, status, has_message):
    found, _, errors = shell(f"{SPEAKERNET} {command}")
    assert (found, bool(errors)) == (status, has_message) and "Traceback" not in errors


def test_name_that_the_terminal_cannot_show():
    command = f"{SPEAKERNET} show-config --given --save_path Ōsaka"
    status, shown, _ = shell(command, PYTHONIOENCODING="ascii")
    assert status == 0 and "\\u014csaka" in shown


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left", "a/b.pt"), "a/b.pt: No space left"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a/b.txt"), "a/b.txt: No such file"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe"),
        (MemoryError("2 TiB"), "2 TiB"),
        (RuntimeError("CUDA out of memory. Tried\nGPU 0"), "CUDA out of memory. Tried"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_system_error_is_one_line(error, message, monkeypatch, refuse):
    def fail(arguments):
        raise error

    monkeypatch.setattr("speakernet.cli.list_components.run", fail)
    printed = refuse("list").strip()
    assert message in printed and "\n" not in printed


def test_presets(tmp_path, monkeypatch, refuse):
    monkeypatch.chdir(tmp_path)
    message = refuse("train --config production")
    assert "data.train_list" in message and "data.test_list" in message
    assert not list(tmp_path.iterdir())
    config = load_config(["--config", "test"]).config
    assert config.data.synthetic_corpus and config.training.accumulation_steps == 2
    assert load_config(["--config", "production"]).config.training.accumulation_steps == 2
    # Own lists need no synthetic corpus.
    config = load_config(
        ["--train_list", "a.txt", "--test_list", "b.txt", "--config", "test"]
    ).config
    assert make_synthetic_corpus(config) == config and not list(tmp_path.iterdir())


def test_validation_list_of_the_synthetic_corpus(tmp_path, monkeypatch):
    """It belongs to the corpus's test list, and never to a list of the user's own."""
    made = SimpleNamespace(
        **{name: tmp_path / "data/synthetic" / below for name, below in FILES.items()}
    )
    monkeypatch.setattr(inputs, "make_corpus", lambda *_, **__: made)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").touch()
    for words, expected in (
        ([], str(made.validation_list)),
        (["--test_list", "mine.txt"], ""),
        (["--train_list", "a.txt", "--test_list", "b.txt"], ""),
        (["--data.validation_speakers", "5"], ""),
        (["--validation_list", "mine.txt"], "mine.txt"),
    ):
        config = load_config(["--config", "exp01", *words]).config
        assert make_synthetic_corpus(config).data.validation_list == expected
    # A wrong path is refused before the corpus is made.
    config = load_config(["--config", "exp01", "--train_list", "nowhere.txt"]).config
    with pytest.raises(ConfigError, match=r"nowhere\.txt"):
        make_synthetic_corpus(config)


VERIFY = """
import sys, numpy as np
from speakernet.cli import main
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.models.model_file import model_file_contents, model_of
from speakernet.models.speaker_net import SpeakerNet
options = {"spec_augment": True}
net = SpeakerNet.named("CAMPPlus", front_end="fbank", front_end_options=options).eval()
file = model_of(model_file_contents(net, loss_normalizes=True), "file")
clip = np.sin(np.arange(16000) / 20).astype(np.float32)
verifier = SpeakerVerifier(file)
assert verifier.compare(*verifier.embed([clip, clip], sample_rate=16000)) > 0.5
print("torch._dynamo" in sys.modules, flush=True)
sys.stdout = None
sys.exit(main(["verify", "a.wav", "b.wav", "--model", "none.pt"]))
"""


@pytest.mark.slow
def test_verify_fails_with_2():
    """Also without a standard output, and without importing the compiler; 1 would mean different
    speakers.
    """
    found = subprocess.run(
        [sys.executable, "-c", VERIFY], capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "False" and found.returncode == 2
    assert "none.pt" in found.stderr and "Traceback" not in found.stderr
