"""A deterministic corpus of synthetic speakers, with lists, trials, noises and RIRs.

    speakernet prepare synthetic --speakers 1000 --utterances 20 --save_path data/synthetic_large

Error rates on synthetic speech say nothing about real speech: the corpus is for tests and for
trying the toolkit.

    corpus/
        train/<speaker>/<session>/<utterance>.wav        train_list.txt
        trial/<speaker>/<session>/<utterance>.wav        trials.txt
        validation/<speaker>/<session>/<utterance>.wav   validation.txt
        musan_split/{noise,music,speech}/synthetic/<clip>/00000.wav
        RIRS_NOISES/simulated_rirs/{smallroom,mediumroom,largeroom}/Room001/Room001-00001.wav
        utterances.csv  speakers.csv  parameters.json  complete.json

Every file depends only on the seed and its own place and gets its final name when it is complete,
so the same command finishes an interrupted run. `complete.json` is written last.
"""

import argparse
import concurrent.futures
import contextlib
import json
import logging
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speakernet.files import atomic_write, own_command, reading
from speakernet.machine.facts import usable_cores
from speakernet.terminal import Bar

logger = logging.getLogger(__name__)

# Part of `parameters.json`: raise it with every change that alters the audio.
SYNTHESISER_VERSION = 1
PARAMETERS = "parameters.json"
"""The file of a corpus that holds its `CorpusParameters`."""

MIN_UTTERANCES_FOR_PROCESSES = 200  # fewer are finished before a second process has started
#: Option of the command -> (field of CorpusParameters, its value in a large corpus, help).
NUMBERS = {
    "speakers": ("num_speakers", 1000, "speakers to train on"),
    "utterances": ("utterances_per_speaker", 20, "utterances of each speaker, about 3.5 s long"),
    "trial_speakers": ("num_trial_speakers", 40, "other speakers, for the trials"),
    "trial_utterances": (
        "trial_utterances_per_speaker",
        10,
        "utterances of each trial and validation speaker",
    ),
    "validation_speakers": (
        "num_validation_speakers",
        20,
        "other speakers, for the trials that choose the model",
    ),
    "session_utterances": (
        "utterances_per_session",
        2,
        "utterances that share room and microphone",
    ),
    "noises": ("num_noises", 200, "clips of 5 s for augmentation: noise, music, speech"),
    "rooms": ("num_rooms", 150, "room impulse responses for augmentation"),
    "seed": ("seed", 1, "seed; a different one gives different speakers"),
}


FILES = {
    "train_list": "train_list.txt",
    "train_path": "train",
    "test_list": "trials.txt",
    "test_path": "trial",
    "validation_list": "validation.txt",
    "validation_path": "validation",
    "noise_path": "musan_split",
    "rir_path": "RIRS_NOISES/simulated_rirs",
    "speakers": "speakers.csv",
    "utterances": "utterances.csv",
}
"""The files and folders of a corpus, keyed by the training options that take them."""


@dataclass(frozen=True)
class CorpusParameters:
    """The parameters that determine a corpus; the defaults are the small corpus of exp01.yaml."""

    num_speakers: int = 120
    utterances_per_speaker: int = 12
    num_trial_speakers: int = 40
    trial_utterances_per_speaker: int = 8
    num_validation_speakers: int = 20
    utterances_per_session: int = 2
    num_noises: int = 60
    num_rooms: int = 45
    seed: int = 1
    synthesiser_version: int = SYNTHESISER_VERSION


ARGUMENTS: dict[str, dict[str, Any]] = {
    "--save_path": {
        "type": Path,
        "default": Path("data/synthetic_large"),
        "help": "folder of the corpus",
    },
    **{
        f"--{option}": {"type": int, "default": number, "dest": name, "help": what}
        for option, (name, number, what) in NUMBERS.items()
    },
    "--workers": {"type": int, "help": "processes (default: one per core)"},
}


def run(arguments: argparse.Namespace) -> int:
    """Make the corpus and print the command that trains on it."""
    started = time.perf_counter()
    parameters = CorpusParameters(
        **{name: getattr(arguments, name) for name, _, _ in NUMBERS.values()}
    )
    paths = make_corpus(arguments.save_path, parameters, num_workers=arguments.workers)
    seconds = time.perf_counter() - started
    made = json.loads((paths.train_list.parent / "complete.json").read_text("utf-8"))
    # The option is empty, because exp01.yaml would otherwise make its own small corpus as well.
    command = f"{own_command('train')} --config exp01.yaml --data.synthetic_corpus ''"
    command += " --save_path exps/synthetic"
    for name, path in vars(paths).items():
        if name.endswith(("_list", "_path")):
            command += f" --{name.replace('noise', 'musan')} {shlex.quote(str(path))}"
    sys.stdout.write(
        f"{made['files']} files ({made['seconds'] / 3600:.2f} h of speech) in "
        f"{arguments.save_path}, {seconds:.1f} s\ntrain on it:\n  {command}\n"
    )
    return 0


