"""VoxCeleb1 and VoxCeleb2, downloaded or from archives on disk: unpack, and write lists ready for
training.

    speakernet prepare voxceleb --save_path data --all --key KEY

does all steps in order, except --pack and --augment; one step at a time:

    --download --key KEY    fetch what is missing (resumes, verifies)
    --concatenate           join the parts, verify, remove the parts
    --extract               unpack
    --convert               m4a -> 16 kHz mono WAV or FLAC (needs ffmpeg)
    --lists                 training lists, trial lists, merged VoxCeleb1
    --pack                  packed corpora straight from the archives
    --augment               MUSAN and RIRS_NOISES

Every step does only what is missing and can be killed at any time. Put archives that you already
have into --save_path. The key is available on request at https://mm.kaist.ac.kr/datasets/voxceleb/.
The layout is voxceleb_trainer's, so a folder prepared with its tool works as it is; with
--save_path data, the recipes in configs/voxceleb find everything.
"""

import logging
import os
import shlex
import sys
import zlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from speakernet.corpora import musan, rirs
from speakernet.corpora.download import RemoteFile
from speakernet.corpora.listing import COMMON_ARGUMENTS, SEED, listable_rows, usable_utterances
from speakernet.corpora.pack_inputs import open_inputs
from speakernet.corpora.pairs import PairRules, calibration_pairs
from speakernet.corpora.public_archives import DOWNLOAD_ARGUMENTS, PublicArchives
from speakernet.corpora.steps import FFMPEG_ARGUMENT, Folder, StepSummary, convert_all, finish
from speakernet.corpora.utterances import Utterances, row_by_folder
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


SUBSETS = {
    "vox1_dev": Subset("vox1_dev_wav.zip", "voxceleb1/dev", "voxceleb1/dev", False, 1211, 148642),
    "vox1_test": Subset("vox1_test_wav.zip", "voxceleb1/test", "voxceleb1/test", False, 40, 4874),
    # Unpacked one folder higher than the others: this archive itself starts with `dev/`.
    "vox2_dev": Subset("vox2_dev_aac.zip", "voxceleb2", "voxceleb2/dev", True, 5994, 1092009),
    "vox2_test": Subset("vox2_test_aac.zip", "voxceleb2/test", "voxceleb2/test", True, 118, 36237),
}
#: VoxCeleb1-E and -H use both folders of VoxCeleb1, which are therefore merged with links that take
# no space.
MERGED_FOLDER = "voxceleb1/wav"
TRAINING_SUBSETS = ("vox1_dev", "vox2_dev")
PACKED_FOLDER = "packed"
#: Packed corpus -> the subsets in it, and the folders above the speakers' folders in their
# archives.
PACKED = {
    "vox1": (("vox1_dev", "vox1_test"), 1),
    "vox2_dev": (("vox2_dev",), 2),
    "vox2_test": (("vox2_test",), 1),
}

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
#: Noise and RIRs first, because the command that --lists prints depends on them.
ORDER = ("augment", *STEPS, "pack")
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
        f"--{name}": {"action": "store_true", "help": meaning}
        for name, meaning in (STEPS | MORE_STEPS).items()
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
    **FFMPEG_ARGUMENT,
    **DOWNLOAD_ARGUMENTS,
}


def run(arguments: Namespace) -> int:
    steps = [
        step for step in ORDER if getattr(arguments, step) or (arguments.all and step in STEPS)
    ]
    if not steps:
        raise ValueError(
            "no step given; use --all (all but --pack and --augment) or one of the steps in --help"
        )
    if arguments.ffmpeg:
        os.environ[FFMPEG_VARIABLE] = arguments.ffmpeg
    if "convert" in steps or "pack" in steps:
        # Searched for before hours of downloading, not after them.
        find_ffmpeg()
    # Every step makes only what is missing, so the same command resumes after a kill, and steps can
    # run on different machines with a common disk.
    job = VoxCelebJob(arguments)
    if arguments.part:
        part = parse_part(arguments.part)
        if steps != ["convert"]:
            raise ValueError(
                f"--part {part} works only with --convert; run the earlier steps on one machine "
                "first, and --lists on one machine when all parts are done"
            )
        return job.convert_part(part)
    with exclusive(arguments.save_path):
        if "lists" in steps and "convert" not in steps:
            job.refuse_unfinished()
        for step in steps:
            getattr(job, step)()
        return finish(job.summaries, arguments.save_path / "summary.txt")


