"""Train named variants of a recipe with several seeds, and compare them.

    python -m benchmarks.study PLAN --save_path S --train_list L …
    python -m benchmarks.study PLAN … --only "three speeds" --seeds 1 2 3 4
    python -m benchmarks.study PLAN … --table

A plan is a YAML file: `recipe`, `seeds`, `reference` (a variant's name), `common` (options of all
runs) and `variants` (name: additional options, optionally another `recipe`). With
`held_out_speakers`, that many speakers of the training list, drawn with `protocol_seed`, are
excluded from training and used for the test trials (written to S/protocol); without it the trials
are `--test_list`. A variant that only changes `evaluation` is not trained: it scores the
reference's models.

Runs are processes with one thread, two at a time; `--threads` and `--processes` change that.
Results are appended to S/results.jsonl as runs finish; the same command resumes, also in the middle
of a run. Training time excludes evaluations.
"""

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.study_table import table
from speakernet.checkpoint import read_own_checkpoint
from speakernet.cli import run_command
from speakernet.config import load_config
from speakernet.corpora.pairs import hold_out
from speakernet.corpora.trial_lists import write_held_out
from speakernet.data.lists import audio_folder_of, read_training_list
from speakernet.files import atomic_write, exclusive, read_yaml
from speakernet.run_folder import (
    BEST,
    LAST,
    METRICS,
    RESULTS,
    SCORES,
    GrowingFile,
    evaluation_folder,
    later_stages,
)

logger = logging.getLogger(__name__)

