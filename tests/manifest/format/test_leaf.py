"""Paths: encoded, printed and matched without ever confusing two."""

from __future__ import annotations

import itertools
import json
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.manifest_strategies import any_text, keys, paths, strict, tricky_text

from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf import (
    MAX_NESTING,
    check_glob,
    decode_path,
    encode_path,
    format_key,
    format_path,
    matches,
    matches_any,
    path_key,
)

NANS = [
    struct.unpack(">d", bytes.fromhex(text))[0] for text in ("7ff8000000000001", "7ff4000000000000", "ffffffffffffffff")
]


@given(paths)
@example((True, 1, 1.0, "1", "True", None, "None", b"1", (1,), ("1",)))
@example(("\ud800\udc00", "\U00010000"))
@example((float("nan"), float("-inf"), -0.0, 0.0, 5e-324))
@example((-float("nan"), *NANS, (NANS[0],)))
def test_a_path_comes_back_with_its_types(path):
    text = encode_path(path)
    assert text.isascii()
    assert strict(decode_path(text)) == strict(path)
    assert encode_path(decode_path(text)) == text
    assert decode_path(text) == decode_path(text) == tuple(map(path_key, path)), "also with NaN"


@given(st.lists(paths, max_size=30))
@example([(1.5,), (1, 5)])
@example([(1,), (True,), (1.0,), ("1",), (b"1",), ((1,),)])
@example([("\ud800\udc00",), ("\U00010000",), ("a.b",), ("a", "b")])
@example([(key,) for nan in (float("nan"), -float("nan"), *NANS) for key in (nan, (nan,), (nan, nan))])
def test_different_paths_look_different(found):
    different = {strict(p) for p in found}
    assert len({encode_path(p) for p in found}) == len(different)
    assert len({format_path(p) for p in found}) == len(different)


def split_pairs(path):
    """Characters beyond U+FFFF as two surrogates each, as JSON writes them."""
    pairs = (json.dumps(key)[1:-1].encode().decode("unicode_escape") if type(key) is str else key for key in path)
    return tuple(pairs)


@given(paths)
@example((1.5,))
@example(((1.5,),))
@example(("\U000e0001",))
@example((b"a.b",))
def test_no_path_of_strings_looks_like_another_path(path):
    printed = format_path(path)
    for forged in [(printed,), tuple(printed.split(".")), (json.dumps(printed),), split_pairs(path)]:
        assert format_path(forged) != printed or strict(forged) == strict(path)


@given(any_text | tricky_text)
def test_a_printed_key_can_be_printed(key):
    assert format_key(key).isprintable()


def test_how_paths_are_printed():
    assert format_path(("model", "layers", 0, "attn.wq", "weight")) == 'model.layers.0."attn.wq".weight'
    assert format_path(()) == "."
    assert format_path(("0", 0, 0.5, True, "True", None)) == '"0".0.(0.5).True."True".None'
    assert format_path(("a\x1b[2J",)) == r'"a\u001b[2J"'


@given(st.text())
def test_arbitrary_text_is_a_path_or_a_format_error(text):
    try:
        path = decode_path(text)
    except FormatError:
        return
    assert isinstance(path, tuple)


