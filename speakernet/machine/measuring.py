"""The one way to ask a measuring library: what it cannot tell is left out, and no run ends because of it.

NVML alone has twenty errors of its own (MIG, vGPU, containers without rights), and none is worth an epoch.
"""

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_said: set[str] = set()


@contextlib.contextmanager
def measuring(what: str) -> Iterator[None]:
    """Run a reading that may fail; its failure is said once a process, and the block ends there.

    Args:
        what: is measured, for the log.

    >>> found = {}
    >>> with measuring("the temperature"):
    ...     found["temperature"] = 1 / 0
    >>> found
    {}
    """
    try:
        yield
    except Exception as error:
        # Whatever the library raises: its errors are of its own types, which may not even be importable here.
        if what not in _said:
            _said.add(what)
            reason = str(error).strip().split("\n", 1)[0]
            kind = type(error).__name__
            logger.info("%s is not measured here (%s)", what, f"{kind}: {reason}" if reason else kind)
