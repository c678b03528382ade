"""What lies at a path: a packed corpus or a folder of audio files. The door to both kinds of source."""

from pathlib import Path

from speakernet.data.audio import SAMPLE_RATE, AudioError
from speakernet.data.packed.corpus import PackedSource, is_packed, partial_of
from speakernet.data.sources import AudioSource, FolderSource


def open_source(root: str | Path, sample_rate: int = SAMPLE_RATE, **options: bool) -> AudioSource:
    """The source at `root`: a packed corpus where it is one, else a folder of files.

    Args:
        root: folder or packed corpus.
        sample_rate: Hz of everything read.
        options: `show_progress`, `keep_lookup` of `FolderSource`.

    Raises:
        AudioError: there is nothing at `root`.
    """
    # A corpus that is half written is none of files either: it says so itself.
    if is_packed(root) or (not Path(root).exists() and partial_of(root).exists()):
        return PackedSource(root, sample_rate)
    if not Path(root).exists():
        raise AudioError(
            f"{root}: no such folder or packed corpus; give the folder that the list's paths are relative to"
        )
    if not Path(root).is_dir():
        raise AudioError(f"{root}: expected a folder of audio files or a packed corpus, found a file")
    return FolderSource(root, sample_rate, **options)  # type: ignore[arg-type]
