"""Embed recordings and write names, embeddings and the model's fingerprint to one file, as plain
NumPy arrays.

    speakernet embed a.wav b.flac --model best.pt --out e.npz
    speakernet embed my_voices/ --model best.pt --out e.npz
    find . -name '*.wav' | speakernet embed - --model best.pt --out e.npz

Folders are searched recursively; lists have one file (or `speaker path`) per line; a packed corpus
is read directly. The same command resumes after a kill. Under torchrun or srun, each process embeds
a part. The exit status is 1 if recordings were left out.
"""

import argparse
import logging
import os
import sys

from speakernet.cli.shared import CHANNEL, MODEL, load_verifier, output_path
from speakernet.data.parts import PART_HELP, WHOLE, WorkPart, list_parts, parse_part
from speakernet.distributed import find_place
from speakernet.terminal import counted

ARGUMENTS = {
    "audio": {
        "nargs": "+",
        "help": "files, folders, lists (.txt), a packed corpus, or - for names on stdin",
    },
    **MODEL,
    **CHANNEL,
    "--out": {"type": output_path, "required": True, "help": "output file, such as e.npz"},
    "--part": {
        "metavar": "I/N",
        "help": f"{PART_HELP}; give every process the same recordings, model and --out; the last "
        "to finish writes it",
    },
    "--speech": {"action": "store_true", "help": "embed detected speech alone, as decisions do"},
    "--skip-broken": {
        "action": "store_true",
        "help": "leave out recordings that cannot be embedded",
    },
}

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Embed, write and report the counts; the exit status is 1 if recordings were left out."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.data.speech import cut_to_speech
    from speakernet.inference.bulk import embed_files
    from speakernet.inference.recordings import audio_inputs

    # torchrun and srun start all processes, whose rank is the part; elsewhere each is started by
    # hand with --part. In both cases parts meet only on disk, at no port, so a killed one can be
    # repeated alone.
    place = find_place(os.environ, port=0)
    if place and arguments.part:
        raise ValueError(
            f"leave out --part {arguments.part}: the {place.world_size} processes already share "
            "the work"
        )
    part = WHOLE
    local_rank = None
    if place:
        part = WorkPart(place.rank + 1, place.world_size)
        local_rank = place.local_rank
    elif arguments.part:
        part = parse_part(arguments.part)
    verifier = load_verifier(arguments, local_rank)
    source, names = audio_inputs(
        arguments.audio, verifier.sample_rate, sys.stdin, arguments.channel
    )
    # Whole recordings by default, as in published protocols. Decisions are about detected speech,
    # and embeddings should only be compared with those made in the same way.
    if arguments.speech and verifier.cuts_speech:
        source = cut_to_speech(source)
    elif arguments.speech:
        logger.warning(
            "%s decides about whole recordings, which are embedded: %s",
            verifier.name,
            verifier.rule.caution,
        )
    embedded = embed_files(
        verifier, source, names, arguments.out, skips_broken=arguments.skip_broken, part=part
    )
    for name, warning in source.warnings.items():
        logger.warning("%s: %s", name, warning)
    for problem in embedded.problems:
        logger.warning("left out: %s", problem)
    if embedded.missing:
        text = f"part {part} is done; missing: {list_parts(embedded.missing)}"
    else:
        count = counted(embedded.num_embedded, "embedding")
        text = f"{count} with {verifier.embedding_dim} dimensions"
        if embedded.num_kept:
            text += f", {embedded.num_kept} of them from an earlier run"
        if embedded.problems:
            text += f"; {len(embedded.problems)} left out"
    sys.stdout.write(f"{arguments.out}: {text}\n")
    return int(bool(embedded.problems))
