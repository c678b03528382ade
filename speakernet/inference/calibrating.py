"""Calibration and thresholds for a model file as it is used: from a list of trials, or from one's own people.

Own people are compared as `identify` compares them, a recording with a person's mean: with that of the person's other
recordings for the targets, with other people's for the rest. A cohort adds strangers.
"""

from pathlib import Path

import numpy as np

from speakernet.data.lists import StringTable, TrialList, audio_folder_of, read_trials
from speakernet.data.opening import open_source
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import Fit, fit_scores
from speakernet.evaluation.embedding import Embedder, embed_utterances
from speakernet.evaluation.evaluate import fit_for_verifying
from speakernet.evaluation.figures import figures
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import FEW_TARGETS, Results
from speakernet.evaluation.scoring import mean_embeddings, whole_cosine
from speakernet.evaluation.speakers import Speakers, speakers_of
from speakernet.files import check_writable, sha256_of
from speakernet.inference.people import PeopleStore
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.models.model_file import update_model_file
from speakernet.options import DEFAULT_SEED

MOST_TRIALS = 20_000_000
"""Comparisons of own people; more take too much memory."""
SWAPPED_EER_PERCENT = 75.0
"""Above it the model separates people, and the labels are the wrong way round."""


def calibrate_on_trials(
    verifier: SpeakerVerifier, trials_path: Path, audio: Path | None, prior: float, out: Path | None = None
) -> tuple[Fit, Results, Path | None]:
    """Fit on a labelled list and write into the model file, or `out`; the fit, its figures, and a backup if made."""
    check_writable(out or verifier.name)
    trials = read_trials(trials_path)
    source = open_source(audio or audio_folder_of(trials_path), verifier.sample_rate, show_progress=True)
    embedder = Embedder(verifier.embedding_net, EvaluationOptions(embedding="whole"), verifier.device)
    fit, scores = fit_for_verifying(embedder, verifier.contents, trials, source, prior)
    return _write(verifier, fit, figures(trials, scores, speakers_of(trials), EvaluationOptions(), DEFAULT_SEED), out)


def calibrate_on_people(
    verifier: SpeakerVerifier,
    store: PeopleStore,
    cohort: tuple[AudioSource, StringTable] | None,
    prior: float,
    out: Path | None = None,
) -> tuple[Fit, Results, Path | None]:
    """Fit on the people of a store, against each other and a cohort of strangers; else as `calibrate_on_trials`."""
    check_writable(out or verifier.name)
    strangers = np.empty((0, 1, verifier.embedding_dim), dtype=np.float32)
    if cohort is not None:
        options = EvaluationOptions(embedding="whole")
        net, device = verifier.embedding_net, verifier.device
        strangers = embed_utterances(net, *cohort, options, device=device, description="cohort")
    trials, scores, speakers = _own_trials(verifier, store, mean_embeddings(strangers, verifier.mean))
    fit = fit_scores(trials, scores, prior, whole_cosine(verifier.mean is not None))
    return _write(verifier, fit, figures(trials, scores, speakers, EvaluationOptions(), DEFAULT_SEED), out)


def _own_trials(
    verifier: SpeakerVerifier, store: PeopleStore, strangers: np.ndarray
) -> tuple[TrialList, np.ndarray, Speakers]:
    """Every recording against every person, a person's own without itself; and every stranger against every person."""
    kept = store.recordings()
    people, owner = np.unique([one.name for one in kept], return_inverse=True)
    num_people, num_tests = len(people), len(kept) + len(strangers)
    if len(kept) == num_people:
        raise ValueError(f"{store.path}: nobody has two recordings; enrol more, or calibrate on a list with --trials")
    if num_people < 2 and not len(strangers):
        raise ValueError(f"{store.path}: only one person; enrol others, or give recordings of strangers with --cohort")
    if num_tests * num_people > MOST_TRIALS:
        raise ValueError(f"{store.path}: more than {MOST_TRIALS:,} comparisons; calibrate on a list with --trials")
    units = mean_embeddings(np.stack([one.embedding for one in kept]), verifier.mean)
    weighted = units * np.array([one.weight for one in kept], dtype=np.float32)[:, None]
    sums = np.zeros((num_people, units.shape[1]), dtype=np.float32)
    np.add.at(sums, owner, weighted)
    own = np.arange(len(kept)), owner
    scores = np.concatenate([units, strangers]) @ mean_embeddings(sums).T  # (tests, people)
    # A recording is compared with the person's mean without it, which a person of one recording has not.
    scores[own] = (units * mean_embeddings(sums[owner] - weighted)).sum(axis=1)
    is_kept = np.ones(scores.shape, dtype=bool)
    is_kept[own] = np.bincount(owner)[owner] > 1
    test, enrol = np.nonzero(is_kept)
    ids = np.concatenate([np.arange(num_people), owner, np.arange(len(strangers)) + num_people]).astype(np.int32)
    names = [f"person {row}" for row in range(num_people)] + [f"test {row}" for row in range(num_tests)]
    trials = TrialList(
        StringTable.from_strings(names),
        enrol.astype(np.int32),
        (test + num_people).astype(np.int32),
        (ids[test + num_people] == enrol).astype(np.int8),
        str(store.path),
        sha256_of(store.path),
    )
    rule = f"people of {store.path.name}" + (", each recording of the cohort a speaker" if len(strangers) else "")
    return trials, scores[is_kept], Speakers(ids, len(np.unique(ids)), rule)


def _write(verifier: SpeakerVerifier, fit: Fit, results: Results, out: Path | None) -> tuple[Fit, Results, Path | None]:
    """Write the fit, unless the labels look swapped or it would replace one on more pairs."""
    # A model at the start of its training has an EER of 50 %, not this much.
    if (results.eer_percent or 0.0) > SWAPPED_EER_PERCENT:
        raise ValueError(
            f"{fit.origin['list']}: EER {results.eer_percent:.2f} %; are its labels swapped? Nothing was written"
        )
    old = fit.replaced(verifier.contents) if out is None else None
    num_pairs, num_old = (one.get("num_targets", 0) if one else 0 for one in (fit.origin, old))
    if num_pairs < min(FEW_TARGETS, num_old):
        raise ValueError(
            f"{verifier.name} holds a calibration on {num_old:,} pairs of one speaker, and this one has {num_pairs}; "
            "name another file with --out. Nothing was written"
        )
    return fit, results, update_model_file(verifier.name, fit.changes(verifier.contents), out=out)
