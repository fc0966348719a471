"""Globs of leaf paths: what they match, one path at a time and on the way down a tree."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.manifest_strategies import any_text, keys, paths, tricky_text

from tierstate.manifest.format.globs import GlobWalk, check_glob, matches, matches_any
from tierstate.manifest.format.leaf_path import format_key, format_path

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


def readings(path):
    """A path as patterns without quotes see it: 0 is the text "0" too, and a key with dots is also those between."""
    whole = [key if isinstance(key, str) else format_key(key) for key in path]
    cut = [part for key, text in zip(path, whole, strict=True) for part in (text.split(".") if key == text else [text])]
    return whole, cut


@given(paths, paths)
@example(("a.b", '"', "**", "[x]", "\\", "\x9b", 1.5), ())
@example((b"a.b",), (b"a",))
@example((b"a*",), (b"ab",))
@example((b"it's",), ())
@example((b'a"b',), ())
@example((("a.b", 1), "w"), ())
@example((("a*",),), (("ab",),))
@example((("[x]", ((), (1.5,))),), ())
@example((("it's", 'a"b', b"'\"", ")", "("),), ())
@example(("\ud800.*",), ())
@example((b"x",), ("\ud800",))
@example(((),), ())
def test_a_printed_path_is_a_pattern_that_matches_it_and_no_other(path, other):
    pattern = check_glob(format_path(path))
    assert matches(pattern, path)
    assert not matches(pattern, (*path, "more"))
    if all(one != two for one, two in zip(readings(path), readings(other), strict=True)):
        assert not matches(pattern, other)


def test_signs_outside_of_quotes_are_those_of_globs():
    assert matches("(*, 1)", ((2, 1),))
    assert matches("('a.*', *)", (("a.*", 3),))
    assert matches("(*", ("(x",))
    assert matches("b'*", ("b'x",))


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


globs = st.lists(segments, min_size=1, max_size=4).map(".".join)


@given(st.lists(globs, max_size=3), st.lists(glob_keys, max_size=4).map(tuple), st.lists(glob_keys, max_size=2))
def test_a_walk_hits_what_some_glob_matches_and_dies_only_where_none_can_match_further_down(patterns, path, more):
    walk = GlobWalk(patterns)
    for key in path:
        walk = walk.down(key)
    assert walk.hit == matches_any(patterns, path)
    if not walk.alive:
        assert not matches_any(patterns, (*path, *more))


def test_many_stars_take_no_longer():
    path = tuple("ab" * 40)
    assert matches(".".join(["**", "a"] * 20 + ["**", "b"]), path)
    assert not matches(".".join(["**", "a"] * 20 + ["**", "c"]), path), "exponential where each ** is tried apart"


def test_a_walk_of_one_text_is_refused():
    with pytest.raises(TypeError, match="one glob where a list"):
        GlobWalk("model.**")
