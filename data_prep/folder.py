"""Your own voices, ready to train: lists, a speaker-disjoint split, trials, a configuration, and the next command.

One folder a speaker, sessions in folders below it if you have them:

    my_voices/anna/monday/1.wav    my_voices/bert/2.flac

or a table with the headings path,speaker[,session,gender] (--csv), or a regular expression over the paths with the
groups speaker and, optionally, session and gender (--pattern '(?P<speaker>[^_]+)_(?P<session>[^_]+)_').
WAV, FLAC, OGG and MP3 are used where they lie; m4a, aac, webm and the like are converted first (needs ffmpeg).
"""

import argparse
import logging
import sys
from pathlib import Path

from speakernet.corpora.own_folder import FolderOptions, prepare_folder
from speakernet.corpora.recipe import next_command
from speakernet.corpora.scripts import DEFAULT_SEED, add_common_arguments, new_parser, positive_int, run_script
from speakernet.corpora.summary import finish
from speakernet.files import exclusive


def build_parser() -> argparse.ArgumentParser:
    """All options of the script."""
    parser = new_parser(__doc__ or "")
    parser.add_argument("folder", type=Path, help="the folder that holds the voices; paths in lists are relative to it")
    parser.add_argument(
        "--save_path", type=Path, help="where lists and configuration go (default: data/NAME OF THE FOLDER)"
    )
    parser.add_argument("--csv", type=Path, help="table with the headings path,speaker[,session,gender]")
    parser.add_argument("--pattern", help="regular expression over relative paths with a group named speaker")
    parser.add_argument("--speaker_depth", type=int, help="folders above the speakers' folders (default: found out)")
    parser.add_argument("--validation_share", type=float, default=0.1, help="share of the speakers for validation")
    parser.add_argument("--test_share", type=float, default=0.1, help="share of the speakers for the final test")
    parser.add_argument("--targets_per_speaker", type=positive_int, default=50, help="most target trials a speaker")
    parser.add_argument("--same_session", action="store_true", help="also make target trials within one session")
    parser.add_argument("--same_gender", action="store_true", help="leave out the easy trials across genders")
    parser.add_argument("--min_seconds", type=float, default=0.5, help="shorter utterances are left out")
    parser.add_argument("--noise_path", type=Path, help="noise folder (MUSAN's layout) for augmentation")
    parser.add_argument("--rir_path", type=Path, help="room impulse responses for augmentation")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of the split and the trials")
    parser.add_argument("--ffmpeg", help="ffmpeg to use (default: the one on the PATH)")
    add_common_arguments(parser, save_path=None)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prepare the folder and say what to do next."""
    save_path = arguments.save_path or Path("data") / arguments.folder.resolve().name
    with exclusive(save_path):
        config, summaries = prepare_folder(
            FolderOptions(
                root=arguments.folder,
                save_path=save_path,
                table=arguments.csv,
                pattern=arguments.pattern,
                speaker_depth=arguments.speaker_depth,
                validation_share=arguments.validation_share,
                test_share=arguments.test_share,
                targets_per_speaker=arguments.targets_per_speaker,
                allow_same_session=arguments.same_session,
                same_gender=arguments.same_gender,
                min_seconds=arguments.min_seconds,
                seed=arguments.seed,
                num_jobs=arguments.jobs,
                ffmpeg=arguments.ffmpeg,
                noise_path=arguments.noise_path,
                rir_path=arguments.rir_path,
            )
        )
        code = finish(summaries, save_path / "summary.txt")
    logging.getLogger("folder").info("next: %s", next_command(config))
    sys.stdout.write(next_command(config) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), run))
