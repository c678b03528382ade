"""Whether a packed corpus is still what was written: every utterance compared with its checksum."""

import math
import zlib
from pathlib import Path

from speakernet.data.packed.corpus import open_samples, read_index
from speakernet.files import parallel_map


def verify(root: str | Path, num_threads: int = 2, show_progress: bool = False) -> list[str]:
    """Read a whole corpus and compare every checksum.

    Returns:
        One sentence for each damaged utterance; empty when the corpus is as it was written.

    Raises:
        PackedError: the corpus cannot even be opened.
    """
    index = read_index(root)
    samples = open_samples(root, index.num_samples)
    rows_per_task = max(1, math.ceil(len(index.names) / 4096))

    def check(first_row: int) -> list[str]:
        problems = []
        for row in range(first_row, min(first_row + rows_per_task, len(index.names))):
            first, last = index.sample_offsets[row : row + 2]
            # CRC-32 runs at the speed of the disk, and one for each utterance says which is damaged.
            if zlib.crc32(samples[first:last].data) != index.checksums[row]:
                problems.append(f"{index.names[row]}: samples {first} to {last} do not match their checksum")
        return problems

    first_rows = range(0, len(index.names), rows_per_task)
    description = f"verify {Path(root).name}" if show_progress else ""
    found = parallel_map(check, first_rows, num_threads, description, total=len(first_rows), unit="block")
    return [problem for some in found for problem in some]
