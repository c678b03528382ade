"""VoxCeleb1 and VoxCeleb2, from nothing or from archives already on disk, to lists that train.

    speakernet prepare voxceleb --save_path data --all --key KEY      everything below, in order, but --pack, --augment
    speakernet prepare voxceleb --save_path data --download --key KEY fetch what is missing (resumes, verifies)
    speakernet prepare voxceleb --save_path data --concatenate        join the parts, verify, remove the parts
    speakernet prepare voxceleb --save_path data --extract            unpack
    speakernet prepare voxceleb --save_path data --convert            m4a -> 16 kHz mono WAV or FLAC (needs ffmpeg)
    speakernet prepare voxceleb --save_path data --lists              training lists, trial lists, merged VoxCeleb1
    speakernet prepare voxceleb --save_path data --pack               packed corpora straight from the archives
    speakernet prepare voxceleb --save_path data --augment            MUSAN and RIRS_NOISES

Every step does only what is missing and can be killed at any moment. Archives that you have are put into --save_path.
The key is handed out on request at https://mm.kaist.ac.kr/datasets/voxceleb/. With --save_path data the recipes in
configs/voxceleb find everything where it is.
"""

import argparse
import json
import logging
import shlex
import sys
from pathlib import Path

from speakernet.corpora import musan, rirs
from speakernet.corpora.catalogue import load_corpus
from speakernet.corpora.commands import add_common_arguments, add_download_arguments, download_options
from speakernet.corpora.summary import finish
from speakernet.corpora.voxceleb.packing import pack_archives
from speakernet.corpora.voxceleb.steps import MERGED_FOLDER, SUBSETS, VoxCelebJob
from speakernet.data.ffmpeg import ENCODINGS, find_ffmpeg
from speakernet.files import (
    PartError,
    WorkPart,
    add_part_argument,
    atomic_write,
    exclusive,
    list_parts,
    missing_parts,
    open_text,
    own_command,
    parse_part,
    parts_in,
    reading,
    remove_leftovers,
)

logger = logging.getLogger(__name__)