RECORDS = "results.jsonl"
RUNS = "runs"
VARIANTS = "variants"
PROTOCOL = "protocol"
NONTARGETS_PER_TARGET = 20
"""In the trials of a protocol: 30 speakers with 8 utterances give 840 targets and 16,800
non-targets."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The variants to compare.

    Attributes:
        recipe: a configuration file, or the name of a packaged recipe.
        seeds: seeds of every variant.
        reference: name of the variant that the others are compared with.
        variants: name -> section -> option -> value, in addition to `common`; `recipe` is not a
            section.
        common: section -> option -> value, for all runs.
        held_out_speakers: speakers of the training list used for the trials; 0: the trials are
            given.
        protocol_seed: seed for drawing them.
    """

    recipe: str
    seeds: list[int]
    reference: str
    variants: dict[str, dict[str, Any]]
    common: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    held_out_speakers: int = 0
    protocol_seed: int = 1

    def settings(self, variant: str) -> dict[str, dict[str, Any]]:
        """All options of a variant, including the common ones."""
        own = {name: values for name, values in self.variants[variant].items() if name != "recipe"}
        return {
            name: {**self.common.get(name, {}), **own.get(name, {})}
            for name in {**self.common, **own}
        }

    def recipe_of(self, variant: str) -> str:
        """The recipe of a variant."""
        return str(self.variants[variant].get("recipe", self.recipe))

    def is_only_scored(self, variant: str) -> bool:
        """Whether a variant only scores the reference's models."""
        return variant != self.reference and set(self.variants[variant]) == {"evaluation"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int

    @property
    def folder(self) -> str:
        """Run folder, relative to the study's folder."""
        return f"{RUNS}/{_as_name(self.variant)}/seed_{self.seed}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("plan", type=Path, help="YAML file with the variants")
    parser.add_argument("--save_path", type=Path, required=True, help="folder of the study")
    parser.add_argument(
        "--train_list", type=Path, required=True, help="training list, in the folder with the audio"
    )
    parser.add_argument(
        "--test_list", type=Path, help="trials, if the plan has no held_out_speakers"
    )
    parser.add_argument("--musan_path", default="", help="noise")
    parser.add_argument("--rir_path", default="", help="RIRs")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only these variants (and the reference)"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, metavar="SEED", help="seeds to use instead of the plan's"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="parallel runs (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="threads per run (default %(default)s)"
    )
    parser.add_argument(
        "--table", action="store_true", help="do not train; show the results so far"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing, then show the table."""
    plan = read_plan(arguments.plan)
    if arguments.seeds:
        plan = dataclasses.replace(plan, seeds=arguments.seeds)
    names = _wanted(plan, arguments.only)
    study = Study(plan, arguments)
    with exclusive(arguments.save_path):
        failed = [] if arguments.table else study.carry_out(names, arguments.processes)
        text = table(study.records(), plan.reference, names, study.scores_of, study.trials)
        with atomic_write(arguments.save_path / "table.md") as file:
            file.write(text)
    sys.stdout.write(text)
    for one in failed:
        logger.error(
            "%s, seed %d failed: see %s", one.variant, one.seed, arguments.save_path / one.folder
        )
    return 1 if failed else 0


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        ValueError: no such file, unknown or missing keys, or an unknown reference.
    """
    if not path.is_file():
        raise ValueError(f"there is no plan {path}; see benchmarks/studies/ for examples")
    values = read_yaml(path.read_text(encoding="utf-8"), str(path))
    known = {field.name: field for field in dataclasses.fields(Plan)}
    required = [
        name
        for name, field in known.items()
        if name in ("recipe", "seeds", "reference", "variants")
    ]
    if not isinstance(values, dict) or set(values) - set(known) or not set(required) <= set(values):
        raise ValueError(
            f"{path}: expected at least the keys {', '.join(required)}, and only {', '.join(known)}"
        )
    variants = {str(name): settings or {} for name, settings in values["variants"].items()}
    plan = Plan(**{**values, "variants": variants, "common": values.get("common") or {}})
    if plan.reference not in plan.variants:
        raise ValueError(
            f"{path}: reference: {plan.reference}; expected one of {', '.join(plan.variants)}"
        )
    folders = {_as_name(name) for name in plan.variants}
    if len(folders) < len(plan.variants):
        raise ValueError(f"{path}: variant names must differ in letters or digits")
    return plan


class Study:
    """A plan with its data, and a folder that records finished runs.

    Args:
        plan: the variants to compare.
        arguments: the parsed command line.

    Raises:
        ValueError: no trials, or lists that cannot be read.
    """

    def __init__(self, plan: Plan, arguments: argparse.Namespace) -> None:
        self.plan = plan
        self.folder = Path(arguments.save_path)
        self.threads = arguments.threads
        self._plugins = [word for path in arguments.plugin for word in ("--plugin", str(path))]
        audio = audio_folder_of(arguments.train_list)
        self.train_list = Path(arguments.train_list)
        self.trials = arguments.test_list
        test_path = audio if self.trials is None else audio_folder_of(self.trials)
        if plan.held_out_speakers:
            self.train_list, self.trials = self._write_protocol()
            test_path = audio
        elif self.trials is None:
            raise ValueError("the plan has no held_out_speakers; give trials with --test_list")
        named = {
            "data.train_list": self.train_list,
            "data.train_path": audio,
            "data.test_list": self.trials,
            "data.test_path": test_path,
            "augment.noise_path": arguments.musan_path,
            "augment.rir_path": arguments.rir_path,
        }
        self._data = [word for key, value in named.items() for word in (f"--{key}", str(value))]

    def carry_out(self, names: list[str], processes: int) -> list[Run]:
        """Train and score what is missing; returns the runs that failed.

        Raises:
            ValueError: a variant with an invalid configuration, or one that was already run with
                other settings.
        """
        self._refuse_changed(names)
        for name in names:
            with atomic_write(self._file_of(name)) as file:
                yaml.safe_dump(self.plan.settings(name), file, sort_keys=False)
            # Check all variants now: a misspelt option of the last variant should not surface hours
            # later.
            load_config([*self._configs(name), *self._data, "--save_path", str(self.folder)])
        done = {(one["variant"], one["seed"]) for one in self.records()}
        left = [
            Run(name, seed)
            for name in names
            for seed in self.plan.seeds
            if (name, seed) not in done
        ]
        failed: list[Run] = []
        # Train first: variants that are only scored need the reference's models.
        for is_scored in (False, True):
            part = [one for one in left if self.plan.is_only_scored(one.variant) == is_scored]
            with ThreadPoolExecutor(processes) as pool:
                failed += [
                    one
                    for one, is_done in zip(part, pool.map(self._do, part), strict=True)
                    if not is_done
                ]
        return failed

    def records(self) -> list[dict[str, Any]]:
        """The results so far, in chronological order."""
        path = self.folder / RECORDS
        return (
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if path.is_file()
            else []
        )

    def scores_of(self, record: Mapping[str, Any]) -> Path:
        """The score file of a record."""
        return self.folder / str(record["scores"])

    def _do(self, one: Run) -> bool:
        """Train or score, and append the result; returns False if it failed."""
        folder = self.folder / one.folder
        is_scored = self.plan.is_only_scored(one.variant)
        words = [
            *self._configs(one.variant),
            "--seed",
            str(one.seed),
            "--save_path",
            str(folder),
            *self._data,
        ]
        if is_scored:
            model = self.folder / Run(self.plan.reference, one.seed).folder / BEST
            words += ["--eval", "--initial_model", str(model)]
        folder.mkdir(parents=True, exist_ok=True)
        load = _load()
        begin = time.time()
        with (folder / "output.txt").open("w") as output:
            command = [sys.executable, "-m", "speakernet", "train", *self._plugins, *words]
            status = subprocess.run(
                command,
                env=_environment(self.threads),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                check=False,
            ).returncode
        if status:
            logger.warning("%s, seed %d: exit status %d", one.variant, one.seed, status)
            return False
        found = evaluation_folder(folder, self.trials) if is_scored else folder
        results = json.loads((found / RESULTS).read_text(encoding="utf-8"))
        record = {
            "variant": one.variant,
            "seed": one.seed,
            "recipe": self.plan.recipe_of(one.variant),
            "settings": self.plan.settings(one.variant),
            **{
                name: results[name]
                for name in ("eer_percent", "eer_interval_percent", "min_dcf", "precision")
            },
            "training_seconds": None if is_scored else training_seconds(folder),
            "wall_seconds": round(time.time() - begin, 1),
            "threads": self.threads,
            "load": [load, _load()],
            "scores": str((found / SCORES).relative_to(self.folder).as_posix()),
            "date": results["date"],
        }
        logger.info("%s, seed %d: EER %.2f %%", one.variant, one.seed, record["eer_percent"])
        return GrowingFile(self.folder / RECORDS).append((json.dumps(record) + "\n").encode())

    def _refuse_changed(self, names: list[str]) -> None:
        for one in self.records():
            name = one["variant"]
            planned = (
                (self.plan.recipe_of(name), self.plan.settings(name)) if name in names else None
            )
            if planned and planned != (one.get("recipe", self.plan.recipe), one["settings"]):
                raise ValueError(
                    f"{self.folder / RECORDS}: {name!r} was run with other settings "
                    f"({one['settings']}) than in the plan; rename the variant, or choose another "
                    "--save_path"
                )

    def _write_protocol(self) -> tuple[Path, Path]:
        """Write the training list without the held-out speakers, and the trials among them."""
        training = read_training_list(self.train_list)
        held = hold_out(
            training, self.plan.held_out_speakers, self.plan.protocol_seed, NONTARGETS_PER_TARGET
        )
        return write_held_out(held, self.folder / PROTOCOL)

    def _configs(self, name: str) -> list[str]:
        return ["--config", self.plan.recipe_of(name), "--config", str(self._file_of(name))]

    def _file_of(self, name: str) -> Path:
        path = self.folder / VARIANTS / f"{_as_name(name)}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def training_seconds(folder: Path) -> float:
    """Duration of a run's training over all stages and starts, excluding evaluations."""
    total = 0.0
    for stage in (folder, *later_stages(folder).values()):
        if (stage / LAST).is_file():
            total += float(read_own_checkpoint(stage / LAST)["training"]["state"]["seconds"])
            lines = (
                json.loads(line)
                for line in (stage / METRICS).read_text(encoding="utf-8").splitlines()
            )
            total -= sum(line.get("evaluation_seconds", 0.0) for line in lines)
    return round(total, 1)


def _wanted(plan: Plan, only: list[str] | None) -> list[str]:
    unknown = sorted(set(only or ()) - set(plan.variants))
    if unknown:
        raise ValueError(f"--only {unknown[0]!r}: the plan has {', '.join(plan.variants)}")
    return [name for name in plan.variants if not only or name in only or name == plan.reference]


def _environment(threads: int) -> dict[str, str]:
    """The environment of a run; with one thread each, parallel runs do not wait for each other."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _load() -> float:
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else float(np.nan)


def _as_name(variant: str) -> str:
    """A variant's name in file names.

    >>> _as_name("speeds 3, half real")
    'speeds_3_half_real'
    """
    return "_".join(
        "".join(one if one.isalnum() or one in "-." else " " for one in variant).split()
    )


if __name__ == "__main__":
    sys.exit(run_command("benchmarks.study", "python -m benchmarks.study", sys.argv[1:]))
