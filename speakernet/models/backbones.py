"""Finds a pretrained backbone in a folder or on the Hugging Face hub and reads its configuration
and safetensors.

Weights are read only from safetensors. Plain values (`source`) describe the backbone's files:
names, SHA-256, commit and licence. They let a checkpoint without the frozen weights find those
weights.
"""

import json
import logging
import zlib
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
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
CARD = "README.md"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
BACKBONE_PREFIX = "trunk.backbone."
# Replaces the name of a layer inside its adapter.
PLAIN = (".base_layer", "")
OPTION = "model.options.backbone"
SAMPLE_RATE_KEY = "sampling_rate"
# Names under which models with a head contain the bare model.
ROOTS = ("wav2vec2", "hubert", "wavlm", "data2vec_audio", "wav2vec2_bert")
# Tensors of pretraining and recognition heads, and of masks used only in training.
NOT_OF_THE_BACKBONE = (
    "masked_spec_embed",
    "quantizer.",
    "project_hid.",
    "project_q.",
    "lm_head.",
    "mask_emb",
)
TO_CONVERT = (
    "if you trust the file, convert it with transformers: "
    "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)


class Backbone(NamedTuple):
    """A backbone's configuration, origin and weights."""

    config: dict[str, Any]
    preprocessor: dict[str, Any]
    source: dict[str, Any]
    weights: dict[str, Tensor]
    """By the names in transformers' bare model."""


def find_backbone(options: PretrainedOptions) -> Backbone:
    """Read a backbone from its folder, the hub, or the spare model file.

    Raises:
        CheckpointError: none of them exists, or its files are incomplete or damaged.
    """
    spare = Path(options.spare) if options.spare else None
    try:
        folder = _folder(options.backbone, options.revision)
    except CheckpointError as error:
        if spare is None or not spare.is_file():
            raise
        logger.warning("%s; using the backbone in %s", error, spare)
        return _read_model_file(spare)
    config = _read_json(folder / CONFIG)
    if not config:
        raise CheckpointError(f"{OPTION}: {folder} has no {CONFIG}; expected a transformers model")
    files = weight_files(folder)
    source: dict[str, Any] = {"name": options.backbone}
    if not Path(options.backbone).is_dir():
        source["commit"] = folder.name
    source["licence"] = _read_licence(folder / CARD)
    source["files"] = {file.name: sha256_of(file) for file in files}
    weights: dict[str, Tensor] = {}
    for file in files:
        with reading(file, "safetensors", CheckpointError):
            weights |= load_file(file)
    logger.info("backbone %s: %s from %s", options.backbone, ", ".join(source["files"]), folder)
    preprocessor = _read_json(folder / PREPROCESSOR)
    return Backbone(config, preprocessor, source, dict(_rename_to_bare(weights)))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those in its index, else model.safetensors, else the only
    one.
    """
    # Large models are split into several files that an index lists. Several files without an index
    # could be several models, so none is chosen.
    names = sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
    if not names:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
        if WEIGHTS in names:
            names = [WEIGHTS]
        if len(names) > 1:
            raise CheckpointError(
                f"{OPTION}: {folder} has {', '.join(names[:MAX_NAMED])}; expected {INDEX}, which "
                f"lists the parts of one model, or {WEIGHTS}. Add the index, or keep only the "
                "intended file"
            )
    if not names:
        pickle = next((file.name for file in folder.glob("*.bin")), "")
        advice = TO_CONVERT if pickle else "download it again"
        raise CheckpointError(
            f"{OPTION}: {folder} has no *.safetensors, found {pickle or 'no weights'}; {advice}"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{OPTION}: {folder} lacks {', '.join(missing)}, listed in {INDEX}; download it again"
        )
    return [folder / name for name in names]


def complete(contents: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """All network weights of a checkpoint that only refers to its frozen ones.

    These come from the backbone's own files, a folder of that name beside the checkpoint, or
    best.pt there, and must match by SHA-256 and CRC-32.
    """
    # Looked for where it was, then beside the checkpoint (a run folder copied with its backbone),
    # then in best.pt of the same run, which contains it unless a stage refers to files.
    source: dict[str, Any] = contents["model"]["options"]["source"]
    name = source["name"]
    beside = Path(path).parent / Path(name).name
    is_moved = not Path(name).expanduser().is_dir() and beside.is_dir()
    best = Path(path).with_name("best.pt")
    is_other = best.is_file() and best.resolve() != Path(path).resolve()
    options = PretrainedOptions(
        backbone=str(beside) if is_moved else name,
        revision=source.get("commit", "main"),
        spare=str(best) if is_other else "",
    )
    try:
        backbone = find_backbone(options)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} only refers to the weights of {name}: {error}. If its folder was moved, copy "
            f"it or link to it as {beside}"
        ) from error
    refuse_other_files(source, backbone.source, path)
    weights: dict[str, Tensor] = {}
    checksums = {}
    for tensor, value in backbone.weights.items():
        weights[BACKBONE_PREFIX + tensor] = value
        checksums[tensor] = checksum(value.float())
    refuse_other_weights(contents["reference"], checksums, path)
    return merge_adapters(weights | contents["weights"])


def merge_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with each pair of adapters, B scaled by alpha / rank, added to its layer (Hu et al.
    2021, equation 3).
    """
    plain = {name: value for name, value in weights.items() if ".lora_" not in name}
    for name, down in weights.items():
        if ".lora_A." in name:
            layer, rest = name.split(".lora_A.")
            up = weights[f"{layer}.lora_B.{rest}"]
            # (outputs, rank) @ (rank, inputs)
            plain[f"{layer}.weight"] = plain[f"{layer}.weight"] + up @ down
    return plain


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's values; 0 on the meta device."""
    if tensor.is_meta:
        return 0
    return zlib.crc32(tensor.detach().cpu().contiguous().numpy())  # type: ignore[arg-type]


def refuse_other_weights(
    omitted: Mapping[str, int], checksums: Mapping[str, int], path: object
) -> None:
    """CheckpointError unless the weights that a checkpoint omits are still the same, by CRC-32."""
    for name, digest in omitted.items():
        plain = name.replace(*PLAIN)
        if checksums.get(plain) != digest:
            raise CheckpointError(
                f"{path} was trained on a backbone whose {plain} differs from the one found. If "
                "the backbone's folder is gone, best.pt cannot replace it after adapters or "
                "training have changed the weights: restore the folder, or give its new location "
                f"as {OPTION}"
            )


def refuse_other_files(
    trained: Mapping[str, Any], present: Mapping[str, Any], path: object
) -> None:
    """CheckpointError unless both sources have the same files by SHA-256."""
    for name, digest in trained["files"].items():
        other = present["files"].get(name, "no such file")
        if other != digest:
            raise CheckpointError(
                f"{path} was trained with the backbone {trained['name']}, whose {name} has SHA-256 "
                f"{digest}; found {other}. Restore that file, or choose a different --save_path"
            )


def _folder(name: str, revision: str) -> Path:
    """A local folder, or the cached snapshot of a model on the hub, downloaded if necessary."""
    # A local folder comes first: it does not change and needs no network.
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    patterns = [CONFIG, PREPROCESSOR, CARD, "*.safetensors", INDEX]
    return hub.snapshot(name, revision, patterns, f"{OPTION}: {name}")


def _read_model_file(path: Path) -> Backbone:
    """The backbone inside a model file of a run."""
    contents = read_own_checkpoint(path)
    options = contents["model"]["options"]
    weights = {}
    for name, value in contents["weights"].items():
        if name.startswith(BACKBONE_PREFIX):
            weights[name.removeprefix(BACKBONE_PREFIX)] = value
    if "source" not in options or contents.get("reference"):
        raise CheckpointError(
            f"{path} does not contain the backbone; set {OPTION} to the folder of its files"
        )
    preprocessor = {
        "do_normalize": options["normalize"] == "on",
        SAMPLE_RATE_KEY: contents["sample_rate"],
    }
    return Backbone(options["config"], preprocessor, options["source"], weights)


def _rename_to_bare(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of the bare model: no prefix of a model with a head, current names of
    weight norm.
    """
    # Files of pretraining have their heads too, and the bare model below its name; others have only
    # the bare model.
    roots = {name.partition(".")[0] for name in weights}
    prefix = next((f"{root}." for root in ROOTS if root in roots), "")
    for name, value in weights.items():
        # Beside the prefix there are only the tensors of the head.
        if not name.startswith(prefix):
            continue
        bare = name.removeprefix(prefix)
        bare = bare.replace(".weight_g", ".parametrizations.weight.original0")
        bare = bare.replace(".weight_v", ".parametrizations.weight.original1")
        if not bare.startswith(NOT_OF_THE_BACKBONE):
            yield bare, value


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    if not path.is_file():
        return {}
    with reading(path, "a JSON object", CheckpointError):
        return json.loads(path.read_text("utf-8"))  # type: ignore[no-any-return]


def _read_licence(card: Path) -> str:
    """The licence named in a model card, or an empty string."""
    if not card.is_file():
        return ""
    text = card.read_text("utf-8", errors="replace")
    # The facts are YAML between two lines of dashes.
    if not text.startswith("---") or text.count("---") < 2:
        return ""
    try:
        facts = read_yaml(text.split("---")[1], str(card))
    except (ValueError, yaml.YAMLError):
        return ""
    return str(facts.get("license", "")) if isinstance(facts, dict) else ""
