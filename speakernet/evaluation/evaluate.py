"""Score a trial list with a network and measure it: embed, score, normalise, calibrate, figures, files.

`evaluate` is the whole way for one list; `Backend` says how embeddings become scores, in plain values that a model file
keeps beside its thresholds. Reading configurations and model files is `build/evaluation.py`'s work.
"""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakernet import distributed
from speakernet.data.lists import StringTable, TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import AffineCalibration, smaller_side
from speakernet.evaluation.embedding import EmbeddingNet, embed_utterances
from speakernet.evaluation.embedding_store import load_embeddings, save_embeddings, store_key
from speakernet.evaluation.figures import figures
from speakernet.evaluation.quality import signal_to_noise_db
from speakernet.evaluation.report.report import write_report
from speakernet.evaluation.score_files import write_scores
from speakernet.evaluation.score_norm import cohort_statistics, normalize_scores
from speakernet.evaluation.scoring import cosine_scores, mean_distance_scores, mean_embeddings
from speakernet.evaluation.speakers import speakers_of
from speakernet.files import atomic_write

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EmbeddingOptions:
    """How utterances are embedded; see `embed_utterances`."""

    mode: str = "crops"
    """crops, whole, or both."""
    eval_frames: int = 400
    num_crops: int = 10
    batch_size: int = 64
    num_workers: int = 4
    device: torch.device | str = "cpu"
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    precision: str = "no"
    """Name of what `autocast` does, for the key of kept embeddings."""
    store: Path | None = None
    """Folder where embeddings are kept; None keeps nothing."""
    model_digest: str = ""
    """What the network's weights are known by; embeddings are kept only with one."""

    def describe(self, mode: str) -> dict[str, Any]:
        """A way of embedding in plain values: what is measured on embeddings belongs to exactly one of these."""
        crops = {} if mode == "whole" else {"eval_frames": self.eval_frames, "num_crops": self.num_crops}
        return {"embedding": mode, **crops}


@dataclasses.dataclass(frozen=True)
class Backend:
    """How embeddings become scores."""

    score: str = "cosine"
    """cosine or mean_distance."""
    is_normalised: bool = True
    """mean_distance only: scale each crop's embedding to length 1 (what the loss was trained with)."""
    mean: np.ndarray | None = None
    """(dim,) subtracted first."""
    score_norm: str = "none"
    cohort: np.ndarray | None = None
    """(members, dim) unit length."""
    cohort_size: int = 300
    cohort_name: str = ""

    def describe(self, options: EmbeddingOptions) -> dict[str, Any]:
        """The scoring in plain values: thresholds and calibrations belong to exactly one of these."""
        described: dict[str, Any] = {"score": self.score, **options.describe(options.mode)}
        described |= {"subtract_mean": self.mean is not None, "score_norm": self.score_norm}
        if self.score == "mean_distance":
            described["is_normalised"] = self.is_normalised
        if self.score_norm != "none":
            described |= {
                "cohort": self.cohort_name,
                "cohort_members": len(self.cohort if self.cohort is not None else []),
            }
        if self.score_norm == "as":
            described["cohort_size"] = self.cohort_size
        return described


@dataclasses.dataclass
class Scored:
    """Scores of a list and the arrays they came from.

    Attributes:
        scores: (trials,) float32.
        embeddings: mode -> (utterances, crops, dim).
        units: (utterances, dim) unit length, of the first mode.
        cohort_mean: (utterances,) mean score against the cohort; None without one.
    """

    scores: np.ndarray
    embeddings: dict[str, np.ndarray]
    units: np.ndarray
    cohort_mean: np.ndarray | None
    seconds: dict[str, float]


