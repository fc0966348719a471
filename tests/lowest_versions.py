"""Prints pip's constraints for an environment: the lowest versions that pyproject.toml allows, or nothing.

    python tests/lowest_versions.py .venv-lowest

Only what tierstate and its tests name themselves is held at its lowest version; what those need in turn is the newest
that goes with them, as in any new installation.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

_LOWEST = re.compile(r"([A-Za-z0-9._-]+)>=([0-9.]+)")


def lowest_versions(project: Path) -> Iterator[str]:
    """A line ``name==version`` for every requirement with a lower bound."""
    found = tomllib.loads(project.read_text())
    for requirement in [*found["project"]["dependencies"], *found["dependency-groups"]["test"]]:
        if bound := _LOWEST.match(requirement):
            yield f"{bound[1]}=={bound[2]}"


if __name__ == "__main__":
    if sys.argv[1:] == [".venv-lowest"]:
        print(*lowest_versions(Path("pyproject.toml")), sep="\n")
