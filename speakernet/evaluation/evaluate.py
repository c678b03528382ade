"""Score a trial list with a network and measure it: embed, score, normalise, calibrate, figures, files.

`evaluate` is the whole way for one list. Reading configurations and model files is the work of
`assembly/evaluation.py`.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import AffineCalibration, Fit, fit_scores
from speakernet.evaluation.embedding import MAX_READERS, Embedder
from speakernet.evaluation.figures import figures, why_no_error_rate
from speakernet.evaluation.options import EvaluationOptions, Mode
from speakernet.evaluation.report import write_report
from speakernet.evaluation.results import EMBEDDING, KEPT_EMBEDDINGS, Results, headline_sentence
from speakernet.evaluation.run_data import ARRAYS_NAME
from speakernet.evaluation.score_files import Decisions, write_scores
from speakernet.evaluation.scoring import Backend, verifying_backend
from speakernet.evaluation.slices import signal_to_noise_ratios, worse_side
from speakernet.evaluation.speakers import Speakers
from speakernet.files import atomic_write
from speakernet.run_folder import DECISIONS, EVALUATION_FILES, RESULTS, SCORES

PRECISIONS = {"no": "float32", "bf16": "bf16", "fp16": "fp16"}
"""Name of an embedder's precision -> its name in results.json."""


@dataclass(frozen=True)
class Scored:
    """Scores of a list and the arrays they came from."""

    scores: np.ndarray
    """(trials,) float32."""
    embeddings: dict[Mode, np.ndarray]
    """Mode -> (utterances, crops, dim)."""
    units: np.ndarray
    """(utterances, dim) unit length, of the first mode."""
    cohort_mean: np.ndarray | None
    """(utterances,) mean score against the cohort."""
    seconds: dict[str, float]
    """Of embedding and scoring."""


@dataclass(frozen=True)
class Evaluation:
    """Scores in list order and their figures."""

    trials: TrialList
    scores: np.ndarray
    results: Results
    llrs: np.ndarray | None = None
    """Calibrated scores, (trials,)."""
    units: np.ndarray | None = None
    """(utterances, dim) of length 1, if something was embedded."""
    speakers: Speakers | None = None
    durations: np.ndarray | None = None
    """Seconds of each utterance, (utterances,), if there was audio."""

    @property
    def decisions(self) -> Decisions | None:
        """Decisions on each trial; None if there are error rates."""
        if self.results.eer_percent is not None:
            return None
        return Decisions(self.trials, self.scores, self.llrs, self.results.thresholds or ())

    def lines(self, digits: int = 2) -> list[str]:
        """The headline and, without error rates, the decisions; for a terminal."""
        return [headline_sentence(self.results, digits), *(self.decisions.lines() if self.decisions else ())]

    def write(self, folder: str | Path) -> list[str]:
        """Write results.json, scores.txt, report.html and, without error rates, decisions.csv; returns the names."""
        folder, written = Path(folder), [*EVALUATION_FILES]
        folder.mkdir(parents=True, exist_ok=True)
        # Those of an earlier evaluation are out of date.
        for name in (DECISIONS, ARRAYS_NAME):
            (folder / name).unlink(missing_ok=True)
        if self.decisions is not None and self.decisions.says_more_than_scores:
            self.decisions.write(folder / DECISIONS)
            written.append(DECISIONS)
        write_scores(folder / SCORES, self.trials, self.scores)
        with atomic_write(folder / RESULTS) as file:
            json.dump(self.results.to_dict(), file, indent=2)
        write_report(
            folder,
            trials=self.trials,
            scores=self.scores,
            llrs=self.llrs,
            embeddings=self.units,
            speakers=self.speakers,
            durations=self.durations,
        )
        return written


