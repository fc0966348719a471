"""A walk through a state: the value at each path, and the provider that saves it or restores into it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from tierstate.manifest.arguments import short_repr
from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf_path import (
    Path,
    decode_path,
    encode_path,
    float_bits,
    format_path,
    path_key,
)
from tierstate.providers.base import Provider
from tierstate.providers.registry import Registry
from tierstate.providers.values.classes import MODULE_ATTRIBUTES, check_attributes, class_form, form_items
from tierstate.providers.values.modules import metadata_of
from tierstate.providers.values.stateful import PerRank, Stateful, per_rank_stateful, stateful
from tierstate.providers.values.values import ObjectProvider, ValueProvider

MAX_PATH_DEPTH = 200
"""Largest number of keys in a path."""


PickleAllowed: TypeAlias = Callable[[Path], bool]
"""Path of a leaf -> whether it may be pickled or unpickled."""


TypedKey: TypeAlias = tuple[Any, ...]
"""A key together with its type, so that 1, True and 1.0 are three different keys."""


_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "odict", list: "list", tuple: "tuple"}


MAY_HAVE_ATTRIBUTES: dict[str, tuple[str, ...]] = {"odict": MODULE_ATTRIBUTES, "namedtuple": ()}
"""Kinds of containers that may have attributes beside their items -> those that are saved with them."""


def pickle_remedy(path: Path) -> str:
    """What to write in a policy so that the leaf at this path may be a pickle."""
    where = format_path(path).replace("'", "''")
    return f"allow pickle for this leaf (in the policy: `rules: [{{match: '{where}', pickle: true}}]`)"


def _remedy(path: Path, value: Any) -> str:
    if isinstance(value, DataLoader):
        return "save and restore its position with ts.Loader(loader), and iterate over that"
    if type(value) in (torch.Tensor, torch.nn.Parameter, np.ndarray):  # a provider for the type would get all of them
        return pickle_remedy(path)
    kind = type(value).__qualname__
    return f"{pickle_remedy(path)}, or register a provider for its type (ts.register_provider({kind}, MyProvider))"


def no_pickle(path: Path) -> bool:
    """The rule that allows pickle for no leaf."""
    return False


@dataclass(slots=True, eq=False)
class StateNode:
    """One node of a state: a container, or a leaf with its provider.

    Attributes:
        path: its keys from the root.
        value: the value in its parent; for a stateful object the object itself, not its state.
        tree: the value that was walked: ``value`` itself, or the state of a stateful object.
        kind: a container's kind; empty for a leaf.
        attrs: a container's attributes; with `FORM` if it has a class of its own (see `class_form`).
        children: the items of a container, in order, each with its key.
        provider: a leaf's provider.
        stateful: how the state of a stateful object is set.
        problem: why a lenient walk found no provider.
        own_memory: whether a restore gives the value to a stateful object in memory of its own, and fills nothing here.
    """

    path: Path
    value: Any
    tree: Any
    kind: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    children: dict[TypedKey, tuple[Any, StateNode]] = field(default_factory=dict)
    provider: Provider | None = None
    stateful: Stateful | None = None
    problem: str = ""
    own_memory: bool = False

    @property
    def name(self) -> str:
        """The path as printed."""
        return format_path(self.path)

    @property
    def may_hold_objects(self) -> bool:
        """Whether a stateful object may be here or below."""
        return bool(self.children) or self.stateful is not None

    def walk(self) -> Iterator[StateNode]:
        """This node and all below it, each container before its items."""
        stack = [self]
        while stack:
            place = stack.pop()
            yield place
            if place.children:
                stack += [child for _, child in reversed(place.children.values())]


class StateWalk:
    """Walks states.

    Args:
        registry: where providers are looked up.
        allow_pickle: which leaves without a provider may be pickled.
        lenient: store the reason why a value cannot be saved in the node's ``problem`` instead of raising. Used for a
            state that is restored into: its present values need not be ones that can be saved.
        rank: this process's rank, under which its `PerRank` values are.
    """

    def __init__(
        self, registry: Registry, allow_pickle: PickleAllowed = no_pickle, *, lenient: bool = False, rank: int = 0
    ) -> None:
        self._registry, self._allow_pickle, self._lenient, self._rank = registry, allow_pickle, lenient, rank
        self._open: dict[int, Path] = {}

    def take(self, state: Any, path: Path = ()) -> StateNode:
        """The root node of a state, with all nodes below it.

        Raises:
            CaptureError: a value has no provider, a cycle, a key that cannot be saved, or a value that raised an error
                while it was read; the message names the path.
        """
        try:
            return self._visit(state, path)
        except RecursionError as error:
            raise CaptureError("the state is nested deeper than Python's recursion limit allows here") from error

    def _visit(self, value: Any, path: Path) -> StateNode:
        if len(path) > MAX_PATH_DEPTH:
            raise CaptureError(f"{format_path(path[:8])}...: the state is nested deeper than {MAX_PATH_DEPTH}")
        kind = container_kind(value)
        provider, problem = self._provider(value, path, kind)
        if provider is not None:
            return StateNode(path, value, value, provider=provider)
        if problem and not kind:
            kind, problem = self._own_class(value, path, problem)
        elif kind in MAY_HAVE_ATTRIBUTES and not self._lenient:
            kind, problem = self._only_items(value, path, kind)
        if kind or not problem:
            return self._descend(value, path, kind)
        if self._allow_pickle(path):
            return StateNode(path, value, value, provider=ObjectProvider(value))
        if self._lenient:
            return StateNode(path, value, value, problem=problem)
        raise CaptureError(f"{format_path(path)}: {problem}")

    def _provider(self, value: Any, path: Path, kind: str) -> tuple[Provider | None, str]:
        """A provider, or the reason why there is none; neither if the value is a container or stateful object."""
        try:
            found = self._registry.exact(value)
            if found is None and (kind in ("list", "tuple") or type(value) is deque):
                found = _plain(value)
            if found is None and not kind:
                found = self._registry.inherited(value)
        except CaptureError as error:
            return None, f"{error}; or {_remedy(path, value)}"
        except Exception as error:
            raise CaptureError(f"{format_path(path)}: {_type(value)} failed while it was read: {error!r}") from error
        if found is not None or kind or self._how(value) is not None:
            return found, ""
        return None, f"a {_type(value)} has no provider; {_remedy(path, value)}"

    def _own_class(self, value: Any, path: Path, problem: str) -> tuple[str, str]:
        """The kind of a container with a class of its own; empty, and the problem, for any other value."""
        try:
            form = class_form(value)
        except CaptureError as error:
            return "", f"{error}; {_remedy(path, value)}"
        return (form[0], "") if form is not None else ("", problem)

    def _only_items(self, value: Any, path: Path, kind: str) -> tuple[str, str]:
        """The kind of a container that has its items and nothing else; empty, and the problem, for any other one."""
        try:
            check_attributes(value, MAY_HAVE_ATTRIBUTES[kind])
        except CaptureError as error:
            return "", f"{error}; {_remedy(path, value)}"
        return kind, ""

    def _how(self, value: Any) -> Stateful | None:
        return per_rank_stateful(self._rank) if type(value) is PerRank else stateful(value)

    def _descend(self, value: Any, path: Path, kind: str) -> StateNode:
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

    def _container(self, value: Any, path: Path, kind: str) -> StateNode:
        place = StateNode(path, value, value, kind, self._attrs_of(value, path))
        for key, item in tuple(container_items(value)):  # at one moment: another thread may change it meanwhile
            mark = typed_key(key)
            if mark in place.children or not _faithful(key):
                whole = _plain(value)
                if whole is not None:
                    return StateNode(path, value, value, provider=whole)
                raise CaptureError(
                    f"{format_path(path)}: the key {short_repr(key):.60} of type {type(key).__qualname__} cannot be "
                    "saved, or looks like another when saved; "
                    "use str, int, bool, float, bytes, None or a tuple of these"
                )
            place.children[mark] = (key, self._visit(item, (*path, path_key(key))))
        return place

    def _attrs_of(self, value: Any, path: Path) -> Mapping[str, Any]:
        try:
            return container_attrs(value)
        except CaptureError as error:  # of a state dict's metadata, which a restore replaces
            if self._lenient:
                return {}
            raise CaptureError(f"{format_path(path)}: {error}") from error

    def _state_of(self, value: Any, path: Path) -> StateNode:
        how = self._how(value)
        assert how is not None  # otherwise _provider returned a problem
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
    """The kind of a container whose items become leaves; empty for all else, also for subclasses of containers."""
    found = _KINDS.get(type(value), "")
    if not found and isinstance(value, tuple):
        fields = getattr(type(value), "_fields", None)
        named = isinstance(fields, tuple) and len(fields) == len(value) and all(isinstance(f, str) for f in fields)
        return "namedtuple" if named else ""
    return found


def container_attrs(value: Any) -> Mapping[str, Any]:
    """The attributes of a container's leaf: of an OrderedDict, a namedtuple, or a container with a class of its own."""
    kind = container_kind(value)
    if kind:
        return _attrs(value, kind)
    form = class_form(value)
    return form[1] if form is not None else {}


