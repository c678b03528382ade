"""Repositories on the Hugging Face hub, through its own library with its cache, offline switch and
tokens.
"""

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from speakernet.checkpoint import CheckpointError
from speakernet.files import atomic_write, error_line, reading, sha256_of

logger = logging.getLogger(__name__)

HUB_SECONDS = 20.0
NOTE = "first-fetched"
"""Beginning of the name of a file beside a repository's snapshots in the hub's cache, which holds
the SHA-256 that each file had when it was first fetched."""
COMMIT = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def snapshot(name: str, revision: str, patterns: Sequence[str], what: str) -> Path:
    """The cached folder of a repository with the files that match `patterns`, downloaded if
    necessary.

    A branch such as `main` moves: a file that is not the one of the first fetch causes a warning.
    Errors name the repository as `what`.

    Raises:
        CheckpointError: no such repository, a private one, or neither a network nor a cached copy.
    """
    folder = _download(name, revision, patterns, what)
    if COMMIT.fullmatch(revision) is None:
        _warn_of_changes(name, revision, folder, patterns)
    return folder


def _download(name: str, revision: str, patterns: Sequence[str], what: str) -> Path:
    """The folder in the hub's cache, brought up to date if the hub can be reached."""
    download = partial(
        huggingface_hub.snapshot_download, name, revision=revision, allow_patterns=list(patterns)
    )
    try:
        # Asked first, with a timeout of our own, because a download waits long for a network that
        # drops packets.
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
        return Path(download())
    except (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
    ) as error:
        raise CheckpointError(
            f"{what} ({revision}) is neither a local folder nor a model on the hub; check the "
            f"name, or {LOG_IN} if it is private"
        ) from error
    except Exception as error:
        # httpx, the hub and the system each raise their own errors without a network.
        try:
            cached = Path(download(local_files_only=True))
        except Exception:
            raise CheckpointError(
                f"{what} is neither a local folder nor in the cache, and the hub cannot be reached "
                f"({error_line(error)}); run once with network access, or give a file or folder"
            ) from error
        logger.warning(
            "the hub cannot be reached (%s); using the cached copy %s", error_line(error), cached
        )
        return cached


def _warn_of_changes(name: str, revision: str, folder: Path, patterns: Sequence[str]) -> None:
    """Warn of files that differ from those of the first fetch, whose SHA-256 are kept in the
    cache.
    """
    # models--OWNER--NAME/snapshots/COMMIT. The note lies beside the cache's own files, which do not
    # record what was fetched first.
    note = folder.parents[1] / f"{NOTE}-{revision.replace('/', '--')}.json"
    first_digests: dict[str, str] = {}
    if note.is_file():
        with reading(note, "the SHA-256 of fetched files", CheckpointError):
            first_digests = dict(json.loads(note.read_text("utf-8")))
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    for file_name in filter_repo_objects(names, allow_patterns=list(patterns)):
        digest = _digest_of(folder / file_name)
        # A file that was not fetched before is noted now.
        first_digest = first_digests.setdefault(file_name, digest)
        if digest != first_digest:
            digests = f"SHA-256 {digest} instead of {first_digest}"
            logger.warning(
                "%s: %s has changed since it was first fetched, and so may results (%s); give "
                "a commit as the revision to keep one version, or remove %s to accept the new one",
                f"{name} ({revision})",
                file_name,
                digests,
                note,
            )
    # A cache that cannot be written is no reason to refuse the model.
    with contextlib.suppress(OSError), atomic_write(note) as file:
        json.dump(first_digests, file, indent=1)


def _digest_of(path: Path) -> str:
    """A file's SHA-256, which is the name of a large file in the hub's cache."""
    blob = path.resolve().name
    return blob if SHA256.fullmatch(blob) else sha256_of(path)


def push(name: str, files: Mapping[str, bytes | Path], *, is_private: bool) -> str:
    """Upload files to a repository, created if missing; returns the address of the commit."""
    api = huggingface_hub.HfApi()
    operations = []
    for target, content in files.items():
        operations.append(
            huggingface_hub.CommitOperationAdd(path_in_repo=target, path_or_fileobj=content)
        )
    try:
        # None leaves it to the hub: public, unless the organisation's default is private.
        api.create_repo(name, private=is_private or None, exist_ok=True)
        commit = api.create_commit(name, operations, commit_message=f"Add {', '.join(files)}")
    except Exception as error:
        raise CheckpointError(
            f"{name}: the upload to the hub failed ({error_line(error)}); {LOG_IN} to a token with "
            "write access"
        ) from error
    return str(commit.commit_url)
