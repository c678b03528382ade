"""The source at a path: a packed corpus, a Kaldi folder or a folder of audio files."""

import os
from pathlib import Path

import numpy as np

from speakernet.data.audio import SAMPLE_RATE, AudioError
from speakernet.data.lists import UTT2SPK, WAV_SCP, StringTable, read_wav_scp
from speakernet.data.lookup import LookupTable
from speakernet.data.packed import PackedSource, is_packed, partial_of
from speakernet.data.sources import AudioSource, FolderSource
from speakernet.files import is_address


def is_kaldi(folder: str | Path) -> bool:
    """Whether a folder's audio is named by utterance id."""
    return (Path(folder) / WAV_SCP).is_file()


def kaldi_advice(folder: str | Path) -> str:
    """What is missing if a folder has a Kaldi list of speakers but no list of files; empty for any
    other folder.
    """
    if is_kaldi(folder) or not (Path(folder) / UTT2SPK).is_file():
        return ""
    return (
        f"{folder} has {UTT2SPK} but no {WAV_SCP}, which names the file of each utterance; put it "
        "into the folder"
    )


class KaldiSource(FolderSource):
    """The recordings in a folder's `wav.scp`, by utterance id; relative file names start in the
    working directory.
    """

    def __init__(self, root: str | Path, sample_rate: int, *, show_progress: bool) -> None:
        """Read the folder's `wav.scp`; no audio is opened."""
        super().__init__(Path.cwd(), sample_rate, show_progress=show_progress)
        self._wav_scp = Path(root) / WAV_SCP
        self._index, self.files = read_wav_scp(root)
        self.names = self._index.names

    @property
    def place(self) -> str:
        """See `AudioSource.place`."""
        return str(self._wav_scp.resolve())

    def path_of(self, name: str) -> str:
        """See `AudioSource.path_of`."""
        (file,) = self._files_of(StringTable.from_strings([name]))
        return os.path.join(self.root, file) if file else ""  # noqa: PTH118

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """See `AudioSource.read`."""
        if not self.path_of(name):
            raise AudioError(self._lacks(name))
        return super().read(name, start, num_samples)

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        table = super()._look_up(names, num_threads)
        for row in np.flatnonzero(self._index.find(names) < 0).tolist():
            table.problems[row] = self._lacks(names[row])
        return table

    def _files_of(self, names: StringTable) -> StringTable:
        """The file of each utterance; empty if `wav.scp` does not have it."""
        # An unknown id has row -1, which gives an empty string.
        return super()._files_of(self.files.take(self._index.find(names)))

    def _lacks(self, name: str) -> str:
        return f"{self._wav_scp} has no utterance {name!r}"


def open_source(
    root: str | Path,
    sample_rate: int = SAMPLE_RATE,
    *,
    shard_cache_gigabytes: float | None = None,
    show_progress: bool = False,
) -> AudioSource:
    """The source at `root`: a packed corpus, here or at an address, a folder with a `wav.scp`, or a
    folder of files.
    """
    # The order matters: a packed corpus is a folder too, and as a folder of files its error would
    # be that there is no audio.
    if is_address(root):
        # Imported late: it loads fsspec, which a corpus on disk does not need.
        from speakernet.data.shards import RemoteSource

        return RemoteSource(str(root), sample_rate, shard_cache_gigabytes)
    path = Path(root)
    # A half-written corpus is not a folder of files either: opening it here raises the error.
    if is_packed(root) or (not path.exists() and partial_of(root).exists()):
        return PackedSource(root, sample_rate)
    if not path.exists():
        raise AudioError(
            f"{root}: no such folder or packed corpus; give the folder that the list's paths are "
            "relative to"
        )
    if not path.is_dir():
        raise AudioError(
            f"{root}: expected a folder of audio files or a packed corpus, found a file. Archives "
            "and lists of other toolkits are not read in place: `speakernet pack CORPUS --source "
            f"{root} --write-list LIST` makes a packed corpus of them"
        )
    folder_source = KaldiSource if is_kaldi(root) else FolderSource
    return folder_source(root, sample_rate, show_progress=show_progress)
