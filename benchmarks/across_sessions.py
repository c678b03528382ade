"""Measure error rates on speakers unseen in adaptation: an unchanged model, adapted, fine-tuned,
and both.

    python -m benchmarks.across_sessions S --model model.pt --calls $DATA/telephone_calls
    --divisions 10 python -m benchmarks.across_sessions S --model model.pt --calls … --fine_tune
    options.yaml --divisions 1

The folder of calls has `utterances.csv` (path, speaker, phone) and `trials.txt` (pairs of different
calls). Each division splits the speakers of the trials into five parts at random, seeded by its
number (from 0). Back end and weights are fitted on the calls of all speakers outside one part and
scored on the trials within it; the trials of the five parts form one list. `--fine_tune` trains one
network per part with `finetune.yaml` and the given options, and its embeddings go through the same
back ends. `--also NAME=FILE` adds a row for another, unchanged model.

Models and embeddings are kept in S, so the same command resumes an interrupted run.
"""

import argparse
import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import speakernet
from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.cli import run_command
from speakernet.data.lists import read_trials
from speakernet.data.opening import open_source
from speakernet.evaluation import adaptation
from speakernet.evaluation.embedding import embed_utterances, weights_digest
from speakernet.evaluation.figures import SpeakerBootstrap, mean_differences
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.scoring import Plda
from speakernet.evaluation.speakers import read_csv
from speakernet.files import atomic_write
from speakernet.inference.adapt import SHRINKAGES, TOTAL_SHARE, for_telephones, scores_of
from speakernet.models.speaker_net import SpeakerNet, folded
from speakernet.options import DEFAULT_SEED
from speakernet.run_folder import BEST

NUM_PARTS = 5
NUM_DRAWS = 1000
SHRINKAGE = SHRINKAGES[-1]
FLOOR_OF_WHOLE_DB = 20.0
AS_IT_IS = "as it is"
FINE_TUNED = "fine-tuned"
BACK_ENDS: dict[str, Callable[..., adaptation.Transform]] = {
    AS_IT_IS: lambda rows, labels: adaptation.Transform(
        ((np.eye(rows.shape[1]), np.zeros(rows.shape[1])),)
    ),
    "mean": adaptation.centring,
    "whitening": functools.partial(adaptation.whitening, shrinkage=SHRINKAGE),
    "WCCN": functools.partial(adaptation.wccn, shrinkage=SHRINKAGE, total=TOTAL_SHARE),
    "PLDA": functools.partial(adaptation.plda, shrinkage=SHRINKAGE),
}
"""Name in the table -> function that fits it to embeddings and speakers; the first three ignore the
speakers."""


