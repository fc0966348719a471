"""What DCP says of a process without process groups is no error here, and its engines are closed after each test."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tierstate.dcp import close


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        yield
    close()
