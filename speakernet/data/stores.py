"""Files at an fsspec address (`s3://…`, `gs://…`, `https://…`, `file://…`), fetched and written
with retries.

`shards.py` reads packed corpora there. `pack_to_address` writes them: shards first, each complete
once its description is there, and the description of the corpus last. It also repairs: a shard is
written again if one of its files is missing or has the wrong size, the description of the corpus if
it is not that of the shards.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from speakernet.data.lookup import default_cache_folder
from speakernet.data.packed import (
    DESCRIPTION,
    INDEX,
    SAMPLES,
    PackedError,
    describe_samples,
    read_description,
)
from speakernet.data.packing import (
    COUNTS,
    SKIPPED,
    PackInput,
    PackSummary,
    Shard,
    join_parts,
    pack,
    plan_of_parts,
)
from speakernet.data.parts import MAX_PARTS, WorkPart, share
from speakernet.files import error_line, exclusive, parallel_map, sha256_of

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 0.5
"""For fetching or writing a file; each pause is twice as long as the one before, 15.5 s in all."""
WHOLE_OR_NOT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "http", "https"})
"""Protocols whose files appear complete or not at all; elsewhere a file is written under another
name and renamed.
"""
REPAIR_ADVICE = (
    "run the same speakernet pack to this address again, which writes missing and incomplete files"
)
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
        """Write a file; it appears whole or not at all."""

        def write(system: Any, root: str) -> None:
            place = f"{root}/{name}"
            system.makedirs(place.rpartition("/")[0], exist_ok=True)
            if not WHOLE_OR_NOT.isdisjoint(_protocols_of(system)):
                system.put_file(str(source), place)
                return
            # Not one name for all: two writers may write the description of the corpus at the same
            # moment.
            partial = f"{place}.{os.getpid()}{PARTIAL}"
            try:
                system.put_file(str(source), partial)
                system.mv(partial, place)
            except BaseException:
                with contextlib.suppress(Exception):
                    system.rm_file(partial)
                raise

        self._try(name, write)

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if there is none."""

        def look(system: Any, root: str) -> int | None:
            system.invalidate_cache()
            place = f"{root}/{name}"
            return int(system.size(place)) if system.exists(place) else None

        return self._try(name, look)  # type: ignore[no-any-return]

    def remove_partial(self, folder: str) -> None:
        """Remove what a killed writer left in a folder that nobody else writes to."""

        def remove(system: Any, root: str) -> None:
            if WHOLE_OR_NOT.isdisjoint(_protocols_of(system)):
                for place in system.glob(f"{root}/{folder}/*{PARTIAL}"):
                    system.rm_file(place)

        self._try(folder, remove)

    def _try(self, name: str, action: Callable[[Any, str], Any]) -> Any:
        place = f"{self.address}/{name}"
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                # Opened for each attempt: the libraries' connections do not survive a fork.
                return action(*url_to_fs(self.address))
            except FileNotFoundError as error:
                raise ShardError(f"{place}: missing; {REPAIR_ADVICE}, then resume") from error
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
                    # The file arrived each time, but is not what was packed.
                    advice = (
                        f"; remove it there, then {REPAIR_ADVICE}"
                        if isinstance(error, ShardError)
                        else ""
                    )
                    raise ShardError(
                        f"{place}: {ATTEMPTS} attempts failed, the last with {reason}{advice}"
                    ) from error
                logger.warning("%s: attempt %d of %d failed (%s)", place, attempt, ATTEMPTS, reason)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")


def _protocols_of(system: Any) -> set[str]:
    return {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)


