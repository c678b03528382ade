"""Export of a model file to ONNX, `torch.export` archives or safetensors, written only if the
embeddings agree.

ONNX files and archives hold the network with its front end as one graph over waveforms of equal
length; batch size and length are dynamic, or both fixed (one waveform of some seconds), for
accelerators that need static shapes. ONNX for sherpa-onnx, which has its own front end, is a graph
over features. Safetensors files hold the weights, with a description of the network in the header.
"""

import contextlib
import copy
import functools
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import onnxscript  # noqa: F401  torch's exporter needs it: fail now, not during the export
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn

from speakernet.checkpoint import tensor_file_bytes
from speakernet.data.audio import wrap_to_length
from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.embedding import embed_utterances
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.scoring import (
    WHOLE,
    mean_of_whole_utterances,
    plda_of,
    verifying_backend,
)
from speakernet.files import OTHER_PLACE, atomic_write, check_writable, writing
from speakernet.frontend.features import FrontEnd, normalize_features, use_convolution
from speakernet.inference.decision import DecisionRule
from speakernet.models.model_file import ModelFile, load_model_file
from speakernet.models.speaker_net import SpeakerNet, fold_network

logger = logging.getLogger(__name__)

INPUT = "waveforms"
OUTPUTS = ("embedding", "direction")
OPSET = 18
"""ONNX operator set: the lowest that torch's exporter writes."""
METADATA_KEY = "speakernet"
"""ONNX metadata key of a JSON description of the model and its scores."""
SCOPES_KEY = "pkg.torch.onnx.name_scopes"
"""Metadata key under which torch's exporter names the module of a node."""
SHERPA = "sherpa-onnx"
SHERPA_FRONT_END: dict[str, tuple[Any, ...]] = {
    "name": ("fbank",),
    "num_mels": (80,),
    "window": ("povey",),
    "style": ("lhotse",),
    "scale": (1.0, 32768.0),
    "energy_floor_db": (0.0,),
    "plda": (False,),
}
"""Our options that match its speaker embedding extractor; source: `csrc/features.h`,
`-general-impl.h`."""
RUNTIMES = (SHERPA, "onnxruntime-web")
"""Programs that an .onnx file can be made for; the second accepts the same graph as any ONNX
Runtime."""
EXAMPLE_SECONDS = 3.0
"""Length of the waveforms that a graph for any length is traced with."""
MAX_SECONDS = 600
"""Longest fixed length; a graph of static shapes grows with it."""
MIN_COSINE = 0.99999
"""An export is refused unless every cosine with the original embeddings is above this."""
EPSILON = 1e-12
"""Lower bound of the length that an embedding is divided by."""

Run = Callable[[np.ndarray], list[np.ndarray]]
"""Waveforms (batch, samples) float32 -> embeddings and, for graphs, directions, (batch, dim)
float32 each."""


@dataclass(frozen=True)
class Parity:
    """How much the embeddings of an exported network differ from ours."""

    cosine: float
    difference: float
    scale: float

    def __str__(self) -> str:
        return (
            f"lowest cosine {self.cosine:.8f}, largest difference {self.difference:.2g} "
            f"(values reach {self.scale:.3g})"
        )


def export_model(
    model: ModelFile,
    path: Path,
    *,
    speech: Sequence[np.ndarray],
    int8: bool = False,
    runtime: str = "",
    seconds: float | None = None,
) -> list[Parity]:
    """Write a model file in another format, chosen by the suffix of `path` (.onnx, .pt2 or
    .safetensors) and `runtime`; with `seconds`, a graph for one waveform of exactly this length.

    Returns:
        How close the export is to the network; with int8, one value before and one after
        quantisation.
    """
    # Written only after the graph has been run and compared with the network, since a wrong graph
    # would be hard to notice where it is deployed.
    least = model.net.min_samples
    usable = [waveform for waveform in speech if len(waveform) >= least]
    if not usable:
        raise ValueError(
            f"none of the {len(speech)} recordings for the comparison has the {least} samples "
            f"({least / model.net.sample_rate:.2f} s) that {model.net.model_name} needs"
        )
    num_samples = None if seconds is None else round(seconds * model.net.sample_rate)
    if num_samples is not None:
        if num_samples < least:
            raise ValueError(
                f"--seconds {seconds:g} is {num_samples} samples; {model.net.model_name} needs at "
                f"least {least} ({least / model.net.sample_rate:g} s)"
            )
        usable = [wrap_to_length(waveform, num_samples) for waveform in usable]
    title, write, open_export = FORMATS[path.suffix]
    if runtime == SHERPA:
        write = sherpa_bytes
        open_export = functools.partial(open_sherpa, model)
    # Each step takes a minute or more for a large network.
    logger.info("writing the network as %s", title)
    content = write(model, num_samples)
    logger.info("comparing embeddings of %d recordings with those of the model", len(usable))
    has_batches = num_samples is None
    parities = [compare(model, open_export(content), usable, has_batches)]
    # Not `<=`, since NaN must be refused too.
    if not parities[0].cosine > MIN_COSINE:
        raise ValueError(
            f"{path} was not written: its embeddings differ from those of the model ({parities[0]})"
        )
    if int8:
        logger.info("rounding to eight bits and comparing again")
        content = quantize(content)
        # No limit here: only the error rate on trials shows how much rounding is acceptable.
        parities.append(compare(model, open_onnx(content), usable))
    with writing(path, OTHER_PLACE), atomic_write(path, "wb") as file:
        file.write(content)
    return parities


