"""Globs of leaf paths (``model.**``), as in policies and in ``only=``: which leaves they match."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from functools import lru_cache
from typing import Any

from tierstate.manifest.arguments import short_repr

from .leaf_path import Path, format_key

_NO_GLOB = "{!r} is not a pattern of leaf paths; write keys with dots between, as in 'model.**'"


_SEGMENT = re.compile(r'"(?:[^"\\]|\\.)*"|\([^"()]*\)(?=\.|\Z)|[^."]+')


_TOKEN = re.compile(r"""b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*"|[()]|[^"'()]""")
"""Of a printed key that is bytes, a float or a tuple: a text in quotes, a parenthesis, or one of the other letters."""


@lru_cache(maxsize=4096)
def split_glob(pattern: str) -> tuple[str, ...]:
    """The segments of a glob; raises ValueError as `check_glob`."""
    if pattern == ".":
        return ()
    parts, at = [], 0
    # Also at the end of an empty pattern or after a last dot: an empty segment, which is an error.
    while at <= len(pattern):
        part = _printed_key(pattern, at)
        if not part:
            found = _SEGMENT.match(pattern, at)
            part = found.group() if found else ""
        end = at + len(part)
        if not part or (end < len(pattern) and pattern[end] != "."):
            raise ValueError(_NO_GLOB.format(pattern))
        if part.startswith('"'):
            _unquote(part, pattern)
        parts.append(part)
        at = end + 1
    return tuple(parts)


def _printed_key(pattern: str, at: int) -> str:
    """The segment that begins there, if it is like a printed key that is bytes, a float or a tuple; else no text.

    Dots, quotes and the signs of globs mean nothing in its quotes.
    """
    if not pattern.startswith(("(", "b'", 'b"'), at):
        return ""
    depth, end = 0, at
    while (token := _TOKEN.match(pattern, end)) is not None:
        end = token.end()
        depth += {"(": 1, ")": -1}.get(token.group(), 0)
        if depth <= 0:
            break
    whole = depth == 0 and end > at and pattern[end - 1] in ")'\""
    return pattern[at:end] if whole and (end == len(pattern) or pattern[end] == ".") else ""


def _unquote(part: str, pattern: str) -> Any:
    try:
        return json.loads(part)
    except ValueError as error:
        raise ValueError(_NO_GLOB.format(pattern)) from error


def check_glob(pattern: str) -> str:
    """Check that a pattern is a valid glob; returns it.

    Raises:
        ValueError: it has an empty segment, an open quote, or an escape that JSON does not have.
    """
    split_glob(pattern)
    return pattern


def check_globs(patterns: Iterable[str]) -> tuple[str, ...]:
    """Check that these are valid globs; returns them, also those of an iterator, which could be asked only once.

    Raises:
        TypeError: a single string was given instead of a list: its letters would be taken for globs. Or an item is no
            string.
        ValueError: as `check_glob`.
    """
    _check_no_glob(patterns)
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{short_repr(patterns)} is no list of patterns of leaf paths; write one, as in ['model.**']")
    found = tuple(patterns)
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(f"{pattern!r:.60} is no pattern of leaf paths; write text, as in 'model.**'")
        check_glob(pattern)
    return found


def _check_no_glob(patterns: Iterable[str]) -> None:
    if isinstance(patterns, str):
        text = f"{patterns!r:.80}"
        raise TypeError(f"{text} is one glob where a list of them is right, as in [{text}]")


def matches(pattern: str, path: Path) -> bool:
    """Whether a leaf path matches a glob.

    A pattern is written like a printed path: segments separated by dots. ``*``, ``?`` and ``[...]`` match within one
    key, ``**`` matches any number of keys, also none. A quoted segment (``"a.b"``) matches exactly this string. A
    segment without quotes is compared with the characters of a string key and with the printed form of any other key,
    so that ``0`` matches the int 0 and the string ``"0"``. A string key with dots, as in a module's ``state_dict``,
    matches as one key and also as the keys between its dots: ``model.layers.*.weight`` matches the leaf
    ``model."layers.0.weight"``.

    Raises:
        ValueError: the pattern is not valid (see `check_glob`).
    """
    walk = GlobWalk([pattern])
    for key in path:
        walk = walk.down(key)
    return walk.hit


