"""Repositories on the Hugging Face hub, through its own library with its cache, offline switch and
tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from speakernet.checkpoint import CheckpointError
from speakernet.files import error_line

logger = logging.getLogger(__name__)

HUB_SECONDS = 20.0
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def snapshot(name: str, revision: str, patterns: Sequence[str], what: str) -> Path:
    """The cached folder of a repository with the files that match `patterns`, downloaded if
    necessary.

    Raises:
        CheckpointError: no such repository, a private one, or neither a network nor a cached copy;
            starts with `what`.
    """
    download = partial(
        huggingface_hub.snapshot_download, name, revision=revision, allow_patterns=list(patterns)
    )
    try:
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


def push(name: str, files: Mapping[str, bytes | Path], *, is_private: bool) -> str:
    """Upload files to a repository, created if missing; returns the address of the commit."""
    api = huggingface_hub.HfApi()
    operations = []
    for target, content in files.items():
        operations.append(
            huggingface_hub.CommitOperationAdd(path_in_repo=target, path_or_fileobj=content)
        )
    try:
        api.create_repo(name, private=is_private or None, exist_ok=True)
        commit = api.create_commit(name, operations, commit_message=f"Add {', '.join(files)}")
    except Exception as error:
        raise CheckpointError(
            f"{name}: the upload to the hub failed ({error_line(error)}); {LOG_IN} to a token with "
            "write access"
        ) from error
    return str(commit.commit_url)
