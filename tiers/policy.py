"""Policies: one YAML file that says which state goes to which tier, how often, how encoded, and for how long."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from mmap import PAGESIZE
from typing import Any, Self

import yaml
from pydantic import Field, PrivateAttr

from tierstate.manifest.errors import NotFound, PolicyError, TierstateError

from .base import Tier
from .environment import expand, protect
from .keep_keys import Keep
from .policy_errors import check, unknown_name
from .policy_keys import Arena, PolicyKeys, Ranks, Rule, TierKeys, keys_of, options_of
from .policy_schema import policy_schema
from .registry import tier_class
from .units import format_size
from .yaml_lines import MAX_BYTES, Findings, Keys, read_yaml, show

__all__ = ["Arena", "Keep", "Policy", "Ranks", "Rule", "TierPolicy", "policy_schema"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}")


class TierPolicy(TierKeys):
    """What a policy says about one tier.

    Attributes:
        name: its name in the policy.
        persistent: whether its class says that what it keeps survives the host; True where the class does not say.
        options: keyword arguments for its class's constructor, validated. They may hold secrets, so no repr shows them.
    """

    name: str
    persistent: bool = True
    options: dict[str, Any] = Field(default_factory=dict, repr=False)


class Policy(PolicyKeys):
    """A policy, made by `load`, `parse` or `default`.

    Attributes:
        version: of the file's format.
        chunk: length of a chunk, in bytes.
        digest: name of the digest's algorithm.
        arena: the memory through which saves go.
        ranks: how long the ranks of a job wait for one another.
        durable: name of the tier that `Save.wait` waits for; persistent.
        tiers: in the order in which a save goes down.
        rules: in the order in which they are tried.
    """

    durable: str
    tiers: tuple[TierPolicy, ...]

    _document: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The policy in a YAML file.

        Raises:
            PolicyError: the file cannot be read or used; all that is wrong with it, one line for each finding.
        """
        name = os.fspath(path)
        try:
            with open(name, "rb") as file:
                # One byte more than allowed, so that `parse` sees that it is too long.
                text = file.read(MAX_BYTES + 1).decode("utf-8-sig")
        except OSError as error:
            raise PolicyError(f"{name}: cannot be read ({error.strerror}); name a YAML file") from error
        except UnicodeDecodeError as error:
            raise PolicyError(f"{name}: is not UTF-8 at byte {error.start}; save it as UTF-8 text") from error
        return cls.parse(text, name)

    @classmethod
    def parse(cls, text: str, name: str = "<policy>") -> Self:
        """The policy in a YAML text.

        Args:
            name: what messages call the text.

        Raises:
            PolicyError: as for `load`.
        """
        findings = Findings(name)
        document = read_yaml(text, findings)
        data = expand(document, os.environ, findings)
        tiers = _read_tiers(data.get("tiers"), findings)
        keys = check(PolicyKeys, {k: v for k, v in data.items() if k != "tiers"}, (), findings, also=["tiers"])
        if keys:
            _check_arena(keys, findings)
        durable = _check_durable(data, tiers, findings)
        _check_rules(data, findings)
        findings.raise_any()
        policy = cls(**{**dict(keys or {}), "durable": durable, "tiers": tiers})
        policy._document = document
        return policy

    @classmethod
    def default(cls, path: str | os.PathLike[str]) -> Self:
        """A policy for one machine: the newest version in memory, the newest three in a directory.

        Args:
            path: the directory; made at the first save.
        """
        return cls.parse(
            yaml.safe_dump(
                {
                    "version": 1,
                    "arena": {"size": "512MiB"},
                    "tiers": {
                        "host": {"type": "host", "capacity": "1GiB", "keep": {"last": 1}},
                        "nvme": {"type": "nvme", "path": protect(os.fspath(path)), "keep": {"last": 3}},
                    },
                },
                sort_keys=False,
            ),
            "<default policy>",
        )

    def dump(self) -> str:
        """YAML text that parses to an equal policy where the environment is the same.

        Variables stand in it as they stood in the file, so that no secret lands in a printed policy.

        Raises:
            PolicyError: the policy was not made of a text.
        """
        if not self._document:
            raise PolicyError("this policy was not made of a text, so it has none; make it by Policy.parse")
        return yaml.safe_dump(self._document, sort_keys=False, allow_unicode=True, width=120)

    def tier(self, name: str) -> TierPolicy:
        """What the policy says about the tier of that name.

        Raises:
            NotFound: there is none.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise NotFound(unknown_name(name, (tier.name for tier in self.tiers), f"{name!r} is no tier of this policy"))

    def __eq__(self, other: object) -> bool:
        # Two texts may say the same: what they say counts, and not `_document`.
        return isinstance(other, Policy) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


def _read_tiers(data: object, findings: Findings) -> tuple[TierPolicy, ...]:
    if not isinstance(data, dict) or not data:
        found = "is missing" if data is None else "is empty" if data == {} else f"{show(data)} is not a mapping"
        findings.add(("tiers",), f"{found}; write at least one tier, as in 'nvme: {{type: nvme, path: ckpt}}'")
        return ()
    tiers = (_read_tier(name, tier, findings) for name, tier in data.items())
    return tuple(tier for tier in tiers if tier)


def _read_tier(name: str, data: object, findings: Findings) -> TierPolicy | None:
    at = ("tiers", name)
    if not _NAME.fullmatch(name):
        findings.add(at, f"{name!r} is no name of a tier; write at most 64 letters, digits, - and _")
    if not isinstance(data, dict):
        findings.add(at, f"{show(data)} is not a mapping; write keys and values, as in '{{type: nvme, path: ckpt}}'")
        return None
    try:
        cls = tier_class(data["type"]) if isinstance(data.get("type"), str) else None
        model = keys_of(cls) if cls else None
    except (TierstateError, ImportError, TypeError) as error:
        findings.add((*at, "type"), str(error))
        cls = model = None
    if cls is None or model is None:
        # Which other keys are right is not known, so only those of every tier are looked at.
        check(TierKeys, {k: v for k, v in data.items() if k in TierKeys.model_fields}, at, findings)
        return None
    keys = check(model, data, at, findings)
    if keys is None:
        return None
    if keys.format != "native" and keys.codec != "raw":
        findings.add(
            (*at, "codec"),
            f"{keys.codec!r} cannot be with 'format: {keys.format}', whose files hold raw bytes; leave the codec out",
        )
        return None
    common = {field: getattr(keys, field) for field in TierKeys.model_fields}
    return TierPolicy(name=name, persistent=_survives(cls), options=options_of(keys), **common)


def _survives(cls: type[Tier]) -> bool:
    said = getattr(cls, "persistent", True)
    return said if isinstance(said, bool) else True


def _check_arena(keys: PolicyKeys, findings: Findings) -> None:
    # Slabs are whole pages, and two are needed, so that copying in and writing out can overlap.
    least = 2 * -(-keys.chunk // PAGESIZE) * PAGESIZE
    if keys.arena.size < least:
        found = f"{format_size(keys.arena.size)} is less than two chunks of {format_size(keys.chunk)}"
        findings.add(("arena", "size"), f"{found}; write at least '{format_size(least)}', or a shorter chunk")


def _names(data: Mapping[str, Any]) -> list[str]:
    tiers = data.get("tiers")
    return list(tiers) if isinstance(tiers, dict) else []


def _check_durable(data: Mapping[str, Any], tiers: Sequence[TierPolicy], findings: Findings) -> str:
    names, persistent = _names(data), [tier.name for tier in tiers if tier.persistent]
    wanted = data.get("durable")
    read = {tier.name for tier in tiers}
    if wanted is None:
        if not persistent and len(read) == len(names) > 0:
            findings.add(("tiers",), "no tier survives the host; add one whose type is nvme, lustre or object")
        return persistent[0] if persistent else ""
    if not isinstance(wanted, str):
        return ""
    if wanted not in names:
        findings.add(("durable",), unknown_name(wanted, names, f"{wanted!r} is no tier of this policy"))
    elif wanted in read and wanted not in persistent:
        others = f"; name one that does: {', '.join(persistent)}" if persistent else "; add a tier that does"
        findings.add(("durable",), f"what {wanted!r} keeps does not survive the host{others}")
    return wanted


def _check_rules(data: Mapping[str, Any], findings: Findings) -> None:
    names, rules = _names(data), data.get("rules")
    for i, rule in enumerate(rules if isinstance(rules, list) else []):
        tiers = rule.get("tiers") if isinstance(rule, dict) else None
        if isinstance(tiers, list):
            _check_rule_tiers(tiers, names, ("rules", i, "tiers"), findings)


def _check_rule_tiers(tiers: Sequence[object], names: Sequence[str], at: Keys, findings: Findings) -> None:
    for i, name in enumerate(tiers):
        if isinstance(name, str) and name not in names:
            findings.add((*at, i), unknown_name(name, names, f"{name!r} is no tier of this policy"))
        elif name in tiers[:i]:
            findings.add((*at, i), f"{show(name)} is named twice; keep one")
