"""A walk through a state: what lies at each path, and which provider is for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.leaf import Path, decode_path, encode_path, format_path

from .base import Provider
from .objects import ObjectProvider
from .per_rank import PerRank, entry_of
from .registry import Registry
from .stateful import Stateful, stateful
from .values import ValueProvider

MAX_DEPTH = 200
"""Keys in a path."""

Leave: TypeAlias = Callable[[Path], bool]
"""Whether pickle is allowed for the leaf at this path."""

Ident: TypeAlias = tuple[Any, ...]
"""A key together with its type, so that 1, True and 1.0 are three keys."""

_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "odict", list: "list", tuple: "tuple"}
_REMEDY = "allow pickle for this leaf, or register a provider for its type"


def never(path: Path) -> bool:
    """No pickle anywhere."""
    return False


@dataclass(slots=True, eq=False)
class Place:
    """One place of a state: a container, or a leaf with its provider.

    Attributes:
        path: the keys that lead here.
        value: what its parent holds; a stateful thing itself, not its state.
        tree: what was walked: the value, or the stateful thing's state.
        kind: a container's kind; empty for a leaf.
        attrs: a container's attributes.
        children: what a container holds, in order, and the key of each.
        provider: a leaf's provider.
        stateful: how to give a state back to a stateful thing.
        problem: why a lenient walk found no provider.
    """

    path: Path
    value: Any
    tree: Any
    kind: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    children: dict[Ident, tuple[Any, Place]] = field(default_factory=dict)
    provider: Provider | None = None
    stateful: Stateful | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """The path as printed."""
        return format_path(self.path)

    def walk(self) -> Iterator[Place]:
        """This place and all below, each container before what it holds."""
        stack = [self]
        while stack:
            place = stack.pop()
            yield place
            stack += [child for _, child in reversed(place.children.values())]


class Survey:
    """Walks states.

    Args:
        registry: where providers are looked up.
        allow_pickle: which leaves without a provider may be pickled.
        lenient: note what cannot be saved as a place's ``problem`` instead of raising: for a state that is restored
            into, whose values need not be such as can be saved.
        rank: under which number this process's own values lie.
    """

    def __init__(
        self, registry: Registry, allow_pickle: Leave = never, *, lenient: bool = False, rank: int = 0
    ) -> None:
        self._registry, self._allow_pickle, self._lenient, self._rank = registry, allow_pickle, lenient, rank
        self._open: dict[int, Path] = {}

    def take(self, state: Any, path: Path = ()) -> Place:
        """The place of a state, with all below it.

        Raises:
            CaptureError: a value without a provider, a cycle, a key that is none, or a value that failed while it
                was read; the message names the path.
        """
        try:
            return self._visit(state, path)
        except RecursionError as error:
            raise CaptureError("the state is nested deeper than Python's recursion limit allows here") from error

    def _visit(self, value: Any, path: Path) -> Place:
        if len(path) > MAX_DEPTH:
            raise CaptureError(f"{format_path(path[:8])}...: the state is nested deeper than {MAX_DEPTH}")
        kind = container_kind(value)
        provider, problem = self._provider(value, path, kind)
        if provider is not None:
            return Place(path, value, value, provider=provider)
        if kind or not problem:
            return self._descend(value, path, kind)
        if self._allow_pickle(path):
            return Place(path, value, value, provider=ObjectProvider(value))
        if self._lenient:
            return Place(path, value, value, problem=problem)
        raise CaptureError(f"{format_path(path)}: {problem}")

    def _provider(self, value: Any, path: Path, kind: str) -> tuple[Provider | None, str]:
        """A provider, or why there is none; neither where the value is to be walked."""
        try:
            found = self._registry.exact(value)
            if found is None and kind in ("list", "tuple"):
                found = _plain(value)
            if found is None and not kind:
                found = self._registry.inherited(value)
        except CaptureError as error:
            return None, f"{error}; or {_REMEDY}"
        except Exception as error:
            raise CaptureError(f"{format_path(path)}: {_type(value)} failed while it was read: {error!r}") from error
        if found is not None or kind or self._how(value) is not None:
            return found, ""
        return None, f"a {_type(value)} has no provider; {_REMEDY}"

    def _how(self, value: Any) -> Stateful | None:
        return entry_of(self._rank) if type(value) is PerRank else stateful(value)

    def _descend(self, value: Any, path: Path, kind: str) -> Place:
        if id(value) in self._open:
            raise CaptureError(
                f"{format_path(path)}: is the same object as {format_path(self._open[id(value)])}, which holds it; "
                "a state cannot hold itself"
            )
        self._open[id(value)] = path
        try:
            return self._container(value, path, kind) if kind else self._state_of(value, path)
        finally:
            del self._open[id(value)]

    def _container(self, value: Any, path: Path, kind: str) -> Place:
        place = Place(path, value, value, kind, _named(value) if kind == "namedtuple" else {})
        for key, item in _items(value, kind):
            mark = ident(key)
            if mark in place.children or not _faithful(key):
                raise CaptureError(
                    f"{format_path(path)}: the key {key!r:.60} of type {type(key).__qualname__} cannot be saved, or "
                    "looks like another when saved; use str, int, bool, float, bytes, None or a tuple of these"
                )
            place.children[mark] = (key, self._visit(item, (*path, key)))
        return place

    def _state_of(self, value: Any, path: Path) -> Place:
        how = self._how(value)
        assert how is not None  # _provider gave a problem otherwise
        try:
            tree = how.get(value)
        except RecursionError:
            raise
        except CaptureError as error:
            raise CaptureError(f"{format_path(path)}: {error}") from error
        except Exception as error:
            raise CaptureError(f"{format_path(path)}: the state of {_type(value)} failed: {error!r}") from error
        place = self._visit(tree, path)
        if place.stateful is not None:
            raise CaptureError(f"{format_path(path)}: the state of {_type(value)} is {_type(tree)}, no tree of values")
        place.value, place.stateful = value, how
        return place


def container_kind(value: Any) -> str:
    """The kind of a container that leaves may lie in; empty for anything else, also for subclasses of containers."""
    found = _KINDS.get(type(value), "")
    if not found and isinstance(value, tuple):
        fields = getattr(type(value), "_fields", None)
        named = isinstance(fields, tuple) and len(fields) == len(value) and all(isinstance(f, str) for f in fields)
        return "namedtuple" if named else ""
    return found


def ident(key: Any) -> Ident:
    """The key with its type, told apart from every other key."""
    if type(key) is float:
        return (float, key.hex())
    if type(key) is tuple:
        return (tuple, *map(ident, key))
    return (type(key), key)


def _items(value: Any, kind: str) -> Any:
    if kind in ("dict", "odict"):
        return value.items()
    return zip(value._fields, value, strict=True) if kind == "namedtuple" else enumerate(value)


def _faithful(key: Any) -> bool:
    """Whether the key can be saved, and is the same when read again."""
    if (type(key) is str and key.isascii()) or type(key) in (bool, type(None)):
        return True
    try:
        (again,) = decode_path(encode_path((key,)))
    except (CaptureError, FormatError, ValueError, RecursionError):
        return False
    return ident(again) == ident(key)


def _plain(value: Any) -> Provider | None:
    try:
        return ValueProvider(value)
    except CaptureError:
        return None


def _named(value: Any) -> dict[str, Any]:
    kind = type(value)
    return {"type": f"{kind.__module__}:{kind.__qualname__}", "fields": list(kind._fields)}


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
