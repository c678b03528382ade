"""Many recordings into one file of embeddings, with progress, going on where a killed run was."""

import functools
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.evaluation.embedding import embed_utterances
from speakernet.evaluation.embedding_store import load_embeddings, save_embeddings, store_key
from speakernet.evaluation.options import EmbeddingOptions
from speakernet.files import WHOLE, WorkPart, atomic_write, check_writable, share
from speakernet.inference.recordings import AudioInputs
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.terminal import MAX_NAMED, Bar

logger = logging.getLogger(__name__)

BLOCK_UTTERANCES = 64
"""So many are kept at a time: what a kill loses."""
PARTS_SUFFIX = ".parts"
WAY = {"embedding": "whole", "wrapped": False}


@dataclass(frozen=True)
class Embedded:
    """What came of it.

    Attributes:
        num_embedded: recordings in the file.
        num_kept: of these, how many an earlier run had embedded.
        problems: what was left out, a sentence each.
    """

    num_embedded: int
    num_kept: int
    problems: tuple[str, ...]
    missing: tuple[WorkPart, ...] = ()
    """Parts that are not done, so that there is no file yet."""


def embed_files(
    verifier: SpeakerVerifier,
    inputs: AudioInputs,
    out: Path,
    *,
    skips_broken: bool = False,
    part: WorkPart = WHOLE,
) -> Embedded:
    """Write `names`, `embeddings` (recordings, dim) and `fingerprint` as a `.npz` of plain arrays.

    Args:
        verifier: the model.
        inputs: recordings and where they lie.
        out: the file, which appears when it is whole; until then parts lie in a folder beside it.
        skips_broken: leave out recordings that cannot be embedded, else the first such block is an error.
        part: which of the blocks are embedded now; the file is written once all are there.

    Raises:
        ValueError: recordings that cannot be embedded (the first ten are named), another ending than `.npz`, or a
            place where nothing can be written.
    """
    if out.suffix != ".npz":
        raise ValueError(f"--out {out}: expected a file that ends in .npz")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; give a file in it")
    check_writable(out)
    source = inputs.source
    table = source.lookup_table(inputs.names)
    is_short = np.asarray(table.num_samples) < verifier.net.min_samples
    problems = {int(row): _of(inputs.names[row], text) for row, text in table.problems.items()}
    for row in np.flatnonzero(is_short).tolist():
        problems.setdefault(row, f"{inputs.names[row]}: too short, {table.num_samples[row] / source.sample_rate:.3f} s")
    if problems and not skips_broken:
        shown = "; ".join(problems[row] for row in sorted(problems)[:MAX_NAMED])
        raise AudioError(
            f"{len(problems)} of {len(inputs.names)} recordings cannot be embedded (--skip-broken leaves them out): "
            f"{shown}{' …' if len(problems) > MAX_NAMED else ''}"
        )
    rows = np.array([row for row in range(len(inputs.names)) if row not in problems], dtype=np.int64)
    parts = out.with_name(out.name + PARTS_SUFFIX)
    num_kept, texts = 0, [problems[row] for row in sorted(problems)]
    blocks = [
        _Block(verifier, source, inputs.names.take(rows[start : start + BLOCK_UTTERANCES]), parts / f"{number:06d}.npz")
        for number, start in enumerate(range(0, len(rows), BLOCK_UTTERANCES))
    ]
    own = share(blocks, part.number, part.count)
    with Bar("embedding", sum(len(block.names) for block in own), "utterance") as bar:
        for block in own:
            num_kept += block.find_or_embed(texts if skips_broken else None) * len(block.names)
            bar.update(len(block.names))
    missing = _missing(blocks, part.count)
    if missing:
        return Embedded(0, num_kept, tuple(texts), missing)
    found = [block.kept() for block in blocks]
    return _write(verifier, out, inputs.names.take(rows), found, num_kept, texts, is_tidy=part.is_whole)


def _of(name: str, problem: str) -> str:
    """A problem with the name of its recording, which most of them say themselves."""
    return problem if name in problem else f"{name}: {problem}"


def _missing(blocks: Sequence["_Block"], count: int) -> tuple[WorkPart, ...]:
    """The parts of which a block is not there; all that is known of the others' is the files that they left."""
    parts = (WorkPart(number, count) for number in range(1, count + 1))
    return tuple(one for one in parts if any(block.kept() is None for block in share(blocks, one.number, count)))


def _write(
    verifier: SpeakerVerifier,
    out: Path,
    names: StringTable,
    found: Sequence[np.ndarray | None],
    num_kept: int,
    texts: list[str],
    *,
    is_tidy: bool,
) -> Embedded:
    """Put the blocks together; `is_tidy` removes them, which others may still be putting together too."""
    parts = out.with_name(out.name + PARTS_SUFFIX)
    whole = [block for block in found if block is not None]
    embeddings = np.concatenate(whole) if whole else np.empty((0, verifier.embedding_dim), dtype=np.float32)
    is_there = np.isfinite(embeddings).all(axis=1)
    if not is_there.any():
        raise AudioError(f"none of the recordings could be embedded: {'; '.join(texts[:MAX_NAMED])}")
    with atomic_write(out, "wb") as file:
        names_there = np.array(list(names.take(np.flatnonzero(is_there))))
        fingerprint = np.array(verifier.fingerprint)
        np.savez(file, names=names_there, embeddings=embeddings[is_there], fingerprint=fingerprint)
    if is_tidy:
        shutil.rmtree(parts, ignore_errors=True)
    return Embedded(int(is_there.sum()), num_kept, tuple(texts))


@dataclass(frozen=True)
class _Block:
    """Recordings that are embedded and kept together."""

    verifier: SpeakerVerifier
    source: AudioSource
    names: StringTable
    part: Path

    @functools.cached_property
    def _key(self) -> str:
        return store_key(self.verifier.fingerprint, self.names, self.source.lookup_table(self.names), WAY)

    def kept(self) -> np.ndarray | None:
        """(recordings, dim), NaN where one is broken; None where they are not embedded yet, or were of other ones."""
        return load_embeddings(self.part, self._key)

    def find_or_embed(self, problems: list[str] | None) -> bool:
        """See that they are kept, and say whether they were; `problems` takes why one is broken."""
        if self.kept() is not None:
            return True
        try:
            embeddings = self._embed(self.names)
        except AudioError:
            if problems is None:
                raise
            embeddings = np.stack([self._embed_one(name, problems) for name in self.names])
        save_embeddings(self.part, self._key, self.names, embeddings)
        return False

    def _embed(self, names: StringTable) -> np.ndarray:
        net, options = self.verifier.embedding_net, EmbeddingOptions(embedding="whole")
        # Not repeated from its start: `SpeakerVerifier.embed` takes a short recording as it is.
        values = embed_utterances(
            net, self.source, names, options, device=self.verifier.device, description="", wrapped_seconds=0.0
        )
        is_bad = ~np.isfinite(values[:, 0]).all(axis=1)
        if is_bad.any():
            # NaN is the mark of what was left out.
            raise AudioError(f"{names[int(is_bad.argmax())]}: the model gives an embedding with NaN or infinite values")
        return values[:, 0]

    def _embed_one(self, name: str, problems: list[str]) -> np.ndarray:
        try:
            return self._embed(StringTable.from_strings([name]))[0]
        except AudioError as error:
            problems.append(str(error))
            return np.full(self.verifier.embedding_dim, np.nan, dtype=np.float32)
