"""Process many recordings: embed them into one file, or compare them to calibrate a model file.

A killed run of `embed` resumes after its complete blocks. Enrolled people are compared as in
`identify`, a recording with the mean of a person: for targets, the mean of the same person's other
recordings; for non-targets, the mean of a different person. A cohort adds strangers.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.lists import StringTable, TrialList, audio_folder_of, read_trials
from speakernet.data.opening import open_source
from speakernet.data.parts import WHOLE, WorkPart, share
from speakernet.data.sources import AudioSource
from speakernet.evaluation.embedding import (
    Embedder,
    Forward,
    embed_utterances,
    load_embeddings,
    save_embeddings,
    store_key,
)
from speakernet.evaluation.evaluate import fit_for_verifying
from speakernet.evaluation.figures import WORSE_THAN_CHANCE, figures
from speakernet.evaluation.fitting import Fit, fit_scores
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import FEW_TARGETS, Results
from speakernet.evaluation.scoring import VERIFYING, mean_embeddings, pair_scores, verifying_backend
from speakernet.evaluation.scoring import WHOLE as WHOLE_UTTERANCES
from speakernet.evaluation.speakers import Speakers, speakers_of
from speakernet.files import atomic_write, check_writable, sha256_of
from speakernet.inference.people import PeopleStore
from speakernet.inference.recordings import ChosenChannels, refuse_recording_as_output
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.models.model_file import update_model_file
from speakernet.options import DEFAULT_SEED
from speakernet.terminal import MAX_NAMED, Bar, counted

BLOCK_UTTERANCES = 64
"""Utterances written together; a kill loses at most one block."""
BLOCKS_SUFFIX = ".parts"
WAY = {"embedding": "whole", "wrapped": False}
SWAPPED_EER_PERCENT = 75.0
"""Above this EER the network separates people, but the labels are swapped."""
MAX_TRIALS = 20_000_000
"""Limit on comparisons of enrolled people; more take too much memory."""


def embed_files(
    verifier: SpeakerVerifier,
    source: AudioSource,
    names: StringTable,
    out: Path,
    *,
    skips_broken: bool = False,
    part: WorkPart = WHOLE,
) -> tuple[int, int, list[str], list[WorkPart]]:
    """Write `names`, `embeddings` (recordings, dim) and `fingerprint` as a `.npz` of plain arrays.

    The speech alone is embedded if the source is a `SpokenSource`.

    Returns:
        The number of embeddings written, the number kept from an earlier run, a sentence for each
        recording left out, and the missing parts; `out` is not written while parts are missing.
    """
    if out.suffix != ".npz" or out.is_dir():
        raise ValueError(f"--out {out}: expected a file name ending in .npz")
    check_writable(out)
    table = source.lookup_table(names)
    broken = {int(row): text for row, text in table.problems.items()}
    for row in np.flatnonzero(np.asarray(table.num_samples) < verifier.net.min_samples).tolist():
        broken.setdefault(row, f"too short, {table.num_samples[row] / source.sample_rate:.3f} s")
    problems = [
        text if names[row] in text else f"{names[row]}: {text}"
        for row, text in sorted(broken.items())
    ]
    if problems and not skips_broken:
        raise AudioError(
            f"{len(problems)} of {counted(len(names), 'recording')} cannot be embedded "
            "(--skip-broken leaves out such recordings): "
            f"{'; '.join(problems[:MAX_NAMED])}{' …' if len(problems) > MAX_NAMED else ''}"
        )
    rows = np.array([row for row in range(len(names)) if row not in broken], dtype=np.int64)
    folder = out.with_name(out.name + BLOCKS_SUFFIX)
    blocks = [
        names.take(rows[start : start + BLOCK_UTTERANCES])
        for start in range(0, len(rows), BLOCK_UTTERANCES)
    ]
    paths = [folder / f"{number:06d}.npz" for number in range(len(blocks))]
    way = {**WAY, "channel": source.wanted} if isinstance(source, ChosenChannels) else WAY
    keys = [
        store_key(verifier.fingerprint, block, source.lookup_table(block), way) for block in blocks
    ]
    own_blocks = share(range(len(blocks)), part.number, part.count)
    num_kept = 0
    with Bar("embedding", sum(len(blocks[number]) for number in own_blocks), "utterance") as bar:
        for number in own_blocks:
            if load_embeddings(paths[number], keys[number]) is not None:
                num_kept += len(blocks[number])
            else:
                found = _embed_block(
                    verifier, source, blocks[number], problems if skips_broken else None
                )
                save_embeddings(paths[number], keys[number], blocks[number], found)
            bar.update(len(blocks[number]))
    kept = [load_embeddings(path, key) for path, key in zip(paths, keys, strict=True)]
    parts = [WorkPart(number, part.count) for number in range(1, part.count + 1)]
    missing = [
        other
        for other in parts
        if any(block is None for block in share(kept, other.number, other.count))
    ]
    if missing:
        return 0, num_kept, problems, missing
    empty = np.empty((0, verifier.embedding_dim), dtype=np.float32)
    embeddings = np.concatenate([empty, *(block for block in kept if block is not None)])
    is_there = np.isfinite(embeddings).all(axis=1)
    if not is_there.any():
        raise AudioError(
            f"none of the recordings could be embedded: {'; '.join(problems[:MAX_NAMED])}"
        )
    with atomic_write(out, "wb") as file:
        there = np.array(list(names.take(rows[is_there])))
        np.savez(
            file,
            names=there,
            embeddings=embeddings[is_there],
            fingerprint=np.array(verifier.fingerprint),
        )
    if part == WHOLE:
        # With several parts, another process may be reading the same blocks.
        shutil.rmtree(folder, ignore_errors=True)
    return int(is_there.sum()), num_kept, problems, missing


def _embed_block(
    verifier: SpeakerVerifier, source: AudioSource, names: StringTable, problems: list[str] | None
) -> np.ndarray:
    """Embeddings (recordings, dim); a recording that cannot be embedded gets a NaN row and a
    sentence in `problems`.
    """
    try:
        # Short recordings are not wrapped around, as in `SpeakerVerifier.embed`.
        values = embed_utterances(
            verifier.embedding_net,
            source,
            names,
            WHOLE_UTTERANCES,
            Forward(verifier.device),
            description="",
            wrapped_seconds=0.0,
        )[:, 0]
        if (is_bad := ~np.isfinite(values).all(axis=1)).any():
            raise AudioError(
                f"{names[int(is_bad.argmax())]}: the embedding has NaN or infinite values"
            )
        return values
    except AudioError as error:
        if problems is None:
            raise
        if len(names) == 1:
            problems.append(str(error))
            return np.full((1, verifier.embedding_dim), np.nan, dtype=np.float32)
    return np.concatenate(
        [
            _embed_block(verifier, source, StringTable.from_strings([name]), problems)
            for name in names
        ]
    )


def calibrate_on_trials(
    verifier: SpeakerVerifier,
    trials_path: Path,
    audio: Path | None,
    prior: float,
    out: Path | None = None,
    measures: Sequence[str] = (),
) -> tuple[Fit, Results, Path | None]:
    """Fit on a labelled list and write into the model file or `out`; returns the fit, its figures
    and any backup.

    With quality measures a second fit is written, which `verify` uses.
    """
    check_writable(out or verifier.name)
    trials = read_trials(trials_path)
    source = open_source(
        audio or audio_folder_of(trials_path), verifier.sample_rate, show_progress=True
    )
    refuse_recording_as_output(out, source, trials.names)
    embedder = Embedder(verifier.embedding_net, VERIFYING, Forward(verifier.device))
    fits, scores = fit_for_verifying(embedder, verifier.contents, trials, source, prior, measures)
    results = figures(trials, scores, speakers_of(trials), EvaluationOptions(), DEFAULT_SEED)
    # Even an untrained network has an EER of only about 50 %.
    if (results.eer_percent or 0.0) > SWAPPED_EER_PERCENT:
        raise ValueError(
            f"{trials_path}: the EER is {results.eer_percent:.2f} %; check that 1 marks trials of "
            "one speaker. Nothing was written"
        )
    return _write(verifier, fits, results, out)


def calibrate_on_people(
    verifier: SpeakerVerifier,
    store: PeopleStore,
    cohort: tuple[AudioSource, StringTable] | None,
    prior: float,
    out: Path | None = None,
) -> tuple[Fit, Results, Path | None]:
    """Fit on the people in a store and, if given, strangers; returns the same as
    `calibrate_on_trials`.
    """
    check_writable(out or verifier.name)
    # Strangers are embedded as the people in the store were.
    way = VERIFYING.model_copy(update={"speech": store.facts["speech"]})
    strangers = np.empty((0, 1, verifier.embedding_dim), dtype=np.float32)
    if cohort is not None:
        refuse_recording_as_output(out, *cohort)
        strangers = embed_utterances(
            verifier.embedding_net, *cohort, way, Forward(verifier.device), description="cohort"
        )
    trials, scores, speakers = _own_trials(
        verifier, store, mean_embeddings(strangers, verifier.mean)
    )
    fit = fit_scores(trials, scores, prior, verifying_backend(verifier.contents).describe(way))
    results = figures(trials, scores, speakers, EvaluationOptions(), DEFAULT_SEED)
    if (results.eer_percent or 0.0) >= WORSE_THAN_CHANCE:
        raise ValueError(
            f"{store.path}: the EER is {results.eer_percent:.2f} %, so recordings of different "
            "people score as high as those of one person, or higher; check who is enrolled under "
            "which name. Nothing was written"
        )
    return _write(verifier, [fit], results, out)


def _own_trials(
    verifier: SpeakerVerifier, store: PeopleStore, strangers: np.ndarray
) -> tuple[TrialList, np.ndarray, Speakers]:
    """Trials of all recordings and strangers against all people; a recording is left out of its own
    person's mean.
    """
    kept = store.recordings()
    people, owner = np.unique([recording.name for recording in kept], return_inverse=True)
    num_people = len(people)
    num_tests = len(kept) + len(strangers)
    if len(kept) == num_people:
        raise ValueError(
            f"{store.path}: nobody has two recordings; enrol more, or calibrate on a list with "
            "--trials"
        )
    if num_people < 2 and not len(strangers):
        raise ValueError(
            f"{store.path}: only one person; enrol more, or give recordings of strangers with "
            "--cohort"
        )
    if num_tests * num_people > MAX_TRIALS:
        raise ValueError(
            f"{store.path}: needs over {MAX_TRIALS:,} comparisons; calibrate on a list with "
            "--trials"
        )
    units = mean_embeddings(np.stack([recording.embedding for recording in kept]), verifier.mean)
    weighted = units * np.array([recording.weight for recording in kept], dtype=np.float32)[:, None]
    sums = np.zeros((num_people, units.shape[1]), dtype=np.float32)
    np.add.at(sums, owner, weighted)
    own = np.arange(len(kept)), owner
    tests = np.concatenate([units, strangers])
    scores = pair_scores(tests, mean_embeddings(sums), verifier.plda)  # (tests, people)
    # A recording is compared with its person's mean over the others, which needs at least two
    # recordings.
    others = mean_embeddings(sums[owner] - weighted)
    if verifier.plda is None:
        scores[own] = (units * others).sum(axis=1)
    else:
        scores[own] = verifier.plda.trial_scores(
            np.concatenate([units, others]), own[0], own[0] + len(units)
        )
    is_kept = np.ones(scores.shape, dtype=bool)
    is_kept[own] = np.bincount(owner)[owner] > 1
    test, enrol = np.nonzero(is_kept)
    ids = np.concatenate(
        [np.arange(num_people), owner, np.arange(len(strangers)) + num_people]
    ).astype(np.int32)
    names = [f"person {row}" for row in range(num_people)] + [
        f"test {row}" for row in range(num_tests)
    ]
    trials = TrialList(
        StringTable.from_strings(names),
        enrol.astype(np.int32),
        (test + num_people).astype(np.int32),
        (ids[test + num_people] == enrol).astype(np.int8),
        str(store.path),
        sha256_of(store.path),
    )
    rule = f"people of {store.path.name}" + (
        ", each cohort recording as its own speaker" if len(strangers) else ""
    )
    return trials, scores[is_kept], Speakers(ids, len(np.unique(ids)), rule)


def _write(
    verifier: SpeakerVerifier, fits: Sequence[Fit], results: Results, out: Path | None
) -> tuple[Fit, Results, Path | None]:
    """Write the fits and return the last; ValueError if a fit on more pairs would be lost."""
    fit = fits[-1]
    changes = dict[str, Any]()
    old = fits[0].replaced(verifier.contents) if out is None else None
    num_pairs, num_old = (
        origin.get("num_targets", 0) if origin else 0 for origin in (fit.origin, old)
    )
    if num_pairs < min(FEW_TARGETS, num_old):
        raise ValueError(
            f"{verifier.name} was calibrated on {num_old:,} same-speaker pairs, but the new "
            f"calibration has only {num_pairs}. Nothing was written; to keep both, write to a "
            "different file with --out"
        )
    for fit in fits:
        changes |= fit.changes({**verifier.contents, **changes})
    return fit, results, update_model_file(verifier.name, changes, out=out)
