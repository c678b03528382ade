"""Published speaker models: the catalogue, their checkpoints on the Hugging Face hub, checks and
conversion to model files, and `push`.

The importers read the checkpoints of published.yaml without running code from them.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakernet.checkpoint import CheckpointError, read_checkpoint
from speakernet.files import free_name, read_yaml_file, sha256_of
from speakernet.models import hub
from speakernet.models.importers import PUBLISHED, import_network
from speakernet.models.model_file import load_model_file, model_file_contents

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


@functools.cache
def catalogue() -> dict[str, dict[str, Any]]:
    """The published models by name, from published.yaml."""
    return dict(read_yaml_file(Path(__file__).with_name("published.yaml"), "published models"))


def find_in_repository(
    name: str, repository: str, revision: str, files: Sequence[str]
) -> tuple[Path, str]:
    """The first of `files` that a hub repository has, as a path in the hub's cache, and the hub's
    SHA-256 of it, empty if unknown.
    """
    in_messages = name if name == repository else f"{name}: {repository}"
    folder = hub.snapshot(repository, revision, files, in_messages)
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


def verify_digest(file: Path, expected: str, name: str) -> str:
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


def convert(name: str, entry: Mapping[str, Any], file: Path, digest: str) -> dict[str, Any]:
    """The contents of a model file, from the checkpoint of a catalogue entry with this SHA-256."""
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
    shown_licence = summary.get("licence", NO_LICENCE)
    card = CARD.format(
        name=name,
        title=name.partition("/")[2],
        model=net.model_name,
        dim=net.embedding_dim,
        rate=net.sample_rate,
        parameters=net.num_parameters,
        licence="unknown" if shown_licence == NO_LICENCE else shown_licence.lower(),
        facts="\n".join(facts),
    )
    files: dict[str, bytes | Path] = {MODEL_FILE: Path(path), "README.md": card.encode()}
    return hub.push(name, files, is_private=is_private)
