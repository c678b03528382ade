"""Read and write checkpoint files: last.pt, model files, and files of other toolkits.

A file appears under its name only when it is complete, and reading never runs code from it
(`weights_only=True`). Unlike torch, reading compares every member of the archive with its checksum,
so that no flipped bit goes unnoticed. What the dictionaries contain is defined in
`speakernet.training` and `models.model_file`.
"""

import errno
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from speakernet.files import (
    ZIP_MARK,
    FileError,
    atomic_write,
    error_line,
    human_bytes,
    in_place_of_a_file,
    open_regular,
)

FULL_BYTES = 1 << 20
"""A disk with less free space counts as full."""
FOLDER_ATTRIBUTE = 0x10
"""MS-DOS attribute of a folder in a zip file."""
DEFLATE_LEVEL = 6
"""Weights barely compress: higher levels take longer and gain nothing."""
MAX_UNPACKED = 100
"""Largest compression ratio accepted: weights shrink by a tenth, zeros of a new optimizer by
more."""
ALWAYS_UNPACKED_BYTES = 256 << 20
ADVICE = "copy or download it again, or use an earlier one from checkpoints/ of its run"
OTHER_FILES = {".onnx": "an ONNX export", ".db": "a store of people"}
SMALL_TENSOR_BYTES = 1 << 20
HEADER_KEY = "speakernet"
MEAN = "embedding_mean"
"""In safetensors: the header key of a model file's plain values, and the tensor that is not a
weight."""


class CheckpointError(FileError):
    """A checkpoint that cannot be read, or is not of the expected kind."""


class DamagedError(CheckpointError):
    """A file that does not hold a checkpoint: truncated, overwritten, or made by another
    program.
    """


def read_checkpoint(path: str | Path) -> Any:
    """Read a checkpoint of any program, with its tensors on the CPU."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder; give the path of a model file, such as {path / 'best.pt'}"
        )
    try:
        # Files from elsewhere are read here, so everything is checked: that it is a regular file,
        # its sizes, and that it holds no pickles. Damage has its own error (`DamagedError`),
        # because the trainer falls back to an earlier checkpoint if a file is damaged, but not if
        # the disk is missing.
        with open_regular(path) as file:
            if instead := in_place_of_a_file(file):
                raise DamagedError(f"{path} is not a checkpoint but {instead}")
            file.seek(0)
            start = file.read(len(ZIP_MARK))
        if path.suffix == ".safetensors":
            return _read_tensors(path)
        # Like torch, go by the first bytes: torch also opens archives whose end `zipfile` does not
        # find.
        if start == ZIP_MARK:
            _check_members(path)
        contents = torch.load(path, map_location="cpu", weights_only=True)
        _check_tensors(contents, path)
        return contents
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        # A published name, such as wespeaker/resnet34, has no suffix.
        fetch = (
            ""
            if path.suffix
            else "; `speakernet fetch NAME --out FILE` downloads a published model"
        )
        raise CheckpointError(
            f"no checkpoint at {path}; give a model file such as exps/exp01/best.pt{fetch}"
        ) from error
    except (FileError, OSError, MemoryError) as error:
        # A problem of the machine at this moment; the file may be intact.
        raise CheckpointError(
            f"{path} cannot be read now ({error_line(error)}); fix that and try again"
        ) from error
    except pickle.UnpicklingError as error:
        if instead := OTHER_FILES.get(path.suffix, ""):
            raise DamagedError(
                f"{path} is not a model file but {instead}; give a file such as best.pt"
            ) from error
        # torch's own message advises reading the file without protection.
        raise DamagedError(
            f"{path} cannot be loaded safely: it is not a checkpoint, or it contains Python "
            "objects; nothing in it was run. Save only its state dictionary, or get the file from "
            "another source"
        ) from error
    except Exception as error:
        # torch and safetensors raise RuntimeError, EOFError, KeyError … on damaged files.
        raise DamagedError(f"{path} is damaged or is not a checkpoint; {ADVICE}") from error


def read_own_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a dictionary written by `write_checkpoint`; errors as in `read_checkpoint`."""
    contents = read_checkpoint(path)
    if not isinstance(contents, dict):
        raise CheckpointError(
            f"{path} holds a {type(contents).__name__}; expected a checkpoint of speakernet"
        )
    return contents


