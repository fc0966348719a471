"""Policies: one YAML file says which state goes to which tier, how often, in which codec, and how long it is kept.

`Policy` loads, validates and dumps such a file. `open_policy_tier` opens one of its tiers, wrapped with the limits,
retries and measurements that the policy asks for.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from mmap import PAGESIZE
from typing import Any, Self

import yaml
from pydantic import Field, PrivateAttr

from tierstate.manifest.arguments import as_int, as_path, as_text
from tierstate.manifest.digest import UNFORGEABLE
from tierstate.manifest.errors import NotFound, PolicyError, TierstateError
from tierstate.manifest.format.layout import holds_chunks
from tierstate.tiers.base import Tier
from tierstate.tiers.registry import open_tier, tier_class
from tierstate.tiers.secrets import without_literals
from tierstate.tiers.units import format_size
from tierstate.tiers.wrappers.encrypt import Encrypted
from tierstate.tiers.wrappers.limit import Limited
from tierstate.tiers.wrappers.measure import Measured
from tierstate.tiers.wrappers.retry import Retried
from tierstate.tiers.wrappers.seal import Sealed

from .errors import unknown_name, validate_keys
from .models import AgentKeys, KeepKeys, MetricsKeys, PolicyKeys, SecretKeys, TierKeys, keys_of, options_of
from .yaml import MAX_POLICY_BYTES, KeyPath, PolicyErrors, escape_variables, expand_variables, read_yaml, show_value

log = logging.getLogger("tierstate")


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}")


_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


SEALED_DIGEST = "blake3"
"""The digest of a policy with ``seal`` that does not say which: the fastest that nobody can forge."""


class TierPolicy(TierKeys):
    """One tier of a policy.

    Attributes:
        name: its name in the policy.
        persistent: whether its objects survive the host, as its class says for these options (`Tier.persists`); True if
            the class says nothing.
        options: keyword arguments for the class's constructor, validated. They may hold secrets, so no repr shows them.
        seal: the policy's ``seal``.
    """

    name: str
    persistent: bool = True
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    seal: SecretKeys | None = None


class Policy(PolicyKeys):
    """A policy, made by `load`, `parse`, `auto` or `default`.

    Attributes:
        version: of the file's format.
        chunk: length of a chunk, in bytes.
        digest: name of the digest algorithm.
        arena: the host memory into which saves copy the state.
        ranks: how long the ranks of a job wait for each other.
        on_failure: what `save` does when earlier saves reached no persistent tier.
        preemption: what happens when a signal announces the end of the process; None if nothing does.
        agent: whether a process beside the trainers publishes what they have captured.
        failures: how often the job dies, for ``every: auto`` and ``tierstate plan``.
        metrics: what a process tells of its saves and restores to other programs.
        statistics: whether versions have statistics of their leaves: NaN, infinities, range, norm.
        alarms: what the statistics are watched for, and what is done then.
        seal: the keys with which records are authenticated; None: they are not.
        durable: name of the tier that `Save.wait` waits for; persistent.
        tiers: fastest first: a save enters at the first ones and is copied down to the others.
        rules: in the order in which they are tried.
    """

    durable: str
    tiers: tuple[TierPolicy, ...]

    _document: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The policy in a YAML file.

        Raises:
            PolicyError: the file cannot be read or used; the message has one line for each error in it.
            TypeError: it is no path.
            ValueError: no file can have this path.
        """
        name = as_path(path, "policy", "give the path of a YAML file, or a Policy, as of ts.Policy.parse(text)")
        try:
            with open(name, "rb") as file:
                # One byte more than allowed, so that `parse` sees that it is too long.
                text = file.read(MAX_POLICY_BYTES + 1).decode("utf-8-sig")
        except OSError as error:
            if "\n" in name:  # it may hold secrets
                raise PolicyError(
                    "the path of a policy file has several lines; is it the text of a policy? "
                    "then give ts.Policy.parse(text)"
                ) from None
            raise PolicyError(
                f"{name}: cannot be read ({error.strerror}); name a YAML file; `tierstate policy init` makes one"
            ) from error
        except UnicodeDecodeError as error:
            raise PolicyError(f"{name}: is not UTF-8 at byte {error.start}; save it as UTF-8 text") from error
        return cls.parse(text, name)

    @classmethod
    def parse(cls, text: str, name: str = "<policy>") -> Self:
        """The policy in a YAML text.

        Args:
            name: name of the text in messages.

        Raises:
            PolicyError: as for `load`.
            TypeError: it is no text.
        """
        text = as_text(text, "policy", "give the text of one, or its file to ts.Policy.load")
        findings = PolicyErrors(name)
        document = read_yaml(text, findings)
        data = expand_variables(document, os.environ, findings)
        if data.get("seal") is not None:
            data.setdefault("digest", SEALED_DIGEST)
        tiers = _read_tiers(data.get("tiers"), findings)
        keys = validate_keys(PolicyKeys, {k: v for k, v in data.items() if k != "tiers"}, (), findings, also=["tiers"])
        if keys:
            _check_arena(keys, findings)
            _check_digest(keys, findings)
            if "alarms" in data and not keys.statistics and keys.alarms.action != "off":
                findings.add(
                    ("alarms",),
                    "watch the statistics of saves, which the policy does not ask for; write 'statistics: true'",
                )
        _check_key_texts(document.get("seal"), ("seal",), findings)
        for tier in tiers:
            _check_encrypt(tier, document, findings)
        durable = _check_durable(data, tiers, findings)
        _check_rules(data, findings)
        findings.raise_any()
        assert keys is not None  # or there are findings
        policy = cls(**{**dict(keys), "durable": durable, "tiers": tiers})
        policy = policy._with_seal(policy.seal)
        policy._document = document
        return policy

    @classmethod
    def default(cls, path: str | os.PathLike[str]) -> Self:
        """A policy for one machine: it keeps the newest version in memory, and the newest three in a directory.

        Args:
            path: the directory; created at the first save.
        """
        return cls.parse(
            yaml.safe_dump(
                {
                    "version": 1,
                    "arena": {"size": "512MiB"},
                    "tiers": {
                        "host": {"type": "host", "capacity": "1GiB", "keep": {"last": 1}},
                        "nvme": {"type": "nvme", "path": escape_variables(as_path(path, "path")), "keep": {"last": 3}},
                    },
                },
                sort_keys=False,
            ),
            "<default policy>",
        )

    @classmethod
    def auto(cls, *places: str | os.PathLike[str]) -> Self:
        """A policy for this machine, with a tier for each place: the same that ``tierstate policy init`` writes.

        The places become tiers in the order of their speed, above them one in host memory where there is enough of it.
        The fastest one that lasts takes every save and keeps the newest three; slower ones take a save every 5 minutes
        (disks), 15 (file systems of several hosts) or 30 (object stores).
        The arena and the memory tier are shares of the memory of this process. `dump` shows the policy.

        On several hosts, write a file by ``tierstate policy init`` and load that: they may differ.

        Args:
            places: folders, and URLs as in ``s3://bucket/ckpt``, as a policy writes them: ``${NAME}`` is a variable.
                None: a folder on the best disk of this machine for scratch data, such as the one that a scheduler made
                for this job.

        Raises:
            PolicyError: a place cannot keep a state, as one in memory (tmpfs), or none is given and none was found.
        """
        # Only here: most policies come from files.
        from .auto import choose_places, policy_text, policy_warnings
        from .machine import look_at_machine

        facts = choose_places(look_at_machine([as_path(place, "place") for place in places]))
        for warning in policy_warnings(facts):
            log.warning("%s", warning)
        return cls.parse(policy_text(facts), "<policy for this machine>")

    def dump(self, *, secrets: bool = False) -> str:
        """YAML text that parses to an equal policy in the same environment.

        Variables are written as in the file, not their values, so that a printed policy shows no secret. In place of a
        credential that the file has as text, there is ``${HIDDEN}``: to be parsed, that must be set.

        Args:
            secrets: also write credentials that the file has as text.

        Raises:
            PolicyError: the policy was not parsed from a text.
        """
        if not self._document:
            raise PolicyError("this policy was not made of a text, so it has none; make it by Policy.parse")
        document = self._document if secrets else without_literals(self._document)
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)

    def trusting(self, files: Sequence[str]) -> Self:
        """The same policy, with the keys in these files in place of those of its ``seal``."""
        names = [files] if isinstance(files, (str, os.PathLike)) else files
        return self._with_seal(SecretKeys(file=tuple(as_path(name, "file") for name in names)))

    def keeping_last(self, count: int) -> Self:
        """The same policy, in which a tier for which the text says no ``keep`` keeps the newest so many versions."""
        count = as_int(count, "count", "write how many versions are kept, 1 or more", least=1)
        said = self._document.get("tiers", {})
        keep = KeepKeys(last=count)
        tiers = tuple(t if "keep" in said.get(t.name, {}) else t.model_copy(update={"keep": keep}) for t in self.tiers)
        return self.model_copy(update={"tiers": tiers})

    def _with_seal(self, seal: SecretKeys | None) -> Self:
        tiers = tuple(tier.model_copy(update={"seal": seal}) for tier in self.tiers)
        return self.model_copy(update={"seal": seal, "tiers": tiers})

    def quiet(self) -> Self:
        """The policy for a process that looks at runs: without an agent, metrics and memory made ready for saves."""
        arena = self.arena.model_copy(update={"prepare": False})
        return self.model_copy(update={"agent": AgentKeys(), "metrics": MetricsKeys(), "arena": arena})

    def tier(self, name: str) -> TierPolicy:
        """The tier of that name.

        Raises:
            NotFound: the policy has no such tier.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise NotFound(unknown_name(name, (tier.name for tier in self.tiers), f"{name!r} is no tier of this policy"))

    def __eq__(self, other: object) -> bool:
        # Two texts may mean the same policy, so `_document` is not compared.
        return isinstance(other, Policy) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


def _read_tiers(data: object, findings: PolicyErrors) -> tuple[TierPolicy, ...]:
    if not isinstance(data, dict) or not data:
        found = "is missing" if data is None else "is empty" if data == {} else f"{show_value(data)} is not a mapping"
        findings.add(("tiers",), f"{found}; write at least one tier, as in 'nvme: {{type: nvme, path: ckpt}}'")
        return ()
    tiers = (_read_tier(name, tier, findings) for name, tier in data.items())
    return tuple(tier for tier in tiers if tier)


def _read_tier(name: str, data: object, findings: PolicyErrors) -> TierPolicy | None:
    at = ("tiers", name)
    if not _NAME.fullmatch(name):
        findings.add(at, f"{name!r} is no name of a tier; write at most 64 letters, digits, - and _")
    if not isinstance(data, dict):
        findings.add(
            at, f"{show_value(data)} is not a mapping; write keys and values, as in '{{type: nvme, path: ckpt}}'"
        )
        return None
    try:
        cls = tier_class(data["type"]) if isinstance(data.get("type"), str) else None
        model = keys_of(cls) if cls else None
    except (TierstateError, ImportError, TypeError) as error:
        findings.add((*at, "type"), str(error))
        cls = model = None
    if cls is None or model is None:
        # The tier type's own keys are not known, so only the common keys are validated.
        validate_keys(TierKeys, {k: v for k, v in data.items() if k in TierKeys.model_fields}, at, findings)
        return None
    keys = validate_keys(model, data, at, findings)
    if keys is None:
        return None
    if keys.format != "native" and keys.codec != "raw":
        findings.add(
            (*at, "codec"),
            f"{keys.codec!r} cannot be with 'format: {keys.format}', whose files hold raw bytes; leave the codec out",
        )
        return None
    common = {field: getattr(keys, field) for field in TierKeys.model_fields}
    persistent = _is_persistent(cls, options_of(keys))
    if keys.encrypt and (why := _not_encrypted(keys, persistent)):
        findings.add((*at, "encrypt"), why)
        return None
    return TierPolicy(name=name, persistent=persistent, options=options_of(keys), **common)


def _not_encrypted(keys: TierKeys, persistent: bool) -> str:
    """Why a tier cannot be encrypted; empty if it can."""
    if keys.format != "native":
        return f"cannot be with 'format: {keys.format}', whose files other programs open; take one of them away"
    return "" if persistent else "what this tier keeps does not survive the host, so it is not encrypted; leave it out"


def _is_persistent(cls: type[Tier], options: Mapping[str, Any]) -> bool:
    if callable(persists := getattr(cls, "persists", None)):
        return bool(persists(options))
    declared = getattr(cls, "persistent", True)
    return declared if isinstance(declared, bool) else True


def _check_arena(keys: PolicyKeys, findings: PolicyErrors) -> None:
    # Slabs are whole pages, and two are needed, so that copying in and writing out can overlap.
    least = 2 * -(-keys.chunk // PAGESIZE) * PAGESIZE
    if keys.arena.size < least:
        found = f"{format_size(keys.arena.size)} is less than two chunks of {format_size(keys.chunk)}"
        findings.add(("arena", "size"), f"{found}; write at least '{format_size(least)}', or a shorter chunk")


def _check_digest(keys: PolicyKeys, findings: PolicyErrors) -> None:
    if keys.seal is None:
        return
    if keys.digest not in UNFORGEABLE:
        known = " or ".join(f"'{one}'" for one in UNFORGEABLE)
        findings.add(("digest",), f"{keys.digest!r} can be forged, and the policy has a 'seal'; write {known}")
    elif keys.digest == "blake3" and find_spec("blake3") is None:
        findings.add(("seal",), "needs the package blake3: pip install 'tierstate[blake3]', or write 'digest: sha256'")


def _check_key_texts(data: object, at: KeyPath, findings: PolicyErrors) -> None:
    """Check that no key is written into the file itself: a policy is shown, dumped and kept in repositories."""
    keys = data.get("key") if isinstance(data, dict) else None
    for key in keys if isinstance(keys, list) else [keys]:
        if isinstance(key, str) and not _VARIABLE.fullmatch(key):
            findings.add(
                (*at, "key"), "is written into the policy, which is no secret; write '${NAME}', or name a file"
            )


def _check_encrypt(tier: TierPolicy, document: Mapping[str, Any], findings: PolicyErrors) -> None:
    at = ("tiers", tier.name, "encrypt")
    _check_key_texts(document["tiers"][tier.name].get("encrypt"), at, findings)
    if tier.encrypt is True and document.get("seal") is None:
        findings.add(
            at, "true takes its key from 'seal', which the policy does not have; write 'file: PATH' in its place"
        )


def _names(data: Mapping[str, Any]) -> list[str]:
    tiers = data.get("tiers")
    return list(tiers) if isinstance(tiers, dict) else []


def _check_durable(data: Mapping[str, Any], tiers: Sequence[TierPolicy], findings: PolicyErrors) -> str:
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


def _check_rules(data: Mapping[str, Any], findings: PolicyErrors) -> None:
    names, rules = _names(data), data.get("rules")
    for i, rule in enumerate(rules if isinstance(rules, list) else []):
        tiers = rule.get("tiers") if isinstance(rule, dict) else None
        if isinstance(tiers, list):
            _check_rule_tiers(tiers, names, ("rules", i, "tiers"), findings)


def _check_rule_tiers(tiers: Sequence[object], names: Sequence[str], at: KeyPath, findings: PolicyErrors) -> None:
    for i, name in enumerate(tiers):
        if isinstance(name, str) and name not in names:
            findings.add((*at, i), unknown_name(name, names, f"{name!r} is no tier of this policy"))
        elif name in tiers[:i]:
            findings.add((*at, i), f"{show_value(name)} is named twice; keep one")


def open_policy_tier(spec: TierPolicy, arena: object | None = None) -> Tier:
    """Open a tier, and wrap it with measurement, rate limits and retries as the policy says.

    Measurement is innermost: it times the tier itself, without the waiting of the rate limit. Retries are outermost:
    a call that is repeated counts again for the rate limit. Encryption, or else seals, are around all of them: what is
    measured and retried is what is stored. What is encrypted needs no seal: it is authenticated by that.

    Args:
        spec: the tier in the policy.
        arena: the engine's arena, for a class whose constructor has a parameter of that name.

    Raises: as `tierstate.tiers.registry.open_tier`.
    """
    return wrap_policy_tier(spec, open_tier(spec.name, spec.type, spec.options, arena))


def wrap_policy_tier(spec: TierPolicy, opened: Tier) -> Tier:
    """The wrappers of `open_policy_tier` around a tier that is open."""
    secrets = spec.seal.read() if spec.seal is not None else ()
    ciphers = spec.encrypt.read() if isinstance(spec.encrypt, SecretKeys) else [key.for_tier() for key in secrets]
    tier: Tier = Measured(opened)
    if spec.bandwidth or spec.operations:
        tier = Limited(tier, bandwidth=spec.bandwidth, operations=spec.operations)
    if spec.retries:
        tier = Retried(tier, spec.retries)
    if spec.encrypt:
        return Encrypted(tier, ciphers)
    return Sealed(tier, [key.for_seals for key in secrets], bare=holds_chunks) if secrets else tier
