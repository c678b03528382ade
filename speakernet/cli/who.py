"""Find who speaks when in a recording, naming the people in a store.

    speakernet who meeting.wav --model best.pt --store people.db --out meeting

Without --out the turns are printed as RTTM. With it, DIR gets RTTM, RTTM with one speaker at a
time, JSON, and a page with a timeline that plays the turn you click. People who are not in the
store are `speaker 1`, `speaker 2`, …; --enroll adds one of them to the store. `-` reads a WAV from
a pipe and prints each turn as it ends.
"""

import argparse
import functools
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from speakernet.cli.shared import (
    CHANNEL,
    DECISION,
    MODEL,
    STORE,
    ModelFile,
    limits_of,
    load_verifier,
    output_path,
    store_key,
)
from speakernet.terminal import counted, duration

if TYPE_CHECKING:
    from speakernet.inference.people import PeopleStore
    from speakernet.inference.verifier import SpeakerVerifier
    from speakernet.inference.who.conversation import Conversation, Speaker

STANDARD_INPUT = "-"

ARGUMENTS = {
    "audio": {
        "help": (
            "a recording, in any format, rate, length and number of channels; - is a WAV from "
            "a pipe"
        )
    },
    **MODEL,
    **STORE,
    **CHANNEL,
    "--store": {"type": Path, "help": "the store of people to name, such as people.db"},
    "--speakers": {"type": int, "metavar": "N", "help": "number of speakers, if known"},
    "--max-speakers": {
        "type": int,
        "metavar": "N",
        "help": "maximum number of speakers, if not known (default 10)",
    },
    "--segmentation": {
        "action": ModelFile,
        "metavar": "NAME_OR_FILE",
        "help": "segmentation model that finds second voices: an ONNX file or a name from "
        "`speakernet models`; none uses none (default: pyannote/segmentation-3.0 if it has been "
        "fetched)",
    },
    "--no-overlap": {
        "action": "store_true",
        "help": "give one voice at a time, also where two speak",
    },
    "--out": {"type": output_path, "metavar": "DIR", "help": "folder for RTTM, JSON and the page"},
    "--enroll": {
        "action": "append",
        "default": [],
        "metavar": "SPEAKER=NAME",
        "help": 'add a speaker of the recording to the store, such as "speaker 2=Anna" '
        "(repeatable)",
    },
    "--transcript": {
        "type": Path,
        "help": "words in JSON, or a .srt, to write with names beside the other files",
    },
    **DECISION,
    "--far": {
        "type": float,
        "metavar": "RATE",
        "help": "share of strangers that may be accepted as anybody in the store (default 0.05)",
    },
}

MOST_CERTAIN = 0.999
"""Larger probabilities are not told apart, because the calibration does not support it."""

logger = logging.getLogger(__name__)


def outputs(arguments: argparse.Namespace) -> dict[Path, bool]:
    """The files in the folder of --out."""
    if arguments.out is None:
        return {}
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.who.files import find_outputs

    suffixes = []
    if arguments.transcript:
        is_subtitle = arguments.transcript.suffix.lower() == ".srt"
        suffixes.append(".transcript.srt" if is_subtitle else ".transcript.json")
    return find_outputs(arguments.out, arguments.audio, suffixes)


