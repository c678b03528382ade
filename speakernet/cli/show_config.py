"""Print the configuration that a command line means, with every default filled in.

The YAML goes to standard output, so that it can be saved and edited; where each file was found goes to the log.
"""

import argparse
import logging

import yaml

from speakernet.cli import load_configuration
from speakernet.config.reference import reference

TAKES_CONFIG = True

logger = logging.getLogger(__name__)


ARGUMENTS = {
    "--given": {"action": "store_true", "help": "show only what files and options set, without defaults"},
    "--schedule": {
        "action": "store_true",
        "help": "show learning rate and margin of the first, ramp and last epochs",
    },
    "--reference": {"action": "store_true", "help": "show every option as a page: docs/configuration.md"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """The resolved configuration as YAML, or its schedule as a table; or the page of all options."""
    if arguments.reference:
        return [reference().rstrip("\n")]
    loaded = load_configuration(arguments.config_arguments)
    logger.info("files: %s", ", ".join(map(str, loaded.files)) or "none")
    logger.info("defaults: %s", loaded.defaults)
    if arguments.schedule:
        # Late: the schedules of a run need its loss, and so torch; printing a configuration does not.
        from speakernet.assembly.fine_tuning import schedule_table

        return [schedule_table(loaded.config)]
    values = loaded.config.model_dump()
    if arguments.given:
        given = [key.partition(".") for key in loaded.given]
        found = {
            section: {field: value for field, value in fields.items() if (section, ".", field) in given}
            for section, fields in values.items()
        }
        values = {section: fields for section, fields in found.items() if fields}
    return [yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip("\n")]
