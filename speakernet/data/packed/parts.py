"""An archive that comes in parts (`vox1_dev_wav_partaa`, `…partab`, or `.zip.001`), read as if it were joined."""

import bisect
import io
import re
from collections.abc import Sequence
from pathlib import Path

PART = re.compile(r"^(?P<stem>.*?)(?:[._-]?part[._-]?[a-z]{1,2}|[._-]?part[._-]?\d+|\.\d{3})$")


def group_parts(paths: Sequence[Path]) -> list[list[Path]]:
    """Paths grouped into archives: the parts of one archive together and in order, in order of first mention.

    >>> [[path.name for path in group] for group in group_parts([Path("a_partab"), Path("b.zip"), Path("a_partaa")])]
    [['a_partaa', 'a_partab'], ['b.zip']]
    """
    groups: dict[tuple[Path, str], list[Path]] = {}
    for path in paths:
        match = PART.match(path.name)
        key = match["stem"] + "/part" if match else path.name
        groups.setdefault((path.parent, key), []).append(path)
    return [sorted(group) for group in groups.values()]


class JoinedFile(io.RawIOBase):
    """Several files read as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self._files = [path.open("rb") for path in paths]
        self._starts = [0]
        for path in paths:
            self._starts.append(self._starts[-1] + path.stat().st_size)
        self._position = 0

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def seekable(self) -> bool:
        """Whether it can be read anywhere: yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte; see `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._starts[-1]}[whence]
        if base + offset < 0:
            raise OSError(f"cannot seek to byte {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The byte that is read next."""
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """The next `size` bytes, fewer only at the end; all that is left without a size."""
        left = max(0, self._starts[-1] - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        blocks = []
        while wanted > 0:
            number = bisect.bisect_right(self._starts, self._position) - 1
            file = self._files[number]
            file.seek(self._position - self._starts[number])
            block = file.read(min(wanted, self._starts[number + 1] - self._position))
            if not block:
                break
            blocks.append(block)
            self._position += len(block)
            wanted -= len(block)
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def close(self) -> None:
        """Close every part."""
        for file in self._files:
            file.close()
        super().close()
