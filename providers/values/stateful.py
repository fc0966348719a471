"""Objects with a state of their own: modules, optimizers, schedulers, random generators, and values per rank.

`Stateful` says how the state of such an object is read and set. `Rng` is the process's global random generators as one
object; `PerRank` is a value of which each rank saves and restores its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Path, Spec
from tierstate.providers.tensors.tensors import PLAIN_TENSORS, empty_like_dtensor, local_of


@dataclass(frozen=True, slots=True)
class Stateful:
    """How the state of one type of object is read and set.

    Attributes:
        get: the object -> its state, a tree of plain leaves.
        put: sets the whole state of the object.
        strict: the state always has the same leaves, so that a missing or unexpected leaf is an error; otherwise the
            saved state replaces the present one.
        settled: whether it is enough that these leaf values were filled in place, so that `put` is not called.
        takes: returns for an object a function that says which saved leaves it restores on this rank, by their keys
            below the object; None: all leaves.
        anew: returns for an object a function that creates a value for a saved leaf that the object does not have yet;
            the function returns None where any new value will do.
    """

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    strict: bool = False
    settled: Callable[[Any, Iterable[Any]], bool] = lambda thing, values: False
    takes: Callable[[Any], Callable[[Path], bool]] | None = None
    anew: Callable[[Any], Callable[[Path, Spec], Any]] | None = None


def stateful(value: Any) -> Stateful | None:
    """How the state of this value is read and set; None for a value that is not stateful."""
    for kind, found in _TABLE.items():
        if isinstance(value, kind):
            return found
    has_both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return _STATE_DICT if has_both and not isinstance(value, type) else None


def register_stateful(kind: type, how: Stateful) -> None:
    """Treat objects of this type, and of its subclasses, in this way from now on."""
    global _TABLE
    _TABLE = {kind: how} | _TABLE  # looked up before its base classes


def _settled(module: torch.nn.Module, values: Iterable[Any]) -> bool:
    """Whether all values are in the module's own memory, and no hook or override has to run when a state is loaded."""
    own = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return not _has_load_hooks(module) and all(isinstance(v, torch.Tensor) and _memory(v) in own for v in values)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = local_of(tensor)
    plain = type(local) in PLAIN_TENSORS and local.layout is torch.strided
    return (tensor.device, local.untyped_storage().data_ptr() if plain else id(tensor))


def _has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether the module or a submodule overrides or hooks the loading of its state."""
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return any(
        type(part).load_state_dict is not torch.nn.Module.load_state_dict
        or any(getattr(part, hook, None) for hook in hooks)
        for part in module.modules()
    )


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    if any(getattr(p, "_fsdp_flattened", False) for group in optimizer.param_groups for p in group["params"]):
        raise CaptureError(
            "the optimizer of a module that FSDP1 has wrapped has states of flat parameters, which fit no other number "
            "of ranks; save FSDP.optim_state_dict(module, optimizer) in its place"
        )
    return optimizer.state_dict()


def _moments(optimizer: torch.optim.Optimizer) -> Callable[[Path, Spec], Any]:
    """Creates optimizer states: for a parameter that is a DTensor a DTensor with the same placements. An optimizer that
    has not stepped yet has no states to take them from.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def make(path: Path, spec: Spec) -> torch.Tensor | None:
        at = path[1] if len(path) == 3 and path[0] == "state" else None
        if type(at) is not int or not 0 <= at < len(params) or type(params[at]) in PLAIN_TENSORS:
            return None
        return empty_like_dtensor(params[at], spec)

    return make


def _set_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _set_bits(bits: np.random.BitGenerator, state: Any) -> None:
    bits.state = state


_STATE_DICT = Stateful(lambda thing: thing.state_dict(), lambda thing, state: thing.load_state_dict(state))


_TABLE: dict[type, Stateful] = {
    torch.nn.Module: Stateful(_STATE_DICT.get, _STATE_DICT.put, strict=True, settled=_settled),
    torch.optim.Optimizer: Stateful(_optimizer_state, _STATE_DICT.put, anew=_moments),
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

    return Stateful(lambda own: {rank: own.value}, put, strict=True, takes=lambda _own: takes)
