"""VoxCeleb1 and VoxCeleb2, from nothing or from archives already on disk, to lists that train.

    python data_prep/voxceleb.py --save_path data --all --key KEY      everything below, in order
    python data_prep/voxceleb.py --save_path data --download --key KEY fetch what is missing (resumes, verifies)
    python data_prep/voxceleb.py --save_path data --concatenate        join the parts, verify, remove the parts
    python data_prep/voxceleb.py --save_path data --extract            unpack
    python data_prep/voxceleb.py --save_path data --convert            m4a -> 16 kHz mono WAV or FLAC (needs ffmpeg)
    python data_prep/voxceleb.py --save_path data --lists              training lists, trial lists, merged VoxCeleb1
    python data_prep/voxceleb.py --save_path data --pack               packed corpora straight from the archives
    python data_prep/voxceleb.py --save_path data --augment            MUSAN and RIRS_NOISES

Every step does only what is missing and can be killed at any moment. Archives that you have are put into --save_path.
The key is handed out on request at https://mm.kaist.ac.kr/datasets/voxceleb/.
"""

import argparse
import sys
from pathlib import Path

from speakernet.corpora.augmentation_corpora import prepare_musan, prepare_rirs
from speakernet.corpora.catalogue import load_corpus
from speakernet.corpora.scripts import (
    add_common_arguments,
    add_download_arguments,
    download_options,
    new_parser,
    run_script,
)
from speakernet.corpora.summary import finish
from speakernet.corpora.voxceleb import SUBSETS, VoxCelebJob
from speakernet.corpora.voxceleb_packing import pack_archives
from speakernet.data.ffmpeg import ENCODINGS, find_ffmpeg
from speakernet.files import exclusive

STEPS = ("download", "concatenate", "extract", "convert", "lists")


def build_parser() -> argparse.ArgumentParser:
    """All options of the script."""
    parser = new_parser(__doc__ or "")
    add_common_arguments(parser)
    steps = parser.add_argument_group("steps")
    steps.add_argument("--all", action="store_true", help="download, concatenate, extract, convert and lists")
    steps.add_argument("--download", action="store_true", help="fetch the archives that are not there")
    steps.add_argument("--concatenate", action="store_true", help="join the parts, verify, and only then remove them")
    steps.add_argument("--extract", action="store_true", help="unpack the archives")
    steps.add_argument("--convert", action="store_true", help="convert VoxCeleb2's m4a files")
    steps.add_argument("--lists", action="store_true", help="write training lists, fetch trial lists, merge VoxCeleb1")
    steps.add_argument("--pack", action="store_true", help="packed corpora from the archives, without a WAV tree")
    steps.add_argument("--augment", action="store_true", help="fetch and prepare MUSAN and RIRS_NOISES")
    parser.add_argument("--subsets", nargs="+", choices=SUBSETS, default=list(SUBSETS), help="parts of the corpus")
    parser.add_argument("--format", choices=ENCODINGS, default="wav", help="what m4a files are converted to")
    parser.add_argument(
        "--lists_from", type=Path, help="folder with the published trial lists, instead of fetching them"
    )
    parser.add_argument("--keep_parts", action="store_true", help="keep archive parts after joining")
    parser.add_argument("--remove_originals", action="store_true", help="remove each m4a once its WAV is verified")
    parser.add_argument("--ffmpeg", help="ffmpeg to use (default: the one on the PATH)")
    add_download_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """The steps asked for, in order."""
    chosen = {step for step in (*STEPS, "pack", "augment") if getattr(arguments, step)}
    if arguments.all:
        chosen |= set(STEPS)
    if not chosen:
        raise ValueError("no step was asked for; --all does everything, --help lists the steps")
    corpus = load_corpus("voxceleb", key=arguments.key, base_url=arguments.base_url, catalogue_path=arguments.catalogue)
    trial_lists = load_corpus("voxceleb_trials", catalogue_path=arguments.catalogue)
    save_path = arguments.save_path
    # Asked for before hours of download, not after them.
    ffmpeg = find_ffmpeg(arguments.ffmpeg) if chosen & {"convert", "pack"} else ""
    options = download_options(arguments)
    with exclusive(save_path):
        job = VoxCelebJob(save_path, corpus, trial_lists, arguments.subsets, options, arguments.jobs, arguments.format)
        if "augment" in chosen:
            job.summaries += prepare_musan(save_path, options, arguments.jobs, catalogue_path=arguments.catalogue)
            job.summaries += prepare_rirs(save_path, options, arguments.jobs, catalogue_path=arguments.catalogue)
        if "download" in chosen:
            job.fetch()
        if "concatenate" in chosen:
            job.concatenate(arguments.keep_parts)
        if "extract" in chosen:
            job.unpack()
        if "convert" in chosen:
            job.convert(ffmpeg, keep_sources=not arguments.remove_originals)
        if "pack" in chosen:
            pack_archives(job, ffmpeg)
        if "lists" in chosen:
            job.merge()
            job.lists(arguments.lists_from)
        return finish(job.summaries, save_path / "summary.txt")


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), run))
