"""Published speaker models by name: fetched once, checked, and converted to model files in the
cache.

A name is an entry of published.yaml, or a Hugging Face hub repository written by `speakernet push`.
The importers read the checkpoints of published.yaml without running code from them.
"""

import functools
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from speakernet.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from speakernet.corpora.download import DownloadOptions, RemoteFile, download_file
from speakernet.corpora.steps import Folder
from speakernet.data.lookup import default_cache_folder
from speakernet.files import atomic_write, exclusive, free_name, place, read_yaml, sha256_of
from speakernet.inference import verifier
from speakernet.models.importers import PUBLISHED, import_network
from speakernet.models.model_file import load_model_file, model_file_contents
from speakernet.options import lookup
from speakernet.terminal import Bar

MODEL_FILE = "model.pt"
"""Name of the model file in a repository written by `push`."""
CARD = """---
library_name: speakernet
tags: [speaker-verification, speaker-recognition, audio]
license: {licence}
---
# {title}

A speaker-verification model: {model}, {parameters:,} parameters, {dim}-dimensional embeddings of
speech at {rate} Hz.
It does not detect replayed or synthetic voices.

{facts}

```python
import speakernet

verifier = speakernet.load("{name}")
verifier.verify("a.wav", "b.wav", threshold=0.4)
```
"""
NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w.-]+)?")
"""A hub repository, OWNER/NAME or OWNER/NAME@REVISION."""
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".model", ".safetensors", ".onnx")
"""A name that ends in one of these is a path."""
IN_CARD = (
    "licence",
    "trained_on",
    "imported_from",
    "address",
    "sha256",
    "initial_model",
    "best_eer_percent",
    "epoch",
)
"""Entries of a model file's training summary that the card shows."""
NO_LICENCE = "not given"


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


@functools.cache
def catalogue() -> dict[str, dict[str, Any]]:
    """The published models by name, from published.yaml."""
    text = resources.files(__package__).joinpath("published.yaml").read_text("utf-8")
    return dict(read_yaml(text, "published.yaml"))


def cache_path(name: str) -> Path:
    """The path of a catalogue entry's model file in the cache, whether fetched or not."""
    suffix = ".onnx" if "segmentation" in catalogue()[name] else ".pt"
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
    is_of_hub = NAME.fullmatch(text) and path.suffix not in SUFFIXES and not path.parent.exists()
    return fetch(text) if is_of_hub or text in catalogue() else path


def fetch(name: str) -> Path:
    """The path of a name's model file, fetched and checked by SHA-256 if necessary."""
    # The catalogue has names with owners too, and it knows their checksums.
    owner, slash, _ = name.partition("/")
    if not slash or any(listed.startswith(f"{owner}/") for listed in catalogue()):
        return _fetch_listed(name)
    repository, _, revision = name.partition("@")
    file, hub_digest = _in_repository(name, repository, revision or "main", [MODEL_FILE])
    _verify_digest(file, hub_digest, name)
    return file


def _fetch_listed(name: str) -> Path:
    """The path of a catalogue entry's model file, fetched and converted if necessary."""
    entry = lookup(catalogue(), name, "published model")
    target = cache_path(name)
    # Processes of one run ask for the same model at once, and only one may fetch it.
    with exclusive(target.parent, waits=True):
        if target.is_file():
            return target
        if "hub" in entry:
            file, expected = _in_repository(name, entry["hub"], "main", entry["files"])
        else:
            file = _from_address(name, entry, target)
            expected = ""
        # The published SHA-256 comes first, then that of the first fetch, then the hub's.
        first_digest = target.with_suffix(".sha256")
        if first_digest.is_file():
            expected = first_digest.read_text("utf-8").strip()
        digest = _verify_digest(file, entry.get("sha256") or expected, name)
        if "segmentation" in entry:
            target.parent.mkdir(parents=True, exist_ok=True)
            place(file.resolve(), target)
            return target
        # Converted only once, so that later a published model loads as fast as any model file.
        contents = _convert(name, entry, file, digest)
        with atomic_write(first_digest) as output:
            output.write(digest)
        write_checkpoint(target, contents)
        if "hub" not in entry:
            # A file in the cache of the hub stays, because other programs use it too.
            file.unlink()
    return target


def _convert(name: str, entry: Mapping[str, Any], file: Path, digest: str) -> dict[str, Any]:
    """The contents of the model file made from a published checkpoint."""
    importer = entry["importer"]
    net, _ = import_network(PUBLISHED[importer], entry["model"], read_checkpoint(file), file)
    facts = {
        "imported_from": importer,
        "name": name,
        "sha256": digest,
        "address": f"{entry['hub']}/{file.name}" if "hub" in entry else entry["url"],
        "licence": entry.get("licence", NO_LICENCE),
        "trained_on": entry["trained_on"],
        "published_eer_percent": entry.get("eer", {}),
    }
    return model_file_contents(net, loss_normalizes=True, training_summary=facts)


def _in_repository(
    name: str, repository: str, revision: str, files: Sequence[str]
) -> tuple[Path, str]:
    """The first of `files` that a hub repository has, as a path in the hub's cache, and the hub's
    SHA-256 of it, empty if unknown.
    """
    in_messages = name if name == repository else f"{name}: {repository}"
    folder = _hub().snapshot(repository, revision, files, in_messages)
    # Repositories do not all use the same name for their weights.
    paths = [folder / name_of_file for name_of_file in files]
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise CheckpointError(
            f"{name}: the repository {repository} has no {' or '.join(files)}; check the name"
        )
    # The hub's cache names a large file by its SHA-256.
    blob = file.resolve().name
    return file, blob if re.fullmatch("[0-9a-f]{64}", blob) else ""


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


def _verify_digest(file: Path, expected: str, name: str) -> str:
    """The file's SHA-256; if it differs from `expected` (unless that is empty), move the file aside
    and refuse it.
    """
    digest = sha256_of(file)
    if expected and digest != expected:
        content = file.resolve()
        # Kept, because it may be a newer file of the publisher, and fetching it again takes long.
        aside = content.rename(free_name(content, "wrong"))
        # In the hub's cache, the file is a link to its content.
        file.unlink(missing_ok=True)
        raise CheckpointError(
            f"{name}: {file.name} has SHA-256 {digest} instead of {expected} and was moved to "
            f"{aside}. Fetch it again; if it still differs, the publisher has replaced the file"
        )
    return digest


def push(path: str | Path, name: str, *, licence: str, is_private: bool) -> str:
    """Upload a model file and a model card to a hub repository; return its address."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name}: expected OWNER/NAME, the name of a repository on the hub")
    model = load_model_file(path)
    net = model.net
    # The card names the origin of the weights, because their licence binds every user.
    summary = dict(model.contents.get("training_summary") or {})
    if licence:
        summary["licence"] = licence
    facts = [f"- {key.replace('_', ' ')}: {summary[key]}" for key in IN_CARD if summary.get(key)]
    kept_licence = summary.get("licence", NO_LICENCE)
    card = CARD.format(
        name=name,
        title=name.partition("/")[2],
        model=net.model_name,
        dim=net.embedding_dim,
        rate=net.sample_rate,
        parameters=sum(weight.numel() for weight in net.parameters()),
        licence="unknown" if kept_licence == NO_LICENCE else kept_licence.lower(),
        facts="\n".join(facts),
    )
    files = {MODEL_FILE: Path(path), "README.md": card.encode()}
    return str(_hub().push(name, files, is_private=is_private))


def _hub() -> Any:
    """The module `models.hub`, which needs an optional library."""
    return importlib.import_module("speakernet.models.hub")
