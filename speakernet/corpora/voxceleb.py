"""VoxCeleb1 and VoxCeleb2, downloaded or from archives on disk: unpack, and write lists ready for
training.

    speakernet prepare voxceleb --save_path data --all --key KEY      all steps in order, except
    --pack and --augment speakernet prepare voxceleb --save_path data --download --key KEY fetch
    what is missing (resumes, verifies) speakernet prepare voxceleb --save_path data --concatenate
         join the parts, verify, remove the parts speakernet prepare voxceleb --save_path data
         --extract            unpack
    speakernet prepare voxceleb --save_path data --convert            m4a -> 16 kHz mono WAV or FLAC
    (needs ffmpeg) speakernet prepare voxceleb --save_path data --lists              training lists,
    trial lists, merged VoxCeleb1 speakernet prepare voxceleb --save_path data --pack
    packed corpora straight from the archives speakernet prepare voxceleb --save_path data --augment
               MUSAN and RIRS_NOISES

Every step does only what is missing and can be killed at any time. Put archives that you already
have into --save_path. The key is available on request at https://mm.kaist.ac.kr/datasets/voxceleb/.
The layout is voxceleb_trainer's, so a folder prepared with its tool works as it is; with
--save_path data, the recipes in configs/voxceleb find everything.
"""