def container_items(value: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a container that `StateWalk` descends into, each with its key."""
    kind = container_kind(value)
    if kind in ("dict", "odict"):
        return cast("Iterable[tuple[Any, Any]]", value.items())
    if kind == "namedtuple":
        return zip(value._fields, value, strict=True)
    return enumerate(value) if kind else form_items(value)


def typed_key(key: Any) -> TypedKey:
    """The key with its type, so that it differs from every other key."""
    if type(key) is float:
        return (float, float_bits(key))
    if type(key) is tuple:
        return (tuple, *map(typed_key, key))
    return (type(key), key)


def _faithful(key: Any) -> bool:
    """Whether the key can be saved, and is exactly the same after a restore."""
    if (type(key) is str and key.isascii()) or type(key) in (bool, type(None)):
        return True
    try:
        (again,) = decode_path(encode_path((key,)))
    except (CaptureError, FormatError, ValueError, RecursionError):
        return False
    return typed_key(again) == typed_key(key)


def _plain(value: Any) -> Provider | None:
    try:
        return ValueProvider(value)
    except CaptureError:
        return None


def _attrs(value: Any, kind: str) -> dict[str, Any]:
    """The attributes of a container's leaf."""
    if kind == "odict":
        return metadata_of(value)
    named = type(value)
    return (
        {"type": f"{named.__module__}:{named.__qualname__}", "fields": list(named._fields)}
        if kind == "namedtuple"
        else {}
    )


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
