"""How far a trial list can be solved without its voices: the EER of duration, loudness, sample rate
or file format alone.

The score of a trial is a quantity of its two sides: their difference, or their mean. If targets and
non-targets are alike in it, its EER is near 50 %. Nothing is read here: `speakernet doctor` knows
the quantities from reading every file, an evaluation from the headers and from what it embedded.
"""

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from speakernet.data.levels import SILENT_DB
from speakernet.data.lists import TrialList
from speakernet.data.lookup import FORMATS, LookupTable
from speakernet.evaluation.figures import SpeakerBootstrap
from speakernet.evaluation.metrics import missing_kind
from speakernet.evaluation.results import GroupResult
from speakernet.evaluation.speakers import Speakers
from speakernet.random import numpy_generator
from speakernet.terminal import MAX_NAMED, counted

MAX_EER_PERCENT = 40.0
"""The EER up to which a quantity matters. Independent of the voice and added to it, it lowers a
system's EER from 10 to 9.6 % (if all scores are Gaussian, their d', 0.51 and 2.56, add in squares);
45 % lowers it by 0.1."""
MAX_TRIALS = 100_000
"""Of longer lists, that many random trials are enough for figures of one decimal."""
STREAM = 6102
MEANING = (
    "The EER of quantities other than the voice. Near 50 %, targets and non-targets do not differ "
    f"in them; at {MAX_EER_PERCENT:g} % or below, the list gives answers away."
)
ADVICE = (
    "the list gives answers away: pair targets and non-targets that do not differ in this, or "
    "compare error rates only within this list"
)


def silence_note(trials: TrialList, levels_db: np.ndarray) -> str:
    """A warning about silent recordings, by their levels (recordings,); empty without any."""
    is_silent = levels_db < SILENT_DB
    if not is_silent.any():
        return ""
    names = trials.recordings.take(np.flatnonzero(is_silent)[:MAX_NAMED])
    # A model has the mean of its recordings, which is above 0 if one of them is silent.
    is_spoilt = trials.mean(is_silent.astype(np.float64)) > 0
    num_trials = int(np.count_nonzero(is_spoilt[trials.enrol] | is_spoilt[trials.test]))
    return (
        f"{counted(int(np.count_nonzero(is_silent)), 'recording')} without sound "
        f"({', '.join(names)}) in {counted(num_trials, 'trial')}; leave these trials out"
    )


@dataclass(frozen=True)
class Quantity:
    """Something about every utterance of a list that is not the voice."""

    name: str
    values: np.ndarray
    """(utterances,) float64, NaN if unknown; categories are numbers from 0 on."""
    is_category: bool = False
    category: str = ""
    """The name of category 0, whose share is a quantity of the trial too; empty: only whether the
    sides differ."""


def quantities_of(table: LookupTable, trials: TrialList, levels_db: np.ndarray) -> list[Quantity]:
    """The quantities in the headers, and the levels (recordings,), NaN if unknown; a model has the
    mean of its recordings.
    """
    is_known = table.native_samples > 0
    seconds = np.where(is_known, table.seconds, np.nan)
    rates = np.where(is_known, table.sample_rates, np.nan)
    forms = []
    for name, code in zip(trials.recordings, table.formats.tolist(), strict=True):
        coding = FORMATS[code] if code else ""
        suffix = posixpath.splitext(name)[1].lower()
        forms.append(f"{suffix} {coding}".strip())
    kinds, codes, counts = np.unique(forms, return_inverse=True, return_counts=True)
    by_frequency = np.argsort(-counts, kind="stable")
    ranks = np.argsort(by_frequency)[codes]
    formats = trials.mean(np.where(is_known, ranks, np.nan))
    return [
        # The ratio of two durations matters, not their difference.
        Quantity("duration", trials.mean(np.log(seconds))),
        Quantity("sample rate", trials.mean(np.log(rates))),
        Quantity("format", formats, True, f"{kinds[by_frequency[0]]} files"),
        # Digital silence has no loudness.
        Quantity("loudness", trials.mean(np.where(np.isfinite(levels_db), levels_db, np.nan))),
    ]


