"""The fenced code blocks of the README and of all pages, with the reason why one is not run, where it has one.

``<!-- not run: REASON -->`` on the line before a block says so; a page shows nothing of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^(?: *<!-- not run: ([^\n]+) -->\n)?( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A code block, and where it is."""

    page: str
    line: int
    language: str
    text: str
    reason: str

    @property
    def name(self) -> str:
        """Name for a test."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file that it is, if its first line says so: ``# train.py``."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else ""


def blocks(page: Path) -> list[Block]:
    """The blocks of a page."""
    text = page.read_text("utf-8")
    name = str(page.relative_to(ROOT))
    return [
        Block(name, text.count("\n", 0, found.start()) + 1, found[3], dedent(found[4]), found[1] or "")
        for found in _FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]


class Guide(NamedTuple):
    """The files of a guide: scripts that are run, tests, and modules that those import or run."""

    scripts: tuple[str, ...]
    tests: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.scripts, *self.tests, *self.modules)


GUIDES = {
    "write-a-tier.md": Guide(
        ("train.py", "histories.py"), ("test_attic.py", "streaming.py", "test_race.py"), ("attic.py",)
    ),
    "write-a-provider.md": Guide(("counter.py", "train.py"), ("test_replay.py",), ("replay.py",)),
    "save-from-many-ranks.md": Guide(("mesh.py", "stages.py", "fsdp1.py", "own.py")),
    "read-a-version-as-files.md": Guide(("train.py", "evaluate.py", "local.py")),
    "resume-exactly.md": Guide(("renamed.py",), ("test_resume.py",), ("train.py",)),
    "use-with-torch-dcp.md": Guide(("train.py", "routed.py", "later.py")),
}
"""The guides in ``docs/how-to`` whose blocks are files."""