def check_target(out: str | Path, int8: bool, runtime: str, seconds: float | None) -> Path:
    """The path to write to, checked before any work is done."""
    path = Path(out)
    is_onnx = path.suffix == ".onnx"
    if path.suffix not in FORMATS or path.is_dir():
        raise ValueError(
            f"{out}: expected a file name ending in {' or '.join(FORMATS)}; the suffix selects the "
            "format"
        )
    if runtime and runtime not in RUNTIMES:
        raise ValueError(f"--for {runtime}: unknown program; expected {' or '.join(RUNTIMES)}")
    if ((int8 or runtime) and not is_onnx) or (int8 and runtime == SHERPA):
        raise ValueError(
            f"{out}: --int8 and --for need a file name ending in .onnx, and {SHERPA} none in int8"
        )
    if seconds is not None:
        # Not `<=` and `>`, since NaN must be refused too.
        if not 0 < seconds <= MAX_SECONDS:
            raise ValueError(
                f"--seconds {seconds:g}: expected a number above 0 and at most {MAX_SECONDS}"
            )
        # Eight-bit graphs measure the ranges of activations as they run, which accelerators with
        # static shapes refuse as well.
        if int8 or path.suffix == ".safetensors":
            raise ValueError(
                f"{out}: --seconds needs a file name ending in .onnx or .pt2, and no --int8"
            )
    check_writable(path)
    return path


def compare(
    model: ModelFile, run: Run, speech: Sequence[np.ndarray], has_batches: bool = True
) -> Parity:
    """Embed recordings with the network and with its export, one by one and, unless the export
    accepts only one, as a batch of equal length.
    """
    # Alone and as a batch: a graph whose batch size or length was fixed while tracing, or that
    # mixes rows, agrees with the network on one of the two and not on the other.
    mean = mean_of_whole_utterances(model.contents)
    centre = 0.0 if mean is None else mean
    batches = [waveform[None] for waveform in speech]
    if has_batches:
        shortest = min(len(waveform) for waveform in speech)
        batches.append(np.stack([waveform[:shortest] for waveform in speech]))
    cosines = []
    differences = []
    scale = 0.0
    for batch in batches:
        waveforms = np.ascontiguousarray(batch, dtype=np.float32)
        (expected,) = _embed(model.net, waveforms)
        exported, *directions = run(waveforms)
        cosines.append(_lowest_cosine(exported, expected))
        # In the second output of a graph, the mean is subtracted.
        for centred in (exported - centre, *directions):
            cosines.append(_lowest_cosine(centred, expected - centre))
        differences.append(np.abs(exported - expected).max())
        scale = max(scale, float(np.abs(expected).max()))
    # numpy's min and max propagate NaN.
    return Parity(float(np.min(cosines)), float(np.max(differences)), scale)


def _lowest_cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Over the rows of both, (batch, dim)."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    products = (first.astype(np.float64) * second).sum(axis=1)
    return float((products / np.maximum(lengths, EPSILON)).min())


