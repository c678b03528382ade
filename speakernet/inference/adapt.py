"""Adapt a model file to recordings of a different domain: choose and fit a back end, and write it
to a new model file.

The back end follows the network's embedding layer in the new file, so that every command uses it.
With labels, it is chosen by cross-validation over speakers; the scores from it also give the new
file its calibration and thresholds. The mathematics is in `speakernet.evaluation.adaptation`.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from speakernet.checkpoint import write_checkpoint
from speakernet.data.audio import AudioError
from speakernet.data.lists import (
    StringTable,
    TrialList,
    audio_folder_of,
    read_training_list,
)
from speakernet.data.names import original_name, session_of
from speakernet.data.opening import open_source
from speakernet.data.sources import AudioSource
from speakernet.data.speech import cut_to_speech
from speakernet.evaluation import adaptation
from speakernet.evaluation.adaptation import Transform
from speakernet.evaluation.embedding import Embedder, Forward, preparation_in_words, weights_digest
from speakernet.evaluation.evaluate import score_trials
from speakernet.evaluation.figures import compare_scores, figures, why_no_error_rate
from speakernet.evaluation.fitting import Fit, fit_scores
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.options import ADAPTATIONS, EvaluationOptions
from speakernet.evaluation.scoring import VERIFYING, Plda, cosine_scores, verifying_backend
from speakernet.evaluation.several import first_of_each, fit_several_on_people
from speakernet.evaluation.speakers import Speakers, read_csv, speakers_of
from speakernet.files import check_writable
from speakernet.inference.decision import MIN_TEST_SECONDS
from speakernet.inference.recordings import (
    audio_inputs,
    inspect_recording,
    refuse_recording_as_output,
)
from speakernet.inference.verifier import SpeakerVerifier, load
from speakernet.models.importers.plda import read_array, read_plda
from speakernet.models.model_file import model_file_contents, model_of
from speakernet.models.speaker_net import SpeakerNet, fold_network
from speakernet.options import DEFAULT_SEED, default_of
from speakernet.random import numpy_generator
from speakernet.terminal import MAX_NAMED, Bar, counted

FOLDERS = "folders"
"""Labels are the names of the folders directly below the given ones."""
MIN_RECORDINGS = 20
"""With fewer, even their mean is a matter of luck."""
MIN_SPEAKERS = 10
"""With fewer, a choice by held-out speakers is a matter of luck."""
NUM_FOLDS = 5
"""Folds of speakers in cross-validation."""
NUM_DRAWS = 3
"""Random divisions into folds, whose error rates are averaged."""
MAX_EACH = 12
"""Limit on a speaker's test recordings in cross-validation, so that nobody dominates."""
ENERGY_FLOOR_DB = 25.0
"""See `frontend.energy_floor_db`; chosen on telephone calls (docs/experiments.md)."""
TELEPHONE_PREPARATION: Mapping[str, Any] = MappingProxyType(
    {"speech": "detected", "repeat_seconds": 16.0}
)
"""What is done to telephone recordings before they are embedded (docs/experiments.md)."""
SHRINKAGES = (0.3, 0.5, 0.7, 0.8)
"""Shares of the identity in a covariance to try."""
INTERPOLATIONS = (0.25, 0.5, 0.75)
"""Shares of the other domain's covariances to try."""
TOTAL_SHARE = 0.4
"""Share of the covariance of all embeddings in a second variant of WCCN."""
FOLD_STREAM = 9301
AS_IT_IS = "the model as it is"
Fitter = Callable[..., Transform]
"""Embeddings and labels (None if unlabelled) -> a back end."""
ScoredTrials = tuple[TrialList, ndarray]
"""Trials and their scores."""


class Labels(NamedTuple):
    """Numbers of speakers and sessions, (recordings,)."""

    speakers: ndarray
    sessions: ndarray
    """-1 for an unknown session."""