class Calls(NamedTuple):
    """The recordings, and the trials as pairs of their rows."""

    folder: Path
    names: list[str]
    speakers: np.ndarray
    """(recordings,) speaker numbers."""
    phones: np.ndarray
    """(recordings,) type of telephone."""
    enrol: np.ndarray
    test: np.ndarray
    labels: np.ndarray

    def parts(self, division: int) -> np.ndarray:
        """The part of each recording's speaker, (recordings,); -1 if the speaker is in no trial."""
        tested = np.unique(self.speakers[self.enrol])
        part = np.full(self.speakers.max() + 1, -1)
        part[np.random.default_rng(division).permutation(tested)] = (
            np.arange(len(tested)) % NUM_PARTS
        )
        return part[self.speakers]

    def trials_within(self, parts: np.ndarray, part: int) -> np.ndarray:
        """Rows of the trials between two speakers of a part."""
        return np.flatnonzero((parts[self.enrol] == part) & (parts[self.test] == part))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("save_path", type=Path, help="folder for models, embeddings and table.md")
    parser.add_argument(
        "--model", type=Path, required=True, help="the model file to adapt and fine-tune"
    )
    parser.add_argument(
        "--calls", type=Path, required=True, help="folder with utterances.csv, trials.txt and audio"
    )
    parser.add_argument(
        "--divisions", type=int, default=1, help="number of divisions into five parts (%(default)s)"
    )
    parser.add_argument(
        "--fine_tune",
        type=Path,
        metavar="YAML",
        help="also fine-tune, with these additional options",
    )
    parser.add_argument(
        "--parts", type=int, nargs="+", default=list(range(NUM_PARTS)), help="only these parts"
    )
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="NAME=FILE", help="other models to score unchanged"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train and embed what is missing, then print the table."""
    folder = arguments.save_path
    calls = read_calls(arguments.calls)
    folder.mkdir(parents=True, exist_ok=True)
    floored = with_floor(arguments.model, folder / "floor.pt")
    prepared = for_telephones(speakernet.load(arguments.model).net)
    others = {"as published": (arguments.model, "published.npz")}
    for one in arguments.also:
        name, _, path = one.partition("=")
        others[name] = (Path(path), f"{name}.npz")
    common = {
        name: embedded(_net(path), calls, folder / kept) for name, (path, kept) in others.items()
    }
    pldas = {name: speakernet.load(path).plda for name, (path, _) in others.items()}
    own = {
        "energy floor": embedded(_net(floored), calls, folder / "floor.npz"),
        "as adapt embeds": embedded(prepared, calls, folder / "prepared.npz"),
    }
    scored: dict[str, list[np.ndarray]] = {}
    rows = []
    for division in range(arguments.divisions):
        parts = calls.parts(division)
        for part in arguments.parts:
            trials = calls.trials_within(parts, part)
            rows.append(np.stack([trials, np.full(len(trials), division)]))
            found = {
                name: scores(calls, one, parts, part, AS_IT_IS, pldas[name])
                for name, one in common.items()
            }
            networks = dict(own)
            if arguments.fine_tune:
                model = fine_tuned(arguments, calls, floored, division, part)
                networks[FINE_TUNED] = embedded(_net(model), calls, model.parent / "calls.npz")
            for network, embeddings in networks.items():
                for name in BACK_ENDS:
                    found[f"{network}, {name}"] = scores(calls, embeddings, parts, part, name)
            for name, values in found.items():
                scored.setdefault(name, []).append(values)
    text = table(
        calls,
        {name: np.concatenate(values) for name, values in scored.items()},
        np.concatenate(rows, axis=1),
    )
    with atomic_write(folder / "table.md") as file:
        file.write(text)
    sys.stdout.write(text)
    return 0


def read_calls(folder: Path) -> Calls:
    """Read the recordings and the trials of a folder."""
    _, rows = read_csv(folder / "utterances.csv", ("path", "speaker", "phone"))
    trials = read_trials(folder / "trials.txt")
    number = {row["path"]: at for at, row in enumerate(rows)}
    places = np.array([number[name] for name in trials.names])
    _, speakers = np.unique([row["speaker"] for row in rows], return_inverse=True)
    assert trials.labels is not None, "the trials have labels"
    names = [row["path"] for row in rows]
    phones = np.array([row["phone"] for row in rows])
    return Calls(
        folder,
        names,
        speakers,
        phones,
        places[trials.enrol],
        places[trials.test],
        trials.labels == 1,
    )


def with_floor(model: Path, out: Path) -> Path:
    """Copy the model and add the energy floor that is best for whole recordings."""
    contents = read_checkpoint(model)
    contents["front_end"]["options"]["energy_floor_db"] = FLOOR_OF_WHOLE_DB
    write_checkpoint(out, contents)
    return out


def _net(model: Path) -> SpeakerNet:
    return speakernet.load(model).net


def embedded(net: SpeakerNet, calls: Calls, kept: Path) -> np.ndarray:
    """Embeddings of all calls, (recordings, dim) float64; read from `kept` if they are from this
    network.
    """
    described = f"{weights_digest(net.weights())} {net.spec()} {net.preparation}"
    if kept.is_file():
        with np.load(kept) as found:
            if str(found["network"]) == described:
                return found["embeddings"].astype(np.float64)
    source = open_source(calls.folder, net.sample_rate)
    options = EvaluationOptions(embedding="whole")
    device = next(net.parameters()).device
    rows = embed_utterances(
        folded(net), source, calls.names, options, device=device, wrapped_seconds=0.0
    )[:, 0]
    np.savez(kept, embeddings=rows, network=np.array(described))
    return rows.astype(np.float64)


def fine_tuned(
    arguments: argparse.Namespace, calls: Calls, model: Path, division: int, part: int
) -> Path:
    """Fine-tune on the calls of all speakers outside a part, with `speakernet train`; returns the
    model file.
    """
    folder = arguments.save_path / f"division_{division}" / f"part_{part}"
    if (folder / "calls.npz").is_file():
        return folder / BEST
    folder.mkdir(parents=True, exist_ok=True)
    parts, (train_list, trial_list) = (
        calls.parts(division),
        (folder / "train_list.txt", folder / "trials.txt"),
    )
    learned = np.flatnonzero(parts != part)
    with atomic_write(train_list) as file:
        file.writelines(f"p{calls.speakers[row]} {calls.names[row]}\n" for row in learned)
    with atomic_write(trial_list) as file:
        # Training needs a trial list; a sample is enough, since all trials are scored here.
        for row in calls.trials_within(parts, part)[::20]:
            first, second = (calls.names[side[row]] for side in (calls.enrol, calls.test))
            file.write(f"{calls.labels[row]:d} {first} {second}\n")
    given: Mapping[str, Any] = {
        "training.initial_model": model,
        "training.save_path": folder,
        # The trials are the test, so they must not choose the epoch.
        "training.final_model": "last",
        "training.patience": 0,
        "data.train_list": train_list,
        "data.train_path": calls.folder,
        "data.test_list": trial_list,
        "data.test_path": calls.folder,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "speakernet", "train", "--config", "finetune.yaml"]
    with (folder / "output.txt").open("w") as output:
        options = ["--config", str(arguments.fine_tune), *words]
        subprocess.run(
            [*command, *options], check=True, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    return folder / BEST


def scores(
    calls: Calls,
    embeddings: np.ndarray,
    parts: np.ndarray,
    part: int,
    back_end: str,
    own: Plda | None = None,
) -> np.ndarray:
    """Scores of the trials within a part, with a back end fitted on the other parts; `own` is the
    model's PLDA.
    """
    others = parts != part
    trials = calls.trials_within(parts, part)
    transform = BACK_ENDS[back_end](embeddings[others], calls.speakers[others])
    transform = transform if own is None else dataclasses.replace(transform, plda=own)
    return scores_of(
        transform, transform.apply(embeddings), calls.enrol[trials], calls.test[trials]
    )


def table(calls: Calls, scored: Mapping[str, np.ndarray], rows: np.ndarray) -> str:
    """Format a row for each system from its scores; `rows`, (2, scores), are their trials and
    divisions.

    EERs, overall and for pairs with the same or different phones, are means over the divisions
    (lowest to highest). The interval, and the gain over the row above with the same draws of
    speakers, treat all divisions as one list.
    """
    trials, divisions = rows
    enrol = calls.enrol[trials]
    test = calls.test[trials]
    labels = calls.labels[trials]
    same_phone = calls.phones[enrol] == calls.phones[test]
    people = calls.speakers
    lines = [
        f"{len(np.unique(divisions))} divisions, {len(trials)} trials, {labels.sum()} of the same "
        "speaker",
        "",
        "| system | EER % (lowest to highest) | interval over speakers | same, different phone | "
        "gain over row above |",
        "|---|---|---|---|---|",
    ]
    before = None
    for name, values in scored.items():
        found = [
            _eers(values, labels, divisions, is_in)
            for is_in in (np.ones_like(labels), same_phone, ~same_phone)
        ]
        every, same, other = (np.mean(one) for one in found)
        bootstrap = SpeakerBootstrap(values, labels, people[enrol], people[test], {})
        low, high = bootstrap.measure(NUM_DRAWS, DEFAULT_SEED).eer_interval_percent or (
            np.nan,
            np.nan,
        )
        gain = ""
        if before is not None:
            (gained,) = mean_differences([bootstrap], [before], NUM_DRAWS, DEFAULT_SEED)
            gain = "{:.2f} ({:.2f} to {:.2f})".format(
                gained.value, *(gained.interval or (np.nan, np.nan))
            )
        spread = f"{every:.2f} ({min(found[0]):.2f} to {max(found[0]):.2f})"
        lines.append(
            f"| {name} | {spread} | {low:.1f} to {high:.1f} | {same:.1f}, {other:.1f} | {gain} |"
        )
        before = bootstrap
    return "\n".join(lines) + "\n"


def _eers(
    values: np.ndarray, labels: np.ndarray, divisions: np.ndarray, is_in: np.ndarray
) -> list[float]:
    """The EER in percent of each division, over the trials with `is_in`."""
    chosen = [is_in & (divisions == one) for one in np.unique(divisions)]
    return [eer(values[one], labels[one]) for one in chosen]


if __name__ == "__main__":
    sys.exit(
        run_command(
            "benchmarks.across_sessions", "python -m benchmarks.across_sessions", sys.argv[1:]
        )
    )
