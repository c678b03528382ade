"""Interim version by the lead (05:12), to unblock training; EVAL replaces this file. Keep `Evaluation.results` and `write`."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.bootstrap import SpeakerBootstrap, bootstrap, interval_of
from speakernet.evaluation.embedding import EmbeddingNet, embed_utterances
from speakernet.evaluation.metrics import eer, min_dcf
from speakernet.evaluation.score_files import write_scores
from speakernet.evaluation.scoring import cosine_scores, mean_distance_scores, mean_embeddings
from speakernet.evaluation.speakers import speakers_of
from speakernet.files import atomic_write, sha256_of


@dataclasses.dataclass
class Evaluation:
    """Scores in list order and what they come to."""

    trials: TrialList
    scores: np.ndarray
    results: dict[str, Any]

    def write(self, folder: str | Path) -> None:
        """Write results.json, scores.txt and report.html."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_scores(folder / "scores.txt", self.trials, self.scores)
        with atomic_write(folder / "results.json") as file:
            json.dump(self.results, file, indent=2)
        with atomic_write(folder / "report.html") as file:
            file.write(f"<html><body><pre>{json.dumps(self.results, indent=2)}</pre></body></html>")


def evaluate(
    net: EmbeddingNet, trials: TrialList, source: AudioSource, *, score: str, is_normalised: bool = True,
    priors: tuple[float, ...] = (0.01, 0.05), bootstrap_samples: int = 1000, seed: int = 0, **embedding: Any,
) -> Evaluation:  # fmt: skip
    """Embed, score, measure."""
    begin = time.perf_counter()
    embeddings = embed_utterances(net, source, trials.names, **embedding)
    if score == "cosine":
        scores = cosine_scores(mean_embeddings(embeddings), trials.enrol, trials.test)
    else:
        scores = mean_distance_scores(embeddings, trials.enrol, trials.test, normalize=is_normalised)
    results: dict[str, Any] = {"num_trials": len(trials), "eer_percent": None}
    if trials.labels is not None:
        results["num_targets"] = int(trials.labels.sum())
        results["eer_percent"] = eer(scores, trials.labels)
        results["min_dcf"] = {str(prior): min_dcf(scores, trials.labels, prior) for prior in priors}
        speakers = speakers_of(trials)
        prepared = SpeakerBootstrap(
            scores, trials.labels, speakers.ids[trials.enrol], speakers.ids[trials.test], [(p, 1.0, 1.0) for p in priors]
        )
        draws = bootstrap(prepared, len(trials), speakers.count, bootstrap_samples, seed)
        results["eer_interval_percent"] = [*interval_of(draws.eer_percent, draws.note).as_list()]
    results["test_list"] = {"name": Path(trials.source).name, "sha256": sha256_of(trials.source)}
    results["seconds"] = time.perf_counter() - begin
    return Evaluation(trials, scores, results)
