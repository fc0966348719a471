"""Keys of packs: the names of pack objects in a tier are made and parsed here, and nowhere else in the engine.

::

    packs/<run>/<seq>-<rank>-<label>-<unique><suffix>

``seq`` is the number of the version that the pack was written for, in 12 digits. ``label`` is the pack's number within
the save, or a word for another kind of object (`MEND`, `SNAPSHOT`, `PART` of `manifest.format.layout`). ``unique`` is
random, so that no two writers use one key. ``suffix`` is empty for our own pack layout, and the file extension of a
pack that is a file of another format, such as ``.safetensors``.

What a record may name as a pack at all is checked where records are read (`is_pack_key` and `holds_chunks` of
`manifest.format.layout`).
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

PACKS = "packs/"
"""The prefix of all packs of all runs."""

MEND = "mend"
"""Label of a repair pack: its chunks were damaged in this tier and were written again."""

SNAPSHOT = "snapshot"
"""Label of a pack that is a snapshot within GPU memory."""

_NAME = re.compile(r"([0-9]{12})-([0-9]+)-([^-/]+)-([^-/.]+)((?:\.[^-/.]+)?)")


@dataclass(frozen=True, slots=True)
class PackKey:
    """The key of a pack, in its parts; ``str()`` is the key itself."""

    run: str
    seq: int
    rank: int
    label: str
    unique: str
    suffix: str = ""

    @classmethod
    def new(cls, run: str, seq: int, rank: int, label: str | int, suffix: str = "") -> PackKey:
        """A new unique key."""
        return cls(run, seq, rank, str(label), uuid.uuid4().hex[:12], suffix)

    @classmethod
    def parse(cls, key: str) -> PackKey | None:
        """The parts of a key; None if it has not this form. Folders above ``<run>`` are ignored."""
        folder, _, name = key.rpartition("/")
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(folder.rpartition("/")[2], int(match[1]), int(match[2]), match[3], match[4], match[5])

    def __str__(self) -> str:
        return f"{seq_prefix(self.run, self.seq)}{self.rank}-{self.label}-{self.unique}{self.suffix}"


def pack_prefix(run: str) -> str:
    """The prefix of the keys of all packs of a run, and of no other run."""
    return f"{PACKS}{run}/"


def seq_prefix(run: str, seq: int) -> str:
    """The prefix of the keys of all packs that were written for one version of a run."""
    return f"{pack_prefix(run)}{seq:012d}-"


def run_of(key: str) -> str:
    """The run in whose folder a pack is."""
    return key.split("/")[1]


def seq_of(key: str) -> int | None:
    """The number of the version that a pack was written for; None if its key cannot be parsed."""
    found = PackKey.parse(key)
    return None if found is None else found.seq


def is_mend(key: str) -> bool:
    """Whether a pack is a repair pack: it has chunks that were damaged elsewhere in the tier."""
    found = PackKey.parse(key)
    return found is not None and found.label == MEND


def has_footer(key: str) -> bool:
    """Whether a pack has our own layout with a footer, and is not a file of another format."""
    return "." not in key.rpartition("/")[2]
