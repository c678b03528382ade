"""The formats that a model file can be written in, each with its way back to embeddings.

ONNX and the archive of `torch.export` hold the network with its front end as one graph of waveforms of one length,
dynamic in batch and length. Safetensors holds the weights, and what the network is in its header.
"""

import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxscript  # noqa: F401  torch's exporter writes through it: missed now, not in the middle of its work
import torch

from speakernet.checkpoint import tensor_file_bytes
from speakernet.evaluation.backend import mean_of_whole_utterances
from speakernet.inference.decision import DecisionRule
from speakernet.inference.export.graph import ExportedNet
from speakernet.models.model_file import ModelFile, load_model_file

INPUT, OUTPUTS = "waveforms", ("embedding", "direction")
OPSET = 18
"""Of ONNX: the lowest that torch's exporter writes."""
METADATA_KEY = "speakernet"
"""Of ONNX: what the model is and what its scores mean, as JSON."""
EXAMPLE_SECONDS = 3.0
"""Length of the waveforms that the graph is traced with; it holds for others."""

Run = Callable[[np.ndarray], list[np.ndarray]]
"""(batch, samples) float32 to embeddings and, in graphs, directions, (batch, dim) float32 each."""


class ExportError(ValueError):
    """A model that cannot be exported, or one whose export gives other numbers."""


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        title: what it is called.
        write: the model in it.
        open: from its bytes to a function of waveforms, on one thread.
    """

    title: str
    write: Callable[[ModelFile], bytes]
    open: Callable[[bytes], Run]


def onnx_bytes(model: ModelFile) -> bytes:
    """The network as ONNX: input `waveforms`, outputs `embedding` and `direction`, what it is as metadata."""
    graph, example = ExportedNet(model).eval(), _example(model)
    with _quiet():
        program = torch.onnx.export(
            graph,
            (example,),
            dynamo=True,
            input_names=[INPUT],
            output_names=list(OUTPUTS),
            dynamic_shapes=_dynamic_shapes(model.net.min_samples),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    proto: Any = program.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, json.dumps(facts(model))
    onnx.checker.check_model(proto)
    return proto.SerializeToString()  # type: ignore[no-any-return]


def program_bytes(model: ModelFile) -> bytes:
    """The network as an archive of `torch.export`, which torch can run without this package."""
    graph, example = ExportedNet(model).eval(), _example(model)
    with _quiet(), io.BytesIO() as file:
        # What the network makes of a single last frame would be another program: no less than a second.
        shortest = max(model.net.min_samples, model.net.sample_rate)
        program = torch.export.export(graph, (example,), dynamic_shapes=_dynamic_shapes(shortest))
        torch.export.save(program, file, extra_files={f"{METADATA_KEY}.json": json.dumps(facts(model))})
        return file.getvalue()


def facts(model: ModelFile) -> dict[str, Any]:
    """What whoever runs a graph needs to know, in plain values."""
    net = model.net
    has_mean = mean_of_whole_utterances(model.contents) is not None
    rule = DecisionRule.of_model_file(model.contents, subtracts_mean=has_mean, name="the model file")
    fitted = rule.calibration
    return {
        **net.spec(),
        "min_samples": net.min_samples,
        "embedding_dim": net.embedding_dim,
        "calibration": fitted and {"weight": float(fitted.weights[0]), "offset": float(fitted.offset)},
        "thresholds": {str(one["name"]): float(one["threshold"]) for one in rule.thresholds},
    }


def open_onnx(content: bytes) -> Run:
    """ONNX Runtime on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Its own words about what it folds are no news.
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(waveforms: np.ndarray) -> list[np.ndarray]:
        return session.run(list(OUTPUTS), {INPUT: waveforms})  # type: ignore[no-any-return]

    return run


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
        net = load_model_file(path).net

    def run(waveforms: np.ndarray) -> list[np.ndarray]:
        tensor = torch.from_numpy(waveforms)
        lengths = torch.full((len(tensor),), tensor.shape[1])
        return [net.embed(tensor, lengths, sample_rate=net.sample_rate).numpy()]

    return run


def _example(model: ModelFile) -> torch.Tensor:
    net = model.net
    samples = max(round(EXAMPLE_SECONDS * net.sample_rate), 2 * net.min_samples)
    return 0.1 * torch.randn(2, samples, generator=torch.Generator().manual_seed(0))


def _dynamic_shapes(min_samples: int) -> tuple[dict[int, Any]]:
    dim = torch.export.Dim
    return ({0: dim("batch", min=1), 1: dim("samples", min=min_samples)},)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' advice to those who write them."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [one.level for one in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for one in loggers:
                one.setLevel(logging.ERROR)
            yield
        finally:
            for one, level in zip(loggers, levels, strict=True):
                one.setLevel(level)


FORMATS = {
    ".onnx": Format("ONNX", onnx_bytes, open_onnx),
    ".pt2": Format("an archive of torch.export", program_bytes, _open_program),
    ".safetensors": Format("safetensors", lambda model: tensor_file_bytes(model.contents), _open_tensors),
}
"""By the ending of the file."""
