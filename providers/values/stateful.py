"""Objects with a state of their own: modules, optimizers, schedulers, random generators, and values per rank.

`Stateful` says how the state of such an object is read and set. `Rng` is the process's global random generators as one
object; `PerRank` is a value of which each rank saves and restores its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tierstate.manifest.format.leaf import Spec
from tierstate.manifest.format.leaf_path import Path

from .copies import HostCopy
from .modules import assign_meta_tensors, back_up_module, back_up_tensors, fills_in_place, load_module
from .optimizers import back_up_references, keeps_given_tensors, load_optimizer, new_moments, optimizer_state
from .samplers import is_of_torchdata, load_torchdata, torchdata_state


class InPlace(NamedTuple):
    """How an object gets its state where its present tensors are filled, which saves a copy of them in memory.

    Attributes:
        suits: (object, its present state) -> whether this has the same result as `Stateful.put` of other tensors.
        put: called in place of `Stateful.put`, with the present tensors in the state, before they are filled.
        back_up: the object -> a function that undoes this `put`.
    """

    suits: Callable[[Any, Any], bool]
    put: Callable[[Any, Any], None]
    back_up: Callable[[Any], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Stateful:
    """How the state of one type of object is read and set.

    Attributes:
        get: the object -> its state, a tree of plain leaves.
        put: sets the whole state of the object. The state is the object's to keep: nothing else refers to it.
        strict: the state always has the same leaves, so that where it is filled in place a missing or unexpected leaf
            is an error; otherwise the saved state replaces the present one.
        in_place: how the object's own tensors are filled in place; None: the object always gets new ones by `put`.
        transparent: the state's values are the user's own, which the object only holds: they are restored as if it
            were not there, and `put` comes last and refuses nothing.
        back_up: the object -> a function that undoes a `put`; None: a copy of the whole state is kept for that.
        takes: returns for an object a function that says which saved leaves it restores on this rank, by their keys
            below the object; None: all leaves.
        anew: returns for an object a function that creates a value for a saved leaf that the object does not have yet;
            the function returns None where any new value will do.
    """

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    strict: bool = False
    in_place: InPlace | None = None
    transparent: bool = False
    back_up: Callable[[Any], Callable[[], None]] | None = None
    takes: Callable[[Any], Callable[[Path], bool]] | None = None
    anew: Callable[[Any], Callable[[Path, Spec], Any]] | None = None

    def backed_up(self, thing: Any) -> Callable[[], None]:
        """A function that gives the object its present state back. Raises whatever a copy of the state raises."""
        if self.back_up is not None:
            return self.back_up(thing)
        before = HostCopy(self.get(thing))
        return lambda: self.put(thing, before.get())


def stateful(value: Any) -> Stateful | None:
    """How the state of this value is read and set; None for a value that is not stateful."""
    for kind, found in _TABLE.items():
        if isinstance(value, kind):
            return found
    of = type(value) if isinstance(value, dict) else value  # a dict's attributes may be its items
    has_both = callable(getattr(of, "state_dict", None)) and callable(getattr(of, "load_state_dict", None))
    if not has_both or isinstance(value, type):
        return None
    return _TORCHDATA if is_of_torchdata(value) else _STATE_DICT


def register_stateful(kind: type, how: Stateful) -> None:
    """Treat objects of this type, and of its subclasses, in this way from now on."""
    global _TABLE
    _TABLE = {kind: how} | _TABLE  # looked up before its base classes


def changed_objects(thing: Any) -> list[tuple[str | None, Any]]:
    """The objects that are changed where this one's state is set, each with the key of its part of the state (None: the
    whole state). Several objects may be faces of one: ``Rng`` and ``torch.default_generator``, for example.
    """
    if isinstance(thing, Rng):
        return [("python", _PYTHON), ("numpy", np.random.mtrand._rand), ("torch", torch.default_generator)]
    if isinstance(thing, torch.Generator | random.Random):
        return [("state", thing)]
    return [(None, thing.bit_generator if isinstance(thing, np.random.Generator) else thing)]


def is_generator(thing: Any) -> bool:
    """Whether this is a random generator, or several, from which code of other objects may draw."""
    numpy = np.random.Generator | np.random.BitGenerator | np.random.RandomState
    return isinstance(thing, Rng | torch.Generator | random.Random | numpy)


_PYTHON: Any = random.getstate.__self__  # type: ignore[attr-defined]
"""The generator of the functions of ``random``."""


def _set_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _set_bits(bits: np.random.BitGenerator, state: Any) -> None:
    bits.state = state


_STATE_DICT = Stateful(lambda thing: thing.state_dict(), lambda thing, state: thing.load_state_dict(state))


_TORCHDATA = Stateful(torchdata_state, load_torchdata)


_TABLE: dict[type, Stateful] = {
    torch.nn.Module: Stateful(
        _STATE_DICT.get,
        load_module,
        strict=True,
        in_place=InPlace(fills_in_place, assign_meta_tensors, back_up_tensors),
        back_up=back_up_module,
    ),
    torch.optim.Optimizer: Stateful(
        optimizer_state,
        load_optimizer,
        in_place=InPlace(keeps_given_tensors, load_optimizer, back_up_references),
        anew=new_moments,
    ),
    torch.Generator: Stateful(
        lambda g: {"state": g.get_state()}, lambda g, state: g.set_state(state["state"].cpu().contiguous())
    ),
    random.Random: Stateful(lambda r: {"state": r.getstate()}, lambda r, state: r.setstate(state["state"])),
    np.random.Generator: Stateful(lambda g: g.bit_generator.state, _set_numpy),
    np.random.BitGenerator: Stateful(lambda b: b.state, _set_bits),
    np.random.RandomState: Stateful(lambda r: r.get_state(legacy=False), lambda r, state: r.set_state(state)),
}


class Rng:
    """Python's ``random``, NumPy's legacy global generator, torch's CPU generator and those of all CUDA devices.

    Put ``Rng()`` into the state, once per process. Generators of your own (``torch.Generator``, ``random.Random``,
    ``numpy.random.Generator``) go into the state themselves.

    Args:
        cuda: also keep the generators of the CUDA devices, if CUDA is in use when the state is taken.
    """

    def __init__(self, *, cuda: bool = True) -> None:
        self._cuda = cuda

    def state_dict(self) -> dict[str, Any]:
        """``python``, ``numpy``, ``torch``, and ``cuda`` (one uint8 tensor per device) where CUDA is in use."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        if self._cuda and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all generators, or none of them.

        Raises:
            ValueError: the state has other generators than this process: a missing one, or another number of devices.
        """
        self._check(state)
        before = self.state_dict()
        try:
            self._set(state)
        except BaseException:
            self._set(before)
            raise

    def _check(self, state: Mapping[str, Any]) -> None:
        missing = {"python", "numpy", "torch"} - set(state)
        if missing:
            raise ValueError(f"the saved state has no generator {', '.join(sorted(missing))}")
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        saved = len(state.get("cuda", ()))
        if self._cuda and saved and saved != devices:
            raise ValueError(
                f"the saved state has generators of {saved} CUDA devices, here are {devices}; use Rng(cuda=False)"
            )

    def _set(self, state: Mapping[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        if self._cuda and state.get("cuda"):
            torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])


class PerRank:
    """A value of which each rank has its own: ``{"loader": ts.PerRank(loader), "rng": ts.PerRank(ts.Rng())}``.

    In a version it is a dict by rank, so that ``load()`` returns the values of all ranks. A restore reads only the
    entry of this rank, in place where possible; ``value`` is then the restored value.

    Args:
        value: any value that a state may hold, also a stateful object.
        missing: what a restore does if the version has no entry of this rank, for example because there are more ranks
            now: ``error`` raises StateMismatch, ``keep`` keeps the value and logs it.

    Raises:
        ValueError: ``missing`` is neither of these.
    """

    def __init__(self, value: Any, missing: Literal["error", "keep"] = "error") -> None:
        if missing not in ("error", "keep"):
            raise ValueError(f"missing={missing!r:.40}: right are 'error' and 'keep'")
        self.value, self.missing = value, missing

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


@cache
def per_rank_stateful(rank: int) -> Stateful:
    """How a `PerRank` value is read and set: as an object whose state is a dict with only this rank's entry."""

    def put(own: PerRank, state: Any) -> None:
        own.value = state[rank]

    def takes(path: Path) -> bool:
        return type(path[0]) is int and path[0] == rank

    return Stateful(lambda own: {rank: own.value}, put, strict=True, transparent=True, takes=lambda _own: takes)