class Domain(NamedTuple):
    """Embedded recordings of the target domain."""

    net: SpeakerNet
    """The network, with an energy floor and prepared recordings if they are of telephones."""
    rows: ndarray
    """(recordings, dim)"""
    unchanged_rows: ndarray
    """(recordings, dim), by the unchanged model."""
    who: Labels | None
    """None without labels."""
    names: list[str]


class ForeignFiles(NamedTuple):
    """A PLDA from another toolkit and the steps before it."""

    plda: str | Path
    """From Kaldi (binary or text) or wespeaker (HDF5)."""
    mean: str | Path | None = None
    """Kaldi vector that is subtracted first; None subtracts the mean of the recordings."""
    transform: str | Path | None = None
    """Kaldi matrix applied next, such as an LDA."""


class Comparison(NamedTuple):
    """A labelled trial list on which the adapted model is compared with the unchanged one."""

    trials: TrialList
    """From `read_trials`."""
    audio: str | Path | None = None
    """Folder or packed corpus with its audio; by default the folder of the list."""


@dataclass(frozen=True)
class Adapted:
    """What `adapt` wrote, and how it was chosen."""

    path: Path
    method: str
    num_recordings: int
    num_speakers: int
    """0 without labels."""
    tried: dict[str, float]
    """Method -> EER in percent on held-out speakers; empty without labels."""
    fit: Fit | None
    """Calibration and thresholds; None without labels."""
    notes: list[str]
    """Sentences; if trials were given, the last ones compare the models on them."""


def adapt(
    model: str | Path,
    recordings: Sequence[str | Path],
    *,
    labels: str | Path | None = None,
    out: str | Path | None = None,
    method: str | ForeignFiles = "auto",
    out_of_domain: str | Path | None = None,
    comparison: Comparison | None = None,
    device: str = "auto",
) -> Adapted:
    """Fit a back end on recordings of the target domain and write it into a new model file.

    Args:
        model: the model file, which is never changed. If it is already adapted, its underlying
            network is adapted.
        recordings: files, folders, lists, or a packed corpus.
        labels: `folders` (one per speaker below the given folder, with sessions in subfolders), a
            list with lines `speaker path`, or a CSV with the columns path, speaker and, if known,
            session or call.
        out: the file to write; `<model>.adapted.pt` by default.
        method: one of ADAPTATIONS; auto: with labels the best by cross-validation, otherwise
            whitening, or the mean alone if there are few recordings. The files of a PLDA from
            another toolkit are imported instead.
        out_of_domain: a folder of other labelled recordings (one folder per speaker), for coral and
            an adapted plda.
        comparison: the trials on which both models are compared.
        device: where the network runs.

    Raises:
        ValueError: too few recordings or speakers, labels or embeddings that do not match, or no
            method better than the unchanged model. No file is written then.
    """
    # Everything that can be refused is refused before the slow part. Then the recordings are
    # embedded once, and the back ends compete on these embeddings alone: each is fitted on four
    # fifths of the speakers and tested on the rest, and the unchanged model competes too. The
    # scores of the best one's first division also give the new file its calibration. These are
    # scores of speakers that the back end had not seen, but the choice has seen them, so the
    # error rate is a little optimistic, the more so the fewer speakers there are.
    if not isinstance(method, ForeignFiles):
        _check_method(method, labels, out_of_domain)
    if comparison is not None and (reason := why_no_error_rate(comparison.trials)):
        raise ValueError(reason)
    target = _checked_target(model, out)
    verifier = load(model, device)
    notes: list[str] = []
    paths = [str(recording) for recording in recordings]
    needs_floor = not isinstance(method, ForeignFiles)
    domain = embed_domain(verifier, paths, labels, notes, needs_floor=needs_floor, out=target)
    name, transform, tried, scored = _choose(verifier, domain, method, out_of_domain)
    if not all(np.isfinite(values).all() for values in itertools.chain(*transform.maps)):
        raise ValueError(
            f"{name}: the recordings vary too little to fit it; give recordings of more people. "
            "Nothing was written"
        )
    num_recordings = len(domain.rows)
    num_speakers = 0 if domain.who is None else len(np.unique(domain.who.speakers))
    facts = {
        "method": name,
        "recordings": num_recordings,
        "speakers": num_speakers,
        "eer_percent": tried,
    }
    contents = adapted_contents(verifier.contents, domain.net, transform, facts)
    fit = None
    if scored is not None:
        assert domain.who is not None, "methods are compared by their labels"
        speakers = domain.who.speakers
        notes.insert(0, _held_out_error(name, tried, speakers, scored))
        prior = default_of(EvaluationOptions, "calibration_prior")
        fit = fit_scores(*scored, prior, verifying_backend(contents).describe(VERIFYING))
        several = fit_several_on_people(transform.apply(domain.rows), speakers, transform.plda)
        fit = replace(fit, several=several)
        contents |= fit.changes(contents)
    if comparison is not None:
        notes += _compare(verifier, contents, comparison, domain.names)
    write_checkpoint(target, contents)
    return Adapted(target, name, num_recordings, num_speakers, tried, fit, notes)


