"""The one reader and writer of checkpoint files: last.pt, model files, and what other toolkits wrote.

A file appears under its name only when it is whole, and reading never runs code from it (`weights_only=True`). Every
member of the archive is compared with its checksum, which torch itself leaves out: without it a flipped bit of a weight
would be trained on, or scored with. What a dictionary means is known to those who made it: `speakernet.training` and
`speakernet.models.model_file`.
"""

import errno
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from speakernet.files import FileError, atomic_write, error_line, human_bytes, in_place_of_a_file, open_regular

FULL_BYTES = 1 << 20
"""A disk with less room is full."""
FOLDER_ATTRIBUTE = 0x10
"""Of a member of a zip file, as MS-DOS has it."""
# Weights are noise to a compressor: higher levels take longer and gain nothing.
DEFLATE_LEVEL = 6
MOST_UNPACKED = 100
"""Times its size that a compressed checkpoint may unpack to: weights gain a tenth, zeros of a new optimizer more."""
ALWAYS_UNPACKED_BYTES = 256 << 20
BLOCK_BYTES = 1 << 20
ZIP_MARK, PICKLE_MARK = b"PK\x03\x04", b"\x80"
"""By its first bytes, as torch tells them: it also opens archives whose end Python's `zipfile` no longer finds."""
ADVICE = "copy or download it again, or take an earlier one from the checkpoints/ of its run"
SMALL_TENSOR_BYTES = 1 << 20
HEADER_KEY, MEAN = "speakernet", "embedding_mean"
"""Of safetensors: where the header holds what a model file says of itself, and the tensor that is no weight."""


class CheckpointError(FileError):
    """A checkpoint that cannot be read, or is not what it is asked to be."""


class DamagedError(CheckpointError):
    """A file whose content is no checkpoint: cut off, overwritten, or made by another program."""


def read_checkpoint(path: str | Path) -> Any:
    """What a checkpoint holds, whoever wrote it, with its tensors on the CPU.

    Raises:
        DamagedError: truncated, a flipped byte, no checkpoint at all, or a pickle that would run code.
        CheckpointError: missing, no regular file, or it cannot be opened.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}; give the path of a model file such as exps/exp01/best.pt")
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the path of a model file, such as {path / 'best.pt'}")
    try:
        with open_regular(path) as file:
            if instead := in_place_of_a_file(file):
                raise DamagedError(f"{path} is no checkpoint but {instead}")
        if path.suffix == ".safetensors":
            return _read_tensors(path)
        if _begins_with(path, ZIP_MARK):
            _check_members(path)
        contents = torch.load(path, map_location="cpu", weights_only=True)
        _check_tensors(contents, path)
        return contents
    except FileError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(str(error)) from error
    except (OSError, MemoryError) as error:
        # In a file that is cut off torch looks before its beginning, which the system calls an invalid argument.
        if isinstance(error, OSError) and error.errno == errno.EINVAL:
            raise _damaged(path, error) from error
        # Of this machine and this moment: the file may well be whole.
        raise CheckpointError(f"{path} cannot be read now ({error_line(error)}); see to that and try again") from error
    except pickle.UnpicklingError as error:
        if _begins_with(path, ZIP_MARK) or _begins_with(path, PICKLE_MARK):
            raise DamagedError(
                f"{path} holds more than tensors and plain values and could run code when read; it was refused "
                "and nothing in it was run. Save its state dictionary alone, or get it from another source"
            ) from error
        # torch's own sentence advises to read the file without protection.
        raise DamagedError(f"{path} is not a checkpoint; give a model file such as exps/exp01/best.pt") from error
    except Exception as error:
        # torch and safetensors answer damage with RuntimeError, EOFError, KeyError … as chance has it.
        raise _damaged(path, error) from error


def read_own_checkpoint(path: str | Path) -> dict[str, Any]:
    """The dictionary that `write_checkpoint` wrote.

    Raises:
        CheckpointError: as `read_checkpoint`, or the file holds something else.
    """
    contents = read_checkpoint(path)
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__}; expected a checkpoint of this program")
    return contents


def write_checkpoint(path: str | Path, contents: Mapping[str, Any], *, compress: bool = False) -> None:
    """Write a dictionary of tensors and plain values, atomically.

    Raises:
        OSError: the disk is full or not writable; the old file stays as it was.
    """
    with atomic_write(path, "wb") as file:
        try:
            torch.save(dict(contents), file)
        except RuntimeError as error:
            # torch's zip writer reports a failed write (a full disk, say) as a RuntimeError of its own.
            free = shutil.disk_usage(Path(path).parent).free
            if free < FULL_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise OSError(
                f"writing {path} failed with {human_bytes(free)} free on its disk ({error}); the old file is whole"
            ) from error
    if compress:
        _deflate(Path(path))


def tensor_file_bytes(contents: Mapping[str, Any]) -> bytes:
    """A model file as safetensors: its weights by name, its mean embedding, everything else as JSON in the header."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in contents["weights"].items()}
    plain = {name: value for name, value in contents.items() if name not in ("weights", MEAN)}
    if contents.get(MEAN) is not None:
        tensors[MEAN] = contents[MEAN].detach().cpu().contiguous()
    return save(tensors, {HEADER_KEY: json.dumps(plain)})


