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
from scipy.signal import fftconvolve, firwin2, resample_poly

import speakernet
from speakernet.data.audio import SAMPLE_RATE, audio_info, read_audio, write_audio
from speakernet.data.levels import FRAME_SECONDS, frame_powers
from speakernet.inference.recordings import Recording
from speakernet.inference.verifier import enroll
from speakernet.inference.who.conversation import Turn
from speakernet.inference.who.errors import diarization_errors
from speakernet.inference.who.rttm import read_turns, rttm_lines

QUIET_DB = 30.0
PAUSE_SECONDS = 0.5
MARGIN_SECONDS = 0.5
ENROLLED = 2
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
    band = fftconvolve(
        resample_poly(waveform, 1, 2),
        firwin2(129, [0, 250, 350, 3350, 3500, 4000], [0, 0, 1, 1, 0, 0], fs=8000),
        "same",
    )
    loudest = np.abs(band).max() + 1e-9
    coded = (
        np.round(127 * np.sign(band) * np.log1p(255 * np.abs(band) / loudest) / np.log(256)) / 127
    )
    return resample_poly(
        np.sign(coded) * np.expm1(np.abs(coded) * np.log(256)) / 255 * loudest, 2, 1
    ).astype(np.float32)


def by_microphone(waveform: np.ndarray, number: int) -> np.ndarray:
    """Filter with gains of up to 10 dB either way at five frequencies, drawn by the microphone's
    number.
    """
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
    names = list(people)
    at = MARGIN_SECONDS
    last = ""
    owed = 0.0
    turns: list[Turn] = []
    mixed = np.zeros(round((seconds + 60) * SAMPLE_RATE), np.float32)
    while at < seconds:
        # Everybody speaks once before anybody speaks again.
        missing = [name for name in names if name not in {turn.speaker for turn in turns}]
        name = missing[0] if missing else str(random.choice([one for one in names if one != last]))
        waveform = read_audio(people[name][random.integers(len(people[name]))])
        parts = spoken(waveform)
        waveform = waveform[parts[0][0] : parts[-1][1]]
        if channel == "telephone" and names.index(name) % 2:
            waveform = by_telephone(waveform)
        elif channel == "microphones":
            waveform = by_microphone(waveform, 2 * names.index(name) + len(turns) % 2)
        level = 0.05 * 10 ** (random.uniform(-3, 3) / 20)
        waveform = waveform * (level / (np.sqrt(np.square(waveform).mean()) + 1e-9))
        owed += overlap * len(waveform) / SAMPLE_RATE
        if last and owed > 0.3:
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
    snr_db: float,
    random: np.random.Generator,
) -> np.ndarray:
    """Add reverberation and concatenated noise, and scale the peak to 0.9."""
    if rir is not None:
        response = read_audio(rir)
        peak = int(np.abs(response).argmax())
        mixed = fftconvolve(mixed, response / np.linalg.norm(response))[
            peak : peak + len(mixed)
        ].astype(np.float32)
    if noises:
        noise = np.zeros(0, np.float32)
        while len(noise) < len(mixed):
            noise = np.concatenate([noise, read_audio(noises[random.integers(len(noises))])])
        noise = noise[: len(mixed)]
        mixed = mixed + noise * np.sqrt(
            np.square(mixed).mean() / np.square(noise).mean() / 10 ** (snr_db / 10)
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
    at = np.arange(0.0, max(turn.stop for turn in truth), FRAME_SECONDS)
    borders = np.sort([border for turn in truth for border in (turn.start, turn.stop)])
    right = np.searchsorted(borders, at).clip(1, len(borders) - 1)
    at = at[np.minimum(np.abs(at - borders[right - 1]), np.abs(at - borders[right])) >= collar]

    def spoken_by(turns: Iterable[Turn], name: str) -> np.ndarray:
        inside = [(turn.start <= at) & (at < turn.stop) for turn in turns if turn.speaker == name]
        return np.any(inside, axis=0) if inside else np.zeros(len(at), dtype=bool)

    everybody = {turn.speaker for turn in (*truth, *found)}
    true, claimed = (
        {name: spoken_by(turns, name) for name in everybody} for turns in (truth, found)
    )
    is_speech = np.any(list(claimed.values()), axis=0)
    known = [true[name] & is_speech for name in enrolled]
    strange = (
        np.any([true[name] for name in everybody - set(enrolled)], axis=0)
        & ~np.any(known, axis=0)
        & is_speech
    )
    right = sum((one & claimed[name]).sum() for one, name in zip(known, enrolled, strict=True))
    wrong = (strange & np.any([claimed[name] for name in enrolled], axis=0)).sum()
    return FRAME_SECONDS * np.array([right, np.sum(known), wrong, strange.sum()], dtype=np.float64)


def remember(verifier: speakernet.SpeakerVerifier) -> None:
    """Make the verifier embed each window of a recording only once."""
    kept: dict[tuple[str, int, int], np.ndarray] = {}
    embed = verifier.embed_windows

    def embed_new(recording: Recording, edges: np.ndarray, description: str = "") -> np.ndarray:
        keys = [(recording.name, start, stop) for start, stop in edges.tolist()]
        missing = list(dict.fromkeys(key for key in keys if key not in kept))
        if missing:
            windows = np.array([key[1:] for key in missing])
            kept.update(zip(missing, embed(recording, windows, description), strict=True))
        if not keys:
            return np.zeros((0, verifier.embedding_dim), np.float32)
        return np.stack([kept[key] for key in keys])

    verifier.embed_windows = embed_new  # type: ignore[method-assign]


def main() -> None:
    """Generate the conversations, find who speaks, print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("speech", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--noise", type=Path)
    parser.add_argument("--rirs", type=Path)
    parser.add_argument("--half", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--speakers", type=int, nargs=2, default=[2, 6])
    parser.add_argument("--enrolled", type=int, help="number of people to enrol (default: half)")
    parser.add_argument("--channel", choices=["telephone", "microphones"])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--overlap", type=float, default=0.1)
    parser.add_argument("--snr", type=float, default=15.0)
    parser.add_argument("--collar", type=float, default=0.25)
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
    remember(verifier)
    for kind in ("reference", *KINDS):
        (given.out / kind).mkdir(parents=True, exist_ok=True)
    named = np.zeros((2, 4))
    audio = 0.0
    work = 0.0
    for number in range(given.count):
        random = np.random.default_rng([given.seed, number])
        name = f"{number:03d}"
        count = low + number % (high - low + 1)
        here = [str(one) for one in random.choice(sorted(people), count, replace=False)]
        files = {
            one: [people[one][row] for row in random.permutation(len(people[one]))] for one in here
        }
        rir = rirs[random.integers(len(rirs))] if rirs and number % 2 else None
        spoken_files = {one: found[ENROLLED:] for one, found in files.items()}
        mixed, turns = conversation(
            spoken_files, given.seconds, given.overlap, given.channel, random
        )
        write_audio(
            path := given.out / f"{name}.flac", disturbed(mixed, noises, rir, given.snr, random)
        )
        (given.out / "reference" / f"{name}.rttm").write_text(
            "\n".join([*rttm_lines(name, turns), ""])
        )
        store = None
        enrolled = here[: given.enrolled or (count + 1) // 2]
        if verifier.is_calibrated:
            (given.out / f"{name}.db").unlink(missing_ok=True)
            store = verifier.people(given.out / f"{name}.db")
            for one in enrolled:
                enroll(verifier, store, one, files[one][:ENROLLED])
        begun = time.process_time()
        took = 0.0
        for row, kind in enumerate(KINDS):
            found = verifier.who(path, store, num_speakers=count if kind == "known" else None)
            took = took or time.process_time() - begun
            (given.out / kind / f"{name}.rttm").write_text(
                "\n".join([*rttm_lines(name, found.turns), ""])
            )
            named[row] += name_seconds(turns, found.turns, enrolled, given.collar)
            print(
                name,
                count,
                kind,
                len(found.speakers),
                json.dumps(named[row].round(1).tolist()),
                flush=True,
            )
        work = work + took
        audio = audio + audio_info(path).seconds
    for kind, (right, known, wrong, strangers) in zip(KINDS, named.tolist(), strict=True):
        reference = read_turns(given.out / "reference")
        errors = diarization_errors(reference, read_turns(given.out / kind), collar=given.collar)
        rates = zip(
            ("DER", "missed", "false alarm", "confusion", "JER"),
            errors.rates().round(2).tolist(),
            strict=True,
        )
        print(
            f"number {kind}: {json.dumps(dict(rates))}, right in {errors.num_right} of "
            f"{len(errors.names)}",
            end="; ",
        )
        print(
            f"enrolled people named for {100 * right / max(known, 1):.1f} % of their time", end=", "
        )
        print(f"strangers given a name for {100 * wrong / max(strangers, 1):.1f} % of theirs")
    print(f"real-time factor {work / audio:.4f} in processor time")


if __name__ == "__main__":
    main()
