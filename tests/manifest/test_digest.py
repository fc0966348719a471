"""Digests: sixteen bytes, of the content alone."""

from __future__ import annotations

import pytest

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.digest import ALGORITHMS, digest_function
from tierstate.manifest.errors import FormatError


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_digests_are_sixteen_bytes_of_the_content(name):
    digest = digest_function(name)
    found = {digest(as_buffer(data)) for data in (b"", b"a", b"b", b"a" * 1000)}
    assert {len(d) for d in found} == {16}
    assert len(found) == 4
    assert digest(as_buffer(bytearray(b"a"))) in found


def test_an_unknown_digest_is_an_error():
    with pytest.raises(FormatError, match="known are xxh3-128, blake3"):
        digest_function("crc32")
