"""The registry of tier classes, and how one is opened."""

import importlib.metadata
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tierstate.manifest.errors import NotFound, TierError
from tierstate.tiers import registry
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.host import Host, Memory
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.registry import known_tiers, open_tier, register_tier, tier_class
from tierstate.tiers.testing import random_bytes

BUILT_IN = ["host", "lustre", "memory", "nvme", "object"]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)
    registry._installed.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    real = importlib.metadata.entry_points
    more = [EntryPoint(name, value, registry.GROUP) for name, value in entries]
    registry._installed.cache_clear()
    monkeypatch.setattr(registry, "entry_points", lambda group: [*real(group=group), *more])


def test_built_in_tiers_come_by_their_names() -> None:
    assert [name for name in known_tiers() if name in BUILT_IN] == BUILT_IN
    for name in BUILT_IN:
        cls = tier_class(name)
        assert issubclass(cls, Tier)
        assert isinstance(cls.persistent, bool)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "hint"), [("nvne", "did you mean 'nvme'\\?"), ("qqqq", "known are .*host")])
def test_unknown_names_are_told_the_nearest_and_all(name: str, hint: str) -> None:
    with pytest.raises(NotFound, match=hint) as found:
        tier_class(name)
    assert isinstance(found.value, TierError)
    assert all(known in str(found.value) for known in BUILT_IN)


def test_registered_classes_come_first() -> None:
    class Mine(Memory):
        pass

    register_tier("mine", Mine)
    register_tier("memory", Mine)
    assert tier_class("mine") is tier_class("memory") is Mine
    assert "mine" in known_tiers()
    with pytest.raises(TypeError, match="not a class derived from tierstate's Tier"):
        register_tier("wrong", dict)  # type: ignore[arg-type]


def test_installed_classes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("theirs", "tierstate.tiers.memory.host:Memory"), ("nvme", "collections:OrderedDict"))
    assert "theirs" in known_tiers()
    assert tier_class("theirs") is Memory
    assert tier_class("nvme") is Nvme, "an installed package does not take the place of a built-in tier"


def test_what_cannot_be_loaded_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("far", "no_such_package.deep:Far"), ("odd", "collections:OrderedDict"))
    with pytest.raises(ImportError, match=r"tier type 'far' \(no_such_package.deep:Far\).*pip install no_such_package"):
        tier_class("far")
    with pytest.raises(TypeError, match="tier type 'odd'"):
        tier_class("odd")


def test_a_tier_is_opened_with_its_name_options_and_arena(tmp_path: Path) -> None:
    class Slabs:
        slab_size = 4

        def keep(self, buffer: object) -> int:
            raise NotImplementedError

    arena = Slabs()
    nvme = open_tier("fast", "nvme", {"path": tmp_path / "x", "capacity": 1000}, arena=arena)
    assert (type(nvme), nvme.name, nvme.traits.capacity) == (Nvme, "fast", 1000)
    assert not (tmp_path / "x").exists(), "opening looks at no place"
    host = open_tier("ram", "host", {}, arena=arena)
    assert isinstance(host, Host)
    assert host._arena is arena
    host.put("a", random_bytes(3))
    assert host.size("a") == 3
