"""`report.html`: what one run came to, as one file that opens anywhere.

Called at the end of an evaluation with the arrays that it has at hand, or later by `speakernet report` on the files
alone. It measures nothing anew: figures come from `results.json`, curves from `scores.txt` and `metrics.jsonl`.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from speakernet.data.audio import SAMPLE_RATE
from speakernet.data.lists import TrialList
from speakernet.data.opening import open_source
from speakernet.data.sources import AudioSource
from speakernet.evaluation.report import error_sections, page, result_section, sections
from speakernet.evaluation.report.data import RunData, embedding_map, keep_arrays, read_run
from speakernet.evaluation.report.facts import configuration, data_part, facts_part
from speakernet.evaluation.report.hardest_section import hardest_part
from speakernet.evaluation.report.trials_section import trials_part
from speakernet.evaluation.speakers import Speakers
from speakernet.files import atomic_write
from speakernet.run_folder import PLOTS

logger = logging.getLogger(__name__)

REPORT_NAME = "report.html"


def write_report(
    folder: str | Path,
    *,
    trials: TrialList | None = None,
    scores: np.ndarray | None = None,
    llrs: np.ndarray | None = None,
    embeddings: np.ndarray | None = None,
    speakers: Speakers | None = None,
    durations: np.ndarray | None = None,
    audio: str | Path | None = None,
) -> Path:
    """Write `report.html`, and its plots as PNGs under `plots/`, for the files of a run or evaluation folder.

    Args:
        folder: holds `results.json` and what else there is of `scores.txt`, `metrics.jsonl`, `config.yaml`.
        trials: of the scores; read from `scores.txt` where they are not handed in, with labels as they were kept.
        scores: (trials,).
        llrs: calibrated scores, (trials,), where there is a calibration.
        embeddings: (utterances, dim) of length 1, one for each name of the trials: for the map of speakers.
        speakers: of the utterances, for the same and for the hardest trials.
        durations: seconds of each utterance, (utterances,).
        audio: folder or packed corpus of the utterances; the hardest trials are then put into the page, to be played.

    Returns:
        The path of the page.

    Raises:
        ValueError: nothing to report in the folder, a broken file, or audio that is not there.
    """
    given = None if trials is None or scores is None else (trials, np.asarray(scores, dtype=np.float64))
    run = read_run(folder, given=given)
    if llrs is not None:
        run = replace(run, llrs=np.asarray(llrs, dtype=np.float64))
    # Without labels it is a guess who speaks.
    if embeddings is not None and speakers is not None and trials is not None and trials.labels is not None:
        run = replace(run, embedding_map=embedding_map(embeddings, speakers.ids, list(trials.names)))
    if speakers is not None:
        run = replace(run, speakers=speakers.ids, speaker_names=speakers.names)
    if durations is not None:
        run = replace(run, durations=durations.astype(np.float32))
    source = None if audio is None else _source(run, audio)
    # Before drawing: `speakernet report` must find them even where a plot fails.
    keep_arrays(run)
    lead = result_section.lead(run)
    return write_page(run.folder / REPORT_NAME, run.name, result_section.subtitle(run), lead, _sections(run, source))


def _source(run: RunData, audio: str | Path) -> AudioSource:
    if run.labels is None:
        raise ValueError(f"{run.folder}: no labelled scores, so no hardest trials to play; leave out --audio")
    data = configuration(run).get("data") or {}
    return open_source(audio, data.get("sample_rate", SAMPLE_RATE))


def _sections(run: RunData, audio: AudioSource | None) -> list[page.Section]:
    """The page from top to bottom: what came of it, where it errs, what it was made of, how it got there."""
    drawings = sections.Drawings(run.folder / PLOTS)
    rates = error_sections.rates_of(run)
    by_run = {} if rates is None else {run.name: rates}
    # Pairs without labels are scored to learn of them; how the model was trained is on its own page.
    trained = [] if run.decisions is not None and not run.was_trained_here else [run]
    return [
        page.Section("result", "Result", result_section.result_part(run)),
        page.Section("trials", "Trials", trials_part(run, drawings)),
        page.Section("errors", "Errors", error_sections.errors_part([run], by_run, drawings)),
        page.Section("data", "Data", data_part(run)),
        page.Section("training", "Training", sections.training_part(trained, drawings)),
        page.Section("slices", "Slices", sections.slices_part([run], drawings)),
        page.Section("robustness", "Robustness", sections.sweep_part([run], drawings)),
        page.Section("hardest", "Hardest trials", hardest_part(run, audio)),
        page.Section("embeddings", "Embeddings", sections.map_part([run], drawings)),
        page.Section("facts", "How it was made", facts_part(run)),
    ]


def write_page(path: Path, title: str, subtitle: str, lead: str, parts: Sequence[page.Section]) -> Path:
    """Write a page of those sections that have something to show."""
    text = page.render(title, subtitle, lead, parts)
    with atomic_write(path) as file:
        file.write(text)
    logger.info("report: %s", path)
    return path