class ExportedNet(nn.Module):
    """Maps waveforms of equal length to raw embeddings and to directions for comparison, with
    standard operators.

    >>> from speakernet.models.speaker_net import SpeakerNet
    >>> net = SpeakerNet.named("ResNet", embedding_dim=8).eval()
    >>> embeddings, directions = ExportedNet(ModelFile(net, {}))(torch.randn(2, 16000))
    >>> embeddings.shape, torch.allclose(directions.norm(dim=1), torch.ones(2))
    (torch.Size([2, 8]), True)
    """

    def __init__(self, model: ModelFile) -> None:
        super().__init__()
        self.net = fold_network(model.net).requires_grad_(False)
        self.net.spec_augment = None
        for module in self.net.modules():
            # Not every runtime has an FFT, but all have convolutions.
            if isinstance(module, FrontEnd):
                use_convolution(module)
        mean = mean_of_whole_utterances(model.contents)
        # Zeros instead of a condition in `forward`, because tracing would record only one branch.
        if mean is None:
            mean = np.zeros(self.net.embedding_dim, dtype=np.float32)
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, waveforms: Tensor) -> tuple[Tensor, Tensor]:
        """Waveforms (batch, samples) in -1..1 to embeddings and directions, (batch, dim) each."""
        embeddings = self.net(waveforms)
        centred = embeddings - self.mean
        return embeddings, centred / centred.norm(dim=1, keepdim=True).clamp(min=EPSILON)


