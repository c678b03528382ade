"""The results of the parts: rows with figures, or with the reason for their absence, stored as they
are measured.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.timing import markdown_table
from speakernet.config.schema import Config, with_changes
from speakernet.corpora.synthetic import CorpusParameters, make_corpus
from speakernet.files import FileError, atomic_write, open_text, reading
from speakernet.machine.facts import system_info

logger = logging.getLogger(__name__)

Row = dict[str, Any]
NEEDS_CUDA = "needs a CUDA device"
# Small, but with everything that the code asks for: several speakers, noise of every kind, rooms.
QUICK_CORPUS = CorpusParameters(
    num_speakers=4,
    utterances_per_speaker=8,
    num_trial_speakers=3,
    trial_utterances_per_speaker=3,
    num_noises=6,
    num_rooms=3,
)


@dataclass(frozen=True)
class Setup:
    """What the parts run on.

    Attributes:
        device: the device measured.
        is_quick: small sizes, which two cores finish in minutes.
        folder: for generated data and runs.
    """

    device: torch.device
    is_quick: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA GPU."""
        return self.device.type == "cuda"

    def config(self, **sections: Mapping[str, Any]) -> Config:
        """The default configuration on the device, with some sections changed."""
        # The allocator's setting is process-wide; a quick run must not change it for what follows
        # (tests).
        runtime = {
            "device": self.device.type,
            "keep_memory": not self.is_quick,
            **sections.pop("runtime", {}),
        }
        return with_changes(Config(), runtime=runtime, **sections)

    def corpus(self) -> SimpleNamespace:
        """Synthetic speech, noise and RIRs, made once."""
        return make_corpus(
            self.folder / "corpus", QUICK_CORPUS if self.is_quick else None, show_progress=False
        )


def row(name: str, **figures: Any) -> Row:
    """One line of a part's table."""
    return {"name": name, **figures}


def left_out(name: str, reason: str) -> Row:
    """A row without figures, and why."""
    return {"name": name, "reason": reason}


class Record:
    """The measured rows, in a file that is rewritten after each.

    Args:
        path: JSON; parts in it from the same machine, versions and size are not measured again.
        setup: what the parts run on.

    Raises:
        ValueError: the file has figures of another machine, version or size, or was not written by
            this program.
    """

    def __init__(self, path: Path, setup: Setup) -> None:
        self.path = path
        self.parts: dict[str, dict[str, Any]] = {}
        system = system_info()
        # Through JSON, to be comparable with what is read.
        self._facts = json.loads(
            json.dumps({"device": setup.device.type, "quick": setup.is_quick, "hardware": system})
        )
        # Figures of two machines in one table would be compared by whoever reads it, so a file
        # belongs to one machine, one set of versions and one size.
        if path.exists():
            expected = "JSON written by benchmarks/gpu.py; use another file, or remove it"
            with reading(path, expected, FileError), open_text(path) as file:
                found = json.load(file)
                facts = {name: found[name] for name in self._facts}
                parts = dict(found["parts"])
            if facts != self._facts:
                raise ValueError(
                    f"{path} has figures of another machine, version or size; use another file"
                )
            self.parts = parts

    def is_done(self, part: str) -> bool:
        """Whether a part was measured to its end."""
        return bool(self.parts.get(part, {}).get("is_done"))

    def put(self, part: str, rows: Sequence[Row], seconds: float, *, is_done: bool = False) -> None:
        """Store a part's rows so far."""
        self.parts[part] = {"seconds": round(seconds, 1), "is_done": is_done, "rows": list(rows)}
        with atomic_write(self.path) as file:
            json.dump({**self._facts, "parts": self.parts}, file, indent=1)

    def markdown(self) -> str:
        """Hardware and versions, then a table per part."""
        hardware = self._facts["hardware"]
        gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"]) or "no GPU"
        versions = ", ".join(
            f"{name} {version}" for name, version in hardware["versions"].items() if version
        )
        lines = [f"{hardware['cpu']}, {hardware['cpu_cores']} cores, {gpus}; {versions}"]
        for part, found in self.parts.items():
            lines += ["", f"### {part} ({found['seconds']:g} s)", "", _table(found["rows"])]
        return "\n".join(lines)


def _table(rows: Sequence[Row]) -> str:
    # A dictionary keeps the order in which columns first appear. Rows of a part may have different
    # ones, because a missing figure is left out.
    columns: dict[str, None] = {}
    for figures in rows:
        columns |= dict.fromkeys(figures)
    cells = []
    for figures in rows:
        cells.append([_cell(figures.get(name)) for name in columns])
    return markdown_table(tuple(columns), cells)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
