"""Print the configuration that a command line results in, with every default filled in.

The YAML goes to standard output, so that it can be saved and edited; the paths of its files go to
the log.
"""

import argparse
import json
import logging
from collections.abc import Sequence

import yaml

from speakernet.cli.shared import load_configuration
from speakernet.config.reference import json_schema, reference

TAKES_CONFIG = True

logger = logging.getLogger(__name__)


ARGUMENTS = {
    "--given": {
        "action": "store_true",
        "help": "show only the options set in files or on the command line",
    },
    "--schedule": {
        "action": "store_true",
        "help": "show learning rate and margin in the first and last epochs, after warm-up and in "
        "the margin ramp",
    },
    "--diff": {
        "nargs": 2,
        "metavar": "FILE",
        "help": "show the options that differ between two configurations",
    },
    "--schema": {
        "action": "store_true",
        "help": "show the JSON schema for checking and completion in editors",
    },
    "--reference": {"action": "store_true", "help": "show all options as Markdown"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Return the resolved configuration as YAML, or what an option asks for."""
    # These two describe all options, so they need no configuration.
    if arguments.reference:
        return [reference().rstrip("\n")]
    if arguments.schema:
        return [json.dumps(json_schema(), indent=1)]
    if arguments.diff:
        return _differences(arguments.diff, arguments.config_arguments)
    loaded = load_configuration(arguments.config_arguments)
    logger.info("files: %s", ", ".join(map(str, loaded.files)) or "none")
    logger.info("options not given have the defaults of %s", loaded.defaults)
    if arguments.schedule:
        # Late: the schedules of a run need its loss and therefore torch; printing a configuration
        # does not.
        from speakernet.assembly.training import schedules_of_stages
        from speakernet.training.schedules import schedule_table

        return [schedule_table(schedules_of_stages(loaded.config))]
    # As a run would save it, so that the output can be loaded again.
    values = loaded.config.model_dump()
    if arguments.given:
        # Options of a component have a third part.
        set_keys = {".".join(key.split(".")[:2]) for key in loaded.given}
        every_value = values
        values = {}
        for section, fields in every_value.items():
            for field, value in fields.items():
                if f"{section}.{field}" in set_keys:
                    values.setdefault(section, {})[field] = value
    return [yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip("\n")]


def _differences(names: Sequence[str], common: Sequence[str]) -> list[str]:
    """The options that differ between two configurations, one per line; `common` applies to
    both.
    """
    before, after = (
        load_configuration(["--config", name, *common]).config.model_dump() for name in names
    )
    lines = []
    for section in before:
        for field in dict.fromkeys([*before[section], *after[section]]):
            # The run folder is named after the file.
            values = [
                json.dumps(values[section].get(field, "-"), ensure_ascii=False)
                for values in (before, after)
            ]
            if values[0] != values[1] and field != "save_path":
                lines.append(f"{section}.{field}: {values[0]} -> {values[1]}")
    return lines or ["no option differs"]
