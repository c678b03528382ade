"""Score trial lists with a model file according to the evaluation options.

Decides what scoring needs besides the network (mean embedding, cohort, calibration) and where to
get it: from the model file, otherwise from the lists of the configuration. Only the evaluation at
the end of training writes to the model file.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speakernet import distributed
from speakernet.assembly.inputs import Inputs, TrialInput, chosen_by_validation, cohort_of
from speakernet.assembly.training import build_model
from speakernet.assembly.validation import build_embedder
from speakernet.checkpoint import read_checkpoint
from speakernet.config import Config
from speakernet.config.schema import with_changes
from speakernet.evaluation.calibration import AffineCalibration
from speakernet.evaluation.cohort import (
    embed_cohort,
    mean_entries,
    plain_names,
)
from speakernet.evaluation.embedding import (
    Embedder,
    one_pass,
    weights_digest,
)
from speakernet.evaluation.evaluate import evaluate
from speakernet.evaluation.files import Evaluation
from speakernet.evaluation.further import (
    ScoringParts,
    calibrate,
    scores_of_audio,
    with_groups,
    with_provenance,
    with_training_lists,
)
from speakernet.evaluation.scoring import verifying_backend
from speakernet.evaluation.slices import read_metadata
from speakernet.evaluation.speakers import speakers_of
from speakernet.evaluation.sweep import Step
from speakernet.models.model_file import (
    SYNTHETIC_ONLY,
    ModelFile,
    is_model_file,
    load_initial_weights,
    model_file_contents,
    model_of,
    update_model_file,
    voices_caution,
)
from speakernet.models.speaker_net import fold_network
from speakernet.run_folder import EMBEDDINGS, EVALUATIONS, evaluation_folder

logger = logging.getLogger(__name__)


def run_evaluation(
    config: Config, inputs: Inputs, model_path: str | Path, *, after_training: bool = False
) -> Evaluation:
    """Score the test lists with a model file; training data is needed only for what the file
    lacks.
    """
    section = config.evaluation
    seed = config.runtime.seed
    if section.metadata:
        # Unreadable metadata and an unknown sweep are refused before anything slow starts.
        read_metadata(section.metadata, list(inputs.test.trials.recordings))
    sweep: dict[str, list[Step]] = {}
    if section.sweep or section.plda:
        # Late: few recipes use either.
        from speakernet.assembly.disturbed import build_sweep, fit_plda

        sweep = build_sweep(config)
        if section.plda and after_training:
            fit_plda(config, inputs, load_for_scoring(config, model_path), Path(model_path))
    # A list is scored in steps, each of which reads only what the previous ones made: embed every
    # utterance once, score all trials, turn scores into log-likelihood ratios, compute the figures,
    # then the figures of subsets of the trials. Everything that these steps need besides the list
    # (network, mean embedding, cohort, calibration) is the same for all lists, so it is prepared
    # before the loop and frozen. Preparing it may take longer than scoring: the cohort and the
    # calibration list are often larger than the test list.
    parts = prepare_scoring(config, inputs, Path(model_path), after_training=after_training)
    if after_training and parts.measured and distributed.is_main():
        update_model_file(model_path, parts.measured, backs_up=False)
        logger.info("wrote to %s: %s", model_path, ", ".join(parts.measured))
    lists = {"": inputs.test, **inputs.beside(inputs.test)}
    shared = one_pass([(listed.trials.recordings, listed.source) for listed in lists.values()], {})
    evaluations = {}
    for name, listed in lists.items():
        embedder = replace(parts.embedder, embed_with=shared)
        if name and embedder.stores:
            # Stores of other lists are searched too, because lists share recordings.
            store = evaluation_folder(config.run_folder, name) / EMBEDDINGS
            embedder = replace(embedder, stores=(store, *embedder.stores))
        speakers = speakers_of(listed.trials, section.speaker_table)
        evaluation = evaluate(embedder, parts.backend, *listed, speakers, seed, parts.calibration)
        if not evaluation.results.why_no_eer:
            # Every rank takes part, because the ranks share the embedding. The metadata describe
            # the reported list only, and each step of a sweep embeds the list again.
            options = section.model_copy(update={"metadata": "", "slices": []} if name else {})
            evaluation = with_groups(
                evaluation, listed.source, parts, options, seed, {} if name else sweep
            )
        results = evaluation.results
        if after_training:
            results = with_training_lists(results, *inputs.training, inputs.validation.trials)
        results = with_provenance(results, listed.trials, speakers, parts)
        for warning in results.warnings or []:
            # The command's last line says this too: it is how the demo is meant to end.
            level = logging.INFO if warning == SYNTHETIC_ONLY else logging.WARNING
            logger.log(level, "%s%s", f"{name}: " if name else "", warning)
        evaluations[name] = replace(evaluation, results=results)
    reported = evaluations.pop("")
    rows = {name: other.results.as_row(name) for name, other in evaluations.items()}
    results = replace(reported.results, test_lists=rows or None)
    return replace(reported, results=results, others=evaluations)


def scores_of_model(config: Config, inputs: Inputs, model_path: str | Path) -> np.ndarray:
    """Scores of the test list, (trials,), as `run_evaluation` computes them."""
    config = with_changes(config, evaluation={"keep_embeddings": False})
    parts = _uncalibrated(config, inputs, Path(model_path), after_training=False)
    return scores_of_audio(parts, *inputs.test)


def prepare_scoring(
    config: Config, inputs: Inputs, path: Path, *, after_training: bool
) -> ScoringParts:
    """Everything that scoring needs besides the list, with a calibration fitted on a list if
    possible, otherwise that of the model file.
    """
    parts = _uncalibrated(config, inputs, path, after_training=after_training)
    # Three parties may calibrate a model file: its training, on the validation list; somebody with
    # `speakernet calibrate`, on their own recordings; and this evaluation, on
    # evaluation.calibration_list, for its figures alone. Only training writes here, and a fit on
    # another list than its own stays in the file: somebody may be deciding with it.
    listed = _calibration_trials(config, inputs, after_training=after_training)
    described = parts.backend.describe(parts.embedder.options)
    # Newest first: an older fit may use the score alone, the newer one quality measures too.
    fits = list(reversed((parts.in_file.get("calibration") or {}).get("fits", [])))
    kept = next((fit for fit in fits if fit["backend"] == described), None)
    if listed is not None:
        # A finished run that is started again must not replace what `speakernet calibrate` has
        # fitted since.
        others = [fit for fit in fits if fit.get("list_sha256") != listed.trials.sha256]
        if others and after_training:
            logger.warning(
                "%s keeps the calibration fitted on %s; `speakernet calibrate --trials %s` "
                "replaces it",
                path,
                ", ".join(sorted({str(fit.get("list") or "another list") for fit in others})),
                listed.trials.source,
            )
        writes = after_training and not others
        if writes or kept is None or not after_training:
            return calibrate(parts, *listed, for_decisions=writes)
    if kept is None:
        return parts
    return replace(
        parts,
        calibration=AffineCalibration.from_dict(kept),
        fitted_on=kept.get("list_sha256") or "",
    )


def _uncalibrated(
    config: Config, inputs: Inputs, path: Path, *, after_training: bool
) -> ScoringParts:
    """Scoring without calibration: the embedder, and a back end with mean and cohort."""
    section = config.evaluation
    seed = config.runtime.seed
    model = load_for_scoring(config, path)
    contents = model.contents
    spec = model.net.spec()
    embedder = _embedder_of(model, config, inputs, after_training=after_training)
    backend = verifying_backend(contents)
    measured: dict[str, Any] = {}
    warnings: list[str] = []
    known_speakers = {}
    if caution := voices_caution(contents):
        warnings.append(caution)
    if after_training:
        known_speakers["training list"] = plain_names(inputs.training.rows.speakers)
    # Scoring never writes to the model file, and PLDA belongs to it.
    if section.plda and not backend.adaptation:
        warnings.append(
            "evaluation.plda is on, but the model file has no PLDA; evaluation does not fit one"
        )
    mean = None
    # An adaptation subtracts its own mean.
    if section.subtract_mean and not contents.get("adaptation"):
        measured = mean_entries(contents, embedder, inputs.training_if_listed, seed)
        mean = np.asarray({**contents, **measured}["embedding_mean"], dtype=np.float32)
    backend = replace(
        backend,
        options=section,
        is_normalised=bool(contents["loss_normalizes"]),
        mean=mean,
        device=embedder.forward.device,
    )
    if section.score_norm != "none":
        cohort, name, known_speakers["cohort"] = embed_cohort(
            embedder, mean, *cohort_of(config, inputs), seed
        )
        backend = replace(backend, cohort=cohort, cohort_name=name)
    return ScoringParts(
        path,
        contents,
        {
            "model": spec["model"],
            "num_parameters": model.net.num_parameters,
            "front_end": spec["front_end"],
        },
        embedder,
        backend,
        known_speakers,
        measured=measured,
        warnings=warnings,
    )


def _embedder_of(
    model: ModelFile, config: Config, inputs: Inputs, *, after_training: bool
) -> Embedder:
    """The embedder of a model file, with the folders in which its embeddings are kept."""
    net = model.net.to(inputs.device)
    embedder = build_embedder(config, net, inputs.device, config.evaluation.precision)
    # In 16 bits, folding would round the weights a second time.
    if embedder.precision == "no":
        embedder = replace(embedder, net=fold_network(net))
    if not config.evaluation.keep_embeddings:
        return embedder
    run = config.run_folder
    folder = run if after_training else evaluation_folder(run, config.data.test_list)
    # Shared lists, such as the cohort, reuse embeddings of the run and of its other evaluations.
    shared = (run / EMBEDDINGS, *sorted((run / EVALUATIONS).glob(f"*/{EMBEDDINGS}")))
    digest = weights_digest(model.contents["weights"]) + str(net.spec())
    return replace(embedder, stores=(folder / EMBEDDINGS, *shared), model_digest=digest)


def _calibration_trials(
    config: Config, inputs: Inputs, *, after_training: bool
) -> TrialInput | None:
    """The list to fit a calibration on; None if there is none that may be used."""
    data = config.data
    path = config.evaluation.calibration_list
    if path:
        return inputs.trial_input(path, config.evaluation.calibration_path or data.test_path)
    if not after_training:
        return None
    # Trials that are reported must not select thresholds, just as they must not select the model.
    if chosen_by_validation(config) or data.validation_list != data.test_list:
        return inputs.validation
    logger.info("no calibration, because all trials are reported; set evaluation.calibration_list")
    return None


def load_for_scoring(config: Config, path: str | Path) -> ModelFile:
    """Load the network to score with; for a foreign checkpoint, the configuration describes it."""
    # The run folder need not be visible to other ranks' machines.
    contents = distributed.from_main(lambda: read_checkpoint(path))
    if is_model_file(contents):
        return model_of(contents, path)
    net = build_model(config)
    load_initial_weights(net, None, path)
    return ModelFile(
        net.eval(), model_file_contents(net, loss_normalizes=config.loss.normalize_embeddings)
    )
