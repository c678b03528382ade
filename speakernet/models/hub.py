"""Repositories of the Hugging Face hub through its own library: its cache, its offline switch, its tokens."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants as constants
from huggingface_hub import errors

from speakernet.checkpoint import CheckpointError
from speakernet.files import error_line

logger = logging.getLogger(__name__)

HUB_SECONDS = 20.0
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def snapshot(name: str, revision: str, wanted: Sequence[str], what: str) -> Path:
    """The folder of a repository in the cache, with the files that match `wanted`; fetched if they are not there.

    Raises:
        CheckpointError: begins with `what`; no such repository, a private one, or neither a network nor a cached copy.
    """
    try:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(wanted)))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"{what} ({revision}) is neither here nor a model of the hub; check its spelling, or {LOG_IN} if it is a "
            "private one"
        ) from error
    except Exception as error:
        # httpx, the hub and the system have their own errors for a network that is not there.
        try:
            cached = Path(
                huggingface_hub.snapshot_download(
                    name, revision=revision, allow_patterns=list(wanted), local_files_only=True
                )
            )
        except Exception:
            raise CheckpointError(
                f"{what} is neither here nor in the cache, and the hub cannot be reached ({error_line(error)}); "
                "fetch it once where there is a network, or give a file or folder"
            ) from error
        logger.warning("the hub cannot be reached (%s): the cached copy %s is used", error_line(error), cached)
        return cached


def published_sha256(file: Path) -> str:
    """The SHA-256 that the hub gave for a large file: its name in the cache; empty for a small one."""
    name = file.resolve().name
    return name if re.fullmatch("[0-9a-f]{64}", name) else ""


def push(name: str, files: Mapping[str, bytes | Path], *, is_private: bool) -> str:
    """Put files into a repository, which is made if it is missing; the address of what is there now."""
    api = huggingface_hub.HfApi()
    added = [
        huggingface_hub.CommitOperationAdd(path_in_repo=target, path_or_fileobj=content)
        for target, content in files.items()
    ]
    try:
        api.create_repo(name, private=is_private or None, exist_ok=True)
        done = api.create_commit(name, added, commit_message=f"Add {', '.join(files)}")
    except Exception as error:
        raise CheckpointError(
            f"{name}: the hub did not take it ({error_line(error)}); {LOG_IN} to a token that may write there"
        ) from error
    return str(done.commit_url)
