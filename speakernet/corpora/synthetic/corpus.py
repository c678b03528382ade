"""Write the synthetic corpus to a folder: speakers to train on, others for trials, noises, room responses, lists.

    corpus/
        train/<speaker>/<session>/<utterance>.wav        train_list.txt
        trial/<speaker>/<session>/<utterance>.wav        trials.txt
        musan_split/{noise,music,speech}/synthetic/<clip>/00000.wav
        RIRS_NOISES/simulated_rirs/{smallroom,mediumroom,largeroom}/Room001/Room001-00001.wav
        utterances.csv  speakers.csv  parameters.json  complete.json

Every file depends on the seed and its own place only, and is written under its final name when whole: a run that was
stopped goes on where it was, with any number of processes. `complete.json` comes last.
"""

import concurrent.futures
import csv
import itertools
import json
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.corpora.synthetic.noises import NOISES, music, talker
from speakernet.corpora.synthetic.phones import draw_phones, lay_out
from speakernet.corpora.synthetic.rooms import ROOM_KINDS, draw_room_response
from speakernet.corpora.synthetic.sessions import draw_session, record
from speakernet.corpora.synthetic.voices import SAMPLE_RATE, draw_voice, synthesise
from speakernet.data.audio import audio_info, write_audio
from speakernet.data.lists import write_training_list, write_trials
from speakernet.files import atomic_write
from speakernet.machine.facts import usable_cores
from speakernet.random import numpy_generator
from speakernet.terminal import Bar

logger = logging.getLogger(__name__)

# Part of `parameters.json`: raise it with every change that makes the audio another one.
SYNTHESISER_VERSION = 1

PARTS = ("train", "trial")
PREFIX = {"train": "syn", "trial": "new"}
# Keys of the random streams: only to be added to, for another order makes another corpus of the same parameters.
_VOICE_KEY, _SESSION_KEY, _SENTENCE_KEY, _CLIP_KEY, _ROOM_KEY, _TRIAL_KEY = range(6)
NOISE_SECONDS = 5.0
MIN_UTTERANCES_FOR_PROCESSES = 200  # fewer are done before a second process has started
# Of full scale, for 16-bit files; whoever convolves with a response divides it by its energy's root first (`RirBank`).
RESPONSE_PEAK = 0.5


class CorpusError(ValueError):
    """The corpus cannot be made there; the message says what to do."""


@dataclass(frozen=True)
class CorpusPaths:
    """Where the parts of a corpus lie, as the options of training name them."""

    train_list: Path
    train_path: Path
    test_list: Path
    test_path: Path
    noise_path: Path
    rir_path: Path
    speakers: Path
    utterances: Path