def shortcuts(
    trials: TrialList,
    speakers: Speakers,
    quantities: Iterable[Quantity],
    *,
    num_draws: int,
    seed: int,
) -> list[GroupResult]:
    """The EER of each quantity alone, at most 50 %; the note says what is `larger` or `smaller for
    targets`.

    Trials with an unknown side are left out, and so is a quantity that is equal in all trials. Only
    an EER of `MAX_EER_PERCENT` or less has an interval.
    """
    assert trials.labels is not None, "only labelled trials have error rates"
    # Networks use whatever separates the trials, so a quantity besides the voice that does so makes
    # error rates too low. Each is therefore evaluated like the scores of a system of its own.
    chosen = np.arange(len(trials))
    if len(trials) > MAX_TRIALS:
        chosen = numpy_generator(seed, STREAM).permutation(len(trials))[:MAX_TRIALS]
    enrol = trials.enrol[chosen]
    test = trials.test[chosen]
    labels = trials.labels[chosen]
    rows = []
    for quantity in quantities:
        for label, values in _readings(quantity, enrol, test):
            known = np.flatnonzero(np.isfinite(values))
            if missing_kind(labels[known]) or np.ptp(values[known]) == 0:
                continue
            sides = speakers.ids[enrol[known]], speakers.ids[test[known]]
            prepared = SpeakerBootstrap(values[known], labels[known], *sides, {})
            rows.append(_result(label, prepared, num_draws, seed))
    return rows


def _readings(
    quantity: Quantity, enrol: np.ndarray, test: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values (trials,) of each quantity of the trials; NaN if a side is unknown."""
    # A list can give itself away in two ways. Both sides of a target may be alike, because they
    # come from one session: the difference shows that. Or targets were collected in another way
    # than non-targets, from longer files, say: then the value itself tells, whichever side it is
    # measured on.
    left = quantity.values[enrol]
    right = quantity.values[test]
    if not quantity.is_category:
        yield f"difference in {quantity.name}", np.abs(left - right)
        yield quantity.name, (left + right) / 2
        return
    is_known = np.isfinite(left) & np.isfinite(right)
    yield f"difference in {quantity.name}", np.where(is_known, left != right, np.nan)
    if quantity.category:
        counts = (left == 0) * 1.0 + (right == 0)
        yield f"share of {quantity.category}", np.where(is_known, counts, np.nan)


def _result(label: str, prepared: SpeakerBootstrap, num_draws: int, seed: int) -> GroupResult:
    figures = prepared.figures()
    assert figures is not None, "there are trials of both kinds"
    eer = float(figures[0])
    is_larger = eer <= 50
    interval = None
    if min(eer, 100 - eer) <= MAX_EER_PERCENT:
        drawn = prepared.measure(num_draws, seed)
        interval = drawn.eer_interval_percent
        if drawn.num_draws and interval is None:
            # Every draw gives the same, as when a quantity separates all trials.
            interval = eer, eer
    if is_larger:
        return GroupResult(label, eer, interval, "larger for targets")
    # Against the sign, every threshold has the complementary errors.
    if interval is not None:
        interval = 100 - interval[1], 100 - interval[0]
    return GroupResult(label, 100 - eer, interval, "smaller for targets")


def is_notable(row: GroupResult) -> bool:
    """Whether a quantity alone separates targets from non-targets, with other speakers too."""
    interval = row.eer_interval_percent
    eer = row.eer_percent
    return eer is not None and eer <= MAX_EER_PERCENT and interval is not None and interval[1] < 50


def describe(row: GroupResult) -> str:
    """The finding about a notable quantity.

    >>> describe(GroupResult("duration", 20.0, (15.0, 25.0), "larger for targets"))
    'the duration is larger for targets: alone it has an EER of 20.00 % (15.00–25.00)'
    """
    return f"the {row.label} is {row.note}: alone it has an EER of {row.eer_text}"