json_keys = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["0x1p99999", "zz", "ed", "c0ffee"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["float", "bytes", "tuple", "text", "else"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(json_keys)
@example([{"float": "0x1p99999"}])
@example([{"text": "ff"}])
def test_arbitrary_json_is_a_path_or_a_format_error(value):
    try:
        path = decode_path(json.dumps(value))
    except FormatError:
        return
    assert strict(decode_path(encode_path(path))) == strict(path)


@pytest.mark.parametrize("depth", [1, MAX_NESTING, MAX_NESTING + 1, 100, *range(300, 500, 7), 5000, 10**6])
@pytest.mark.parametrize(("opening", "closing"), [('{"tuple":[', "]}"), ("[", "]"), ('{"a":', "1}")])
def test_deep_json_is_refused_at_any_depth(depth, opening, closing):
    text = "[" + opening * depth + closing * depth + "]"
    if depth <= MAX_NESTING and "tuple" in opening:
        assert encode_path(decode_path(text)) == text
    else:
        with pytest.raises(FormatError):
            decode_path(text)


def nested(depth):
    key = ()
    for _ in range(depth - 1):
        key = (key,)
    return key


def test_a_key_that_could_not_be_read_back_is_not_written():
    assert decode_path(encode_path((nested(MAX_NESTING),))) == (nested(MAX_NESTING),)
    for key in [nested(MAX_NESTING + 1), nested(10**5), object(), {}, [], 1j]:
        with pytest.raises(CaptureError, match="cannot be saved"):
            encode_path((key,))


# Globs against an oracle that tries every length of every ``**``.

glob_keys = st.text("ab.", max_size=3) | st.integers(0, 1)
segments = st.just("**") | st.text("ab*?", min_size=1, max_size=3).filter(lambda s: s != "**") | st.sampled_from("01")


def key_matches(pattern, text):
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(key_matches(pattern[1:], text[i:]) for i in range(len(text) + 1))
    return bool(text) and pattern[0] in ("?", text[0]) and key_matches(pattern[1:], text[1:])


def oracle(parts, path):
    gaps = parts.count("**")
    for lengths in itertools.product(range(len(path) + 1), repeat=gaps):
        left = iter(lengths)
        flat = [p for part in parts for p in (["*"] * next(left) if part == "**" else [part])]
        if len(flat) == len(path) and all(key_matches(p, str(k)) for p, k in zip(flat, path, strict=True)):
            return True
    return False


@given(st.lists(segments, min_size=1, max_size=4), st.lists(glob_keys, max_size=4).map(tuple))
def test_globs_match_what_the_oracle_matches(parts, path):
    cut = [part for key in path for part in (key.split(".") if isinstance(key, str) else [key])]
    assert matches(".".join(parts), path) == (oracle(parts, path) or oracle(parts, tuple(cut)))


def test_keys_of_a_state_dict_match_as_if_they_were_nested():
    path = ("model", "layers.0.attn.weight")
    for pattern in ("model.**", "model.layers.*.attn.weight", "**.weight", "model.layers.**", "*.*", "model.layers*"):
        assert matches(pattern, path), pattern
    for pattern in ("model", "model.layers", "**.bias", "model.layers.1.**", 'model."layers.0"', 'model."layers.0".**'):
        assert not matches(pattern, path), pattern
    assert matches('model."layers.0.attn.weight"', path)


unicode_text = (any_text | tricky_text).filter(lambda s: not any("\ud800" <= c <= "\udfff" for c in s))


@given(st.lists(unicode_text | st.integers() | st.booleans() | st.none() | st.floats(), max_size=4).map(tuple))
@example(("a.b", '"', "**", "[x]", "\\", "\x9b", 1.5))
def test_a_printed_path_is_a_pattern_that_matches_it(path):
    pattern = check_glob(format_path(path))
    assert matches(pattern, path)
    assert not matches(pattern, (*path, "more"))


@given(unicode_text, keys)
def test_a_quoted_segment_means_that_very_string(text, key):
    assert matches(json.dumps(text), (key,)) == (type(key) is str and key == text)


@given(st.lists(any_text, max_size=3).map(tuple))
def test_two_stars_match_everything(path):
    assert matches("**", path)
    assert matches(".", path) == (not path)


def test_globs_by_example():
    wq = ("model", "layers", 0, "attn", "wq")
    assert matches("model.**", wq)
    assert matches("model.layers.[0-3].*.w?", wq)
    assert matches("**.wq", wq)
    assert not matches("model.*", wq)
    assert not matches("Model.**", wq)
    assert matches("model.**", ("model",))
    assert matches("0", ("0",))
    assert matches("0", (0,))
    assert not matches('"0"', (0,))
    assert matches("(a)b", ("(a)b",))
    assert matches_any(["x", "**.wq"], wq)
    assert not matches_any([], wq)


@pytest.mark.parametrize(
    "pattern", ["", "a.", ".a", "a..b", "..", '"open', '"a"b', 'a"b"', '"a".', r'"\q"', '"\n"', r'a."\u12"', '"""']
)
def test_bad_patterns_are_refused(pattern):
    with pytest.raises(ValueError, match="is not a pattern of leaf paths"):
        check_glob(pattern)
    with pytest.raises(ValueError, match="is not a pattern of leaf paths"):
        matches(pattern, ("a",))


@given(st.text(st.sampled_from('ab.*"\\[]()0\n'), max_size=8), st.lists(glob_keys, max_size=3).map(tuple))
def test_a_pattern_that_is_accepted_can_be_matched(pattern, path):
    try:
        check_glob(pattern)
    except ValueError:
        return
    assert matches(pattern, path) in (True, False)
