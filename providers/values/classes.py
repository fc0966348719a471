"""Classes in a version: deque, defaultdict, and the user's own dataclasses, dict subclasses and Enums, without pickle.

A version names the user's classes, and may come from an untrusted source. So nothing is imported and no code of a class
is run: only a class that this process has shown to trust is used (`known_class`). For containers with a class of their
own, `class_form` says how they are saved, and `build_form` makes them again.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from types import MemberDescriptorType
from typing import Any, cast
from weakref import WeakSet, WeakValueDictionary

from tierstate.manifest.errors import CaptureError, FormatError, StateMismatch, Unsafe

FORM = "form"
"""Attribute of a container leaf: what it is besides a dict or a list (`class_form`)."""


CLASS = "class"
"""Attribute of leaves: the classes of the user's that a restore needs, each as ``module:qualname``."""


FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict),
        *(OrderedDict, Counter, deque, defaultdict),
    )
}
"""The default factories of a defaultdict that can be saved, by name."""


_FORMS: dict[str, tuple[str, ...]] = {
    "deque": ("list",),
    "defaultdict": ("dict",),
    "dataclass": ("dict",),
    "subclass": ("dict", "odict"),
}
"""Form -> the kinds of leaves that may have it. Programs that know no forms make plain lists and dicts of them."""


MODULE_ATTRIBUTES = ("_metadata",)
"""The attributes that an OrderedDict may have: a module's state dict has the versions of its classes there."""


_OWN_WAYS = (
    *("__new__", "__del__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"),
    *("__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"),
)
"""Methods by which a class says that there is more to its values than their items or fields."""


_NAME = re.compile(r"[^:]{1,500}:.{1,500}")  # classes that a call makes are named freely: `Cell[int]`


_known: WeakValueDictionary[str, type] = WeakValueDictionary()


_made: WeakSet[type] = WeakSet()
"""The stand-ins: to save them again names their class, and shows no trust in it."""


_stand_ins: ContextVar[bool] = ContextVar("stand_ins", default=False)


def class_name(kind: type) -> str:
    """A class as it is written in a version: ``module:qualname``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def trust_class(kind: type) -> str:
    """Restores of this process may make values of this class from now on; returns its name."""
    name = class_name(kind)
    if kind not in _made:
        _known[name] = kind
    return name


def imported_class(name: str) -> type | None:
    """The class of that name in a module that is imported already. Nothing is imported, and no code is run."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def known_class(name: str) -> type:
    """The class of that name: one that was in a state given to this process, or was registered; or any imported Enum,
    whose members exist already.

    Raises:
        Unsafe: there is none; the message says how to allow it.
        FormatError: it is no name of a class.
    """
    if not (_NAME.fullmatch(name) and name.isprintable()):
        raise FormatError(f"{name!r:.80} is no name of a class")
    found = _known.get(name)
    if found is None:
        found = imported_class(name)
        found = found if found is not None and issubclass(found, enum.Enum) else None
    if found is not None:
        return found
    module, _, qualname = name.partition(":")
    raise Unsafe(
        f"is of class {module}.{qualname:.80}, and no class that a version names is imported or used unasked; if you "
        f"trust it, call ts.register_provider({qualname:.80}) first, or restore into a state that has such a value"
    )


@contextmanager
def stand_in_classes() -> Iterator[None]:
    """Within, classes that are not known are replaced by empty ones of the same name: to show and to copy values."""
    token = _stand_ins.set(True)
    try:
        yield
    finally:
        _stand_ins.reset(token)


def _class_or_stand_in(name: str, make: Callable[[str], type]) -> type:
    try:
        return known_class(name)
    except Unsafe:
        if not _stand_ins.get():
            raise
    module, _, qualname = name.partition(":")
    try:
        made = make(qualname.rpartition(".")[2])
        made.__module__, made.__qualname__ = module, qualname
    except (TypeError, ValueError) as error:
        raise FormatError(f"{name!r:.80} is no name of a class: {error}") from error
    _made.add(made)
    return made


def enum_member(name: str, member: str | int) -> enum.Enum:
    """A member of an Enum by its name, or the flags of a Flag by their number.

    Raises:
        Unsafe: the Enum is not known here.
        FormatError: it has no such member.
    """

    def stand_in(short: str) -> type:
        if isinstance(member, str):
            return cast("type", enum.Enum(short, [member]))
        other = 2 if member == 1 else 1  # the number itself must have no name
        return cast("type", enum.Flag(short, {"other": other}, boundary=enum.KEEP))

    kind = _class_or_stand_in(name, stand_in)
    if not issubclass(kind, enum.Enum):
        raise FormatError(f"{name:.80} is no Enum here")
    found = kind.__members__.get(member) if isinstance(member, str) else _flags(kind, member)
    if found is None:
        raise FormatError(f"{name:.80} has no member {member!r:.60} here; it has {', '.join(kind.__members__):.200}")
    return found


