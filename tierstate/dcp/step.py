"""Reads the training step from a DCP ``checkpoint_id``."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import Any

_ENDING = re.compile(r"(?:-v[0-9]+)?\.(?:ckpt|pt|pth)\Z")


_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})", re.DOTALL)


def step_of(checkpoint_id: Any) -> int:
    """The step of a ``checkpoint_id``: a number, or a name or path whose last part ends in a number.

    ``100``, ``"100"``, ``"step-100"``, ``Path("out/checkpoint/step-100")``, ``"epoch=3-step=100.ckpt"`` are step 100.
    The ending of a file is left out, with the number that Lightning puts before it (``step=100-v1.ckpt``).

    Raises:
        ValueError: the id has no step.
    """
    if type(checkpoint_id) is int and checkpoint_id >= 0:
        return checkpoint_id
    if isinstance(checkpoint_id, (str, os.PathLike)):
        name = PurePath(os.fsdecode(checkpoint_id)).name
        if found := _NUMBER.fullmatch(_ENDING.sub("", name)):
            return int(found[1])
    raise ValueError(
        f"checkpoint_id={checkpoint_id!r:.100} names no step; give the step as a number, or a name whose last part "
        "ends in it, as in 100, 'step-100' or 'out/step-100'"
    )


def names_step(checkpoint_id: Any) -> bool:
    """Whether a ``checkpoint_id`` names a step."""
    try:
        step_of(checkpoint_id)
    except ValueError:
        return False
    return True
