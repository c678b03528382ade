"""Show the contents of a model file: network, front end, sizes, training, calibration and
thresholds.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speakernet.cli.shared import MODEL_ARGUMENT
from speakernet.files import human_bytes, sha256_of

ARGUMENTS = {"model": MODEL_ARGUMENT}
NO_LICENCE = "not stated; the people who trained the model can choose one"


def run(arguments: argparse.Namespace) -> list[str]:
    """Return a table of facts."""
    # Late: --help needs no torch.
    from speakernet.inference import decision, verifier

    # Loaded as for use, so that a file that `info` describes is known to work.
    model = verifier.load(arguments.model, "cpu")
    path = Path(arguments.model)
    net = model.net
    contents = model.contents
    summary = contents.get("training_summary") or {}
    front_end = contents["front_end"]
    options = dict(contents["model"]["options"])
    # The configuration of a pretrained backbone is as long as the rest of the table.
    config = options.pop("config", {})
    backbone = dict(options.pop("source", {}))
    if config:
        backbone["architecture"] = config["model_type"]
    num_bytes = human_bytes(path.stat().st_size)
    rows = [
        ("file", f"{path} ({num_bytes}, format version {contents['format_version']})"),
        ("SHA-256", sha256_of(path)),
        (
            "fingerprint",
            f"{model.fingerprint} (of weights and front end; ties a store of people to this model)",
        ),
        ("model", f"{contents['model']['name']} {_in_words(options)}"),
    ]
    for key, value in backbone.items():
        name = "backbone" if key == "name" else f"backbone {key}"
        rows.append((name, _in_words(value)))
    origin = summary.get("initial_model") or {}
    licence = summary.get("licence") or origin.get("licence") or NO_LICENCE
    calibrated = f"no: {model.rule.advice}"
    if model.is_calibrated:
        calibrated = f"yes; {model.rule.caution}" if model.rule.caution else "yes"
    rows += [
        ("front end", f"{front_end['name']} {_in_words(front_end['options'])}"),
        ("parameters", f"{net.num_parameters:,}"),
        ("embedding", f"{net.embedding_dim}-dimensional"),
        ("sample rate", f"{net.sample_rate} Hz"),
        ("adaptation", _in_words(contents.get("adaptation") or {})),
        ("mean embedding", _mean_in_words(contents)),
        ("caution", model.caution),
        ("licence", licence),
        ("calibrated", calibrated),
    ]
    # A file may have a calibration for each scoring method, and another with durations.
    for fit in (contents.get("calibration") or {}).get("fits", ()):
        rows.append(("calibration", _fit_in_words(fit)))
    for threshold in contents.get("thresholds") or ():
        text = f"{threshold['name']} {decision.described_threshold(threshold)}"
        rows.append(("threshold", f"{text}; {_in_words(threshold['backend'])}"))
    lines = [f"{name:<28} {value}" for name, value in rows if value]
    for key, value in summary.items():
        name = f"training {key}"
        lines.append(f"{name:<28} {_in_words(value)}")
    return lines


def _in_words(value: Any) -> Any:
    """A value as it is shown; a mapping becomes `key=value` pairs."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_in_words(entry)}" for key, entry in value.items())
    return f"{value:.6g}" if isinstance(value, float) else value


def _mean_in_words(contents: Mapping[str, Any]) -> str:
    if contents.get("embedding_mean") is None:
        return "none"
    length = math.sqrt(float(contents["embedding_mean"].square().sum()))
    text = f"length {length:.3f}, subtracted if the scoring method asks for it"
    if contents.get("embedding_mean_of"):
        text += f"; measured with {_in_words(contents['embedding_mean_of'])}"
    return text


def _fit_in_words(fit: Mapping[str, Any]) -> str:
    """A calibration: its formula, the list it was fitted on, and the scoring method."""
    inputs = zip(fit["weights"], fit["inputs"], strict=True)
    terms = " + ".join(f"{weight:.4f} x {name}" for weight, name in inputs)
    fitted_on = f", fitted on {fit['list']}" if fit.get("list") else ""
    if "num_targets" in fit:
        fitted_on += (
            f" ({fit['num_targets']:,} target and {fit['num_nontargets']:,} non-target trials)"
        )
    return (
        f"log-likelihood ratio = {fit['offset']:.4f} + {terms}{fitted_on}; "
        f"{_in_words(fit['backend'])}"
    )
