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
The key is available on request at https://mm.kaist.ac.kr/datasets/voxceleb/. The layout is voxceleb_trainer's, so a
folder that its tool prepared is taken as it is; with --save_path data the recipes in configs/voxceleb find everything.
"""

import argparse
import json
import logging
import os
import shlex
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.corpora import musan, rirs
from speakernet.corpora.archives import join_pieces
from speakernet.corpora.download import DownloadOptions, RemoteFile, download_all, has_md5, load_corpus
from speakernet.corpora.listing import (
    add_common_arguments,
    add_download_arguments,
    chosen,
    corpus_of,
    listable_rows,
    unpack,
    usable_utterances,
)
from speakernet.corpora.pack_inputs import open_inputs
from speakernet.corpora.steps import Conversion, Folder, StepSummary, convert_all, finish, walk_files
from speakernet.corpora.utterances import row_by_folder
from speakernet.data.audio import SAMPLE_RATE
from speakernet.data.ffmpeg import ENCODINGS, FFMPEG_VARIABLE, find_ffmpeg
from speakernet.data.lists import StringTable, read_trials, write_training_list
from speakernet.data.packed import PackedSource
from speakernet.data.packing import SKIPPED, pack
from speakernet.data.sources import FolderSource
from speakernet.files import (
    PartError,
    WorkPart,
    add_part_argument,
    atomic_write,
    digest_of,
    exclusive,
    list_parts,
    missing_parts,
    open_text,
    own_command,
    parse_part,
    parts_in,
    place,
    reading,
    remove_leftovers,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subset:
    """One published archive: where it unpacks to, where its audio is then, and how much is in it as published."""

    archive: str
    folder: str
    audio_folder: str
    is_aac: bool
    num_speakers: int
    num_utterances: int
    num_leading_folders: int
    """Above the speakers' in the archive."""


SUBSETS = {
    "vox1_dev": Subset("vox1_dev_wav.zip", "voxceleb1/dev", "voxceleb1/dev", False, 1211, 148642, 1),
    "vox1_test": Subset("vox1_test_wav.zip", "voxceleb1/test", "voxceleb1/test", False, 40, 4874, 1),
    # Unpacked a folder higher than the others: this archive begins with `dev/` itself.
    "vox2_dev": Subset("vox2_dev_aac.zip", "voxceleb2", "voxceleb2/dev", True, 5994, 1092009, 2),
    "vox2_test": Subset("vox2_test_aac.zip", "voxceleb2/test", "voxceleb2/test", True, 118, 36237, 1),
}
#: VoxCeleb1-E and -H draw from both folders of VoxCeleb1: they are merged by links that take no space.
MERGED_FOLDER = "voxceleb1/wav"
TRAINING_SUBSETS = ("vox1_dev", "vox2_dev")
PACKED_FOLDER = "packed"
#: Packed corpus -> the subsets in it.
PACKED = {"vox1": ("vox1_dev", "vox1_test"), "vox2_dev": ("vox2_dev",), "vox2_test": ("vox2_test",)}

