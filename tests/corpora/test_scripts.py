"""All scripts: help without secrets, one run at a time, cleaning up after a kill."""

import os
import runpy
import subprocess
import sys

import pytest
from preparation_corpora import SCRIPTS

from speakernet.cli.prepare import CORPORA, build_parser
from speakernet.corpora.public_archives import PublicArchives
from speakernet.corpora.steps import StepSummary, finish
from speakernet.files import LOCK_NAME, exclusive, temporary_beside
from tests.commands import run_command


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_scripts_run(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and f"data_prep/{script.name}" in capsys.readouterr().out


def test_scripts_and_parts(capsys):
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(CORPORA)
    run_command("prepare --help")
    overview = capsys.readouterr().out
    assert all(f"  {name} " in overview for name in CORPORA)
    run_command("prepare musn", 2)
    assert "did you mean 'musan'" in capsys.readouterr().err


def test_secrets(monkeypatch):
    for name in ("KEY", "USER", "PASSWORD"):
        monkeypatch.setenv(f"SPEAKERNET_{name}", "TOPSECRET")
    parser = build_parser("voxceleb")
    assert "TOPSECRET" not in parser.format_help()
    archives = PublicArchives("voxceleb", parser.parse_args([]))
    assert (archives.options.user, archives.options.password) == ("TOPSECRET", "TOPSECRET")
    assert "key=TOPSECRET" in archives.files["vox1_test_wav.zip"].urls[0]


def test_leftovers_of_a_kill(tmp_path):
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from speakernet.files import exclusive, temporary_beside\n"
        "with exclusive(sys.argv[1]):\n"
        "    temporary_beside(Path(sys.argv[1], 'a.wav')).write_bytes(b'half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=False, env=dict(os.environ)
    )
    assert outcome.returncode == -9
    assert len(list(tmp_path.glob(".*.tmp"))) == 1
    with exclusive(tmp_path):
        assert list(tmp_path.glob(".*.tmp")) == []
        kept = temporary_beside(tmp_path / "b.wav")
        kept.write_bytes(b"half")
    assert (tmp_path / LOCK_NAME).read_bytes() == b""
    with exclusive(tmp_path):
        assert kept.exists()


def test_summary(tmp_path):
    summary = StepSummary("step", tmp_path)
    summary.add(made=3, skipped=2)
    summary.add_broken("bad\nname", "why\tso")
    assert finish([summary], tmp_path / "summary.txt") == 1
    assert (
        (tmp_path / "summary.txt")
        .read_text()
        .startswith("step: 6 found, 3 made, 2 skipped, 1 broken")
    )
    assert (tmp_path / "broken_step.txt").read_text() == "bad\\nname\twhy\\tso\n"
    summary = StepSummary("step", tmp_path)
    summary.add(skipped=6)
    assert finish([summary]) == 0
    assert not (tmp_path / "broken_step.txt").exists()
