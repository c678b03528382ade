"""What the scripts of the public corpora share: their options, the download, and the last words."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from speakernet.corpora import verified
from speakernet.corpora.archives import extract, join_parts
from speakernet.corpora.augmentation_corpora import fetch_and_extract
from speakernet.corpora.catalogue import load_corpus
from speakernet.corpora.corpora import CorpusOptions
from speakernet.corpora.download import download_all
from speakernet.corpora.listing import ListFiles
from speakernet.corpora.recipe import next_command, write_recipe
from speakernet.corpora.scripts import DEFAULT_SEED, download_options, positive_int
from speakernet.corpora.summary import StepSummary, finish

logger = logging.getLogger(__name__)


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of lists, split and trials."""
    parser.add_argument("--validation_share", type=float, default=0.1, help="of the speakers, where a split is drawn")
    parser.add_argument("--test_share", type=float, default=0.1, help="of the speakers, where a split is drawn")
    parser.add_argument("--targets_per_speaker", type=positive_int, default=50, help="most target trials a speaker")
    parser.add_argument("--same_gender", action="store_true", help="leave out the easy trials across genders")
    parser.add_argument("--min_seconds", type=float, default=0.5, help="shorter utterances are left out")
    parser.add_argument("--min_utterances", type=positive_int, default=1, help="speakers with fewer are not trained on")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of the split and the trials")


def corpus_options(arguments: argparse.Namespace, name: str) -> CorpusOptions:
    """The options that were given; lists go to `NAME_lists` below the corpus's folder."""
    return CorpusOptions(
        root=arguments.save_path,
        save_path=arguments.save_path / f"{name}_lists",
        num_jobs=arguments.jobs,
        seed=arguments.seed,
        min_seconds=arguments.min_seconds,
        validation_share=arguments.validation_share,
        test_share=arguments.test_share,
        targets_per_speaker=arguments.targets_per_speaker,
        same_gender=arguments.same_gender,
        min_utterances=arguments.min_utterances,
    )


def download_corpus(
    name: str, arguments: argparse.Namespace, options: CorpusOptions, files: Sequence[str] | None
) -> list[StepSummary]:
    """Fetch and unpack a corpus that is published in whole archives."""
    return fetch_and_extract(
        name,
        options.root,
        download_options(arguments),
        options.num_jobs,
        ("download", "extract"),
        files=files,
        base_url=arguments.base_url,
        catalogue_path=arguments.catalogue,
    )


def download_joined(name: str, arguments: argparse.Namespace, options: CorpusOptions) -> list[StepSummary]:
    """Fetch, join and unpack a corpus of which some archives are published in parts."""
    corpus = load_corpus(name, base_url=arguments.base_url, catalogue_path=arguments.catalogue)
    done = [one for one in corpus.joined.values() if verified.has_md5(options.root / one.name, one.md5)]
    finished = {part for one in done for part in one.parts}
    with StepSummary(f"download_{name}", options.root) as download:
        wanted = [file for file in corpus.files.values() if file.name not in finished]
        download_all(wanted, options.root, options.num_jobs, download_options(arguments), download)
    with StepSummary(f"join_{name}", options.root) as join:
        for one in corpus.joined.values():
            join_parts([options.root / part for part in one.parts], options.root / one.name, one.md5, join)
    parts = {part for one in corpus.joined.values() for part in one.parts}
    with StepSummary(f"extract_{name}", options.root) as unpack:
        sums = {name: file.md5 for name, file in corpus.files.items() if name not in parts}
        sums |= {name: joined.md5 for name, joined in corpus.joined.items()}
        for archive, md5 in sums.items():
            if verified.has_md5(options.root / archive, md5):
                extract(options.root / archive, options.root, unpack, options.num_jobs)
            else:
                unpack.add_broken(archive, "is not there, or has the wrong MD5 sum; see the download's errors")
    return [download, join, unpack]


def finish_corpus(lists: ListFiles, summaries: Sequence[StepSummary], options: CorpusOptions) -> int:
    """Write the configuration, say the next command, and give the exit code."""
    config = options.save_path / f"{options.save_path.name.removesuffix('_lists')}.yaml"
    write_recipe(config, options.root, lists)
    code = finish(summaries, options.save_path / "summary.txt")
    logger.info("lists: %s (their paths start from %s)", options.save_path, Path(options.root))
    sys.stdout.write(next_command(config) + "\n")
    return code
