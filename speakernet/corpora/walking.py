"""Walk audio trees in sorted order with flat memory, and turn what is found into list rows."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from speakernet.corpora.summary import StepSummary

#: What soundfile reads itself; everything else that holds sound goes through ffmpeg.
READABLE_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au", ".sph"})
CONVERTIBLE_SUFFIXES = frozenset(
    {".m4a", ".aac", ".mp4", ".webm", ".wma", ".3gp", ".amr", ".mka", ".mkv", ".mov", ".caf"}
)


def walk_files(root: str | Path, suffixes: Iterable[str]) -> Iterator[str]:
    """Relative names (forward slashes) of the files below `root` with these suffixes, sorted folder by folder.

    Hidden files and folders (also half-written ones) are passed over; links to folders are followed once.

    Raises:
        ValueError: there is no such folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; give the folder that holds the audio")
    wanted = frozenset(suffixes)
    # A link that leads back to one of its own parents would never end.
    yield from _walk(root, "", wanted, (root.resolve(),))


def _walk(folder: Path, prefix: str, wanted: frozenset[str], parents: tuple[Path, ...]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir(), entry.is_symlink()) for entry in entries)
    for name, is_folder, is_link in found:
        if name.startswith("."):
            continue
        if not is_folder:
            if os.path.splitext(name)[1].lower() in wanted:  # noqa: PTH122 (a Path a file costs more than the walk)
                yield prefix + name
            continue
        if is_link and (folder / name).resolve() in parents:
            continue
        below = folder / name
        yield from _walk(below, f"{prefix}{name}/", wanted, (*parents, below.resolve()) if is_link else parents)


def listable(
    names: Iterable[str], speaker_of: Callable[[str], str | None], summary: StepSummary
) -> Iterator[tuple[str, str]]:
    """(speaker, name) of every name that a list can hold; the others are counted as broken, with the reason.

    Lists are text with one row a line, so a name with a line break or bytes that are no UTF-8 cannot be in one.
    """
    for name in names:
        speaker = speaker_of(name)
        problem = None
        if speaker is None:
            problem = "no speaker can be told from this name"
        elif not speaker or speaker.split() != [speaker]:
            problem = f"the speaker name {speaker!r} holds white space or is empty"
        else:
            problem = name_problem(name)
        if problem is None and speaker is not None:
            yield speaker, name
        else:
            summary.add_broken(name, problem or "")


def name_problem(name: str) -> str | None:
    r"""Why a path cannot stand in a list, or None.

    >>> name_problem("a b/c.wav") is None
    True
    """
    if len(name.splitlines()) != 1 or "\t" in name:
        return "the name holds a line break or a tab, which a list cannot hold; rename it"
    if name != name.strip():
        return "the name begins or ends with white space, which a list cannot hold; rename it"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "the name is not UTF-8 text, which a list cannot hold; rename it"
    return None


def speaker_is_folder(depth: int = 0) -> Callable[[str], str | None]:
    """A rule for `listable`: the speaker is the folder at `depth` below the root.

    >>> speaker_is_folder()("id1/video/1.wav")
    'id1'
    """

    def speaker_of(name: str) -> str | None:
        parts = name.split("/")
        return parts[depth] if depth < len(parts) - 1 else None

    return speaker_of


def one_word(speaker: str) -> str:
    """The speaker's name with white space turned to underscores, since a list ends the speaker at white space.

    >>> one_word("Anna Maria")
    'Anna_Maria'
    """
    return "_".join(speaker.split())