class VoxCelebJob:
    """The arguments, the tables of sources and the summaries so far, with one method per step."""

    def __init__(self, arguments: Namespace) -> None:
        self.arguments = arguments
        self.root: Path = arguments.save_path
        self.lists_folder = self.root / "lists"
        self.num_jobs: int = arguments.num_jobs
        self.archives = PublicArchives("voxceleb", arguments)
        self.subsets = {name: SUBSETS[name] for name in arguments.subsets}
        self.parts = self.root / CONVERTED / arguments.format
        self.summaries: list[StepSummary] = []

    def begin(self, step: str, made: str = "made") -> StepSummary:
        summary = StepSummary(step, self.root, made)
        self.summaries.append(summary)
        return summary

    def audio_root(self, name: str, kind: str = "") -> Path:
        """Where the audio of a subset is as `kind` (aac, wav or flac; default: the format that
        training reads).
        """
        subset = SUBSETS[name]
        if not kind:
            kind = self.arguments.format if subset.is_aac else "wav"
        return self.root / subset.audio_folder / kind

    def download(self) -> None:
        archives = [subset.archive for subset in self.subsets.values()]
        self.archives.download(archives, self.begin("download", made="fetched"))

    def concatenate(self) -> None:
        archives = [subset.archive for subset in self.subsets.values()]
        keep = self.arguments.keep_parts
        self.archives.join(archives, self.begin("concatenate"), keep_pieces=keep)

    def extract(self) -> None:
        summary = self.begin("extract")
        for subset in self.subsets.values():
            self.archives.extract(subset.archive, self.root / subset.folder, summary)

    def augment(self) -> None:
        # --base_url is a mirror of VoxCeleb; these sets have their own addresses.
        arguments = Namespace(**vars(self.arguments) | {"base_url": None})
        self.summaries += musan.prepare(arguments) + rirs.prepare(arguments)

    def convert(self, part: WorkPart = WHOLE) -> None:
        """Convert the m4a files of VoxCeleb2, or one part of them, into a parallel tree."""
        summary = self.begin("convert" if part == WHOLE else f"convert_{part.name}")
        for name, subset in self.subsets.items():
            source_root = self.audio_root(name, "aac")
            if subset.is_aac and not source_root.is_dir():
                summary.add_broken(str(source_root), "does not exist; run --extract first")
            elif subset.is_aac:
                convert_all(
                    self._conversions(source_root, Folder(self.audio_root(name)), part),
                    self.arguments.format,
                    self.num_jobs,
                    summary,
                    keep_sources=not self.arguments.remove_originals,
                    description=f"convert {name}",
                )

    def _conversions(
        self, root: Path, target: Folder, part: WorkPart
    ) -> Iterator[tuple[Path, Path]]:
        """Source and target of each m4a file of the part."""
        for name in walk_files(root, {".m4a", ".aac", ".mp4"}):
            # Parts are assigned by name, because with --remove_originals other parts remove files
            # concurrently.
            if zlib.crc32(os.fsencode(name)) % part.count == part.number - 1:
                converted = Path(name).with_suffix(f".{self.arguments.format}").as_posix()
                yield root / name, target.path(converted)

    def convert_part(self, part: WorkPart) -> int:
        """Convert one part, and record that it is done."""
        # One lock per part: parts are converted at the same time in one tree.
        with exclusive(self.parts / f"{part.name}.work"):
            self.convert(part)
            # After a kill the part counts as missing, and --lists refuses to run.
            (self.parts / f"{part.name}{DONE}").touch()
        missing = missing_parts(parts_in(self.parts, DONE), self.parts)
        logger.info("parts still to be converted before --lists: %s", list_parts(missing) or "none")
        return finish(self.summaries, self.parts / f"{part.name}.summary.txt")

    def refuse_unfinished(self) -> None:
        """Raise PartError if parts of a conversion are missing; remove half-written files of killed
        parts.
        """
        # Nothing was converted in parts if there is none.
        done = parts_in(self.parts, DONE)
        if not done:
            return
        missing = missing_parts(done, self.parts)
        if missing:
            raise PartError(
                f"parts {list_parts(missing)} are not converted; run --convert --part for them "
                "first"
            )
        remove_leftovers(self.root)

    def lists(self) -> None:
        """Write the training lists, fetch the trial lists, print the next command.

        The recipes in configs/voxceleb refer to these files, so a renamed file must be renamed
        there too.
        """
        names = [name for name in self.subsets if self.audio_root(name).is_dir()]
        if not names:
            expected = ", ".join(str(self.audio_root(name)) for name in self.subsets)
            problem = (
                f"there is no audio in {expected}; run --extract and, for m4a files, --convert "
                "first, or move or link the speakers' folders (id…) there"
            )
            if not any(summary.broken for summary in self.summaries):
                # Nothing is made for a mistyped folder.
                raise ValueError(problem)
            self.begin("lists").add_broken(str(self.root), problem)
            return
        self._merge()
        listed = {name: self._write_list(name) for name in names}
        training = [name for name in TRAINING_SUBSETS if name in listed]
        if len(training) == len(TRAINING_SUBSETS):
            path = self.lists_folder / "vox1_vox2_dev_list.txt"
            write_training_list(path, self._pairs_below_root(listed, training))
            logger.info("%s: paths are relative to %s", path, self.root)
        self._provide_trial_lists()
        if training:
            sys.stdout.write(self.next_command(training) + "\n")

    def _merge(self) -> None:
        """Link both folders of VoxCeleb1 into one, as the E and H lists need; copy if links are
        impossible.
        """
        roots = [self.audio_root(name) for name in ("vox1_dev", "vox1_test")]
        roots = [root for root in roots if root.is_dir()]
        if not roots:
            return
        # Links take no space; some file systems, such as FAT, do not have them.
        summary = self.begin("merge")
        target = Folder(self.root / MERGED_FOLDER)
        for root in roots:
            for name in walk_files(root, {".wav", ".flac"}):
                path = root / name
                merged = target.path(name)
                # Compared by size, because a copy has its own inode.
                is_there = merged.exists() and merged.stat().st_size == path.stat().st_size
                if not is_there:
                    # Flushing each of 150,000 copies would take hours on a spinning disk.
                    place(path, merged, is_flushed=False)
                summary.add(not is_there, is_there)

    def _pairs_below_root(
        self, listed: Mapping[str, Utterances], names: list[str]
    ) -> Iterator[tuple[str, str]]:
        """(speaker, path) of several subsets, with paths relative to the target folder."""
        for name in names:
            prefix = self.audio_root(name).relative_to(self.root).as_posix()
            for speaker, path in listed[name].pairs():
                yield speaker, f"{prefix}/{path}"

    def _provide_trial_lists(self) -> None:
        """Fetch or copy the published trial lists, and count the files that they miss."""
        summary = self.begin("trial_lists")
        # --base_url is a mirror of the archives; the lists have a server of their own.
        changes = {"base_url": None, "save_path": self.lists_folder}
        arguments = Namespace(**vars(self.arguments) | changes)
        trials = PublicArchives("voxceleb_trials", arguments)
        files = trials.files
        if self.arguments.lists_from is None:
            trials.download(files, summary)
        else:
            _copy_lists(self.arguments.lists_from, Folder(self.lists_folder), files, summary)
        root = self.root / MERGED_FOLDER
        for path in (self.lists_folder / name for name in files):
            if not root.is_dir() or not path.is_file():
                continue
            names = read_trials(path).names
            # No table is cached: this only checks, once, whether the files exist.
            num_missing = len(FolderSource(root, keep_lookup=False).missing(names))
            level = logging.WARNING if num_missing else logging.INFO
            logger.log(level, "%s: %d of %d files are missing", path, num_missing, len(names))

    def _write_list(self, name: str) -> Utterances:
        root = self.audio_root(name)
        subset = SUBSETS[name]
        path = self.lists_folder / f"{name}_list.txt"
        # Headers are read for the list, so that a file with only a header never reaches training.
        summary = self.begin(f"list_{name}", made="listed")
        rows = map(row_by_folder, walk_files(root, {".wav", ".flac"}))
        listable = listable_rows(rows, summary)
        utterances, seconds = usable_utterances(listable, root, 0.0, self.num_jobs, summary)
        summary.add(made=len(utterances))
        write_training_list(path, utterances.pairs())
        if name in TRAINING_SUBSETS:
            # Interviews in both corpora have similar durations, so the list's own are drawn from.
            chosen, pairs = calibration_pairs(utterances, seconds, seconds, PairRules(), SEED)
            write_trials(self.lists_folder / f"{name}_calibration.txt", pairs.rows(chosen))
        listed = f"{len(utterances.speakers)} speakers and {len(utterances)} utterances"
        published = f"{subset.num_speakers} speakers and {subset.num_utterances} utterances"
        # Not refused: part of a corpus can be trained on, but its error rates do not compare with
        # published ones.
        level = logging.INFO if listed == published else logging.WARNING
        message = "%s: %s (published: %s); paths are relative to %s"
        logger.log(level, message, path, listed, published, root)
        return utterances

    def pack(self) -> None:
        """Pack every requested subset straight from its archives, and write the packed corpora's
        training lists.

        VoxCeleb1's two archives go into one corpus, as the E and H trial lists need both. Names are
        those of the published lists (`id10001/VIDEO/00001.wav`), even if the archive contains m4a.
        """
        for corpus, (subsets, num_leading_folders) in PACKED.items():
            requested = [name for name in subsets if name in self.subsets]
            if requested:
                folder = self.root / PACKED_FOLDER / corpus
                summary = self.begin(f"pack_{corpus}")
                self._pack_corpus(folder, requested, num_leading_folders, summary)

    def _pack_corpus(
        self, folder: Path, subsets: list[str], num_leading_folders: int, summary: StepSummary
    ) -> None:
        sources: list[Path] = []
        names: dict[str, list[str]] = {}
        for subset in subsets:
            paths = self._verified_sources(SUBSETS[subset].archive, summary)
            if not paths:
                return
            sources += paths
            members = open_inputs(paths, None, num_leading_folders).names
            names[subset] = [f"{member.rpartition('.')[0]}.wav" for member in members]
        # A packed corpus with its final name is complete; until then it is `<name>.partial`.
        if folder.is_dir():
            summary.add(skipped=len(PackedSource(folder).index.names))
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # The published lists have .wav names, but the archives of VoxCeleb2 have .m4a files.
            every_name = StringTable.from_strings(name for some in names.values() for name in some)
            inputs = open_inputs(sources, every_name, num_leading_folders)
            made = pack(
                inputs, folder, num_threads=self.num_jobs, skip_bad=True, show_progress=True
            )
            summary.add(made=made.num_utterances)
        skipped = folder / SKIPPED
        if skipped.is_file():
            for line in skipped.read_text("utf-8").splitlines():
                summary.add_broken(*line.split("\t", 1))
        packed = set(PackedSource(folder).index.names)
        for subset in set(subsets) & set(TRAINING_SUBSETS):
            path = self.lists_folder / f"{subset}_packed_list.txt"
            # Utterances that could not be decoded are not in the corpus, so they must not be in the
            # list.
            listed = sorted(packed.intersection(names[subset]))
            write_training_list(path, ((name.split("/", 1)[0], name) for name in listed))
            logger.info("%s: paths are relative to %s", path, folder)

    def _verified_sources(self, archive: str, summary: StepSummary) -> list[Path]:
        """The whole archive, or all of its parts, with correct checksums; empty if something is
        missing.
        """
        if self.archives.is_verified(archive):
            return [self.root / archive]
        pieces = self.archives.pieces(archive)
        bad = [piece for piece in pieces if not self.archives.is_verified(piece)]
        for piece in bad:
            summary.add_broken(piece, "missing, or its MD5 sum is wrong; run --download")
        return [] if bad else [self.root / piece for piece in pieces]

    def next_command(self, listed: list[str]) -> str:
        """The command that trains RECIPE on the prepared data, with options for inputs that are
        elsewhere.
        """
        # VoxCeleb2 if both are there, as in the recipes: none of its speakers is in VoxCeleb1's
        # trials.
        subset = max(listed, key=lambda name: SUBSETS[name].num_speakers)
        noise = self.root / "musan"
        rooms = self.root / rirs.SIMULATED_FOLDER
        if not noise.is_dir() or not rooms.is_dir():
            logger.info("noise or RIRs are missing; --augment fetches them")
        paths = (
            self.lists_folder / f"{subset}_list.txt",
            self.audio_root(subset),
            self.lists_folder / "veri_test2.txt",
            self.root / MERGED_FOLDER,
            noise,
            rooms,
        )
        words = [own_command("train"), "--config", RECIPE]
        for (option, usual), path in zip(RECIPE_INPUTS.items(), paths, strict=True):
            if path != Path(usual):
                words.append(f"--{option} {shlex.quote(str(path))}")
        return " ".join(words)


def _copy_lists(
    source: Path, folder: Folder, lists: Mapping[str, RemoteFile], summary: StepSummary
) -> None:
    """Copy the published lists found in `source` if they verify; others are not required."""
    for name, published in lists.items():
        path = source / name
        if not path.is_file():
            continue
        md5 = digest_of(path, "md5")
        if md5 != published.md5:
            summary.add_broken(str(path), f"MD5 sum {md5} instead of the published {published.md5}")
            continue
        # A copy, not a link: later changes to the user's file must not affect the verified one.
        with atomic_write(folder.path(name), "wb") as file:
            file.write(path.read_bytes())
        summary.add(made=1)
    if not summary.found:
        raise ValueError(f"{source} has none of the published lists ({', '.join(lists)})")
