"""Whether all processes were started with the same command on the same files, before they train on different ones."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from speakernet import distributed

MOST_NAMED = 5


def refuse_differences(values: Mapping[str, Any]) -> None:
    """Refuse processes whose values are not the same; every process calls it.

    Args:
        values: by the names that users know; plain values.

    Raises:
        ValueError: on every process, naming what differs, and how.
    """
    if not distributed.is_distributed():
        return
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    if len(set(distributed.gather_objects(digest))) == 1:
        return
    everybody = distributed.gather_objects(dict(values))
    first = everybody[0]
    differences = [
        f"{name} is {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}"
        for rank, other in enumerate(everybody)
        for name in sorted({*first, *other})
        if first.get(name) != other.get(name)
    ]
    more = f"; and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
    raise ValueError(
        f"the {len(everybody)} processes were not started alike: {'; '.join(differences[:MOST_NAMED])}{more}. Start "
        "all of them with the same command, the same files and the same versions"
    )
