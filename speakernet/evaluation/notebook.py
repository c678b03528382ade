"""A run in a notebook: its report page, its DET curve as a figure, and its trials as a table."""

from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import escape
from matplotlib.figure import Figure

from speakernet.evaluation import plots
from speakernet.evaluation.files import read_run
from speakernet.evaluation.metrics import equal_error_point, error_rates
from speakernet.run_folder import REPORT


class Report:
    """The contents of a run or evaluation folder, shown in a notebook as its `report.html`.

    Raises:
        FileError: the folder does not exist or has no results.
    """

    def __init__(self, folder: str | Path) -> None:
        self.run = read_run(folder)
        self.results = self.run.results

    def _repr_html_(self) -> str:
        # In a frame, because the style sheet of the page would also change the notebook.
        page = self.run.folder / REPORT
        text = page.read_text(encoding="utf-8") if page.is_file() else self.results._repr_html_()
        return (
            f'<iframe srcdoc="{escape(text)}" style="width: 100%; height: 40em; border: '
            '0"></iframe>'
        )

    def plot_det(self) -> Figure:
        """The detection error trade-off, with a band of 95 % intervals."""
        if self.run.scores is None or self.run.labels is None:
            raise ValueError(f"{self.run.folder}: no labelled scores, so there is no DET curve")
        rates = error_rates(self.run.scores, self.run.labels)
        points = {"EER": equal_error_point(rates)}
        return plots.det_figure(rates, points, self.results.det_band)

    def frame(self) -> Any:
        """A pandas table with one row per trial: `enrol`, `test`, `score` and, if known, `label`
        and `llr`.
        """
        # Imported late: pandas is needed only here and may not be installed.
        import pandas

        trials = self.run.trials
        if trials is None:
            raise ValueError(f"{self.run.folder}: no scores; evaluate first")
        names = np.array(trials.names)
        columns = {
            "enrol": names[trials.enrol],
            "test": names[trials.test],
            "score": self.run.scores,
            "label": trials.labels,
            "llr": self.run.arrays.get("llrs"),
        }
        return pandas.DataFrame(
            {name: column for name, column in columns.items() if column is not None}
        )
