"""LibriSpeech, VCTK and Common Voice: from their published folder layouts to rows with speaker, session and gender.

Each reader walks one corpus and yields rows; the part (train, validation, test) is the corpus's own where it publishes
one, else a speaker-disjoint split is drawn. Paths are relative to the folder that holds the corpus.
"""

import csv
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.corpora.listing import ListFiles, listable_rows, usable_utterances, write_lists
from speakernet.corpora.pairing import PairRules
from speakernet.corpora.splits import MIN_FOR_SAME_GENDER, MIN_HELD_OUT_SPEAKERS, Split, split_speakers
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import Row, Utterances
from speakernet.corpora.walking import walk_files

logger = logging.getLogger(__name__)

VALIDATION_PARTS = ("dev",)
TEST_PARTS = ("test",)
#: Common Voice names speakers by 128 hexadecimal digits; this many tell a million of them apart.
CLIENT_ID_LENGTH = 24


@dataclass(frozen=True)
class CorpusOptions:
    """What the scripts of the public corpora have in common."""

    root: Path
    save_path: Path
    num_jobs: int = 1
    seed: int = 10
    min_seconds: float = 0.5
    validation_share: float = 0.1
    test_share: float = 0.1
    targets_per_speaker: int = 50
    same_gender: bool = False
    min_utterances: int = 1


def prepare_corpus(
    rows: Iterator[Row], options: CorpusOptions, part_of: Callable[[str], str] | None = None
) -> tuple[ListFiles, StepSummary]:
    """Scan the headers, split, and write lists and trials.

    Args:
        rows: utterances, paths relative to `options.root`.
        options: where and how.
        part_of: `train`, `validation` or `test` of a path, where the corpus publishes parts; None draws a split.
    """
    with StepSummary("scan", options.save_path) as summary:
        listed = list(rows)
        kept = listable_rows(listed, (row.name for row in listed), summary)
        utterances, lookup = usable_utterances(kept, options.root, options.min_seconds, options.num_jobs, summary)
    split = _published_split(utterances, part_of) if part_of else None
    if split is None:
        fewest = MIN_FOR_SAME_GENDER if options.same_gender else MIN_HELD_OUT_SPEAKERS
        split = split_speakers(utterances, options.seed, options.validation_share, options.test_share, fewest)
    split = _with_enough_utterances(utterances, split, options.min_utterances)
    lists = write_lists(
        options.save_path,
        utterances,
        split,
        seed=options.seed,
        rules=PairRules(same_gender=options.same_gender),
        median_seconds=float(np.median(lookup.seconds)),
        targets_per_speaker=options.targets_per_speaker,
    )
    return lists, summary


def librispeech_rows(root: Path) -> Iterator[Row]:
    """LibriSpeech/PART/SPEAKER/CHAPTER/*.flac; a chapter is a session, genders come from SPEAKERS.TXT.

    Raises:
        ValueError: there is no folder LibriSpeech.
    """
    corpus = _corpus_folder(root, "LibriSpeech", "--download fetches it")
    genders = {}
    facts = corpus / "SPEAKERS.TXT"
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            fields = [field.strip() for field in line.split("|")]
            if len(fields) > 2 and not line.startswith(";"):
                genders[fields[0]] = fields[1]
    for name in walk_files(corpus, {".flac", ".wav"}):
        parts = name.split("/")
        if len(parts) == 4:
            yield Row(parts[1], f"LibriSpeech/{name}", parts[2], genders.get(parts[1], ""))


def librispeech_part(name: str) -> str:
    """The part that LibriSpeech publishes a path in."""
    part = name.split("/")[1]
    if part.startswith(VALIDATION_PARTS):
        return "validation"
    return "test" if part.startswith(TEST_PARTS) else "train"


