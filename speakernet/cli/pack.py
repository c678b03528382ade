"""Pack a corpus into one memory-mapped array, so that reading a crop is one copy and opens no file.

    speakernet pack CORPUS --source FOLDER                        every audio file in a folder
    speakernet pack CORPUS --source FOLDER --list train_list.txt  the files named in a list
    speakernet pack CORPUS --source part_aa part_ab --list LIST   directly from zip and tar archives
    speakernet pack CORPUS --source raw.list --write-list train.txt
                                                 wespeaker's raw.list or shard.list, a Kaldi folder
    speakernet pack CORPUS --source … --part 2/4     one of four parts; the last joins them
    speakernet pack s3://bucket/CORPUS --source …    in shards to object storage (also gs://)
    speakernet pack CORPUS --verify                  read everything and compare every checksum

Afterwards, use the corpus in place of the folder (`--data.train_path CORPUS`). The same command
resumes after a kill. At an address, `--part 2/4` is one of four writers, each of which writes a
quarter of the shards.
"""

import argparse
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from speakernet.cli.shared import output_path
from speakernet.corpora.listing import positive_int
from speakernet.corpora.pack_inputs import open_inputs
from speakernet.data.lists import (
    ListError,
    NameIndex,
    StringTable,
    read_training_list,
    read_trials,
    write_training_list,
)
from speakernet.data.packed import read_index, verify
from speakernet.data.packing import SKIPPED, PackInput, join_parts, pack, pack_part
from speakernet.data.parts import PART_HELP, WHOLE, list_parts, parse_part
from speakernet.files import (
    FileError,
    human_bytes,
    is_address,
    sha256_of,
    temporary_beside,
)
from speakernet.machine.facts import usable_cores
from speakernet.terminal import counted

if TYPE_CHECKING:
    from speakernet.data.shards import RemoteSource

logger = logging.getLogger(__name__)

# A failing disk can damage thousands of utterances; the first few show where.
PROBLEMS_SHOWN = 10


ARGUMENTS = {
    "corpus": {"help": "the packed corpus to make or verify: a folder or an address (s3://…)"},
    "--source": {
        "nargs": "+",
        "metavar": "PATH",
        "help": "a folder, a Kaldi folder, wespeaker's raw.list or shard.list, or zip and tar "
        "archives (all parts)",
    },
    "--list": {
        "action": "append",
        "default": [],
        "help": "training list: pack only the files it names (repeatable)",
    },
    "--trials": {
        "action": "append",
        "default": [],
        "help": "trial list: pack only the files it names (repeatable)",
    },
    "--strip": {
        "type": int,
        "help": "number of leading folders to drop from names in archives (default: found from "
        "the list, if any)",
    },
    "--write-list": {
        "type": output_path,
        "help": "write a training list of what was packed (raw.list, shards, Kaldi folders with "
        "utt2spk)",
    },
    "--sample-rate": {
        "type": positive_int,
        "default": 16000,
        "help": "sample rate of the corpus in Hz (default %(default)s)",
    },
    "--num-threads": {
        "type": positive_int,
        "default": usable_cores(),
        "help": "number of files to decode at once (default: one per core)",
    },
    "--skip-bad": {
        "action": "store_true",
        "help": "leave out files that cannot be read, and report them",
    },
    "--part": {
        "metavar": "I/N",
        "help": f"{PART_HELP}; give every process the same sources and lists; the last to finish "
        "joins the parts",
    },
    "--shards": {
        "type": positive_int,
        "default": 0,
        "help": "shards at an address (default: 1 per 4,096 utterances)",
    },
    "--merge": {"action": "store_true", "help": "join parts in CORPUS that other machines made"},
    "--verify": {"action": "store_true", "help": "compare every utterance with its checksum"},
}


def outputs(arguments: argparse.Namespace) -> dict[Path, bool]:
    """The training list. It has no mark, so only its content shows whether it is ours: see
    `_write_list`.
    """
    return {arguments.write_list: True} if arguments.write_list else {}


# Packing may take hours, so mistakes in the options are refused before the first file is read.
def run(arguments: argparse.Namespace) -> int:
    """Pack, verify, or both."""
    if not arguments.source and not arguments.verify and not arguments.merge:
        raise ValueError(
            "give --source with a folder or archives to pack, or --verify to check a corpus"
        )
    if (arguments.merge and arguments.source) or (arguments.part and not arguments.source):
        raise ValueError("--part needs --source; --merge joins existing parts and takes neither")
    if (arguments.strip or 0) < 0:
        raise ValueError(f"--strip {arguments.strip}; expected at least 0")
    is_remote = is_address(arguments.corpus)
    if (is_remote and arguments.merge) or (arguments.shards and not is_remote):
        raise ValueError(
            "--shards is for a corpus at an address (s3://…), whose last writer joins it; --part "
            "and --merge are for a corpus on disk"
        )
    if arguments.source:
        _pack(arguments)
    if arguments.merge:
        join_parts(arguments.corpus)
    if arguments.verify:
        return _verify(arguments.corpus, arguments.num_threads, arguments.sample_rate)
    return 0


