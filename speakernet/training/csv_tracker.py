"""A run's numbers as a table that any program reads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakernet.files import GrowingFile, atomic_write
from speakernet.training.trackers import scalars


class CurvesAsCsv:
    """`metrics.csv` in the run folder: step, name and value a line."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        path = folder / "metrics.csv"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ["step,name,value"]
        # What a killed run wrote after its last checkpoint comes again.
        kept = [line for line in lines if not line[:1].isdigit() or int(line.partition(",")[0]) <= step]
        with atomic_write(path) as file:
            file.writelines(f"{line}\n" for line in kept)
        self._file = GrowingFile(path)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A line for each number."""
        lines = (f"{step},{tag},{value!r}\n" for tag, value in scalars(kind, values))
        self._file.append("".join(lines).encode())

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """The figures; drawings and model are in the folder."""
        self.record("test", step, figures)

    def close(self) -> None:
        """Every line is written at once."""