def _read_tensors(path: Path) -> dict[str, Any]:
    """A file of safetensors: what `tensor_file_bytes` was given, or the tensors alone of one that others wrote."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        plain = (file.metadata() or {}).get(HEADER_KEY)
    if plain is None:
        return tensors
    return {**json.loads(plain), MEAN: tensors.pop(MEAN, None), "weights": tensors}


def _deflate(path: Path) -> None:
    """Rewrite torch's (stored) zip archive deflated; torch reads both."""
    with (
        zipfile.ZipFile(path) as stored,
        atomic_write(path, "wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=DEFLATE_LEVEL) as packed,
    ):
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))


def _check_members(path: Path) -> None:
    """Read every member of an archive to its end, where its checksum is compared.

    Raises:
        DamagedError: a member's bytes are not those that were written, or there are far more than the file can hold.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        unpacked = sum(member.file_size for member in members)
        if unpacked > max(ALWAYS_UNPACKED_BYTES, MOST_UNPACKED * path.stat().st_size):
            raise DamagedError(f"{path} would unpack to {human_bytes(unpacked)}; {ADVICE}")
        for member in members:
            # As a folder torch would not read it, and hand out memory as it happens to be.
            if member.external_attr & FOLDER_ATTRIBUTE or member.is_dir():
                raise DamagedError(f"{path} is damaged: {member.filename} is marked as a folder; {ADVICE}")
            with archive.open(member) as content:
                try:
                    while content.read(BLOCK_BYTES):
                        pass
                except zipfile.BadZipFile as error:
                    raise DamagedError(
                        f"{path} is damaged: {member.filename} does not match its checksum; {ADVICE} (torch writes "
                        "none after set_crc32_options(False): save such a file again with it)"
                    ) from error


def _check_tensors(contents: Any, path: Path) -> None:
    """Refuse tensors that repeat a few numbers over a size that the file does not have, and nesting without end.

    Raises:
        DamagedError: naming the claim.
    """
    # By identity: a value may stand at a thousand places, which are one.
    waiting, seen = [contents], {id(contents)}
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            claimed = value.numel() * value.element_size()
            is_held = value.device.type == "cpu" and value.layout == torch.strided
            if not is_held or claimed > max(SMALL_TENSOR_BYTES, value.untyped_storage().nbytes()):
                raise DamagedError(
                    f"{path} holds a tensor of shape {tuple(value.shape)} whose numbers are not in the file; {ADVICE}"
                )
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for one in inner:
            if id(one) not in seen:
                seen.add(id(one))
                waiting.append(one)


def _damaged(path: Path, error: Exception) -> DamagedError:
    return DamagedError(f"{path} is truncated or not a checkpoint ({error_line(error)}); {ADVICE}")


def _begins_with(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(mark)) == mark