@dataclasses.dataclass
class Evaluation:
    """Scores in list order and what they come to."""

    trials: TrialList
    scores: np.ndarray
    results: dict[str, Any]
    llrs: np.ndarray | None = None
    units: np.ndarray | None = None
    speakers: np.ndarray | None = None

    def write(self, folder: str | Path) -> None:
        """Write results.json, scores.txt and report.html."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_scores(folder / "scores.txt", self.trials, self.scores)
        with atomic_write(folder / "results.json") as file:
            json.dump(self.results, file, indent=2)
        write_report(
            folder,
            trials=self.trials,
            scores=self.scores,
            llrs=self.llrs,
            embeddings=self.units,
            speakers=self.speakers,
        )


def evaluate(
    net: EmbeddingNet,
    trials: TrialList,
    source: AudioSource,
    *,
    options: EmbeddingOptions,
    backend: Backend,
    calibration: AffineCalibration | None = None,
    **measuring: Any,
) -> Evaluation:
    """Embed, score and measure one list.

    Args:
        net: the network.
        trials: labelled or not.
        source: where its audio lies.
        options: of embedding.
        backend: of scoring.
        calibration: turns scores into log-likelihood ratios for the actual costs.
        measuring: options of `figures`.

    Raises:
        ValueError: audio that is missing or broken, or options that do not go together.
    """
    begin = time.perf_counter()
    scored = score_trials(net, trials, source, options, backend)
    llrs = None
    if calibration is not None:
        llrs = calibration.apply(calibration_inputs(calibration.inputs, scored, trials, source))
    start = time.perf_counter()
    results = figures(trials, scored.scores, llrs=llrs, **measuring)
    scored.seconds["figures"] = time.perf_counter() - start
    results["backend"] = backend.describe(options)
    results["lists"] = [{"role": "trials", "name": Path(trials.source).name, "sha256": trials.sha256}]
    results["timings_seconds"] = {name: round(value, 3) for name, value in scored.seconds.items()}
    results["seconds"] = time.perf_counter() - begin
    speakers = speakers_of(trials, measuring.get("speaker_table"))
    return Evaluation(trials, scored.scores, results, llrs, scored.units, speakers.ids)


def score_trials(
    net: EmbeddingNet, trials: TrialList, source: AudioSource, options: EmbeddingOptions, backend: Backend
) -> Scored:
    """Scores of every trial under a backend; `both` averages the scores of crops and of whole utterances."""
    if backend.score_norm != "none" and backend.score != "cosine":
        raise ValueError(
            f"score_norm {backend.score_norm} with score {backend.score}: normalisation works on the cosine; "
            "set evaluation.score: cosine"
        )
    modes = ("crops", "whole") if options.mode == "both" else (options.mode,)
    seconds = {"embedding": 0.0, "scoring": 0.0}
    embeddings: dict[str, np.ndarray] = {}
    for mode in modes:
        start = time.perf_counter()
        embeddings[mode] = embed_mode(net, trials.names, source, options, mode, Path(trials.source).stem)
        seconds["embedding"] += time.perf_counter() - start
    start = time.perf_counter()
    parts = [_score_mode(embeddings[mode], trials, backend) for mode in modes]
    seconds["scoring"] = time.perf_counter() - start
    scores = np.mean([part[0] for part in parts], axis=0) if len(parts) > 1 else parts[0][0]
    return Scored(scores, embeddings, parts[0][1], parts[0][2], seconds)


def embed_mode(
    net: EmbeddingNet, names: StringTable, source: AudioSource, options: EmbeddingOptions, mode: str, list_name: str
) -> np.ndarray:
    """Embeddings (utterances, crops, dim) in one mode, from disk where they are kept and still hold."""
    frames = 0 if mode == "whole" else options.eval_frames
    embed = {
        "eval_frames": frames,
        "num_crops": options.num_crops,
        "batch_size": options.batch_size,
        "num_workers": options.num_workers,
        "device": options.device,
        "autocast": options.autocast,
    }
    if options.store is None or not options.model_digest:
        return embed_utterances(net, source, names, **embed)  # type: ignore[arg-type]
    settings = {"frames": frames, "crops": options.num_crops if frames else 1, "precision": options.precision}
    key = store_key(options.model_digest, names, source.lookup_table(names, options.num_workers), settings)
    path = options.store / f"{list_name}.{mode}.npz"
    kept = distributed.broadcast_object(load_embeddings(path, key) if distributed.is_main() else None)
    if kept is not None:
        logger.info("embeddings of %d utterances taken from %s", len(names), path)
        return kept
    embeddings = embed_utterances(net, source, names, **embed)  # type: ignore[arg-type]
    if distributed.is_main():
        save_embeddings(path, key, names, embeddings)
    return embeddings


def calibration_inputs(inputs: tuple[str, ...], scored: Scored, trials: TrialList, source: AudioSource) -> np.ndarray:
    """What a calibration takes, (trials, inputs): the score and quality measures of the worse side of each trial."""
    columns = []
    for name in inputs:
        if name == "score":
            columns.append(np.asarray(scored.scores, dtype=np.float64))
        else:
            columns.append(smaller_side(_quality(name, scored, trials, source), trials.enrol, trials.test))
    return np.stack(columns, axis=1)


def _quality(name: str, scored: Scored, trials: TrialList, source: AudioSource) -> np.ndarray:
    """A quality measure of every utterance, (utterances,)."""
    if name == "duration":
        return np.log(np.maximum(source.lookup_table(trials.names).num_samples, 1) / source.sample_rate)
    if name == "magnitude":
        first = next(iter(scored.embeddings.values()))
        return np.log(np.maximum(np.linalg.norm(first, axis=2).mean(axis=1), 1e-12))
    if name == "snr":
        return np.array([signal_to_noise_db(source.read(one), source.sample_rate) for one in trials.names])
    if name == "cohort":
        if scored.cohort_mean is None:
            raise ValueError("the quality measure 'cohort' needs score normalisation; set --score_norm and a cohort")
        return scored.cohort_mean.astype(np.float64)
    raise ValueError(f"unknown quality measure {name!r}; expected duration, magnitude, snr or cohort")


def _score_mode(
    embeddings: np.ndarray, trials: TrialList, backend: Backend
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    units = mean_embeddings(embeddings, backend.mean)
    if backend.score == "mean_distance":
        centred = embeddings if backend.mean is None else embeddings - backend.mean.astype(np.float32)
        scores = mean_distance_scores(centred, trials.enrol, trials.test, normalize=backend.is_normalised)
        return scores, units, None
    scores = cosine_scores(units, trials.enrol, trials.test)
    if backend.score_norm == "none":
        return scores, units, None
    assert backend.cohort is not None
    top = backend.cohort_size if backend.score_norm == "as" else None
    statistics = cohort_statistics(units, backend.cohort, top)
    scores = normalize_scores(scores, trials.enrol, trials.test, statistics, backend.score_norm)
    return scores, units, statistics.mean


def plain_backend(values: Mapping[str, Any]) -> str:
    """A backend as text that equal backends share."""
    return json.dumps(values, sort_keys=True)