class FeaturesNet(ExportedNet):
    """Maps features before normalisation, (batch, frames, mels), to embeddings minus the mean,
    (batch, dim).
    """

    def forward(self, features: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise and embed; removing the mean of features a second time does not change them."""
        normalized = normalize_features(
            features.transpose(1, 2), self.net.front_end.options.normalize
        )  # type: ignore[union-attr]
        return self.net.from_features(normalized) - cast(Tensor, self.mean)


def onnx_bytes(model: ModelFile, num_samples: int | None) -> bytes:
    """The network as ONNX: input `waveforms`, outputs `embedding` and `direction`, and a
    description as metadata.
    """
    return _onnx(
        ExportedNet(model),
        _example(model.net, num_samples),
        (INPUT, *OUTPUTS),
        _shapes("samples", model.net.min_samples, num_samples),
        {METADATA_KEY: facts(model, num_samples)},
    )


def sherpa_bytes(model: ModelFile, num_samples: int | None) -> bytes:
    """The network as ONNX for sherpa-onnx: features in, embeddings out, whose cosines are the
    scores.

    Source: sherpa-onnx, `csrc/speaker-embedding-extractor-model.cc` (the metadata that it reads).
    """
    net = model.net
    # sherpa-onnx computes the features itself, with few settings. A network trained on other
    # features would run there with worse embeddings (cosines of 0.87 to 0.94 with the right ones)
    # and no error, so it is refused.
    spec = net.spec()["front_end"]
    options = {
        "style": "kaldi",
        "energy_floor_db": 0.0,
        **spec["options"],
        "name": spec["name"],
        "plda": plda_of(model.contents) is not None,
    }
    wrong = [name for name, allowed in SHERPA_FRONT_END.items() if options.get(name) not in allowed]
    if wrong:
        expected = ", ".join(f"{name} {SHERPA_FRONT_END[name][0]}" for name in wrong)
        actual = ", ".join(f"{name} {options.get(name, 'none')}" for name in wrong)
        raise ValueError(
            f"{SHERPA} needs {expected}; this model has {actual}. Train with these `frontend` "
            "options, or export a graph of waveforms without --for"
        )
    # From this name sherpa-onnx infers whether samples are in -1..1 or have 16 bits.
    has_unit_scale = options["scale"] == 1.0
    metadata: dict[str, Any] = {
        "framework": "3d-speaker" if has_unit_scale else "wespeaker",
        "language": "not given",
        "output_dim": net.embedding_dim,
        "sample_rate": net.sample_rate,
        "normalize_samples": int(has_unit_scale),
    }
    if options["normalize"] == "mean":
        metadata["feature_normalize_type"] = "global-mean"
    metadata[METADATA_KEY] = facts(model, num_samples)
    example = _features(net, _example(net, num_samples).numpy())
    min_frames = int(net.front_end.num_frames(torch.tensor(net.min_samples)))
    shapes = _shapes("frames", min_frames, num_samples)
    return _onnx(FeaturesNet(model), example, ("features", OUTPUTS[0]), shapes, metadata)


def _features(net: SpeakerNet, waveforms: np.ndarray) -> Tensor:
    """The features that sherpa-onnx computes, (batch, frames, mels), by our front end."""
    # Before normalisation, as sherpa-onnx may hand them over; the graph normalises in any case.
    front_end = copy.deepcopy(net.front_end).eval()
    options: Any = front_end.options
    front_end.options = options.model_copy(update={"normalize": "none"})
    return front_end(torch.from_numpy(waveforms)).transpose(1, 2)  # type: ignore[no-any-return]


def _onnx(
    net: nn.Module,
    example: Tensor,
    names: Sequence[str],
    shapes: tuple[dict[int, Any]] | None,
    metadata: Mapping[str, Any],
) -> bytes:
    """An ONNX graph with one input; `names` are those of the input and the outputs."""
    with _quiet():
        program = torch.onnx.export(
            net.eval(),
            (example,),
            dynamo=True,
            input_names=names[:1],
            output_names=names[1:],
            dynamic_shapes=shapes,
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    graph = program.model.graph
    values = [value for node in graph for value in node.outputs]
    # With a fixed length, the exporter replaces what does not depend on the samples by constants.
    values += graph.initializers.values()
    for value in values:
        # A table lookup inside the graph is called `embedding` too.
        if value.name in OUTPUTS and not value.is_graph_output():
            value.name = f"{value.name}_inside"
    proto: Any = program.model_proto
    for name, value in metadata.items():
        text = value if isinstance(value, str) else json.dumps(value)
        proto.metadata_props.add(key=name, value=text)
    onnx.checker.check_model(proto)
    return proto.SerializeToString()  # type: ignore[no-any-return]


def program_bytes(model: ModelFile, num_samples: int | None) -> bytes:
    """The network as a `torch.export` archive, which torch can run without this package."""
    # The code of these models branches on a batch size of 1 (position bias, pairs of frames).
    kind = model.net.spec()["model"]["options"].get("config", {}).get("model_type")
    if num_samples is None and kind in ("wavlm", "wav2vec2-bert"):
        raise ValueError(
            f".pt2: torch.export does not support {kind} at every batch size; use .onnx, or fix "
            "the length with --seconds"
        )
    # At least a second: with a single final frame, tracing would give a different program.
    least = max(model.net.min_samples, model.net.sample_rate)
    shapes = _shapes("samples", least, num_samples)
    with _quiet(), io.BytesIO() as file:
        try:
            # Without deferred checks torch 2.11 refuses some lengths because of a guard that always
            # holds.
            program = torch.export.export(
                ExportedNet(model).eval(),
                (_example(model.net, num_samples),),
                dynamic_shapes=shapes,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        except Exception as error:
            # torch's exporter fails with errors of any type: 2.11 cannot export CAM++ and RawNet3,
            # 2.14 can.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f".pt2: torch {torch.__version__} cannot export this network ({reason}); use a "
                "newer torch, or .onnx"
            ) from error
        torch.export.save(
            program,
            file,
            extra_files={f"{METADATA_KEY}.json": json.dumps(facts(model, num_samples))},
        )
        return file.getvalue()


def facts(model: ModelFile, num_samples: int | None) -> dict[str, Any]:
    """What is needed to run a graph and interpret its scores, as plain values."""
    net = model.net
    rule = DecisionRule.of_model_file(model.contents, "the model file")
    fitted = rule.calibration
    described = {
        **net.spec(),
        "min_samples": net.min_samples,
        "embedding_dim": net.embedding_dim,
    }
    if num_samples is not None:
        described["num_samples"] = num_samples
    plda = plda_of(model.contents)
    if plda:
        described["plda"] = {name: values.tolist() for name, values in vars(plda).items()}
    return described | {
        # The caller cuts recordings to their speech if the calibration is for `detected` speech.
        "speech": rule.speech,
        "calibration": fitted
        and {"weight": float(fitted.weights[0]), "offset": float(fitted.offset)},
        "thresholds": {
            str(threshold["name"]): float(threshold["threshold"]) for threshold in rule.thresholds
        },
    }


def open_onnx(content: bytes) -> Run:
    """Run a graph with one input on the CPU with ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Errors only, since ONNX Runtime warns about every constant that it folds.
    options.log_severity_level = 3
    # On the CPU, so that the figures do not depend on a machine's accelerator.
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(values: np.ndarray) -> list[np.ndarray]:
        inputs = {session.get_inputs()[0].name: values}
        return session.run(None, inputs)  # type: ignore[no-any-return]

    return run


def open_sherpa(model: ModelFile, content: bytes) -> Run:
    """Run a graph of features behind our front end; the subtracted mean is added back."""
    run_graph = open_onnx(content)
    mean = mean_of_whole_utterances(model.contents)

    def run(waveforms: np.ndarray) -> list[np.ndarray]:
        (embeddings,) = run_graph(_features(model.net, waveforms).numpy())
        return [embeddings if mean is None else embeddings + mean]

    return run


def quantize(content: bytes) -> bytes:
    """An ONNX graph in eight bits, with integer weights and dynamically quantised activations.

    The front end stays in float32: its spectra span eight decades, of which 256 steps keep only the
    loudest parts.
    """
    model = onnx.load_from_string(content)
    kept = []
    for node in model.graph.node:
        scopes = [entry.value for entry in node.metadata_props if entry.key == SCOPES_KEY]
        if "net.front_end" in "".join(scopes):
            kept.append(node.name)
    assert kept, "the nodes of the front end are no longer marked"
    with _quiet(), tempfile.TemporaryDirectory(prefix="speakernet-export-") as folder:
        # The quantiser can only write to a file.
        target = Path(folder) / "int8.onnx"
        # Have intermediate shapes inferred again: the old ones do not fit transposed weights.
        del model.graph.value_info[:]
        quantize_dynamic(model, target, nodes_to_exclude=kept, weight_type=QuantType.QUInt8)
        return target.read_bytes()


def _open_program(content: bytes) -> Run:
    program = torch.export.load(io.BytesIO(content)).module()

    def run(waveforms: np.ndarray) -> list[np.ndarray]:
        with torch.inference_mode():
            return [output.numpy() for output in program(torch.from_numpy(waveforms))]

    return run


def _open_tensors(content: bytes) -> Run:
    with tempfile.TemporaryDirectory(prefix="speakernet-export-") as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        return functools.partial(_embed, load_model_file(path).net)


def _tensor_bytes(model: ModelFile, num_samples: int | None) -> bytes:
    assert num_samples is None, "weights have no length"
    return tensor_file_bytes(model.contents)


def _embed(net: SpeakerNet, waveforms: np.ndarray) -> list[np.ndarray]:
    # Through `embed`, as in every command, so that the comparison covers what users get.
    lengths = torch.full((len(waveforms),), waveforms.shape[1])
    return [
        net.embed(torch.from_numpy(waveforms), lengths, sample_rate=net.sample_rate).float().numpy()
    ]


def _example(net: SpeakerNet, num_samples: int | None) -> Tensor:
    """The waveforms to trace with, (batch, samples)."""
    if num_samples is not None:
        shape = (1, num_samples)
    else:
        # Two rows, because a batch of one may be traced as a constant.
        shape = (2, max(round(EXAMPLE_SECONDS * net.sample_rate), 2 * net.min_samples))
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _shapes(axis: str, least: int, num_samples: int | None) -> tuple[dict[int, Any]] | None:
    """The dynamic axes of the input; None if it has the shape of the example."""
    if num_samples is not None:
        return None
    return ({0: torch.export.Dim("batch", min=1), 1: torch.export.Dim(axis, min=least)},)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' warnings, which are meant for their developers."""
    with warnings.catch_warnings(), contextlib.ExitStack() as after:
        after.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.ERROR)
        warnings.simplefilter("ignore")
        yield