CONVERTED, DONE_SUFFIX = "converted_parts", ".json"
"""Folder and ending of the file in which a share of the conversion says that it is done."""
STEPS = {
    "download": "fetch the archives that are missing",
    "concatenate": "join the parts, verify, and only then remove them",
    "extract": "unpack the archives",
    "convert": "convert VoxCeleb2's m4a files",
    "lists": "write training lists, fetch trial lists, merge VoxCeleb1",
}
MORE_STEPS = {
    "pack": "packed corpora from the archives, without a WAV tree",
    "augment": "fetch and prepare MUSAN and RIRS_NOISES",
}
#: The recipe of the command that is printed at the end, and where it looks for its inputs.
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
    add_common_arguments(parser)
    steps = parser.add_argument_group("steps")
    steps.add_argument("--all", action="store_true", help=f"{', '.join(STEPS)}")
    for name, what in (STEPS | MORE_STEPS).items():
        steps.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument("--subsets", nargs="+", choices=SUBSETS, default=list(SUBSETS), help="archives of the corpus")
    parser.add_argument("--format", choices=ENCODINGS, default="wav", help="what m4a files are converted to")
    help_text = "folder with the published trial lists, instead of fetching them"
    parser.add_argument("--lists_from", type=Path, help=help_text)
    parser.add_argument("--keep_parts", action="store_true", help="keep archive parts after joining")
    parser.add_argument("--remove_originals", action="store_true", help="remove each m4a once its WAV is verified")
    add_part_argument(parser, "for --convert alone; --lists afterwards needs all of them")
    parser.add_argument("--ffmpeg", help="ffmpeg to use (default: the one on the PATH)")
    add_download_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    steps = {step for step in (*STEPS, *MORE_STEPS) if getattr(arguments, step)}
    if arguments.all:
        steps |= set(STEPS)
    if not steps:
        raise ValueError("no step was given; --all does everything but --pack and --augment, --help lists the steps")
    if arguments.ffmpeg:
        os.environ[FFMPEG_VARIABLE] = arguments.ffmpeg
    if steps & {"convert", "pack"}:
        # Looked for before hours of download, not after them.
        find_ffmpeg()
    job = VoxCelebJob(arguments)
    if arguments.part:
        return job.convert_share(parse_part(arguments.part), steps)
    with exclusive(arguments.save_path):
        if "lists" in steps and "convert" not in steps:
            job.refuse_unfinished()
        if "augment" in steps:
            # --base_url is the mirror of VoxCeleb; these sets come from addresses of their own.
            elsewhere = argparse.Namespace(**vars(arguments) | {"base_url": None})
            job.summaries += musan.prepare(elsewhere) + rirs.prepare(elsewhere)
        for step in (*STEPS, "pack"):
            if step in steps and step != "lists":
                getattr(job, step)()
        if "lists" in steps:
            job.merge()
            if written := job.lists():
                sys.stdout.write(job.next_command(written) + "\n")
        return finish(job.summaries, arguments.save_path / "summary.txt")


