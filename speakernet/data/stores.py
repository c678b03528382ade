"""Files at an fsspec address (`s3://…`, `gs://…`, `https://…`, `file://…`), fetched and written
with retries.

`shards.py` reads packed corpora there. `pack_to_address` writes them: shards first, each complete
once its description is there, and the description of the corpus last.
"""

import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from speakernet.data.packed import DESCRIPTION, INDEX, SAMPLES, PackedError, read_description
from speakernet.data.packing import (
    SKIPPED,
    PackInput,
    PackSummary,
    Shard,
    join_parts,
    pack,
    plan_of_parts,
)
from speakernet.files import MAX_PARTS, WorkPart, error_line, parallel_map, share

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 0.5
"""For fetching or writing a file; each pause is twice as long as the one before, 15.5 s in all."""
UTTERANCES_OF_A_SHARD = 4096
"""About a gigabyte: fetched in seconds, and few enough shards for an epoch."""
NUM_THREADS = 8


class ShardError(PackedError):
    """A file of a corpus at an address is missing, altered or unreachable; the message names it."""


class Store:
    """The files below an address. A failed access is retried several times, with growing pauses."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def fetch(self, name: str, target: Path, problem_of: Callable[[Path], str]) -> None:
        """Copy a file to `target` once it is complete and `problem_of` finds nothing wrong, or
        raise ShardError.
        """
        partial = target.with_name(target.name + PARTIAL)

        def get(system: Any, root: str) -> None:
            system.get_file(f"{root}/{name}", str(partial))
            if problem := problem_of(partial):
                raise ShardError(problem)
            partial.replace(target)

        try:
            self._try(name, get)
        finally:
            partial.unlink(missing_ok=True)

    def put(self, source: Path, name: str) -> None:
        """Write a file; in an object store it appears whole or not at all."""

        def write(system: Any, root: str) -> None:
            place = f"{root}/{name}"
            system.makedirs(place.rpartition("/")[0], exist_ok=True)
            system.put_file(str(source), place)

        self._try(name, write)

    def has(self, name: str) -> bool:
        """Whether a file of that name exists."""

        def is_there(system: Any, root: str) -> bool:
            system.invalidate_cache()
            return bool(system.exists(f"{root}/{name}"))

        return bool(self._try(name, is_there))

    def _try(self, name: str, action: Callable[[Any, str], Any]) -> Any:
        place = f"{self.address}/{name}"
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                # Opened for each attempt: the libraries' connections do not survive a fork.
                return action(*url_to_fs(self.address))
            except FileNotFoundError as error:
                advice = (
                    "run speakernet pack to this address again to write the missing files, "
                    "then resume"
                )
                raise ShardError(f"{place}: missing; {advice}") from error
            except ImportError as error:
                raise ShardError(
                    f"{self.address}: {error} (pip install 'speakernet[s3]' for s3://)"
                ) from error
            except Exception as error:
                # Each kind of address has its own library, which may raise anything.
                reason = error_line(error)
                if "rotocol not known" in reason:
                    raise ShardError(
                        f"{place}: unknown kind of address; expected one such as s3://…"
                    ) from error
                if attempt == ATTEMPTS:
                    raise ShardError(
                        f"{place}: {ATTEMPTS} attempts failed, the last with {reason}"
                    ) from error
                logger.warning("%s: attempt %d of %d failed (%s)", place, attempt, ATTEMPTS, reason)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")


def pack_to_address(
    source: PackInput,
    address: str,
    writer: WorkPart,
    num_shards: int = 0,
    *,
    sample_rate: int,
    **options: Any,
) -> tuple[PackSummary, int]:
    """Write one writer's shards of a corpus to an address; the last writer adds the description of
    the whole.

    Shard n of N has every N-th utterance from the n-th on: a list is ordered by speaker, but each
    shard needs many speakers.

    Returns:
        The summary of the writer's shards, and how many shards of other writers are missing.
    """
    store = Store(address)
    num_rows = len(source.names)
    if not num_rows:
        raise PackedError(
            f"{source.description}: there is nothing to pack; expected at least one audio file"
        )
    count = min(num_shards or -(-num_rows // UTTERANCES_OF_A_SHARD), num_rows, MAX_PARTS)
    shards = [WorkPart(number, count) for number in range(1, count + 1)]
    plan = plan_of_parts(source, sample_rate, count) | {"order": "every n-th"}
    origin = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    summaries = []
    with tempfile.TemporaryDirectory(prefix="speakernet-") as scratch:
        described = Path(scratch, "described")
        num_resumed = 0
        missing = _missing(store, shards, described, origin)
        if missing and store.has(DESCRIPTION):
            raise PackedError(
                f"{address}: holds a different corpus; remove it, or choose another address"
            )
        for shard in share(shards, writer.number, writer.count):
            if shard not in missing:
                one = read_description(described / shard.name)
                summaries.append(
                    PackSummary(one["num_utterances"], one["num_samples"], 0, one["num_skipped"])
                )
                num_resumed += one["num_utterances"]
                continue
            folder = Path(scratch, shard.name)
            own = Shard(
                source,
                range(shard.number - 1, num_rows, count),
                f"shard {shard} of {source.description}",
            )
            own.part_of = origin
            summaries.append(pack(own, folder, sample_rate=sample_rate, **options))
            names = [
                name for name in (SKIPPED, SAMPLES, INDEX, DESCRIPTION) if (folder / name).exists()
            ]
            for name in names:
                # The description last: it marks the shard as complete.
                store.put(folder / name, f"{shard.name}/{name}")
            shutil.rmtree(folder)
        missing = _missing(store, shards, described, origin)
        if not missing and not store.has(DESCRIPTION):
            join_parts(described)
            store.put(described / DESCRIPTION, DESCRIPTION)
    counts = (
        sum(getattr(one, name) for one in summaries)
        for name in ("num_utterances", "num_samples", "num_skipped")
    )
    num_utterances, num_samples, num_skipped = counts
    return PackSummary(num_utterances, num_samples, num_resumed, num_skipped), len(missing)


def _missing(store: Store, shards: list[WorkPart], folder: Path, origin: str) -> list[WorkPart]:
    """The shards that are not there yet; the descriptions of the others are saved in `folder`."""

    def look(shard: WorkPart) -> bool:
        place = folder / shard.name
        if not (place / DESCRIPTION).exists():
            if not store.has(f"{shard.name}/{DESCRIPTION}"):
                return True
            place.mkdir(parents=True, exist_ok=True)
            store.fetch(f"{shard.name}/{DESCRIPTION}", place / DESCRIPTION, lambda partial: "")
        if read_description(place)["part_of"] != origin:
            raise PackedError(
                f"{store.address}/{shard.name}: this shard is of a different list or rate; remove "
                "it or change the address"
            )
        return False

    is_missing = list(parallel_map(look, shards, NUM_THREADS))
    return [shard for shard, is_so in zip(shards, is_missing, strict=True) if is_so]
