"""Routes: which of a state's leaves go to which tier, and how encoded, remembered while their paths stay."""

from __future__ import annotations

from collections.abc import Mapping

from tierstate.manifest.leaf import Leaf, encode_path

from .placement import codecs_of, deciding, route
from .policy import Policy
from .route import Route


class Routes:
    """A policy's routes. For one thread at a time, or for several that save states of the same paths.

    Args:
        policy: its rules decide.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._last: tuple[tuple[Leaf, ...], Mapping[str, Route]] | None = None

    def of(self, leaves: tuple[Leaf, ...]) -> Mapping[str, Route]:
        """The route to each tier of the policy."""
        last = self._last
        if last is not None and _same_paths(last[0], leaves):
            found = last[1]
        else:
            paths = [leaf.path for leaf in leaves]
            masks = route(self._policy, paths)
            rules = [deciding(self._policy, "codec", path) for path in paths]
            found = {
                name: Route(mask, codecs_of(self._policy, name, paths), self._policy.tier(name).format, rules)
                for name, mask in masks.items()
            }
        self._last = leaves, found
        return found


def _same_paths(one: tuple[Leaf, ...], other: tuple[Leaf, ...]) -> bool:
    """Whether the paths are the same; as text, since 1 and True are equal, and rules tell them apart."""
    pairs = zip(one, other, strict=True)
    return one is other or (
        len(one) == len(other) and all(a is b or encode_path(a.path) == encode_path(b.path) for a, b in pairs)
    )
