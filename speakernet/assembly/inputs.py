"""The inputs of a run: paths, lists, audio, voices and device, each read or chosen once.

Stages, checks, validation, evaluation, mean embedding and cohort share them, because reading a list
of a million rows takes a second, and reading its audio headers takes minutes.
"""

import dataclasses
import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakernet import distributed
from speakernet.config import Config, ConfigError
from speakernet.corpora.synthetic import is_synthetic, make_corpus
from speakernet.data.batches import speed_fractions
from speakernet.data.lists import (
    TrainingList,
    TrialList,
    audio_folder_of,
    read_training_list,
    read_trials,
)
from speakernet.data.lookup import LONG_LIST_BYTES, LookupTable, mapped_training_list
from speakernet.data.opening import open_source
from speakernet.data.sampling import Voices
from speakernet.data.sources import AudioSource

logger = logging.getLogger(__name__)

HEADER_THREADS = (
    16  # more than cores, because reading headers waits for the disk, especially a remote one
)


@dataclasses.dataclass(frozen=True)
class TrainingInput:
    """A training list and its audio."""

    rows: TrainingList
    source: AudioSource

    @property
    def table(self) -> LookupTable:
        """Facts from the audio headers, row by row."""
        return self.source.lookup_table(self.rows.paths, HEADER_THREADS)


