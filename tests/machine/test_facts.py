"""Facts about the machine: plain values, and what is left out where it cannot be read."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from speakernet.machine import facts
from speakernet.machine.facts import TORCH_PAIR, cpu_flags, cpu_name, log_system_info, system_info, version_of

ROOT = Path(__file__).resolve().parents[2]


def test_system_info_is_plain_and_names_versions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    info = system_info()
    log_system_info()
    assert json.loads(json.dumps(info)) == info
    assert info["versions"]["torch"] == torch.__version__.split("+")[0] or info["versions"]["torch"]
    assert info["cpu_cores"] >= 1
    assert "torch" in caplog.text


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        ("processor : 0\nmodel name : AMD EPYC\nflags : fpu avx2\n\nmodel name : other\n", "AMD EPYC", {"fpu", "avx2"}),
        ("processor : 0\nFeatures : asimd bf16\n", "", {"asimd", "bf16"}),
        (None, "", set()),
    ],
)
def test_the_processor_is_what_the_system_says(
    text: str | None, name: str, flags: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """x86, Arm (which tells no name), and a system without /proc."""

    def read(path: Path, **options: object) -> str:
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(facts.platform, "processor", lambda: "")
    monkeypatch.setattr(facts.platform, "machine", lambda: "aarch64")
    facts._cpu_facts.cache_clear()
    try:
        assert cpu_name() == (name or "aarch64") and cpu_flags() == flags
    finally:
        facts._cpu_facts.cache_clear()


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert version_of("torch") and version_of("no-such-package-anywhere") is None


def test_the_pair_that_is_advised_is_the_one_that_is_installed_for():
    bounds = re.findall(r'^    "(torch(?:audio)?>=[^"]+)",$', (ROOT / "setup.py").read_text(encoding="utf-8"), re.M)
    assert "pip install " + " ".join(f"'{one}'" for one in bounds) == TORCH_PAIR and len(bounds) == 2
