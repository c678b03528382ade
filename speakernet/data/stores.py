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
    Description,
    PackedError,
    read_description,
)
from speakernet.data.packing import (
    HEADER_BYTES,
    SKIPPED,
    PackInput,
    PackSummary,
    Shard,
    digest_of_plan,
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

    def fetch(
        self, name: str, target: Path, problem_of: Callable[[Path], str] = lambda partial: ""
    ) -> None:
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
            folder = place.rpartition("/")[0]
            system.makedirs(folder, exist_ok=True)
            protocols = [system.protocol] if isinstance(system.protocol, str) else system.protocol
            if not WHOLE_OR_NOT.isdisjoint(protocols):
                system.put_file(str(source), place)
                return
            if "/" in name:
                # Nobody else writes to the folder of a shard: a killed writer left these.
                for leftover in system.glob(f"{place}.*{PARTIAL}"):
                    system.rm_file(leftover)
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
            # fsspec caches listings, which would hide files that other writers have added since.
            system.invalidate_cache()
            place = f"{root}/{name}"
            return int(system.size(place)) if system.exists(place) else None

        return self._try(name, look)  # type: ignore[no-any-return]

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
                    problem = f"{place}: {ATTEMPTS} attempts failed, the last with {reason}"
                    if isinstance(error, ShardError):
                        # The file arrived each time, but is not what was packed.
                        problem += f"; remove it there, then {REPAIR_ADVICE}"
                    raise ShardError(problem) from error
                logger.warning("%s: attempt %d of %d failed (%s)", place, attempt, ATTEMPTS, reason)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")


# First look at what is there. Then pack those of this writer's shards that are missing, one at a
# time in a scratch folder, and move each to the address when it is complete. If the shards of all
# writers are there, write the description that makes them a corpus. A kill may come at any step,
# and every start begins by looking, so resuming and repairing need no code of their own.
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
    num_rows = len(source.names)
    if not num_rows:
        raise PackedError(
            f"{source.description}: there is nothing to pack; expected at least one audio file"
        )
    count = min(num_shards or -(-num_rows // UTTERANCES_OF_A_SHARD), num_rows, MAX_PARTS)
    shards = [WorkPart(number, count) for number in range(1, count + 1)]
    plan = plan_of_parts(source, sample_rate, count) | {"order": "every n-th"}
    origin = digest_of_plan(plan)
    store = Store(address)
    # Kept after a kill: the same command continues with the shard that was being packed.
    key = hashlib.sha256(f"{store.address} {origin} {writer}".encode()).hexdigest()[:24]
    scratch = default_cache_folder() / "packing" / key
    num_resumed = 0
    descriptions = []
    with exclusive(scratch), tempfile.TemporaryDirectory(prefix="speakernet-") as temporary:
        described = Path(temporary)
        missing = _missing(store, shards, described, origin)
        known = _known_digests(store, shards, sample_rate)
        for shard in share(shards, writer.number, writer.count):
            name = shard.name
            if shard not in missing:
                descriptions.append(read_description(described / name))
                num_resumed += descriptions[-1].num_utterances
                continue
            rows = range(shard.number - 1, num_rows, count)
            some = Shard(source, rows, f"shard {shard} of {source.description}", origin)
            packed = pack(some, scratch / name, sample_rate=sample_rate, **options)
            num_resumed += packed.num_resumed
            descriptions.append(_move(store, scratch / name, known))
        # Looked up again, because other writers may have finished in the meantime.
        missing = _missing(store, shards, described, origin)
        if not missing:
            join_parts(described)
            if known != read_description(described).shards:
                store.put(described / DESCRIPTION, DESCRIPTION)
    shutil.rmtree(scratch, ignore_errors=True)
    return PackSummary.of(descriptions, num_resumed), len(missing)


def _move(store: Store, folder: Path, known: Mapping[str, str]) -> Description:
    """Move a packed shard to the address; `known` are the digests in the description there."""
    name = folder.name
    description = read_description(folder)
    # Readers compare a shard with the digest in the description, so a lost shard that is packed
    # again must be equal to the old one.
    if known.get(name, description.index_sha256) != description.index_sha256:
        raise PackedError(
            f"{store.address}/{name}: the recordings have changed since this corpus was packed; "
            "remove the corpus, or choose another address"
        )
    # The description last: it marks the shard as complete.
    for file in (SKIPPED, SAMPLES, INDEX, DESCRIPTION):
        if (folder / file).exists():
            store.put(folder / file, f"{name}/{file}")
    shutil.rmtree(folder)
    return description


def _known_digests(store: Store, shards: list[WorkPart], sample_rate: int) -> dict[str, str]:
    """Shard -> SHA-256 of its index, as the description at the address has it; empty if that has to
    be written.

    Raises:
        PackedError: a different corpus is there.
    """
    with tempfile.TemporaryDirectory(prefix="speakernet-") as folder:
        description = _description_at(store, "", Path(folder))
    if description is None:
        return {}
    digests = description.shards
    is_same = digests.keys() == {shard.name for shard in shards}
    if not is_same or description.sample_rate != sample_rate:
        raise PackedError(
            f"{store.address}: holds a different corpus; remove it, or choose another address"
        )
    return digests


def _description_at(store: Store, folder: str, target: Path) -> Description | None:
    """Copy the description of a shard, or of the corpus, to `target` and read it; None if it is not
    there or only a part of it was written.
    """
    name = f"{folder}/{DESCRIPTION}".removeprefix("/")
    if store.size(name) is None:
        return None
    target.mkdir(exist_ok=True)
    store.fetch(name, target / DESCRIPTION)
    try:
        json.loads((target / DESCRIPTION).read_bytes())
    except ValueError:
        logger.warning("%s/%s is damaged and is written again", store.address, name)
        return None
    # Errors of a whole one are raised: it is not ours, or of a newer version.
    return read_description(target)


def _missing(store: Store, shards: list[WorkPart], folder: Path, origin: str) -> list[WorkPart]:
    """The shards that are not there whole; the descriptions of the others are saved in `folder`."""

    def is_missing(shard: WorkPart) -> bool:
        name = shard.name
        target = folder / name
        if target.exists():
            # Looked at before.
            return False
        problem = ""
        description = _description_at(store, name, target)
        if description is not None:
            if description.part_of != origin:
                raise PackedError(
                    f"{store.address}/{name}: this shard belongs to a different list or sample "
                    "rate; remove it or change the address"
                )
            problem = _damage(store, name, description, target)
            if not problem:
                return False
            logger.warning("%s/%s: %s, so the shard is written again", store.address, name, problem)
        shutil.rmtree(target, ignore_errors=True)
        return True

    are_missing = list(parallel_map(is_missing, shards, NUM_THREADS))
    return [shard for shard, is_so in zip(shards, are_missing, strict=True) if is_so]


def _damage(store: Store, name: str, description: Description, folder: Path) -> str:
    """What is wrong with the files of a shard, judged by sizes and by the checksum of the index;
    empty if nothing.
    """
    # The samples are not read, because that would move the whole corpus over the network.
    expected = HEADER_BYTES + 2 * description.num_samples
    size = store.size(f"{name}/{SAMPLES}")
    if size != expected:
        return f"{SAMPLES} has {size or 0} bytes, expected {expected}"
    if store.size(f"{name}/{INDEX}") is None:
        return f"{INDEX} is missing"
    index = folder / INDEX
    store.fetch(f"{name}/{INDEX}", index)
    is_whole = sha256_of(index) == description.index_sha256
    index.unlink()
    return "" if is_whole else f"{INDEX} does not match {DESCRIPTION}"