def _pack(arguments: argparse.Namespace) -> None:
    corpus = arguments.corpus
    source = open_inputs(arguments.source, _listed_names(arguments), arguments.strip)
    if arguments.write_list and source.speakers is None:
        raise ValueError(
            f"--write-list: {source.description} has no speaker labels; expected raw.list, shards "
            "or a Kaldi folder with utt2spk. For a plain folder, make lists with `speakernet "
            "prepare folder`"
        )
    # Now rather than after hours of packing, when the list is written.
    if arguments.write_list and not arguments.force:
        _refuse_foreign(arguments.write_list, source)
    part = parse_part(arguments.part) if arguments.part else None
    options = {
        "sample_rate": arguments.sample_rate,
        "num_threads": arguments.num_threads,
        "skip_bad": arguments.skip_bad,
        "show_progress": True,
    }
    missing = ""
    folder = corpus
    # A corpus is written alone, as a part that the last process joins, or as shards in a bucket.
    # Nothing in a bucket can be joined or renamed, so there the description is written last.
    if is_address(corpus):
        # Late: it imports fsspec.
        from speakernet.data.stores import pack_to_address

        folder = f"{corpus}/part-…"
        summary, num_missing = pack_to_address(
            source, corpus, part or WHOLE, arguments.shards, **options
        )
        if num_missing:
            missing = f"{counted(num_missing, 'shard')} from other writers"
    elif part is None:
        summary = pack(source, corpus, **options)
    else:
        folder = f"{corpus}/{part.name}"
        summary, parts = pack_part(source, corpus, part, **options)
        if parts:
            missing = f"parts {list_parts(parts)}"
    hours = summary.num_samples / arguments.sample_rate / 3600
    where = f"{corpus}, part {part}" if part else corpus
    utterances = counted(summary.num_utterances, "utterance")
    amount = f"{utterances}, {hours:.1f} hours, {human_bytes(2 * summary.num_samples)}"
    logger.info("%s: %s; %d of them from an earlier run", where, amount, summary.num_resumed)
    if summary.num_skipped:
        unreadable = counted(summary.num_skipped, "file")
        logger.warning("%s could not be read; %s/%s names them", unreadable, folder, SKIPPED)
    # The list is written by the process that finishes last: before that, the corpus is incomplete.
    if missing:
        logger.info("%s: still missing: %s", corpus, missing)
    elif arguments.write_list:
        if is_address(corpus):
            packed = _open_remote(corpus, arguments.sample_rate).index.names
        else:
            packed = read_index(corpus).names
        _write_list(arguments.write_list, source, packed, is_forced=arguments.force)


def _refuse_foreign(path: Path, source: PackInput) -> None:
    """Refuse before hours of packing to replace a file that is not a list of these utterances."""
    if not path.is_file() or not path.stat().st_size:
        return
    with contextlib.suppress(ListError):
        listed = read_training_list(path).paths
        if (NameIndex(source.names).find(listed) >= 0).all():
            return
    raise _foreign_list(path)


def _foreign_list(path: Path) -> FileError:
    return FileError(
        f"{path} exists, and is not the list of what was packed; choose another name, or replace "
        "it with --force"
    )


def _write_list(
    path: Path, source: PackInput, packed: StringTable, *, is_forced: bool = False
) -> None:
    """Write a training list of the packed utterances with a known speaker; an existing file must be
    the same list.
    """
    assert source.speakers is not None, "checked before packing"
    # Only names that are in the corpus; the skipped ones would fail in training.
    rows = np.flatnonzero(NameIndex(packed).find(source.names) >= 0).tolist()
    speakers = source.speakers
    labelled = [(speakers[row], source.names[row]) for row in rows if speakers[row]]
    # A list is only names and cannot carry a mark that it is ours. So it is written beside the
    # existing file and compared with it.
    temporary = temporary_beside(path)
    try:
        write_training_list(temporary, labelled)
        has_content = path.is_file() and path.stat().st_size > 0
        if has_content and not is_forced and sha256_of(path) != sha256_of(temporary):
            raise _foreign_list(path)
        # The same content is written again, so that an interrupted run ends like a complete one.
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    logger.info("%s: %s", path, counted(len(labelled), "utterance"))
    num_unknown = len(rows) - len(labelled)
    if num_unknown:
        unknown = counted(num_unknown, "utterance")
        logger.warning("%s without a speaker left out of %s", unknown, path)


def _open_remote(corpus: str, sample_rate: int) -> "RemoteSource":
    # Late: it imports fsspec.
    from speakernet.data.shards import RemoteSource

    return RemoteSource(corpus, sample_rate)


def _listed_names(arguments: argparse.Namespace) -> StringTable | None:
    """The unique names in the lists; None without a list."""
    tables = [read_training_list(path).paths for path in arguments.list]
    tables += [read_trials(path).names for path in arguments.trials]
    if not tables:
        return None
    # In list order, so that reading a list from end to end also reads the corpus sequentially.
    return StringTable.from_strings(dict.fromkeys(name for table in tables for name in table))


def _verify(corpus: str, num_threads: int, sample_rate: int) -> int:
    if is_address(corpus):
        cache = _open_remote(corpus, sample_rate).shards
        for shard in range(len(cache.names)):
            # Fetching a shard again checks it.
            cache.path(shard).unlink(missing_ok=True)
            cache.hold(shard)
        logger.info("%s: every checksum matches", corpus)
        return 0
    problems = verify(corpus, num_threads, show_progress=True)
    for problem in problems[:PROBLEMS_SHOWN]:
        logger.error("%s", problem)
    if problems:
        logger.error(
            "%s: %s damaged; copy or pack the corpus again",
            corpus,
            counted(len(problems), "utterance"),
        )
        return 1
    logger.info("%s: every checksum matches", corpus)
    return 0
