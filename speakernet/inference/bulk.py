"""Process many recordings: embed them into one file, or compare them to calibrate a model file.

A killed run of `embed` resumes after its complete blocks. Enrolled people are compared as in
`identify`, a recording with all of a person: for targets, the same person's other recordings; for
non-targets, a different person. A cohort adds strangers.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from speakernet.data.audio import AudioError
from speakernet.data.lists import StringTable, TrialList, audio_folder_of, read_trials
from speakernet.data.opening import open_source
from speakernet.data.parts import WHOLE, WorkPart, share
from speakernet.data.sources import AudioSource
from speakernet.evaluation.embedding import (
    Embedder,
    Forward,
    Kept,
    embed_utterances,
    load_embeddings,
    save_embeddings,
    store_key,
)
from speakernet.evaluation.figures import WORSE_THAN_CHANCE, figures
from speakernet.evaluation.fitting import Fit, fit_scores
from speakernet.evaluation.further import fit_for_verifying
from speakernet.evaluation.results import FEW_TARGETS, Results
from speakernet.evaluation.scoring import VERIFYING, Plda, mean_embeddings, verifying_backend
from speakernet.evaluation.several import SeveralRecordings, fit_several_on_people
from speakernet.evaluation.speakers import Speakers, speakers_of
from speakernet.files import atomic_write, check_writable, sha256_of
from speakernet.inference.people import PeopleStore, Voices, voices_of
from speakernet.inference.recordings import ChosenChannels, refuse_recording_as_output
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.models.model_file import update_model_file
from speakernet.terminal import MAX_NAMED, Bar, counted

BLOCK_UTTERANCES = 64
"""Utterances written together; a kill loses at most one block."""
BLOCKS_SUFFIX = ".parts"
SWAPPED_EER_PERCENT = 75.0
"""Above this EER the network separates people, but the labels are swapped."""
MAX_TRIALS = 20_000_000
"""Limit on comparisons of enrolled people; more take too much memory."""


class EmbeddedFiles(NamedTuple):
    """What `embed_files` did."""

    num_embedded: int
    """Embeddings in the file; 0 if it was not written, because parts are missing."""
    num_kept: int
    """Embeddings of this part that an earlier run made."""
    problems: list[str]
    """A sentence for each recording left out."""
    missing: list[WorkPart]


class Block(NamedTuple):
    """Recordings whose embeddings are in one file."""

    path: Path
    key: str
    names: StringTable


def embed_files(
    verifier: SpeakerVerifier,
    source: AudioSource,
    names: StringTable,
    out: Path,
    *,
    skips_broken: bool,
    part: WorkPart,
) -> EmbeddedFiles:
    """Write `names`, `embeddings` (recordings, dim) and `fingerprint` as a `.npz` of plain arrays.

    The speech alone is embedded if the source is a `SpokenSource`.
    """
    if out.suffix != ".npz" or out.is_dir():
        raise ValueError(f"--out {out}: expected a file name ending in .npz")
    check_writable(out)
    embeddable, problems = _find_embeddable(source, names, verifier.min_samples)
    if problems and not skips_broken:
        raise AudioError(
            f"{len(problems)} of {counted(len(names), 'recording')} cannot be embedded "
            f"(--skip-broken leaves out such recordings): {'; '.join(problems[:MAX_NAMED])}"
        )
    # Recordings are embedded in blocks, each in a file of its own below `out.parts`. A run that is
    # killed continues after the last complete block, whose key says which recordings it holds, how
    # they were embedded and by which network; a block of anything else is made again. Several
    # processes may each take a part of the blocks; whoever finds all of them joins them.
    folder = out.with_name(out.name + BLOCKS_SUFFIX)
    # Every process plans all blocks, so that the one that finishes last can join them.
    blocks = _plan_blocks(verifier, source, embeddable, folder)
    left_out = problems if skips_broken else None
    num_kept = _embed_blocks(verifier, source, share(blocks, part.number, part.count), left_out)
    kept = [load_embeddings(block.path, block.key) for block in blocks]
    parts = [WorkPart(number, part.count) for number in range(1, part.count + 1)]
    missing = [other for other in parts if None in share(kept, other.number, other.count)]
    if missing:
        return EmbeddedFiles(0, num_kept, problems, missing)
    embedded = [np.empty((0, verifier.embedding_dim), dtype=np.float32)]
    embedded += [block.embeddings for block in kept if block is not None]
    embeddings = np.concatenate(embedded)
    # Rows of NaN are recordings that --skip-broken left out (`_embed_block`).
    rows = np.flatnonzero(np.isfinite(embeddings).all(axis=1))
    if not len(rows):
        raise AudioError(
            f"none of the recordings could be embedded: {'; '.join(problems[:MAX_NAMED])}"
        )
    with atomic_write(out, "wb") as file:
        np.savez(
            file,
            names=np.array(list(embeddable.take(rows))),
            embeddings=embeddings[rows],
            fingerprint=np.array(verifier.fingerprint),
        )
    if part == WHOLE:
        # With several parts, another process may be reading the same blocks.
        shutil.rmtree(folder, ignore_errors=True)
    return EmbeddedFiles(len(rows), num_kept, problems, missing)


def _find_embeddable(
    source: AudioSource, names: StringTable, min_samples: int
) -> tuple[StringTable, list[str]]:
    """The recordings that are long enough and readable, and a sentence for each other."""
    rows = []
    problems = []
    # Only headers are read, so a short or unreadable file is reported before hours of embedding.
    table = source.lookup_table(names)
    for row, name in enumerate(names):
        problem = table.problems.get(row, "")
        if not problem and table.num_samples[row] < min_samples:
            problem = f"too short, {table.num_samples[row] / source.sample_rate:.3f} s"
        if not problem:
            rows.append(row)
        else:
            problems.append(problem if name in problem else f"{name}: {problem}")
    return names.take(np.array(rows, dtype=np.int64)), problems


def _plan_blocks(
    verifier: SpeakerVerifier, source: AudioSource, names: StringTable, folder: Path
) -> list[Block]:
    # How recordings are embedded, for the keys.
    settings: dict[str, Any] = {"embedding": "whole", "wrapped": False}
    if isinstance(source, ChosenChannels):
        settings["channel"] = source.requested
    blocks: list[Block] = []
    for start in range(0, len(names), BLOCK_UTTERANCES):
        block = names.take(np.arange(len(names))[start : start + BLOCK_UTTERANCES])
        key = store_key(verifier.fingerprint, block, source.lookup_table(block), settings)
        blocks.append(Block(folder / f"{len(blocks):06d}.npz", key, block))
    return blocks


def _embed_blocks(
    verifier: SpeakerVerifier,
    source: AudioSource,
    blocks: Sequence[Block],
    left_out: list[str] | None,
) -> int:
    """Embed the blocks that no earlier run has; the number of recordings in the others."""
    num_kept = 0
    with Bar("embedding", sum(len(block.names) for block in blocks), "utterance") as bar:
        for path, key, names in blocks:
            # Only to check that it is complete; it is read again when all are joined.
            if load_embeddings(path, key) is not None:
                num_kept += len(names)
            else:
                embeddings = _embed_block(verifier, source, names, left_out)
                save_embeddings(path, key, names, Kept(embeddings))
            bar.update(len(names))
    return num_kept


def _embed_block(
    verifier: SpeakerVerifier,
    source: AudioSource,
    names: StringTable | Sequence[str],
    left_out: list[str] | None,
) -> ndarray:
    """Embeddings (recordings, dim).

    A recording that cannot be embedded gets a NaN row and a sentence in `left_out`; without this
    list, it is an error.
    """
    try:
        values = verifier.embed_source(source, names)
        is_bad = ~np.isfinite(values).all(axis=1)
        if is_bad.any():
            name = names[int(is_bad.argmax())]
            raise AudioError(f"{name}: the embedding has NaN or infinite values")
        return values
    except AudioError as error:
        if left_out is None:
            raise
        if len(names) == 1:
            left_out.append(str(error))
            return np.full((1, verifier.embedding_dim), np.nan, dtype=np.float32)
    # The error does not say which recording of a batch is broken, so they are tried again one by
    # one. That is slow, but only happens to blocks with a broken recording.
    return np.concatenate([_embed_block(verifier, source, [name], left_out) for name in names])


def calibrate_on_trials(
    verifier: SpeakerVerifier,
    trials_path: Path,
    audio: Path | None,
    prior: float,
    out: Path | None = None,
    measures: Sequence[str] | None = None,
) -> tuple[Fit, Results, Path | None]:
    """Fit on a labelled list and write the result into the model file, or into `out`.

    With quality measures a second fit is written, which decisions use. If `measures` is None, it is
    one with durations, provided that it lowers Cllr for speakers left out of the fit.

    Returns:
        The fit, its figures and, if the model file was changed, its backup.
    """
    check_writable(out or verifier.name)
    trials = read_trials(trials_path)
    source = open_source(
        audio or audio_folder_of(trials_path), verifier.sample_rate, show_progress=True
    )
    missing = source.missing(trials.names)
    if audio is None and len(missing):
        raise AudioError(
            f"{len(missing):,} of {len(trials.names):,} recordings of {trials_path} are not in its "
            f"folder {audio_folder_of(trials_path)}, such as {trials.names[int(missing[0])]}; give "
            "the folder that the paths in the list start from with --audio"
        )
    refuse_recording_as_output(out, source, trials.names)
    # Embedded as for decisions, on detected speech; otherwise the calibration would not hold for
    # them.
    embedder = Embedder(verifier.embedding_net, VERIFYING, Forward(verifier.device))
    fits, scores = fit_for_verifying(embedder, verifier.contents, trials, source, prior, measures)
    results = figures(trials, scores, speakers_of(trials))
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
    strangers = mean_embeddings(strangers, verifier.mean)
    # Scores against several recordings vary less than those against one, so their scale is fitted
    # first, and the trials are scored with it.
    voices = _voices_to_calibrate_on(store, verifier, len(strangers))
    several = (
        fit_several_on_people(voices.units, voices.owners, verifier.plda) or verifier.rule.several
    )
    trials, scores, speakers = _make_trials(voices, strangers, verifier.plda, several, store.path)
    fit = fit_scores(trials, scores, prior, verifying_backend(verifier.contents).describe(way))
    fit = replace(fit, several=several)
    results = figures(trials, scores, speakers)
    if (results.eer_percent or 0.0) >= WORSE_THAN_CHANCE:
        raise ValueError(
            f"{store.path}: the EER is {results.eer_percent:.2f} %, so recordings of different "
            "people score as high as those of one person, or higher; check who is enrolled under "
            "which name. Nothing was written"
        )
    return _write(verifier, [fit], results, out)


def _voices_to_calibrate_on(
    store: PeopleStore, verifier: SpeakerVerifier, num_strangers: int
) -> Voices:
    """The people in a store; ValueError if they allow no comparison, or too many."""
    voices = voices_of(store.recordings(), verifier.mean)
    num_people = len(voices.names)
    num_recordings = len(voices.units)
    if num_recordings == num_people:
        raise ValueError(
            f"{store.path}: nobody has two recordings; enrol more, or calibrate on a list with "
            "--trials"
        )
    if num_people < 2 and not num_strangers:
        raise ValueError(
            f"{store.path}: only one person; enrol more, or give recordings of strangers with "
            "--cohort"
        )
    if (num_recordings + num_strangers) * num_people > MAX_TRIALS:
        raise ValueError(
            f"{store.path}: needs over {MAX_TRIALS:,} comparisons; calibrate on a list with "
            "--trials"
        )
    return voices


def _make_trials(
    voices: Voices, strangers: ndarray, plda: Plda | None, several: SeveralRecordings, path: Path
) -> tuple[TrialList, ndarray, Speakers]:
    """Trials of all recordings and strangers against all people, scored as in `identify`; a
    recording is left out of its own person's mean.
    """
    # All scores are one product of matrices, (tests, people). Only the entries of a recording and
    # its own person are wrong there: the mean of the person contains the recording itself, whose
    # cosine with itself is 1. So its share is taken out of the mean score and of the length of the
    # mean, rather than scoring every recording against a mean of its own.
    owners = voices.owners
    num_people = len(voices.names)
    tests = np.concatenate([voices.units, strangers])
    means = voices.mean_scores(tests, plda)  # (tests, people)
    squared_lengths = np.broadcast_to(voices.squared_lengths, means.shape).copy()
    # A recording is compared with its person's other recordings, of which there must be one.
    has_others = np.bincount(owners)[owners] > 1
    rows = np.flatnonzero(has_others)
    people = owners[rows]
    with_itself = np.ones(len(rows), dtype=np.float32)
    if plda is not None:
        with_itself = plda.trial_scores(voices.units, rows, rows)
    shares = voices.weights[rows] / voices.totals[people]
    means[rows, people] = (means[rows, people] - shares * with_itself) / (1 - shares)
    rest = voices.means[people] - shares[:, None] * voices.units[rows]
    squared_lengths[rows, people] = np.square(rest).sum(axis=1) / (1 - shares) ** 2
    scores = several.as_one(means, squared_lengths)
    # A person with a single recording has nothing left to be compared with, but is still a
    # non-target for everybody else.
    is_kept = np.ones(scores.shape, dtype=bool)
    is_kept[np.arange(len(owners)), owners] = has_others
    test, enrol = np.nonzero(is_kept)
    # People come first in the names of the trials, then the tests.
    test += num_people
    # Speakers for the intervals, which draw speakers because scores of one person depend on each
    # other. Each stranger is a speaker of its own.
    ids = np.concatenate([np.arange(num_people), owners, num_people + np.arange(len(strangers))])
    names = [f"person {row}" for row in range(num_people)]
    names += [f"test {row}" for row in range(len(tests))]
    rule = f"people of {path.name}"
    if len(strangers):
        rule += ", each cohort recording as its own speaker"
    trials = TrialList(
        StringTable.from_strings(names),
        enrol.astype(np.int32),
        test.astype(np.int32),
        (ids[test] == enrol).astype(np.int8),
        str(path),
        sha256_of(path),
    )
    speakers = Speakers(ids.astype(np.int32), len(np.unique(ids)), rule)
    return trials, scores[is_kept], speakers


def _write(
    verifier: SpeakerVerifier, fits: Sequence[Fit], results: Results, out: Path | None
) -> tuple[Fit, Results, Path | None]:
    """Write the fits and return the first; ValueError if a fit on more pairs would be lost."""
    fit = fits[0]
    num_old = 0
    # With --out, the model file keeps its calibration.
    if out is None and (replaced := fit.find_replaced(verifier.contents)):
        num_old = replaced.get("num_targets", 0)
    num_new = fit.origin.get("num_targets", 0)
    if num_new < min(FEW_TARGETS, num_old):
        raise ValueError(
            f"{verifier.name} was calibrated on {num_old:,} same-speaker pairs, but the new "
            f"calibration has only {num_new}. Nothing was written; to keep both, write to a "
            "different file with --out"
        )
    changes: dict[str, Any] = {}
    for added in fits:
        # Each fit is added to those already in the file, including the previous ones of this loop.
        changes |= added.changes({**verifier.contents, **changes})
    return fit, results, update_model_file(verifier.name, changes, out=out)
