"""A tracker that writes the numbers of a run to a CSV file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakernet.files import GrowingFile, atomic_write
from speakernet.training.trackers import scalars


class CurvesAsCsv:
    """`metrics.csv` in the run folder, with step, name and value on each line."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        path = folder / "metrics.csv"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ["step,name,value"]
        # A resumed run repeats the steps that a killed run took after its last checkpoint.
        kept = [line for line in lines if not line[:1].isdigit() or int(line.partition(",")[0]) <= step]
        if not configuration:
            # After training: the final evaluation may be repeated.
            kept = [line for line in kept if not line.startswith(f"{step},test/")]
        with atomic_write(path) as file:
            file.writelines(f"{line}\n" for line in kept)
        self._file = GrowingFile(path)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one line per number."""
        lines = (f"{step},{tag},{value!r}\n" for tag, value in scalars(kind, values))
        self._file.append("".join(lines).encode())

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Write the figures; plots and model are already in the folder."""
        self.record("test", step, figures)

    def close(self) -> None:
        """Nothing to do: every line is written immediately."""
