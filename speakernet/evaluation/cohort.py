"""Other speakers that scoring needs: the mean embedding of the training set, and the cohort for
normalising scores.

`assembly/inputs.py` and `assembly/evaluation.py` choose the lists.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakernet.data.lists import TrainingList, TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.embedding import Embedder, modes_of, way_of
from speakernet.evaluation.scoring import MIN_COHORT, mean_embeddings, speaker_means
from speakernet.evaluation.speakers import shared_speakers, some_of_each
from speakernet.random import numpy_generator
from speakernet.terminal import counted

logger = logging.getLogger(__name__)

MEAN_STREAM = 6202
COHORT_STREAM = 6203


def mean_entries(
    contents: Mapping[str, Any],
    embedder: Embedder,
    read_training: Callable[[], tuple[TrainingList, AudioSource] | None],
    seed: int,
) -> dict[str, Any]:
    """The mean embedding of the training set as entries of a model file; empty if the file has
    the mean of this way of embedding.

    Raises:
        ValueError: the mean is needed, and there is no training list.
    """
    options = embedder.options
    mode = modes_of(options)[0]
    # Crops have a different mean than whole recordings, so a mean is used only for embeddings made
    # in the way that it was measured on.
    described = way_of(options.model_copy(update={"embedding": mode}))
    has_mean = contents.get("embedding_mean") is not None
    kept_of = contents.get("embedding_mean_of")
    if has_mean and kept_of == described:
        return {}
    training = read_training()
    if training is None:
        present = "no mean embedding"
        if has_mean:
            present = f"the mean of {kept_of or 'an unknown kind of embedding'}"
        raise ValueError(
            f"subtract_mean: the model file has {present}, but scoring needs the mean of "
            f"{described}, and there is no training list to measure it on; set --train_list "
            "and --train_path, or evaluation.subtract_mean: false"
        )
    rows, source = training
    # A few thousand utterances are enough for a mean. They are drawn at random, because lists are
    # often sorted by speaker.
    order = numpy_generator(seed, MEAN_STREAM).permutation(len(rows))
    names = rows.paths.take(np.sort(order[: options.mean_utterances]))
    embeddings, _ = embedder.embed(names, source, mode, "training_mean")
    mean = embeddings.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
    return {"embedding_mean": torch.from_numpy(mean), "embedding_mean_of": described}


def speakers_to_leave_out(
    cohort: TrainingList, used_by: Sequence[TrialList], score_norm: str
) -> np.ndarray:
    """The speakers of a cohort who are in lists that choose the model or calibrate its scores, as
    rows of its table.

    Otherwise their trials would be normalised against themselves, which lowers the scores of their
    targets, and the calibration would not fit anybody else's.

    Raises:
        ValueError: fewer than two speakers are left.
    """
    shared = [shared_speakers(cohort, trials) for trials in used_by]
    left_out = np.unique(np.concatenate([np.empty(0, np.int64), *shared]))
    num_left = len(cohort.speakers) - len(left_out)
    if len(left_out) and num_left < MIN_COHORT:
        lists = " and ".join(trials.source for trials in used_by)
        raise ValueError(
            f"score_norm {score_norm} needs a cohort of speakers who neither choose the model nor "
            f"calibrate its scores, but {counted(num_left, 'speaker')} of {cohort.source} are not "
            f"in {lists}; give a cohort of others with --cohort_list, or trials of fewer speakers"
        )
    return left_out


def embed_cohort(
    embedder: Embedder,
    mean: np.ndarray | None,
    members: TrainingList,
    source: AudioSource,
    left_out: np.ndarray,
    seed: int,
) -> tuple[np.ndarray, str, frozenset[str]]:
    """The cohort with one member per speaker, its name, and its speakers."""
    options = embedder.options
    generator = numpy_generator(seed, COHORT_STREAM)
    rows = some_of_each(members.labels, options.cohort_utterances, generator)
    rows = rows[~np.isin(members.labels[rows], left_out)]
    path = Path(members.source)
    name = f"{path.name} {members.sha256[:12]}"
    if len(left_out):
        num_left_out = counted(len(left_out), "speaker")
        name += f" without {num_left_out}"
        logger.info(
            "the cohort of %s leaves out %s, who choose the model or calibrate its scores",
            path.name,
            num_left_out,
        )
    embeddings, _ = embedder.embed(
        members.paths.take(rows), source, modes_of(options)[0], f"cohort_{path.stem}"
    )
    means = speaker_means(mean_embeddings(embeddings, mean), members.labels[rows])
    speakers = np.unique(members.labels[rows]).tolist()
    return means, name, plain_names(members.speakers[speaker] for speaker in speakers)


def plain_names(speakers: Iterable[str]) -> frozenset[str]:
    """Speakers without the name of their corpus, which prefixes them if there are several."""
    return frozenset(speaker.rpartition("/")[2] for speaker in speakers)