def make_corpus(
    folder: str | Path,
    parameters: CorpusParameters | None = None,
    *,
    num_workers: int | None = None,
    show_progress: bool = True,
) -> SimpleNamespace:
    """Make or finish the corpus in `folder`; returns immediately if it is complete. The same on
    every machine.

    Args:
        folder: created if missing.
        parameters: numbers of speakers, utterances and so on; None: the small corpus of exp01.yaml.
        num_workers: processes; None: one per core, or none for a small corpus.
        show_progress: show a progress bar.

    Raises:
        ValueError: a number is too small, or the folder has a different corpus or other files.
        OSError: the folder cannot be written or the disk is full; the next call continues from
            there.
    """
    folder = Path(folder)
    parameters = parameters or CorpusParameters()
    # Attributes are named as in `FILES`.
    paths = SimpleNamespace(**{name: folder / below for name, below in FILES.items()})
    if _is_complete(folder, parameters):
        return paths
    # Imported late: every run with a synthetic corpus comes here, but few have to make it.
    from speakernet.corpora.synthetic.scenes import do, tasks, write_lists

    # The random numbers of a task are keyed by its own place, so the corpus is the same for any
    # number of processes and any order in which they finish.
    waiting = list(tasks(paths, parameters))
    num_files = sum(count for count, _ in waiting)
    if num_workers is None:
        num_workers = usable_cores() if num_files >= MIN_UTTERANCES_FOR_PROCESSES else 0
    logger.info("Making the synthetic corpus in %s: %s files", folder, f"{num_files:,}")
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Bar("synthetic corpus", num_files, is_shown=show_progress))
        done: Iterator[list[dict[str, Any]]] = map(do, waiting)
        if num_workers > 1:
            # Spawned, not forked: a forked process with torch's threads can hang.
            context = multiprocessing.get_context("spawn")
            pool = concurrent.futures.ProcessPoolExecutor(
                min(num_workers, len(waiting)), mp_context=context
            )
            done = stack.enter_context(pool).map(do, waiting)
        for (count, _), rows_of_task in zip(waiting, done, strict=True):
            rows += rows_of_task
            bar.update(count)
    write_lists(paths, parameters.seed, rows)
    seconds = round(sum(row["seconds"] for row in rows), 1)
    # Last, because this file marks the corpus as complete.
    with atomic_write(folder / "complete.json") as file:
        json.dump({"files": num_files, "seconds": seconds}, file)
    return paths


def is_synthetic(path: str | Path) -> bool:
    """Whether a list or a folder of audio lies in a synthetic corpus, or is one."""
    place = Path(path).resolve()
    for folder in (place, *place.parents):
        written = folder / PARAMETERS
        if written.is_file():
            # Another program may use the same file name.
            return "synthesiser_version" in written.read_text("utf-8", errors="replace")
    return False


def _is_complete(folder: Path, parameters: CorpusParameters) -> bool:
    """Whether the corpus is complete; writes the parameters to an empty folder, raises ValueError
    for any other.
    """
    # Existing files are kept, so with other parameters the corpus would be a mixture of both.
    requested = asdict(parameters)
    # Target trials need two sessions.
    lowest = {"trial_utterances_per_speaker": max(2, parameters.utterances_per_session + 1)}
    lowest |= dict.fromkeys(("num_trial_speakers", "num_validation_speakers"), 2)
    lowest |= dict.fromkeys(("num_noises", "num_rooms", "seed"), 0)
    for name, value in requested.items():
        if value < lowest.get(name, 1):
            raise ValueError(
                f"synthetic corpus: {name} is {value}; it must be at least {lowest.get(name, 1)}"
            )
    path = folder / PARAMETERS
    if path.exists():
        expected = f"parameters of a synthetic corpus; delete {folder} or give a different folder"
        with reading(path, expected):
            stored = dict(json.loads(path.read_text("utf-8")))
        # Refused rather than made again: deleting thousands of files is the user's decision.
        changed = [
            f"{name} {stored[name]!r} -> {value!r}"
            for name, value in requested.items()
            if stored.get(name, value) != value
        ]
        if changed:
            raise ValueError(
                f"{folder} has a synthetic corpus with different parameters "
                f"({', '.join(changed)}); delete it or give a different folder"
            )
        if stored.keys() >= requested.keys():
            return (folder / "complete.json").exists()
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{folder} exists and is not a synthetic corpus; give an empty or new folder"
        )
    # A corpus of an earlier version lacks parameters that were added since: its rest is made.
    with atomic_write(path) as file:
        json.dump(requested, file, indent=1)
    return False