@dataclasses.dataclass(frozen=True)
class TrialInput:
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
        self._kept: dict[tuple[Any, Path], Any] = {}

    @functools.cached_property
    def training(self) -> TrainingInput:
        """The training list without the speakers held out for validation."""
        return self._held_out[0] if self._data.validation_speakers else self.listed

    @functools.cached_property
    def validation(self) -> TrialInput:
        """The trials that choose the best checkpoint: of held-out speakers, or of
        data.validation_list.
        """
        if self._data.validation_speakers:
            return self._held_out[1]
        return self.trial_input(self._data.validation_list, self._data.validation_path)

    @functools.cached_property
    def test(self) -> TrialInput:
        """The trials that are reported."""
        return self.trial_input(self._data.test_list, self._data.test_path)

    def beside(self, given: TrialInput) -> dict[str, TrialInput]:
        """The lists of data.test_lists by name, except the given one and missing optional ones."""
        own = id(given.trials), id(given.source)
        return {
            name: one
            for name, one in self._named.items()
            if (id(one.trials), id(one.source)) != own
        }

    def corpus_facts(self) -> dict[str, Any]:
        """What the network is trained on, as plain values for its model file."""
        given = self.training
        data = self._data
        corpora = [(one.train_list, one.train_path) for one in data.corpora.values()]
        places = corpora or [(data.train_list, data.train_path)]
        table = given.table
        return {
            "list": given.rows.source,
            # A packed corpus lies elsewhere, but its list is that of the recordings.
            "is_synthetic": all(any(map(is_synthetic, filter(None, one))) for one in places),
            "speakers": len(given.rows.speakers),
            "utterances": len(given.rows),
            "hours": round(float(table.num_samples.sum()) / table.sample_rate / 3600, 3),
            "recorded_at_hz": np.unique(table.sample_rates).tolist(),
        }

    def checksums(self, *, of_training: bool = True) -> dict[str, str]:
        """Checksums of the test lists and their audio, and of the training run's other lists, by
        option.
        """
        found = {
            "data.test_list (SHA-256)": self.test.trials.sha256,
            "the audio of data.test_path": self.test.source.identity,
        }
        if self._data.test_lists:
            for name, one in self._named.items():
                found[f"data.test_lists.{name} (SHA-256)"] = one.trials.sha256
                found[f"the audio of data.test_lists.{name}"] = one.source.identity
        if not of_training:
            return found
        training = self.training
        validation = self.validation
        lengths = zlib.crc32(training.table.num_samples.astype(np.int64).data)
        return found | {
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
        is_long = Path(path).is_file() and Path(path).stat().st_size >= LONG_LIST_BYTES
        return TrainingInput(
            self._once(mapped_training_list if is_long else read_training_list, path),
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
        return self._once(read_trials, path)  # type: ignore[no-any-return]

    @functools.cached_property
    def _named(self) -> dict[str, TrialInput]:
        """The lists of data.test_lists by name."""
        found = {}
        for name, one in self._data.test_lists.items():
            is_here = not one.optional or (Path(one.list).is_file() and Path(one.path).exists())
            given = self.trial_input(one.list, one.path) if is_here else None
            if given is None or (one.optional and len(given.source.missing(given.trials.names))):
                missing = f"{one.list} or some of its recordings in {one.path}"
                logger.warning(
                    "data.test_lists: leaving out %s, which is optional: cannot find %s",
                    name,
                    missing,
                )
            elif given.trials.labels is None:
                raise ConfigError(
                    f"data.test_lists: {name} ({one.list}) has no labels; give a labelled trial "
                    "list"
                )
            else:
                found[name] = given
        return found

    @functools.cached_property
    def listed(self) -> TrainingInput:
        """The whole training list, joined from several corpora if the configuration names them."""
        if not self._data.corpora:
            return self.training_input(self._data.train_list, self._data.train_path)
        # Late: only training on several corpora needs it.
        from speakernet.data.joined import join

        given = {
            name: self.training_input(one.train_list, one.train_path)
            for name, one in self._data.corpora.items()
        }
        return TrainingInput(
            *join({name: (one.rows, one.source) for name, one in given.items()}, self._data)
        )

    @functools.cached_property
    def _held_out(self) -> tuple[TrainingInput, TrialInput]:
        """The training list split by `data.validation_speakers`."""
        # Late: a run with its own validation list makes no trials.
        from speakernet.corpora.utterances import hold_out

        given = self.listed
        found = hold_out(given.rows, self._data.validation_speakers, self._seed)
        logger.info(
            "%s: %d trials choose the best checkpoint", found.trials.source, len(found.trials)
        )
        return TrainingInput(found.training, given.source), TrialInput(found.trials, given.source)

    def _once(self, read: Callable[[str | Path], Any], path: str | Path) -> Any:
        """Read a file once, whether it is given as a relative path, an absolute path or a link."""
        key = read, Path(path).resolve()
        if key not in self._kept:
            self._kept[key] = read(path)
        return self._kept[key]


def make_synthetic_corpus(config: Config) -> Config:
    """Make the configured synthetic corpus if it does not exist, and use it for empty lists and
    paths.
    """
    data = config.data
    augment = config.augment
    folder = config.data.synthetic_corpus
    lists = [
        data.train_list or next((one.train_list for one in data.corpora.values()), ""),
        data.test_list,
    ]
    if not folder or (all(lists) and not any(Path(folder) in Path(one).parents for one in lists)):
        return config
    # Rank 0 first, then one rank of each machine, which may have its own disk: two concurrent
    # writers would mistake each other's files for those of a killed run.
    made = None
    for has_turn in (distributed.is_main(), distributed.local_rank() == 0, True):
        if has_turn and made is None:
            made = make_corpus(folder, show_progress=distributed.is_main())
        distributed.barrier()
    assert made is not None, "every rank has the last turn"
    paths = {
        # The user's own list is never combined with the corpus's audio, because no check would
        # detect that mistake.
        "train_path": data.train_path or ("" if lists[0] else str(made.train_path)),
        "test_path": data.test_path or ("" if data.test_list else str(made.test_path)),
        "train_list": data.train_list or ("" if lists[0] else str(made.train_list)),
        "test_list": data.test_list or str(made.test_list),
    }
    is_its_test = Path(paths["test_list"]).resolve() == made.test_list.resolve()
    if is_its_test and not (data.validation_list or data.validation_speakers):
        paths["validation_list"] = str(made.validation_list)
        paths["validation_path"] = str(made.validation_path)
    noise = {
        "noise_path": augment.noise_path or str(made.noise_path),
        "rir_path": augment.rir_path or str(made.rir_path),
    }
    return config.model_copy(
        update={"data": data.model_copy(update=paths), "augment": augment.model_copy(update=noise)}
    )


def with_default_paths(config: Config) -> Config:
    """Fill in empty paths: audio folders default to the folder of their list, test and validation
    list to each other.

    With held-out speakers there is no validation list.
    """
    data = config.data.model_copy()
    if not data.test_list:
        data.test_list, data.test_path = data.validation_list, data.validation_path
    if not data.validation_list and not data.validation_speakers:
        data.validation_list, data.validation_path = data.test_list, data.test_path
    data.test_lists = {
        name: one.model_copy(
            update={"path": one.path or data.test_path or str(audio_folder_of(one.list))}
        )
        for name, one in data.test_lists.items()
    }
    for kind in ("train", "validation", "test"):
        if (path := getattr(data, f"{kind}_list")) and not getattr(data, f"{kind}_path"):
            setattr(data, f"{kind}_path", str(audio_folder_of(path)))
    return config.model_copy(update={"data": data})


def voices_of(config: Config) -> Voices:
    """The speeds to train on; without augmentation, only the recorded voice."""
    augment = config.augment
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
