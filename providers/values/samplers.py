"""The samplers of data loaders, and loaders of torchdata before their first iteration: what they have as state.

A ``StatefulDataLoader`` of torchdata that nobody has iterated over makes an iterator when it is asked for its state.
That draws from the process's random generators, at the save and no longer at the first iteration, so that a training
went on with other numbers because it was saved. `torchdata_state` makes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_START = "tierstate_start"
"""Where a state of a loader of torchdata has the samplers in place of a position."""


def samplers_of(loader: Any) -> Iterator[Any]:
    """The samplers of a loader, and those that they wrap, each once."""
    found: list[Any] = []
    pending = [loader]
    while pending:
        thing = pending.pop()
        for name in ("sampler", "batch_sampler"):
            inner = getattr(thing, name, None)
            if inner is not None and not any(inner is known for known in found):
                found.append(inner)
                pending.append(inner)
                yield inner


def has_state(thing: Any) -> bool:
    """Whether this has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def sampler_state(sampler: Any) -> dict[str, Any]:
    """The state of a sampler between two iterations: its generator, its epoch, and what it says itself."""
    found: dict[str, Any] = {}
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        found["generator"] = generator.get_state()
    if type(epoch := getattr(sampler, "epoch", None)) is int and callable(getattr(sampler, "set_epoch", None)):
        found["epoch"] = epoch
    if has_state(sampler):
        found["state"] = sampler.state_dict()
    return found


def load_sampler(sampler: Any, state: Mapping[str, Any]) -> None:
    """Set the state of a sampler."""
    if "generator" in state:
        sampler.generator.set_state(state["generator"].cpu())
    if "epoch" in state:
        sampler.set_epoch(state["epoch"])
    if "state" in state:
        sampler.load_state_dict(state["state"])


def check_samplers(saved: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless saved states of samplers are of such as there are here."""
    if [sorted(one) for one in saved] != [sorted(one) for one in present]:
        raise ValueError(f"was saved with other samplers: they had {_told(saved)}, those here have {_told(present)}")


def _told(samplers: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(", ".join(sorted(one)) or "nothing" for one in samplers) or "none"


def is_of_torchdata(loader: Any) -> bool:
    """Whether this is a ``StatefulDataLoader`` itself, and none of another library that passes its attributes on."""
    return {"_iterator", "next_iter_state"} <= getattr(loader, "__dict__", {}).keys()


def torchdata_state(loader: Any) -> Any:
    """The state of a loader of torchdata: its own; before its first iteration what that begins with."""
    if loader.next_iter_state:  # restored, and not begun
        return loader.next_iter_state
    if loader._iterator is not None:
        return loader.state_dict()
    start: dict[str, Any] = {"samplers": [sampler_state(one) for one in samplers_of(loader)]}
    if has_state(loader.dataset):
        start["dataset"] = loader.dataset.state_dict()
    return {_START: start}


def load_torchdata(loader: Any, state: Mapping[str, Any]) -> None:
    """Set the state of a loader of torchdata.

    Raises:
        ValueError: it is of a loader with other samplers.
    """
    start = state.get(_START)
    if start is None:
        loader.load_state_dict(state)
        return
    samplers = list(samplers_of(loader))
    check_samplers(start["samplers"], [sampler_state(one) for one in samplers])
    loader.load_state_dict({})
    loader.next_iter_state = None  # an empty state leaves the one that was set before
    for one, saved in zip(samplers, start["samplers"], strict=True):
        load_sampler(one, saved)
    if "dataset" in start:
        loader.dataset.load_state_dict(start["dataset"])