def write_checkpoint(
    path: str | Path, contents: Mapping[str, Any], *, compress: bool = False
) -> None:
    """Write a dictionary of tensors and plain values atomically; after an OSError the old file is
    unchanged.
    """
    with atomic_write(path, "wb") as file:
        try:
            torch.save(dict(contents), file)
        except RuntimeError as error:
            # torch's zip writer reports a failed write, for example on a full disk, as a
            # RuntimeError.
            free = shutil.disk_usage(Path(path).parent).free
            code = errno.ENOSPC if free < FULL_BYTES else errno.EIO
            raise OSError(
                code, f"{os.strerror(code)}, {human_bytes(free)} free: {error}", str(path)
            ) from error
    if not compress:
        return
    # torch reads deflated archives too.
    with (
        zipfile.ZipFile(path) as stored,
        atomic_write(path, "wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=DEFLATE_LEVEL) as packed,
    ):
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))


def tensor_file_bytes(contents: Mapping[str, Any]) -> bytes:
    """A model file as safetensors: weights by name and mean embedding as tensors, the rest as JSON
    in the header.
    """
    named = {**contents["weights"], MEAN: contents.get(MEAN)}
    tensors = {
        name: value.detach().cpu().contiguous()
        for name, value in named.items()
        if value is not None
    }
    plain = {name: value for name, value in contents.items() if name not in ("weights", MEAN)}
    return save(tensors, {HEADER_KEY: json.dumps(plain)})


def _read_tensors(path: Path) -> dict[str, Any]:
    """Read a safetensors file: the contents given to `tensor_file_bytes`, or the tensors of another
    program's file.
    """
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        plain = (file.metadata() or {}).get(HEADER_KEY)
    if plain is None:
        return tensors
    return {**json.loads(plain), MEAN: tensors.pop(MEAN, None), "weights": tensors}


def _check_members(path: Path) -> None:
    """Check the checksum of every member of an archive; refuse archives that unpack to excessive
    size.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        unpacked = sum(member.file_size for member in members)
        # A zip bomb would fill the memory before torch finds anything wrong.
        if unpacked > max(ALWAYS_UNPACKED_BYTES, MAX_UNPACKED * path.stat().st_size):
            raise DamagedError(f"{path} would unpack to {human_bytes(unpacked)}; {ADVICE}")
        # For a folder entry, torch reads nothing and returns uninitialised memory.
        folders = [
            member.filename
            for member in members
            if member.external_attr & FOLDER_ATTRIBUTE or member.is_dir()
        ]
        if bad := folders or archive.testzip():
            raise DamagedError(
                f"{path} is damaged: {bad} is a folder or does not match its checksum; {ADVICE}"
            )


def _check_tensors(contents: Any, path: Path) -> None:
    """Refuse tensors larger than their data in the file, such as one number repeated."""
    # By identity, because a value may occur in a thousand places.
    waiting = [contents]
    seen = {id(contents)}
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            # A tensor of stride 0 takes no memory here, and terabytes as soon as somebody copies
            # it.
            claimed = value.numel() * value.element_size()
            is_held = value.device.type == "cpu" and value.layout == torch.strided
            if not is_held or claimed > max(SMALL_TENSOR_BYTES, value.untyped_storage().nbytes()):
                raise DamagedError(
                    f"{path} lacks data for a tensor of shape {tuple(value.shape)}; {ADVICE}"
                )
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        for item in inner:
            if id(item) not in seen:
                seen.add(id(item))
                waiting.append(item)