def _check_method(method: str, labels: str | Path | None, out_of_domain: str | Path | None) -> None:
    if method not in ADAPTATIONS:
        raise ValueError(f"method {method!r}; expected one of {', '.join(ADAPTATIONS)}")
    if method == "coral" and out_of_domain is None:
        raise ValueError("coral needs recordings of the other domain; give --out-of-domain FOLDER")
    needs_labels = method in ("lda", "wccn") or (method == "plda" and out_of_domain is None)
    if needs_labels and labels is None:
        raise ValueError(
            f"{method} needs speaker labels: --labels, or for plda also --out-of-domain"
        )


def adapted_path(model: str | Path, out: str | Path | None) -> Path:
    """The file that `adapt` writes: `out`, by default beside the model."""
    return Path(out or Path(model).with_suffix(f".adapted{Path(model).suffix}"))


def _checked_target(model: str | Path, out: str | Path | None) -> Path:
    target = adapted_path(model, out)
    if target.resolve() == Path(model).resolve():
        raise ValueError(
            f"{target} is the model itself, which is never changed; give a different file (--out)"
        )
    check_writable(target)
    return target


def _choose(
    verifier: SpeakerVerifier,
    domain: Domain,
    method: str | ForeignFiles,
    out_of_domain: str | Path | None,
) -> tuple[str, Transform, dict[str, float], ScoredTrials | None]:
    """The best back end, or without labels the default one, or the imported one: its name, what was
    fitted, the EERs of all methods in percent, and its scores of held-out speakers.
    """
    rows = domain.rows
    who = domain.who
    if isinstance(method, ForeignFiles):
        return f"plda of {Path(method.plda).name}", import_plda(rows, method), {}, None
    other_domain = None
    if out_of_domain is not None:
        folder = [str(out_of_domain)]
        source, names = audio_inputs(folder, verifier.sample_rate)
        labelled, labels = _labels_of(list(names), folder, FOLDERS, [])
        names = names.take(labelled)
        rows_there = _embed(verifier, domain.net, source, names, "other domain")
        other_domain = rows_there, labels.speakers
    fitters = _fitters(method, rows, who, other_domain)
    if who is None:
        # If the last one is an adapted PLDA, the share in its name has no effect without labels.
        name = list(fitters)[-1]
        return name, fitters[name](rows, None), {}, None
    mean = np.zeros(verifier.embedding_dim) if verifier.mean is None else verifier.mean
    unchanged = Transform(((np.eye(verifier.embedding_dim), -mean),), verifier.plda)
    as_it_is, _ = cross_validate(domain.unchanged_rows, who, lambda *_: unchanged)
    tried = {AS_IT_IS: as_it_is}
    scored = {}
    for name, fitter in fitters.items():
        tried[name], scored[name] = cross_validate(rows, who, fitter)
    best = min(fitters, key=tried.__getitem__)
    if method == "auto" and tried[best] >= as_it_is:
        raise ValueError(
            f"no method beats the unchanged model: {', '.join(in_words(tried))}; nothing was "
            "written"
        )
    return best, fitters[best](rows, who.speakers), tried, scored[best]


