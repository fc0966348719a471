"""The contract of tiers on Azure's emulator, through adlfs: objects are sent while they are written."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.servers.azurite import Azurite, NoAzurite

from tierstate.manifest.errors import AlreadyExists
from tierstate.tiers.base import Tier
from tierstate.tiers.object.bucket import Bucket
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.testing import TierContract, random_bytes

BLOCK = 1 << 18


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """The emulator, with a container."""
    try:
        server = Azurite(tmp_path_factory.mktemp("azurite"))
    except NoAzurite as reason:
        pytest.skip(str(reason))
    try:
        server.create("bucket")
        yield server
    finally:
        server.stop()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of aiohttp, to adlfs
class TestOnAzurite(TierContract):
    """Every promise, and those of long objects."""

    examples = 2
    steps = 12

    @pytest.fixture(autouse=True)
    def _place(self, azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Bucket, "block", BLOCK)
        self.server, self.prefix = azurite, uuid.uuid4().hex

    def make(self, tmp_path: Path) -> Tier:
        return ObjectStore(url=f"abfs://bucket/{self.prefix}", options=self.server.options())

    def reopen(self, tier: Tier) -> Tier:
        return self.make(Path())

    def test_long_objects_are_sent_as_they_are_written(self, tier: Tier) -> None:
        data = random_bytes(10 * BLOCK + 77, 1)
        first, second, given_up = tier.writer("a"), tier.writer("a"), tier.writer("b")
        for at in range(0, len(data), 100_000):
            for writer in (first, second, given_up):
                writer.append(data[at : at + 100_000])
        given_up.abort()
        assert list(tier.list("")) == []
        first.close()
        with pytest.raises(AlreadyExists):
            second.close()
        assert not any("gathered" in note for note in tier.traits.notes)
        assert torch.equal(tier.get("a"), data)
        assert list(tier.list("")) == ["a"]
