"""Convert other toolkits' checkpoints to model files (`import-weights`) and export model files
(`export`).
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

from speakernet.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from speakernet.corpora.synthetic.speech import synthetic_speech
from speakernet.data.audio import read_audio
from speakernet.data.lists import read_trials
from speakernet.data.opening import open_source
from speakernet.evaluation.embedding import preparation_in_words
from speakernet.evaluation.figures import why_no_error_rate
from speakernet.evaluation.scoring import plda_of
from speakernet.files import human_bytes
from speakernet.losses.options import LOSSES, LossOptions
from speakernet.models.importers import (
    PUBLISHED,
    TOOLKITS,
    find_fitting,
    import_network,
    unknown_file,
    voxceleb_trainer,
)
from speakernet.models.model_file import (
    ModelFile,
    is_model_file,
    load_model_file,
    model_file_contents,
)
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet, check_finite, check_fits
from speakernet.options import lookup

# Options that only apply to voxceleb_trainer, with their defaults.
VOXCELEB_TRAINER_ONLY = {
    "no_log_input": False,
    "pooling": "",
    "num_mels": 0,
    "sinc_stride": 10,
    "loss": "",
}
NUM_COMPARED = 4


def import_weights(arguments: argparse.Namespace) -> list[str]:
    """Read, identify, convert, check and write; return lines about what was read."""
    lookup(dict.fromkeys(TOOLKITS), arguments.source, "toolkit")
    contents = read_checkpoint(arguments.file)
    if is_model_file(contents):
        raise ValueError(f"{arguments.file} is already a speakernet model file; use it directly")
    if not isinstance(contents, dict):
        raise CheckpointError(
            f"{arguments.file} contains a {type(contents).__name__}; expected tensors by name"
        )
    if arguments.source in PUBLISHED:
        for option, value in VOXCELEB_TRAINER_ONLY.items():
            if getattr(arguments, option) != value:
                raise ValueError(
                    f"only --from voxceleb_trainer takes --{option.replace('_', '-')}; leave it out"
                )
        toolkit = PUBLISHED[arguments.source]
        net, left_out = import_network(toolkit, arguments.model, contents, arguments.file)
        notes = [f"not loaded: {entry}" for entry in left_out]
        # Several toolkits have networks with tensors of the same names and shapes, but other
        # features. The weights cannot show which toolkit they are from, so the notes list all.
        for options in find_fitting(contents, arguments.file):
            if f"--from {arguments.source} " not in options:
                notes.append(
                    f"the tensors also fit {options}; if they were trained with that toolkit, "
                    "import them as such, because the wrong front end silently spoils all scores"
                )
    else:
        net, notes = _import_classic(arguments, contents)
    # The loss decides whether embeddings are compared at unit length, and a published checkpoint
    # does not contain it.
    loss: Any = lookup(LOSSES, arguments.loss, "loss").options if arguments.loss else LossOptions
    summary = {
        "imported_from": arguments.source,
        "file": Path(arguments.file).name,
        "licence": arguments.licence or "not given",
        "trained_on": arguments.trained_on or "not given",
    }
    converted = model_file_contents(
        net, loss_normalizes=loss.normalize_embeddings, training_summary=summary
    )
    write_checkpoint(arguments.out, converted)
    spec = net.spec()
    return [
        f"{arguments.out}: {net.model_name}, {net.num_parameters:,} parameters, model "
        f"{spec['model']['options']}, front end {spec['front_end']}",
        *notes,
        f"next: speakernet info {shlex.quote(str(arguments.out))}",
    ]


def _import_classic(
    arguments: argparse.Namespace, contents: dict[str, Any]
) -> tuple[SpeakerNet, list[str]]:
    """The network of a voxceleb_trainer checkpoint, with notes on what is not loaded and what is
    assumed.
    """
    path = arguments.file
    if not voxceleb_trainer.is_ours_to_read(contents):
        raise unknown_file(contents, path)
    lookup(MODELS, arguments.model, "model")
    # voxceleb_trainer saves weights without options. Most follow from the shapes of the tensors;
    # the others have to be given, or are assumed with a note.
    described = voxceleb_trainer.describe(contents)
    if described.model != arguments.model:
        raise ValueError(f"{path} contains a {described.model}, but --model says {arguments.model}")
    pooling = arguments.pooling or described.pooling
    num_mels = arguments.num_mels or described.num_mels
    if not pooling:
        raise ValueError(
            f"the pooling cannot be determined from {path}; give --pooling, such as TAP or MAX"
        )
    is_raw = described.model == "RawNet3"
    if not (is_raw or num_mels):
        raise ValueError(f"{path} does not contain its filterbank; give --num-mels (its n_mels)")
    options = {"sinc_stride": arguments.sinc_stride} if is_raw else {}
    front_end = {} if is_raw else {"num_mels": num_mels, "log_input": not arguments.no_log_input}
    net = SpeakerNet.named(
        described.model, pooling, described.embedding_dim, options, front_end_options=front_end
    )
    translated = voxceleb_trainer.translate(contents, net, path)
    # Checked first, so that NaN is never written and a wrong shape is reported with the path.
    check_finite(translated.weights, path)
    check_fits(translated.weights, net.state_dict(), path)
    net.load_state_dict(translated.weights)
    notes = [f"not loaded: {name} (weights of the loss)" for name in translated.head_weights]
    notes += [f"not loaded: {name}" for name in translated.not_loaded]
    if not is_raw:
        way = "without" if arguments.no_log_input else "with"
        notes.append(
            f"assumed: trained {way} log_input, which the checkpoint does not show (--no-log-input)"
        )
    if not arguments.loss and not translated.head_weights:
        notes.append(
            "assumed: trained with a loss on normalised embeddings (otherwise give --loss proto)"
        )
    return net, notes


def export(arguments: argparse.Namespace) -> list[str]:
    """Write the file and compare it with the model; return lines about the result."""
    # Late: importing weights does not need the export libraries.
    from speakernet.inference.export import (
        FORMATS,
        ExportedEmbedder,
        check_target,
        eer_percent,
        export_model,
        open_onnx,
    )

    # Every refusal comes before the export, which takes minutes for a large network.
    path = check_target(arguments.out, arguments.int8, arguments.runtime, arguments.seconds)
    measures = arguments.trials is not None
    if measures != (arguments.audio is not None) or (measures and not arguments.int8):
        raise ValueError(
            "--trials LIST and --audio FOLDER measure the EER of int8; give both together with "
            "--int8"
        )
    model = load_model_file(arguments.model)
    rate = model.net.sample_rate
    if measures:
        trials = read_trials(arguments.trials)
        source = open_source(arguments.audio, rate)
        if reason := why_no_error_rate(trials):
            raise ValueError(f"{arguments.trials}: {reason}")
    if arguments.speech:
        speech = [read_audio(recording, sample_rate=rate) for recording in arguments.speech]
        kind = "recordings"
    elif measures:
        # Recordings of the list are closer to those that the export is for than synthetic voices.
        speech = [source.read(name) for name in list(trials.names)[:NUM_COMPARED]]
        kind = "recordings of the list"
    else:
        speech = synthetic_speech(NUM_COMPARED, rate)
        kind = "synthetic voices"
    parity, *rounded = export_model(
        model,
        path,
        speech=speech,
        int8=arguments.int8,
        runtime=arguments.runtime,
        seconds=arguments.seconds,
    )
    lines = [
        f"{path}: {FORMATS[path.suffix][0]}, {human_bytes(path.stat().st_size)}",
        f"compared on {kind}: {parity}",
        *(f"after int8: {agreement}" for agreement in rounded),
    ]
    lines += _notes_for_callers(model, arguments.seconds)
    if measures:
        net = model.net
        # Read back from the written file, so that the EER is that of what users get.
        small = ExportedEmbedder(
            open_onnx(path.read_bytes()), rate, net.min_samples, net.preparation
        )
        before = eer_percent(net, model, trials, source)
        after = eer_percent(small, model, trials, source)
        lines.append(
            f"EER of {len(trials):,} trials of {trials.source}: {before:.3f} % in float32, "
            f"{after:.3f} % in int8 ({after - before:+.3f})"
        )
    elif rounded:
        lines.append(
            "the EER of int8 was not measured; measure it with --trials LIST --audio FOLDER"
        )
    return lines


def _notes_for_callers(model: ModelFile, seconds: float | None) -> list[str]:
    """What a program has to do besides running the exported file."""
    notes = []
    if seconds is not None:
        num_samples = round(seconds * model.net.sample_rate)
        notes.append(
            f"the file accepts one recording of exactly {num_samples:,} samples; callers repeat "
            "shorter ones and cut longer ones"
        )
    # Only the network is exported, so callers have to do what the model file does before and after
    # it.
    if model.net.preparation:
        todo = preparation_in_words(model.net.preparation)
        notes.append(
            f"with this model, {todo} before they are embedded; the file does not do that, so "
            "callers have to"
        )
    if plda_of(model.contents):
        notes.append(
            "this model scores by PLDA, which the file contains; dot products are not its scores"
        )
    return notes
