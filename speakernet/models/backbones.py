"""Where a pretrained backbone comes from: a folder or the Hugging Face hub, its configuration, and its safetensors.

Weights are read by safetensors alone. What a backbone's files are is kept as plain values (`source`): names, SHA-256,
commit and licence, by which a checkpoint without the frozen weights finds them again.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from safetensors.torch import load_file
from torch import Tensor

from speakernet.checkpoint import CheckpointError, read_own_checkpoint
from speakernet.files import read_yaml, reading, sha256_of
from speakernet.models import hub
from speakernet.models.options.pretrained import PretrainedOptions

logger = logging.getLogger(__name__)

CONFIG, PREPROCESSOR, CARD, INDEX = (
    *("config.json", "preprocessor_config.json", "README.md"),
    "model.safetensors.index.json",
)
BACKBONE_PREFIX = "trunk.backbone."
OPTION = "model.options.backbone"
SAMPLE_RATE_KEY = "sampling_rate"
# What pretraining and recognition heads add to the model itself, and what only masks in training.
NOT_OF_THE_BACKBONE = ("masked_spec_embed", "quantizer.", "project_hid.", "project_q.", "lm_head.", "mask_emb")
TO_CONVERT = (
    "on a machine where you trust the file, transformers writes them: "
    "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)


class Backbone(NamedTuple):
    """What was found of a backbone."""

    config: dict[str, Any]
    preprocessor: dict[str, Any]
    source: dict[str, Any]
    weights: dict[str, Tensor]
    """By the names of transformers' bare model."""


def find_backbone(options: PretrainedOptions) -> Backbone:
    """Read a backbone from its folder, the hub, or the spare model file.

    Raises:
        CheckpointError: neither is there, or not as it should be.
    """
    spare = Path(options.spare) if options.spare else None
    try:
        folder = _folder(options.backbone, options.revision)
    except CheckpointError as error:
        if spare is None or not spare.is_file():
            raise
        logger.warning("%s; the backbone of %s is used", error, spare)
        return _of_model_file(spare)
    config, preprocessor = (_json(folder / name) for name in (CONFIG, PREPROCESSOR))
    if not config:
        raise CheckpointError(f"{OPTION}: {folder} has no {CONFIG}; expected a model of transformers")
    files = weight_files(folder)
    source = {
        "name": options.backbone,
        **({} if Path(options.backbone).is_dir() else {"commit": folder.name}),
        "licence": _licence(folder / CARD),
        "files": {file.name: sha256_of(file) for file in files},
    }
    weights: dict[str, Tensor] = {}
    for file in files:
        with reading(file, "safetensors", CheckpointError):
            weights |= load_file(file)
    logger.info("backbone %s: %s of %s", options.backbone, ", ".join(source["files"]), folder)
    return Backbone(config, preprocessor, source, dict(_renamed(weights)))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder; those of the index if there is one."""
    index = _json(folder / INDEX)
    names = sorted(set(index.get("weight_map", {}).values())) or [one.name for one in folder.glob("*.safetensors")][:1]
    if not names:
        found = next((one.name for one in folder.glob("*.bin")), "nothing like it")
        raise CheckpointError(f"{OPTION}: {folder} has no *.safetensors, found {found}; {TO_CONVERT}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{OPTION}: {folder} lacks {', '.join(missing)}, which {INDEX} names; download it again")
    return [folder / name for name in names]


def complete(contents: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """The network weights of a checkpoint that names its frozen ones, with these.

    They come from the backbone's own files, or from best.pt beside the checkpoint; their SHA-256 is compared.
    """
    options, best = contents["model"]["options"], Path(path).with_name("best.pt")
    wanted: dict[str, Any] = options["source"]
    here = best.is_file() and best.resolve() != Path(path).resolve()
    spare = str(best) if here else ""
    found = find_backbone(
        PretrainedOptions(backbone=wanted["name"], revision=wanted.get("commit", "main"), spare=spare)
    )
    refuse_other_files(wanted, found.source, path)
    return {**{BACKBONE_PREFIX + name: value for name, value in found.weights.items()}, **contents["weights"]}


def refuse_other_files(wanted: Mapping[str, Any], found: Mapping[str, Any], path: object) -> None:
    """CheckpointError unless both are the same files by SHA-256."""
    if wanted["files"] == found["files"]:
        return
    differing = [name for name, digest in wanted["files"].items() if found["files"].get(name) != digest]
    name = differing[0] if differing else next(iter(wanted["files"]))
    raise CheckpointError(
        f"{path} was trained with the backbone {wanted['name']}, {name} of SHA-256 {wanted['files'][name]}; found "
        f"{found['files'].get(name, 'no such file')}. Put that file back, or choose another --save_path"
    )


def _folder(name: str, revision: str) -> Path:
    """A local folder, or the snapshot of a model of the hub in its cache, downloaded if it is not there."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    wanted = [CONFIG, PREPROCESSOR, CARD, "*.safetensors", INDEX]
    return hub.snapshot(name, revision, wanted, f"{OPTION}: {name}")


def _of_model_file(path: Path) -> Backbone:
    """The backbone inside a model file of a run."""
    contents = read_own_checkpoint(path)
    options, weights = contents["model"]["options"], contents["weights"]
    own = {name.removeprefix(BACKBONE_PREFIX): one for name, one in weights.items() if name.startswith(BACKBONE_PREFIX)}
    if "source" not in options or contents.get("reference"):
        raise CheckpointError(f"{path} does not hold the backbone; give {OPTION}, where its files are")
    preprocessor = {"do_normalize": options["normalize"] == "on", SAMPLE_RATE_KEY: contents["sample_rate"]}
    return Backbone(options["config"], preprocessor, options["source"], own)


def _renamed(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Under the names of the bare model: without the prefix of a model with a head, weight norm as torch has it now."""
    roots = {name.partition(".")[0] for name in weights}
    prefixes = [one for one in ("wav2vec2", "hubert", "wavlm", "data2vec_audio", "wav2vec2_bert") if one in roots]
    for name, value in weights.items():
        if prefixes and not name.startswith(prefixes[0] + "."):
            continue
        bare = name.removeprefix(prefixes[0] + ".") if prefixes else name
        bare = bare.replace(".weight_g", ".parametrizations.weight.original0")
        bare = bare.replace(".weight_v", ".parametrizations.weight.original1")
        if not bare.startswith(NOT_OF_THE_BACKBONE):
            yield bare, value


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty without the file."""
    if not path.is_file():
        return {}
    with reading(path, "a JSON object", CheckpointError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _licence(card: Path) -> str:
    """The licence that a model card names, or nothing."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    header = text.split("---")[1] if text.startswith("---") and text.count("---") > 1 else ""
    try:
        facts = read_yaml(header, str(card)) if header else None
    except (ValueError, yaml.YAMLError):
        facts = None
    return str(facts.get("license", "")) if isinstance(facts, dict) else ""
