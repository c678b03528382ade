"""A study: train variants of a recipe with several seeds, and compare them.

Every run is a process of `speakernet train` with a folder of its own. Its figures are added to the
study's `results.jsonl` when it ends, so the same command resumes a study, also in the middle of a
run. A variant that only changes `evaluation` is not trained: it scores the reference's models.
"""

import functools
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from speakernet.assembly.inputs import make_synthetic_corpus, with_default_paths
from speakernet.config import Config, LoadedConfig
from speakernet.config.aliases import ALIASES
from speakernet.config.loading import keys_of
from speakernet.corpora.pairs import hold_out
from speakernet.corpora.trial_lists import write_held_out
from speakernet.data.lists import read_training_list, read_trials
from speakernet.evaluation.figures import why_no_error_rate
from speakernet.evaluation.report.page import Table
from speakernet.evaluation.speakers import speakers_of
from speakernet.evaluation.study import (
    RECORDS,
    Plan,
    Run,
    name_of_files,
    read_records,
    record_of,
    study_table,
)
from speakernet.files import atomic_write, parallel_map
from speakernet.machine.facts import usable_cores
from speakernet.run_folder import BEST, GrowingFile

logger = logging.getLogger(__name__)

VARIANTS = "variants"
PROTOCOL = "protocol"
PROTOCOL_SEED = 1
"""Draws the held-out speakers; the same for every study, so that studies can be compared."""
OUTPUT = "output.txt"
"""In a run's folder: what the process printed."""
NONTARGETS_PER_TARGET = 20
"""In the trials of a protocol: 30 speakers with 8 utterances give 840 targets and 16,800
non-targets."""
SET_BY_STUDY = {
    "runtime.seed": "the plan's seeds, or --seeds, set it",
    "training.save_path": "every run has a folder below --save_path",
    "eval": "a study trains its variants",
}


