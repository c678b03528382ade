"""The inputs of a run: paths, lists, audio, voices and device, each read or chosen once.

Stages, checks, validation, evaluation, mean embedding and cohort share them, because reading a list
of a million rows takes a second, and reading its audio headers takes minutes.
"""

import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import speakernet
from speakernet import distributed
from speakernet.config import Config, ConfigError
from speakernet.config.schema import with_options
from speakernet.corpora.synthetic import is_synthetic, make_corpus
from speakernet.data.batches import speed_fractions
from speakernet.data.joined import join
from speakernet.data.lists import (
    TrainingList,
    TrialList,
    audio_folder_of,
    read_model_trials,
    read_training_list,
)
from speakernet.data.lookup import LONG_LIST_BYTES, LookupTable, map_training_list
from speakernet.data.opening import open_source
from speakernet.data.sampling import Voices
from speakernet.data.sources import AudioSource
from speakernet.evaluation.cohort import speakers_to_leave_out
from speakernet.files import sha256_of
from speakernet.options import freeze

logger = logging.getLogger(__name__)

MAY_DIFFER = (
    "_path",
    "_list",
    "test_lists",
    "corpora",
    "_corpus",
    "speaker_table",
    "initial_model",
)
"""Ends of the names of options that name files, which may lie elsewhere on another machine."""
HEADER_THREADS = (
    16  # more than cores, because reading headers waits for the disk, especially a remote one
)


class TrainingInput(NamedTuple):
    """A training list and its audio."""

    rows: TrainingList
    source: AudioSource

    @property
    def table(self) -> LookupTable:
        """Facts from the audio headers, row by row."""
        return self.source.lookup_table(self.rows.paths, HEADER_THREADS)


class TrialInput(NamedTuple):
    """A trial list and its audio."""

    trials: TrialList
    source: AudioSource


