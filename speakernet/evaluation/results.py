"""The results of scoring a trial list as one object, from which `results.json`, report and terminal
output are made.

`figures` creates it and the evaluation adds its provenance with `dataclasses.replace`. Only
`to_dict` and `from_dict` write and read `results.json`. Unknown values are None (or empty) and have
no key in the file. `headline` alone decides how a figure is formatted.
"""

import dataclasses
import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from speakernet.terminal import counted

EMBEDDING = "embedding"
KEPT_EMBEDDINGS = "reading_kept_embeddings"
"""Names of timings."""
FEW_TARGETS = 30
"""With fewer targets, a single one moves the miss rate by more than three percent."""
NO_INTERVAL = [None, None]
CLLR_FIGURES = {"cllr": ("Cllr", "bits", 1), "min_cllr": ("min Cllr", "bits", 1)}
FURTHER_FIGURES = {
    "eer_convex_hull_percent": ("EER on the ROC convex hull", "%", 0),
    "eer_voxceleb_trainer_percent": ("EER as voxceleb_trainer computes it", "%", 0),
    "calibration_loss": ("calibration loss (Cllr − min Cllr)", "bits", 1),
    "area_under_roc": ("area under the ROC", "", 2),
}
"""Fields of `Results` that tables show below the headline -> name, unit, decimals beyond those of
an EER in percent."""


def _interval(values: Any) -> Any:
    return None if values == NO_INTERVAL else values


Interval = Annotated[tuple[float, float] | None, BeforeValidator(_interval)]
"""Lower and upper end of a 95 % interval."""
CostsByPrior = dict[Annotated[str, Field(pattern=r"^[0-9.]+(e-?[0-9]+)?$")], float]
"""Target prior, as text -> normalised detection cost."""


class Costs(TypedDict):
    """The costs of a decision."""

    c_miss: float
    c_fa: float


class Band(TypedDict):
    """The intervals of a DET curve, in percent."""

    false_accept_percent: list[float]
    miss_low_percent: list[float]
    miss_high_percent: list[float]


class KeptThreshold(TypedDict):
    """A named threshold; its other keys give the scoring and the list it was fitted on."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    name: str
    threshold: float


def _plain(value: Any) -> Any:
    """Plain values by name; unknown ones are left out, except the error rate and its interval."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, SliceResult | SweepResult):
        return _plain(vars(value))
    if not isinstance(value, GroupResult | Results):
        return value
    # Not `asdict`, which would copy every list of a result first.
    values = {name: _plain(item) for name, item in vars(value).items() if item not in (None, "")}
    # Readers may index [0] and [1] without checking for an interval.
    interval = list(value.eer_interval_percent or NO_INTERVAL)
    return values | {"eer_percent": value.eer_percent, "eer_interval_percent": interval}


@dataclass(frozen=True)
class GroupResult:
    """Figures of a subset of the trials, or of all of them on degraded audio."""

    label: str
    eer_percent: float | None = None
    """None if there is none; `note` gives the reason."""
    eer_interval_percent: Interval = None
    note: str = ""
    num_trials: int | None = None
    num_targets: int | None = None
    min_dcf: CostsByPrior | None = None

    @property
    def eer_text(self) -> str:
        """The EER, and its interval if there is one."""
        text = f"{self.eer_percent:.2f} %"
        if self.eer_interval_percent:
            low, high = self.eer_interval_percent
            text += f" ({low:.2f}–{high:.2f})"
        return text


@dataclass(frozen=True)
class SliceResult:
    """Results for one way of grouping the trials: what the groups differ in, a note, and one row
    per group.
    """

    by: str
    note: str
    rows: list[GroupResult]


@dataclass(frozen=True)
class SweepResult:
    """Results against the amount of one degradation: its kind, the axis label, a note, and one row
    per amount.
    """

    kind: str
    axis: str
    note: str
    rows: list[GroupResult]


class AffineFit(TypedDict):
    """An affine calibration as plain values."""

    weights: list[float]
    offset: float
    inputs: list[str]
    prior: float
    seconds: NotRequired[list[float]]
    """The shortest and the longest duration that a calibration with durations holds for."""


