"""A file system that can be away for one rank alone."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.storage_sites import AtSite, Site

import tierstate as ts


@pytest.fixture
def own_sites(place: Path) -> Any:
    """For each of two ranks a handle on one file system, that can be away for it alone."""
    ts.register_tier("site", AtSite)
    with ExitStack() as stack:
        made = [Site("lustre", place) for _ in range(2)]
        for site in made:
            AtSite.SITES[site.key] = site
            stack.callback(AtSite.SITES.pop, site.key)
            stack.callback(site.raw.close)
        yield made
