"""Train, score and use speaker-verification models; docs/architecture.md describes the packages."""

import importlib
from typing import Any

__version__ = "0.3.0"
"""Read by setup.py; CHANGELOG.md starts with it."""

# Public names, imported on first use, because they import torch.
_LAZY = {
    "load": "speakernet.assembly.published",
    "SpeakerVerifier": "speakernet.inference.verifier",
    "Report": "speakernet.evaluation.notebook",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