import argparse
import itertools
import logging
import os
import re
import shlex
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speakernet.corpora import musan, rirs
from speakernet.corpora.archives import join_pieces
from speakernet.corpora.download import RemoteFile, download_all, has_md5, load_corpus
from speakernet.corpora.listing import (
    COMMON_ARGUMENTS,
    DOWNLOAD_ARGUMENTS,
    SEED,
    corpus_of,
    download_options,
    listable_rows,
    unpack,
    usable_utterances,
)
from speakernet.corpora.pack_inputs import open_inputs
from speakernet.corpora.steps import Folder, StepSummary, convert_all, finish
from speakernet.corpora.utterances import PairRules, Utterances, calibration_pairs, row_by_folder
from speakernet.data.audio import SAMPLE_RATE
from speakernet.data.ffmpeg import ENCODINGS, FFMPEG_VARIABLE, find_ffmpeg
from speakernet.data.folders import walk_files
from speakernet.data.lists import StringTable, read_trials, write_training_list, write_trials
from speakernet.data.packed import PackedSource
from speakernet.data.packing import SKIPPED, pack
from speakernet.data.parts import (
    PART_HELP,
    WHOLE,
    PartError,
    WorkPart,
    list_parts,
    missing_parts,
    parse_part,
    parts_in,
)
from speakernet.data.sources import FolderSource
from speakernet.files import (
    atomic_write,
    digest_of,
    exclusive,
    own_command,
    place,
    remove_leftovers,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subset:
    """One published archive: where it is unpacked, where its audio is then, and its published
    counts.
    """

    archive: str
    folder: str
    audio_folder: str
    is_aac: bool
    num_speakers: int
    num_utterances: int
    num_leading_folders: int
    """Folders above the speakers' folders in the archive."""


SUBSETS = {
    "vox1_dev": Subset(
        "vox1_dev_wav.zip", "voxceleb1/dev", "voxceleb1/dev", False, 1211, 148642, 1
    ),
    "vox1_test": Subset(
        "vox1_test_wav.zip", "voxceleb1/test", "voxceleb1/test", False, 40, 4874, 1
    ),
    # Unpacked one folder higher than the others: this archive itself starts with `dev/`.
    "vox2_dev": Subset("vox2_dev_aac.zip", "voxceleb2", "voxceleb2/dev", True, 5994, 1092009, 2),
    "vox2_test": Subset(
        "vox2_test_aac.zip", "voxceleb2/test", "voxceleb2/test", True, 118, 36237, 1
    ),
}
#: VoxCeleb1-E and -H use both folders of VoxCeleb1, which are therefore merged with links that take
# no space.
MERGED_FOLDER = "voxceleb1/wav"
TRAINING_SUBSETS = ("vox1_dev", "vox2_dev")
PACKED_FOLDER = "packed"
#: Packed corpus -> the subsets in it.
PACKED = {"vox1": ("vox1_dev", "vox1_test"), "vox2_dev": ("vox2_dev",), "vox2_test": ("vox2_test",)}

SPEAKER_NAME = re.compile(r"id\d{5}")
MAX_SEARCH_DEPTH = 4
"""Levels of folders searched for speakers that are not where they are expected."""
CONVERTED = "converted_parts"
DONE = ".done"
"""Folder of files that record, for each format, which parts of a conversion are done."""
STEPS = {
    "download": "fetch missing archives",
    "concatenate": "join the parts, verify the result, and only then remove the parts",
    "extract": "unpack the archives",
    "convert": "convert VoxCeleb2's m4a files",
    "lists": "write training lists, fetch trial lists, merge VoxCeleb1",
}
MORE_STEPS = {
    "pack": "packed corpora from the archives, without a WAV tree",
    "augment": "fetch and prepare MUSAN and RIRS_NOISES",
}
#: The recipe in the command printed at the end, and where that recipe looks for its inputs.
RECIPE = "voxceleb/resnet34.yaml"
RECIPE_INPUTS = {
    "data.train_list": "data/lists/vox2_dev_list.txt",
    "data.train_path": "data/voxceleb2/dev/wav",
    "data.test_list": "data/lists/veri_test2.txt",
    "data.test_path": "data/voxceleb1/wav",
    "augment.noise_path": "data/musan",
    "augment.rir_path": "data/RIRS_NOISES/simulated_rirs",
}


ARGUMENTS = {
    **COMMON_ARGUMENTS,
    "--all": {"action": "store_true", "help": ", ".join(STEPS)},
    **{
        f"--{name}": {"action": "store_true", "help": what}
        for name, what in (STEPS | MORE_STEPS).items()
    },
    "--subsets": {
        "nargs": "+",
        "choices": SUBSETS,
        "default": list(SUBSETS),
        "help": "archives of the corpus",
    },
    "--format": {
        "choices": ENCODINGS,
        "default": "wav",
        "help": "format that m4a files are converted to",
    },
    "--lists_from": {
        "type": Path,
        "help": "folder with the published trial lists, instead of fetching them",
    },
    "--keep_parts": {"action": "store_true", "help": "keep archive parts after joining"},
    "--remove_originals": {
        "action": "store_true",
        "help": "remove each m4a once its WAV is verified",
    },
    "--part": {
        "metavar": "I/N",
        "help": f"{PART_HELP}; only for --convert; --lists afterwards needs all parts",
    },
    "--ffmpeg": {"help": "ffmpeg to use (default: the one on the PATH)"},
    **DOWNLOAD_ARGUMENTS,
}


def run(arguments: argparse.Namespace) -> int:
    steps = {
        step
        for step in (*STEPS, *MORE_STEPS)
        if getattr(arguments, step) or (arguments.all and step in STEPS)
    }
    if not steps:
        raise ValueError(
            "no step given; use --all (all but --pack and --augment) or one of the steps in --help"
        )
    if arguments.ffmpeg:
        os.environ[FFMPEG_VARIABLE] = arguments.ffmpeg
    if steps & {"convert", "pack"}:
        # Searched for before hours of downloading, not after them.
        find_ffmpeg()
    job = VoxCelebJob(arguments)
    if arguments.part:
        return job.convert_part(parse_part(arguments.part), steps)
    with exclusive(arguments.save_path):
        if "lists" in steps and "convert" not in steps:
            job.refuse_unfinished()
        if "augment" in steps:
            # --base_url is a mirror of VoxCeleb; these sets have their own addresses.
            elsewhere = argparse.Namespace(**vars(arguments) | {"base_url": None})
            job.summaries += musan.prepare(elsewhere) + rirs.prepare(elsewhere)
        for step in (*STEPS, "pack"):
            if step in steps:
                getattr(job, step)()
        return finish(job.summaries, arguments.save_path / "summary.txt")


class VoxCelebJob:
    """The arguments, the tables of sources and the summaries so far, with one method per step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.root: Path = arguments.save_path
        self.num_jobs: int = arguments.num_jobs
        self.corpus = corpus_of("voxceleb", arguments)
        self.trial_lists = load_corpus("voxceleb_trials", catalogue_path=arguments.catalogue)
        self.subsets = {name: SUBSETS[name] for name in arguments.subsets}
        self.parts = self.root / CONVERTED / arguments.format
        self.summaries: list[StepSummary] = []

    def step(self, name: str, made: str = "made") -> StepSummary:
        self.summaries.append(StepSummary(name, self.root, made))
        return self.summaries[-1]

    def audio_root(self, name: str, kind: str = "") -> Path:
        """Where the audio of a subset is as `kind` (aac, wav or flac; default: the format that
        training reads).
        """
        subset = SUBSETS[name]
        return (
            self.root
            / subset.audio_folder
            / (kind or (self.arguments.format if subset.is_aac else "wav"))
        )

    def fetch(self, files: Iterable[RemoteFile], folder: Path, summary: StepSummary) -> None:
        download_all(files, folder, self.num_jobs, download_options(self.arguments), summary)

    def download(self) -> None:
        """Fetch archives that are present neither in parts nor whole."""
        summary = self.step("download", made="fetched")
        archives = [subset.archive for subset in self.subsets.values()]
        missing = [one for one in archives if not has_md5(self.root / one, self.corpus.sums[one])]
        summary.add(
            skipped=sum(len(self.corpus.pieces(one)) for one in archives if one not in missing)
        )
        self.fetch(
            (self.corpus.files[piece] for one in missing for piece in self.corpus.pieces(one)),
            self.root,
            summary,
        )

    def concatenate(self) -> None:
        summary = self.step("concatenate")
        for subset in self.subsets.values():
            pieces = [self.root / piece for piece in self.corpus.joined.get(subset.archive, ())]
            if pieces:
                whole = self.root / subset.archive
                md5 = self.corpus.sums[subset.archive]
                join_pieces(pieces, whole, md5, summary, self.arguments.keep_parts)

    def extract(self) -> None:
        summary = self.step("extract")
        for subset in self.subsets.values():
            md5 = self.corpus.sums[subset.archive]
            unpack(
                self.root / subset.archive, md5, self.root / subset.folder, summary, self.num_jobs
            )

    def convert(self, part: WorkPart = WHOLE) -> None:
        """Convert the m4a files of VoxCeleb2, or one part of them, into a parallel tree."""
        file_format = self.arguments.format
        summary = self.step("convert" if part == WHOLE else f"convert_{part.name}")
        for name, subset in self.subsets.items():
            source_root = self.audio_root(name, "aac")
            if subset.is_aac and source_root.is_dir():
                target_root = Folder(self.audio_root(name))
                # Parts are assigned by name, because with --remove_originals other parts remove
                # files concurrently.
                pairs = (
                    (
                        source_root / one,
                        target_root.path(Path(one).with_suffix(f".{file_format}").as_posix()),
                    )
                    for one in walk_files(source_root, {".m4a", ".aac", ".mp4"})
                    if zlib.crc32(os.fsencode(one)) % part.count == part.number - 1
                )
                convert_all(
                    pairs,
                    file_format,
                    SAMPLE_RATE,
                    self.num_jobs,
                    summary,
                    keep_sources=not self.arguments.remove_originals,
                    description=f"convert {name}",
                )
            elif subset.is_aac:
                summary.add_broken(str(source_root), "does not exist; run --extract first")

    def convert_part(self, part: WorkPart, steps: set[str]) -> int:
        """Convert one part, and record that it is done."""
        if steps != {"convert"}:
            raise ValueError(
                f"--part {part} works only with --convert; run the earlier steps on one machine "
                "first, and --lists on one machine when all parts are done"
            )
        # One lock per part: parts are converted at the same time in one tree.
        with exclusive(self.parts / f"{part.name}.work"):
            self.convert(part)
            (self.parts / f"{part.name}{DONE}").touch()
        missing = missing_parts(list(parts_in(self.parts, DONE)), self.parts)
        logger.info("parts still to be converted before --lists: %s", list_parts(missing) or "none")
        return finish(self.summaries, self.parts / f"{part.name}.summary.txt")

    def refuse_unfinished(self) -> None:
        """Raise PartError if parts of a conversion are missing; remove half-written files of killed
        parts.
        """
        if done := parts_in(self.parts, DONE):
            if missing := missing_parts(list(done), self.parts):
                raise PartError(
                    f"parts {list_parts(missing)} are not converted; run --convert --part for them "
                    "first"
                )
            remove_leftovers(self.root)

    def merge(self) -> None:
        """Link both folders of VoxCeleb1 into one, as the E and H lists need; copy if links are
        impossible.
        """
        sources = [
            source
            for name in ("vox1_dev", "vox1_test")
            if (source := self.audio_root(name)).is_dir()
        ]
        summary = self.step("merge")
        target = Folder(self.root / MERGED_FOLDER)
        for source in sources:
            for name in walk_files(source, {".wav", ".flac"}):
                path = source / name
                merged = target.path(name)
                # Compared by size, because a copy has its own inode.
                is_there = merged.exists() and merged.stat().st_size == path.stat().st_size
                if not is_there:
                    # Flushing each of 150,000 copies would take hours on a spinning disk.
                    place(path, merged, is_flushed=False)
                summary.add(not is_there, is_there)

    def lists(self) -> None:
        """Write the training lists, fetch the trial lists, print the next command.

        The recipes in configs/voxceleb refer to these files, so a renamed file must be renamed
        there too.
        """
        if not any(self.audio_root(name).is_dir() for name in self.subsets):
            problem = self._why_no_audio()
            if not any(summary.broken for summary in self.summaries):
                # Nothing is made for a mistyped folder.
                raise ValueError(problem)
            self.step("lists").add_broken(str(self.root), problem)
            return
        if any(self.audio_root(name).is_dir() for name in ("vox1_dev", "vox1_test")):
            self.merge()
        folder = self.root / "lists"
        listed = {
            name: self._write_list(name, folder)
            for name in self.subsets
            if self.audio_root(name).is_dir()
        }
        written = [name for name in TRAINING_SUBSETS if name in listed]
        if len(written) == len(TRAINING_SUBSETS):
            roots = {
                name: self.audio_root(name).relative_to(self.root).as_posix() for name in written
            }
            rows = (
                (speaker, f"{roots[name]}/{one}")
                for name in written
                for speaker, one in listed[name].pairs()
            )
            write_training_list(folder / "vox1_vox2_dev_list.txt", rows)
            logger.info(
                "%s: paths are relative to %s", folder / "vox1_vox2_dev_list.txt", self.root
            )
        summary = self.step("trial_lists")
        if self.arguments.lists_from is None:
            self.fetch(self.trial_lists.files.values(), folder, summary)
        else:
            _copy_lists(self.arguments.lists_from, Folder(folder), self.trial_lists.files, summary)
        root = self.root / MERGED_FOLDER
        for path in filter(
            Path.is_file, (folder / name for name in self.trial_lists.files if root.is_dir())
        ):
            trials = read_trials(path)
            # No table is cached: this only checks, once, whether the files exist.
            num_missing = len(FolderSource(root, keep_lookup=False).missing(trials.names))
            level = logging.WARNING if num_missing else logging.INFO
            counts = f"{len(trials):,} trials, {num_missing:,} of {len(trials.names):,} files"
            logger.log(level, "%s: %s are missing", path, counts)
        if written:
            sys.stdout.write(self.next_command(written) + "\n")

    def _why_no_audio(self) -> str:
        """What --lists found instead of the audio of any subset, and what to do."""
        expected = ", ".join(str(self.audio_root(name)) for name in self.subsets)
        unconverted = [
            name
            for name in self.subsets
            if SUBSETS[name].is_aac and self.audio_root(name, "aac").is_dir()
        ]
        if unconverted:
            return (
                f"{', '.join(unconverted)}: only m4a files are there; run --convert, then --lists"
            )
        speakers = _speaker_folder(self.root)
        if speakers is None:
            return (
                f"{self.root} contains no speakers' folders (id…); expected {expected}. Run "
                "--extract first, or give the folder that contains voxceleb1 or voxceleb2 with "
                "--save_path"
            )
        return (
            f"the speakers' folders are in {speakers}, where no list is made of them; move that "
            f"folder, or link to it, so that it is one of {expected}"
        )

    def _write_list(self, name: str, folder: Path) -> Utterances:
        root = self.audio_root(name)
        subset = SUBSETS[name]
        path = folder / f"{name}_list.txt"
        # Headers are read for the list, so that a file with only a header never reaches training.
        summary = self.step(f"list_{name}", made="listed")
        names = list(walk_files(root, {".wav", ".flac"}))
        rows = listable_rows((row_by_folder(one) for one in names), names, summary)
        utterances, seconds = usable_utterances(rows, root, 0.0, self.num_jobs, summary)
        write_training_list(path, utterances.pairs())
        if name in TRAINING_SUBSETS:
            # Interviews in both corpora have similar durations, so the list's own are drawn from.
            chosen, pairs = calibration_pairs(utterances, seconds, seconds, PairRules(), SEED)
            write_trials(folder / f"{name}_calibration.txt", pairs.rows(chosen))
        found = (len(utterances.speakers), len(utterances))
        published = (subset.num_speakers, subset.num_utterances)
        # Not refused: part of a corpus can be trained on, but its error rates do not compare with
        # published ones.
        level = logging.INFO if found == published else logging.WARNING
        message = (
            "%s: %d speakers and %d utterances (published: %d and %d); paths are relative to %s"
        )
        logger.log(level, message, path, *found, *published, root)
        return utterances

    def pack(self) -> None:
        """Pack every requested subset straight from its archives, and write the packed corpora's
        training lists.

        VoxCeleb1's two archives go into one corpus, as the E and H trial lists need both. Names are
        those of the published lists (`id10001/VIDEO/00001.wav`), even if the archive contains m4a.
        """
        for corpus, subsets in PACKED.items():
            if wanted := [name for name in subsets if name in self.subsets]:
                self._pack_corpus(
                    self.root / PACKED_FOLDER / corpus, wanted, self.step(f"pack_{corpus}")
                )

    def _pack_corpus(self, folder: Path, subsets: list[str], summary: StepSummary) -> None:
        sources = {name: self._verified_sources(SUBSETS[name].archive, summary) for name in subsets}
        if not all(sources.values()):
            return
        strip = SUBSETS[subsets[0]].num_leading_folders
        names = {
            name: [
                f"{member.rpartition('.')[0]}.wav"
                for member in open_inputs(found, None, strip).names
            ]
            for name, found in sources.items()
        }
        # A packed corpus with its final name is complete; until then it is `<name>.partial`.
        if folder.is_dir():
            summary.add(skipped=len(PackedSource(folder).index.names))
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            wanted = StringTable.from_strings(itertools.chain(*names.values()))
            inputs = open_inputs(list(itertools.chain(*sources.values())), wanted, strip)
            made = pack(
                inputs, folder, num_threads=self.num_jobs, skip_bad=True, show_progress=True
            )
            summary.add(made=made.num_utterances)
        packed = set(PackedSource(folder).index.names)
        skipped = folder / SKIPPED
        for line in skipped.read_text(encoding="utf-8").splitlines() if skipped.is_file() else ():
            summary.add_broken(*line.split("\t", 1))
        for name in set(subsets) & set(TRAINING_SUBSETS):
            path = self.root / "lists" / f"{name}_packed_list.txt"
            # Utterances that could not be decoded are not in the corpus, so they must not be in the
            # list.
            write_training_list(
                path,
                ((one.split("/", 1)[0], one) for one in sorted(packed.intersection(names[name]))),
            )
            logger.info("%s: paths are relative to %s", path, folder)

    def _verified_sources(self, archive: str, summary: StepSummary) -> list[Path]:
        """The whole archive, or all of its parts, with correct checksums; empty if something is
        missing.
        """
        if has_md5(self.root / archive, self.corpus.sums[archive]):
            return [self.root / archive]
        pieces = self.corpus.pieces(archive)
        bad = [piece for piece in pieces if not has_md5(self.root / piece, self.corpus.sums[piece])]
        for piece in bad:
            summary.add_broken(piece, "missing, or its MD5 sum is wrong; run --download")
        return [] if bad else [self.root / piece for piece in pieces]

    def next_command(self, listed: Sequence[str]) -> str:
        """The command that trains RECIPE on the prepared data, with options for inputs that are
        elsewhere.
        """
        # VoxCeleb2 if both are there, as in the recipes: none of its speakers is in VoxCeleb1's
        # trials.
        subset = max(listed, key=lambda name: SUBSETS[name].num_speakers)
        lists = self.root / "lists"
        noise = self.root / "musan"
        rooms = self.root / rirs.SIMULATED_FOLDER
        if not noise.is_dir() or not rooms.is_dir():
            logger.info("noise or RIRs are missing; --augment fetches them")
        paths = (
            lists / f"{subset}_list.txt", self.audio_root(subset), lists / "veri_test2.txt",
            self.root / MERGED_FOLDER, noise, rooms,
        )  # fmt: skip
        inputs = zip(RECIPE_INPUTS.items(), paths, strict=True)
        changed = [
            f"--{name} {shlex.quote(str(path))}"
            for (name, usual), path in inputs
            if path != Path(usual)
        ]
        return " ".join([own_command("train"), "--config", RECIPE, *changed])


def _speaker_folder(root: Path) -> Path | None:
    """The first folder below `root`, a few levels deep, that contains folders named like VoxCeleb's
    speakers.
    """
    for depth in range(1, MAX_SEARCH_DEPTH + 1):
        for path in sorted(root.glob("/".join(["*"] * depth))):
            if SPEAKER_NAME.fullmatch(path.name) and path.is_dir():
                return path.parent
    return None


def _copy_lists(
    source: Path, folder: Folder, lists: Mapping[str, RemoteFile], summary: StepSummary
) -> None:
    """Copy the published lists found in `source` if they verify; others are not required."""
    for found in filter(Path.is_file, (source / name for name in lists)):
        md5 = digest_of(found, "md5")
        if md5 != lists[found.name].md5:
            summary.add_broken(
                str(found), f"MD5 sum {md5} instead of the published {lists[found.name].md5}"
            )
            continue
        # A copy, not a link: later changes to the user's file must not affect the verified one.
        with atomic_write(folder.path(found.name), "wb") as file:
            file.write(found.read_bytes())
        summary.add(made=1)
    if not summary.found:
        raise ValueError(f"{source} has none of the published lists ({', '.join(lists)})")