def run(arguments: argparse.Namespace) -> list[str]:
    """Find the turns, write or print them, and enrol the speakers that were given names."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.who import files, transcripts
    from speakernet.inference.who.conversation import speaker_called
    from speakernet.inference.who.rttm import rttm_lines

    # All options are checked before the model is loaded, and the transcript is read before the
    # recording: both take seconds, a long meeting minutes.
    to_enroll = [text.partition("=")[::2] for text in arguments.enroll]
    _check(arguments, to_enroll)
    transcript = transcripts.read_transcript(arguments.transcript) if arguments.transcript else None
    verifier = load_verifier(arguments)
    limits = limits_of(arguments)
    store = None
    # With --enroll, a missing store is created once there is somebody to add.
    if arguments.store is not None and (arguments.store.exists() or not to_enroll):
        store = verifier.people(arguments.store, store_key(arguments), must_exist=True)
    if arguments.audio == STANDARD_INPUT:
        # Late: only a pipe needs it.
        from speakernet.inference.who.live import print_turns

        return print_turns(verifier, sys.stdin.buffer, store, limits, arguments.max_speakers)
    recording = verifier.open(arguments.audio, channel=arguments.channel)
    if recording.channel_warning:
        logger.warning("%s: %s", recording.name, recording.channel_warning)
    begun = time.monotonic()
    # Voices are separated first and named afterwards: turns named one by one could give a person
    # several names, and a voice with minutes of speech is named more reliably.
    conversation = verifier.who(
        recording,
        store,
        num_speakers=arguments.speakers,
        max_speakers=arguments.max_speakers,
        segmentation=arguments.segmentation,
        overlap=not arguments.no_overlap,
        **limits,
    )
    _log(conversation, time.monotonic() - begun)
    # A mistyped speaker is refused before anything is written.
    voices = [(speaker_called(conversation, label.strip()), name) for label, name in to_enroll]
    if arguments.out is None:
        lines = rttm_lines(files.name_of(conversation.recording), conversation.turns)
    else:
        texts = {}
        if transcript is not None:
            turns = conversation.exclusive
            texts[transcript.suffix] = transcripts.label_transcript(transcript, turns)
        written = files.write_files(arguments.out, conversation, recording, texts)
        lines = [*summary(conversation), *map(str, written)]
    if not voices:
        return lines
    # The output first: it is complete even if the store cannot be written.
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()
    _enroll(arguments, verifier, store, conversation, voices)
    return []


def _enroll(
    arguments: argparse.Namespace,
    verifier: "SpeakerVerifier",
    store: "PeopleStore | None",
    conversation: "Conversation",
    voices: "list[tuple[Speaker, str]]",
) -> None:
    """Add the voices to the store, which is created if it does not exist."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.who.conversation import enroll_speaker

    open_store = functools.cache(
        functools.partial(verifier.people, arguments.store, store_key(arguments))
    )
    # Opened with the first voice, so that a mistyped name creates no store.
    for speaker, name in voices:
        if store is None and arguments.store.exists():
            store = open_store()
        opened = open_store if store is None else store
        enrolled = enroll_speaker(verifier, opened, conversation, speaker, name)
        for warning in enrolled.warnings:
            logger.warning("%s", warning)
        total = counted(enrolled.total, "recording")
        logger.info(
            "%s is now %s in %s, with %s", speaker.label, enrolled.name, arguments.store, total
        )


def _check(arguments: argparse.Namespace, to_enroll: list[tuple[str, str]]) -> None:
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.people import checked_name

    if arguments.store is None and (
        to_enroll or arguments.far is not None or arguments.threshold is not None
    ):
        raise ValueError(
            "--enroll, --far and --threshold need a store of people; give one with --store"
        )
    if arguments.transcript and arguments.out is None:
        raise ValueError("--transcript needs a folder to write to; give one with --out")
    needs_all = any(
        (to_enroll, arguments.out, arguments.speakers, arguments.channel, arguments.segmentation)
    )
    if arguments.audio == STANDARD_INPUT and needs_all:
        raise ValueError(
            "--enroll, --out, --speakers, --channel and --segmentation need the whole recording, "
            "not a pipe; save it to a file first"
        )
    if arguments.max_speakers is not None and (arguments.speakers or 0) > arguments.max_speakers:
        raise ValueError(
            f"--speakers {arguments.speakers} is more than --max-speakers "
            f"{arguments.max_speakers}; give only one of them: --speakers if the number is known"
        )
    for text, (label, name) in zip(arguments.enroll, to_enroll, strict=True):
        if not label.strip() or not name.strip():
            raise ValueError(f"--enroll {text!r}: expected SPEAKER=NAME, such as 'speaker 2=Anna'")
        checked_name(name)


def _log(conversation: "Conversation", seconds: float) -> None:
    factor = f"real-time factor {seconds / conversation.seconds:.3f}"
    logger.info(
        "%.0f s of audio in %.1f s (%s), speech by %s",
        conversation.seconds,
        seconds,
        factor,
        conversation.detector,
    )
    if conversation.detector.startswith("energy"):
        logger.warning(
            "speech is detected by energy alone, which mistakes music and doors for speech; pip "
            "install 'silero-vad>=6.2,<7'"
        )
    if not conversation.turns:
        logger.warning("%s: no speech found", conversation.recording)


def summary(conversation: "Conversation") -> list[str]:
    """One line per speaker: how long they speak, and how certain the name is."""
    speakers = counted(len(conversation.speakers), "speaker")
    speech = duration(conversation.speech_seconds)
    total = duration(conversation.seconds)
    lines = [f"{speakers} in {speech} of speech, {total} in all, found by {conversation.detector}"]
    for speaker in conversation.speakers:
        line = f"  {speaker.name}: {duration(speaker.seconds)}"
        # For an unnamed voice, the closest score shows how far it was from being named.
        if speaker.score is not None:
            is_named = speaker.name != speaker.label
            line += f", {'score' if is_named else 'not named, closest score'} {speaker.score:.4f}"
            if speaker.posterior is not None:
                is_certain = speaker.posterior > MOST_CERTAIN
                probability = "more than 0.999" if is_certain else f"{speaker.posterior:.3f}"
                line += f", probability {probability}"
        lines.append(line)
    return lines
