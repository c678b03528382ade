"""What the scores of a trial list come to, as one object: from the figures to `results.json`, report and terminal.

`figures` makes it, the evaluation adds where it comes from by `dataclasses.replace`, `to_dict` and `from_dict` are the
only writer and reader of `results.json`. What is not known is None (or empty) and has no key in the file.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Interval = tuple[float, float] | None
"""Lowest and highest value of a 95 % interval; None where there is none."""

EMBEDDING, KEPT_EMBEDDINGS = "embedding", "reading_kept_embeddings"
"""Names of timings."""
FEW_TARGETS = 30
"""Below this, one target more or less moves an error rate by more than three percent: too few to build on."""
WRITTEN_ALWAYS = ("eer_percent", "eer_interval_percent", "min_dcf")
"""Keys that a reader of the file finds even where there is nothing to say."""


@dataclass(frozen=True)
class GroupResult:
    """Figures of some of the trials, or of all of them on changed audio.

    Attributes:
        label: which group, or how much of a degradation.
        eer_percent: None where the group has none; `note` says why.
        eer_interval_percent: over speakers.
        note: what a reader has to know.
        num_trials: of the group.
        num_targets: of them.
        min_dcf: target prior -> cost.
    """

    label: str
    eer_percent: float | None = None
    eer_interval_percent: Interval = None
    note: str = ""
    num_trials: int | None = None
    num_targets: int | None = None
    min_dcf: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an interval only where there is an error rate."""
        values = dataclasses.asdict(self)
        if self.eer_percent is None:
            del values["eer_interval_percent"]
        else:
            values["eer_interval_percent"] = _pair(self.eer_interval_percent)
        return {key: value for key, value in values.items() if value is not None or key == "eer_percent"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GroupResult":
        """What `to_dict` gave."""
        known = {one.name: values[one.name] for one in dataclasses.fields(cls) if one.name in values}
        known["eer_interval_percent"] = _interval(values.get("eer_interval_percent"))
        for name, declared in typing.get_type_hints(cls).items():
            if name in known and not _is_of(known[name], declared):
                raise TypeError(f"{name} of a row is {str(known[name])[:60]!r}")
        return cls(**known)


@dataclass(frozen=True)
class SliceResult:
    """Results by one way of grouping trials: what the groups are told apart by, a note, and a row each."""

    by: str
    note: str
    rows: list[GroupResult]


@dataclass(frozen=True)
class SweepResult:
    """Results against the amount of one degradation: its kind, the name of the axis, a note, a row for each amount."""

    kind: str
    axis: str
    note: str
    rows: list[GroupResult]


class KeptThreshold(typing.TypedDict):
    """A threshold with a name; what else it holds says which scoring and list it belongs to."""

    name: str
    threshold: float


class Costs(typing.TypedDict):
    """Of one error of each kind."""

    c_miss: float
    c_fa: float


class Fit(typing.TypedDict):
    """An affine calibration in plain values."""

    weights: list[float]
    offset: float
    inputs: list[str]
    prior: float


class Band(typing.TypedDict):
    """A 95 % interval of the DET curve."""

    false_accept_percent: list[float]
    miss_low_percent: list[float]
    miss_high_percent: list[float]


@dataclass(frozen=True)
class Results:
    """Everything that `results.json` holds, in its order and by its names."""

    num_trials: int = 0
    num_utterances: int | None = None
    eer_percent: float | None = None
    eer_interval_percent: Interval = None
    min_dcf: dict[str, float] = field(default_factory=dict)
    """Target prior, as text -> normalised minimum detection cost."""
    num_targets: int | None = None
    num_duplicate_trials: int | None = None
    num_contradicting_trials: int | None = None
    """Of these, those that had another label before."""
    why_no_eer: str = ""
    eer_threshold: float | None = None
    eer_convex_hull_percent: float | None = None
    eer_voxceleb_trainer_percent: float | None = None
    dcf_costs: dict[str, float] | None = None
    area_under_roc: float | None = None
    min_cllr: float | None = None
    cllr: float | None = None
    act_dcf: dict[str, float] | None = None
    calibration_loss: float | None = None
    """Cllr less min Cllr, in bits."""
    num_speakers: int | None = None
    speaker_rule: str = ""
    num_draws: int | None = None
    min_dcf_interval: dict[str, Interval] | None = None
    interval_note: str = ""
    det_band: dict[str, list[float]] | None = None
    """95 % interval of the DET curve, a `Band`."""
    precision: str = ""
    """In which the network computed: float32, bf16 or fp16."""
    backend: dict[str, Any] | None = None
    """The scoring that figures and thresholds belong to."""
    lists: list[dict[str, str]] | None = None
    """`role`, `name` and `sha256` of each list that was read."""
    timings_seconds: dict[str, float] | None = None
    """Of `embedding`, `scoring` and `figures`; `reading_kept_embeddings` where they were not made anew."""
    seconds: float | None = None
    slices: list[SliceResult] | None = None
    sweep: list[SweepResult] | None = None
    calibration: dict[str, Any] | None = None
    """The fit of fused or calibrated score files."""
    model: dict[str, Any] | None = None
    num_parameters: int | None = None
    """Of the network."""
    front_end: dict[str, Any] | None = None
    checkpoint: dict[str, str] | None = None
    """`path` and `sha256`."""
    thresholds: list[dict[str, Any]] | None = None
    versions: dict[str, str] | None = None
    machine: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    """The section evaluation."""
    command: str = ""
    date: str = ""
    """Of the evaluation, with hours and minutes of this machine's clock."""
    training: dict[str, Any] | None = None
    """What the model was trained on: `speakers`, `utterances`, `hours`."""
    performance: dict[str, Any] | None = None
    """Of the training: `utterances_per_second`, `data_wait_share`, `process_peak_bytes`, `gpu_utilisation_percent` …"""
    initial_model: dict[str, Any] | None = None
    """The model that training started from: its `file`, figures on this list, whether it stayed best, `sentences`."""
    warnings: list[str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a file that this version does not know: kept as they are."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values by the names of `results.json`."""
        values: dict[str, Any] = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name != "extra" and (value not in (None, "") or one.name in WRITTEN_ALWAYS):
                values[one.name] = value
        # JSON has no tuples, and readers index [0] and [1] without asking whether there is an interval.
        values["eer_interval_percent"] = _pair(self.eer_interval_percent)
        if self.min_dcf_interval is not None:
            values["min_dcf_interval"] = {name: _pair(one) for name, one in self.min_dcf_interval.items()}
        for name in ("slices", "sweep"):
            if name in values:
                values[name] = [{**vars(one), "rows": [row.to_dict() for row in one.rows]} for one in values[name]]
        return {**values, **self.extra}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Results":
        """What `to_dict` gave, of this version or an earlier one.

        Raises:
            ValueError: no mapping, or values of another kind than their names say.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"found {type(values).__name__}; expected an object with the names of results.json")
        # A key of a later version is kept: an old installation must not lose it by making a report anew.
        names = {one.name for one in dataclasses.fields(cls)} - {"extra"}
        known = {name: value for name, value in values.items() if name in names and value is not None}
        extra = {name: value for name, value in values.items() if name not in names}
        try:
            known["eer_interval_percent"] = _interval(known.get("eer_interval_percent"))
            for name in known.get("min_dcf", ()):
                float(name)
            if "min_dcf_interval" in known:
                known["min_dcf_interval"] = {n: _interval(one) for n, one in known["min_dcf_interval"].items()}
            if "slices" in known:
                known["slices"] = [_table(SliceResult, one, ("by", "note")) for one in known["slices"]]
            if "sweep" in known:
                known["sweep"] = [_table(SweepResult, one, ("kind", "axis", "note")) for one in known["sweep"]]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"values of an unknown form ({type(error).__name__}: {error})") from error
        # Before model files had a checksum, the path alone was kept.
        if isinstance(known.get("checkpoint"), str):
            known["checkpoint"] = {"path": known["checkpoint"], "sha256": ""}
        if isinstance(known.get("model"), str):
            known["model"] = {"name": known["model"]}
        for one in dataclasses.fields(cls):
            if one.name in known and not _is_of(known[one.name], DECLARED[one.name]):
                raise ValueError(f"{one.name} is {str(known[one.name])[:60]!r}; expected {one.type}")
        return cls(**known, extra=extra)

    def list_name(self, role: str = "trials") -> str:
        """The name of the list that was read in that role; empty where it is not known."""
        return next((str(one["name"]) for one in self.lists or [] if one.get("role") == role and one.get("name")), "")


def _is_of(value: Any, declared: Any) -> bool:
    """Whether a value of JSON is of a declared type; objects of this file checked themselves when they were made."""
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if typing.is_typeddict(declared):
        # At least these keys: a later version may write more.
        fields = typing.get_type_hints(declared)
        return isinstance(value, dict) and all(one in value and _is_of(value[one], fields[one]) for one in fields)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, one) for one in arguments)
    if origin is dict:
        return isinstance(value, dict) and all(_is_of(one, arguments[1]) for one in value.values())
    if origin is list:
        return isinstance(value, list) and all(_is_of(one, arguments[0]) for one in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments)
    if declared is float:
        # JSON has one kind of number, of which some readers make integers.
        return isinstance(value, int | float) and not isinstance(value, bool)
    return declared is Any or (isinstance(value, declared) and not (declared is int and isinstance(value, bool)))


DECLARED = {
    **typing.get_type_hints(Results),
    "thresholds": list[KeptThreshold],
    "dcf_costs": Costs,
    "det_band": Band,
    "calibration": Fit,
    "training": dict[str, float | None],
}
"""Field -> type of what `results.json` holds, down to what is looked for in it."""


def _table(kind: Any, values: Mapping[str, Any], words: tuple[str, ...]) -> Any:
    rows = [GroupResult.from_dict(row) for row in values["rows"]]
    return kind(**{name: str(values.get(name, "")) for name in words}, rows=rows)


def _interval(values: Any) -> Interval:
    low, high = values or (None, None)
    return None if low is None or high is None else (float(low), float(high))


def _pair(interval: Interval) -> list[float | None]:
    return [None, None] if interval is None else list(interval)