def _flags(kind: type[enum.Enum], number: int) -> enum.Enum | None:
    """The combination of flags; only a Flag with Python's own rule for what is no member."""
    known: enum.Enum | None = kind._value2member_map_.get(number)
    rule, stock_rule = (getattr(each._missing_, "__func__", None) for each in (kind, enum.Flag))
    stock = issubclass(kind, enum.Flag) and rule is stock_rule
    try:
        found = kind(number) if known is None and stock else known
    except ValueError:
        return None
    # Python 3.11.0 to 3.11.3 leave bits out that have no name.
    return found if found is not None and found.value == number else None


def class_form(value: Any) -> tuple[str, dict[str, Any]] | None:
    """How a container with a class of its own is saved: its kind as a leaf, and the attributes that say the rest.

    None for every other value, also for one that can be saved in another way only.

    Raises:
        CaptureError: there is more to the value than its items or fields, so that it would not come back as it is.
    """
    if type(value) is deque:
        return "list", {FORM: "deque", "maxlen": value.maxlen}
    if type(value) is defaultdict:
        return "dict", {FORM: "defaultdict", "factory": factory_name(value.default_factory)}
    if _is_dataclass(value):
        _check_plain_class(value, object, [f.name for f in dataclasses.fields(value)])
        return "dict", {FORM: "dataclass", CLASS: [trust_class(type(value))]}
    if isinstance(value, dict) and type(value) not in (dict, OrderedDict, Counter):
        kind, base = ("odict", OrderedDict) if isinstance(value, OrderedDict) else ("dict", dict)
        _check_plain_class(value, base, [])
        return kind, {FORM: "subclass", CLASS: [trust_class(type(value))]}
    return None


