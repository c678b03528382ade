"""What a run shows in a notebook: its page, the curve of its errors as a figure, its trials as a table."""

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import escape
from matplotlib.figure import Figure

from speakernet.evaluation import plots
from speakernet.evaluation.files import read_run
from speakernet.evaluation.metrics import equal_error_point, error_rates
from speakernet.evaluation.results import Results
from speakernet.run_folder import REPORT


class Report:
    """What a run folder, or the folder of an evaluation, holds; a notebook shows `report.html`.

    Raises:
        FileError: no such folder, or one without results.
    """

    def __init__(self, folder: str | Path) -> None:
        self.run = read_run(folder)
        self.results = self.run.results or Results()

    def _repr_html_(self) -> str:
        page = self.run.folder / REPORT
        text = page.read_text(encoding="utf-8") if page.is_file() else self.results._repr_html_()
        return f'<iframe srcdoc="{escape(text)}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def plot_det(self) -> Figure:
        """The detection error trade-off, with the band of its 95 % intervals."""
        if self.run.scores is None or self.run.labels is None:
            raise ValueError(f"{self.run.folder}: no labelled scores, so no curve of errors")
        rates, band = error_rates(self.run.scores, self.run.labels), self.results.det_band
        points, bands = {"EER": equal_error_point(rates)}, {self.run.name: band} if band else {}
        figure = plots.det_figure({self.run.name: rates}, points, bands)
        # Notebooks know only figures of pyplot.
        figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]
        return figure

    def frame(self) -> Any:
        """A pandas table with a row a trial: `enrol`, `test`, `score` and, if they are known, `label` and `llr`."""
        # Late: it is not needed elsewhere, and may not be installed.
        import pandas

        if (trials := self.run.trials) is None:
            raise ValueError(f"{self.run.folder}: no scores; evaluate first")
        names = np.array(trials.names)
        columns = {"enrol": names[trials.enrol], "test": names[trials.test], "score": self.run.scores}
        more = {"label": trials.labels, "llr": self.run.arrays.get("llrs")}
        return pandas.DataFrame(columns | {name: one for name, one in more.items() if one is not None})


def _png(figure: Figure) -> bytes:
    with io.BytesIO() as file:
        figure.savefig(file, format="png")
        return file.getvalue()
