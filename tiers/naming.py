"""Names: leaf paths as other programs' files have them, no two alike, each readable back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tierstate.manifest.leaf import Path, encode_path, format_key, format_path

WHOLE = "value"
"""Name of the state itself, where it is a single leaf: its path is empty."""

_NO_NAMES = frozenset(["", ".", ".."])


def dotted(paths: Iterable[Path], reserved: Iterable[str] = ()) -> list[str]:
    """One name per path: its keys with dots between, as ``state_dict`` names them; else as tierstate prints paths.

    Two paths may read alike with dots, as ``("a.b",)`` and ``("a", "b")`` do: the first one keeps that name, the
    second is printed with quotes, or gets a number.

    Args:
        reserved: names that no leaf may have.
    """
    taken = set(reserved)
    return [_free(_dotted(path), taken) for path in paths]


def nested(paths: Iterable[Path], reserved: Iterable[str] = ()) -> list[tuple[str, ...]]:
    """One tuple of names per path, a name per key, for trees of groups: no name is empty, ``.`` or ``..``, or has a
    ``/`` or a NUL. Different keys beside each other have different names.

    Args:
        reserved: names that nothing at the root may have.
    """
    groups: dict[tuple[str, ...], _Siblings] = {(): _Siblings(dict.fromkeys(reserved), {})}
    return [_nest(path or (WHOLE,), groups) for path in paths]


def is_plain(path: Path, names: Sequence[str]) -> bool:
    """Whether the names say the path: each is a text key as it is."""
    return len(path) == len(names) and all(
        type(key) is str and key == name for key, name in zip(path, names, strict=True)
    )


class _Siblings(NamedTuple):
    """What is beside each other in one group: the code of the key that has each name, and the name of each."""

    codes: dict[str, Any]
    names: dict[Any, str]


def _nest(path: Path, groups: dict[tuple[str, ...], _Siblings]) -> tuple[str, ...]:
    at: tuple[str, ...] = ()
    for depth, key in enumerate(path, 1):
        codes, names = groups.setdefault(at, _Siblings({}, {}))
        # True, 1 and 1.0 have three codes; and what is a leaf is no group.
        code = (depth == len(path), key) if type(key) is str else (depth == len(path), encode_path((key,)), None)
        if code not in names:
            names[code] = next(name for name in _tried(_for_groups(key)) if name not in codes)
            codes[names[code]] = code
        at = (*at, names[code])
    return at


def _free(candidates: Iterator[str], taken: set[str]) -> str:
    name = next(name for name in candidates if name not in taken)
    taken.add(name)
    return name


def _dotted(path: Path) -> Iterator[str]:
    if not path:
        return _tried(iter([WHOLE]))
    return _tried(text(path) for text in (_joined, format_path))


def _joined(path: Path) -> str:
    return ".".join(map(_text, path))


def _for_groups(key: Any) -> Iterator[str]:
    """Names a key may have among groups, the best one first."""
    text = _text(key)
    if text in _NO_NAMES:
        yield f"({text})"
    elif "/" in text or "\0" in text:
        yield text.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    else:
        yield text
        printed = format_key(key)
        if "/" not in printed:
            yield printed


def _tried(names: Iterator[str]) -> Iterator[str]:
    last = ""
    for last in names:
        yield last
    number = 1
    while True:
        number += 1
        yield f"{last}~{number}"


def _text(key: Any) -> str:
    """A key as it is where it is text that can be written as UTF-8, else as tierstate prints it."""
    if type(key) is not str:
        return format_key(key)
    try:
        key.encode()
    except UnicodeEncodeError:
        return format_key(key)
    return key