CONVERTED, DONE_SUFFIX = "converted_parts", ".json"
"""Folder and ending of the word that a part of the conversion leaves."""
STEPS = {
    "download": "fetch the archives that are not there",
    "concatenate": "join the parts, verify, and only then remove them",
    "extract": "unpack the archives",
    "convert": "convert VoxCeleb2's m4a files",
    "lists": "write training lists, fetch trial lists, merge VoxCeleb1",
}
MORE_STEPS = {
    "pack": "packed corpora from the archives, without a WAV tree",
    "augment": "fetch and prepare MUSAN and RIRS_NOISES",
}
#: The recipe that is named at the end, and where it looks for its inputs.
RECIPE = "voxceleb/resnet34.yaml"
RECIPE_INPUTS = {
    "data.train_list": "data/lists/vox2_dev_list.txt",
    "data.train_path": "data/voxceleb2/dev/wav",
    "data.test_list": "data/lists/veri_test2.txt",
    "data.test_path": "data/voxceleb1/wav",
    "augment.noise_path": "data/musan",
    "augment.rir_path": "data/RIRS_NOISES/simulated_rirs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of this part."""
    add_common_arguments(parser)
    steps = parser.add_argument_group("steps")
    steps.add_argument("--all", action="store_true", help=f"{', '.join(STEPS)}")
    for name, what in (STEPS | MORE_STEPS).items():
        steps.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument("--subsets", nargs="+", choices=SUBSETS, default=list(SUBSETS), help="parts of the corpus")
    parser.add_argument("--format", choices=ENCODINGS, default="wav", help="what m4a files are converted to")
    parser.add_argument(
        "--lists_from", type=Path, help="folder with the published trial lists, instead of fetching them"
    )
    parser.add_argument("--keep_parts", action="store_true", help="keep archive parts after joining")
    parser.add_argument("--remove_originals", action="store_true", help="remove each m4a once its WAV is verified")
    add_part_argument(parser, "for --convert alone; --lists afterwards wants all of them")
    parser.add_argument("--ffmpeg", help="ffmpeg to use (default: the one on the PATH)")
    add_download_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """The steps asked for, in order."""
    chosen = {step for step in (*STEPS, *MORE_STEPS) if getattr(arguments, step)}
    if arguments.all:
        chosen |= set(STEPS)
    if not chosen:
        raise ValueError(
            "no step was asked for; --all does everything but --pack and --augment, --help lists the steps"
        )
    corpus = load_corpus("voxceleb", key=arguments.key, base_url=arguments.base_url, catalogue_path=arguments.catalogue)
    trial_lists = load_corpus("voxceleb_trials", catalogue_path=arguments.catalogue)
    save_path = arguments.save_path
    # Asked for before hours of download, not after them.
    ffmpeg = find_ffmpeg(arguments.ffmpeg) if chosen & {"convert", "pack"} else ""
    options = download_options(arguments)
    job = VoxCelebJob(save_path, corpus, trial_lists, arguments.subsets, options, arguments.num_jobs, arguments.format)
    if arguments.part:
        return _convert_part(job, parse_part(arguments.part), chosen, ffmpeg, not arguments.remove_originals)
    with exclusive(save_path):
        if "lists" in chosen and "convert" not in chosen:
            refuse_unfinished(job)
        if "augment" in chosen:
            # --base_url is the mirror of VoxCeleb; these sets come from addresses of their own.
            elsewhere = argparse.Namespace(**vars(arguments) | {"base_url": None})
            job.summaries += musan.prepare(elsewhere) + rirs.prepare(elsewhere)
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
            if written := job.lists(arguments.lists_from):
                sys.stdout.write(next_command(job, written) + "\n")
        return finish(job.summaries, save_path / "summary.txt")


def _convert_part(job: VoxCelebJob, part: WorkPart, chosen: set[str], ffmpeg: str, keep_sources: bool) -> int:
    """Convert one part, and leave word that it is done.

    Raises:
        ValueError: other steps are asked for too, or the part is being done by another process.
    """
    if chosen != {"convert"}:
        raise ValueError(
            f"--part {part}: it is for --convert alone; give the steps before it to one machine first, and --lists to "
            "one when all parts are done"
        )
    folder = job.save_path / CONVERTED
    # A lock of its own: the parts work beside each other in one tree.
    with exclusive(folder / f"{part.name}.work"):
        job.convert(ffmpeg, keep_sources, part)
        with atomic_write(folder / f"{part.name}{DONE_SUFFIX}") as file:
            json.dump({"format": job.file_format, "subsets": sorted(job.subsets)}, file)
    if missing := missing_parts(list(parts_in(folder, DONE_SUFFIX)), folder):
        logger.info("the parts %s are still to be converted", list_parts(missing))
    else:
        logger.info("all %d parts are converted; --lists is next", part.count)
    return finish(job.summaries, folder / f"{part.name}.summary.txt")


def refuse_unfinished(job: VoxCelebJob) -> None:
    """Refuse to list what was converted in parts while some are missing; tidy up after parts that were killed.

    Raises:
        PartError: parts are missing, or were done with other options.
    """
    folder = job.save_path / CONVERTED
    done = parts_in(folder, DONE_SUFFIX)
    if not done:
        return
    if missing := missing_parts(list(done), folder):
        raise PartError(f"the parts {list_parts(missing)} are not converted; run --convert --part for them first")
    for part, path in done.items():
        with reading(path, f"what part {part} was done with; run it again"), open_text(path) as file:
            found = json.load(file)
            is_same = found["format"] == job.file_format and set(found["subsets"]) >= set(job.subsets)
        if not is_same:
            raise PartError(
                f"part {part} was converted with --format {found['format']} --subsets {' '.join(found['subsets'])}, "
                f"not {job.file_format} and {' '.join(job.subsets)}; give all parts and --lists the same"
            )
    remove_leftovers(job.save_path)


def next_command(job: VoxCelebJob, training_lists: dict[str, Path]) -> str:
    """The command that trains RECIPE on what was prepared, with what lies elsewhere than the recipe looks for it."""
    # VoxCeleb2 where both are there, as in the recipes: no speaker of it is in VoxCeleb1's trials.
    subset = max(training_lists, key=lambda name: SUBSETS[name].num_speakers)
    inputs = {
        "data.train_list": training_lists[subset],
        "data.train_path": job.audio_root(subset, job.file_format if SUBSETS[subset].is_aac else "wav"),
        "data.test_list": job.save_path / "lists" / "veri_test2.txt",
        "data.test_path": job.save_path / MERGED_FOLDER,
        "augment.noise_path": job.save_path / "musan",
        "augment.rir_path": job.save_path / rirs.SIMULATED_FOLDER,
    }
    noise, rooms = inputs["augment.noise_path"], inputs["augment.rir_path"]
    if not noise.is_dir() or not rooms.is_dir():
        logger.info("noise and room responses are not there yet; --augment brings them")
    words = [own_command("train"), "--config", RECIPE]
    for name, path in inputs.items():
        # With --save_path data nothing is left to say.
        if path != Path(RECIPE_INPUTS[name]):
            words += [f"--{name}", shlex.quote(str(path))]
    return " ".join(words)
