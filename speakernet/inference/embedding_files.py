"""Many recordings into one file of embeddings, with progress; a run that was killed continues from its whole blocks."""

import shutil
from pathlib import Path

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.evaluation.embedding import embed_utterances, load_embeddings, save_embeddings, store_key
from speakernet.evaluation.options import EvaluationOptions
from speakernet.files import WHOLE, WorkPart, atomic_write, check_writable, share
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.terminal import MAX_NAMED, Bar

BLOCK_UTTERANCES = 64
"""Written together: what a kill loses."""
BLOCKS_SUFFIX = ".parts"
WAY = {"embedding": "whole", "wrapped": False}


def embed_files(
    verifier: SpeakerVerifier,
    source: AudioSource,
    names: StringTable,
    out: Path,
    *,
    skips_broken: bool = False,
    part: WorkPart = WHOLE,
) -> tuple[int, int, list[str], list[WorkPart]]:
    """Write `names`, `embeddings` (recordings, dim) and `fingerprint` as a `.npz` of plain arrays.

    Returns:
        How many embeddings were written and how many were kept from an earlier run, what was left out, a sentence each,
        and the parts that are missing, without which nothing was written.
    """
    if out.suffix != ".npz" or out.is_dir():
        raise ValueError(f"--out {out}: expected a file that ends in .npz")
    check_writable(out)
    table = source.lookup_table(names)
    broken = {int(row): text for row, text in table.problems.items()}
    for row in np.flatnonzero(np.asarray(table.num_samples) < verifier.net.min_samples).tolist():
        broken.setdefault(row, f"too short, {table.num_samples[row] / source.sample_rate:.3f} s")
    problems = [text if names[row] in text else f"{names[row]}: {text}" for row, text in sorted(broken.items())]
    if problems and not skips_broken:
        raise AudioError(
            f"{len(problems)} of {len(names)} recordings cannot be embedded (--skip-broken leaves them out): "
            f"{'; '.join(problems[:MAX_NAMED])}{' …' if len(problems) > MAX_NAMED else ''}"
        )
    rows = np.array([row for row in range(len(names)) if row not in broken], dtype=np.int64)
    folder = out.with_name(out.name + BLOCKS_SUFFIX)
    blocks = [names.take(rows[start : start + BLOCK_UTTERANCES]) for start in range(0, len(rows), BLOCK_UTTERANCES)]
    paths = [folder / f"{number:06d}.npz" for number in range(len(blocks))]
    keys = [store_key(verifier.fingerprint, block, source.lookup_table(block), WAY) for block in blocks]
    own, num_kept = share(range(len(blocks)), part.number, part.count), 0
    with Bar("embedding", sum(len(blocks[number]) for number in own), "utterance") as bar:
        for number in own:
            if load_embeddings(paths[number], keys[number]) is not None:
                num_kept += len(blocks[number])
            else:
                found = _embed_block(verifier, source, blocks[number], problems if skips_broken else None)
                save_embeddings(paths[number], keys[number], blocks[number], found)
            bar.update(len(blocks[number]))
    kept = [load_embeddings(path, key) for path, key in zip(paths, keys, strict=True)]
    parts = [WorkPart(one, part.count) for one in range(1, part.count + 1)]
    missing = [one for one in parts if any(block is None for block in share(kept, one.number, one.count))]
    if missing:
        return 0, num_kept, problems, missing
    empty = np.empty((0, verifier.embedding_dim), dtype=np.float32)
    embeddings = np.concatenate([empty, *(block for block in kept if block is not None)])
    is_there = np.isfinite(embeddings).all(axis=1)
    if not is_there.any():
        raise AudioError(f"none of the recordings could be embedded: {'; '.join(problems[:MAX_NAMED])}")
    with atomic_write(out, "wb") as file:
        there = np.array(list(names.take(rows[is_there])))
        np.savez(file, names=there, embeddings=embeddings[is_there], fingerprint=np.array(verifier.fingerprint))
    if part == WHOLE:
        # With several parts another process may be joining the same blocks.
        shutil.rmtree(folder, ignore_errors=True)
    return int(is_there.sum()), num_kept, problems, missing


def _embed_block(
    verifier: SpeakerVerifier, source: AudioSource, names: StringTable, problems: list[str] | None
) -> np.ndarray:
    """(recordings, dim); `problems` takes why a recording cannot be embedded, whose row is NaN then."""
    options, device = EvaluationOptions(embedding="whole"), verifier.device
    try:
        # Not repeated from its start: `SpeakerVerifier.embed` takes a short recording as it is.
        values = embed_utterances(
            verifier.embedding_net, source, names, options, device=device, description="", wrapped_seconds=0.0
        )[:, 0]
        if (is_bad := ~np.isfinite(values).all(axis=1)).any():
            raise AudioError(f"{names[int(is_bad.argmax())]}: the model gives an embedding with NaN or infinite values")
        return values
    except AudioError as error:
        if problems is None:
            raise
        if len(names) == 1:
            problems.append(str(error))
            return np.full((1, verifier.embedding_dim), np.nan, dtype=np.float32)
    return np.concatenate([_embed_block(verifier, source, StringTable.from_strings([one]), problems) for one in names])
