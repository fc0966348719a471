"""Keys of packs: what is made can be parsed, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.engine.packs.keys import (
    MEND,
    SNAPSHOT,
    PackKey,
    has_footer,
    is_mend,
    pack_prefix,
    run_of,
    seq_of,
    seq_prefix,
)
from tierstate.manifest.format.layout import PART, holds_chunks, is_pack_key

RUNS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,99}", fullmatch=True)


@given(
    RUNS,
    st.integers(0, 10**12 - 1),
    st.integers(0, 2**32),
    st.sampled_from([0, 17, MEND, PART, SNAPSHOT]),
    st.sampled_from(["", ".safetensors", ".h5"]),
)
def test_a_key_is_parsed_into_what_it_was_made_of(run: str, seq: int, rank: int, label: str | int, suffix: str) -> None:
    made = PackKey.new(run, seq, rank, label, suffix)
    key = str(made)
    assert PackKey.parse(key) == made
    assert is_pack_key(key)
    assert (run_of(key), seq_of(key)) == (run, seq)
    assert key.startswith(seq_prefix(run, seq))
    assert key.startswith(pack_prefix(run))
    assert (is_mend(key), holds_chunks(key), has_footer(key)) == (label == MEND, label != PART, not suffix)
    assert str(PackKey.new(run, seq, rank, label, suffix)) != key


@pytest.mark.parametrize(
    "name", ["dead", "1-0-0-abc", "000000000001-0-0", "000000000001-x-0-abc", "000000000001-0-0-abc-d", ""]
)
def test_other_names_say_nothing(name: str) -> None:
    key = f"packs/run/{name}"
    assert PackKey.parse(key) is None
    assert seq_of(key) is None
    assert not is_mend(key)
