"""Another process of this Python that imports modules from where this one does: the keeper, the agent, live checks."""

from __future__ import annotations

import os
import sys


def same_python(*arguments: str) -> list[str]:
    """The command that runs this interpreter with these arguments, without the working directory in its path."""
    return [sys.executable, "-P", *arguments]


def same_modules() -> dict[str, str]:
    """The environment of such a process: this one's, with its path for modules.

    So modules of the working directory are imported only where this process imports them too, and what this process
    has added to its path is found.
    """
    # The empty text is the working directory. What is no text is left out, as Python's own imports leave it out.
    path = [entry or os.curdir for entry in sys.path if isinstance(entry, str)]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path)}
