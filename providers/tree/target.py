"""A planned restore: which provider receives each leaf, and how the state is built from what they received.

Whatever can still be refused comes first. In a given state, `Target.ahead` is loaded before all else: the values that
are new, from which stateful objects get their state, and buffers for values that share memory. `Target.settle` sets the
objects, and takes all of that back if one of them refuses. Only then is the state's own memory filled
(`Target.wanted`), which nothing but damage can stop.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierstate.manifest.errors import CaptureError, FormatError, StateMismatch, untrusted
from tierstate.manifest.format.leaf import Leaf
from tierstate.providers.base import Provider
from tierstate.providers.registry import Registry
from tierstate.providers.tensors.tensors import TensorProvider, is_meta
from tierstate.providers.values.classes import FORM, change_form, like_form
from tierstate.providers.values.copies import copy_state
from tierstate.providers.values.stateful import Stateful, is_generator

from .compare import replaces_state
from .lossy_rules import Lossy
from .staging import OverlapStaging
from .structure import VersionNode, build_container
from .ties import TiedLeaf, copy_value
from .walk import StateNode, StateWalk

log = logging.getLogger("tierstate")


class Target:
    """A planned restore. Load `ahead`, call `settle`, load `wanted`, call `finish`; call `undo` if that fails.

    Attributes:
        ahead: the providers that are loaded before `settle`, each with the index of its leaf.
        wanted: index of a leaf -> the provider that receives its bytes after that, through its ``parts`` if it has
            several boxes.
        elsewhere: indices of leaves that only the version has: they belong to other ranks.
        is_new: whether no state was given, so that all values are created.
        changed: whether a given state may have been changed by what failed, and not given back.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        root: VersionNode,
        ahead: dict[int, Provider],
        wanted: dict[int, Provider],
        ties: Mapping[int, TiedLeaf],
        chosen: set[int],
        given: set[int],
        place: StateNode | None,
        matched: Mapping[int, StateNode],
        registry: Registry,
        joined: set[int],
        elsewhere: Sequence[int],
    ) -> None:
        self._staging = OverlapStaging(wanted)
        self.wanted, self.elsewhere = wanted, tuple(elsewhere)
        self.ahead = [*ahead.items(), *self._staging.providers.items()]
        self.is_new, self.changed = place is None, False
        self._new, self._receivers = ahead, {**ahead, **self._staging.providers, **wanted}
        self._leaves, self._root, self._ties, self._chosen, self._given = leaves, root, ties, chosen, given
        self._place, self._matched, self._registry = place, matched, registry
        self._joined = joined
        self._values: dict[int, Any] = {}
        self._moved: list[tuple[Provider, Provider]] = []
        self._backups: list[Callable[[], None]] = []
        self._generators: list[tuple[Stateful, Any, Any]] = []

    def settle(self) -> None:
        """Set the stateful objects, once the providers of `ahead` are loaded; the inner ones first, in order.

        Raises:
            StateMismatch: an object does not accept what was saved, or values that share memory would have different
                bytes. The state is as it was before.
            FormatError: the bytes of a plain value cannot be decoded.
        """
        try:
            self._values = self._done(self._new)
            self._staging.check(self._leaves)
            if self._place is not None:
                self._set_objects(self._root, self._place)
                # Setting and reading other objects may have drawn from them: a loader of torchdata makes an iterator.
                for how, generator, tree in self._generators:
                    how.put(generator, tree)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Give the stateful objects the state back that they had before `settle`."""
        while self._backups:
            back_up = self._backups.pop()
            try:
                back_up()
            except Exception as error:
                self.changed = True
                log.warning("an object cannot be given its state back after a failed restore: %r", error)

    def finish(self) -> Any:
        """Complete a restore after all bytes were loaded, and return the state: the given one, if it is mutable.

        Raises:
            StateMismatch, FormatError: a new value cannot be made; not in a given state, except by a custom provider.
        """
        self._staging.write()
        self._values |= self._done(self.wanted)
        self._values |= {i: self._staging.done(i) for i in self._staging.providers}
        for source, kept in self._moved:
            copy_value(source, kept)
        for i in sorted(self._chosen - self._given):
            if i in self._ties:
                with untrusted(self._leaves[i], named=False):
                    self._values[i] = self._tie(i, self._ties[i])
        state = self._assemble(self._root, self._place)
        self._backups.clear()
        return state

    def _done(self, providers: Mapping[int, Provider]) -> dict[int, Any]:
        """The values of loaded leaves, by their indices."""
        found, i = dict[int, Any](), 0
        try:
            for i, provider in providers.items():
                found[i] = provider.done()
        except Exception:
            with untrusted(self._leaves[i]):  # not around each call, which would double the time
                raise
        return found

    def _tie(self, index: int, tie: TiedLeaf) -> Any:
        """The value of a tied leaf, from the value of its root."""
        root, place = self._values[tie.root], self._matched.get(index)
        saved = self._leaves[tie.root].spec
        if place is None or place.provider is None:
            return tie.of(root, saved)
        receiver = place.provider.receiver(tie.spec)
        if receiver is not place.provider:  # the value is replaced, not filled
            return tie.of(root, saved)
        if index in self._joined:  # already filled together with its root
            return self._done({index: receiver})[index]
        source = self._receivers[tie.root] if tie.offset is None else TensorProvider(tie.view(root))
        alias = getattr(source, "alias", None)
        if alias is None or alias != getattr(receiver, "alias", None):
            copy_value(source, receiver)
        return self._done({index: receiver})[index]

    def _assemble(self, node: VersionNode, place: StateNode | None) -> Any:
        """The value for a node of the state: the given one after its change, or a new one."""
        if place is not None and place.stateful is not None and not place.stateful.transparent:
            return place.value  # it was set by `settle`
        if place is None:
            return self._create(node)
        if not node.kind:
            # The tensor in a Lossy was filled in place.
            return place.value if isinstance(place.value, Lossy) else self._values.get(node.index, place.value)
        changed = {}
        for mark, child in node.children.items():
            if mark in place.children and self._wanted(child):
                key, at = place.children[mark]
                value = self._assemble(child, at)
                if value is not at.value:
                    changed[key] = value
        state = _changed(place, changed)
        if place.stateful is not None and self._wanted(node):
            place.stateful.put(place.value, state)
            return place.value
        return state

    def _create(self, node: VersionNode) -> Any:
        """A new value for a node of the version."""
        if not node.kind:
            return self._values.get(node.index)
        items = {child.key: self._create(child) for child in node.children.values() if self._wanted(child)}
        with untrusted(node.leaf, named=False):
            return build_container(node, items)

    def _wanted(self, node: VersionNode) -> bool:
        return node.has_any(self._chosen)

    def _set_objects(self, node: VersionNode, place: StateNode) -> None:
        for mark, child in node.children.items():
            at = place.children[mark][1] if mark in place.children else None
            if at is not None and at.may_hold_objects:
                self._set_objects(child, at)
        if place.stateful is not None and not place.stateful.transparent and self._wanted(node):
            self._set_object(node, place)

    def _set_object(self, node: VersionNode, place: StateNode) -> None:
        """Set the state of a stateful object, and check that it kept the values exactly."""
        how = place.stateful
        assert how is not None
        filled = None if place.own_memory else how.in_place
        kind = type(place.value).__qualname__
        try:
            tree = self._saved(node, place) if replaces_state(place, node, self._chosen) else self._mixed(node, place)
            self._backups.append(how.backed_up(place.value) if filled is None else filled.back_up(place.value))
        except (FormatError, StateMismatch):
            raise
        except Exception as error:
            raise StateMismatch(f"{place.name}: the present state of the {kind} cannot be copied: {error!r}") from error
        try:
            (how.put if filled is None else filled.put)(place.value, tree)
        except Exception as error:
            raise StateMismatch(f"{place.name}: the {kind} does not take the saved state: {error}") from error
        if is_generator(place.value):
            self._generators.append((how, place.value, tree))
        if not how.strict:
            self._check_kept(place, node)

    def _saved(self, node: VersionNode, place: StateNode | None, top: bool = True) -> Any:
        """The state of a stateful object as it was saved."""
        if place is not None and place.stateful is not None and not top:
            if place.stateful.transparent:
                self._hold(node, place)
            return place.value
        if node.kind:
            kids = place.children if place is not None else {}
            return build_container(
                node,
                {
                    child.key: self._saved(child, kids[mark][1] if mark in kids else None, top=False)
                    for mark, child in node.children.items()
                },
            )
        if place is not None and isinstance(place.value, Lossy) and not place.own_memory:
            return place.value
        return self._value_ahead(node.index, place)

    def _hold(self, node: VersionNode, place: StateNode) -> None:
        """Set what an object that only holds values holds, within the state of another object."""
        how = place.stateful
        assert how is not None
        before = how.get(place.value)
        self._backups.append(lambda: how.put(place.value, before))
        how.put(place.value, self._saved(node, place))

    def _mixed(self, node: VersionNode | None, place: StateNode, top: bool = True) -> Any:
        """The present state of a stateful object with some of its leaves as they were saved."""
        if place.stateful is not None and not top:
            return place.value
        if node is None or not self._wanted(node):
            return copy_state(place.tree, self._inner(place)) if place.own_memory else place.tree
        if not place.children:
            return self._value_ahead(node.index, place)
        children = node.children
        return _like(
            place,
            {key: self._mixed(children.get(mark), at, top=False) for mark, (key, at) in place.children.items()},
        )

    def _inner(self, place: StateNode) -> dict[int, Any]:
        """The stateful objects within a state, by id."""
        return {id(at.value): at.value for at in place.walk() if at.stateful is not None and at is not place}

    def _value_ahead(self, index: int, place: StateNode | None) -> Any:
        """The value of a leaf before the state's own memory is filled: a new one, or the present one."""
        tie = self._ties.get(index)
        if tie is not None and (index in self._given or (place is not None and is_meta(place.value))):
            root = self._values[tie.root] if tie.root in self._values else self._matched[tie.root].value
            return tie.of(root, self._leaves[tie.root].spec)
        if index in self._values:
            return self._values[index]
        assert place is not None
        return place.value

    def _check_kept(self, place: StateNode, node: VersionNode) -> None:
        """Raise StateMismatch where a dtype has changed: some objects cast what they are given. Where an object filled
        in place keeps a copy of a tensor, note that it is to be filled too.
        """
        try:
            again = StateWalk(self._registry, lenient=True).take(place.value, place.path)
        except CaptureError as error:
            raise StateMismatch(f"{place.name}: cannot be read after its state was set: {error}") from error
        kept = {at.path: at.provider for at in again.walk() if at.provider is not None}
        for leaf in (s for s in node.walk() if s.index in self._chosen):
            spec = self._ties[leaf.index].spec if leaf.index in self._ties else leaf.leaf.spec
            provider = kept.get(leaf.leaf.path)
            if provider is None or provider.kind != spec.kind:
                continue
            if provider.spec.dtype != spec.dtype:
                raise StateMismatch(
                    f"{leaf.leaf.name}: after the saved state was set, has dtype {provider.spec.dtype} here, "
                    f"{spec.dtype} in the version: it was cast"
                )
            given = self._matched.get(leaf.index)
            source = given.provider if given is not None else None
            if source is not None and getattr(source, "alias", None) != getattr(provider, "alias", None):
                self._moved.append((source, provider))


def _like(place: StateNode, items: Mapping[Any, Any]) -> Any:
    """A new container like that of a node, with other items under the same keys."""
    container = place.tree
    if FORM in place.attrs:
        return like_form(container, items)
    if place.kind == "odict":
        state = OrderedDict(items)
        vars(state).update(vars(container))
        return state
    if place.kind == "dict":
        return dict(items)
    return list(items.values()) if place.kind == "list" else tuple.__new__(type(container), items.values())


def _changed(place: StateNode, changed: Mapping[Any, Any]) -> Any:
    """The container with some items changed: itself, if it is mutable."""
    container = place.tree
    if not changed:
        return place.value if place.stateful is None else container
    if place.kind in ("tuple", "namedtuple"):
        keys = [key for key, _ in place.children.values()]
        items = (changed.get(key, item) for key, item in zip(keys, container, strict=True))
        return tuple.__new__(type(container), items)
    if FORM in place.attrs:
        return change_form(container, changed)
    for key, value in changed.items():
        container[key] = value
    return container
