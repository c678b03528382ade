"""Training, scoring and using speaker-verification models; docs/architecture.md describes the packages."""

import importlib
from typing import Any

__version__ = "0.3.0"
"""setup.py reads it here, and CHANGELOG.md begins with it."""

# Names that users import from here; torch is imported when one is first used.
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
