"""The messages of a commit: votes and errors come back as they were, and what is none is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierstate.engine.ranks.save.messages import Vote, decode_error, decode_message, encode_error, encode_message
from tierstate.manifest.errors import (
    AlreadyExists,
    FormatError,
    RankFailed,
    TierError,
    TierFull,
    TierstateError,
    TierUnavailable,
)


@given(
    st.sampled_from([TierError, TierFull, AlreadyExists, TierUnavailable]), st.text(max_size=40), st.text(max_size=9)
)
def test_errors_of_tiers_are_heard_as_they_were_told(kind: type[TierError], text: str, key: str) -> None:
    error = decode_error(encode_error(kind(text, tier="nvme", key=key), 3))
    assert (type(error), str(error), error.tier, error.key) == (kind, text, "nvme", key)  # type: ignore[attr-defined]


@given(
    st.binary(max_size=60)
    | st.builds(encode_message, st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=6)))
    | st.builds(
        lambda name, value: encode_message({"said": "no", name: value}),
        st.sampled_from(["object", "error", "held"]),
        st.integers()
        | st.lists(st.none())
        | st.dictionaries(st.sampled_from(["kind", "ranks", "tier"]), st.integers()),
    ),
)
def test_what_is_no_vote_is_refused(data: bytes) -> None:
    try:
        vote = Vote.decode(data, 1)
    except FormatError as error:
        assert "rank 1" in str(error)  # noqa: PT017 - the other outcome is good, too
    else:
        assert vote.said in ("yes", "no", "left out")
        assert all(isinstance(one, dict | None) for one in (vote.object, vote.error, vote.held))
        assert isinstance(decode_error(vote.error or {}), TierstateError)
    assert isinstance(decode_error({"kind": "os.system", "text": data.hex(), "ranks": ["1", 2]}), RankFailed)


def test_votes_are_read_as_they_were_given() -> None:
    vote = Vote("yes", {"key": "k", "bytes": 3}, b"\0part")
    assert Vote.decode(vote.encode(), 0) == vote
    assert decode_message(encode_message({"a": 1}, b"x"), "it") == ({"a": 1}, b"x")
    error = RankFailed("gone", (1, 2))
    assert (str(decode_error(encode_error(error, 0))), decode_error(encode_error(error, 0)).ranks) == ("gone", (1, 2))  # type: ignore[attr-defined]
