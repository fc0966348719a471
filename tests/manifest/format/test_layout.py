"""Keys that a layout may name, and which of them hold chunks."""

from __future__ import annotations

from tierstate.manifest.format.layout import holds_chunks


def test_a_rank_s_part_is_no_pack_of_chunks() -> None:
    assert holds_chunks("packs/run/000000000001-0-0-abcdef")
    assert holds_chunks("packs/run-0-part-1/000000000001-0-mend-abcdef")
    assert holds_chunks("packs/run/000000000001-0-0-abcdef.safetensors")
    assert not holds_chunks("packs/run/000000000001-12-part-abcdef")
    assert not holds_chunks("packs/000000000001-0-0-abcdef")
    assert not holds_chunks("versions/run/000000000001")
