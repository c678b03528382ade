"""Convert a wespeaker configuration.

    speakernet import-config conf/resnet.yaml conf/resnet_lm.yaml --out my_resnet.yaml

Network, features, augmentation, loss, schedules, batch and epochs are converted, one file for each
stage of training; learning rates are for all its GPUs together. Every option without a counterpart
is printed; an unsupported network or front end is an error. Add the lists yourself with
--train_list, --test_list, --musan_path and --rir_path, or a second --config.
"""

import argparse
from pathlib import Path

import yaml

from speakernet.cli.shared import output_path
from speakernet.config.schema import config_from_dict
from speakernet.config.wespeaker import SAME, convert
from speakernet.files import FileError, atomic_write, read_yaml_file
from speakernet.options import OptionError

ERROR_STATUS = 2
EXPECTED = (
    "a configuration of wespeaker, with dataset_args, model, optimizer, scheduler and "
    "scheduler_args"
)
ARGUMENTS = {
    "files": {
        "type": Path,
        "nargs": "+",
        "metavar": "FILE",
        "help": "wespeaker's configurations, one for each stage",
    },
    "--large-margin": {
        "type": Path,
        "metavar": "FILE",
        "help": "the same as a further FILE",
    },
    "--out": {"type": output_path, "required": True, "help": "the configuration to write"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Read, convert, check and write; return what was not converted."""
    files = [*arguments.files]
    if arguments.large_margin:
        files.append(arguments.large_margin)
    # All are read before the conversion, because a stage is written as differences from the one
    # before.
    read = [read_yaml_file(path, EXPECTED) for path in files]
    names = ", ".join(map(str, files))
    for path, contents in zip(files, read, strict=True):
        if not isinstance(contents, dict):
            raise FileError(f"{path} is not a YAML mapping; expected {EXPECTED}")
    # A missing option is a LookupError; a value that our option does not take an OptionError; a
    # name without a counterpart a ValueError; a list in place of a number a TypeError or
    # AttributeError.
    try:
        sections, notes = convert(*read)
        config_from_dict(sections)
    except LookupError as error:
        raise FileError(f"{names}: {error} is missing; expected {EXPECTED}") from error
    except OptionError as error:
        theirs = "".join(f" (its {name})" for name, key in SAME.items() if key == error.field)
        raise FileError(f"{names}: {error.field}{theirs} {error.found}") from error
    except ValueError as error:
        raise FileError(f"{names}: {error}") from error
    except (TypeError, AttributeError) as error:
        raise FileError(
            f"{names}: an option has the wrong type (--debug shows where); expected {EXPECTED}"
        ) from error
    with atomic_write(arguments.out) as file:
        file.write(f"# From wespeaker's {files[0].name}; set the lists and audio separately\n")
        yaml.safe_dump(sections, file, sort_keys=False)
    lines = [f"not converted: {note}" for note in notes]
    return [f"{arguments.out}: {sections['model']['name']} from {names}", *lines]
