"""Containers with a class of their own, and classes of the user's: exact, and never because a version asks for them."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import pickle
import subprocess
import sys
import textwrap
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import difference
from support.state_strategies import PLAIN, Access, Colour, Fixed, Level, Named, Ordered, Point, Settings
from support.transfer import restore, transfer

import tierstate as ts
from tierstate.manifest.errors import CaptureError, FormatError, StateMismatch, Unsafe
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.flatten_cache import FlattenCache
from tierstate.providers.values import classes
from tierstate.providers.values.classes import known_class, stand_in_classes
from tierstate.providers.values.encoding import decode_value, encode_value

T = TypeVar("T")


def again(state: Any, **options: Any) -> Any:
    return restore(*transfer(flatten(state)), **options)


@given(PLAIN)
@settings(deadline=None, max_examples=200)
def test_any_value_is_what_a_pickle_of_it_is(value: Any) -> None:
    found = again([value])[0]
    assert difference(found, value) == ""
    pickled = pickle.loads(pickle.dumps(value))
    # A pickle takes NumPy's longlong for int64. Without the place: equal sets may be written in another order.
    assert difference(found, pickled).rpartition(": ")[2] == difference(value, pickled).rpartition(": ")[2]


@dataclasses.dataclass
class Base:
    a: int


@dataclasses.dataclass
class Derived(Base, Generic[T]):
    b: T
    c: int = dataclasses.field(init=False, default=3)

    def __post_init__(self) -> None:
        self.c = 7  # only where one is made by the class itself

    @functools.cached_property
    def twice(self) -> int:
        return 2 * self.a


def test_a_dataclass_is_its_fields_and_is_made_without_its_init() -> None:
    value = Derived(1, torch.ones(2))
    value.c = 5
    assert value.twice == 2  # kept beside the fields, and found anew
    found = again({"x": value})["x"]
    assert (type(found), found.a, found.c, "twice" in vars(found)) == (Derived, 1, 5, False)
    assert [leaf.name for leaf in flatten({"x": value}).leaves] == [".", "x", "x.a", "x.b", "x.c"]


def test_in_place_the_objects_of_the_state_are_filled() -> None:
    saved = {
        "s": Settings(1, torch.ones(2)),
        "f": Fixed(2, torch.ones(1)),
        "n": Named(a=3),
        "o": Ordered(b=4),
        "d": defaultdict(list, k=[5]),
        "q": deque([torch.ones(3), 6], maxlen=4),
    }
    leaves, data = transfer(flatten(saved))
    state: dict[str, Any] = {
        "s": Settings(0, torch.zeros(2)),
        "f": Fixed(0, torch.zeros(1)),
        "n": Named(a=0),
        "o": Ordered(b=0),
        "d": defaultdict(dict, k=[]),
        "q": deque([torch.zeros(3), 0], maxlen=4),
    }
    before = dict(state)
    restore(leaves, data, into=state)
    assert [name for name in state if state[name] is not before[name]] == ["f"]  # nothing can be set in it
    assert state["d"].default_factory is dict  # as the state has it
    state["d"].default_factory = list
    assert difference(state, saved) == ""
    assert before["f"].x == 0


class Loader:
    """An object whose state holds every kind of container."""

    def __init__(self, number: float) -> None:
        self.state = {
            "buffer": deque([torch.full((2,), number)], 5),
            "settings": Settings(number, torch.full((1,), number)),
            "fixed": Fixed(torch.full((1,), number)),
            "seen": defaultdict(int, x=number),
            "named": Named(y=torch.full((1,), number)),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_the_state_of_an_object_may_hold_them_all() -> None:
    leaves, data = transfer(flatten({"loader": Loader(1.0)}))
    into = {"loader": Loader(0.0)}
    restore(leaves, data, into=into)
    assert difference(into["loader"].state, Loader(1.0).state) == ""
    into = {"loader": Loader(0.0)}
    restore(leaves, data, into=into, only=["loader.settings.x", "loader.seen"])
    expected = Loader(0.0).state | {"settings": Settings(1.0, torch.zeros(1)), "seen": defaultdict(int, x=1.0)}
    assert difference(into["loader"].state, expected) == ""


def test_a_part_of_a_dataclass_or_deque_is_a_dict() -> None:
    state = {"s": Settings(1, 2), "q": deque([torch.zeros(1), torch.ones(1)]), "d": defaultdict(int, a=1, b=2)}
    found = again(state, only=["s.x", "q.1", "d.a"])
    assert found == {"s": {"x": 1}, "q": {1: torch.ones(1)}, "d": defaultdict(int, a=1)}
    assert type(found["d"]) is defaultdict


def test_keys_that_no_path_can_have_keep_a_dict_together() -> None:
    state = {"seen": {Colour.RED: 1, frozenset([2]): [Access.READ]}, "nan": {float("nan"): 1, float("nan"): 2}}
    assert [leaf.spec.kind for leaf in flatten(state).leaves] == ["dict", "value", "value"]
    assert difference(again(state), state) == ""
    assert difference(again(state, into=copy.deepcopy(state)), state) == ""


class Slots(dict):  # type: ignore[type-arg]
    __slots__ = ("more",)


class Reduced(dict):  # type: ignore[type-arg]
    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Made(OrderedDict):  # type: ignore[type-arg]
    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls)


class Mine(defaultdict):  # type: ignore[type-arg]
    pass


class Spot(Point):
    """A namedtuple with a dict of its own."""


def one() -> int:
    return 1


def _with(value: Any, **attributes: Any) -> Any:
    for name, item in attributes.items():
        object.__setattr__(value, name, item)
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (_with(Named(a=1), more=1), "has an attribute 'more' beside its items or fields"),
        (_with(Slots(), more=1), "has an attribute 'more' beside"),
        (_with(Settings(1), z=1), "has an attribute 'z' beside"),
        (object.__new__(Settings), "has no value for its field x"),
        (Reduced(), "has its own __reduce__"),
        (Made(), "has its own __new__"),
        (_with(Spot(1, torch.ones(1)), more=1), "has an attribute 'more' beside"),
        (_with(OrderedDict(a=torch.ones(1)), more=1), "has an attribute 'more' beside"),
        (_with(OrderedDict(a=1), _metadata={}, more=1), "has an attribute 'more' beside"),
        (_with(Counter("aab"), more=1), "has an attribute 'more' beside"),
        (defaultdict(one), "a defaultdict that makes values by"),
        (Mine(), "has its own __"),
    ],
)
def test_what_is_more_than_its_items_is_refused_with_what_to_write(value: Any, says: str) -> None:
    for state in ({"a": {"b": value}}, {"a": {"b": deque([value])}}):
        with pytest.raises(
            CaptureError, match=rf"^a\.b[.0]*: .*{says}.*rules: \[\{{match: 'a\.b.*pickle: true"
        ) as told:
            flatten(state)
        assert f"ts.register_provider({type(value).__name__}, " in str(told.value)
    assert [leaf.spec.kind for leaf in flatten([value], allow_pickle=lambda path: True).leaves] == ["list", "object"]


@pytest.mark.parametrize("value", [_with(Spot(1, torch.ones(1)), more=1), _with(OrderedDict(a=torch.ones(1)), more=1)])
def test_attributes_of_a_container_come_back_where_it_is_a_pickle(value: Any) -> None:
    tree = flatten({"a": value}, allow_pickle=lambda path: True)
    for into in ({"into": {"a": value}}, {}):
        found = restore(*transfer(tree), allow_pickle=lambda path: True, **into)["a"]
        assert difference(found, value) == ""
        assert found.more == 1


@pytest.mark.parametrize("value", [Spot(1, torch.ones(1)), OrderedDict(a=torch.ones(1)), Counter("aab")], ids=repr)
def test_an_attribute_that_is_set_between_two_saves_is_noticed(value: Any) -> None:
    cache = FlattenCache()
    cache.flatten({"a": value})
    cache.flatten({"a": value})
    with pytest.raises(CaptureError, match=r"^a: .* has an attribute 'more' beside its items or fields"):
        cache.flatten({"a": _with(value, more=1)})


def test_what_was_pickled_before_is_restored_in_place() -> None:
    value = Settings(1, torch.ones(1))
    data = pickle.dumps(value, 5)
    leaves = [Leaf((), Spec("dict")), Leaf(("s",), Spec("object", shape=(len(data),)))]
    found = restore(leaves, {1: data}, into={"s": Settings(0)}, allow_pickle=lambda path: True)
    assert difference(found, {"s": value}) == ""


def test_a_cached_state_notices_every_change() -> None:
    state: dict[str, Any] = {"d": defaultdict(int, a=1), "s": Settings(1, 2), "q": deque([torch.zeros(1)], 3)}
    cache = FlattenCache()
    for change in (
        lambda: None,
        lambda: setattr(state["d"], "default_factory", list),
        lambda: setattr(state["s"], "x", Fixed(3)),
        lambda: state["q"].append(4),
        lambda: state.update(q=deque(state["q"], 9)),
        lambda: state.update(s=Fixed(1)),
    ):
        change()
        assert difference(restore(*transfer(cache.flatten(state))), state) == ""


def test_a_version_of_a_dataclass_with_other_fields_is_refused() -> None:
    leaves, data = transfer(flatten({"s": Settings(1, 2)}))
    other = [leaf for leaf in leaves if leaf.path != ("s", "y")]
    with pytest.raises(StateMismatch, match=r"s: .*:Settings has fields x, y here, x in the version"):
        restore(other, data)
    with pytest.raises(StateMismatch, match=r"only in the given state \(1\):\n  s\.y"):
        restore(other, data, into={"s": Settings(0, 0)})


@pytest.mark.parametrize("kind", ["dict", "odict", "list", "tuple", "namedtuple"])
@given(
    st.dictionaries(
        st.sampled_from(["form", "class", "factory", "maxlen"]),
        st.one_of(
            st.sampled_from(
                ["deque", "defaultdict", "dataclass", "subclass", "list", "os:system", 3, -1, None, [], 1e9]
            ),
            st.sampled_from(["builtins:dict", "collections:Counter", "pathlib:Path", "x", "subprocess:Popen"]).map(
                lambda name: [name]
            ),
        ),
    )
)
@settings(deadline=None, max_examples=60)
def test_hostile_attributes_are_typed_errors(kind: str, attrs: dict[str, Any]) -> None:
    leaves = [Leaf((), Spec(kind, attrs=attrs))]
    modules = set(sys.modules)
    for ours in (False, True):
        try:
            if ours:
                with stand_in_classes():
                    found = restore(leaves, {})
            else:
                found = restore(leaves, {})
        except (FormatError, Unsafe, StateMismatch):
            continue
        assert ours or type(found) in (dict, list, tuple, OrderedDict, deque, defaultdict)
    assert set(sys.modules) == modules


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has seen none of the user's classes yet."""
    monkeypatch.setattr(classes, "_known", type(classes._known)())