def pack_to_address(
    source: PackInput,
    address: str,
    writer: WorkPart,
    num_shards: int = 0,
    *,
    sample_rate: int,
    **options: Any,
) -> tuple[PackSummary, int]:
    """Write or repair one writer's shards of a corpus at an address; the last writer adds the
    description of the whole.

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
    # Kept after a kill: the same command continues with the shard that was being packed.
    key = hashlib.sha256(f"{store.address} {origin} {writer}".encode()).hexdigest()[:24]
    scratch = default_cache_folder() / "packing" / key
    described = scratch / "described"
    summaries = []
    with exclusive(scratch):
        try:
            missing = _missing(store, shards, described, origin)
            known = _known_digests(store, shards, sample_rate)
            for shard in share(shards, writer.number, writer.count):
                if shard not in missing:
                    description = read_description(described / shard.name)
                    counts = {name: description[name] for name in COUNTS}
                    summaries.append(PackSummary(num_resumed=counts["num_utterances"], **counts))
                    continue
                rows = range(shard.number - 1, num_rows, count)
                own = Shard(source, rows, f"shard {shard} of {source.description}")
                own.part_of = origin
                summaries.append(
                    pack(own, scratch / shard.name, sample_rate=sample_rate, **options)
                )
                _put_shard(store, scratch / shard.name, known)
            missing = _missing(store, shards, described, origin)
            if not missing:
                join_parts(described)
                if known != read_description(described)["parts"]:
                    store.put(described / DESCRIPTION, DESCRIPTION)
        finally:
            shutil.rmtree(described, ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)

    def total(field: str) -> int:
        return sum(getattr(summary, field) for summary in summaries)

    totals = {field: total(field) for field in (*COUNTS, "num_resumed")}
    return PackSummary(**totals), len(missing)


def _put_shard(store: Store, folder: Path, known: Mapping[str, str]) -> None:
    """Move a packed shard to the address; `known` are the digests in the description there."""
    if known.get(folder.name) not in (None, read_description(folder)["index_sha256"]):
        raise PackedError(
            f"{store.address}/{folder.name}: the recordings have changed since this corpus was "
            "packed; remove the corpus, or choose another address"
        )
    store.remove_partial(folder.name)
    # The description last: it marks the shard as complete.
    for name in (SKIPPED, SAMPLES, INDEX, DESCRIPTION):
        if (folder / name).exists():
            store.put(folder / name, f"{folder.name}/{name}")
    shutil.rmtree(folder)


def _known_digests(store: Store, shards: list[WorkPart], sample_rate: int) -> dict[str, str]:
    """Shard -> SHA-256 of its index, as the description at the address has it; empty if that has to
    be written.

    Raises:
        PackedError: a different corpus is there.
    """
    if store.size(DESCRIPTION) is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="speakernet-") as folder:
        store.fetch(DESCRIPTION, Path(folder, DESCRIPTION), lambda partial: "")
        description = _whole_description(Path(folder), store.address)
    if description is None:
        return {}
    digests: dict[str, str] = description["parts"]
    if (
        set(digests) != {shard.name for shard in shards}
        or description["sample_rate"] != sample_rate
    ):
        raise PackedError(
            f"{store.address}: holds a different corpus; remove it, or choose another address"
        )
    return digests


def _whole_description(folder: Path, where: str) -> dict[str, Any] | None:
    """The description in a folder; None with a warning if only a part of it was written."""
    try:
        return read_description(folder)
    except PackedError:
        try:
            json.loads((folder / DESCRIPTION).read_bytes())
        except ValueError:
            logger.warning("%s: %s is damaged and is written again", where, DESCRIPTION)
            return None
        # Whole, but not ours or of a newer version.
        raise


def _missing(store: Store, shards: list[WorkPart], folder: Path, origin: str) -> list[WorkPart]:
    """The shards that are not there whole; the descriptions of the others are saved in `folder`."""

    def look(shard: WorkPart) -> bool:
        own = folder / shard.name
        where = f"{store.address}/{shard.name}"
        if (own / DESCRIPTION).exists():
            # Looked at before.
            return False
        if store.size(f"{shard.name}/{DESCRIPTION}") is None:
            return True
        own.mkdir(parents=True, exist_ok=True)
        store.fetch(f"{shard.name}/{DESCRIPTION}", own / DESCRIPTION, lambda partial: "")
        description = _whole_description(own, where)
        problem = ""
        if description is not None:
            if description["part_of"] != origin:
                raise PackedError(
                    f"{where}: this shard is of a different list or rate; remove it or change the "
                    "address"
                )
            problem = _damage(store, shard.name, description, own)
        if description is not None and not problem:
            return False
        if problem:
            logger.warning("%s: %s, so the shard is written again", where, problem)
        shutil.rmtree(own)
        return True

    is_missing = list(parallel_map(look, shards, NUM_THREADS))
    return [shard for shard, is_so in zip(shards, is_missing, strict=True) if is_so]


def _damage(store: Store, name: str, description: Mapping[str, Any], folder: Path) -> str:
    """What is wrong with the files of a shard, judged by sizes and by the checksum of the index;
    empty if nothing.
    """
    expected = len(describe_samples(0)) + 2 * description["num_samples"]
    size = store.size(f"{name}/{SAMPLES}")
    if size != expected:
        return (
            f"{SAMPLES} is missing"
            if size is None
            else f"{SAMPLES} has {size} bytes, expected {expected}"
        )
    if store.size(f"{name}/{INDEX}") is None:
        return f"{INDEX} is missing"
    store.fetch(f"{name}/{INDEX}", folder / INDEX, lambda partial: "")
    is_whole = sha256_of(folder / INDEX) == description["index_sha256"]
    (folder / INDEX).unlink()
    return "" if is_whole else f"{INDEX} does not match {DESCRIPTION}"