class Study:
    """A plan with its data, and the folder that records finished runs.

    Args:
        plan: the variants to compare.
        folder: the folder of the study.
        words: configuration options of all runs, as on the command line of `train`.
        plugins: options `--plugin FILE` of all runs.
        load: loads the configuration of such words.

    Raises:
        ValueError: invalid options, or trials without error rates.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        words: Sequence[str],
        plugins: Sequence[str],
        load: Callable[[Sequence[str]], LoadedConfig],
    ) -> None:
        # Checked before anything is written, so that a refused study leaves its folder unchanged.
        for key in keys_of(words) & SET_BY_STUDY.keys():
            raise ValueError(f"{key} cannot be an option of a study: {SET_BY_STUDY[key]}")
        self.plan = plan
        self.folder = folder
        self._words = list(words)
        self._plugins = plugins
        self._load = load
        config = self._config_of(plan.reference)
        if plan.held_out_speakers:
            self._words += self._hold_out(config)
            config = self._config_of(plan.reference)
        self._test_list = _test_list_of(config)
        # Read before training, because there is no table to make without labels.
        self._trials = read_trials(self._test_list)
        if reason := why_no_error_rate(self._trials):
            raise ValueError(reason)
        self._speakers = speakers_of(self._trials, config.evaluation.speaker_table or None)

    def check(self, variants: Sequence[str]) -> None:
        """Refuse variants with an invalid configuration, and those already run with other
        settings.
        """
        # A study may take days, and its plan is edited meanwhile. New variants and seeds are fine,
        # but the name of a variant must keep its meaning.
        for record in read_records(self.folder):
            name = record["variant"]
            if name not in variants:
                continue
            # Otherwise the table would show results of other settings under this name.
            settings = self.plan.settings(name)
            if (record["recipe"], record["settings"]) != (self.plan.recipe, settings):
                raise ValueError(
                    f"{self.folder / RECORDS}: {name!r} was run with other settings than in the "
                    f"plan ({record['settings']}); rename the variant, or choose another "
                    "--save_path"
                )
        of_all = keys_of(self._words)
        for name in variants:
            # Otherwise one of the two would be ignored without a message.
            for key in _keys_in(self.plan.changes(name)):
                if any(f"{other}.".startswith(f"{key}.") for other in of_all):
                    raise ValueError(
                        f"{key}: the variant {name!r} sets it, and so does the command line (or "
                        "held_out_speakers) for all runs; leave out one of them"
                    )
            # Now: a misspelt option of the last variant should not surface hours later.
            test_list = _test_list_of(self._config_of(name))
            if test_list != self._test_list:
                raise ValueError(
                    f"the variant {name!r} is scored on {test_list}, the reference on "
                    f"{self._test_list}; expected one list for all variants"
                )

    def carry_out(self, variants: Sequence[str], num_processes: int) -> list[Run]:
        """Train and score what is missing; returns the runs that failed."""
        done = {(record["variant"], record["seed"]) for record in read_records(self.folder)}
        environment = dict(os.environ)
        if num_processes > 1:
            # Runs that share cores would wait for each other.
            threads = max(1, usable_cores() // num_processes)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        failed = []
        # Variants that are only scored need the reference's models.
        for is_scored in (False, True):
            runs = []
            for name, seed in itertools.product(variants, self.plan.seeds):
                if self.plan.is_only_scored(name) == is_scored and (name, seed) not in done:
                    runs.append(Run(name, seed))
            work = functools.partial(self._carry_out, environment=environment)
            results = parallel_map(work, runs, num_processes, "runs", total=len(runs), unit="run")
            failed += [run for run, is_done in zip(runs, results, strict=True) if not is_done]
        return failed

    def table(self, variants: Sequence[str]) -> Table:
        """The results so far."""
        return study_table(self.folder, variants, self.plan.reference, self._trials, self._speakers)

    def _carry_out(self, run: Run, environment: Mapping[str, str]) -> bool:
        """Train or score, and record the results; returns whether that succeeded."""
        folder = self.folder / run.folder
        is_scored = self.plan.is_only_scored(run.variant)
        # Last, so that the plan cannot override them.
        words = [*self._words_of(run.variant), "--seed", str(run.seed), "--save_path", str(folder)]
        if is_scored:
            model = self.folder / Run(self.plan.reference, run.seed).folder / BEST
            words += ["--eval", "--initial_model", str(model)]
        folder.mkdir(parents=True, exist_ok=True)
        logger.info("%s: started, with its output in %s", run, folder / OUTPUT)
        # A process of its own: starting Python takes seconds, but a crash ends only this run, and
        # the run can be repeated by hand.
        with (folder / OUTPUT).open("w", encoding="utf-8") as output:
            command = [sys.executable, "-m", "speakernet", "train", *self._plugins, *words]
            status = subprocess.run(
                command,
                env=environment,
                stdout=output,
                stderr=output,
                # A run must not wait for input, because its questions go to a file.
                stdin=subprocess.DEVNULL,
                check=False,
            ).returncode
        if status:
            logger.error("%s: failed with status %d; see %s", run, status, folder / OUTPUT)
            return False
        record = record_of(self.plan, run, self.folder, self._trials)
        logger.info("%s: EER %.2f %%", run, record["eer_percent"])
        # Appended when a run ends, so that a killed study loses only the runs in progress.
        return GrowingFile(self.folder / RECORDS).append((json.dumps(record) + "\n").encode())

    def _config_of(self, variant: str) -> Config:
        words = [*self._words_of(variant), "--save_path", str(self.folder)]
        return with_default_paths(make_synthetic_corpus(self._load(words).config))

    def _words_of(self, variant: str) -> list[str]:
        """The configuration of a variant, as on a command line; its file is written first."""
        path = self.folder / VARIANTS / f"{name_of_files(variant)}.yaml"
        with atomic_write(path) as file:
            yaml.safe_dump(self.plan.settings(variant), file, sort_keys=False)
        # After the files on the command line, so that it holds.
        return ["--config", self.plan.recipe, *self._words, "--config", str(path)]

    def _hold_out(self, config: Config) -> list[str]:
        """Write the training list without the held-out speakers and the trials among them; returns
        the options that name them.
        """
        if not config.data.train_list:
            raise ValueError(
                "held_out_speakers: there is no data.train_list to draw them from (--train_list "
                "FILE)"
            )
        held_out = hold_out(
            read_training_list(config.data.train_list),
            self.plan.held_out_speakers,
            PROTOCOL_SEED,
            NONTARGETS_PER_TARGET,
        )
        train_list, trials = write_held_out(held_out, self.folder / PROTOCOL)
        named = {
            "train_list": train_list,
            "train_path": config.data.train_path,
            "test_list": trials,
            # The held-out speakers come from the training list.
            "test_path": config.data.train_path,
        }
        words = []
        for name, value in named.items():
            words += [f"--data.{name}", str(value)]
        return words


def _test_list_of(config: Config) -> str:
    """The list whose results are those of a run."""
    data = config.data
    if not data.test_list and not data.test_lists:
        raise ValueError(
            "there are no trials: give data.test_list (--test_list FILE), or held_out_speakers in "
            "the plan"
        )
    return data.test_list or next(iter(data.test_lists.values())).list


def _keys_in(settings: Mapping[str, Any]) -> Iterator[str]:
    """The dotted keys of options in sections."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{option}" for option in value)
        else:
            # A plan may use short names, which must be recognised as the options they stand for.
            yield ALIASES.get(name, name)
