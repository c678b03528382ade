"""Say what a model file holds: network, front end, sizes, how it was trained, what it decides by."""

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speakernet.files import human_bytes, sha256_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model file."""
    parser.add_argument("model", help="a model file, such as exps/exp01/best.pt")


def run(arguments: argparse.Namespace) -> int:
    """Print a table of facts.

    Raises:
        ValueError: not a model file.
    """
    # Late: --help needs no torch.
    from speakernet.models.model_file import load_model_file

    loaded = load_model_file(arguments.model)
    path = Path(arguments.model)
    net, contents = loaded.net, loaded.contents
    rows = [
        ("file", f"{path} ({human_bytes(path.stat().st_size)}, format version {contents['format_version']})"),
        ("SHA-256", sha256_of(path)),
        ("model", f"{contents['model']['name']} {_options(contents['model']['options'])}"),
        ("front end", f"{contents['front_end']['name']} {_options(contents['front_end']['options'])}"),
        ("parameters", f"{sum(parameter.numel() for parameter in net.parameters()):,}"),
        ("embedding", f"{net.embedding_dim} numbers"),
        ("sample rate", f"{net.sample_rate} Hz"),
        ("mean embedding", _mean(contents.get("embedding_mean"), contents.get("embedding_mean_of"))),
        ("calibration", "fitted" if contents.get("calibration") else "none"),
        *(("threshold", _flat(threshold)) for threshold in contents.get("thresholds", ())),
        *((f"training {key}", _value(value)) for key, value in (contents.get("training_summary") or {}).items()),
    ]
    sys.stdout.write("".join(f"{name:<28} {value}\n" for name, value in rows))
    return 0


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


def _flat(options: Mapping[str, Any]) -> str:
    """The plain values alone: the scoring back end that a threshold belongs to would fill the screen."""
    return _options({key: value for key, value in options.items() if not isinstance(value, Mapping | list)})


def _value(value: Any) -> str:
    return _options(value) if isinstance(value, Mapping) else str(value)


def _mean(mean: Any, measured_on: Mapping[str, Any] | None) -> str:
    if mean is None:
        return "none"
    way = f" ({_options(measured_on)})" if measured_on else ""
    length = math.sqrt(float(mean.square().sum()))
    return f"of length {length:.3f}{way}, subtracted before scoring where the scoring says so"
