"""Say which published trial list a file is, so that a figure is compared with its own kind.

Original and cleaned VoxCeleb1 lists differ by a sixth of the error rate; nobody sees it from the file's name. A list is
known by the MD5 of the published file, else by its content in a normal form (VoxCeleb1-O, whose lists were at hand),
else by its numbers of trials and targets and its names, and the answer says by which.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.files import md5_of


@dataclass(frozen=True)
class PublishedList:
    """Facts of a published list.

    Attributes:
        name: as people call it.
        num_trials: in all.
        num_targets: of them.
        md5: of the published file.
        normal_form_sha256: of `_normal_form`, layout and file endings left out; empty where it is not known.
        confused_with: what it is often taken for, as a sentence.
    """

    name: str
    num_trials: int
    num_targets: int
    md5: str
    normal_form_sha256: str
    confused_with: str


def _cleaned_note(other: str, num_trials: int) -> str:
    return f"often confused with {other} ({num_trials:,} trials); their error rates must not be compared"


# Counts and MD5 sums: the corpus's own page, http://www.robots.ox.ac.uk/~vgg/data/voxceleb/. The sums of the normal
# form were computed from the published files of VoxCeleb1-O; those of E and H were not at hand.
PUBLISHED = (
    PublishedList(
        "VoxCeleb1-O, original",
        37720,
        18860,
        "29fc7cc1c5d59f0816dc15d6e8be60f7",
        "933fa89593c5814fae4183b1bda4ca567139e048d483d8673fa24c7eb642ff06",
        _cleaned_note("VoxCeleb1-O, cleaned", 37611),
    ),
    PublishedList(
        "VoxCeleb1-O, cleaned",
        37611,
        18802,
        "b73110731c9223c1461fe49cb48dddfc",
        "4624b63da6b55bcc232e4dd77ff42a34e51732d5d7cdf1f1c952bb511f56268d",
        _cleaned_note("VoxCeleb1-O, original", 37720),
    ),
    PublishedList(
        "VoxCeleb1-E, original",
        581480,
        290743,
        "b9ecf7aa49d4b656aa927a8092844e4a",
        "",
        _cleaned_note("VoxCeleb1-E, cleaned", 579818),
    ),
    PublishedList(
        "VoxCeleb1-E, cleaned",
        579818,
        289921,
        "a53e059deb562ffcfc092bf5d90d9f3a",
        "",
        _cleaned_note("VoxCeleb1-E, original", 581480),
    ),
    PublishedList(
        "VoxCeleb1-H, original",
        552536,
        276270,
        "21c341b6b2168eea2634df0fb4b8fff1",
        "",
        _cleaned_note("VoxCeleb1-H, cleaned", 550894),
    ),
    PublishedList(
        "VoxCeleb1-H, cleaned",
        550894,
        275488,
        "857790e09d579a68eb2e339a090343c8",
        "",
        _cleaned_note("VoxCeleb1-H, original", 552536),
    ),
)
VOXCELEB_NAME = re.compile(r"(?:.*/)?(id1\d{4}/[\w-]{11}/\d{5})(?:\.\w+)?")
"""Speaker, video and clip of a VoxCeleb1 utterance, in any folder and with any file ending."""


@dataclass(frozen=True)
class ListIdentity:
    """Which published list a trial list is.

    Attributes:
        name: of the published list; empty when it is none that is known.
        sentence: what it is and how it was recognised; empty as well.
        confused_with: what it is often taken for.
    """

    name: str = ""
    sentence: str = ""
    confused_with: str = ""


def list_identity(trials: TrialList) -> ListIdentity:
    """Recognise a trial list by hash of the file, else of its content, else by counts and names."""
    path, size = Path(trials.source), f"{len(trials):,} trials"
    alike = [one for one in PUBLISHED if one.num_trials == len(trials)]
    if not alike:
        return ListIdentity()
    # No two published lists have as many trials, which this line holds.
    (published,) = alike
    if path.is_file() and md5_of(path) == published.md5:
        return _known(published, f"this is {published.name}, {size}, as published")
    if trials.labels is None:
        text = f"as many pairs as {published.name} ({size}), without labels to tell more"
        return _known(published, text)
    num_targets = int(np.count_nonzero(trials.labels))
    if num_targets != published.num_targets:
        text = f"as many trials as {published.name} ({size}), but {num_targets:,} targets in place of "
        return ListIdentity("", f"{text}{published.num_targets:,}: not that list as published")
    content = _normal_form_sha256(trials)
    if content and content == published.normal_form_sha256:
        return _known(published, f"this is {published.name}, {size}, the published trials in another layout")
    if not content:
        text = f"as many trials and targets as {published.name} ({size}), but other names than VoxCeleb1's"
        return ListIdentity("", text)
    if published.normal_form_sha256:
        text = f"as many trials and targets as {published.name} ({size}), but other trials, or in another order"
        return ListIdentity("", text, published.confused_with)
    text = (
        f"most likely {published.name}: {size}, its number of targets and VoxCeleb1's names; the order is not checked"
    )
    return _known(published, text)


def identify_trials(trials: TrialList) -> str:
    """A sentence on which published list this is; empty when it is none that is known."""
    found = list_identity(trials)
    return "; ".join(part for part in (found.sentence, found.confused_with) if part)


def _known(published: PublishedList, sentence: str) -> ListIdentity:
    return ListIdentity(published.name, sentence, published.confused_with)


def _normal_form_sha256(trials: TrialList) -> str:
    """SHA-256 of `label speaker/video/clip speaker/video/clip` lines; empty when a name is not VoxCeleb1's."""
    found = [VOXCELEB_NAME.fullmatch(name) for name in trials.names]
    names = [one.group(1) for one in found if one is not None]
    if len(names) != len(found) or trials.labels is None:
        return ""
    digest = hashlib.sha256()
    for label, enrol, test in zip(trials.labels.tolist(), trials.enrol.tolist(), trials.test.tolist(), strict=True):
        digest.update(f"{label} {names[enrol]} {names[test]}\n".encode())
    return digest.hexdigest()
