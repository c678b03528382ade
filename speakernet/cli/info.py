"""Show the contents of a model file: network, front end, sizes, training, calibration and
thresholds.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speakernet.cli import MODEL_ARGUMENT
from speakernet.files import human_bytes, sha256_of

if TYPE_CHECKING:
    from speakernet.inference.verifier import SpeakerVerifier

ARGUMENTS = {"model": MODEL_ARGUMENT}


def run(arguments: argparse.Namespace) -> list[str]:
    """Return a table of facts."""
    # Late: --help needs no torch.
    from speakernet.inference import verifier

    model = verifier.load(arguments.model, "cpu")
    rows = [*_network_rows(Path(arguments.model), model), *_use_rows(model)]
    summary = model.contents.get("training_summary") or {}
    rows += [(f"training {key}", _value(value)) for key, value in summary.items()]
    return [f"{name:<28} {value}" for name, value in rows]


def _network_rows(path: Path, model: "SpeakerVerifier") -> Iterator[tuple[str, Any]]:
    contents = model.contents
    net = model.net
    version = contents["format_version"]
    yield "file", f"{path} ({human_bytes(path.stat().st_size)}, format version {version})"
    yield "SHA-256", sha256_of(path)
    ties = "(of weights and front end; ties a store of people to this model)"
    yield "fingerprint", f"{model.fingerprint} {ties}"
    options = dict(contents["model"]["options"])
    # The configuration of a pretrained backbone is as long as the rest of the table.
    config = options.pop("config", {})
    source = options.pop("source", {})
    if config:
        source |= {"architecture": config["model_type"]}
    yield "model", f"{contents['model']['name']} {_options(options)}"
    for key, value in source.items():
        if value:
            yield "backbone" if key == "name" else f"backbone {key}", _value(value)
    front_end = contents["front_end"]
    yield "front end", f"{front_end['name']} {_options(front_end['options'])}"
    yield "parameters", f"{sum(parameter.numel() for parameter in net.parameters()):,}"
    yield "embedding", f"{net.embedding_dim}-dimensional"
    yield "sample rate", f"{net.sample_rate} Hz"


def _use_rows(model: "SpeakerVerifier") -> Iterator[tuple[str, Any]]:
    """What decisions need to know."""
    # Late, as in `run`.
    from speakernet.inference.decision import described_threshold

    contents = model.contents
    if contents.get("adaptation"):
        yield "adaptation", _options(contents["adaptation"])
    mean = _mean(contents.get("embedding_mean"), contents.get("embedding_mean_of"))
    yield "mean embedding", mean
    if model.caution:
        yield "caution", model.caution
    licence = (contents.get("training_summary") or {}).get("licence")
    yield "licence", licence or "not stated; ask the people who trained it"
    if model.is_calibrated:
        yield "calibrated", f"yes; {model.rule.caution}".removesuffix("; ")
    else:
        yield "calibrated", f"no: {model.rule.advice}"
    for fit in (contents.get("calibration") or {}).get("fits", ()):
        yield "calibration", _fit(fit)
    for threshold in contents.get("thresholds") or ():
        described = f"{threshold['name']} {described_threshold(threshold)}"
        yield "threshold", f"{described}; {_options(threshold['backend'])}"


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _options(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in options.items())


def _fit(fit: Mapping[str, Any]) -> str:
    """A calibration: its formula, the list it was fitted on, and the scoring method."""
    terms = " + ".join(
        f"{weight:.4f} x {name}" for weight, name in zip(fit["weights"], fit["inputs"], strict=True)
    )
    fitted_on = f", fitted on {fit['list']}" if fit.get("list") else ""
    if "num_targets" in fit:
        fitted_on += (
            f" ({fit['num_targets']:,} target and {fit['num_nontargets']:,} non-target trials)"
        )
    return (
        f"log-likelihood ratio = {fit['offset']:.4f} + {terms}{fitted_on}; "
        f"{_options(fit['backend'])}"
    )


def _mean(mean: Any, measured_on: Mapping[str, Any] | None) -> str:
    if mean is None:
        return "none"
    way = f" ({_options(measured_on)})" if measured_on else ""
    length = math.sqrt(float(mean.square().sum()))
    return f"length {length:.3f}{way}, subtracted before scoring if the scoring method asks for it"