@dataclass(frozen=True)
class CorpusParameters:
    """What decides the content of a corpus.

    Attributes:
        num_speakers: speakers to train on.
        utterances_per_speaker: of each of them, about 3.5 s each.
        num_trial_speakers: other speakers, for trials.
        trial_utterances_per_speaker: of each of those.
        utterances_per_session: utterances that share room, microphone and noise.
        num_noises: clips of 5 s for augmentation, over all categories.
        num_rooms: room responses for augmentation, over all sizes.
        seed: another seed gives other speakers.
        synthesiser_version: of this code; a corpus of another version is another one.
    """

    num_speakers: int = 120
    utterances_per_speaker: int = 12
    num_trial_speakers: int = 40
    trial_utterances_per_speaker: int = 8
    utterances_per_session: int = 2
    num_noises: int = 60
    num_rooms: int = 45
    seed: int = 1
    synthesiser_version: int = SYNTHESISER_VERSION

    def check(self) -> None:
        """Raise CorpusError where a number makes no corpus."""
        for name, lowest in (
            ("num_speakers", 1), ("utterances_per_speaker", 1), ("num_trial_speakers", 2),
            ("trial_utterances_per_speaker", 2), ("utterances_per_session", 1), ("num_noises", 0),
            ("num_rooms", 0), ("seed", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value < lowest:
                raise CorpusError(f"synthetic corpus: {name} is {value}; it must be at least {lowest}")
        if self.trial_utterances_per_speaker <= self.utterances_per_session:
            raise CorpusError(
                f"synthetic corpus: {self.trial_utterances_per_speaker} trial utterances a speaker in sessions of "
                f"{self.utterances_per_session} leave no target trial between two sessions; ask for more utterances"
            )


def make_corpus(
    folder: str | Path,
    parameters: CorpusParameters | None = None,
    *,
    num_workers: int | None = None,
    show_progress: bool = True,
) -> CorpusPaths:
    """Make the corpus in `folder`, or finish it; returns at once when it is complete. The same on every machine.

    Args:
        folder: made when missing.
        parameters: how much of what; None takes the small corpus of exp01.yaml.
        num_workers: processes; None takes one a core, or none at all for a small corpus.
        show_progress: show a progress bar.

    Raises:
        CorpusError: a number that makes no corpus, or a folder that holds another corpus or other files.
        OSError: the folder cannot be written, or the disk is full; calling again goes on from there.
    """
    folder = Path(folder)
    parameters = parameters or CorpusParameters()
    parameters.check()
    paths = corpus_paths(folder)
    if _is_complete(folder, parameters):
        return paths
    tasks = _tasks(folder, parameters)
    num_utterances = sum(count for count, _, _ in tasks)
    if num_workers is None:
        num_workers = usable_cores() if num_utterances >= MIN_UTTERANCES_FOR_PROCESSES else 0
    logger.info("Making the synthetic corpus in %s: %d files", folder, num_utterances)
    with Bar("synthetic corpus", num_utterances, is_shown=show_progress) as bar:
        rows = list(itertools.chain.from_iterable(_run(tasks, num_workers, bar.update)))
    _write_lists(paths, parameters, rows)
    with atomic_write(folder / "complete.json") as file:
        json.dump({"files": num_utterances, "seconds": round(sum(row["seconds"] for row in rows), 1)}, file)
    return paths


def corpus_paths(folder: str | Path) -> CorpusPaths:
    """The paths of a corpus in `folder`, made or not."""
    folder = Path(folder)
    return CorpusPaths(
        train_list=folder / "train_list.txt",
        train_path=folder / "train",
        test_list=folder / "trials.txt",
        test_path=folder / "trial",
        noise_path=folder / "musan_split",
        rir_path=folder / "RIRS_NOISES" / "simulated_rirs",
        speakers=folder / "speakers.csv",
        utterances=folder / "utterances.csv",
    )


def _is_complete(folder: Path, parameters: CorpusParameters) -> bool:
    """Whether all is there; else the folder is ready for the work, its parameters written down.

    Raises:
        CorpusError: the folder holds something else.
    """
    wanted = asdict(parameters)
    record_path = folder / "parameters.json"
    if record_path.exists():
        try:
            found = json.loads(record_path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CorpusError(
                f"{record_path} is not a record of a synthetic corpus; delete {folder} or name another folder"
            )
        # Refused where it differs, not made again: deleting thousands of files is the user's decision.
        changed = [
            f"{name} {found.get(name)!r} -> {value!r}" for name, value in wanted.items() if found.get(name) != value
        ]
        if changed:
            raise CorpusError(
                f"{folder} holds a synthetic corpus with other parameters ({', '.join(changed)}); delete it to have it "
                "made again, or name another folder"
            )
        return (folder / "complete.json").exists()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CorpusError(f"{folder} exists and is no synthetic corpus; name an empty or new folder")
    with atomic_write(record_path) as file:
        json.dump(wanted, file, indent=1)
    return False


# A task makes some files and returns one row for each utterance: (number of files, function, arguments).
Row = dict[str, Any]
Task = tuple[int, Callable[..., list[Row]], tuple[Any, ...]]


def _tasks(folder: Path, parameters: CorpusParameters) -> list[Task]:
    tasks: list[Task] = []
    paths = corpus_paths(folder)
    for part, count, utterances, root in (
        ("train", parameters.num_speakers, parameters.utterances_per_speaker, paths.train_path),
        ("trial", parameters.num_trial_speakers, parameters.trial_utterances_per_speaker, paths.test_path),
    ):
        for speaker in range(count):
            place = (root, part, speaker, utterances, parameters.utterances_per_session, parameters.seed)
            tasks.append((utterances, _make_speaker, place))
    # Talkers twice: babble is mixed of three to seven different ones.
    makers = [*(f"noise-{name}" for name in NOISES), "music-music", "speech-talker", "speech-talker"]
    for number in range(parameters.num_noises):
        category, kind = makers[number % len(makers)].split("-")
        path = paths.noise_path / category / "synthetic" / f"{category}-{kind}-{number:04d}" / "00000.wav"
        tasks.append((1, _make_noise, (path, kind, number, parameters.seed)))
    kinds = list(ROOM_KINDS)
    for number in range(parameters.num_rooms):
        kind, room = kinds[number % len(kinds)], f"Room{number // len(kinds) + 1:03d}"
        path = paths.rir_path / kind / room / f"{room}-00001.wav"
        tasks.append((1, _make_room, (path, kind, number, parameters.seed)))
    return tasks


def _run(tasks: list[Task], num_workers: int, advance: Callable[[int], Any]) -> Iterator[list[Row]]:
    """The rows of every task, in order."""
    if num_workers > 1:
        # Spawned, not forked: a fork of a process with torch's threads can hang.
        context = multiprocessing.get_context("spawn")
        try:
            with concurrent.futures.ProcessPoolExecutor(min(num_workers, len(tasks)), mp_context=context) as pool:
                futures = [pool.submit(function, *arguments) for _, function, arguments in tasks]
                results = []
                for (count, _, _), future in zip(tasks, futures, strict=True):
                    results.append(future.result())
                    advance(count)
            yield from results
            return
        except BrokenProcessPool:
            logger.warning("the other processes ended (a script without a main guard?); going on in this one alone")
    for count, function, arguments in tasks:
        yield function(*arguments)
        advance(count)


def _make_speaker(root: Path, part: str, speaker: int, utterances: int, per_session: int, seed: int) -> list[Row]:
    """All utterances of one speaker that are not there yet; one row for each that is there now."""
    keys = (PARTS.index(part), speaker)
    voice = draw_voice(numpy_generator(seed, _VOICE_KEY, *keys))
    name = f"{PREFIX[part]}{speaker:05d}"
    rows = []
    session = None
    for number in range(utterances):
        session_number, within = divmod(number, per_session)
        if within == 0:
            session = None
        path = root / name / f"session{session_number:02d}" / f"{number:05d}.wav"
        if path.exists():
            num_samples = audio_info(path).num_samples
        else:
            session = session or draw_session(numpy_generator(seed, _SESSION_KEY, *keys, session_number))
            generator = numpy_generator(seed, _SENTENCE_KEY, *keys, number)
            phones = draw_phones(generator, int(generator.integers(10, 16)))
            tracks = lay_out(phones, generator, tempo=voice.tempo * session.tempo_factor)
            speech = synthesise(voice, tracks, generator, pitch_shift_octaves=session.pitch_shift_octaves)
            write_audio(path, record(session, speech, generator), SAMPLE_RATE)
            num_samples = len(speech)
        rows.append(
            {
                "part": part, "path": path.relative_to(root).as_posix(), "speaker": name,
                "session": f"session{session_number:02d}", "gender": voice.gender,
                "seconds": round(num_samples / SAMPLE_RATE, 3), "pitch_hz": round(voice.pitch_hz, 1),
                "tract_centimetres": round(voice.tract_centimetres, 2),
            }
        )  # fmt: skip
    return rows


def _make_noise(path: Path, kind: str, number: int, seed: int) -> list[Row]:
    if not path.exists():
        make = {**NOISES, "music": music, "talker": talker}[kind]
        clip = make(numpy_generator(seed, _CLIP_KEY, number), round(NOISE_SECONDS * SAMPLE_RATE))
        write_audio(path, clip, SAMPLE_RATE)
    return []


def _make_room(path: Path, kind: str, number: int, seed: int) -> list[Row]:
    if not path.exists():
        response = draw_room_response(numpy_generator(seed, _ROOM_KEY, number), kind, distance_metres=(0.5, 4.0))
        write_audio(path, response * np.float32(RESPONSE_PEAK / np.abs(response).max()), SAMPLE_RATE)
    return []


def _write_lists(paths: CorpusPaths, parameters: CorpusParameters, rows: list[Row]) -> None:
    write_training_list(paths.train_list, ((row["speaker"], row["path"]) for row in rows if row["part"] == "train"))
    write_trials(paths.test_list, draw_trials([row for row in rows if row["part"] == "trial"], parameters.seed))
    speakers = list({row["speaker"]: row for row in rows}.values())
    _write_table(paths.speakers, ("speaker", "part", "gender", "pitch_hz", "tract_centimetres"), speakers)
    located = [{**row, "path": f"{row['part']}/{row['path']}"} for row in rows]
    _write_table(paths.utterances, ("path", "speaker", "session", "gender", "seconds"), located)


def draw_trials(
    rows: list[Row], seed: int, *, max_targets: int = 12, nontargets_a_target: int = 8
) -> list[tuple[int, str, str]]:
    """Trials among these utterances: targets between sessions, non-targets between speakers, half of one gender.

    At most `max_targets` targets and `max_targets * nontargets_a_target` non-targets for each speaker.
    """
    generator = numpy_generator(seed, _TRIAL_KEY)
    by_speaker: dict[str, list[Row]] = {}
    for row in rows:
        by_speaker.setdefault(row["speaker"], []).append(row)
    trials: list[tuple[int, str, str]] = []
    for speaker, own in by_speaker.items():
        pairs = [(a, b) for a, b in itertools.combinations(own, 2) if a["session"] != b["session"]]
        chosen = generator.permutation(len(pairs))[:max_targets]
        trials += [(1, pairs[i][0]["path"], pairs[i][1]["path"]) for i in sorted(chosen)]
        others = [row for row in rows if row["speaker"] != speaker]
        alike = [row for row in others if row["gender"] == own[0]["gender"]] or others
        wanted = len(chosen) * nontargets_a_target
        seen: set[tuple[str, str]] = set()
        for attempt in range(3 * wanted):
            pool = alike if attempt % 2 else others
            enrol, test = own[int(generator.integers(len(own)))], pool[int(generator.integers(len(pool)))]
            if len(seen) < wanted:
                seen.add((enrol["path"], test["path"]))
        trials += [(0, enrol, test) for enrol, test in sorted(seen)]
    return trials


def _write_table(path: Path, columns: tuple[str, ...], rows: list[Row]) -> None:
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
