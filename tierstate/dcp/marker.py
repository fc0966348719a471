"""The marker of a version in the folder that DCP was given: a file ``.metadata``, for tools that look for one.

It is JSON, and no pickle as DCP's own file of that name; what is saved is in the tiers.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

METADATA = ".metadata"
"""The name of DCP's own metadata, and of the marker."""


_BEGIN = b'{"tierstate": '


def write_marker(folder: Path, facts: dict[str, Any]) -> None:
    """Write the marker, in one step. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{METADATA}.{uuid.uuid4().hex}"  # several hosts may write here at once
    new.write_text(json.dumps({"tierstate": facts}) + "\n")
    new.replace(folder / METADATA)


def is_marker(file: Path) -> bool:
    """Whether a file is a marker. Raises OSError."""
    with file.open("rb") as opened:
        return opened.read(len(_BEGIN)) == _BEGIN