def evaluate(
    embedder: Embedder,
    backend: Backend,
    trials: TrialList,
    source: AudioSource,
    speakers: Speakers,
    options: EvaluationOptions,
    seed: int,
    calibration: AffineCalibration | None = None,
) -> Evaluation:
    """Embed, score and measure one list."""
    begin = time.perf_counter()
    scored = score_trials(embedder, backend, trials, source)
    llrs = None
    if calibration is not None:
        llrs = calibration.apply(calibration_inputs(calibration.inputs, scored, trials, source))
    start = time.perf_counter()
    results = figures(trials, scored.scores, speakers, options, seed, llrs)
    end = time.perf_counter()
    results = replace(
        results,
        precision=PRECISIONS[embedder.precision],
        backend=backend.describe(embedder.options),
        lists=[{"role": "trials", "name": Path(trials.source).name, "sha256": trials.sha256}],
        timings_seconds={name: round(value, 3) for name, value in {**scored.seconds, "figures": end - start}.items()},
        seconds=end - begin,
    )
    return Evaluation(trials, scored.scores, results, llrs, scored.units, speakers, _durations(trials, source))


def _durations(trials: TrialList, source: AudioSource) -> np.ndarray:
    """Seconds of each utterance of a list, (utterances,), from headers."""
    return np.asarray(source.lookup_table(trials.names).num_samples) / source.sample_rate


def score_trials(embedder: Embedder, backend: Backend, trials: TrialList, source: AudioSource) -> Scored:
    """Scores of every trial under a back end; `both` averages the scores of crops and of whole utterances."""
    # Before hours of embedding, not after.
    backend.check()
    embeddings: dict[Mode, np.ndarray] = {}
    seconds: dict[str, float] = {}
    for mode in embedder.options.modes:
        start = time.perf_counter()
        embeddings[mode], was_kept = embedder.embed(trials.names, source, mode, Path(trials.source).stem)
        name = KEPT_EMBEDDINGS if was_kept else EMBEDDING
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    start = time.perf_counter()
    found = [backend.score(one, trials) for one in embeddings.values()]
    seconds["scoring"] = time.perf_counter() - start
    scores = np.mean([one[0] for one in found], axis=0) if len(found) > 1 else found[0][0]
    return Scored(scores, embeddings, found[0][1], found[0][2], seconds)


def calibration_inputs(inputs: tuple[str, ...], scored: Scored, trials: TrialList, source: AudioSource) -> np.ndarray:
    """Inputs of a calibration, (trials, inputs): the score, and quality measures of the worse side of each trial."""
    columns = []
    for name in inputs:
        if name == "score":
            columns.append(np.asarray(scored.scores, dtype=np.float64))
        else:
            columns.append(worse_side(_quality(name, scored, trials, source), trials))
    return np.stack(columns, axis=1)


def _quality(name: str, scored: Scored, trials: TrialList, source: AudioSource) -> np.ndarray:
    """A quality measure of every utterance, (utterances,)."""
    if name == "duration":
        return np.log(np.maximum(_durations(trials, source), 1 / source.sample_rate))
    if name == "magnitude":
        first = next(iter(scored.embeddings.values()))
        return np.log(np.maximum(np.linalg.norm(first, axis=2).mean(axis=1), 1e-12))
    if name == "snr":
        return signal_to_noise_ratios(source, trials.names, MAX_READERS)
    if name == "cohort":
        if scored.cohort_mean is None:
            raise ValueError("the quality measure 'cohort' needs score normalisation; set --score_norm and a cohort")
        return scored.cohort_mean.astype(np.float64)
    raise ValueError(f"unknown quality measure {name!r}; expected duration, magnitude, snr or cohort")


def fit_for_verifying(
    embedder: Embedder, contents: Mapping[str, Any], trials: TrialList, source: AudioSource, prior: float
) -> tuple[Fit, np.ndarray]:
    """Fit calibration and thresholds on a list that is embedded as recordings are verified: whole and in float32.

    Returns:
        The fit, and the scores (trials,).
    """
    whole = dataclasses.replace(
        embedder, options=embedder.options.in_mode("whole"), autocast=contextlib.nullcontext, precision="no"
    )
    if reason := why_no_error_rate(trials):
        # Before hours of embedding, not after.
        raise ValueError(f"cannot calibrate: {reason}")
    backend = verifying_backend(contents)
    scores = score_trials(whole, backend, trials, source).scores
    return fit_scores(trials, scores, prior, backend.describe(whole.options)), scores
