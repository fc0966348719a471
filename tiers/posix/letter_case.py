"""File systems whose names do not tell upper from lower case (FAT, exFAT, SMB), where two keys may be one file.

Keys are exact in every tier. On such a file system a key is looked for as it is spelled, and none is created beside one
that differs only in case.
"""

from __future__ import annotations

import os
from pathlib import Path


class LetterCase:
    """How names below a folder are compared; found out with the first file that is looked at.

    Args:
        root: the tier's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.ignored: bool | None = None
        """Whether names that differ only in case are one file; None while that is not known."""

    def look(self, path: Path) -> None:
        """Find out by a file or folder, if there is one of that name."""
        other = path.with_name(path.name.swapcase())
        if self.ignored is None and other != path and os.path.lexists(path):
            # Two that are there and are both listed are two files.
            self.ignored = os.path.lexists(other) and not {path.name, other.name} <= set(os.listdir(path.parent))

    def spelled_otherwise(self, path: Path) -> Path | None:
        """The file or folder that the system finds for a path, or for a folder above it, if its name is another one."""
        parts = path.relative_to(self._root).parts
        self.look(self._root / parts[0])
        if not self.ignored:
            return None
        folder = self._root
        for part in parts:
            names = _names(folder)
            if part not in names:
                return next((folder / name for name in names if _same(name, part)), None)
            folder /= part
        return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _same(name: str, part: str) -> bool:
    # FAT has no dots at the end of a name.
    return name.lower() == part.lower().rstrip(".")
