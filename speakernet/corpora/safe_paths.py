"""File names from outside (archives, servers, tables) turned into paths that stay inside one folder.

A name is data. It is never handed to a shell, never followed through a link, and never leaves the folder that the user
named.
"""

from pathlib import Path, PurePosixPath


class UnsafeNameError(ValueError):
    """A name that would lead outside the target folder."""


def checked_relative(name: str) -> PurePosixPath:
    """`name` as a relative path with forward slashes.

    Raises:
        UnsafeNameError: empty, absolute, with a drive letter, a NUL character or a `..` component.

    >>> checked_relative("id1/a b/00001.wav").as_posix()
    'id1/a b/00001.wav'
    """
    # Backslashes separate on Windows only, but an archive that uses them means the same everywhere.
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    if not parts:
        raise UnsafeNameError(f"the name {name!r} is empty; expected a file name")
    if name[0] in "/\\" or (len(parts[0]) == 2 and parts[0][1] == ":"):
        raise UnsafeNameError(f"the name {name!r} is absolute; expected a path inside the target folder")
    if ".." in parts:
        raise UnsafeNameError(f"the name {name!r} contains '..'; expected a path inside the target folder")
    if "\0" in name:
        raise UnsafeNameError(f"the name {name!r} contains a NUL character")
    return PurePosixPath(*parts)


class Folder:
    """A target folder: makes subfolders on demand and refuses every path that leaves it, also through a link."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._resolved_root = self.root.resolve()
        # A million files lie in thousands of folders: each is looked at once.
        self._known: set[Path] = set()

    def path(self, name: str) -> Path:
        """Where `name` lies under the root; its folder exists afterwards.

        Raises:
            UnsafeNameError: the name or a link on the way leads outside the root, or the path is itself a link.
        """
        path = self.root / checked_relative(name)
        self._make(path.parent)
        if path.is_symlink():
            raise UnsafeNameError(f"{path} is a link; remove it, so that nothing outside {self.root} is written")
        return path

    def _make(self, folder: Path) -> None:
        if folder in self._known:
            return
        # Resolved before anything is made, so that not even an empty folder appears outside.
        resolved = folder.resolve()
        if resolved != self._resolved_root and self._resolved_root not in resolved.parents:
            raise UnsafeNameError(
                f"{folder} leads to {resolved}, outside {self.root}; give the real folder as the target instead"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._known.add(folder)