def vctk_rows(root: Path, microphone: str = "mic1") -> Iterator[Row]:
    """VCTK 0.92: wav48_silence_trimmed/SPEAKER/SPEAKER_TEXT_MIC.flac of one microphone, genders from speaker-info.txt.

    Raises:
        ValueError: there is no such folder.
    """
    found = [path for path in (root, root / "VCTK-Corpus-0.92") if (path / "wav48_silence_trimmed").is_dir()]
    if not found:
        raise ValueError(f"{root} holds no folder wav48_silence_trimmed (VCTK 0.92); --download fetches it")
    corpus = found[0]
    prefix = "" if corpus == root else f"{corpus.name}/"
    genders = {}
    facts = corpus / "speaker-info.txt"
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 2:
                genders[fields[0]] = fields[2]
    for name in walk_files(corpus / "wav48_silence_trimmed", {".flac", ".wav"}):
        speaker = name.split("/")[0]
        # p280 and p315 have a first microphone only; s5 none of the second.
        if "/" in name and name.rsplit(".", 1)[0].endswith(f"_{microphone}"):
            yield Row(speaker, f"{prefix}wav48_silence_trimmed/{name}", "", genders.get(speaker, ""))


def common_voice_rows(root: Path, table: str = "validated.tsv") -> Iterator[Row]:
    """One language of Common Voice: clips/*.mp3, speakers by client_id from `validated.tsv` (or another table).

    Raises:
        ValueError: there is no such table, or two speakers share the first digits of their identity.
    """
    path = root / table
    if not path.is_file() or not (root / "clips").is_dir():
        raise ValueError(
            f"{root} holds no {table} beside a folder clips; give the folder of one language, as cv-corpus-21.0/en "
            "(Common Voice is handed out on request at https://commonvoice.mozilla.org/datasets)"
        )
    identities: dict[str, str] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            identity = row["client_id"]
            speaker = identity[:CLIENT_ID_LENGTH]
            if identities.setdefault(speaker, identity) != identity:
                raise ValueError(f"{path}: two speakers begin with {speaker}; they cannot be told apart")
            yield Row(speaker, f"clips/{row['path']}", "", (row.get("gender") or "").replace("_masculine", ""))


def at_least(rows: Iterator[Row], min_utterances: int) -> Iterator[Row]:
    """The rows of speakers that have at least so many."""
    listed = list(rows)
    counts: dict[str, int] = {}
    for row in listed:
        counts[row.speaker] = counts.get(row.speaker, 0) + 1
    return (row for row in listed if counts[row.speaker] >= min_utterances)


def _published_split(utterances: Utterances, part_of: Callable[[str], str]) -> Split | None:
    """The corpus's own parts; None (so that a split is drawn) where only one of them is on disk."""
    parts = np.array([("train", "validation", "test").index(part_of(name)) for name in utterances.names])
    rows = [np.flatnonzero(parts == part) for part in range(3)]
    if not len(rows[0]) or not (len(rows[1]) or len(rows[2])):
        logger.warning("only one of the published parts is here: the speakers are split anew")
        return None
    if not len(rows[1]):
        rows[1], rows[2] = rows[2], rows[1]
    train = set(utterances.labels[rows[0]].tolist())
    shared = train & set(utterances.labels[np.concatenate(rows[1:])].tolist())
    if shared:
        names: Sequence[str] = [utterances.speakers[label] for label in sorted(shared)[:5]]
        raise ValueError(
            f"speakers stand in the training and in another part: {', '.join(names)}; is the corpus whole?"
        )
    return Split(rows[0], rows[1], rows[2], is_speaker_disjoint=True)


def _with_enough_utterances(utterances: Utterances, split: Split, min_utterances: int) -> Split:
    counts = utterances.counts()
    keep = counts[utterances.labels[split.train]] >= min_utterances
    if not keep.all():
        logger.info("%d training utterances of speakers with fewer than %d are left out", (~keep).sum(), min_utterances)
    return Split(split.train[keep], split.validation, split.test, split.is_speaker_disjoint)


def _corpus_folder(root: Path, name: str, advice: str) -> Path:
    folder = root / name
    if not folder.is_dir():
        raise ValueError(f"{root} holds no folder {name}; give the folder that holds it, or {advice}")
    return folder