def matches_any(patterns: Iterable[str], path: Path) -> bool:
    """Whether any of the globs matches.

    Raises:
        TypeError: a single string was given instead of a list: its letters would be taken for globs.
    """
    _check_no_glob(patterns)
    return any(matches(p, path) for p in patterns)


class GlobWalk:
    """Globs on the way down a tree of leaves, key by key: what does not match is left early, with all that is below it,
    and the keys of a container are compared once and not for each leaf in it.

    The positions in the patterns that the keys so far lead to are the states of a nondeterministic finite automaton
    (Thompson 1968), so that patterns with many ``**`` take no longer.

    Args:
        patterns: the globs.

    Raises:
        TypeError: as `matches_any`.
        ValueError: a pattern is not valid (see `check_glob`).
    """

    __slots__ = ("_cut", "_whole")

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        _check_no_glob(patterns)
        self._whole = frozenset[_Position]().union(*(_first(pattern).closed for pattern in patterns))
        self._cut = self._whole  # where string keys are cut at their dots

    def down(self, key: Any) -> GlobWalk:
        """The globs one key further down."""
        whole = _step(self._whole, key)
        if isinstance(key, str) and "." in key:
            cut = self._cut
            for part in key.split("."):
                if not (cut := _step(cut, part)):
                    break
        else:
            cut = whole if self._cut is self._whole else _step(self._cut, key)
        if not (whole or cut):
            return _NOTHING
        below = GlobWalk.__new__(GlobWalk)
        below._whole, below._cut = whole, cut
        return below

    @property
    def hit(self) -> bool:
        """Whether a glob matches the keys so far."""
        return _END in self._whole or _END in self._cut

    @property
    def alive(self) -> bool:
        """Whether a glob may match here or further down."""
        return bool(self._whole or self._cut)


class _Position:
    """A position in a glob, before a segment or at the end.

    Attributes:
        fits: whether a key fits the segment; None before ``**`` and at the end.
        after: the position after the segment; None at the end.
        closed: this position, and those after it that no key is needed for.
    """

    __slots__ = ("after", "closed", "fits")

    def __init__(self, fits: Callable[[Any], bool] | None = None, after: _Position | None = None) -> None:
        self.fits, self.after = fits, after
        skipped = after.closed if after is not None and fits is None else ()
        self.closed: frozenset[_Position] = frozenset((self, *skipped))


_END = _Position()


_NOTHING = GlobWalk()
"""Where no glob can match any more."""


@lru_cache(maxsize=4096)
def _first(pattern: str) -> _Position:
    position = _END
    for part in reversed(split_glob(pattern)):
        position = _Position(None if part == "**" else _segment(part), position)
    return position


def _step(positions: frozenset[_Position], key: Any) -> frozenset[_Position]:
    found = frozenset[_Position]()
    for position in positions:
        if position.after is None:
            continue
        if position.fits is None:
            found = found | position.closed if found else position.closed
        elif position.fits(key):
            found = found | position.after.closed if found else position.after.closed
    return found


def _outside_quotes(part: str) -> str:
    """A segment without what is in the quotes of a printed key."""
    if _printed_key(part, 0) != part:
        return part
    return "".join(token for token in _TOKEN.findall(part) if token[-1] not in "'\"")


def match_key(part: str, key: Any) -> bool:
    """Whether one segment of a glob matches a key."""
    return _segment(part)(key)


@lru_cache(maxsize=4096)
def _segment(part: str) -> Callable[[Any], bool]:
    """Whether a key fits one segment of a glob."""
    if part.startswith('"'):
        text = json.loads(part)
        return lambda key: isinstance(key, str) and key == text
    if part == "*":
        return lambda key: True
    if not any(sign in _outside_quotes(part) for sign in "*?["):
        if part.startswith("(b"):  # may be a string that JSON cannot have, which is printed as its bytes
            return lambda key: part in (key, format_key(key))
        return lambda key: part == (key if isinstance(key, str) else format_key(key))
    fits = re.compile(translate(part)).match
    return lambda key: fits(key if isinstance(key, str) else format_key(key)) is not None