def factory_name(factory: Any) -> str | None:
    """The name of a defaultdict's factory; None for none.

    Raises:
        CaptureError: it is none of `FACTORIES`.
    """
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if FACTORIES.get(name) is not factory:
        raise CaptureError(
            f"a defaultdict that makes values by {factory!r:.60} cannot be saved without pickle; set its "
            f"default_factory to None or to one of {', '.join(FACTORIES)}"
        )
    return name


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _check_plain_class(value: Any, base: type, fields: list[str]) -> None:
    """Raises CaptureError unless the value is its fields, or its items, and nothing else."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for way in _OWN_WAYS:
        found = getattr(kind, way, None)
        if found is not getattr(base, way, None) and getattr(found, "__module__", "") != "dataclasses":
            raise CaptureError(f"a {name} has its own {way}, so that its items or fields may not be all there is to it")
    missing = [field for field in fields if not _has(value, field)]
    if missing:
        raise CaptureError(f"a {name} has no value for its field {missing[0]}")
    check_attributes(value, fields)


def check_attributes(value: Any, known: Iterable[str]) -> None:
    """Raises CaptureError if the object itself has an attribute beside these: what has its items would lack it."""
    more = [key for key in _attributes(value) if key not in known]
    if more:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CaptureError(f"a {name} has an attribute {more[0]!r:.60} beside its items or fields")


def _has(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def _attributes(value: Any) -> Iterator[str]:
    """The names of all attributes that the object itself has, but for what `functools.cached_property` has kept."""
    kind = type(value)
    for key in getattr(value, "__dict__", ()):
        if not isinstance(getattr(kind, key, None), cached_property):
            yield key
    for cls in kind.__mro__:
        for key, slot in vars(cls).items():
            if isinstance(slot, MemberDescriptorType) and cls.__module__ != "builtins" and _has(value, key):
                yield key


def form_items(value: Any) -> list[tuple[Any, Any]]:
    """The items of a container with a class of its own, each with its key: fields by name, elements by index."""
    if isinstance(value, dict):
        return list(dict.items(value)) if not isinstance(value, OrderedDict) else list(OrderedDict.items(value))
    if isinstance(value, deque):
        return list(enumerate(value))
    return [(f.name, object.__getattribute__(value, f.name)) for f in dataclasses.fields(value)]


def change_form(value: Any, changed: Mapping[Any, Any]) -> Any:
    """The container with some items or fields changed: itself, if it is mutable."""
    if _is_dataclass(value):
        if type(value).__dataclass_params__.frozen:
            return _with_fields(type(value), dict(form_items(value)) | dict(changed))
        for name, item in changed.items():
            object.__setattr__(value, name, item)
    else:
        put: Any = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
        put = deque.__setitem__ if isinstance(value, deque) else put
        for key, item in changed.items():
            put(value, key, item)
    return value


def like_form(value: Any, items: Mapping[Any, Any]) -> Any:
    """A new container like this one, with other items under the same keys."""
    if isinstance(value, deque):
        return deque(items.values(), value.maxlen)
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, items)
    return _with_fields(type(value), items) if _is_dataclass(value) else _with_items(type(value), items)


def build_form(kind: str, attrs: Mapping[str, Any], items: Mapping[Any, Any], whole: bool) -> Any:
    """A new container with these items; of a part of a deque's or dataclass's items a dict.

    Args:
        kind, attrs: kind and attributes of its leaf; they may be untrusted.

    Raises:
        Unsafe: its class is not known here.
        StateMismatch: its class has other fields here.
        FormatError: the attributes are not valid.
    """
    form = attrs[FORM]
    if not isinstance(form, str) or form not in _FORMS or kind not in _FORMS[form]:
        raise FormatError(f"{form!r:.60} is no {kind} that this program knows")
    if form == "defaultdict":
        name = attrs.get("factory")
        if name is not None and not (isinstance(name, str) and name in FACTORIES):
            raise FormatError(f"{name!r:.60} is no default factory")
        return defaultdict(FACTORIES[name] if name is not None else None, items)
    if form == "subclass":
        return _subclass(_one_class(attrs), OrderedDict if kind == "odict" else dict, items)
    if not whole:
        return dict(items)
    if form == "dataclass":
        return _dataclass(_one_class(attrs), items)
    maxlen = attrs.get("maxlen")
    if maxlen is not None and (type(maxlen) is not int or not len(items) <= maxlen <= sys.maxsize):
        raise FormatError(f"{maxlen!r:.60} is no length of a deque of {len(items)} items")
    return deque(items.values(), maxlen)


def check_classes(attrs: Mapping[str, Any]) -> None:
    """Raises Unsafe if a leaf of these attributes needs a class that is not known here."""
    for name in _classes(attrs):
        if not _stand_ins.get():
            known_class(name)


def _classes(attrs: Mapping[str, Any]) -> list[str]:
    names = attrs.get(CLASS, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{names!r:.80} are no names of classes")
    return names


def _one_class(attrs: Mapping[str, Any]) -> str:
    names = _classes(attrs)
    if len(names) != 1:
        raise FormatError(f"{names!r:.80} is not the name of one class")
    return names[0]


def _subclass(name: str, base: Any, items: Mapping[Any, Any]) -> Any:
    kind: Any = _class_or_stand_in(name, lambda short: type(short, (base,), {}))
    if not issubclass(kind, base) or kind.__new__ is not base.__new__:
        raise FormatError(f"{name:.80} is no subclass of {base.__name__} here, or has its own __new__")
    return _with_items(kind, items)


def _with_items(kind: Any, items: Mapping[Any, Any]) -> Any:
    """A value of a subclass of dict, without a call of its ``__init__``."""
    base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
    made = base.__new__(kind)
    for key, item in items.items():
        base.__setitem__(made, key, item)
    return made


def _dataclass(name: str, items: Mapping[Any, Any]) -> Any:
    kind: Any = _class_or_stand_in(name, lambda short: _fields_only(short, items))
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        raise FormatError(f"{name:.80} is no dataclass here, or has its own __new__")
    fields = [f.name for f in dataclasses.fields(kind)]
    if set(fields) != items.keys():
        raise StateMismatch(f"{name:.80} has fields {_list(fields)} here, {_list(items)} in the version")
    return _with_fields(cast("type", kind), items)


def _fields_only(name: str, fields: Iterable[Any]) -> type:
    """A dataclass without methods, so that no code is generated from names of a version."""
    return dataclasses.make_dataclass(name, [str(field) for field in fields], init=False, repr=False, eq=False)


def _with_fields(kind: type, fields: Mapping[str, Any]) -> Any:
    """A value of a dataclass, without a call of its ``__init__``, as `copy` and `pickle` make one."""
    made: Any = object.__new__(kind)
    for name, item in fields.items():
        object.__setattr__(made, name, item)
    return made


def _list(names: Iterable[Any]) -> str:
    return f"{', '.join(map(str, names)):.200}"
