"""Paths: encoded and printed without ever confusing two."""

from __future__ import annotations

import json
import random
import re
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.manifest_strategies import any_text, paths, strict, tricky_text

from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf_path import (
    MAX_NESTING,
    decode_path,
    decode_paths,
    encode_path,
    format_key,
    format_path,
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


def spellings(text):
    """The text of a path, and other JSON of the same meaning."""
    keys = json.loads(text)
    escaped = text.replace('"a', '"\\u0061')
    return [text, json.dumps(keys, indent=1), json.dumps(keys, ensure_ascii=False), f" {text}\n", escaped]


@given(st.lists(paths, max_size=8), st.randoms(use_true_random=False))
@example([(), ("a",), ("a", 0), (-1, True, False, None, 10**17, 10**18, -(10**30))], random.Random(0))
def test_many_paths_are_decoded_as_one_by_one(found, dice):
    texts = [dice.choice(spellings(encode_path(path))) for path in found]
    decoded, canonical = decode_paths(texts)
    assert [strict(path) for path in decoded] == [strict(path) for path in found]
    assert canonical == [encode_path(path) for path in found]


@pytest.mark.parametrize("text", ['["a"]\n["b"]', '["a"],["b"]', '["a"', "", "[-0]", "[01]", '["\n"]', "{}"])
def test_a_text_among_many_that_is_no_path_is_refused_as_alone(text):
    texts = [encode_path(("model", i)) for i in range(2000)]
    assert decode_paths(texts)[1] == texts
    texts[1500] = text
    try:
        alone = decode_path(text)
    except FormatError as error:
        with pytest.raises(FormatError, match=re.escape(str(error))):
            decode_paths(texts)
    else:
        assert decode_paths(texts)[0][1500] == alone, "the int 0, written with a sign"


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
