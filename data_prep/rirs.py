"""RIRS_NOISES: simulated and measured room responses: download, verify, unpack, check, make mono and trim.

    python data_prep/rirs.py --save_path data              everything
    python data_prep/rirs.py --save_path data --prepare    only check and trim what is unpacked

Give --rir_path data/RIRS_NOISES/simulated_rirs (as the classic tools use them) or data/RIRS_NOISES/real_rirs_mono
(measured, one file a microphone, cut where the response has decayed by 60 dB) to training.
"""

import argparse
import sys

from speakernet.corpora.augmentation_corpora import ALL_STEPS, prepare_rirs
from speakernet.corpora.scripts import (
    add_common_arguments,
    add_download_arguments,
    download_options,
    new_parser,
    run_script,
)
from speakernet.corpora.summary import finish
from speakernet.files import exclusive


def build_parser() -> argparse.ArgumentParser:
    """All options of the script."""
    parser = new_parser(__doc__ or "")
    add_common_arguments(parser)
    steps = parser.add_argument_group("steps (all of them when none is named)")
    steps.add_argument("--download", action="store_true", help="fetch the archive unless it is there")
    steps.add_argument("--extract", action="store_true", help="unpack it")
    steps.add_argument(
        "--prepare",
        action="store_true",
        dest="prepare",
        help="check the simulated responses, make mono copies of the measured ones",
    )
    add_download_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """The steps asked for, in order."""
    steps = [step for step in ALL_STEPS if getattr(arguments, step)] or ALL_STEPS
    with exclusive(arguments.save_path):
        summaries = prepare_rirs(
            arguments.save_path,
            download_options(arguments),
            arguments.jobs,
            steps,
            base_url=arguments.base_url,
            catalogue_path=arguments.catalogue,
        )
        return finish(summaries, arguments.save_path / "summary.txt")


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), run))