FORMATS: dict[str, tuple[str, Callable[[ModelFile, int | None], bytes], Callable[[bytes], Run]]] = {
    ".onnx": ("ONNX", onnx_bytes, open_onnx),
    ".pt2": ("a torch.export archive", program_bytes, _open_program),
    ".safetensors": ("safetensors", _tensor_bytes, _open_tensors),
}
"""File suffix -> title, function that writes the bytes (for waveforms of so many samples, or of any
length), and function that opens them for running."""


@dataclass
class ExportedEmbedder:
    """An exported graph as a network for evaluation; embeds utterances one by one."""

    run: Callable[[np.ndarray], list[np.ndarray]]
    sample_rate: int
    min_samples: int
    preparation: Mapping[str, Any]

    def embed(
        self, waveforms: Tensor, lengths: Tensor | None = None, *, sample_rate: int
    ) -> Tensor:
        """(batch, samples) to (batch, dim)."""
        whole = [waveforms.shape[1]] * len(waveforms) if lengths is None else lengths.tolist()
        rows = [
            self.run(row[None, :length].numpy())[0]
            for row, length in zip(waveforms, whole, strict=True)
        ]
        return torch.from_numpy(np.concatenate(rows))


def eer_percent(net: Any, model: ModelFile, trials: TrialList, source: AudioSource) -> float:
    """The EER of a network on a trial list, scored as the model file is."""
    embeddings = embed_utterances(net, source, trials.names, WHOLE)
    assert trials.labels is not None
    return eer(verifying_backend(model.contents).score(embeddings, trials)[0], trials.labels)
