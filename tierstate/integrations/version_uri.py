"""What trackers of experiments get of a version: a URI that names it, and what is known of it. Nothing is uploaded."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from tierstate.engine.info import VersionInfo
from tierstate.files.filesystem import Address, utc_time


def version_uri(policy: str | os.PathLike[str], info: VersionInfo) -> str:
    """``tierstate:///PATH/POLICY.yaml/RUN@ID``: the version for ever, whatever is saved later. fsspec reads its files.

    Args:
        policy: path of the policy file. Only the path is in the URI, and nothing of the file, which may hold
            credentials. It has to be the same on the machines that will read the URI.

    Raises:
        FileNotFoundError: there is no such file, or its name does not end in ``.yaml`` or ``.yml``.
        ValueError: the record of the version could not be read, so it has no id.
    """
    if not info.id:
        raise ValueError(f"version {info.seq} of run {info.run!r} has no id, since its record could not be read")
    path = f"{os.path.abspath(policy)}/{info.run}@{info.id}"
    Address.parse(path)
    return f"tierstate://{path}"


def version_facts(info: VersionInfo) -> dict[str, Any]:
    """What is known of a version, as JSON values: run, version, step, time (UTC), bytes, tiers, and the metadata given
    to `save`. Numbers that JSON lacks (NaN, infinity) are texts."""
    time = utc_time(info.time).isoformat(timespec="seconds")
    return {
        "run": info.run,
        "version": info.id,
        "step": info.step,
        "time": time,
        "bytes": info.nbytes,
        "tiers": list(info.tiers),
        "metadata": _finite(info.metadata),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
