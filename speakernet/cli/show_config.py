"""Print the configuration that a command line means, with every default filled in.

The YAML goes to standard output, so that it can be saved and edited; where each file was found goes to the log.
"""

import argparse
import logging
import sys

import yaml

from speakernet.cli import load_configuration
from speakernet.config import config_to_dict
from speakernet.config.reference import reference

TAKES_CONFIG = True

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to show instead: what was set alone, learning rate and margin, or every option there is."""
    parser.add_argument("--given", action="store_true", help="show only what files and options set, without defaults")
    parser.add_argument(
        "--schedule", action="store_true", help="show learning rate and margin of the first, ramp and last epochs"
    )
    parser.add_argument("--reference", action="store_true", help="show every option as a page: docs/configuration.md")


def run(arguments: argparse.Namespace) -> int:
    """Print the resolved configuration as YAML, or its schedule as a table; or the page of all options."""
    if arguments.reference:
        sys.stdout.write(reference())
        return 0
    loaded = load_configuration(arguments.config_arguments)
    logger.info("files: %s", ", ".join(map(str, loaded.files)) or "none")
    logger.info("defaults: %s", loaded.defaults)
    if arguments.schedule:
        # Late: the schedules of a run need its loss, and so torch; printing a configuration does not.
        from speakernet.assembly.fine_tuning import schedule_table

        sys.stdout.write(schedule_table(loaded.config) + "\n")
        return 0
    values = config_to_dict(loaded.config)
    if arguments.given:
        values = {
            section: {field: value for field, value in fields.items() if f"{section}.{field}" in loaded.given}
            for section, fields in values.items()
        }
        values = {section: fields for section, fields in values.items() if fields}
    yaml.safe_dump(values, sys.stdout, sort_keys=False, allow_unicode=True)
    return 0
