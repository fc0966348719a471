"""What the command line prints of tags and forks: for people, and JSON for machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tierstate.manifest.tags import Tag

from .info import VersionInfo
from .tables import print_json, table, when


def show_tags(tags: Mapping[str, VersionInfo | Tag], as_json: bool) -> None:
    """Names, and the version that has each."""
    if as_json:
        told = {n: v._asdict() if isinstance(v, Tag) else dataclasses.asdict(v) for n, v in tags.items()}
        print_json(
            [{"tag": name, **version, "there": not isinstance(tags[name], Tag)} for name, version in told.items()]
        )
        return
    if not tags:
        print("no tags")
        return
    table(["tag", ">seq", ">step", "id", "saved", "tiers"], [_row(name, version) for name, version in tags.items()])


def _row(name: str, version: VersionInfo | Tag) -> tuple[object, ...]:
    if isinstance(version, Tag):
        return name, version.seq, "?", version.id[:12], "", "none: the version is not there any more"
    return name, version.seq, version.step, version.id[:12], when(version.time), ", ".join(version.tiers)


def show_tag(info: VersionInfo, name: str, as_json: bool) -> None:
    """A version that was given a name."""
    if as_json:
        print_json(dataclasses.asdict(info))
    else:
        print(f"{name}: version {info.seq} of run {info.run}, step {info.step} ({info.id[:12]})")


def show_fork(info: VersionInfo, old: str, as_json: bool) -> None:
    """The first version of a new run."""
    if as_json:
        print_json(dataclasses.asdict(info))
    else:
        print(f"run {info.run} begins with step {info.step} of run {old} ({info.id[:12]}), in {', '.join(info.tiers)}")
