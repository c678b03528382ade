"""Show the contents of a model file: network, front end, sizes, training, calibration and
thresholds.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speakernet.cli import MODEL_ARGUMENT
from speakernet.files import human_bytes, sha256_of

ARGUMENTS = {"model": MODEL_ARGUMENT}


def run(arguments: argparse.Namespace) -> list[str]:
    """Return a table of facts."""
    # Late: --help needs no torch.
    from speakernet.inference import decision, verifier

    model = verifier.load(arguments.model, "cpu")
    path = Path(arguments.model)
    net = model.net
    contents = model.contents
    summary = contents.get("training_summary") or {}
    options = dict(contents["model"]["options"])
    # The configuration of a pretrained backbone is as long as the rest of the table.
    config = options.pop("config", {})
    source = options.pop("source", {})
    source |= {"architecture": config["model_type"]} if config else {}
    rows = [
        (
            "file",
            f"{path} ({human_bytes(path.stat().st_size)}, format version "
            f"{contents['format_version']})",
        ),
        ("SHA-256", sha256_of(path)),
        (
            "fingerprint",
            f"{model.fingerprint} (of weights and front end; ties a store of people to this model)",
        ),
        ("model", f"{contents['model']['name']} {_options(options)}"),
        *(
            ("backbone" if key == "name" else f"backbone {key}", _value(one))
            for key, one in source.items()
            if one
        ),
        (
            "front end",
            f"{contents['front_end']['name']} {_options(contents['front_end']['options'])}",
        ),
        ("parameters", f"{sum(parameter.numel() for parameter in net.parameters()):,}"),
        ("embedding", f"{net.embedding_dim} numbers"),
        ("sample rate", f"{net.sample_rate} Hz"),
        *([("adaptation", _options(contents["adaptation"]))] if contents.get("adaptation") else []),
        (
            "mean embedding",
            _mean(contents.get("embedding_mean"), contents.get("embedding_mean_of")),
        ),
        *([("caution", model.caution)] if model.caution else []),
        ("licence", str(summary.get("licence") or "not stated; ask the people who trained it")),
        (
            "calibrated",
            f"yes; {model.rule.caution}".removesuffix("; ")
            if model.is_calibrated
            else f"no: {model.rule.advice}",
        ),
        *(
            ("calibration", _fit(one))
            for one in (contents.get("calibration") or {}).get("fits", ())
        ),
        *(
            (
                "threshold",
                f"{one['name']} {decision.described_threshold(one)}; {_options(one['backend'])}",
            )
            for one in contents.get("thresholds") or ()
        ),
        *((f"training {key}", _value(one)) for key, one in summary.items()),
    ]
    return [f"{name:<28} {value}" for name, value in rows]


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
