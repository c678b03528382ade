"""From a model file to a file of another format, written only when its embeddings are those of the model."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.files import OTHER_PLACE, atomic_write, check_writable, writing
from speakernet.inference.export.formats import FORMATS, ExportError, open_onnx
from speakernet.inference.export.parity import LEAST_COSINE, Parity, compare
from speakernet.inference.export.quantize import quantized
from speakernet.models.model_file import load_model_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        path: the file.
        title: its format, in words.
        num_bytes: its size.
        parity: how near its embeddings are to the model's; in eight bits before they were rounded to them.
        rounded: the same behind the rounding to eight bits; None without it.
    """

    path: Path
    title: str
    num_bytes: int
    parity: Parity
    rounded: Parity | None = None


def check_target(out: str | Path, int8: bool) -> Path:
    """The path to write to, before anything else is done.

    Raises:
        ExportError: an ending that says no format, a folder, or int8 of another format than ONNX.
        FileError: nothing can be written there.
    """
    path = Path(out)
    if path.suffix not in FORMATS:
        raise ExportError(
            f"{out}: the ending says the format; expected one of {', '.join(FORMATS)}, found {path.suffix or 'none'!r}"
        )
    if path.is_dir():
        raise ExportError(f"{out} is a folder; give the name of a file in it")
    if int8 and path.suffix != ".onnx":
        raise ExportError(f"int8 is for .onnx; {out} would be {FORMATS[path.suffix].title}")
    check_writable(path)
    return path


def export_model(
    model_path: str | Path, out: str | Path, *, speech: Sequence[np.ndarray], int8: bool = False
) -> ExportReport:
    """Write a model file in another format, chosen by the ending of `out`: .onnx, .pt2 or .safetensors.

    Args:
        model_path: the model file.
        out: the file to write; one that is there is replaced.
        speech: recordings that the export is compared on, (samples,) float32 each at the model's rate.
        int8: round an ONNX graph's weights and activations to eight bits; what that costs is for the caller to measure.

    Raises:
        ValueError: no model file, an ending that says no format, a missing library, no recording long enough, or an
            export whose embeddings are not the model's; nothing is written then.
    """
    path = check_target(out, int8)
    model = load_model_file(model_path)
    heard = [one for one in speech if len(one) >= model.net.min_samples]
    if not heard:
        raise ExportError(
            f"none of {len(speech)} recordings to compare on has the {model.net.min_samples} samples "
            f"({model.net.min_samples / model.net.sample_rate:.2f} s) that {model.net.model_name} needs"
        )
    kind = FORMATS[path.suffix]
    content = kind.write(model)
    parity = compare(model, kind.open(content), heard)
    if not parity.holds:
        raise ExportError(
            f"{path} was not written: its embeddings are not those of {model_path} ({parity}; a cosine above "
            f"{LEAST_COSINE} is wanted)"
        )
    rounded = None
    if int8:
        content = quantized(content)
        rounded = compare(model, open_onnx(content), heard)
    with writing(path, OTHER_PLACE), atomic_write(path, "wb") as file:
        file.write(content)
    return ExportReport(path, kind.title, len(content), parity, rounded)