class Inputs:
    """The lists and audio of a run, each read on first use; empty audio paths default to the list's
    folder.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device
        self._data = with_default_paths(config).data
        self._seed = config.runtime.seed
        self._open = functools.partial(
            open_source,
            sample_rate=self._data.sample_rate,
            shard_cache_gigabytes=self._data.shard_cache_gigabytes,
            show_progress=distributed.is_main(),
        )
        self._read_trials = functools.partial(
            read_model_trials, enrolment=self._data.enrolment_list
        )
        self._kept: dict[tuple[Any, Path], Any] = {}

    @functools.cached_property
    def training(self) -> TrainingInput:
        """The training list without the speakers held out for validation."""
        return self._held_out[0] if self._data.validation_speakers else self.listed

    @functools.cached_property
    def validation(self) -> TrialInput:
        """The trials that choose the best checkpoint."""
        if self._data.validation_speakers:
            return self._held_out[1]
        return self.trial_input(self._data.validation_list, self._data.validation_path)

    @functools.cached_property
    def test(self) -> TrialInput:
        """The trials that are reported."""
        test = self.trial_input(self._data.test_list, self._data.test_path)
        # With the enrolment list of another corpus, all models would be reported as missing audio.
        if enrolment := self._data.enrolment_list:
            with_models = [named for named in (test, *self._named.values()) if named.trials.models]
            if not with_models:
                raise ConfigError(
                    f"{enrolment} has none of the models of {test.trials.source}, such as "
                    f"{test.trials.pair(0)[0]!r}; give the enrolment list of its corpus "
                    "(--data.enrolment_list)"
                )
            for trials, source in with_models:
                _refuse_missing(trials, source)
        return test

    def beside(self, trial_list: TrialInput) -> dict[str, TrialInput]:
        """The lists of data.test_lists by name, except this one and missing optional ones."""
        trials, source = trial_list
        beside = {}
        for name, named in self._named.items():
            # By identity, which is enough because every list is read only once.
            if named.trials is not trials or named.source is not source:
                beside[name] = named
        return beside

    def has_training_list(self) -> bool:
        """Whether the training list, or every list of several corpora, exists."""
        return all(path and Path(path).exists() for path in self._data.train_lists)

    def training_if_listed(self) -> TrainingInput | None:
        """The training list, unless its file is missing."""
        return self.training if self.has_training_list() else None

    @property
    def enrolment(self) -> str:
        """SHA-256 of the enrolment list; empty without one."""
        path = self._data.enrolment_list
        return self._once(sha256_of, path) if path else ""  # type: ignore[no-any-return]

    def trial_lists(self) -> list[TrialInput]:
        """All trial lists of a training run; some may be the same."""
        return [self.validation, self.test, *self.beside(self.test).values()]

    def corpus_facts(self) -> dict[str, Any]:
        """What the network is trained on, as plain values for its model file."""
        data = self._data
        rows = self.training.rows
        table = self.training.table
        # A packed corpus lies elsewhere, but its list is that of the recordings.
        places = [{corpus.train_list, corpus.train_path} for corpus in data.corpora.values()]
        places = places or [{data.train_list, data.train_path}]
        return {
            "list": rows.source,
            "is_synthetic": all(any(map(is_synthetic, place - {""})) for place in places),
            "speakers": len(rows.speakers),
            "utterances": len(rows),
            "hours": round(float(table.num_samples.sum()) / table.sample_rate / 3600, 3),
            "recorded_at_hz": np.unique(table.sample_rates).tolist(),
        }

    def checksums(self, *, of_training: bool = True) -> dict[str, str]:
        """Checksums of the test lists and their audio, and of the training run's other lists, by
        option.
        """
        checksums = {
            "data.test_list (SHA-256)": self.test.trials.sha256,
            "the audio of data.test_path": self.test.source.identity,
        }
        if self.enrolment:
            checksums["data.enrolment_list (SHA-256)"] = self.enrolment
        for name, (trials, source) in self._named.items():
            checksums[f"data.test_lists.{name} (SHA-256)"] = trials.sha256
            checksums[f"the audio of data.test_lists.{name}"] = source.identity
        if not of_training:
            return checksums
        training = self.training
        validation = self.validation
        # A folder has no checksum of its audio, because reading a million files takes hours.
        # Lengths are known anyway, and differ if the same names refer to other recordings.
        lengths = zlib.crc32(training.table.num_samples.astype(np.int64).data)
        return checksums | {
            "data.train_list (SHA-256)": training.rows.sha256,
            "the audio of data.train_path": training.source.identity,
            "the lengths of the audio of data.train_list (CRC-32)": f"{lengths:08x}",
            "data.validation_list (SHA-256)": validation.trials.sha256,
            "the audio of data.validation_path": validation.source.identity,
        }

    def training_input(self, path: str | Path, root: str | Path = "") -> TrainingInput:
        """Any training list, with its audio below `root` (default: `lists.audio_folder_of`)."""
        if not path:
            raise ConfigError("no training list: set data.train_list (--train_list FILE)")
        # Processes share the mapped memory of a long list, and later runs need not parse it.
        is_long = Path(path).is_file() and Path(path).stat().st_size >= LONG_LIST_BYTES
        return TrainingInput(
            self._once(map_training_list if is_long else read_training_list, path),
            self._once(self._open, root or audio_folder_of(path)),
        )

    def trial_input(self, path: str | Path, root: str | Path = "") -> TrialInput:
        """Any trial list, with its audio below `root` (default: `lists.audio_folder_of`)."""
        if not path:
            raise ConfigError(
                "no trial list: set data.test_list (--test_list FILE), or data.validation_list"
            )
        return TrialInput(self.trials(path), self._once(self._open, root or audio_folder_of(path)))

    def trials(self, path: str | Path) -> TrialList:
        """Any trial list, whose audio need not be there."""
        return self._once(self._read_trials, path)  # type: ignore[no-any-return]

    @functools.cached_property
    def _named(self) -> dict[str, TrialInput]:
        """The lists of data.test_lists by name."""
        named = {}
        for name, options in self._data.test_lists.items():
            if options.optional and not self._is_complete(options.list, options.path):
                logger.warning(
                    "data.test_lists: leaving out %s, which is optional: cannot find %s or some of "
                    "its recordings in %s",
                    name,
                    options.list,
                    options.path,
                )
                continue
            trial_list = self.trial_input(options.list, options.path)
            if trial_list.trials.labels is None:
                raise ConfigError(
                    f"data.test_lists: {name} ({options.list}) has no labels; give a list of "
                    "labelled trials"
                )
            named[name] = trial_list
        return named

    def _is_complete(self, path: str, root: str) -> bool:
        """Whether a trial list and all its recordings exist."""
        if not Path(path).is_file() or not Path(root).exists():
            return False
        # A list with missing recordings cannot be scored either, so it is left out in the same way.
        trials, source = self.trial_input(path, root)
        return not len(source.missing(trials.recordings))

    @functools.cached_property
    def listed(self) -> TrainingInput:
        """The whole training list, joined from several corpora if the configuration names them."""
        if not self._data.corpora:
            return self.training_input(self._data.train_list, self._data.train_path)
        parts = {}
        for name, corpus in self._data.corpora.items():
            parts[name] = self.training_input(corpus.train_list, corpus.train_path)
        return TrainingInput(*join(parts, self._data))

    @functools.cached_property
    def _held_out(self) -> tuple[TrainingInput, TrialInput]:
        """The training list split by `data.validation_speakers`."""
        # Late: few runs draw their own validation trials.
        from speakernet.corpora.pairs import hold_out

        # The split comes before any other use of the list, so that classes, mean embedding and
        # cohort are without the held-out speakers.
        rows, source = self.listed
        split = hold_out(rows, self._data.validation_speakers, self._seed)
        trials = split.trials
        logger.info("%s: %d trials choose the best checkpoint", trials.source, len(trials))
        return TrainingInput(split.training, source), TrialInput(trials, source)

    def _once(self, read: Callable[[str | Path], Any], path: str | Path) -> Any:
        """Read a file once, whether it is given as a relative path, an absolute path or a link."""
        # The reader is part of the key, because one path may be read as lists of two kinds.
        key = read, Path(path).resolve()
        if key not in self._kept:
            self._kept[key] = read(path)
        return self._kept[key]


def _refuse_missing(trials: TrialList, source: AudioSource) -> None:
    """Refuse models whose recordings do not exist, before anything is embedded."""
    missing = source.missing(trials.recordings)
    if len(missing):
        raise ConfigError(
            f"{len(missing):,} of {len(trials.recordings):,} recordings of {trials.source} and its "
            f"models are not in {source.root}, such as {trials.recordings[int(missing[0])]}; give "
            "the enrolment list of this corpus, with paths like those of the trials"
        )


def make_synthetic_corpus(config: Config) -> Config:
    """Make the configured synthetic corpus if it does not exist, and use it for empty lists and
    paths.
    """
    data = config.data
    augment = config.augment
    folder = data.synthetic_corpus
    train_list = data.train_lists[0]
    if not folder:
        return config
    if train_list and data.test_list:
        is_used = any(Path(folder) in Path(path).parents for path in (train_list, data.test_list))
        if not is_used:
            return config
    # Before minutes are spent on the rest of the corpus.
    for path in filter(None, (train_list, data.test_list)):
        if Path(folder) not in Path(path).parents and not Path(path).exists():
            raise ConfigError(f"{path}: there is no such list; check the path")
    # Rank 0 first, then one rank of each machine, which may have its own disk: two concurrent
    # writers would mistake each other's files for those of a killed run.
    made = None
    for has_turn in (distributed.is_main(), distributed.local_rank() == 0, True):
        if has_turn and made is None:
            made = make_corpus(folder, show_progress=distributed.is_main())
        distributed.barrier()
    assert made is not None, "every rank has the last turn"
    paths: dict[str, Any] = {}
    # The user's own list is never combined with the corpus's audio, because no check would detect
    # that mistake.
    if not train_list:
        paths["train_list"] = str(made.train_list)
        paths["train_path"] = data.train_path or str(made.train_path)
    if not data.test_list:
        paths["test_list"] = str(made.test_list)
        paths["test_path"] = data.test_path or str(made.test_path)
    is_its_test = Path(data.test_list or made.test_list).resolve() == made.test_list.resolve()
    if is_its_test and not (data.validation_list or data.validation_speakers):
        paths["validation_list"] = str(made.validation_list)
        paths["validation_path"] = str(made.validation_path)
    config = with_options(config, "data", **paths)
    return with_options(
        config,
        "augment",
        noise_path=augment.noise_path or str(made.noise_path),
        rir_path=augment.rir_path or str(made.rir_path),
    )


def with_default_paths(config: Config) -> Config:
    """Fill in empty paths: audio folders default to the folder of their list, test and validation
    list to each other.

    With held-out speakers there is no validation list.
    """
    data = config.data
    # Classic recipes name only one list. It then chooses the best epoch and is reported too, of
    # which `check_inputs` warns.
    test = data.test_list, data.test_path
    validation = data.validation_list, data.validation_path
    if not data.test_list:
        test = validation
    if not data.validation_list and not data.validation_speakers:
        validation = test
    named = {}
    for name, test_list in data.test_lists.items():
        path = test_list.path or test[1] or str(audio_folder_of(test_list.list))
        named[name] = test_list.model_copy(update={"path": path})
    values: dict[str, Any] = {"test_lists": freeze(named)}
    lists = {"train": (data.train_list, data.train_path), "validation": validation, "test": test}
    for kind, (path, folder) in lists.items():
        if path and not folder:
            folder = str(audio_folder_of(path))
        values |= {f"{kind}_list": path, f"{kind}_path": folder}
    return with_options(config, "data", **values)


def voices_of(config: Config) -> Voices:
    """The speeds to train on; without augmentation, only the recorded voice."""
    augment = config.augment
    # Each speed adds classes, but the switch of augmentation turns speeds off too.
    if not augment.enabled:
        return Voices()
    return Voices(
        speeds=tuple(speed_fractions(augment.speed_factors)),
        real_share=None if augment.real_share == "auto" else augment.real_share,
        real_from=config.training.max_epochs - augment.real_epochs if augment.real_epochs else None,
    )


def chosen_by_validation(config: Config) -> bool:
    """Whether validation trials influence a training run."""
    return config.training.final_model == "best" or config.schedule.name == "plateau"


def cohort_of(config: Config, inputs: Inputs) -> tuple[TrainingList, AudioSource, np.ndarray]:
    """The list of the cohort, its audio, and the speakers who are left out, as rows of its table:
    those who choose the model or calibrate its scores.

    Raises:
        ValueError: no list, or fewer than two speakers are left.
    """
    # Nobody in the cohort may choose the model, calibrate its scores or be in the trials. The first
    # two are removed here; the last cannot be seen from a trial list that names no speakers, and is
    # no more than a warning (`with_provenance`).
    section = config.evaluation
    data = config.data
    path = section.cohort_list or data.train_list
    if not path and not data.corpora:
        raise ValueError(
            f"score_norm {section.score_norm} needs a cohort: set --cohort_list (`speaker path` on "
            "each line)"
        )
    root = section.cohort_path
    if not root and path == data.train_list:
        root = data.train_path
    cohort = inputs.training_input(path, root) if path else inputs.listed
    used_by = []
    if section.calibration_list:
        used_by.append(inputs.trials(section.calibration_list))
    # When a model file is scored, the lists of its training need not be there.
    if data.validation_speakers and inputs.has_training_list():
        used_by.append(inputs.validation.trials)
    elif data.validation_list != data.test_list and Path(data.validation_list).is_file():
        used_by.append(inputs.trials(data.validation_list))
    left_out = speakers_to_leave_out(cohort.rows, used_by, section.score_norm)
    return *cohort, left_out


def compared_options(config: Config) -> dict[str, Any]:
    """The options that must be the same on all ranks; paths may differ between machines."""
    options = {
        "the version of speakernet": speakernet.__version__,
        "the version of torch": str(torch.__version__),
        # Lists are compared later, by content.
        "data.test_lists": [
            (name, options.test_interval) for name, options in config.data.test_lists.items()
        ],
        "data.corpora": [(name, corpus.weight) for name, corpus in config.data.corpora.items()],
    }
    for section, fields in config.model_dump().items():
        for name, value in fields.items():
            if not name.endswith(MAY_DIFFER):
                options[f"{section}.{name}"] = value
    return options
