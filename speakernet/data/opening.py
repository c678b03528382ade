"""What lies at a path: a packed corpus, a Kaldi folder or a folder of audio files. The door to every kind of source."""

from pathlib import Path

from speakernet.data.audio import SAMPLE_RATE, AudioError
from speakernet.data.kaldi import KaldiSource, is_kaldi
from speakernet.data.packed.corpus import PackedSource, is_packed, partial_of
from speakernet.data.sources import AudioSource, FolderSource


def open_source(root: str | Path, sample_rate: int = SAMPLE_RATE, **options: bool) -> AudioSource:
    """The source at `root`: a packed corpus, a folder whose `wav.scp` names utterances, else a folder of files.

    Args:
        root: folder, packed corpus or Kaldi folder.
        sample_rate: Hz of everything read.
        options: `show_progress`, `keep_lookup` of `FolderSource`.

    Raises:
        AudioError: there is nothing at `root`.
        ListError: a `wav.scp` that cannot be used.
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
    if is_kaldi(root):
        return KaldiSource(root, sample_rate, **options)
    return FolderSource(root, sample_rate, **options)  # type: ignore[arg-type]