def in_words(tried: Mapping[str, float]) -> list[str]:
    """Error rates by method, lowest first."""
    return [f"{name}: {tried[name]:.2f} %" for name in sorted(tried, key=tried.__getitem__)]


def _held_out_error(
    method: str, tried: Mapping[str, float], labels: ndarray, scored: ScoredTrials
) -> str:
    """The method's EER on held-out speakers with its interval, and how far to trust it."""
    names, ids = np.unique(labels, return_inverse=True)
    speakers = Speakers(ids.astype(np.int32), len(names), "labels")
    interval = figures(*scored, speakers).eer_interval_percent
    text = f"{method}: EER {tried[method]:.2f} %"
    if interval:
        text += f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})"
    # The unchanged model does not count as a method.
    num_methods = len(tried) - 1
    if num_methods == 1:
        return text
    return (
        f"{text}, which is optimistic: it is the best of {num_methods} methods on the same "
        "speakers; --trials measures it on others"
    )


def import_plda(rows: ndarray, files: ForeignFiles) -> Transform:
    """Read a PLDA of Kaldi or wespeaker, to be applied after subtraction of a mean, an optional
    linear transform, and unit length.

    Kaldi and wespeaker scale lengths before PLDA to the root of the dimension; here the last map
    does so.
    """
    # A PLDA is only valid for embeddings that were centred, projected and scaled as they were when
    # it was fitted. These steps become maps of the new file, so that every command applies them.
    foreign = read_plda(files.plda)
    size = rows.shape[1]
    centre = rows.mean(axis=0)
    if files.mean is not None:
        centre = read_array(files.mean).reshape(-1)
    matrix = np.eye(size)
    if files.transform is not None:
        matrix = np.atleast_2d(read_array(files.transform))
    # Kaldi stores an offset as the last column.
    linear = matrix[:, :size]
    offset = matrix[:, size:].sum(axis=1)
    dim = len(foreign.between)
    # Files of another model are a likely mistake. Their sizes are all that can be checked.
    if centre.shape != (size,) or linear.shape != (dim, size):
        raise ValueError(
            f"{files.plda}: found a PLDA of {dim} dimensions, a mean of {len(centre)} and a "
            f"transform from {linear.shape[1]} to {linear.shape[0]}, but the model's embeddings "
            f"have {size}; give files that were made from its embeddings"
        )
    weights = 1 / (1 + foreign.between) if foreign.is_kaldi else np.ones(dim)
    first = linear, offset - linear @ centre
    last = foreign.transform * np.sqrt(dim), foreign.offset
    return Transform((first, last), Plda(foreign.between, weights))


def cross_validate(rows: ndarray, who: Labels, fitter: Fitter) -> tuple[float, ScoredTrials]:
    """The EER in percent on held-out speakers, averaged over several divisions, with trials and
    scores of the first.
    """
    # Folds are of speakers: with recordings of one speaker on both sides, a back end would be
    # tested on voices that it was fitted to, and the most flexible one would always win. Several
    # random divisions are averaged, because with 30 speakers a fold has six.
    _, speakers = np.unique(who.speakers, return_inverse=True)
    errors = []
    divisions = []
    for draw in range(NUM_DRAWS):
        random = numpy_generator(DEFAULT_SEED, FOLD_STREAM, draw)
        fold_of = (random.permutation(speakers.max() + 1) % NUM_FOLDS)[speakers]
        folds = []
        for fold in range(NUM_FOLDS):
            is_tested = fold_of == fold
            transform = fitter(rows[~is_tested], speakers[~is_tested])
            tested = random.permutation(np.flatnonzero(is_tested))
            # Otherwise a speaker with 60 recordings, who has 1,770 pairs, would outweigh 30
            # speakers with six each, who have 450 together.
            tested = np.sort(tested[first_of_each(speakers[tested], MAX_EACH)])
            folds.append(_score_pairs(rows, who, tested, transform))
        division = [np.concatenate(columns) for columns in zip(*folds, strict=True)]
        errors.append(eer(*division[:2]))
        divisions.append(division)
    # Trials of one division only: with all of them each pair would count three times, and the
    # intervals would be too narrow.
    scores, is_target, enrol, test = divisions[0]
    trials = TrialList(
        StringTable.from_strings([f"recording {row}" for row in range(len(rows))]),
        enrol.astype(np.int32),
        test.astype(np.int32),
        is_target.astype(np.int8),
        "cross-validation",
    )
    return float(np.mean(errors)), (trials, scores)


