"""Published speaker models by name: fetched once, checked, and converted to model files in the
cache.

A name is an entry of published.yaml, or a Hugging Face hub repository written by `speakernet push`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from speakernet.checkpoint import CheckpointError, write_checkpoint
from speakernet.corpora.download import DownloadOptions, RemoteFile, download_file
from speakernet.corpora.steps import Folder
from speakernet.data.lookup import default_cache_folder
from speakernet.files import atomic_write, exclusive, place
from speakernet.inference import verifier
from speakernet.models import published
from speakernet.options import lookup
from speakernet.terminal import Bar

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".model", ".safetensors", ".onnx")
"""A name that ends in one of these is a path."""


def load(
    path: str | Path, device: torch.device | str = "auto", local_rank: int | None = None
) -> verifier.SpeakerVerifier:
    """Load a model file, or a published model by name, ready to use.

    Args:
        path: such as `exps/exp01/best.pt`, `wespeaker/resnet34-LM` (`speakernet models` lists the
            names), or a repository of the Hugging Face hub that holds a model file (`owner/name`,
            `owner/name@revision`).
        device: `cpu`, `cuda`, `cuda:1`, …; `auto` uses a GPU if there is one.
        local_rank: number of the process on this machine, if there are several; `auto` uses the GPU
            with this number.

    Raises:
        ValueError: the file is not a model file, is damaged or too new; the device is missing; or
            the name is unknown, cannot be fetched or has the wrong SHA-256.
    """
    return verifier.load(path_of(path), device, local_rank)


def cache_path(name: str) -> Path:
    """The path of a catalogue entry's model file in the cache, whether fetched or not."""
    suffix = ".onnx" if "segmentation" in published.catalogue()[name] else ".pt"
    return default_cache_folder() / "models" / f"{name}{suffix}"


def path_of(name: str | Path) -> Path:
    """Return a path unchanged; for a name, return the path of its model file, fetching it if
    necessary.
    """
    path = Path(name)
    if path.exists():
        return path
    text = str(name)
    # OWNER/NAME looks like a path. With the suffix of a model file, or in an existing folder, it is
    # a mistyped path, which must not be looked up on the internet.
    is_of_hub = (
        published.NAME.fullmatch(text) and path.suffix not in SUFFIXES and not path.parent.exists()
    )
    return fetch(text) if is_of_hub or text in published.catalogue() else path


def fetch(name: str) -> Path:
    """The path of a name's model file, fetched and checked by SHA-256 if necessary."""
    # The catalogue has names with owners too, and it knows their checksums.
    owner, slash, _ = name.partition("/")
    if not slash or any(listed.startswith(f"{owner}/") for listed in published.catalogue()):
        return _fetch_listed(name)
    repository, _, revision = name.partition("@")
    file, hub_digest = published.find_in_repository(
        name, repository, revision or "main", [published.MODEL_FILE]
    )
    published.verify_digest(file, hub_digest, name)
    return file


def _fetch_listed(name: str) -> Path:
    """The path of a catalogue entry's model file, fetched and converted if necessary."""
    entry = lookup(published.catalogue(), name, "published model")
    target = cache_path(name)
    # Processes of one run ask for the same model at once, and only one may fetch it.
    with exclusive(target.parent, waits=True):
        if target.is_file():
            return target
        if "hub" in entry:
            file, expected = published.find_in_repository(
                name, entry["hub"], "main", entry["files"]
            )
        else:
            file = _from_address(name, entry, target)
            expected = ""
        # The published SHA-256 comes first, then that of the first fetch, then the hub's.
        first_digest = target.with_suffix(".sha256")
        if first_digest.is_file():
            expected = first_digest.read_text("utf-8").strip()
        digest = published.verify_digest(file, entry.get("sha256") or expected, name)
        if "segmentation" in entry:
            target.parent.mkdir(parents=True, exist_ok=True)
            place(file.resolve(), target)
            return target
        # Converted only once, so that later a published model loads as fast as any model file.
        contents = published.convert(name, entry, file, digest)
        with atomic_write(first_digest) as output:
            output.write(digest)
        write_checkpoint(target, contents)
        if "hub" not in entry:
            # A file in the cache of the hub stays, because other programs use it too.
            file.unlink()
    return target


def _from_address(name: str, entry: Mapping[str, Any], target: Path) -> Path:
    """Download a checkpoint from its URL, next to its target, resuming an interrupted download."""
    # The same words as in huggingface_hub, which this download does not need.
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise CheckpointError(
            f"{name} is not in the cache ({target}), and HF_HUB_OFFLINE is set; fetch it once with "
            "network access"
        )
    advice = "A checkpoint from elsewhere becomes a model file with `speakernet import-weights`."
    file = RemoteFile(
        f"{target.stem}.fetched", (entry["url"],), None, entry.get("bytes", 0), advice
    )
    with Bar(f"fetch {name}", entry.get("bytes"), "B") as bar:
        return download_file(file, Folder(target.parent), DownloadOptions(), bar.update)
