"""`benchmarks/gpu.py` on a CPU: the code of every part runs; finished parts are not run again."""

import contextlib
import json

import pytest
import torch

from benchmarks import gpu
from benchmarks.on_gpu import end_to_end, several, step_costs
from benchmarks.on_gpu.record import Setup, left_out, row
from benchmarks.on_gpu.roofline import Operation, OperationCounter, least_seconds
from speakernet.models.options import MODELS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of data that the parts share."""
    return tmp_path_factory.mktemp("gpu")


def run(folder, part):
    out = folder / "figures.json"
    words = ["--device", "cpu", "--quick", "--out", str(out), "--folder", str(folder / "data")]
    assert gpu.main([*words, "--part", part]) == 0
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_correctness(folder, monkeypatch):
    monkeypatch.setattr("benchmarks.on_gpu.correctness.SMALLEST", ("ResNet", "Pretrained"))
    figures = run(folder, "correctness")
    compared = [one for one in figures["correctness"] if "reason" not in one]
    assert {"error", "tolerance", "passed"} < set(compared[0]) and all(
        one["passed"] for one in compared
    )
    named = {one["name"] for one in compared}
    assert {
        "resident corpus and banks, samples",
        "preset_reproducible twice: tensors that differ",
    } < named
    assert any(one.get("reason") == "needs a CUDA device" for one in figures["correctness"])


@pytest.mark.slow
def test_every_other_part_runs(folder):
    for part in ("steps", "launches", "roofline", "pipeline", "evaluation", "ranks"):
        figures = run(folder, part)
    assert figures["peak_flops"]["float32"] > 1e8 and figures["bandwidth_bytes_per_second"] > 1e7
    # The size of a share depends on what else the machine does, so it is compared with the figures
    # it is made from.
    shares = [one for one in figures["parts"]["roofline"]["rows"] if "roofline_share" in one]
    for one in shares:
        assert (
            0 < one["least_seconds"] == pytest.approx(one["roofline_share"] * one["step_seconds"])
        )
        peak = figures["peak_flops"][one["arithmetic"]]
        assert 0 < one["step_flop"] == pytest.approx(one["mfu"] * one["step_seconds"] * peak)
    assert {one["name"]: one["roofline_share"] for one in shares} == figures["roofline_share"] != {}
    assert {"hardware", "versions", "quick", "device"} < set(figures)
    steps = {one["name"]: one for one in figures["parts"]["steps"]["rows"]}
    assert steps["ResNet, eager"]["peak_bytes"] > 0 and steps["ResNet, bf16"]["step_seconds"] > 0
    assert steps["ResNet, all"]["reason"] == "needs a CUDA device"
    assert set(figures["utterances_per_second"]) == set(figures["data_wait_share"])
    assert all(0 <= share < 1 for share in figures["data_wait_share"].values())
    assert {"packed, cold page cache", "packed, 60,000 RIRs"} < set(figures["data_wait_share"])
    assert (
        figures["mfu"].keys() == figures["roofline_share"].keys()
        and min(figures["mfu"].values()) > 0
    )
    ranks = {one["name"]: one for one in figures["parts"]["ranks"]["rows"]}
    assert ranks["2 processes, own norms"]["utterances_per_second"] > 0 and len(ranks) == 3


def test_finished_parts(tmp_path, monkeypatch, capsys):
    calls: list[str] = []

    def part(setup):
        calls.append(setup.device.type)
        yield row("a", error=0.5, tolerance=1.0, passed=len(calls) < 2)
        yield left_out("b", "needs a CUDA device")

    monkeypatch.setattr(gpu, "PARTS", {"correctness": part, "steps": part})
    out = tmp_path / "figures.json"
    words = ["--device", "cpu", "--quick", "--out", str(out)]
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


def test_rows_are_stored_as_they_are_measured(tmp_path, monkeypatch):
    """A part that fails or takes too long keeps its rows; only one that failed is measured
    again.
    """
    out = tmp_path / "figures.json"
    calls = []

    def fails(setup):
        yield row("a", error=0.5)
        stored = json.loads(out.read_text(encoding="utf-8"))["parts"]["steps"]
        assert [one["name"] for one in stored["rows"]] == ["a"] and not stored["is_done"]
        raise ValueError("no disk is left")

    def endless(setup):
        calls.append(1)
        yield row("b", error=0.5)
        while True:
            pass

    monkeypatch.setattr(gpu, "PARTS", {"steps": fails, "launches": endless})
    words = ["--device", "cpu", "--out", str(out)]
    for _ in range(2):
        with pytest.raises(SystemExit, match="no disk is left"):
            gpu.main([*words, "--part", "steps"])
    monkeypatch.setattr(gpu, "PART_SECONDS", 0.2)
    for _ in range(2):
        assert gpu.main([*words, "--part", "launches"]) == 0
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert [one["name"] for one in parts["steps"]["rows"]] == ["a"]
    assert [one["name"] for one in parts["launches"]["rows"]] == ["b", "what follows"]
    assert len(calls) == 1


def test_counted_operations():
    left = torch.randn(8, 16, requires_grad=True)
    right = torch.randn(16, 4)
    with OperationCounter() as counter:
        (left.t().t() @ right).sum().backward()
    products = [one for one in counter.operations if one.flop]
    # The product and its gradient; views are not counted.
    assert [one.flop for one in products] == [2 * 8 * 16 * 4] * 2
    assert products[0].num_bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert not any("aten.t." in one.name for one in counter.operations)


def test_arithmetic_of_convolutions():
    net = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    with OperationCounter(float32_convolutions="tf32") as counter:
        net(torch.randn(1, 1, 4)).sum().backward()
    kinds = {"conv" in one.name: set() for one in counter.operations if one.flop}
    for one in counter.operations:
        if one.flop:
            kinds["conv" in one.name].add(one.arithmetic)
    assert kinds == {True: {"tf32"}, False: {"float32"}}
    operations = [Operation("conv", 8.0, 1, "tf32"), Operation("mm", 8.0, 1, "float32")]
    # The convolution's peak is twice the product's.
    assert least_seconds(operations, {"tf32": 4.0, "float32": 2.0}, 100.0) == 2.0 + 4.0


def test_measured_networks_exist():
    assert {*step_costs.MODELS, end_to_end.MODEL, several.MODEL} <= set(MODELS)


def test_variants_whose_launches_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(step_costs, "warm_step", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(
        step_costs, "count_calls", lambda *given, **options: step_costs.Calls(9.0, 0.0, 20.0)
    )
    monkeypatch.setattr(step_costs, "host_and_busy", lambda *given: {"host_seconds": 0.01})
    rows = list(step_costs.launches(Setup(torch.device("cuda"), True, tmp_path)))
    assert len(rows) == 9 and all(
        one["passed"] for one in rows if "synchronisations" in one["name"]
    )
