"""The archives of a public corpus in its target folder: download what is missing, join, verify,
unpack.

Every step does only what is missing, and counts what it did in a `StepSummary`.
"""

import itertools
import os
import urllib.parse
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

from speakernet.corpora.archives import extract, join_pieces
from speakernet.corpora.download import DownloadOptions, RemoteFile, download_all, has_md5
from speakernet.corpora.steps import Arguments, StepSummary
from speakernet.files import read_yaml_file, reading
from speakernet.options import lookup

CATALOGUE = Path(__file__).with_name("catalogue.yaml")
EXPECTED = "a table of corpora, each with 'files' (see catalogue.yaml)"
BYTES_PER_GIGABYTE = 1_000_000_000

DOWNLOAD_ARGUMENTS: Arguments = {
    **{
        f"--{name}": {
            "default": "",
            "help": f"{meaning}, never logged; better set SPEAKERNET_{name.upper()} in the "
            "environment, because other users can see command lines",
        }
        for name, meaning in (
            ("key", "access key"), ("user", "user name"), ("password", "password")
        )
    },
    "--base_url": {"help": "a mirror to fetch from instead; {name} is replaced by the file's name"},
    "--catalogue": {
        "type": Path,
        "help": "a table of sources instead of the shipped catalogue.yaml",
    },
    "--retries": {
        "type": int,
        "default": DownloadOptions.num_retries,
        "help": "consecutive attempts without a single byte before giving up",
    },
    "--timeout": {
        "type": float,
        "default": DownloadOptions.timeout_seconds,
        "help": "seconds without data before retrying",
    },
}  # fmt: skip
DOWNLOAD_FLAG: Arguments = {
    "--download": {"action": "store_true", "help": "fetch and unpack what is missing"}
}
#: Steps for the augmentation sets; all of them if none is given.
STEPS = ("download", "extract", "prepare")
STEP_ARGUMENTS: Arguments = {
    "--download": {
        "action": "store_true",
        "help": "fetch the archive unless it exists (default: all steps)",
    },
    "--extract": {"action": "store_true", "help": "unpack it"},
}


def requested_steps(arguments: Namespace) -> Sequence[str]:
    """The requested steps, in order; all of them if none is given."""
    return [step for step in STEPS if getattr(arguments, step)] or STEPS


class PublicArchives:
    """The archives of one corpus, by the catalogue and the command's options."""

    def __init__(self, name: str, arguments: Namespace) -> None:
        """Read the catalogue; secrets that are not on the command line come from the
        environment.
        """
        key, user, password = (
            getattr(arguments, secret) or os.environ.get(f"SPEAKERNET_{secret.upper()}", "")
            for secret in ("key", "user", "password")
        )
        self.folder: Path = arguments.save_path
        self.num_jobs: int = arguments.num_jobs
        self.options = DownloadOptions(
            arguments.retries, timeout_seconds=arguments.timeout, user=user, password=password
        )
        path = arguments.catalogue or CATALOGUE
        with reading(path, EXPECTED):
            catalogue = dict(read_yaml_file(path, EXPECTED))
        entry = lookup(catalogue, name, "corpus")
        with reading(path, EXPECTED):
            templates = entry.get("base_urls", [])
            if arguments.base_url:
                templates = [arguments.base_url]
            self.files: dict[str, RemoteFile] = {}
            for file_name, facts in entry["files"].items():
                # The key exists only as a part of addresses, which are never logged without
                # `shown_url`.
                self.files[file_name] = RemoteFile(
                    name=file_name,
                    urls=tuple(_address(template, file_name, key) for template in templates),
                    md5=facts.get("md5"),
                    num_bytes=int(facts.get("gigabytes", 0) * BYTES_PER_GIGABYTE),
                    access=entry.get("access", ""),
                )
            self.parts: dict[str, list[str]] = {}
            self._sums = {name: file.md5 for name, file in self.files.items()}
            for whole, facts in entry.get("joined", {}).items():
                self.parts[whole] = list(facts["parts"])
                self._sums[whole] = facts.get("md5")

    @property
    def archives(self) -> list[str]:
        """Every whole archive, published as one file or in pieces."""
        pieces = set(itertools.chain(*self.parts.values()))
        return [name for name in self.files if name not in pieces] + list(self.parts)

    def pieces(self, archive: str) -> list[str]:
        """The files that make an archive: its pieces, or itself."""
        return self.parts.get(archive, [archive])

    def is_verified(self, name: str) -> bool:
        """Whether an archive or a piece is in the folder with the published sum."""
        return has_md5(self.folder / name, self._sums[name])

    def download(self, archives: Iterable[str], summary: StepSummary) -> None:
        """Fetch archives that are present neither in pieces nor whole."""
        # Each piece is looked at by itself, because a killed run may have left some of them.
        missing = []
        for archive in archives:
            pieces = self.pieces(archive)
            # A verified whole archive needs no pieces, which were removed after joining.
            if self.is_verified(archive):
                summary.add(skipped=len(pieces))
            else:
                missing += [self.files[piece] for piece in pieces]
        download_all(missing, self.folder, self.num_jobs, self.options, summary)

    def join(
        self, archives: Iterable[str], summary: StepSummary, *, keep_pieces: bool = False
    ) -> None:
        """Join the archives that are published in pieces."""
        for archive in archives:
            if archive in self.parts:
                pieces = [self.folder / piece for piece in self.pieces(archive)]
                md5 = self._sums[archive]
                join_pieces(pieces, self.folder / archive, md5, summary, keep_pieces)

    def extract(self, archive: str, folder: Path, summary: StepSummary) -> None:
        """Unpack an archive if it exists and verifies; otherwise count it as broken."""
        path = self.folder / archive
        if not path.is_file():
            summary.add_broken(
                archive, f"does not exist; run with --download, or put it into {self.folder}"
            )
        # The user may have put the archive there, so it is not trusted because it exists.
        elif not self.is_verified(archive):
            summary.add_broken(archive, "its MD5 sum is wrong; remove it and run with --download")
        else:
            extract(path, folder, summary, self.num_jobs)


def _address(template: str, name: str, key: str) -> str:
    if "{name}" not in template:
        template = template.rstrip("/") + "/{name}"
    # Names and keys become part of an address, where `&` or `#` would change the request.
    template = template.replace("{name}", urllib.parse.quote(name, safe=""))
    return template.replace("{key}", urllib.parse.quote(key, safe=""))


def fetch(
    name: str,
    arguments: Namespace,
    steps: Sequence[str] = ("download", "extract"),
    archives: Sequence[str] | None = None,
) -> list[StepSummary]:
    """Download a corpus's archives (None: all) into the target folder, join those published in
    pieces, and unpack them there.
    """
    public = PublicArchives(name, arguments)
    archives = public.archives if archives is None else archives
    summaries = []
    if "download" in steps:
        summary = StepSummary(f"download_{name}", public.folder, made="fetched")
        public.download(archives, summary)
        if summary.broken == summary.found > 0:
            # The next steps would have nothing to unpack.
            raise ValueError("nothing could be fetched: " + "; ".join(summary.first_broken))
        summaries.append(summary)
    if "extract" in steps:
        summary = StepSummary(f"extract_{name}", public.folder)
        public.join(archives, summary)
        for archive in archives:
            public.extract(archive, public.folder, summary)
        summaries.append(summary)
    return summaries
