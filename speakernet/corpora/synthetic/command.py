"""A deterministic corpus of synthetic speakers, with lists, trials, noises and room responses.

    speakernet prepare synthetic --speakers 1000 --utterances 20 --save_path data/synthetic_large

A run that was stopped goes on where it was. Error rates on synthetic speech say nothing about real speech.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from shlex import quote

from speakernet.corpora.commands import chosen
from speakernet.corpora.synthetic.corpus import CorpusParameters, make_corpus
from speakernet.files import own_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of this part; those that decide the content are named as in `CorpusParameters`."""
    numbers = (
        ("speakers", "num_speakers", 1000, "speakers to train on"),
        ("utterances", "utterances_per_speaker", 20, "utterances of each, about 3.5 s long"),
        ("trial_speakers", "num_trial_speakers", 40, "other speakers, for the trials"),
        ("trial_utterances", "trial_utterances_per_speaker", 10, "utterances of each trial speaker"),
        ("session_utterances", "utterances_per_session", 2, "utterances that share room and microphone"),
        ("noises", "num_noises", 200, "clips of 5 s for augmentation: noise, music, speech"),
        ("rooms", "num_rooms", 150, "room impulse responses for augmentation"),
        ("seed", "seed", 1, "another seed gives other speakers"),
    )
    parser.add_argument("--save_path", type=Path, default=Path("data/synthetic_large"), help="folder of the corpus")
    for option, name, number, what in numbers:
        parser.add_argument(f"--{option}", type=int, default=number, dest=name, help=what)
    parser.add_argument("--workers", type=int, default=None, help="processes; one a core when left out")


def run(arguments: argparse.Namespace) -> int:
    """Make the corpus and say how to train on it."""
    started = time.perf_counter()
    paths = make_corpus(arguments.save_path, chosen(CorpusParameters, arguments), num_workers=arguments.workers)
    seconds = time.perf_counter() - started
    made = json.loads((paths.train_list.parent / "complete.json").read_text(encoding="utf-8"))
    inputs = {
        "train_list": paths.train_list, "train_path": paths.train_path, "test_list": paths.test_list,
        "test_path": paths.test_path, "musan_path": paths.noise_path, "rir_path": paths.rir_path,
    }  # fmt: skip
    options = " ".join(f"--{name} {quote(str(path))}" for name, path in inputs.items())
    sys.stdout.write(
        f"{made['files']} files ({made['seconds'] / 3600:.2f} h of speech) in {arguments.save_path}, {seconds:.1f} s\n"
        f"train on it:\n  {own_command('train')} --config exp01.yaml --data.synthetic_corpus '' "
        f"--save_path exps/synthetic {options}\n"
    )
    return 0
