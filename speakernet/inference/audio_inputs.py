"""What a person names on a command line as audio: files, folders, lists, packed corpora, names on standard input."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from speakernet.data.audio import AUDIO_SUFFIXES, AudioError
from speakernet.data.lists import ListError, StringTable
from speakernet.data.opening import KaldiSource, is_kaldi, open_source
from speakernet.data.packed import PackedSource, is_packed
from speakernet.data.sources import AudioSource, FolderSource
from speakernet.files import open_text, reading

LIST_SUFFIXES = ("", ".txt", ".lst", ".list", ".scp")
STANDARD_INPUT = "-"
LIST_FORM = "a list of audio files, `path` or `speaker path` a line"


@dataclass(frozen=True)
class AudioInputs:
    """Recordings that were named, and where they lie.

    Attributes:
        source: reads them by name.
        names: each once, in the order in which they were named.
    """

    source: AudioSource
    names: StringTable


def audio_inputs(given: Sequence[str], sample_rate: int, lines: Iterable[str] = ()) -> AudioInputs:
    """Find every recording that is meant.

    Args:
        given: files, folders (walked), lists, `-` for names on standard input, or one packed corpus or Kaldi folder.
        sample_rate: Hz of everything read.
        lines: of standard input.

    Raises:
        AudioError: nothing there, no audio in a folder, or a corpus beside something else.
        ListError: a list that names no files.
    """
    corpora = [one for one in given if Path(one).is_dir() and (is_packed(one) or is_kaldi(one))]
    if corpora and len(given) > 1:
        raise AudioError(f"{corpora[0]} is a corpus of its own; give it alone")
    if corpora:
        source = open_source(corpora[0], sample_rate)
        assert isinstance(source, PackedSource | KaldiSource), "only these two are corpora"
        return AudioInputs(source, source.index.names if isinstance(source, PackedSource) else source.names)
    names = dict.fromkeys(name for one in given for name in _files_of(one, lines))
    if not names:
        raise AudioError("no audio was named; give files, folders, lists of files, or - for names on standard input")
    # Lookup tables of a handful of files are not worth keeping.
    return AudioInputs(FolderSource(".", sample_rate, keep_lookup=False), StringTable.from_strings(names))


def _files_of(given: str, lines: Iterable[str]) -> Iterator[str]:
    """The files that one argument means."""
    path = Path(given)
    if given == STANDARD_INPUT:
        yield from _listed(lines, "standard input", Path())
    elif path.is_dir():
        found = sorted(str(one) for one in path.rglob("*") if one.suffix.lower() in AUDIO_SUFFIXES and one.is_file())
        if not found:
            raise AudioError(f"{path}: no audio in this folder; expected files that end in {', '.join(AUDIO_SUFFIXES)}")
        yield from found
    elif path.suffix.lower() in LIST_SUFFIXES:
        with reading(path, LIST_FORM, ListError), open_text(path) as file:
            yield from _listed(file.read().splitlines(), str(path), path.parent)
    else:
        # What is wrong with a file, or that it is missing, is said by whoever reads it.
        yield given


def _listed(lines: Iterable[str], where: str, folder: Path) -> Iterator[str]:
    """Files that a list names, beside it or from the working directory."""
    for number, line in enumerate(lines, start=1):
        words = line.strip()
        if not words:
            continue
        # The whole line first: a path may hold spaces.
        candidates = [words, *words.split(maxsplit=1)[1:]]
        found = [str(place) for one in candidates for place in (folder / one, Path(one)) if place.is_file()]
        if not found:
            raise ListError(
                f"{where}, line {number}: {words[:200]!r} is no file here or in {folder}; expected {LIST_FORM}"
            )
        yield found[0]