def test_a_class_that_only_the_version_names_is_not_used(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"s": Settings(1, Named(z=2)), "q": deque([Colour.RED])}
    leaves, data = transfer(flatten(state))
    request.getfixturevalue("forgotten")
    with pytest.raises(Unsafe, match=r"^s: is of class .*\.Settings, .* call ts\.register_provider\(Settings\) first"):
        restore(leaves, data)
    assert difference(restore(leaves, data, only=["q"]), {"q": state["q"]}) == ""  # an Enum of an imported module
    given_state = {"s": Settings(0, Named(z=0)), "q": deque([Colour.GREEN])}
    assert difference(restore(leaves, data, into=given_state), state) == ""
    request.getfixturevalue("forgotten")


def test_a_registered_class_is_used(forgotten: None) -> None:
    leaves, data = transfer(flatten({"f": Fixed(1)}))
    classes._known.clear()
    with pytest.raises(Unsafe):
        restore(leaves, data)
    ts.register_provider(Fixed)
    assert restore(leaves, data) == {"f": Fixed(1)}


@pytest.mark.parametrize("name", ["Cell[int]", "a cell", "<torch_package_0>.Cell"])
def test_classes_that_a_call_has_made_are_named_freely(name: str) -> None:
    cell, kind = dataclasses.make_dataclass("Cell", ["x"]), enum.Enum("Kind", ["A"])
    cell.__qualname__ = kind.__qualname__ = name
    kind.__module__ = f"{name}.more"
    state = {"c": cell(torch.ones(2)), "k": [kind.A]}
    assert difference(again(state), state) == ""
    leaves, data = transfer(flatten(state))
    classes._known.clear()
    with stand_in_classes():
        found = restore(leaves, data)
    assert (type(found["c"]).__qualname__, found["k"][0].name) == (name, "A")


