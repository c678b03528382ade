"""Embed recordings into one file: names, embeddings and the fingerprint of the model, as plain NumPy arrays.

    speakernet embed a.wav b.flac --model best.pt --out e.npz
    speakernet embed my_voices/ --model best.pt --out e.npz
    find . -name '*.wav' | speakernet embed - --model best.pt --out e.npz

Folders are walked; lists hold a file a line (or `speaker path`); a packed corpus is embedded as it is. A run that was
killed goes on with the same command. Under torchrun or srun each process embeds a part.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from speakernet.cli import add_model, load_verifier
from speakernet.files import WHOLE, WorkPart, add_part_argument, list_parts, parse_part
from speakernet.parallel.distributed import Place, find_place
from speakernet.terminal import counted

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What, with which model, where to."""
    parser.add_argument("audio", nargs="+", help="files, folders, lists (.txt), a packed corpus, - for names on stdin")
    add_model(parser)
    parser.add_argument("--out", type=Path, required=True, help="the file to write, such as e.npz")
    add_part_argument(parser, "give all the same recordings, model and --out; the last to be done writes the file")
    parser.add_argument("--skip-broken", action="store_true", help="leave out recordings that cannot be embedded")


def run(arguments: argparse.Namespace) -> int:
    """Embed, write, say how many; status 1 if recordings were left out.

    Raises:
        ValueError: audio or a model that cannot be used.
    """
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.embedding_files import embed_files
    from speakernet.inference.recordings import audio_inputs

    place = find_place(os.environ, 0)
    part = _own_part(arguments.part, place)
    verifier = load_verifier(arguments, place.local_rank if place else None)
    inputs = audio_inputs(arguments.audio, verifier.sample_rate, sys.stdin)
    done = embed_files(verifier, inputs, arguments.out, skips_broken=arguments.skip_broken, part=part)
    for problem in done.problems:
        logger.warning("left out: %s", problem)
    if done.missing:
        sys.stdout.write(f"{arguments.out}: part {part} is done; the parts {list_parts(done.missing)} are missing\n")
        return 0
    again = f", {done.num_kept} of them by an earlier run" if done.num_kept else ""
    left = f"; {len(done.problems)} left out" if done.problems else ""
    embeddings = counted(done.num_embedded, "embedding")
    sys.stdout.write(
        f"{arguments.out}: {embeddings} of {verifier.embedding_dim} numbers{again}{left}\n"
    )
    return 1 if done.problems else 0


def _own_part(asked: str | None, place: Place | None) -> WorkPart:
    """What `--part` says; of several processes each does the part of its own number, and they need not meet.

    Raises:
        ValueError: not a part, or one for all of several processes.
    """
    if place is None:
        return parse_part(asked) if asked else WHOLE
    if asked:
        raise ValueError(
            f"--part {asked}, but these are {place.world_size} processes, each of which does a part of its own; leave "
            "--part out, or start one process for each part"
        )
    return WorkPart(place.rank + 1, place.world_size)
