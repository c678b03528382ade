"""The measure of reading ahead: it runs, and its corpus comes from the disk."""

import sys
from pathlib import Path

import pytest

from benchmarks import cold_corpus


@pytest.mark.skipif(sys.platform != "linux", reason="pages are dropped as Linux does it")
def test_it_prints_a_row_for_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--folder", str(tmp_path), "--gigabytes", "0.003", "--batches", "3", "--batch_size", "4"]
    monkeypatch.setattr(sys, "argv", ["cold_corpus", *options, "--rounds", "1", "--step_milliseconds", "0", "1"])
    assert cold_corpus.main() == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| 0 ms"] * 3 + ["| 1 ms"] * 3
    assert len({row[1] for row in rows}) == 3
    found = (tmp_path / cold_corpus.NAME / "samples.npy").stat().st_size
    assert found == 128 + 2 * cold_corpus.UTTERANCE_SAMPLES * 11
