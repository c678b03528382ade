"""The archives of a public corpus in its target folder: download what is missing, join, verify,
unpack.

Every step does only what is missing, and counts what it did in a `StepSummary`.
"""

import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from speakernet.corpora.archives import extract, join_pieces
from speakernet.corpora.download import CATALOGUE, download_all, has_md5, load_corpus
from speakernet.corpora.steps import StepSummary

DOWNLOAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "--key": {
        "default": "",
        "help": "access key, never logged; better set SPEAKERNET_KEY in the environment, because "
        "other users can see command lines",
    },
    "--base_url": {"help": "a mirror to fetch from instead; {name} is replaced by the file's name"},
    "--catalogue": {
        "type": Path,
        "default": CATALOGUE,
        "help": "a table of sources instead of the shipped one",
    },
}
DOWNLOAD_FLAG: dict[str, dict[str, Any]] = {
    "--download": {"action": "store_true", "help": "fetch and unpack what is missing"}
}


class PublicArchives:
    """The archives of one corpus, by the catalogue and the command's options."""

    def __init__(self, name: str, arguments: Namespace) -> None:
        """Read the catalogue; a key that is not on the command line comes from the environment."""
        key = arguments.key or os.environ.get("SPEAKERNET_KEY", "")
        self.corpus = load_corpus(
            name, key=key, base_url=arguments.base_url, catalogue=arguments.catalogue
        )
        self.folder: Path = arguments.save_path
        self.num_jobs: int = arguments.num_jobs

    def is_verified(self, name: str) -> bool:
        """Whether an archive or a piece is in the folder with the published sum."""
        return has_md5(self.folder / name, self.corpus.sums[name])

    def download(self, archives: Iterable[str], summary: StepSummary) -> None:
        """Fetch archives that are present neither in pieces nor whole."""
        # Pieces are asked for one by one, because a run that was killed has some of them.
        missing = []
        for archive in archives:
            pieces = self.corpus.pieces(archive)
            # A verified whole archive needs no pieces, which were removed after joining.
            if self.is_verified(archive):
                summary.add(skipped=len(pieces))
            else:
                missing += [self.corpus.files[piece] for piece in pieces]
        download_all(missing, self.folder, self.num_jobs, summary)

    def join(self, archives: Iterable[str], summary: StepSummary) -> None:
        """Join the archives that are published in pieces."""
        for archive in archives:
            if archive in self.corpus.joined:
                pieces = [self.folder / piece for piece in self.corpus.pieces(archive)]
                join_pieces(pieces, self.folder / archive, self.corpus.sums[archive], summary)

    def extract(self, archive: str, folder: Path, summary: StepSummary) -> None:
        """Unpack an archive if it exists and verifies; otherwise count it as broken."""
        path = self.folder / archive
        if not path.is_file():
            summary.add_broken(
                archive, f"does not exist; run with --download, or put it into {self.folder}"
            )
        elif not self.is_verified(archive):
            summary.add_broken(archive, "its MD5 sum is wrong; remove it and run with --download")
        else:
            extract(path, folder, summary, self.num_jobs)


def fetch(
    name: str, arguments: Namespace, archives: Sequence[str] | None = None
) -> list[StepSummary]:
    """Download a corpus's archives (None: all) into the target folder, join those published in
    pieces, and unpack them there.
    """
    public = PublicArchives(name, arguments)
    archives = public.corpus.archives if archives is None else archives
    fetched = StepSummary(f"download_{name}", public.folder, made="fetched")
    public.download(archives, fetched)
    if fetched.broken == fetched.found > 0:
        # There is nothing to unpack, and "does not exist" for each archive would hide the reason.
        raise ValueError("nothing could be fetched: " + "; ".join(fetched.first_broken))
    unpacked = StepSummary(f"extract_{name}", public.folder)
    public.join(archives, unpacked)
    for archive in archives:
        public.extract(archive, public.folder, unpacked)
    return [fetched, unpacked]
