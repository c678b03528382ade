"""The suite `--scoring`: scoring, normalisation and metrics at full size.

Embeddings are random, in the sizes of common evaluation lists. Each part runs in a separate
process, so that its peak memory (including interpreter and torch) is not affected by the other
parts. Figures are medians after one warm-up run.
"""

import concurrent.futures
import multiprocessing
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.timing import Way, run_in_turn
from speakernet.evaluation import metrics
from speakernet.evaluation.scoring import (
    cohort_statistics,
    cosine_scores,
    mean_distance_scores,
    mean_embeddings,
    normalize_scores,
)
from speakernet.machine.memory import process_peak_bytes

# VoxCeleb1-O: this many utterances, each enrolled in eight trials.
LIST_UTTERANCES = 4715
TRIALS_EACH = 8
CROPS = 10
LIST_DIM = 512
LARGE_DIM = 256
# VoxCeleb1-E, below, has 580,000 trials; ten million show what larger lists cost.
MILLION = 1_000_000
# The size of VoxCeleb1-E, against as many speakers as VoxCeleb2 has.
NORM_TRIALS = 580_000
NORM_UTTERANCES = 145_000
COHORT = 6000
TOP = 300


Work = tuple[str, int, Callable[[], object]]
"""What is done, the number of trials or scores, and the call that does it."""
Part = Callable[[np.random.Generator], Work]


def cosine(generator: np.random.Generator) -> Work:
    """Cosine scores of a list of VoxCeleb1-O's size."""
    enrol, test = _list(generator)
    units = mean_embeddings(_normal(generator, LIST_UTTERANCES, LIST_DIM))
    name = (
        f"cosine, {len(enrol):,} trials over {LIST_UTTERANCES:,} utterances, {LIST_DIM} dimensions"
    )
    return name, len(enrol), lambda: cosine_scores(units, enrol, test)


def mean_distance(generator: np.random.Generator) -> Work:
    """The same list, with voxceleb_trainer's score."""
    enrol, test = _list(generator)
    crops = _normal(generator, LIST_UTTERANCES, CROPS, LIST_DIM)
    name = f"mean distance of {CROPS} x {CROPS} crops, the same list"
    return name, len(enrol), lambda: mean_distance_scores(crops, enrol, test)


def large_list(generator: np.random.Generator) -> Work:
    """Ten million trials over a million utterances."""
    units = _normal(generator, MILLION, LARGE_DIM)
    # In parts, or the second copy of a gigabyte would become the reported peak.
    for start in range(0, MILLION, 10_000):
        units[start : start + 10_000] = mean_embeddings(units[start : start + 10_000])
    enrol, test = generator.integers(0, MILLION, (2, 10 * MILLION), dtype=np.int32)
    name = f"cosine, 10 million trials over 1 million utterances, {LARGE_DIM} dimensions"
    return name, len(enrol), lambda: cosine_scores(units, enrol, test)


def adaptive_norm(generator: np.random.Generator) -> Work:
    """Scoring and adaptive s-norm of a list of VoxCeleb1-E's size."""
    units = mean_embeddings(_normal(generator, NORM_UTTERANCES, LARGE_DIM))
    cohort = mean_embeddings(_normal(generator, COHORT, LARGE_DIM))
    enrol, test = generator.integers(0, NORM_UTTERANCES, (2, NORM_TRIALS), dtype=np.int32)

    def run() -> np.ndarray:
        scores = cosine_scores(units, enrol, test)
        return normalize_scores(scores, enrol, test, cohort_statistics(units, cohort, TOP), "as")

    name = (
        f"scoring and adaptive s-norm, {NORM_TRIALS:,} trials, {NORM_UTTERANCES:,} utterances, "
        f"{COHORT:,} members, {LARGE_DIM} dimensions, K = {TOP}"
    )
    return name, NORM_TRIALS, run


def all_metrics(generator: np.random.Generator) -> Work:
    """Every metric of ten million scores, taken as log-likelihood ratios."""
    # A tenth are targets, three deviations above the rest: an EER of about 7 %, as on a hard list,
    # so that the curves have many steps.
    labels = generator.random(10 * MILLION) < 0.1
    scores = generator.standard_normal(len(labels)) + 3 * labels

    def run() -> tuple[object, ...]:
        rates = metrics.error_rates(scores, labels)
        costs = [
            (metrics.min_dcf_point(rates, p), metrics.act_dcf(rates, p))
            for p in (0.01, 0.05, 0.001)
        ]
        return (
            metrics.equal_error_point(rates),
            metrics.hull_eer_percent(rates),
            metrics.voxceleb_trainer_eer_percent(rates),
            costs,
            metrics.cllr(scores, labels) - metrics.min_cllr(rates),
            metrics.det_points(rates),
            metrics.area_under_roc(rates),
        )

    return "10 million scores through all metrics", len(scores), run


PARTS: dict[str, Part] = {
    "cosine": cosine,
    "mean_distance": mean_distance,
    "large_list": large_list,
    "adaptive_norm": adaptive_norm,
    "all_metrics": all_metrics,
}


def measure_scoring(part: str, *, rounds: int, threads: int) -> dict[str, Any]:
    """The figures of one part, measured in a new process; its peak memory includes the inputs.

    Args:
        part: a name in `PARTS`.
        rounds: measured runs.
        threads: torch threads.
    """
    # Not a fork, whose peak would include this process's memory.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure, part, rounds, threads).result()


def _measure(part: str, rounds: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    # The same draws in every process, so that repeated measurements score the same numbers.
    name, num_items, work = PARTS[part](np.random.default_rng(0))

    def run(_: None) -> int:
        work()
        return num_items

    seconds = run_in_turn({part: Way(run)}, rounds=rounds)[part].seconds
    return {
        "name": name,
        "num_items": num_items,
        "median_seconds": statistics.median(seconds),
        "lowest_seconds": min(seconds),
        "highest_seconds": max(seconds),
        "peak_bytes": process_peak_bytes(),
        "threads": threads,
        # A busy machine makes all of this several times slower, two threads more than one.
        "load": psutil.getloadavg()[0],
    }


def _list(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    enrol = np.repeat(np.arange(LIST_UTTERANCES, dtype=np.int32), TRIALS_EACH)
    return enrol, generator.integers(0, LIST_UTTERANCES, len(enrol), dtype=np.int32)


def _normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.standard_normal(shape, dtype=np.float32)
