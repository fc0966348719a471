"""The checksum that a store verifies is found by sending it wrong ones."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.tiers.object.s3.checksums import CHECKSUMS, ChecksumChoice, choose_checksum


class Server:
    """Verifies some of the checksums that it knows; refuses requests with others, or takes no notice."""

    says = "BadDigest"

    def __init__(self, verifies: set[str], refuses: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.verifies, self.refuses, self.asked = verifies, refuses, 0

    def against(self, body: memoryview, sums: Mapping[str, str]) -> str:
        self.asked += 1
        for name in ("crc32", "md5"):
            right = CHECKSUMS[name].of([body])
            if sums.keys() == right.keys() and name in self.refuses:
                return "InvalidRequest"
            if sums.keys() == right.keys() and name in self.verifies and sums != right:
                return self.says
        return ""


@pytest.mark.parametrize(
    ("server", "name", "told"),
    [
        (Server({"crc32", "md5"}), "crc32", "a wrong one is refused"),
        (Server({"md5"}), "md5", "a wrong one is refused; it does not verify crc32"),
        (Server({"md5"}, refuses={"crc32"}), "md5", "a wrong one is refused"),
        (Server(set()), "none", "verifies neither crc32 nor md5"),
        (Server(set(), refuses={"crc32", "md5"}), "none", "verifies neither"),
    ],
)
def test_auto_takes_the_cheapest_that_is_verified(server: Server, name: str, told: str) -> None:
    found, why = choose_checksum("auto", server.against)
    assert found.name == name
    assert told in why


def test_a_refusal_of_another_name_is_looked_into() -> None:
    """It may be of every checksum, right or wrong."""
    server = Server({"crc32"})
    server.says = "InvalidRequest"
    assert choose_checksum("auto", server.against)[0].name == "crc32"
    assert server.asked == 2


@pytest.mark.parametrize("choice", ["crc32", "md5", "none"])
def test_what_the_policy_says_is_not_questioned(choice: ChecksumChoice) -> None:
    server = Server(set())
    assert choose_checksum(choice, server.against)[0].name == choice
    assert server.asked == 0


@given(st.lists(st.binary(max_size=50), max_size=5), st.sampled_from(sorted(CHECKSUMS)))
def test_pieces_have_the_checksum_of_the_whole(pieces: list[bytes], name: Any) -> None:
    one = CHECKSUMS[name]
    assert one.of([memoryview(piece) for piece in pieces]) == one.of([memoryview(b"".join(pieces))])
