"""Conversations of known people with their truth, and how well `speakernet who` finds who speaks in them.

    python -m benchmarks.conversations SPEECH OUT --model cam.pt [--noise FOLDER] [--rirs FOLDER] [--speakers 2 6]

SPEECH has a folder for each person, with five recordings or more; half of the people (`--half 0` or `1`) are used, so
that what is tuned on one half can be reported on the other. Writes OUT/NNN.flac, OUT/reference/NNN.rttm and
OUT/hypothesis/NNN.rttm. In every conversation the first half of the people, rounded up, are enrolled with two
recordings that are not in it. The truth marks speech between pauses of half a second; half of the conversations are in
a room.
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy.signal import fftconvolve

import speakernet
from speakernet.data.audio import SAMPLE_RATE, audio_info, read_audio, write_audio
from speakernet.evaluation.slices import FRAME_SECONDS, frame_powers
from speakernet.inference.verifier import enroll
from speakernet.inference.who.conversation import Turn
from speakernet.inference.who.errors import diarization_errors, read_turns
from speakernet.inference.who.files import rttm_lines

QUIET_DB, PAUSE_SECONDS, MARGIN_SECONDS, ENROLLED = 30.0, 0.5, 0.5, 2


def spoken(waveform: np.ndarray) -> list[tuple[int, int]]:
    """First and last + 1 sample of stretches that are at most 30 dB below the loudest frame."""
    levels = 10 * np.log10(frame_powers(waveform) + 1e-12)
    loud = np.flatnonzero(levels > levels.max() - QUIET_DB)
    frame = round(FRAME_SECONDS * SAMPLE_RATE)
    groups = np.split(loud, np.flatnonzero(np.diff(loud) * FRAME_SECONDS > PAUSE_SECONDS) + 1)
    return [(int(group[0]) * frame, int(group[-1] + 1) * frame) for group in groups]


def conversation(
    people: dict[str, list[Path]], seconds: float, overlap: float, random: np.random.Generator
) -> tuple[np.ndarray, list[Turn]]:
    """Samples and truth; in a share of the changes that gives this overlap one begins before the other ends."""
    names, at, last, owed = list(people), MARGIN_SECONDS, "", 0.0
    turns: list[Turn] = []
    mixed = np.zeros(round((seconds + 60) * SAMPLE_RATE), np.float32)
    while at < seconds:
        # Everybody first speaks once.
        missing = [name for name in names if name not in {turn.speaker for turn in turns}]
        name = missing[0] if missing else str(random.choice([one for one in names if one != last]))
        waveform = read_audio(people[name][random.integers(len(people[name]))])
        parts = spoken(waveform)
        waveform = waveform[parts[0][0] : parts[-1][1]]
        level = 0.05 * 10 ** (random.uniform(-3, 3) / 20)
        waveform = waveform * (level / (np.sqrt(np.square(waveform).mean()) + 1e-9))
        owed += overlap * len(waveform) / SAMPLE_RATE
        if last and owed > 0.3:
            early = min(owed, random.uniform(0.3, 1.5), turns[-1].stop - turns[-1].start)
            at, owed = turns[-1].stop - early, owed - early
        first = round(at * SAMPLE_RATE)
        mixed[first : first + len(waveform)] += waveform[: len(mixed) - first]
        begun = at - parts[0][0] / SAMPLE_RATE
        turns += [Turn(begun + a / SAMPLE_RATE, begun + b / SAMPLE_RATE, name) for a, b in parts]
        at, last = at + len(waveform) / SAMPLE_RATE + random.uniform(0.1, 0.8), name
    end = max(turn.stop for turn in turns) + MARGIN_SECONDS
    return mixed[: round(end * SAMPLE_RATE)], turns


def disturbed(
    mixed: np.ndarray, noises: list[Path], rir: Path | None, snr_db: float, random: np.random.Generator
) -> np.ndarray:
    """In a room, with noise one after the other, at most 0.9."""
    if rir is not None:
        response = read_audio(rir)
        peak = int(np.abs(response).argmax())
        mixed = fftconvolve(mixed, response / np.linalg.norm(response))[peak : peak + len(mixed)].astype(np.float32)
    if noises:
        noise = np.zeros(0, np.float32)
        while len(noise) < len(mixed):
            noise = np.concatenate([noise, read_audio(noises[random.integers(len(noises))])])
        noise = noise[: len(mixed)]
        mixed = mixed + noise * np.sqrt(np.square(mixed).mean() / np.square(noise).mean() / 10 ** (snr_db / 10))
    return 0.9 * mixed / np.abs(mixed).max()


def name_seconds(truth: list[Turn], found: tuple[Turn, ...], enrolled: list[str]) -> np.ndarray:
    """Of enrolled people the seconds with their name, and all; where only strangers speak, those with a name, and all.

    Only what was found as speech counts.
    """
    at = np.arange(0.0, max(turn.stop for turn in truth), FRAME_SECONDS)

    def spoken_by(turns: Iterable[Turn], name: str) -> np.ndarray:
        inside = [(turn.start <= at) & (at < turn.stop) for turn in turns if turn.speaker == name]
        return np.any(inside, axis=0) if inside else np.zeros(len(at), dtype=bool)

    everybody = {turn.speaker for turn in (*truth, *found)}
    true, said = ({name: spoken_by(turns, name) for name in everybody} for turns in (truth, found))
    is_speech = np.any(list(said.values()), axis=0)
    known = [true[name] & is_speech for name in enrolled]
    strange = np.any([true[name] for name in everybody - set(enrolled)], axis=0) & ~np.any(known, axis=0) & is_speech
    right = sum((one & said[name]).sum() for one, name in zip(known, enrolled, strict=True))
    wrong = (strange & np.any([said[name] for name in enrolled], axis=0)).sum()
    return FRAME_SECONDS * np.array([right, np.sum(known), wrong, strange.sum()], dtype=np.float64)


def main() -> None:
    """Make the conversations, find who speaks, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--noise", type=Path)
    parser.add_argument("--rirs", type=Path)
    parser.add_argument("--half", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--speakers", type=int, nargs=2, default=[2, 6])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--overlap", type=float, default=0.1)
    parser.add_argument("--snr", type=float, default=15.0)
    parser.add_argument("--collar", type=float, default=0.25)
    parser.add_argument("--known", action="store_true", help="the number of speakers is given")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folders = sorted(one for one in given.speech.iterdir() if one.is_dir())[given.half :: 2]
    people = {one.name: sorted(one.rglob("*.flac")) + sorted(one.rglob("*.wav")) for one in folders}
    people = {name: files for name, files in people.items() if len(files) >= 5}
    noises, rirs = (
        sorted(p for p in one.rglob("*") if p.suffix in (".wav", ".flac")) if one else []
        for one in (given.noise, given.rirs)
    )
    verifier, (low, high) = speakernet.load(given.model, "cpu"), given.speakers
    for kind in ("reference", "hypothesis"):
        (given.out / kind).mkdir(parents=True, exist_ok=True)
    named, audio, work = np.zeros(4), 0.0, 0.0
    for number in range(given.count):
        random, name = np.random.default_rng([given.seed, number]), f"{number:03d}"
        count = low + number % (high - low + 1)
        here = [str(one) for one in random.choice(sorted(people), count, replace=False)]
        files = {one: [people[one][row] for row in random.permutation(len(people[one]))] for one in here}
        rir = rirs[random.integers(len(rirs))] if rirs and number % 2 else None
        mixed, turns = conversation(
            {one: found[ENROLLED:] for one, found in files.items()}, given.seconds, given.overlap, random
        )
        write_audio(path := given.out / f"{name}.flac", disturbed(mixed, noises, rir, given.snr, random))
        (given.out / "reference" / f"{name}.rttm").write_text("\n".join([*rttm_lines(name, turns), ""]))
        (given.out / f"{name}.db").unlink(missing_ok=True)
        store, enrolled = verifier.people(given.out / f"{name}.db"), here[: (count + 1) // 2]
        for one in enrolled:
            enroll(verifier, store, one, files[one][:ENROLLED])
        begun = time.process_time()
        found = verifier.who(path, store, num_speakers=count if given.known else None)
        work, audio = work + time.process_time() - begun, audio + audio_info(path).seconds
        (given.out / "hypothesis" / f"{name}.rttm").write_text("\n".join([*rttm_lines(name, found.turns), ""]))
        named += name_seconds(turns, found.exclusive, enrolled)
        print(name, count, len(found.speakers), json.dumps(named.round(1).tolist()), flush=True)
    errors = diarization_errors(
        *map(read_turns, (given.out / "reference", given.out / "hypothesis")), collar=given.collar
    )
    rates = dict(
        zip(("DER", "missed", "false alarm", "confusion", "JER"), errors.rates().round(2).tolist(), strict=True)
    )
    print(json.dumps(rates), f"right number in {errors.num_right} of {len(errors.names)}")
    right, known, wrong, strangers = named
    print(f"enrolled people named for {100 * right / max(known, 1):.1f} % of their time", end=", ")
    print(f"strangers given a name for {100 * wrong / max(strangers, 1):.1f} % of theirs")
    print(f"real-time factor {work / audio:.4f} in processor time")


if __name__ == "__main__":
    main()
