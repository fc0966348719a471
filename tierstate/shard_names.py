"""Names of the files of one export: a file alone, or several and their index, as Hugging Face has them."""

from __future__ import annotations

import re
from pathlib import Path

INDEX = ".index.json"
"""How the name of the index of a set of files ends."""


def shard_names(to: Path, count: int) -> list[Path]:
    """The files of an export that is to be known as ``to``; without the index that several have."""
    if count == 1:
        return [to]
    return [to.with_name(f"{to.stem}-{i:05}-of-{count:05}{to.suffix}") for i in range(1, count + 1)]


def index_name(to: Path) -> Path:
    """The index of several files."""
    return to.with_name(f"{to.name}{INDEX}")


def relatives(to: Path) -> list[Path]:
    """What is there already of any export of that name, the index first."""
    shard = re.compile(rf"{re.escape(to.stem)}-[0-9]{{5,}}-of-[0-9]{{5,}}{re.escape(to.suffix)}")
    there = {path.name: path for path in to.parent.iterdir()}
    names = [index_name(to).name, to.name, *sorted(name for name in there if shard.fullmatch(name))]
    return [there[name] for name in names if name in there]
