"""VoxCeleb1 and 2, from archive parts to lists: which file goes where, and the steps in order.

The layout is voxceleb_trainer's: voxceleb1/{dev,test}/wav/ID/VIDEO/N.wav and voxceleb2/dev/{aac,wav}/ID/VIDEO/N.*, so a
folder that its tool prepared is taken as it is. VoxCeleb1-E and -H draw from both folders of VoxCeleb1: they are merged
into voxceleb1/wav by links that take no space.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speakernet.corpora import verified
from speakernet.corpora.archives import extract, join_parts
from speakernet.corpora.catalogue import Corpus, RemoteFile
from speakernet.corpora.conversion import Conversion, ConversionOptions, convert_all
from speakernet.corpora.download import DownloadOptions, download_all
from speakernet.corpora.listing import listable_rows, usable_utterances
from speakernet.corpora.safe_paths import Folder
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import row_by_folder
from speakernet.corpora.walking import walk_files
from speakernet.data.lists import read_trials, write_training_list
from speakernet.data.sources import FolderSource
from speakernet.files import WorkPart, copy_whole, is_in_part, md5_of, place

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subset:
    """One published archive: where it unpacks to, and how much is in it (speakers, utterances) as published."""

    archive: str
    folder: str
    is_aac: bool
    num_speakers: int
    num_utterances: int


SUBSETS = {
    "vox1_dev": Subset("vox1_dev_wav.zip", "voxceleb1/dev", False, 1211, 148642),
    "vox1_test": Subset("vox1_test_wav.zip", "voxceleb1/test", False, 40, 4874),
    # Unpacked a folder higher than the others: this archive begins with `dev/` itself.
    "vox2_dev": Subset("vox2_dev_aac.zip", "voxceleb2", True, 5994, 1092009),
    "vox2_test": Subset("vox2_test_aac.zip", "voxceleb2/test", True, 118, 36237),
}
#: Where the audio of a subset lies once it is unpacked and converted.
AUDIO_FOLDERS = {
    "vox1_dev": "voxceleb1/dev/wav",
    "vox1_test": "voxceleb1/test/wav",
    "vox2_dev": "voxceleb2/dev/wav",
    "vox2_test": "voxceleb2/test/wav",
}
MERGED_FOLDER = "voxceleb1/wav"
TRAINING_SUBSETS = ("vox1_dev", "vox2_dev")


@dataclass
class VoxCelebJob:
    """The folder, the table of sources and what was asked for; each method is one step.

    Attributes:
        save_path: everything lies below it.
        corpus: the archives; `trial_lists` the lists.
        subsets: names in `SUBSETS`.
        num_jobs: files worked on at once.
        file_format: wav or flac, of what is converted.
    """

    save_path: Path
    corpus: Corpus
    trial_lists: Corpus
    subsets: Sequence[str]
    download: DownloadOptions
    num_jobs: int
    file_format: str = "wav"
    summaries: list[StepSummary] = field(default_factory=list)

    def fetch(self) -> None:
        """Download what is neither there in parts nor as a whole."""
        with self.step("download", made="fetched") as summary:
            wanted: list[RemoteFile] = []
            for whole, parts in self._archives():
                if self._is_done(whole):
                    summary.add_skipped(len(parts))
                else:
                    wanted += [self.corpus.files[part] for part in parts]
            download_all(wanted, self.save_path, self.num_jobs, self.download, summary)

    def concatenate(self, keep_parts: bool) -> None:
        """Join the parts of what is published in parts."""
        with self.step("concatenate") as summary:
            for whole, parts in self._archives():
                if whole not in self.corpus.joined:
                    continue
                paths = [self.save_path / part for part in parts]
                join_parts(paths, self.save_path / whole, self.corpus.joined[whole].md5, summary, keep_parts)

    def unpack(self) -> None:
        """Extract every archive that is there and whole."""
        with self.step("extract") as summary:
            for name in self.subsets:
                subset = SUBSETS[name]
                archive = self.save_path / subset.archive
                if not archive.is_file():
                    summary.add_broken(subset.archive, "is not there; run --download and --concatenate first")
                elif not self._is_done(subset.archive):
                    summary.add_broken(subset.archive, "its MD5 sum is wrong; remove it and run --download again")
                else:
                    extract(archive, self.save_path / subset.folder, summary, self.num_jobs)

    def convert(self, ffmpeg: str, keep_sources: bool, part: WorkPart | None = None) -> None:
        """Convert the m4a files of VoxCeleb2, or one part of them, into a tree beside theirs."""
        options = ConversionOptions(ffmpeg, self.file_format, keep_sources=keep_sources)
        with self.step("convert" if part is None else f"convert_{part.name}") as summary:
            for name in self.subsets:
                if SUBSETS[name].is_aac:
                    source_root = self.audio_root(name, "aac")
                    if not source_root.is_dir():
                        summary.add_broken(str(source_root), "is not there; run --extract first")
                        continue
                    convert_all(
                        self._conversions(source_root, part), options, self.num_jobs, summary, f"convert {name}"
                    )

    def merge(self) -> None:
        """Link both folders of VoxCeleb1 into one, as the lists of E and H need; copies where links cannot be."""
        sources = [self.save_path / AUDIO_FOLDERS[name] for name in ("vox1_dev", "vox1_test")]
        sources = [source for source in sources if source.is_dir()]
        if not sources:
            return
        target = Folder(self.save_path / MERGED_FOLDER)
        with self.step("merge") as summary:
            for source in sources:
                for name in walk_files(source, {".wav", ".flac"}):
                    merged = target.path(name)
                    if _is_same(source / name, merged):
                        summary.add_skipped()
                    else:
                        # A flush for each of 150,000 copies would take hours on a spinning disk.
                        place(source / name, merged, is_flushed=False)
                        summary.add_made()

    def lists(self, lists_from: Path | None) -> dict[str, Path]:
        """Write the training lists and bring the trial lists; returns the training lists by subset.

        The recipes in configs/voxceleb name these files: a name that changes here changes there.
        """
        written = {}
        folder = self.save_path / "lists"
        for name in self.subsets:
            root = self.audio_root(name, self.file_format if SUBSETS[name].is_aac else "wav")
            if not root.is_dir():
                continue
            path = folder / f"{name}_list.txt"
            # Headers are read for the list, so that a file of a header alone never reaches training.
            with self.step(f"list_{name}", made="listed") as summary:
                self._write_list(name, root, path, summary)
            if name in TRAINING_SUBSETS:
                written[name] = path
        if len(written) == len(TRAINING_SUBSETS):
            self._join_training_lists(written, folder / "vox1_vox2_dev_list.txt")
        self._bring_trials(folder, lists_from)
        return written

    def _write_list(self, name: str, root: Path, path: Path, summary: StepSummary) -> None:
        names = list(walk_files(root, {".wav", ".flac"}))
        rows = listable_rows((row_by_folder(one) for one in names), names, summary)
        utterances, _ = usable_utterances(rows, root, 0.0, self.num_jobs, summary)
        write_training_list(path, utterances.pairs(np.arange(len(utterances))))
        subset = SUBSETS[name]
        found = (len(utterances.speakers), len(utterances))
        # Said, not refused: part of a corpus trains, but its figures are not the published ones'.
        if found != (subset.num_speakers, subset.num_utterances):
            logger.warning(
                "%s: %d speakers and %d utterances, published are %d and %d",
                *(name, *found, subset.num_speakers, subset.num_utterances),
            )
        logger.info("%s: its paths start from %s", path, root)

    def _join_training_lists(self, written: dict[str, Path], path: Path) -> None:
        """One list over both training sets, paths relative to `save_path`."""

        def rows() -> Iterator[tuple[str, str]]:
            for name, one in written.items():
                prefix = self.audio_root(name, self.file_format if SUBSETS[name].is_aac else "wav")
                below = prefix.relative_to(self.save_path).as_posix()
                with one.open(encoding="utf-8") as file:
                    for line in file:
                        speaker, utterance = line.rstrip("\n").split(" ", 1)
                        yield speaker, f"{below}/{utterance}"

        write_training_list(path, rows())
        logger.info("%s: its paths start from %s", path, self.save_path)

    def _bring_trials(self, folder: Path, lists_from: Path | None) -> None:
        """Fetch the published trial lists, or take them from a folder, and compare them with the files that exist."""
        with self.step("trial_lists") as summary:
            if lists_from is not None:
                _copy_lists(lists_from, Folder(folder), self.trial_lists, summary)
            else:
                download_all(self.trial_lists.files.values(), folder, self.num_jobs, self.download, summary)
        root = self.save_path / MERGED_FOLDER
        if not root.is_dir():
            return
        # No table is kept: only the names are looked for, once.
        source = FolderSource(root, keep_lookup=False)
        for name in self.trial_lists.files:
            if (folder / name).is_file():
                trials = read_trials(folder / name)
                num_missing = len(source.missing(trials.names))
                log = logger.warning if num_missing else logger.info
                log("%s: %d trials, %d of %d files are missing", name, len(trials), num_missing, len(trials.names))

    def _archives(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        for name in self.subsets:
            archive = SUBSETS[name].archive
            joined = self.corpus.joined.get(archive)
            yield archive, joined.parts if joined else (archive,)

    def _is_done(self, archive: str) -> bool:
        joined = self.corpus.joined.get(archive)
        md5 = joined.md5 if joined else self.corpus.files[archive].md5
        return verified.has_md5(self.save_path / archive, md5)

    def audio_root(self, name: str, kind: str) -> Path:
        """Where the audio of a subset lies as `kind`: aac, wav or flac."""
        return self.save_path / AUDIO_FOLDERS[name].removesuffix("wav") / kind

    def _conversions(self, source_root: Path, part: WorkPart | None) -> Iterator[Conversion]:
        # Beside the m4a, not in their place: voxceleb_trainer's layout.
        target_root = Folder(source_root.parent / self.file_format)
        for name in walk_files(source_root, {".m4a", ".aac", ".mp4"}):
            # By its name: with --remove_originals the other parts take files away meanwhile.
            if part is not None and not is_in_part(name, part):
                continue
            target = target_root.path(Path(name).with_suffix(f".{self.file_format}").as_posix())
            yield Conversion(source_root / name, target)

    def step(self, name: str, made: str = "made") -> StepSummary:
        """Begin a step: its counts are kept for the summary."""
        summary = StepSummary(name, self.save_path, made)
        self.summaries.append(summary)
        return summary


def _copy_lists(source: Path, folder: Folder, lists: Corpus, summary: StepSummary) -> None:
    """Take the published lists that are in `source`, verified; others are not missed."""
    for name, file in lists.files.items():
        found = source / name
        if not found.is_file():
            continue
        md5 = md5_of(found)
        if md5 != file.md5:
            summary.add_broken(str(found), f"MD5 is {md5}, published is {file.md5}")
            continue
        target = folder.path(name)
        if target.is_file() and md5_of(target) == md5:
            summary.add_skipped()
            continue
        # A copy, not a link: what the user does to the own file later must not reach the verified one.
        copy_whole(found, target)
        summary.add_made()
    if not summary.found:
        raise ValueError(f"{source} holds none of the published lists ({', '.join(lists.files)})")


def _is_same(source: Path, target: Path) -> bool:
    try:
        left, right = source.stat(), target.stat()
    except FileNotFoundError:
        return False
    # One file where it could be linked; a copy has a number of its own and is known by its size.
    return left.st_ino == right.st_ino or left.st_size == right.st_size
