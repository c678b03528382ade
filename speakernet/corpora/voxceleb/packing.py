"""VoxCeleb straight from its archives (whole or in parts) into packed corpora, with their lists; no WAV tree is made.

VoxCeleb1's dev and test archives go into one corpus, as the trial lists of E and H need both. Names are those of the
published lists (`id10001/VIDEO/00001.wav`), also where the archive holds m4a.
"""

import logging
from pathlib import Path

from speakernet.corpora import verified
from speakernet.corpora.pack_inputs import open_inputs
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.voxceleb.steps import SUBSETS, TRAINING_SUBSETS, VoxCelebJob
from speakernet.data.lists import StringTable, write_training_list
from speakernet.data.packed import PackedSource
from speakernet.data.packing import SKIPPED, pack

logger = logging.getLogger(__name__)

PACKED_FOLDER = "packed"
#: Packed corpus -> the subsets in it.
CORPORA = {"vox1": ("vox1_dev", "vox1_test"), "vox2_dev": ("vox2_dev",), "vox2_test": ("vox2_test",)}
#: Folders above the speakers' in each archive.
STRIPPED_FOLDERS = {"vox1_dev": 1, "vox1_test": 1, "vox2_dev": 2, "vox2_test": 1}


def pack_archives(job: VoxCelebJob, ffmpeg: str) -> dict[str, Path]:
    """Pack every subset asked for and write the packed corpora's training lists; returns the corpora's folders."""
    packed = {}
    for corpus, subsets in CORPORA.items():
        wanted = [name for name in subsets if name in job.subsets]
        if wanted:
            with job.step(f"pack_{corpus}") as summary:
                folder = _pack_corpus(job, corpus, wanted, summary, ffmpeg)
            if folder is not None:
                packed[corpus] = folder
    return packed


def _pack_corpus(job: VoxCelebJob, corpus: str, subsets: list[str], summary: StepSummary, ffmpeg: str) -> Path | None:
    folder = job.save_path / PACKED_FOLDER / corpus
    sources: list[Path] = []
    names: dict[str, list[str]] = {}
    for name in subsets:
        found = _verified_sources(job, name, summary)
        if not found:
            return None
        sources += found
        members = open_inputs(found, None, STRIPPED_FOLDERS[name]).names
        names[name] = [f"{member.rpartition('.')[0]}.wav" for member in members]
    # Under its final name a packed corpus is whole: until then it is `<name>.partial`.
    if folder.is_dir():
        packed_names = set(PackedSource(folder).index.names)
        summary.add_skipped(len(packed_names))
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        wanted = StringTable.from_strings(one for some in names.values() for one in some)
        strip = STRIPPED_FOLDERS[subsets[0]]
        made = pack(
            open_inputs(sources, wanted, strip, ffmpeg),
            folder,
            num_threads=job.num_jobs,
            skip_bad=True,
            show_progress=True,
        )
        summary.add_made(made.num_utterances)
        packed_names = set(PackedSource(folder).index.names)
    skipped = folder / SKIPPED
    if skipped.is_file():
        for line in skipped.read_text(encoding="utf-8").splitlines():
            name, _, reason = line.partition("\t")
            summary.add_broken(name, reason)
    for name in subsets:
        path = job.save_path / "lists" / f"{name}_packed_list.txt"
        if name in TRAINING_SUBSETS:
            # What could not be decoded was left out of the corpus, so it must not stand in the list.
            rows = sorted(one for one in names[name] if one in packed_names)
            write_training_list(path, ((one.split("/", 1)[0], one) for one in rows))
            logger.info("%s: its paths start from %s", path, folder)
    return folder


def _verified_sources(job: VoxCelebJob, name: str, summary: StepSummary) -> list[Path]:
    """The whole archive, or all of its parts, with the right sums; none where something is missing."""
    archive = SUBSETS[name].archive
    joined = job.corpus.joined.get(archive)
    md5 = joined.md5 if joined else job.corpus.files[archive].md5
    whole = job.save_path / archive
    if verified.has_md5(whole, md5):
        return [whole]
    parts = joined.parts if joined else (archive,)
    bad = [part for part in parts if not verified.has_md5(job.save_path / part, job.corpus.files[part].md5)]
    for part in bad:
        summary.add_broken(part, "is not there, or its MD5 sum is wrong; run --download")
    return [] if bad else [job.save_path / part for part in parts]
