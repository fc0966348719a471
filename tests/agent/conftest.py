"""Each test has agents of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import own_agents
from support.checkpointer_worlds import scratch


@pytest.fixture(autouse=True)
def agents(tmp_path: Path) -> Iterator[Path]:
    with own_agents(tmp_path / "sockets") as folder:
        yield folder


@pytest.fixture
def place() -> Iterator[Path]:
    with scratch() as path:
        yield path
