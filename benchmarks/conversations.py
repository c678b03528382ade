"""Generate conversations of known people and measure how well `speakernet who` finds who speaks in
them.

    python -m benchmarks.conversations SPEECH OUT --model cam.pt [--noise FOLDER] [--rirs FOLDER]
    [--speakers 2 6]

SPEECH has a folder for each person, with at least five recordings. Only half of the people (`--half
0` or `1`) are used, so that parameters tuned on one half can be reported on the other. Writes
OUT/NNN.flac, OUT/reference/NNN.rttm, and the turns found without and with the number of speakers as
OUT/unknown/NNN.rttm and OUT/known/NNN.rttm. In each conversation the first half of the people,
rounded up (or `--enrolled`), are enrolled with two recordings that are not part of it. Pauses of
more than half a second separate the turns of the reference. With `--rirs`, every other conversation
is in a room. `--channel telephone` puts every other person on the telephone; `--channel
microphones` makes everybody alternate between two microphones, neither of which is that of the
enrolment.
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from scipy.signal import fftconvolve, firwin2

import speakernet
from speakernet.data.audio import SAMPLE_RATE, audio_info, read_audio, write_audio
from speakernet.data.augment.augmenter import mu_law_codec, telephone_band
from speakernet.data.levels import FRAME_SECONDS, frame_powers
from speakernet.inference.verifier import enroll
from speakernet.inference.who.conversation import Turn
from speakernet.inference.who.errors import diarization_errors
from speakernet.inference.who.rttm import read_turns, rttm_lines

# Read speech has breaths and clicks between its words. What is 30 dB below the loudest frame is
# taken for silence, which is a matter of taste: it decides where turns of the reference end, and
# with it some of the missed speech and false alarms.
QUIET_DB = 30.0
# Annotators of real conversations join what half a second separates; so do we, or every breath
# would be a border that a system is expected to find.
PAUSE_SECONDS = 0.5
MARGIN_SECONDS = 0.5
ENROLLED = 2
SNR_DB = 15.0
KINDS = ("unknown", "known")
"""Whether the number of speakers is given."""


def spoken(waveform: np.ndarray) -> list[tuple[int, int]]:
    """(first, last + 1) samples of the stretches at most 30 dB below the loudest frame."""
    levels = 10 * np.log10(frame_powers(waveform) + 1e-12)
    loud = np.flatnonzero(levels > levels.max() - QUIET_DB)
    frame = round(FRAME_SECONDS * SAMPLE_RATE)
    groups = np.split(loud, np.flatnonzero(np.diff(loud) * FRAME_SECONDS > PAUSE_SECONDS) + 1)
    return [(int(group[0]) * frame, int(group[-1] + 1) * frame) for group in groups]


def by_telephone(waveform: np.ndarray) -> np.ndarray:
    """Simulate a telephone: 300 to 3,400 Hz at 8 kHz, 8-bit mu-law."""
    band = telephone_band(torch.from_numpy(waveform)[None], SAMPLE_RATE)
    return mu_law_codec(band, SAMPLE_RATE)[0].numpy()


def by_microphone(waveform: np.ndarray, number: int) -> np.ndarray:
    """Filter with gains of up to 10 dB either way at five frequencies, drawn by the microphone's
    number.
    """
    # Five gains at random are a caricature of a microphone, but a reproducible one: its number is
    # the seed, and no recording of real microphones is needed.
    gains = 10 ** (np.random.default_rng(number).uniform(-10, 10, 5) / 20)
    return fftconvolve(
        waveform, firwin2(255, [0, 300, 1000, 3500, 8000], gains, fs=SAMPLE_RATE), "same"
    ).astype(np.float32)


def conversation(
    people: dict[str, list[Path]],
    seconds: float,
    overlap: float,
    channel: str | None,
    random: np.random.Generator,
) -> tuple[np.ndarray, list[Turn]]:
    """Samples and reference turns; some turns start early, so that `overlap` is the share of
    overlapped time.
    """
    # The story of a conversation. People speak in random order, nobody twice in a row and everybody
    # at least once. Between two turns there is a short pause; but as much speech as `overlap` asks
    # for is owed, and as soon as enough has added up, the next turn starts before the last one
    # ends. Levels differ by a few decibels, as at a table. The reference holds the stretches with
    # sound, not the files: a pause within a recording is nobody's speech.
    names = list(people)
    at = MARGIN_SECONDS
    last = ""
    owed = 0.0
    turns: list[Turn] = []
    mixed = np.zeros(round((seconds + 60) * SAMPLE_RATE), np.float32)
    while at < seconds:
        # Everybody speaks once before anybody speaks again.
        heard = {turn.speaker for turn in turns}
        missing = [name for name in names if name not in heard]
        others = [name for name in names if name != last]
        name = missing[0] if missing else str(random.choice(others))
        waveform = read_audio(people[name][random.integers(len(people[name]))])
        parts = spoken(waveform)
        waveform = waveform[parts[0][0] : parts[-1][1]]
        if channel == "telephone" and names.index(name) % 2:
            waveform = by_telephone(waveform)
        elif channel == "microphones":
            waveform = by_microphone(waveform, 2 * names.index(name) + len(turns) % 2)
        level = 0.05 * 10 ** (random.uniform(-3, 3) / 20)
        waveform = waveform * (level / (np.sqrt(np.square(waveform).mean()) + 1e-9))
        # Owed by the length of every turn, and paid when it makes an interruption worth noticing:
        # overlaps of a few samples would only be errors of measurement.
        owed += overlap * len(waveform) / SAMPLE_RATE
        if last and owed > 0.3:
            # Never more than the stretch before it, or three people would speak at once.
            early = min(owed, random.uniform(0.3, 1.5), turns[-1].stop - turns[-1].start)
            at = turns[-1].stop - early
            owed = owed - early
        first = round(at * SAMPLE_RATE)
        mixed[first : first + len(waveform)] += waveform[: len(mixed) - first]
        begun = at - parts[0][0] / SAMPLE_RATE
        turns += [Turn(begun + a / SAMPLE_RATE, begun + b / SAMPLE_RATE, name) for a, b in parts]
        at = at + len(waveform) / SAMPLE_RATE + random.uniform(0.1, 0.8)
        last = name
    end = max(turn.stop for turn in turns) + MARGIN_SECONDS
    return mixed[: round(end * SAMPLE_RATE)], turns


def disturbed(
    mixed: np.ndarray,
    noises: list[Path],
    rir: Path | None,
    random: np.random.Generator,
) -> np.ndarray:
    """Add reverberation and concatenated noise, and scale the peak to 0.9."""
    if rir is not None:
        response = read_audio(rir)
        # Reverberated speech is delayed by the way of the direct sound. Cutting from the peak on
        # keeps the reference in time: shifted by 10 ms, every border would be wrong by that much.
        peak = int(np.abs(response).argmax())
        mixed = fftconvolve(mixed, response / np.linalg.norm(response))[
            peak : peak + len(mixed)
        ].astype(np.float32)
    if noises:
        noise = np.zeros(0, np.float32)
        # Clips of noise are a few seconds long. They follow each other without a fade, so there are
        # clicks, which a detector of speech has to ignore too.
        while len(noise) < len(mixed):
            noise = np.concatenate([noise, read_audio(noises[random.integers(len(noises))])])
        noise = noise[: len(mixed)]
        mixed = mixed + noise * np.sqrt(
            np.square(mixed).mean() / np.square(noise).mean() / 10 ** (SNR_DB / 10)
        )
    return 0.9 * mixed / np.abs(mixed).max()


def name_seconds(
    truth: list[Turn], found: tuple[Turn, ...], enrolled: list[str], collar: float
) -> np.ndarray:
    """Seconds of enrolled people: correctly named, and in total; of strangers without them: named,
    and in total.

    As in DER, time closer than `collar` seconds to a border of the truth is left out. Only detected
    speech counts.
    """
    # Frames of 10 ms instead of exact intervals: intersections of many short turns by hand are easy
    # to get wrong, and 10 ms are far below the collar.
    times = np.arange(0.0, max(turn.stop for turn in truth), FRAME_SECONDS)
    for turn in truth:
        for border in (turn.start, turn.stop):
            times = times[np.abs(times - border) >= collar]

    def is_spoken(turns: Iterable[Turn], names: Iterable[str]) -> np.ndarray:
        is_inside = np.zeros(len(times), dtype=bool)
        for turn in turns:
            if turn.speaker in names:
                is_inside |= (turn.start <= times) & (times < turn.stop)
        return is_inside

    speakers = {turn.speaker for turn in (*truth, *found)}
    # Speech that was not found is DER's subject. Here only names are judged, so that a strict
    # detector does not look like a bad memory for voices.
    is_speech = is_spoken(found, speakers)
    right = known = 0
    for name in enrolled:
        is_true = is_spoken(truth, [name]) & is_speech
        right += (is_true & is_spoken(found, [name])).sum()
        known += is_true.sum()
    strangers = speakers.difference(enrolled)
    # Time in which a stranger and an enrolled person speak at once is left out: the name is right
    # there.
    is_strange = is_spoken(truth, strangers) & ~is_spoken(truth, enrolled) & is_speech
    wrong = (is_strange & is_spoken(found, enrolled)).sum()
    return FRAME_SECONDS * np.array([right, known, wrong, is_strange.sum()], dtype=np.float64)


def audio_files(folder: Path | None) -> list[Path]:
    """All recordings below a folder."""
    if folder is None:
        return []
    return sorted(path for path in folder.rglob("*") if path.suffix in (".wav", ".flac"))


class Conversations:
    """Makes conversations one by one, and adds up how well the verifier names their speakers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.verifier = speakernet.load(arguments.model, "cpu")
        self.noises = audio_files(arguments.noise)
        self.rirs = audio_files(arguments.rirs)
        self.people: dict[str, list[Path]] = {}
        folders = sorted(path for path in arguments.speech.iterdir() if path.is_dir())
        # Every other person: parameters are tuned on one half and reported on the other, which has
        # neither their voices nor their sessions.
        for folder in folders[arguments.half :: 2]:
            files = [*sorted(folder.rglob("*.flac")), *sorted(folder.rglob("*.wav"))]
            if len(files) >= 5:
                self.people[folder.name] = files
        for kind in ("reference", *KINDS):
            (arguments.out / kind).mkdir(parents=True, exist_ok=True)
        self.named = {kind: np.zeros(4) for kind in KINDS}
        self.audio_seconds = 0.0
        self.processor_seconds = 0.0

    def write_turns(self, kind: str, name: str, turns: Iterable[Turn]) -> None:
        """Write an RTTM file."""
        lines = [*rttm_lines(name, turns), ""]
        (self.arguments.out / kind / f"{name}.rttm").write_text("\n".join(lines))

    def run(self, number: int) -> None:
        """Make a conversation, and find who speaks in it."""
        arguments = self.arguments
        # Keyed by number, so that a conversation does not depend on how many were made before it,
        # and a single one can be made again.
        random = np.random.default_rng([arguments.seed, number])
        name = f"{number:03d}"
        low, high = arguments.speakers
        count = low + number % (high - low + 1)
        speakers = random.choice(sorted(self.people), count, replace=False).tolist()
        files = {}
        for speaker in speakers:
            paths = self.people[speaker]
            files[speaker] = [paths[row] for row in random.permutation(len(paths))]
        rir = None
        if self.rirs and number % 2:
            rir = self.rirs[random.integers(len(self.rirs))]
        # What enrols a person must not be heard in the conversation, or names would be found by the
        # recording instead of by the voice.
        spoken_files = {speaker: paths[ENROLLED:] for speaker, paths in files.items()}
        mixed, turns = conversation(
            spoken_files, arguments.seconds, arguments.overlap, arguments.channel, random
        )
        path = arguments.out / f"{name}.flac"
        write_audio(path, disturbed(mixed, self.noises, rir, random))
        self.write_turns("reference", name, turns)
        store = None
        enrolled = speakers[: arguments.enrolled or (count + 1) // 2]
        if self.verifier.is_calibrated:
            # A store from an earlier call has other people in it, and those would be strangers with
            # names.
            (arguments.out / f"{name}.db").unlink(missing_ok=True)
            store = self.verifier.people(arguments.out / f"{name}.db")
            for speaker in enrolled:
                enroll(self.verifier, store, speaker, files[speaker][:ENROLLED])
        self.audio_seconds += audio_info(path).seconds
        begin = time.process_time()
        for kind in KINDS:
            num_speakers = count if kind == "known" else None
            found = self.verifier.who(
                path, store, num_speakers=num_speakers, segmentation=arguments.segmentation
            )
            # Processor time, which other programs on the machine change little; the two kinds do
            # almost the same work, so one of them is enough.
            if kind == KINDS[0]:
                self.processor_seconds += time.process_time() - begin
            self.write_turns(kind, name, found.turns)
            self.named[kind] += name_seconds(turns, found.turns, enrolled, arguments.collar)
            seconds = self.named[kind].round(1).tolist()
            print(name, count, kind, len(found.speakers), json.dumps(seconds), flush=True)

    def report(self) -> None:
        """Print the figures of all conversations."""
        out = self.arguments.out
        for kind, (right, known, wrong, strangers) in self.named.items():
            errors = diarization_errors(
                read_turns(out / "reference"), read_turns(out / kind), collar=self.arguments.collar
            )
            titles = ("DER", "missed", "false alarm", "confusion", "JER")
            rates = dict(zip(titles, errors.rates().round(2).tolist(), strict=True))
            num_right = f"right in {errors.num_right} of {len(errors.names)}"
            print(f"number {kind}: {json.dumps(rates)}, {num_right}", end="; ")
            share = 100 * right / max(known, 1)
            print(f"enrolled people named for {share:.1f} % of their time", end=", ")
            share = 100 * wrong / max(strangers, 1)
            print(f"strangers given a name for {share:.1f} % of theirs")
        factor = self.processor_seconds / self.audio_seconds
        print(f"real-time factor {factor:.4f} in processor time")


def main() -> None:
    """Generate the conversations, find who speaks, print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("speech", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--segmentation", default="none", help="a segmentation model's file")
    parser.add_argument("--noise", type=Path)
    parser.add_argument("--rirs", type=Path)
    parser.add_argument("--half", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--speakers", type=int, nargs=2, default=[2, 6])
    parser.add_argument("--enrolled", type=int, help="number of people to enrol (default: half)")
    parser.add_argument("--channel", choices=["telephone", "microphones"])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--overlap", type=float, default=0.1)
    parser.add_argument("--collar", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1)
    conversations = Conversations(parser.parse_args())
    for number in range(conversations.arguments.count):
        conversations.run(number)
    conversations.report()


if __name__ == "__main__":
    main()
