"""Score a trial list with a network and measure it: embed, score, normalise, calibrate, figures, files.

`evaluate` is the whole way for one list. Reading configurations and model files is `assembly/evaluation.py`'s work.
"""

import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.backend import Backend
from speakernet.evaluation.calibration import AffineCalibration, smaller_side
from speakernet.evaluation.decisions import Decisions
from speakernet.evaluation.embedder import Embedder
from speakernet.evaluation.embedding import MAX_READERS
from speakernet.evaluation.figures import figures
from speakernet.evaluation.options import EvaluationOptions, Mode
from speakernet.evaluation.quality import signal_to_noise_ratios
from speakernet.evaluation.report.data import ARRAYS_NAME
from speakernet.evaluation.report.report import write_report
from speakernet.evaluation.results import EMBEDDING, KEPT_EMBEDDINGS, Results
from speakernet.evaluation.score_files import write_scores
from speakernet.evaluation.speakers import Speakers
from speakernet.files import atomic_write
from speakernet.run_folder import DECISIONS, EVALUATION_FILES, RESULTS, SCORES

logger = logging.getLogger(__name__)

PRECISIONS = {"no": "float32", "bf16": "bf16", "fp16": "fp16"}
"""Name of an embedder's precision -> what results.json calls it."""


@dataclass(frozen=True)
class Scored:
    """Scores of a list and the arrays they came from.

    Attributes:
        scores: (trials,) float32.
        embeddings: mode -> (utterances, crops, dim).
        units: (utterances, dim) unit length, of the first mode.
        cohort_mean: (utterances,) mean score against the cohort; None without one.
        seconds: what embedding and scoring took.
    """

    scores: np.ndarray
    embeddings: dict[Mode, np.ndarray]
    units: np.ndarray
    cohort_mean: np.ndarray | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """Scores in list order and what they come to.

    Attributes:
        trials: the list.
        scores: (trials,).
        results: figures, and where they come from.
        llrs: calibrated scores, (trials,).
        units: (utterances, dim) of length 1, where something was embedded.
        speakers: of the list's utterances.
        durations: seconds of each utterance, (utterances,), where there was audio.
    """

    trials: TrialList
    scores: np.ndarray
    results: Results
    llrs: np.ndarray | None = None
    units: np.ndarray | None = None
    speakers: Speakers | None = None
    durations: np.ndarray | None = None

    @property
    def decisions(self) -> Decisions | None:
        """What can be said of each trial; None where there are error rates, which say more."""
        if self.results.eer_percent is not None:
            return None
        return Decisions(self.trials, self.scores, self.llrs, self.results.thresholds or ())

    def write(self, folder: str | Path) -> list[str]:
        """Write results.json, scores.txt, report.html and, without error rates, decisions.csv; returns the names."""
        folder, written = Path(folder), [*EVALUATION_FILES]
        folder.mkdir(parents=True, exist_ok=True)
        # Those of an earlier evaluation say nothing of this one.
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
    """Embed, score and measure one list.

    Args:
        embedder: the network and how it is run.
        backend: of scoring.
        trials: labelled or not.
        source: where its audio lies.
        speakers: of the list's utterances.
        options: of measuring.
        seed: of the draws of speakers.
        calibration: turns scores into log-likelihood ratios for the actual costs.

    Raises:
        ValueError: audio that is missing or broken, or options that do not go together.
    """
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
    return Evaluation(trials, scored.scores, results, llrs, scored.units, speakers, durations_of(trials, source))


def durations_of(trials: TrialList, source: AudioSource) -> np.ndarray:
    """Seconds of each utterance of a list, (utterances,), from headers."""
    return np.asarray(source.lookup_table(trials.names).num_samples) / source.sample_rate


def score_trials(embedder: Embedder, backend: Backend, trials: TrialList, source: AudioSource) -> Scored:
    """Scores of every trial under a back end; `both` averages the scores of crops and of whole utterances.

    Raises:
        ValueError: audio that is missing or broken, or options that do not go together.
    """
    # Before hours of embedding, not after.
    backend.check()
    list_name = Path(trials.source).stem
    embeddings: dict[Mode, np.ndarray] = {}
    seconds: dict[str, float] = {}
    for mode in embedder.options.modes:
        start = time.perf_counter()
        embeddings[mode], was_kept = embedder.embed(trials.names, source, mode, list_name)
        name = KEPT_EMBEDDINGS if was_kept else EMBEDDING
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    start = time.perf_counter()
    parts = [backend.score(one, trials) for one in embeddings.values()]
    seconds["scoring"] = time.perf_counter() - start
    scores = np.mean([part[0] for part in parts], axis=0) if len(parts) > 1 else parts[0][0]
    return Scored(scores, embeddings, parts[0][1], parts[0][2], seconds)


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
        return np.log(np.maximum(durations_of(trials, source), 1 / source.sample_rate))
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
