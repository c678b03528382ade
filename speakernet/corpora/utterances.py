"""The utterances of a corpus as compact arrays (name, speaker, session, gender); splits into
training, validation and test, and trials made from them.

Built from list files, tables or folder walks; no audio is read here. A pair occurs only once, in
one of its orders, and no utterance is paired with itself.
"""

import csv
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from speakernet.data.lists import ListError, StringTable, TrainingList, TrialList, repeated_rows
from speakernet.data.names import composed, normal_name
from speakernet.files import open_text, reading
from speakernet.options import suggestion
from speakernet.random import numpy_generator

logger = logging.getLogger(__name__)

UNKNOWN = -1
NUM_EXAMPLES = 5
"""Number of names given as examples in a message."""
#: Headings that a table may use -> their meaning here.
HEADINGS = {
    "path": "path", "file": "path", "filename": "path", "audio": "path", "wav": "path",
    "speaker": "speaker", "speaker_id": "speaker", "client_id": "speaker", "spk": "speaker",
    "spk_id": "speaker",
    "session": "session", "session_id": "session",
    "gender": "gender", "sex": "gender",
}  # fmt: skip
EXPECTED_HEADINGS = "the headings path,speaker[,session,gender]"

SPLITS = ("train", "validation", "test")
DEFAULT_SHARE = 0.1
MIN_HELD_OUT_SPEAKERS = 2
#: Minimum number of held-out speakers for trials within a gender: two of each.
MIN_FOR_SAME_GENDER = 4
#: With fewer speakers, a separate test set would leave too few to train on.
MIN_SPEAKERS_FOR_TEST = 8
MIN_SPEAKERS_FOR_VALIDATION = 4

BLOCK_ROWS = 1024
# Rounds of drawing before fewer pairs than requested are returned: rules may allow next to none.
MAX_ROUNDS = 50
DEFAULT_TARGETS_PER_SPEAKER = 50
DEFAULT_NONTARGETS_PER_TARGET = 5
#: A speaker with thousands of utterances has millions of pairs; a sample is just as good.
MAX_PAIRED = 200
HELD_OUT_STREAM = 7301
CALIBRATION_STREAM = 7302
CALIBRATION_UTTERANCES = 6
"""Per speaker, for calibration trials: further utterances of one speaker add little."""
CALIBRATION_SPEAKERS = 1000
"""At most this many, and half of a list with as many, calibrate: the others remain for a cohort."""


class Row(NamedTuple):
    """One utterance. Session and gender are empty if unknown."""

    speaker: str
    name: str
    session: str = ""
    gender: str = ""