class VoxCelebJob:
    """The arguments, the tables of sources and the summaries so far; a method for each step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.root: Path = arguments.save_path
        self.num_jobs: int = arguments.num_jobs
        self.corpus = corpus_of("voxceleb", arguments, arguments.key)
        self.trial_lists = load_corpus("voxceleb_trials", catalogue_path=arguments.catalogue)
        self.subsets = {name: SUBSETS[name] for name in arguments.subsets}
        self.options = chosen(DownloadOptions, arguments)
        self.summaries: list[StepSummary] = []

    def step(self, name: str, made: str = "made") -> StepSummary:
        summary = StepSummary(name, self.root, made)
        self.summaries.append(summary)
        return summary

    def audio_root(self, name: str, kind: str = "") -> Path:
        """Where the audio of a subset is as `kind`: aac, wav or flac; by default what training reads."""
        subset = SUBSETS[name]
        return self.root / subset.audio_folder / (kind or (self.arguments.format if subset.is_aac else "wav"))

    def download(self) -> None:
        """Fetch what is there neither in parts nor as a whole."""
        with self.step("download", made="fetched") as summary:
            wanted = []
            for subset in self.subsets.values():
                pieces = self.corpus.pieces(subset.archive)
                if has_md5(self.root / subset.archive, self.corpus.md5(subset.archive)):
                    summary.add(skipped=len(pieces))
                else:
                    wanted += [self.corpus.files[piece] for piece in pieces]
            download_all(wanted, self.root, self.num_jobs, self.options, summary)

    def concatenate(self) -> None:
        with self.step("concatenate") as summary:
            for subset in self.subsets.values():
                if joined := self.corpus.joined.get(subset.archive):
                    pieces = [self.root / piece for piece in joined.pieces]
                    join_pieces(pieces, self.root / joined.name, joined.md5, summary, self.arguments.keep_parts)

    def extract(self) -> None:
        with self.step("extract") as summary:
            for subset in self.subsets.values():
                archive = self.root / subset.archive
                unpack(archive, self.corpus.md5(subset.archive), self.root / subset.folder, summary, self.num_jobs)

    def convert(self, part: WorkPart | None = None) -> None:
        """Convert the m4a files of VoxCeleb2, or one share of them, into a tree beside theirs."""
        file_format = self.arguments.format
        with self.step("convert" if part is None else f"convert_{part.name}") as summary:
            for name, subset in self.subsets.items():
                source_root = self.audio_root(name, "aac")
                if subset.is_aac and source_root.is_dir():
                    convert_all(
                        self._conversions(source_root, part),
                        file_format,
                        SAMPLE_RATE,
                        self.num_jobs,
                        summary,
                        keep_sources=not self.arguments.remove_originals,
                        description=f"convert {name}",
                    )
                elif subset.is_aac:
                    summary.add_broken(str(source_root), "does not exist; run --extract first")

    def _conversions(self, source_root: Path, part: WorkPart | None) -> Iterator[Conversion]:
        target_root = Folder(source_root.parent / self.arguments.format)
        for name in walk_files(source_root, {".m4a", ".aac", ".mp4"}):
            # By its name: with --remove_originals the other shares take files away meanwhile.
            if part is None or zlib.crc32(name.encode("utf-8", "surrogateescape")) % part.count == part.number - 1:
                target = target_root.path(Path(name).with_suffix(f".{self.arguments.format}").as_posix())
                yield Conversion(source_root / name, target)

    def convert_share(self, part: WorkPart, steps: set[str]) -> int:
        """Convert one share, and write down that it is done."""
        if steps != {"convert"}:
            raise ValueError(
                f"--part {part}: it is for --convert alone; run the steps before it on one machine first, and --lists "
                "on one when all parts are done"
            )
        folder = self.root / CONVERTED
        # A lock of its own: the shares are done beside each other in one tree.
        with exclusive(folder / f"{part.name}.work"):
            self.convert(part)
            with atomic_write(folder / f"{part.name}{DONE_SUFFIX}") as file:
                json.dump({"format": self.arguments.format, "subsets": sorted(self.subsets)}, file)
        if missing := missing_parts(list(parts_in(folder, DONE_SUFFIX)), folder):
            logger.info("parts that are still to be converted: %s", list_parts(missing))
        else:
            logger.info("all %d parts are converted; --lists is next", part.count)
        return finish(self.summaries, folder / f"{part.name}.summary.txt")

    def refuse_unfinished(self) -> None:
        """Raise PartError if some shares of a conversion are missing; remove half-written files of killed ones."""
        folder = self.root / CONVERTED
        done = parts_in(folder, DONE_SUFFIX)
        if not done:
            return
        if missing := missing_parts(list(done), folder):
            raise PartError(f"the parts {list_parts(missing)} are not converted; run --convert --part for them first")
        for part, path in done.items():
            with reading(path, f"what part {part} was done with; run it again"), open_text(path) as file:
                found = json.load(file)
                is_same = found["format"] == self.arguments.format and set(found["subsets"]) >= set(self.subsets)
            if not is_same:
                raise PartError(
                    f"part {part} was converted with --format {found['format']} --subsets "
                    f"{' '.join(found['subsets'])}, not {self.arguments.format} and {' '.join(self.subsets)}; give all "
                    "parts and --lists the same"
                )
        remove_leftovers(self.root)

    def merge(self) -> None:
        """Link both folders of VoxCeleb1 into one, as the lists of E and H need; copies if links are impossible."""
        sources = [self.audio_root(name) for name in ("vox1_dev", "vox1_test")]
        if not any(source.is_dir() for source in sources):
            return
        target = Folder(self.root / MERGED_FOLDER)
        with self.step("merge") as summary:
            for source in filter(Path.is_dir, sources):
                for name in walk_files(source, {".wav", ".flac"}):
                    path, merged = source / name, target.path(name)
                    # A copy has an inode of its own and is known by its size.
                    if merged.exists() and (merged.samefile(path) or merged.stat().st_size == path.stat().st_size):
                        summary.add(skipped=1)
                    else:
                        # A flush for each of 150,000 copies would take hours on a spinning disk.
                        place(path, merged, is_flushed=False)
                        summary.add(made=1)

    def lists(self) -> dict[str, Path]:
        """Write the training lists and bring the trial lists; returns the training lists by subset.

        The recipes in configs/voxceleb name these files: a name that changes here changes there.
        """
        written = {}
        folder = self.root / "lists"
        for name in self.subsets:
            if self.audio_root(name).is_dir():
                path = folder / f"{name}_list.txt"
                self._write_list(name, path)
                if name in TRAINING_SUBSETS:
                    written[name] = path
        if len(written) == len(TRAINING_SUBSETS):
            path = folder / "vox1_vox2_dev_list.txt"
            write_training_list(path, self._joined_rows(written))
            logger.info("%s: its paths start from %s", path, self.root)
        with self.step("trial_lists") as summary:
            if self.arguments.lists_from is not None:
                _copy_lists(self.arguments.lists_from, Folder(folder), self.trial_lists.files, summary)
            else:
                download_all(self.trial_lists.files.values(), folder, self.num_jobs, self.options, summary)
        root = self.root / MERGED_FOLDER
        for name in self.trial_lists.files if root.is_dir() else ():
            if (folder / name).is_file():
                trials = read_trials(folder / name)
                # No table is kept: only the names are looked for, once.
                num_missing = len(FolderSource(root, keep_lookup=False).missing(trials.names))
                log = logger.warning if num_missing else logger.info
                log("%s: %d trials, %d of %d files are missing", name, len(trials), num_missing, len(trials.names))
        return written

    def _write_list(self, name: str, path: Path) -> None:
        root, subset = self.audio_root(name), SUBSETS[name]
        # Headers are read for the list, so that a file of a header alone never reaches training.
        with self.step(f"list_{name}", made="listed") as summary:
            names = list(walk_files(root, {".wav", ".flac"}))
            rows = listable_rows((row_by_folder(one) for one in names), names, summary)
            utterances, _ = usable_utterances(rows, root, 0.0, self.num_jobs, summary)
            write_training_list(path, utterances.pairs(np.arange(len(utterances))))
        found, published = (len(utterances.speakers), len(utterances)), (subset.num_speakers, subset.num_utterances)
        # Not refused: part of a corpus trains, but its figures are not the published ones'.
        if found != published:
            message = "%s: %d speakers and %d utterances, published are %d and %d"
            logger.warning(message, name, *found, *published)
        logger.info("%s: its paths start from %s", path, root)

    def _joined_rows(self, written: dict[str, Path]) -> Iterator[tuple[str, str]]:
        """Rows of both training sets, paths relative to the root."""
        for name, path in written.items():
            below = self.audio_root(name).relative_to(self.root).as_posix()
            with path.open(encoding="utf-8") as file:
                for line in file:
                    speaker, utterance = line.rstrip("\n").split(" ", 1)
                    yield speaker, f"{below}/{utterance}"

    def pack(self) -> None:
        """Pack every subset asked for straight from its archives, and write the packed corpora's training lists.

        VoxCeleb1's two archives go into one corpus, as the trial lists of E and H need both. Names are those of the
        published lists (`id10001/VIDEO/00001.wav`), also if the archive holds m4a.
        """
        for corpus, subsets in PACKED.items():
            wanted = [name for name in subsets if name in self.subsets]
            if wanted:
                with self.step(f"pack_{corpus}") as summary:
                    self._pack_corpus(self.root / PACKED_FOLDER / corpus, wanted, summary)

    def _pack_corpus(self, folder: Path, subsets: list[str], summary: StepSummary) -> None:
        sources: list[Path] = []
        names: dict[str, list[str]] = {}
        strip = SUBSETS[subsets[0]].num_leading_folders
        for name in subsets:
            found = self._verified_sources(SUBSETS[name].archive, summary)
            if not found:
                return
            sources += found
            names[name] = [f"{member.rpartition('.')[0]}.wav" for member in open_inputs(found, None, strip).names]
        # Under its final name a packed corpus is whole: until then it is `<name>.partial`.
        if folder.is_dir():
            summary.add(skipped=len(PackedSource(folder).index.names))
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            wanted = StringTable.from_strings(one for some in names.values() for one in some)
            inputs = open_inputs(sources, wanted, strip)
            made = pack(inputs, folder, num_threads=self.num_jobs, skip_bad=True, show_progress=True)
            summary.add(made=made.num_utterances)
        packed = set(PackedSource(folder).index.names)
        skipped = folder / SKIPPED
        if skipped.is_file():
            for line in skipped.read_text(encoding="utf-8").splitlines():
                name, _, reason = line.partition("\t")
                summary.add_broken(name, reason)
        for name in subsets:
            if name in TRAINING_SUBSETS:
                path = self.root / "lists" / f"{name}_packed_list.txt"
                # What could not be decoded was left out of the corpus, so it must not be in the list.
                rows = sorted(one for one in names[name] if one in packed)
                write_training_list(path, ((one.split("/", 1)[0], one) for one in rows))
                logger.info("%s: its paths start from %s", path, folder)

    def _verified_sources(self, archive: str, summary: StepSummary) -> list[Path]:
        """The whole archive, or all of its parts, with the right sums; none if something is missing."""
        if has_md5(self.root / archive, self.corpus.md5(archive)):
            return [self.root / archive]
        pieces = self.corpus.pieces(archive)
        bad = [piece for piece in pieces if not has_md5(self.root / piece, self.corpus.files[piece].md5)]
        for piece in bad:
            summary.add_broken(piece, "does not exist, or its MD5 sum is wrong; run --download")
        return [] if bad else [self.root / piece for piece in pieces]

    def next_command(self, training_lists: dict[str, Path]) -> str:
        """The command that trains RECIPE on what was prepared, with what is elsewhere than the recipe looks for it."""
        # VoxCeleb2 if both are there, as in the recipes: no speaker of it is in VoxCeleb1's trials.
        subset = max(training_lists, key=lambda name: SUBSETS[name].num_speakers)
        noise, rooms = self.root / "musan", self.root / rirs.SIMULATED_FOLDER
        if not noise.is_dir() or not rooms.is_dir():
            logger.info("noise and room responses are missing; --augment fetches them")
        paths = (
            training_lists[subset], self.audio_root(subset), self.root / "lists" / "veri_test2.txt",
            self.root / MERGED_FOLDER, noise, rooms,
        )  # fmt: skip
        words = [own_command("train"), "--config", RECIPE]
        for (name, usual), path in zip(RECIPE_INPUTS.items(), paths, strict=True):
            if path != Path(usual):
                words += [f"--{name}", shlex.quote(str(path))]
        return " ".join(words)


def _copy_lists(source: Path, folder: Folder, lists: Mapping[str, RemoteFile], summary: StepSummary) -> None:
    """Take the published lists that are in `source`, verified; others are not missed."""
    for name, file in lists.items():
        found = source / name
        if not found.is_file():
            continue
        md5 = digest_of(found, "md5")
        target = folder.path(name)
        if md5 != file.md5:
            summary.add_broken(str(found), f"MD5 is {md5}, published is {file.md5}")
        elif target.is_file() and digest_of(target, "md5") == md5:
            summary.add(skipped=1)
        else:
            # A copy, not a link: what the user does to the own file later must not reach the verified one.
            with atomic_write(target, "wb") as file:
                file.write(found.read_bytes())
            summary.add(made=1)
    if not summary.found:
        raise ValueError(f"{source} holds none of the published lists ({', '.join(lists)})")
