"""A file system of fsspec on a web server, which is no object tier by its own name (``http://``)."""

from __future__ import annotations

import fsspec
from fsspec.implementations.http import HTTPFileSystem


class Web(HTTPFileSystem):  # type: ignore[misc]
    """``web://``: its client is a real one, whose options have secrets, and whose errors say what was sent."""

    @classmethod
    def register(cls) -> None:
        """Make the protocol known to fsspec, in this process."""
        fsspec.register_implementation("web", f"{__name__}.{cls.__name__}", clobber=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.replace("web://", "http://", 1)
