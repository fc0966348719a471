"""Sharded states of real ranks: FSDP2, tensor parallelism, both, hybrids, FSDP1 and ZeRO."""

from __future__ import annotations

import pytest
from support.processes import Gang

pytestmark = pytest.mark.slow


def test_two_ranks_give_all_and_take_it_back() -> None:
    with Gang(2, "support.sharded_jobs:two") as gang:
        gang.wait()


@pytest.mark.soak
def test_four_ranks_on_meshes_of_two_dimensions() -> None:
    with Gang(4, "support.sharded_jobs:four") as gang:
        gang.wait()