def _score_pairs(
    rows: ndarray, who: Labels, tested: ndarray, transform: Transform
) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Scores of all pairs of the tested rows, but no target pairs of one session; whether each is a
    target pair, and its two rows; (pairs,) each.
    """
    first, second = np.triu_indices(len(tested), 1)
    enrol = tested[first]
    test = tested[second]
    is_target = who.speakers[enrol] == who.speakers[test]
    # A pair within a session would compare the channel, not the voice.
    is_same_session = (who.sessions[enrol] == who.sessions[test]) & (who.sessions[enrol] >= 0)
    is_kept = ~(is_target & is_same_session)
    units = transform.apply(rows[tested])
    score = cosine_scores if transform.plda is None else transform.plda.trial_scores
    scores = score(units, first[is_kept], second[is_kept])
    return scores, is_target[is_kept], enrol[is_kept], test[is_kept]


def _fitters(
    method: str,
    rows: ndarray,
    who: Labels | None,
    other_domain: tuple[ndarray, ndarray] | None,
) -> dict[str, Fitter]:
    """The methods to try, with their settings, by name; without labels the last one is used."""
    # Without labels nothing can be compared, so only the largest shrinkage is fitted, which changes
    # the embeddings least.
    shrinkages: Sequence[float] = SHRINKAGES[-1:]
    dim = 0
    if who is not None:
        _, counts = np.unique(who.speakers, return_counts=True)
        # Only speakers with several recordings have target pairs, and a fold needs at least two of
        # them.
        num_several = np.count_nonzero(counts > 1)
        if num_several < MIN_SPEAKERS:
            raise ValueError(
                f"{num_several} of {len(counts)} speakers have several recordings, but a choice by "
                f"held-out speakers needs {MIN_SPEAKERS} or more; label more recordings, or leave "
                "out --labels"
            )
        # Each fit leaves out one fold of the speakers.
        shrinkages = SHRINKAGES
        dim = min(len(counts) * (NUM_FOLDS - 1) // NUM_FOLDS - 1, rows.shape[1])
    elif method == "auto":
        # With fewer recordings the covariance would be a guess.
        method = "whitening" if 2 * len(rows) >= rows.shape[1] else "mean"
    fitters: dict[str, Fitter] = {"mean": adaptation.centring}

    def add(name: str, fit: Fitter, shrinkage: float, **settings: Any) -> None:
        fitters[name] = functools.partial(fit, shrinkage=shrinkage, **settings)

    for shrinkage in shrinkages:
        add(f"whitening {shrinkage}", adaptation.whitening, shrinkage)
        wccn = f"wccn {shrinkage}"
        add(wccn, adaptation.wccn, shrinkage)
        add(f"{wccn} total {TOTAL_SHARE}", adaptation.wccn, shrinkage, total=TOTAL_SHARE)
        add(f"plda {shrinkage}", adaptation.plda, shrinkage)
        add(f"plda {shrinkage} dim {dim}", adaptation.plda, shrinkage, dim=dim)
        add(f"lda {shrinkage}", adaptation.lda, shrinkage, dim=dim)
        if other_domain is not None:
            add(f"coral {shrinkage}", adaptation.coral, shrinkage, others=other_domain[0])
    if other_domain is not None:
        # The other domain usually has more speakers but another channel. How much of it helps
        # varies, so several shares are tried.
        labelled = {"others": other_domain[0], "other_labels": other_domain[1]}
        for share in INTERPOLATIONS:
            name = f"plda {share} interpolated {share}"
            add(name, adaptation.adapted_plda, shrinkages[-1], share=share, **labelled)
    if method == "auto":
        return fitters
    return {name: fit for name, fit in fitters.items() if name.split()[0] == method}


def embed_domain(
    verifier: SpeakerVerifier,
    recordings: list[str],
    labels: str | Path | None,
    notes: list[str],
    *,
    needs_floor: bool = True,
    out: Path | None = None,
) -> Domain:
    """Embed the usable recordings, as those of telephones if their upper band is empty."""
    # A back end sees only what the network made of a recording. Over a telephone, the upper band is
    # empty, and the network hears the log energies of rounding errors there. So if most recordings
    # are like that, the front end gets an energy floor before anything is embedded, and the
    # unchanged model, with which the result is compared, does not.
    net = verifier.net
    source, names = audio_inputs(recordings, verifier.sample_rate)
    refuse_recording_as_output(out, source, names)
    refused, num_narrow = _inspect(verifier, source, names)
    # A corpus may have thousands of refused recordings, so only the first are named.
    reasons = "; ".join(list(refused.values())[:MAX_NAMED]) or "none is refused"
    accepted = np.setdiff1d(np.arange(len(names)), list(refused))
    if len(accepted) < MIN_RECORDINGS:
        raise ValueError(
            f"only {counted(len(accepted), 'usable recording')} of {len(names)} in "
            f"{', '.join(recordings)[:200]}; adaptation needs at least {MIN_RECORDINGS}, from many "
            f"people ({reasons})"
        )
    if refused:
        notes.append(f"left out {counted(len(refused), 'recording')}: {reasons}")
    names = names.take(accepted)
    who = None
    if labels is not None:
        labelled, who = _labels_of(list(names), recordings, labels, notes)
        names = names.take(labelled)
    supports_floor = "energy_floor_db" in type(net.front_end.options).model_fields
    if needs_floor and supports_floor and 2 * num_narrow > len(accepted):
        net = for_telephones(net)
        notes.append(
            f"{num_narrow} of {len(accepted)} recordings have an empty upper band, as over a "
            f"telephone; the front end gets an energy floor of {ENERGY_FLOOR_DB:g} dB, and "
            f"{preparation_in_words(net.preparation)} before they are embedded"
        )
    # An adapted model loses its back end first, or the new one would be fitted behind it.
    elif net.adaptation_spec:
        net = _remove_adaptation(net)
    rows = _embed(verifier, net, source, names, "recordings")
    unchanged_rows = rows
    # The unchanged model is the baseline in the cross-validation.
    if net is not verifier.net and who is not None:
        unchanged_rows = _embed(verifier, verifier.net, source, names, "unchanged")
    return Domain(net, rows, unchanged_rows, who, list(names))


def _inspect(
    verifier: SpeakerVerifier, source: AudioSource, names: StringTable
) -> tuple[dict[int, str], int]:
    """Row -> why the recording is not used, and how many others have an empty upper band."""
    # A copy adds no voice and no session, but its pair with the original would count as a perfect
    # recognition. In a recording without speech, the noise would count as somebody's voice.
    refused = {}
    num_narrow = 0
    first_of: dict[str, str] = {}
    with Bar("inspecting", len(names), "recording") as bar:
        for row, name in enumerate(bar.over(names)):
            try:
                quality = inspect_recording(verifier.open(source.read(name), source.sample_rate))
            except AudioError as error:
                refused[row] = str(error).replace("the array", name)
                continue
            original = first_of.setdefault(quality.digest, name)
            if original != name:
                refused[row] = f"{name}: a copy of {original}"
            elif not quality.speech_seconds and quality.seconds >= MIN_TEST_SECONDS:
                refused[row] = f"{name}: {quality.warnings[0]}"
            else:
                num_narrow += quality.is_band_limited
    return refused, num_narrow


def _embed(
    verifier: SpeakerVerifier,
    net: SpeakerNet,
    source: AudioSource,
    names: StringTable,
    description: str,
) -> ndarray:
    """Embeddings (utterances, dim) float64 of detected speech, as for decisions."""
    # Folded like a verifier's network: the back end has to be fitted on exactly the embeddings that
    # it will receive.
    embedding_net = fold_network(net).to(verifier.device)
    speech = cut_to_speech(source)
    return verifier.embed_source(speech, names, description, embedding_net).astype(np.float64)


def for_telephones(net: SpeakerNet) -> SpeakerNet:
    """The network without its adaptation, with the energy floor and the prepared recordings that
    telephones need.
    """
    twin = _remove_adaptation(net, {"energy_floor_db": ENERGY_FLOOR_DB})
    twin.preparation = dict(TELEPHONE_PREPARATION)
    return twin


def _remove_adaptation(
    net: SpeakerNet, front_end_options: Mapping[str, Any] | None = None
) -> SpeakerNet:
    """The network without its adaptation, with these options of its front end."""
    # A new network rather than a changed one, because the caller still needs the unchanged one as
    # the baseline.
    spec = net.spec()
    spec.pop("adaptation", None)
    spec["front_end"]["options"] |= front_end_options or {}
    twin = SpeakerNet.from_spec(spec)
    weights = net.weights().items()
    twin.load_state_dict(
        {name: values for name, values in weights if not name.startswith("adaptation.")}
    )
    return twin.eval().to(next(net.parameters()).device)


def _labels_of(
    names: list[str], roots: list[str], labels: str | Path, notes: list[str]
) -> tuple[ndarray, Labels]:
    """The rows of the labelled names and their labels, from a table, a list, or the folders below
    the roots.
    """
    # Paths in a list may be relative to the list, to the recordings or to the working directory. A
    # wrong base matches no recording, so all three are tried.
    bases = [Path(labels).parent, *map(Path, roots), Path()]
    row_of = {str(Path(name).resolve()): row for row, name in enumerate(names)}
    labelled: dict[int, tuple[str, str]] = {}
    for path, speaker, session in _read_labels(names, roots, labels):
        # The recordings may be the originals of those that the labels name.
        for base, name in itertools.product(bases, (path, original_name(path))):
            place = str((base / name).resolve())
            if place in row_of:
                labelled[row_of[place]] = speaker, session
                break
    if not labelled:
        raise ValueError(
            f"{labels}: names none of the {len(names)} recordings, such as {names[0]}; expected "
            "paths relative to the list, to the folder of the recordings, or to the working "
            "directory"
        )
    num_missing = len(names) - len(labelled)
    if num_missing:
        notes.append(f"left out {counted(num_missing, 'recording')} without a label")
    rows = np.array(sorted(labelled))
    pairs = np.array([labelled[row] for row in rows.tolist()])  # (recordings, 2)
    speakers, ids = np.unique(pairs[:, 0], return_inverse=True)
    if len(speakers) < 2:
        raise ValueError(
            f"{labels}: all recordings are of one speaker, {speakers[0]}; expected several speakers"
        )
    # Sessions are numbered over all speakers, since `monday` of Ada is not `monday` of Bo.
    sessions, session_ids = np.unique(pairs, axis=0, return_inverse=True)
    _, num_sessions = np.unique(sessions[:, 0], return_counts=True)
    num_several = np.count_nonzero(num_sessions > 1)
    if num_several < MIN_SPEAKERS:
        # The choice would rest on the target pairs of these few.
        notes.append(
            f"{num_several} of {len(speakers)} speakers are known to have several sessions, fewer "
            f"than {MIN_SPEAKERS}; pairs within a session are compared too, and make figures "
            "optimistic"
        )
        session_ids = np.full(len(rows), -1)
    return rows, Labels(ids, session_ids.reshape(-1))


def _read_labels(
    names: list[str], roots: list[str], labels: str | Path
) -> list[tuple[str, str, str]]:
    """Path, speaker and session (empty if unknown), from the folders in the names, a table or a
    list.
    """
    rows = []
    if str(labels) == FOLDERS:
        for name in names:
            file = Path(name)
            # The speaker is the first folder below the root, however deep the file lies; any
            # folders in between, such as a day or a telephone, are the session.
            root = next((root for root in roots if file.is_relative_to(root)), file.anchor)
            folders = file.relative_to(root).parts[:-1]
            if folders:
                rows.append((name, folders[0], "/".join(folders) if len(folders) > 1 else ""))
        return rows
    if Path(labels).suffix.lower() == ".csv":
        _, table = read_csv(labels, ("path", "speaker"))
        for row in table:
            rows.append((row["path"], row["speaker"], row.get("session", row.get("call", ""))))
        return rows
    listed = read_training_list(labels)
    for path, label in zip(listed.paths, listed.labels, strict=True):
        speaker = listed.speakers[label]
        rows.append((path, speaker, session_of(speaker, path)))
    return rows


def adapted_contents(
    contents: Mapping[str, Any], net: SpeakerNet, transform: Transform, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of an adapted model file: the network followed by the maps, without calibration
    or mean.
    """
    # The back end becomes part of the network, not a step of scoring, so that embeddings, stores of
    # people, exports and fingerprints include it without further code. The old calibration is left
    # out, because it does not hold for the new scores.
    twin = copy.deepcopy(net).cpu()
    tensors: dict[str, ndarray] = {}
    sizes = []
    for number, (matrix, offset) in enumerate(transform.maps):
        sizes.append([matrix.shape[1], matrix.shape[0]])
        tensors |= {f"maps.{number}.weight": matrix, f"maps.{number}.bias": offset}
    if transform.plda is not None:
        tensors |= vars(transform.plda)
    score = "cosine" if transform.plda is None else "plda"
    twin.adapt({"name": "", "maps": sizes, "score": score, **net.preparation})
    weights = {
        name: torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        for name, values in tensors.items()
    }
    twin.adaptation.load_state_dict(weights)
    twin.adaptation_spec["name"] = f"{facts['method']} {weights_digest(weights)[:12]}"
    return model_file_contents(
        twin,
        loss_normalizes=bool(contents.get("loss_normalizes", True)),
        training_summary={**(contents.get("training_summary") or {}), "adaptation": dict(facts)},
    )


