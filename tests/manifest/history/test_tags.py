"""Tags in one tier: names, numbers, and bytes that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import pins

from tierstate.manifest.chunk import Buffer, as_buffer, to_bytes
from tierstate.manifest.errors import AlreadyExists, FormatError
from tierstate.manifest.format.version import MAX_SEQ
from tierstate.manifest.history.leases import pin_version
from tierstate.manifest.history.tags import (
    MAX_TAG_BYTES,
    TagReader,
    TagTarget,
    check_tag,
    drop_tag,
    read_tag,
    tag_numbers,
    write_tag,
)
from tierstate.tiers.base import check_key
from tierstate.tiers.memory.host import Memory

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,63}", fullmatch=True)


@given(st.dictionaries(names, st.builds(TagTarget, st.integers(0, MAX_SEQ), st.text("0123456789abcdef", max_size=32))))
def test_what_was_written_is_read(tags: dict[str, TagTarget]) -> None:
    tier = Memory()
    for number, (name, tag) in enumerate(tags.items(), 999_990):
        write_tag(tier, "run", name, number, tag)
        write_tag(tier, "run", name, 5, TagTarget(1, "older"))
    assert tag_numbers(tier, "run") == {
        name: [5, n] for n, name in sorted(enumerate(tags, 999_990), key=lambda x: x[1])
    }
    assert {name: read_tag(tier, "run", name, used[-1]) for name, used in tag_numbers(tier, "run").items()} == tags
    found = TagReader(tier, "run").by_version()
    assert {name: seq for seq, named in found.items() for name in named} == {n: tag.seq for n, tag in tags.items()}
    assert all(check_key(key) for key in tier.list(""))


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "a@b", "a b", "x" * 65, "é", "..", "a\n"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a tag"):
        check_tag(name)
    with pytest.raises(ValueError, match="cannot be a tag"):
        write_tag(Memory(), "run", name, 1, None)


def test_a_name_that_was_taken_back_names_nothing() -> None:
    tier = Memory()
    write_tag(tier, "run", "best", 1, TagTarget(7, "ff"))
    write_tag(tier, "run", "also", 1, TagTarget(7, "ff"))
    assert TagReader(tier, "run").by_version() == {7: ("also", "best")}
    write_tag(tier, "run", "best", 2, None)
    drop_tag(tier, "run", "best", 1)
    assert TagReader(tier, "run").by_version() == {7: ("also",)}
    assert read_tag(tier, "run", "best", 2) is None
    assert TagReader(tier, "run2").by_version() == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(1, 4)), max_size=20))
def test_a_tag_is_read_once_and_what_was_said_last_counts(said: list[tuple[str, int | None]]) -> None:
    """Retention asks at each save that may drop something, and a tier may be far away."""
    reads: list[str] = []

    class Noting(Memory):
        def get_within(self, key: str, most: int, what: str) -> Buffer:
            reads.append(key)
            return super().get_within(key, most, what)

    tier = Noting()
    always = TagReader(tier, "run")
    for number, (name, seq) in enumerate(said, 100_000):
        used = tag_numbers(tier, "run").get(name, [])
        write_tag(tier, "run", name, number, None if seq is None else TagTarget(seq, "ff"))
        for before in used:
            drop_tag(tier, "run", name, before)
        reads.clear()
        found = always.by_version()
        assert reads == [f"tags/run/{name}@{number}"]
        assert found == TagReader(tier, "run").by_version()
    assert len(always._known) == len({name for name, _ in said})


def test_a_number_is_used_once() -> None:
    tier = Memory()
    write_tag(tier, "run", "best", 1, TagTarget(7, "ff"))
    with pytest.raises(AlreadyExists):
        write_tag(tier, "run", "best", 1, TagTarget(8, "ff"))


def test_foreign_keys_are_passed_over() -> None:
    tier = Memory()
    for key in ("best", "best@1", "best@00000x", "best@000001/x", "@000001", "best@000001.tmp"):
        tier.put(f"tags/run/{key}", as_buffer(b"?"))
    assert tag_numbers(tier, "run") == {}
    assert TagReader(tier, "run").by_version() == {}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b'{"id":"x"}', b'{"seq":1}', b'{"seq":true,"id":""}', b'{"seq":-1,"id":""}',
        b'{"seq":1.5,"id":""}', b'{"seq":1,"id":3}', b'{"seq":' + b"9" * 3000 + b',"id":""}', b"[" * 4000, b"\xff",
        b" " * (MAX_TAG_BYTES + 1),
    ],
)  # fmt: skip
def test_bytes_that_are_no_tag_are_refused(data: bytes) -> None:
    tier = Memory()
    tier.put("tags/run/best@000001", as_buffer(data))
    with pytest.raises(FormatError, match="tags/run/best@000001"):
        read_tag(tier, "run", "best", 1)
    with pytest.raises(FormatError):
        TagReader(tier, "run").by_version()
    write_tag(tier, "run", "best", 2, TagTarget(3, "ff"))
    assert TagReader(tier, "run").by_version() == {3: ("best",)}, "given anew, it is whole"


@given(st.binary(max_size=100))
def test_any_bytes_are_a_tag_or_refused(data: bytes) -> None:
    tier = Memory()
    tier.put("tags/run/best@000001", as_buffer(data))
    with pytest.raises(FormatError):
        read_tag(tier, "run", "best", 1)


def test_pins() -> None:
    tier = Memory()
    one, other = pin_version(tier, "run", 7, "run-b"), pin_version(tier, "run", 7, "run-b")
    pin_version(tier, "run", 9, "a-fork-of-b")
    assert pins(tier, "run") == {7: "forked by run-b", 9: "forked by a-fork-of-b"}
    assert pins(tier, "other") == {}
    tier.delete(one)
    assert pins(tier, "run") == {7: "forked by run-b", 9: "forked by a-fork-of-b"}, "each fork has its own"
    tier.delete(other)
    assert pins(tier, "run") == {9: "forked by a-fork-of-b"}


def test_every_change_of_a_tag_is_noticed() -> None:
    tier = Memory()
    write_tag(tier, "run", "best", 1_000_000, TagTarget(7, "ab" * 16))
    (key,) = tier.list("tags/")
    data = bytes(to_bytes(tier.get(key)))
    tier.delete(key)
    for at in range(len(data)):
        tier.put(key, as_buffer(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]))
        try:
            found = read_tag(tier, "run", "best", 1_000_000)
        except FormatError:
            found = None
        else:
            # A letter of the word `sum` itself: then it is the tag of an earlier program, with the right contents.
            assert b'"sum"' not in to_bytes(tier.get(key))
        assert found in (None, TagTarget(7, "ab" * 16))
        tier.delete(key)


def test_a_tag_of_an_earlier_program_has_no_checksum() -> None:
    tier = Memory()
    tier.put("tags/run/best@1000000", as_buffer(b'{"id": "ab", "seq": 7}'))
    assert read_tag(tier, "run", "best", 1_000_000) == TagTarget(7, "ab")