@pytest.mark.parametrize("name", ["x", ":x", "x:", "m:\x1b[31mx", "m:a\nb", "m:\u202ex"])
def test_what_is_no_name_of_a_class_is_told_so_in_characters_that_do_nothing(name: str) -> None:
    with pytest.raises(FormatError, match="is no name of a class") as caught:
        known_class(name)
    assert str(caught.value).isprintable()


def test_nothing_is_touched_where_an_enum_is_not_known() -> None:
    local = enum.Enum("local", ["A"])
    leaves, data = transfer(flatten({"w": torch.ones(1), "e": [local.A]}))
    del local
    classes._known.clear()
    state = {"w": torch.zeros(1), "e": [0]}
    with pytest.raises(Unsafe, match=r"^e: is of class .*local, "):
        restore(leaves, data, into=state)
    assert state["w"].item() == 0


def test_stand_ins_are_saved_as_what_they_stand_for() -> None:
    state = {"s": Settings(1, Named(z=2)), "o": Ordered(a=Fixed(1)), "e": [Colour.RED, Access(3), Access(0), Level.LOW]}
    leaves, data = transfer(flatten(state))
    renamed = [Leaf(leaf.path, dataclasses.replace(leaf.spec, attrs=_renamed(leaf.spec.attrs))) for leaf in leaves]
    data = {i: raw.replace(b"support.", b"absents.") for i, raw in data.items()}
    with stand_in_classes():
        found = restore(renamed, data)
    assert type(found["s"]).__name__ == "Settings"
    again_leaves, again_data = transfer(flatten(found))
    assert again_data == data
    assert again_leaves == renamed
    with pytest.raises(Unsafe):
        restore(again_leaves, again_data)


