"""A source of audio in which every recording is cut to its speech, for lists that are scored as
decisions are made.
"""

import functools
import logging
import weakref

import numpy as np
from numpy import ndarray

from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable
from speakernet.data.sources import AudioSource
from speakernet.data.speech import PIECE_SECONDS, find_speech, read_speech, sample_edges
from speakernet.files import parallel_map
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)

EXPECTED_SHARE = 0.02
"""Share of recordings without speech from which on it is a warning."""

# Kept for each source, because several lists share it and finding speech takes far longer than
# reading. Weak, so that the stretches are freed with the source.
_sources: "weakref.WeakKeyDictionary[AudioSource, SpokenSource]" = weakref.WeakKeyDictionary()


class SpokenSource(AudioSource):
    """The speech of another source's recordings; one without any speech stays whole, which is
    logged.

    Each recording is searched once, when its length or its samples are first needed.
    """

    def __init__(self, source: AudioSource) -> None:
        super().__init__(source.root, source.sample_rate)
        self.source = source
        self._edges: dict[str, ndarray] = {}

    @property
    def identity(self) -> str:
        """See `AudioSource.identity`."""
        return self.source.identity

    def edges_of(self, name: str) -> ndarray:
        """First and last + 1 sample of each stretch of speech, int64 (stretches, 2); (0, 2) without
        speech.
        """
        # Only the edges are kept, a few numbers for each recording; samples are read again for each
        # crop, because those of a long list would not fit into memory.
        if name not in self._edges:
            pieces = self.source.blocks(name, round(PIECE_SECONDS * self.sample_rate))
            self._edges[name] = sample_edges(
                find_speech(pieces, self.sample_rate), self.sample_rate
            )
        return self._edges[name]

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> ndarray:
        """Read a crop of the joined speech as float32 in -1..1, shape (samples,); shorter at its
        end.
        """
        edges = self.edges_of(name)
        if not len(edges):
            return self.source.read(name, start, num_samples)
        read = functools.partial(self.source.read, name)
        return read_speech(read, edges, start, num_samples)

    def path_of(self, name: str) -> str:
        """An utterance's file; empty if it does not have its own."""
        return self.source.path_of(name)

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        table = self.source.lookup_table(names, num_threads)
        # The source's own table must keep the lengths of the whole recordings.
        columns = {name: column.copy() for name, column in table.columns().items()}
        rows = [row for row in range(len(names)) if row not in table.problems]

        def search(row: int) -> ndarray:
            return self.edges_of(names[row])

        searched = parallel_map(search, rows, num_threads, "finding speech", total=len(rows))
        without = []
        for row, edges in zip(rows, searched, strict=True):
            if len(edges):
                columns["native_samples"][row] = np.diff(edges).sum()
                # Edges are counted at the requested rate, not at that of the file.
                columns["sample_rates"][row] = self.sample_rate
            else:
                without.append(names[row])
        if without:
            # A few recordings of a long list may well be empty.
            is_usual = len(without) < EXPECTED_SHARE * len(names)
            logger.log(
                logging.INFO if is_usual else logging.WARNING,
                "no speech was found in %d of %d recordings, which are used whole: %s",
                len(without),
                len(names),
                ", ".join(without[:MAX_NAMED]) + " …" * (len(without) > MAX_NAMED),
            )
        return LookupTable(self.sample_rate, columns, table.problems)


def cut_to_speech(source: AudioSource) -> SpokenSource:
    """The speech of a source; the same object each time, so that nothing is searched twice."""
    if isinstance(source, SpokenSource):
        return source
    if source not in _sources:
        _sources[source] = SpokenSource(source)
    return _sources[source]