@dataclass
class Utterances:
    """Utterances in a fixed order."""

    names: StringTable
    labels: np.ndarray
    speakers: StringTable
    sessions: np.ndarray
    genders: np.ndarray

    @classmethod
    def from_list(cls, training: TrainingList) -> "Utterances":
        """The utterances of a training list; sessions and genders stay unknown."""
        sessions = np.full(len(training), UNKNOWN, dtype=np.int32)
        genders = np.full(len(training.speakers), UNKNOWN, dtype=np.int32)
        return cls(training.paths, training.labels, training.speakers, sessions, genders)

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> "Utterances":
        """Collect rows into arrays; a speaker's gender is the first one given."""
        listed = list(rows)
        # Sorted, so that labels are the same on every machine, whatever the order of files on disk.
        speakers, labels = np.unique([row.speaker for row in listed], return_inverse=True)
        numbers: dict[tuple[str, str], int] = {}
        sessions = [
            numbers.setdefault((row.speaker, row.session), len(numbers)) if row.session else UNKNOWN
            for row in listed
        ]
        letters: dict[str, str] = {}
        for row in listed:
            if row.gender:
                letters.setdefault(row.speaker, row.gender.strip().lower()[:1])
        kinds = list(dict.fromkeys(letters.values()))
        genders = [
            kinds.index(letters[one]) if one in letters else UNKNOWN for one in speakers.tolist()
        ]
        return cls(
            names=StringTable.from_strings(row.name for row in listed),
            labels=labels.astype(np.int32),
            speakers=StringTable.from_strings(speakers.tolist()),
            sessions=np.array(sessions, dtype=np.int32),
            genders=np.array(genders, dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def counts(self) -> np.ndarray:
        """Utterances of each speaker, int64 (speakers,)."""
        return np.bincount(self.labels, minlength=len(self.speakers))

    def pairs(self, rows: np.ndarray | None = None) -> Iterator[tuple[str, str]]:
        """(speaker, name) of the rows (None: all), ready for `write_training_list`."""
        for row in range(len(self)) if rows is None else rows.tolist():
            yield self.speakers[int(self.labels[row])], self.names[row]

    def take(self, rows: np.ndarray) -> "Utterances":
        """Only these rows, without speakers that have none of them."""
        speakers, new_labels = np.unique(self.labels[rows], return_inverse=True)
        return Utterances(
            names=self.names.take(rows),
            labels=new_labels.astype(np.int32),
            speakers=self.speakers.take(speakers),
            sessions=self.sessions[rows],
            genders=self.genders[speakers],
        )


def read_table(path: str | Path, session: str = "") -> Iterator[Row]:
    """Rows of a CSV or TSV table with headings `path,speaker[,session,gender]` (in any order;
    others are ignored).

    `session` names a different column to use as the session; no row may leave it empty.
    """
    path = Path(path)
    with (
        reading(path, f"a table in UTF-8 with {EXPECTED_HEADINGS}", ListError),
        open_text(path) as file,
    ):
        first = file.readline()
        file.seek(0)
        reader = csv.DictReader(file, delimiter="\t" if "\t" in first else ",")
        headings = reader.fieldnames or ["nothing"]
        meanings = [(HEADINGS.get(heading.strip().lower()), heading) for heading in headings]
        # If two headings have the same meaning, the first counts.
        columns = {meaning: heading for meaning, heading in reversed(meanings) if meaning}
        if session:
            found = [heading for heading in headings if heading.strip().lower() == session.lower()]
            if not found:
                near = suggestion(session, headings)
                raise ListError(
                    f"{path}, line 1: there is no column {session!r}; the columns are "
                    f"{', '.join(headings)} ({near})"
                )
            columns["session"] = found[0]
        if missing := {"path", "speaker"} - set(columns):
            near = suggestion(min(missing), headings)
            raise ListError(
                f"{path}, line 1: there is no column {min(missing)!r}; the columns are "
                f"{', '.join(headings)} ({near}); expected {EXPECTED_HEADINGS}"
            )
        for row in reader:
            values = {meaning: (row[heading] or "").strip() for meaning, heading in columns.items()}
            if not values["path"] or not values["speaker"]:
                raise ListError(
                    f"{path}, line {reader.line_num}: no path or no speaker in this row"
                )
            if session and not values["session"]:
                raise ListError(f"{path}, line {reader.line_num}: no {session} in this row")
            yield Row(
                values["speaker"],
                values["path"],
                values.get("session", ""),
                values.get("gender", ""),
            )


def distinct_rows(rows: Iterable[Row], source: str | Path) -> list[Row]:
    """The first row of every path: a table may have a row for each label, take or annotator.

    Raises:
        ListError: a path has two speakers.
    """
    first: dict[str, Row] = {}
    for row in rows:
        known = first.setdefault(normal_name(row.name), row)
        if composed(known.speaker) != composed(row.speaker):
            raise ListError(
                f"{source}: {row.name!r} is listed under two speakers, {known.speaker!r} and "
                f"{row.speaker!r}; keep one"
            )
    return list(first.values())


def pattern_rule(pattern: str) -> "re.Pattern[str]":
    """A regular expression over relative paths with the group `speaker` and, optionally, `session`
    and `gender`.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"the pattern {pattern!r} is not a regular expression ({error}); correct it"
        ) from error
    if "speaker" not in compiled.groupindex:
        raise ValueError(
            f"the pattern {pattern!r} has no group named speaker; write (?P<speaker>...) for the "
            "speaker's name, as in (?P<speaker>[^/]+)/(?P<session>[^/]+)/.*"
        )
    return compiled


def row_by_pattern(rule: "re.Pattern[str]", name: str) -> Row | None:
    """The row of a path by `pattern_rule`, or None if the pattern does not match."""
    match = rule.search(name)
    groups = match.groupdict(default="") if match else {"speaker": ""}
    speaker = groups["speaker"]
    return (
        Row(speaker, name, groups.get("session", ""), groups.get("gender", "")) if speaker else None
    )


def row_by_folder(name: str, depth: int = 0) -> Row | None:
    """The row of `speaker/utterance` or `speaker/session/…/utterance` below `depth` folders; None
    if not that deep.

    >>> row_by_folder("anna/monday/1.wav")
    Row(speaker='anna', name='anna/monday/1.wav', session='monday', gender='')
    """
    folders = name.split("/")
    if len(folders) < depth + 2:
        return None
    return Row(folders[depth], name, "/".join(folders[depth + 1 : -1]))


def row_by_speaker_folder(speaker: str, name: str) -> Row:
    """The row of a training list; its session is the folders between the speaker's folder and the
    file.

    >>> row_by_speaker_folder("anna", "wav/anna/monday/1.wav")
    Row(speaker='anna', name='wav/anna/monday/1.wav', session='monday', gender='')
    """
    folders = name.split("/")[:-1]
    return Row(
        speaker, name, "/".join(folders[folders.index(speaker) + 1 :]) if speaker in folders else ""
    )


class Split(NamedTuple):
    """Rows of the training, validation and test utterances, int64, ascending; `test` may be
    empty.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def split_speakers(
    utterances: Utterances,
    seed: int,
    validation_share: float = DEFAULT_SHARE,
    test_share: float = DEFAULT_SHARE,
    min_held_out: int = MIN_HELD_OUT_SPEAKERS,
) -> Split:
    """Speaker-disjoint split with evenly spread genders, determined by the speakers and the seed.

    Speakers with a single utterance cannot give target trials and stay in training. With fewer than
    eight speakers there is no test split; with fewer than four, validation uses held-out utterances
    of the training speakers. `min_held_out` is the minimum number of speakers in a held-out split:
    trials within a gender need two of each.
    """
    num_speakers = len(utterances.speakers)
    if num_speakers < 2:
        raise ValueError(
            f"only {num_speakers} speaker has usable recordings; training needs at least two"
        )
    if validation_share < 0 or test_share < 0 or validation_share + test_share >= 1:
        raise ValueError(
            f"--validation_share {validation_share:g} and --test_share {test_share:g} leave no "
            "speakers for training; expected shares from 0 that add up to less than 1"
        )
    usable = np.flatnonzero(utterances.counts() >= 2)
    if num_speakers < MIN_SPEAKERS_FOR_VALIDATION or len(usable) < MIN_HELD_OUT_SPEAKERS:
        return _split_utterances(utterances, seed)
    order = _interleaved(usable, utterances.genders[usable], seed)

    def held_out(share: float, available: int) -> int:
        return (
            0
            if share == 0
            else min(max(min_held_out, round(num_speakers * share)), max(0, available))
        )

    if num_speakers < MIN_SPEAKERS_FOR_TEST and test_share > 0:
        logger.warning(
            "too few speakers (%d) for a test split; the validation trials are used instead",
            num_speakers,
        )
        test_share = 0
    num_validation = held_out(validation_share, len(order))
    num_test = held_out(test_share, len(order) - num_validation)
    split = np.zeros(num_speakers, dtype=np.int8)
    split[order[:num_validation]] = 1
    split[order[num_validation : num_validation + num_test]] = 2
    if (num_train := int((split == 0).sum())) < 2:
        raise ValueError(
            f"{num_speakers} speakers leave {num_train} for training; lower --validation_share or "
            "--test_share"
        )
    of_row = split[utterances.labels]
    return Split(*(np.flatnonzero(of_row == number) for number in range(3)))


def split_as_published(utterances: Utterances, split_of: Callable[[str], str]) -> Split | None:
    """The published splits; None (so that a split is drawn) if only one of them is on disk."""
    of_row = np.array([SPLITS.index(split_of(name)) for name in utterances.names])
    rows = [np.flatnonzero(of_row == number) for number in range(len(SPLITS))]
    if not len(rows[0]) or not (len(rows[1]) or len(rows[2])):
        logger.warning("only one of the corpus's splits is on disk: the speakers are split again")
        return None
    if not len(rows[1]):
        # Without a validation split, the test split chooses the best checkpoint, and the report
        # says so.
        rows[1], rows[2] = rows[2], rows[1]
    shared = np.intersect1d(utterances.labels[rows[0]], utterances.labels[np.concatenate(rows[1:])])
    if len(shared):
        names = ", ".join(utterances.speakers[label] for label in shared[:NUM_EXAMPLES].tolist())
        raise ValueError(
            f"{len(shared)} speakers are in both the training and a held-out split (first: "
            f"{names}), so error rates say nothing about new speakers. Check that the corpus is "
            "complete; for your own folders, --layout pooled splits the speakers again"
        )
    return Split(*rows)


def _interleaved(speakers: np.ndarray, genders: np.ndarray, seed: int) -> np.ndarray:
    """Shuffle the speakers so that every stretch has the overall proportion of genders."""
    shuffled = numpy_generator(seed).permutation(len(speakers))
    speakers = speakers[shuffled]
    genders = genders[shuffled]
    position = np.empty(len(speakers))
    for gender in np.unique(genders):
        members = np.flatnonzero(genders == gender)
        # The k-th of n members is placed at (k + 1/2) / n of the way.
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    return speakers[np.argsort(position, kind="stable")]


def _split_utterances(utterances: Utterances, seed: int) -> Split:
    """A third of each speaker's utterances, at least two, for validation; whole sessions first if
    known.
    """
    logger.warning(
        "too few speakers (%d) for speaker-disjoint validation: utterances of the training "
        "speakers are held out, so the error rate is optimistic for new speakers",
        len(utterances.speakers),
    )
    held = []
    for speaker in range(len(utterances.speakers)):
        rows = np.flatnonzero(utterances.labels == speaker)
        # Two are held out, for a target trial, and two are left to train on.
        if len(rows) < 4:
            continue
        # One draw per speaker, so that another speaker's new recording changes nothing here.
        order = numpy_generator(seed, speaker).permutation(rows)
        sessions = utterances.sessions[order]
        if (sessions != UNKNOWN).all() and len(np.unique(sessions)) > 1:
            order = order[np.argsort(sessions, kind="stable")]
        held.append(order[: max(2, len(order) // 3)])
    if len(held) < 2:
        raise ValueError(
            f"too few recordings for validation: {len(held)} of {len(utterances.speakers)} "
            "speakers have four or more utterances; at least two speakers need them"
        )
    validation = np.sort(np.concatenate(held))
    return Split(
        np.setdiff1d(np.arange(len(utterances)), validation),
        validation,
        np.empty(0, dtype=np.int64),
    )


@dataclass(frozen=True)
class PairRules:
    """Which pairs are allowed."""

    other_session: bool = True
    same_gender: bool = False


@dataclass(frozen=True)
class Pairs:
    """Trials as rows of the utterances: enrol, test int64 (trials,) and labels int8 (trials,), 1
    for targets.
    """

    enrol: np.ndarray
    test: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, utterances: Utterances, enrol: np.ndarray, test: np.ndarray) -> "Pairs":
        labels = (utterances.labels[enrol] == utterances.labels[test]).astype(np.int8)
        return cls(enrol.astype(np.int64), test.astype(np.int64), labels)

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, utterances: Utterances) -> Iterator[tuple[int, str, str]]:
        """(label, enrol, test) with names, ready for `write_trials`."""
        for label, enrol, test in zip(
            self.labels.tolist(), self.enrol.tolist(), self.test.tolist(), strict=True
        ):
            yield label, utterances.names[enrol], utterances.names[test]


def allowed(
    utterances: Utterances, enrol: np.ndarray, test: np.ndarray, rules: PairRules
) -> np.ndarray:
    """Which pairs the rules allow, bool with the shape of the pairs."""
    left = utterances.labels[enrol]
    right = utterances.labels[test]
    is_target = left == right
    keep = enrol != test
    if rules.other_session:
        first = utterances.sessions[enrol]
        second = utterances.sessions[test]
        keep &= ~(is_target & (first == second) & (first != UNKNOWN))
    if rules.same_gender:
        first = utterances.genders[left]
        second = utterances.genders[right]
        keep &= is_target | (first == second) | (first == UNKNOWN) | (second == UNKNOWN)
    return keep


def all_pairs(utterances: Utterances, rows: np.ndarray, rules: PairRules) -> Pairs:
    """Every allowed pair among the rows, in order; n (n - 1) / 2 pairs without rules."""
    enrol = [rows[:0]]
    test = [rows[:0]]
    for start in range(0, len(rows), BLOCK_ROWS):
        # In blocks: all pairs of 100,000 utterances at once would take 10 GB per mask.
        left = np.arange(start, min(start + BLOCK_ROWS, len(rows)))[:, None]
        right = np.arange(len(rows))[None, :]
        found = np.nonzero((left < right) & allowed(utterances, rows[left], rows[right], rules))
        enrol.append(rows[start + found[0]])
        test.append(rows[found[1]])
    return Pairs.of(utterances, np.concatenate(enrol), np.concatenate(test))


def random_pairs(
    utterances: Utterances, rows: np.ndarray, num_trials: int, rules: PairRules, seed: int
) -> Pairs:
    """`num_trials` distinct pairs, drawn uniformly from all allowed ones; fewer if there are not
    that many.
    """
    random = numpy_generator(seed)
    # If a large share of all pairs is wanted, repeated draws would find little that is new.
    if num_trials * 4 >= len(rows) * (len(rows) - 1) // 2:
        every = all_pairs(utterances, rows, rules)
        chosen = np.sort(random.permutation(len(every))[:num_trials])
        return Pairs(every.enrol[chosen], every.test[chosen], every.labels[chosen])
    codes = np.empty(0, dtype=np.int64)
    for _ in range(MAX_ROUNDS):
        first, second = random.integers(0, len(rows), size=(2, 2 * num_trials))
        low = np.minimum(first, second)
        high = np.maximum(first, second)
        keep = allowed(utterances, rows[low], rows[high], rules)
        codes = np.concatenate([codes, low[keep] * len(rows) + high[keep]])
        codes = codes[np.sort(np.unique(codes, return_index=True)[1])]
        if len(codes) >= num_trials:
            break
    low, high = np.divmod(codes[:num_trials], len(rows))
    return Pairs.of(utterances, rows[low], rows[high])


def balanced_pairs(
    utterances: Utterances,
    rows: np.ndarray,
    rules: PairRules,
    seed: int,
    targets_per_speaker: int = DEFAULT_TARGETS_PER_SPEAKER,
    nontargets_per_target: int = DEFAULT_NONTARGETS_PER_TARGET,
) -> Pairs:
    """The same number of trials for every speaker, as far as the utterances allow.

    Each speaker gives up to `targets_per_speaker` target pairs and, for each of these,
    `nontargets_per_target` pairs with an utterance of another speaker, drawn uniformly.
    """
    labels = utterances.labels[rows]
    speakers = np.unique(labels)
    members = {int(speaker): rows[labels == speaker] for speaker in speakers}
    enrol = []
    test = []
    seen: set[tuple[int, int]] = set()
    for speaker in speakers.tolist():
        own = members[speaker]
        # One generator per speaker, so that another speaker does not change these draws.
        random = numpy_generator(seed, speaker)
        paired = np.sort(random.permutation(own)[:MAX_PAIRED]) if len(own) > MAX_PAIRED else own
        low, high = np.triu_indices(len(paired), k=1)
        keep = np.flatnonzero(allowed(utterances, paired[low], paired[high], rules))
        keep = keep[np.sort(random.permutation(len(keep))[:targets_per_speaker])]
        others = speakers[speakers != speaker]
        if rules.same_gender and utterances.genders[speaker] != UNKNOWN:
            kinds = utterances.genders[others]
            others = others[(kinds == utterances.genders[speaker]) | (kinds == UNKNOWN)]
        # A speaker without a target pair (one session, one utterance) still gives non-targets.
        wanted = max(1, len(keep)) * nontargets_per_target
        nontargets = _nontarget_pairs(own, others, members, wanted, random, seen)
        enrol += [paired[low[keep]], nontargets[:, 0]]
        test += [paired[high[keep]], nontargets[:, 1]]
    return Pairs.of(utterances, np.concatenate(enrol), np.concatenate(test))


def calibration_pairs(
    utterances: Utterances,
    seconds: np.ndarray,
    wanted: np.ndarray,
    rules: PairRules,
    seed: int,
    nontargets_per_target: int = DEFAULT_NONTARGETS_PER_TARGET,
) -> tuple[Utterances, Pairs]:
    """Balanced pairs among a few utterances of each speaker, with durations drawn like the wanted
    ones.

    A speaker's utterances come from as many sessions as possible; those of a single session are
    paired within it. Of many speakers, only `CALIBRATION_SPEAKERS` are used, since score
    normalisation needs a cohort of other speakers.

    Args:
        utterances: for example those of a training list.
        seconds: (utterances,) their durations.
        wanted: any number of durations of recordings in use.
        rules: which pairs are allowed.
        seed: seed of every draw.
        nontargets_per_target: see `balanced_pairs`.

    Returns:
        The chosen utterances, and pairs of their rows.
    """
    chosen = []
    logs = np.log(np.maximum(seconds, 1e-3))
    speakers = np.arange(len(utterances.speakers))
    if len(speakers) >= CALIBRATION_SPEAKERS:
        most = min(CALIBRATION_SPEAKERS, len(speakers) // 2)
        speakers = np.sort(numpy_generator(seed, CALIBRATION_STREAM).permutation(speakers)[:most])
    for speaker in speakers.tolist():
        own = np.flatnonzero(utterances.labels == speaker)
        random = numpy_generator(seed, CALIBRATION_STREAM, speaker)
        sessions = utterances.sessions[own]
        times_used = np.zeros(len(own))
        for one in np.log(random.choice(wanted, min(CALIBRATION_UTTERANCES, len(own)))):
            # The utterance with the nearest duration, from the least used sessions.
            row = np.lexsort((np.abs(logs[own] - one), times_used))[0]
            times_used[sessions == sessions[row]] += 1
            times_used[row] = np.inf
            chosen.append(own[row])
    found = utterances.take(np.sort(chosen))
    for speaker in range(len(found.speakers)):
        own = np.flatnonzero(found.labels == speaker)
        if len(np.unique(found.sessions[own])) == 1:
            found.sessions[own] = UNKNOWN
    rows = np.arange(len(found))
    return found, balanced_pairs(
        found, rows, rules, seed, nontargets_per_target=nontargets_per_target
    )


def hard_pairs(
    utterances: Utterances,
    rows: np.ndarray,
    embeddings: np.ndarray,
    rules: PairRules,
    nearest: int,
    seed: int,
) -> Pairs:
    """The `nearest` most similar utterances of other speakers for every utterance, and the balanced
    targets.

    `embeddings` has one of any norm for each of `rows`, float (rows, dim); the seed is for the
    targets.
    """
    # In float32 the scores take half the memory; ranking neighbours does not need more digits.
    unit = (
        embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
    ).astype(np.float32)
    codes = []
    nearest = min(nearest, len(rows) - 1)
    for start in range(0, len(rows), BLOCK_ROWS):
        left = np.arange(start, min(start + BLOCK_ROWS, len(rows)))
        scores = unit[left] @ unit.T
        enrol, test = np.broadcast_arrays(rows[left][:, None], rows[None, :])
        keep = allowed(utterances, enrol, test, rules) & (
            utterances.labels[enrol] != utterances.labels[test]
        )
        scores[~keep] = -np.inf
        best = np.argpartition(-scores, nearest - 1, axis=1)[:, :nearest]
        is_real = np.isfinite(np.take_along_axis(scores, best, axis=1))
        low = np.minimum(left[:, None], best)[is_real]
        high = np.maximum(left[:, None], best)[is_real]
        codes.append(low * len(rows) + high)
    low, high = np.divmod(np.unique(np.concatenate(codes)), len(rows))
    balanced = balanced_pairs(utterances, rows, rules, seed)
    is_target = balanced.labels == 1
    enrol = np.concatenate([balanced.enrol[is_target], rows[low]])
    test = np.concatenate([balanced.test[is_target], rows[high]])
    return Pairs.of(utterances, enrol, test)


def _nontarget_pairs(
    own: np.ndarray,
    others: np.ndarray,
    members: dict[int, np.ndarray],
    wanted: int,
    random: np.random.Generator,
    seen: set[tuple[int, int]],
) -> np.ndarray:
    """Up to `wanted` new pairs of own utterances with those of other speakers, int64 (pairs, 2);
    updates `seen`.
    """
    pairs: list[tuple[int, int]] = []
    for _ in range(MAX_ROUNDS if len(others) else 0):
        for left in random.choice(own, size=wanted).tolist():
            candidates = members[int(others[random.integers(len(others))])]
            right = int(candidates[random.integers(len(candidates))])
            pair = (min(left, right), max(left, right))
            # Two speakers may draw the same pair, each from its own side.
            if pair not in seen:
                seen.add(pair)
                pairs.append((left, right))
            if len(pairs) == wanted:
                return np.array(pairs, dtype=np.int64)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


class HeldOut(NamedTuple):
    """A training list without the held-out speakers, and trials among the held-out speakers."""

    training: TrainingList
    trials: TrialList


def hold_out(
    training: TrainingList,
    num_speakers: int,
    seed: int,
    nontargets_per_target: int = DEFAULT_NONTARGETS_PER_TARGET,
) -> HeldOut:
    """Hold out `num_speakers` speakers, drawn from those with at least two utterances, and pair
    their utterances.

    Every held-out speaker gives up to 50 target trials and several non-target trials for each of
    these. The same list, number and seed give the same speakers and trials. Sessions are unknown
    here: if speakers have several, use `prepare folder` for a better split.
    """
    utterances = Utterances.from_list(training)
    counts = utterances.counts()
    usable = np.flatnonzero(counts >= 2)
    # Trials need two speakers, and so does training.
    most = min(len(usable), len(counts) - 2)
    if not 2 <= num_speakers <= most:
        raise ListError(
            f"--speakers {num_speakers}: {training.source} has {len(counts):,} speakers, "
            f"{len(usable):,} of them with at least two utterances; expected 2 to {max(most, 0)}"
        )
    chosen = numpy_generator(seed, HELD_OUT_STREAM).permutation(usable)[:num_speakers]
    is_held_out = np.isin(training.labels, chosen)
    left = utterances.take(np.flatnonzero(~is_held_out))
    rows = np.flatnonzero(is_held_out)
    # A recording that is listed twice must not be paired with itself.
    rows = np.delete(rows, repeated_rows(training.paths.take(rows)))
    rest = TrainingList(left.names, left.labels, left.speakers, training.source, training.sha256)
    pairs = balanced_pairs(
        utterances, rows, PairRules(), seed, nontargets_per_target=nontargets_per_target
    )
    used, numbers = np.unique(np.concatenate([pairs.enrol, pairs.test]), return_inverse=True)
    enrol = numbers[: len(pairs)].astype(np.int32)
    test = numbers[len(pairs) :].astype(np.int32)
    names = training.paths.take(used)
    digest = hashlib.sha256()
    for array in (names.content, names.offsets, enrol, test, pairs.labels):
        digest.update(array.tobytes())
    source = f"{training.source}: {num_speakers} held-out speakers"
    return HeldOut(rest, TrialList(names, enrol, test, pairs.labels, source, digest.hexdigest()))