def _compare(
    verifier: SpeakerVerifier,
    contents: dict[str, Any],
    comparison: Comparison,
    names: list[str],
) -> list[str]:
    """Compare both models on a trial list: their EERs, and the differences with intervals over
    speakers.
    """
    trials = comparison.trials
    folder = Path(comparison.audio or audio_folder_of(trials.source))
    source = open_source(folder, verifier.sample_rate, show_progress=True)
    # The comparison is optimistic if the list shares recordings with the adaptation, so their
    # number is reported.
    used = {Path(name).resolve() for name in names}
    num_shared = len(used & {(folder / name).resolve() for name in trials.names})
    # Built from the contents to be written, so that what is scored is what a command will load.
    adapted = model_of(contents, "the adapted model", verifier.device)
    scores = []
    for net, model in (
        (verifier.embedding_net, verifier.contents),
        (fold_network(adapted.net), adapted.contents),
    ):
        embedder = Embedder(net, VERIFYING, Forward(verifier.device))
        scores.append(score_trials(embedder, verifying_backend(model), trials, source).scores)
    result = compare_scores(
        trials,
        scores,
        speakers_of(trials),
        num_draws=default_of(EvaluationOptions, "bootstrap_samples"),
        seed=DEFAULT_SEED,
    )
    before, after = (system.eer_percent for system in result.systems)
    optimistic = ""
    if num_shared:
        optimistic = f" (optimistic: {num_shared} of its recordings were used for adaptation)"
    return [
        f"{trials.source}: EER {before:.2f} % before adaptation, {after:.2f} % after{optimistic}",
        *result.sentences(["the unchanged model", "the adapted model"]),
    ]
