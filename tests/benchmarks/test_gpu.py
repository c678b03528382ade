"""`benchmarks/gpu.py` on a CPU: the code of every part runs; finished parts are not run again."""

import json

import pytest
import torch

from benchmarks import gpu
from benchmarks.on_gpu import end_to_end, several, step_costs
from benchmarks.on_gpu.record import left_out, row
from speakernet.models.options import MODELS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of data that the parts share."""
    return tmp_path_factory.mktemp("gpu")


def run(folder, part):
    out = folder / "figures.json"
    words = f"--device cpu --quick --out {out} --folder {folder}/data --part {part}"
    assert gpu.main(words.split()) == 0
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_correctness(folder, monkeypatch):
    monkeypatch.setattr("benchmarks.on_gpu.correctness.SMALLEST", ("ResNet", "Pretrained"))
    figures = run(folder, "correctness")
    rows = figures["parts"]["correctness"]["rows"]
    compared = {row["name"]: row for row in rows if "reason" not in row}
    assert all(row["passed"] for row in compared.values())
    twice = compared["preset_reproducible twice: tensors that differ"]
    assert {"error", "tolerance", "passed"} < set(twice)
    assert "resident corpus and banks, samples" in compared
    assert any(row.get("reason") == "needs a CUDA device" for row in rows)


@pytest.mark.slow
def test_every_other_part_runs(folder):
    for part in ("steps", "launches", "pipeline", "evaluation", "ranks"):
        figures = run(folder, part)
    assert {"hardware", "quick", "device"} < set(figures)
    parts = {
        part: {row["name"]: row for row in content["rows"]}
        for part, content in figures["parts"].items()
    }
    steps = parts["steps"]
    assert steps["ResNet, eager"]["peak_bytes"] > 0
    assert steps["ResNet, bf16, channels_last, recorded"]["reason"] == "needs a CUDA device"
    measured = [row for row in parts["pipeline"].values() if "reason" not in row]
    assert all(row["utterances_per_second"] > 0 for row in measured)
    assert all(0 <= row["data_wait_share"] < 1 for row in measured)
    ranks = parts["ranks"]
    assert ranks["2 processes, own norms"]["utterances_per_second"] > 0 and len(ranks) == 3
    assert parts["launches"]["kernel launches"]["reason"] == "needs a CUDA device"


def test_finished_parts(tmp_path, monkeypatch, capsys):
    calls = []

    def part(setup):
        calls.append(setup.device.type)
        yield row("a", error=0.5, tolerance=1.0, passed=len(calls) < 2)
        yield left_out("b", "needs a CUDA device")

    monkeypatch.setattr(gpu, "PARTS", {"correctness": part, "steps": part})
    out = tmp_path / "figures.json"
    words = f"--device cpu --quick --out {out}".split()
    assert gpu.main([*words, "--part", "correctness"]) == 0
    # The comparison of the other part fails, so the status is 1.
    assert gpu.main(words) == 1 and calls == ["cpu", "cpu"]
    assert gpu.main([*words, "--part", "correctness"]) == 0 and len(calls) == 2
    assert "| a | 0.5 | 1 | yes |  |" in capsys.readouterr().out
    assert "| a | 0.5 | 1 | **no** |  |" in out.with_suffix(".md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="figures of another machine"):
        gpu.main(["--device", "cpu", "--out", str(out)])
    out.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"figures\.json"):
        gpu.main(words)
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="torch sees no GPU"):
            gpu.main(["--device", "cuda", "--out", str(tmp_path / "other.json")])


def names_of(part):
    return [row["name"] for row in part["rows"]]


def test_rows_are_stored_as_they_are_measured(tmp_path, monkeypatch):
    """A part that fails or takes too long keeps its rows; only one that failed is measured
    again.
    """
    out = tmp_path / "figures.json"
    calls = []

    def fails(setup):
        yield row("a", error=0.5)
        stored = json.loads(out.read_text(encoding="utf-8"))["parts"]["steps"]
        assert names_of(stored) == ["a"] and not stored["is_done"]
        raise ValueError("no disk is left")

    def endless(setup):
        calls.append(1)
        yield row("b", error=0.5)
        while True:
            pass

    monkeypatch.setattr(gpu, "PARTS", {"steps": fails, "launches": endless})
    words = f"--device cpu --out {out}".split()
    for _ in range(2):
        with pytest.raises(SystemExit, match="no disk is left"):
            gpu.main([*words, "--part", "steps"])
    monkeypatch.setattr(gpu, "PART_SECONDS", 0.2)
    for _ in range(2):
        assert gpu.main([*words, "--part", "launches"]) == 0
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert names_of(parts["steps"]) == ["a"]
    assert names_of(parts["launches"]) == ["b", "what follows"]
    assert len(calls) == 1


def test_measured_networks_exist():
    assert {*step_costs.MODELS, end_to_end.MODEL, several.MODEL} <= set(MODELS)