@dataclass(frozen=True)
class Results:
    """Everything in `results.json`, with the same names in the same order."""

    num_trials: int = 0
    num_utterances: int | None = None
    eer_percent: float | None = None
    eer_interval_percent: Interval = None
    min_dcf: CostsByPrior = field(default_factory=dict)
    num_targets: int | None = None
    num_duplicate_trials: int | None = None
    num_contradicting_trials: int | None = None
    """Duplicates whose labels disagree."""
    num_self_trials: int | None = None
    """Trials of an utterance with itself."""
    num_same_session_targets: int | None = None
    """Targets whose two sides come from one session; None if sessions are unknown."""
    why_no_eer: str = ""
    eer_threshold: float | None = None
    eer_convex_hull_percent: float | None = None
    eer_voxceleb_trainer_percent: float | None = None
    dcf_costs: Costs | None = None
    area_under_roc: float | None = None
    min_cllr: float | None = None
    cllr: float | None = None
    act_dcf: CostsByPrior | None = None
    calibration_loss: float | None = None
    """Cllr minus min Cllr, in bits."""
    num_speakers: int | None = None
    num_speakers_of_half_the_targets: int | None = None
    """The smallest number of speakers who have half of the target trials."""
    speaker_rule: str = ""
    num_draws: int | None = None
    min_dcf_interval: dict[str, Interval] | None = None
    interval_note: str = ""
    det_band: Band | None = None
    precision: str = ""
    """Of the network: float32, bf16 or fp16."""
    backend: dict[str, Any] | None = None
    """The scoring that the figures and thresholds belong to."""
    lists: list[dict[str, str]] | None = None
    """`role`, `name` and `sha256` of each list read."""
    timings_seconds: dict[str, float] | None = None
    """Of `embedding` (`reading_kept_embeddings` if they were on disk), `scoring` and `figures`."""
    seconds: float | None = None
    slices: list[SliceResult] | None = None
    sweep: list[SweepResult] | None = None
    shortcuts: list[GroupResult] | None = None
    """EER of duration, loudness, sample rate or format alone; a note says in which direction."""
    test_lists: dict[str, GroupResult] | None = None
    """Figures of the other test lists, by name; their own results are under eval/<name>."""
    calibration: AffineFit | None = None
    """For fused or calibrated score files."""
    model: dict[str, Any] | None = None
    num_parameters: int | None = None
    front_end: dict[str, Any] | None = None
    checkpoint: dict[str, str] | None = None
    """`path` and `sha256`."""
    thresholds: list[KeptThreshold] | None = None
    versions: dict[str, str] | None = None
    machine: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    """The `evaluation` section."""
    command: str = ""
    date: str = ""
    """Date and local time of the evaluation, to the minute."""
    training: dict[str, float] | None = None
    """What the model was trained on: `speakers`, `utterances`, `hours`."""
    performance: dict[str, Any] | None = None
    """Of training: `utterances_per_second`, `data_wait_share`, `process_peak_bytes`,
    `gpu_utilisation_percent` …"""
    initial_model: dict[str, Any] | None = None
    """The model that training started from: its `file`, figures on this list, whether it stayed
    best, `sentences`."""
    warnings: list[str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys in the file that this version does not know, kept for the report."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been evaluated."""
        return self == Results()

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the names in `results.json`."""
        # Unknown keys are kept, so that an older version does not lose what a newer one wrote.
        values = _plain(self) | self.extra
        del values["extra"]
        if self.min_dcf_interval is not None:
            values["min_dcf_interval"] = {
                prior: list(interval or NO_INTERVAL)
                for prior, interval in self.min_dcf_interval.items()
            }
        return values

    def _repr_html_(self) -> str:
        """The headline figures as a table, for notebooks."""
        trials = f"{self.num_trials:,} of {self.list_name() or 'a list'}"
        figures = [(figure.name, figure.with_interval) for figure in headline(self)]
        return html_table([("trials", trials), *figures])

    def as_row(self, label: str) -> GroupResult:
        """The figures of the whole list as a table row."""
        return GroupResult(
            label,
            self.eer_percent,
            self.eer_interval_percent,
            self.why_no_eer,
            self.num_trials,
            self.num_targets,
            self.min_dcf,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Results":
        """Read what `to_dict` of this or an earlier version returned; ValueError if a value has the
        wrong type.
        """
        # Files may come from earlier and later versions, so unknown keys are kept and missing ones
        # get their defaults. Only a value of the wrong type is refused, because the report would
        # fail on it later with a worse message.
        names = {field.name for field in dataclasses.fields(cls)} - {"extra"}
        known: dict[str, Any] = {"extra": {}}
        for name, value in values.items():
            if name not in names:
                known["extra"][name] = value
            elif value is not None:
                known[name] = value
        # By pydantic, because nested rows have to be built from plain dictionaries too.
        return TypeAdapter(cls).validate_python(known)

    def list_name(self, role: str = "trials") -> str:
        """The name of the list read in that role; empty if unknown."""
        for listed in self.lists or []:
            if listed.get("role") == role and listed.get("name"):
                return listed["name"]
        return ""


@dataclass(frozen=True)
class ShownFigure:
    """One figure, formatted for display."""

    name: str
    """For example `EER` or `minDCF(0.01)`."""
    unit: str
    number: str
    """The value without its unit."""
    text: str
    """The value with its unit."""
    interval_text: str
    """The interval with its unit; empty if there is none."""

    @property
    def with_interval(self) -> str:
        """The value, and the interval in brackets."""
        return f"{self.text} ({self.interval_text})" if self.interval_text else self.text

    @property
    def label(self) -> str:
        """The name with the unit, for tables of bare numbers."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


def headline(results: Results, digits: int = 2, *, further: bool = False) -> list[ShownFigure]:
    """EER, minDCFs and, for calibrated scores, actual costs and Cllr; empty without error rates.

    `further` adds the `FURTHER_FIGURES` that are known.

    >>> results = Results(eer_percent=5.21, min_dcf={"0.01": 0.4}, min_cllr=0.2)
    >>> [figure.text for figure in headline(results)]
    ['5.21 %', '0.400', '0.200 bits']
    """
    if results.eer_percent is None:
        return []
    intervals = results.min_dcf_interval or {}
    # Tables, pages and the terminal all use this order, beginning with the figure that papers
    # compare first.
    figures = [
        _format_figure("EER", "%", digits, results.eer_percent, results.eer_interval_percent)
    ]
    # Costs lie between 0 and 1, so they need one more digit than a percentage to separate two
    # systems.
    for prior, cost in results.min_dcf.items():
        figures.append(
            _format_figure(f"minDCF({prior})", "", digits + 1, cost, intervals.get(prior))
        )
    for prior, cost in (results.act_dcf or {}).items():
        figures.append(_format_figure(f"actual DCF({prior})", "", digits + 1, cost))
    # Without a calibration there is no Cllr, but min Cllr needs only the scores.
    for key, (name, unit, more) in (CLLR_FIGURES | (FURTHER_FIGURES if further else {})).items():
        value = vars(results)[key]
        if value is not None:
            figures.append(_format_figure(name, unit, digits + more, value))
    return figures


def _format_figure(
    name: str, unit: str, digits: int, value: float, interval: Interval = None
) -> ShownFigure:
    number = f"{value:.{digits}f}"
    ends = ""
    if interval is not None:
        ends = f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f} {unit}".rstrip()
    return ShownFigure(name, unit, number, f"{number} {unit}".rstrip(), ends)


def html_table(rows: Iterable[tuple[str, Any]]) -> str:
    """An HTML table of names and values, for notebooks.

    >>> html_table([("EER", "5 %"), ("list", "<a>")])
    '<table><tr><th>EER</th><td>5 %</td></tr><tr><th>list</th><td>&lt;a&gt;</td></tr></table>'
    """
    cells = (
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows
    )
    return f"<table>{''.join(cells)}</table>"


def headline_sentence(results: Results, digits: int = 2) -> str:
    """The EER with its interval, minDCFs and the number of trials; or why there is no error
    rate.
    """
    trials = counted(results.num_trials, "trial")
    if results.eer_percent is None:
        # Earlier versions wrote no reason.
        reason = results.why_no_eer or "they are unlabelled, so there is no error rate"
        return f"{trials} scored; {reason}"
    eer, *others = headline(results, digits)
    text = f"{eer.name} {eer.text}"
    if eer.interval_text:
        interval = eer.interval_text.removesuffix(" %")
        text += f" (95 % interval {interval}, bootstrap over speakers)"
    for figure in others:
        if figure.name.startswith("minDCF"):
            text += f", {figure.name} {figure.text}"
    return f"{text}; {trials}, {results.num_targets or 0:,} of them targets"