def _renamed(attrs: Any) -> Any:
    return {
        key: [name.replace("support.", "absents.") for name in value] if key == "class" else value
        for key, value in attrs.items()
    }


def test_members_that_an_enum_has_not_are_refused() -> None:
    raw = encode_value(Colour.RED)
    with pytest.raises(FormatError, match="has no member 'RAD' here; it has RED, GREEN"):
        decode_value(raw.replace(b"RED", b"RAD"))
    with pytest.raises(FormatError, match="has no member 4"):
        decode_value(encode_value(Access(3)).replace(b"i\x01\x03", b"i\x01\x04"))


@pytest.mark.slow
def test_another_process_restores_without_pickle(tmp_path: Path) -> None:
    shared = textwrap.dedent(
        """
        import dataclasses, enum, sys
        import tierstate as ts

        class Colour(enum.Enum):
            RED = 1

        @dataclasses.dataclass
        class Config:
            rate: float
            colour: Colour

        policy = ts.Policy.default(sys.argv[1])
        """
    )
    save = "with ts.Checkpointer(policy, run='r') as ckpt: ckpt.save({'c': Config(0.5, Colour.RED)}, step=1).wait()"
    load = textwrap.dedent(
        """
        with ts.Checkpointer(policy, run="r") as ckpt:
            try:
                ckpt.load()
            except ts.Unsafe as error:
                assert "register_provider(Config)" in str(error), error
            else:
                raise AssertionError("a class of the version was used unasked")
            assert ckpt.verify(deep=True).ok
            state = {"c": Config(0.0, Colour.RED)}
            ckpt.restore(into=state)
            assert state == {"c": Config(0.5, Colour.RED)}
            assert ckpt.load() == state
        """
    )
    for code in (save, load):
        subprocess.run([sys.executable, "-c", shared + code, str(tmp_path)], check=True, timeout=120)
