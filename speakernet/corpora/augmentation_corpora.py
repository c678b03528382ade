"""MUSAN and RIRS_NOISES from the archive to folders that augmentation reads: fetch, unpack, cut or trim."""

from collections.abc import Callable, Sequence
from pathlib import Path

from speakernet.corpora import verified
from speakernet.corpora.archives import extract
from speakernet.corpora.augmentation_sets import HOP_SECONDS, PIECE_SECONDS, prepare_responses, split_noise
from speakernet.corpora.catalogue import load_corpus
from speakernet.corpora.download import DownloadOptions, download_all
from speakernet.corpora.summary import StepSummary

ALL_STEPS = ("download", "extract", "prepare")


def fetch_and_extract(
    corpus_name: str,
    save_path: Path,
    options: DownloadOptions,
    num_jobs: int,
    steps: Sequence[str],
    *,
    files: Sequence[str] | None = None,
    base_url: str | None = None,
    catalogue_path: Path | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> list[StepSummary]:
    """Download a public corpus's archives into `save_path` and unpack them there, as far as `steps` asks for it."""
    corpus = load_corpus(corpus_name, base_url=base_url, catalogue_path=catalogue_path)
    chosen = [corpus.files[name] for name in (files or corpus.files)]
    summaries = []
    if "download" in steps:
        with StepSummary(f"download_{corpus_name}", save_path) as summary:
            download_all(chosen, save_path, num_jobs, options, summary)
        summaries.append(summary)
    if "extract" in steps:
        with StepSummary(f"extract_{corpus_name}", save_path) as summary:
            for file in chosen:
                archive = save_path / file.name
                if not archive.is_file():
                    summary.add_broken(file.name, f"is not there; run with --download, or put it into {save_path}")
                elif not verified.has_md5(archive, file.md5):
                    summary.add_broken(file.name, "its MD5 sum is wrong; remove it and run with --download")
                else:
                    extract(archive, save_path, summary, num_jobs, wanted)
        summaries.append(summary)
    return summaries


def prepare_musan(
    save_path: Path,
    options: DownloadOptions,
    num_jobs: int,
    steps: Sequence[str] = ALL_STEPS,
    *,
    piece_seconds: float = PIECE_SECONDS,
    hop_seconds: float = HOP_SECONDS,
    base_url: str | None = None,
    catalogue_path: Path | None = None,
) -> list[StepSummary]:
    """`musan/` and, cut into pieces, `musan_split/` below `save_path`."""
    summaries = fetch_and_extract(
        "musan", save_path, options, num_jobs, steps, base_url=base_url, catalogue_path=catalogue_path
    )
    if "prepare" in steps:
        if not (save_path / "musan").is_dir():
            raise ValueError(f"{save_path} holds no folder musan; run with --download and --extract, or put it there")
        with StepSummary("split_musan", save_path) as summary:
            split_noise(save_path / "musan", save_path / "musan_split", num_jobs, summary, piece_seconds, hop_seconds)
        summaries.append(summary)
    return summaries


def prepare_rirs(
    save_path: Path,
    options: DownloadOptions,
    num_jobs: int,
    steps: Sequence[str] = ALL_STEPS,
    *,
    base_url: str | None = None,
    catalogue_path: Path | None = None,
) -> list[StepSummary]:
    """`RIRS_NOISES/` below `save_path`, checked, its measured responses also as mono files."""
    summaries = fetch_and_extract(
        "rirs", save_path, options, num_jobs, steps, base_url=base_url, catalogue_path=catalogue_path
    )
    if "prepare" in steps:
        with StepSummary("prepare_rirs", save_path) as summary:
            prepare_responses(save_path, num_jobs, summary)
        summaries.append(summary)
    return summaries
