"""Pictures of reports drawn once: half of the time of a tiny run would go into drawing the same ones again.

What is tried is what becomes of a picture that cannot be written or of a killed run, not the drawing: that has tests of
its own. The bytes that are written are those that the first run drew.
"""

import functools
import hashlib
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from speakernet.evaluation import plots

CLOCKED = ("utterances a second", "waiting for data (% of time)")
"""Axes of curves that differ from run to run: their pictures are those of the first run too."""


def keep_drawings(folder: Path) -> None:
    """From now on pictures are taken from `folder` where an equal one lies there, and put into it where not."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in list(vars(plots).items()):
        is_drawing = name.endswith("_figure") and name != "new_figure"
        if is_drawing and getattr(draw, "__module__", "") == plots.__name__:
            setattr(plots, name, functools.partial(Kept, draw, folder))


class Kept:
    """Stands for a figure: drawn when it is saved, if no equal one was before."""

    def __init__(self, draw: Callable[..., Any], folder: Path, *arguments: Any, **named: Any) -> None:
        self._draw, self._arguments, self._named = draw, arguments, named
        clocked = [one for one in arguments if isinstance(one, str) and one in CLOCKED]
        told_by = clocked or [draw.__name__, arguments, sorted(named.items())]
        self._path = folder / hashlib.sha256(pickle.dumps(told_by)).hexdigest()

    def savefig(self, file: IO[Any], **options: Any) -> None:
        """Write the picture into an open file, as matplotlib does."""
        kept = self._path.with_suffix("." + options["format"])
        if not kept.exists():
            drawn = io.BytesIO()
            self._draw(*self._arguments, **self._named).savefig(drawn, **options)
            half = kept.with_suffix(f".{os.getpid()}")
            half.write_bytes(drawn.getvalue())
            half.rename(kept)
        content = kept.read_bytes()
        file.write(content.decode() if isinstance(file, io.TextIOBase) else content)
