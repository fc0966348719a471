"""The keys of a policy file as frozen pydantic models, also those of ``keep``.

The options of a tier type are not listed here: they are the keyword parameters of its class's constructor, of which
`keys_of` makes a model.
"""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeAlias, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.errors import PydanticUserError

from tierstate.manifest.chunk import CHUNK_GRAIN, CHUNK_SIZE, MAX_CHUNK_SIZE
from tierstate.manifest.format.leaf import check_glob
from tierstate.tiers.base import Tier
from tierstate.tiers.keys import SecretKey, parse_key, read_key
from tierstate.tiers.units import DURATION_PATTERN, Rate, Seconds, Size, Times, format_size, parse_seconds

from .yaml import show_value

MIN_CHUNK_SIZE = 4096


ARENA_SIZE = 2 << 30


MAX_RETRIES = 100


Codec: TypeAlias = Literal["raw", "fast", "small", "delta", "auto"]


_OPTION = "option_"


def no_bool(value: object) -> object:
    """The value, unless it is a boolean."""
    # Python, and pydantic with it, takes true for 1.
    if isinstance(value, bool):
        raise ValueError(f"{show_value(value)} is not a number; write one, as in 8")
    return value


def _has_unit(value: object) -> object:
    # Beside `last` and `every`, which count versions and steps, a bare number could mean anything.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"{show_value(value)} has no unit; write a number and s, min, h or d, as in '2d'")
    return value


Count: TypeAlias = Annotated[int, Field(ge=1), BeforeValidator(no_bool)]


Within: TypeAlias = Annotated[
    Seconds,
    BeforeValidator(_has_unit),
    WithJsonSchema(
        {"description": "a time, as in 2d", "type": "string", "pattern": rf"^\s*(?:{DURATION_PATTERN})\s*$|\$\{{"}
    ),
]


class Frozen(BaseModel):
    """A model that does not change and has no keys but its own."""

    # An error of pydantic itself would show the input.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class BestKeys(Frozen):
    """``best``: the best versions by a number in their metadata.

    Attributes:
        metric: the number's name; dots lead into nested mappings.
        mode: ``min`` if less is better, ``max`` if more is better.
        count: how many versions to keep.
    """

    metric: Annotated[str, Field(min_length=1)]
    mode: Literal["min", "max"]
    count: Count = 1


class KeepKeys(Frozen):
    """``keep``: the retention of a tier. A version stays if any of the keys keeps it.

    Attributes:
        last: keeps the newest so many versions.
        every: keeps the first version at or after each multiple of so many steps.
        within: keeps the versions of the last so many seconds.
        best: keeps the best versions by a metric.
        tags: keeps the versions that have a tag; None means yes on a tier that survives the host, else no.
        all: keeps every version.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    last: Count | None = None
    every: Count | None = None
    within: Within | None = None
    best: BestKeys | None = None
    tags: bool | None = None
    all: bool = False

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if not (self.last or self.every or self.within or self.best or self.tags or self.all):
            raise ValueError("keeps nothing; write 'last: N', 'every: N', 'within: 2d', 'best: ...' or 'all: true'")
        return self


def _no_tilde(value: object) -> object:
    if isinstance(value, str) and value.startswith("~"):
        raise ValueError(f"{value!r} starts with '~', which only shells know; write '${{HOME}}'")
    return value


def _check_chunk(nbytes: int) -> int:
    if nbytes % CHUNK_GRAIN or not MIN_CHUNK_SIZE <= nbytes <= MAX_CHUNK_SIZE:
        least, most = format_size(MIN_CHUNK_SIZE), format_size(MAX_CHUNK_SIZE)
        raise ValueError(
            f"{format_size(nbytes)} is no length of a chunk; write a multiple of {CHUNK_GRAIN} bytes "
            f"from {least} to {most}, as in '16MiB'"
        )
    return nbytes


def _parse_every(value: object) -> int | timedelta:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    try:
        time = value if isinstance(value, timedelta) else timedelta(seconds=parse_seconds(str(value)))
    except ValueError:
        time = timedelta(0)
    if time <= timedelta(0):
        raise ValueError(
            f"{show_value(value)} is neither steps nor a time; write a number of steps, or a time as in '30min'"
        )
    return time


Every: TypeAlias = Annotated[
    int | timedelta,
    BeforeValidator(_parse_every),
    WithJsonSchema(
        {
            "description": "steps, or a time as in 30min",
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": rf"^\s*(?:[0-9]+|{DURATION_PATTERN})\s*$|\$\{{"},
            ],
        }
    ),
]
"""A cadence: an int counts steps, a timedelta is a time."""


class MaxLagKeys(Frozen):
    """``max_lag``: how far the newest version in a tier may be behind the newest save; `save` waits before it is more.

    Attributes:
        steps: at most so many steps; 0: every save that returns is in the tier.
        seconds: at most so many seconds between the two saves.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    steps: Annotated[int, Field(ge=0), BeforeValidator(no_bool)] | None = None
    seconds: Seconds | None = None

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if self.steps is None and self.seconds is None:
            raise ValueError("bounds nothing; write 'steps: N', 'seconds: 5min', or both")
        return self


class OnFailureKeys(Frozen):
    """``on_failure``: what `save` does when earlier saves reached no tier that survives the host.

    Attributes:
        action: ``raise`` raises the error of each such save once; ``warn`` logs it, and the training goes on.
        unprotected: with ``warn``: seconds without a save that reached such a tier, after which errors are raised.
    """

    action: Literal["raise", "warn"] = "raise"
    unprotected: Seconds = 1800.0


def _one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _check_key(key: SecretStr) -> SecretStr:
    parse_key(key.get_secret_value())
    return key


def _texts(what: str) -> WithJsonSchema:
    text = {"type": "string"}
    return WithJsonSchema(
        {"description": what, "anyOf": [text, {"type": "array", "items": text, "minItems": 1}]}, mode="validation"
    )


class SecretKeys(Frozen):
    """``seal``, and ``encrypt`` of a tier: secret keys, from variables or from files; one, or a list.

    The first key is used for what is written; with each of them what is stored can be read.

    Attributes:
        key: keys in hexadecimal or base64, each as a variable: ``${NAME}``.
        file: paths of files with one key each, which only their owner can read.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    key: Annotated[
        tuple[Annotated[SecretStr, AfterValidator(_check_key)], ...],
        BeforeValidator(_one_or_more),
        _texts("a variable that has a key, as in ${CHECKPOINT_KEY}, or a list"),
    ] = ()
    file: Annotated[
        tuple[Annotated[str, BeforeValidator(_no_tilde)], ...],
        BeforeValidator(_one_or_more),
        _texts("the path of a file with a key, or a list"),
    ] = ()

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if bool(self.key) == bool(self.file):
            raise ValueError("has no key; write either 'key: ${NAME}' or 'file: PATH'")
        return self

    def read(self) -> tuple[SecretKey, ...]:
        """The keys; files are read now.

        Raises:
            PolicyError: a file cannot be read, others can read or replace it, or it has no key.
        """
        return (*(parse_key(key.get_secret_value()) for key in self.key), *map(read_key, self.file))


class ArenaKeys(Frozen):
    """``arena``: the host memory into which saves copy the state.

    Attributes:
        size: bytes.
        on_full: what a save does while the arena is full: ``block`` waits for room; ``skip`` leaves the save out.
    """

    size: Size = ARENA_SIZE
    on_full: Literal["block", "skip"] = "block"


_NOT_HANDLED = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGCHLD")
"""Signals that cannot be handled, that mean a defect, or that come for other reasons all the time."""


def _check_signal(name: str) -> str:
    full = name if name.startswith("SIG") else f"SIG{name}"
    if full not in signal.Signals.__members__:
        raise ValueError(f"{name!r} is no signal; write a name, as in SIGTERM")
    if full in _NOT_HANDLED:
        raise ValueError(f"{name!r} does not announce the end of a process; write another, as in SIGTERM")
    return full


class PreemptionKeys(Frozen):
    """``preemption``: what happens when a signal announces the end of the process.

    Attributes:
        signals: names of the signals.
        grace: seconds from the signal until the process is killed.
    """

    signals: Annotated[tuple[Annotated[str, AfterValidator(_check_signal)], ...], Field(min_length=1)] = (
        "SIGTERM",
        "SIGUSR1",
    )
    grace: Seconds = 30.0


class SecretPlace(Frozen):
    """``ranks.trust: {file: …}`` or ``{env: …}``: where the job's secret is; one of the two.

    Attributes:
        file: path of a file of this user's alone (mode 0600) with the secret, which every host sees.
        env: name of an environment variable with the secret.
    """

    file: Path | None = None
    env: str | None = None


_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"


def _parse_trust(value: object) -> str | SecretPlace:
    if isinstance(value, SecretPlace) or (isinstance(value, str) and value in ("auto", "network")):
        return value
    if isinstance(value, dict) and len(value) == 1:
        (key, text) = next(iter(value.items()))
        if key == "file" and isinstance(text, str) and text:
            return SecretPlace(file=Path(text))
        if key == "env" and isinstance(text, str) and re.fullmatch(_VARIABLE, text):
            return SecretPlace(env=text)
    raise ValueError(
        f"{show_value(value)} is not known; write 'auto', '{{file: /path/of/secret}}', "
        "'{env: NAME_OF_VARIABLE}', or 'network' for a network that nobody else can reach"
    )


Trust: TypeAlias = Annotated[
    str | SecretPlace,
    BeforeValidator(_parse_trust),
    WithJsonSchema(
        {
            "description": "what proves that a connection is of this job",
            "anyOf": [
                {"enum": ["auto", "network"]},
                {"type": "string", "pattern": r"\$\{"},
                {
                    "type": "object",
                    "properties": {"file": {"type": "string", "minLength": 1}},
                    "required": ["file"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"env": {"type": "string", "pattern": rf"^{_VARIABLE}$|\$\{{"}},
                    "required": ["env"],
                    "additionalProperties": False,
                },
            ],
        }
    ),
]


class RanksKeys(Frozen):
    """``ranks``: how the ranks of a job trust each other, and how long they wait for each other.

    Attributes:
        trust: what proves that a connection is of the job: ``auto``, a secret from the launcher's environment or one
            that the ranks hand to each other safely; a file or a variable with the secret; or ``network``: nothing,
            whoever reaches the network between the hosts can read and change what ranks send.
        timeout: seconds that a rank may be behind the others before their save fails.
        silence: seconds without a heartbeat after which a rank counts as dead.
    """

    trust: Trust = "auto"
    timeout: Seconds = 1800.0
    silence: Seconds = 60.0


class MetricsKeys(Frozen):
    """``metrics``: what a process tells of its saves and restores to other programs.

    Attributes:
        events: whether events are logged in each persistent tier, for other processes and other days.
        port: of HTTP, on which Prometheus finds metrics at ``/metrics``; ranks of a host add their ``LOCAL_RANK``.
        address: on which it is served; by default of this host only.
        textfile: a file that is written again and again for the node exporter of Prometheus; ends with ``.prom``.
        interval: seconds between two times.
        opentelemetry: whether metrics and spans go to OpenTelemetry, if the process has its SDK.
    """

    events: bool = False
    port: Annotated[int, Field(ge=0, le=65535), BeforeValidator(no_bool)] | None = None
    address: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    textfile: Annotated[str, Field(pattern=r"\.prom$|\$\{")] | None = None
    interval: Seconds = 15.0
    opentelemetry: bool = False


class AlarmsKeys(Frozen):
    """``alarms``: what the statistics of a save are watched for, and what is done then. Needs ``statistics: true``.

    Attributes:
        action: ``warn`` logs it; ``raise`` raises it at the next save as well, or at the end; ``tag`` gives the version
            the tag ``alarm-step-<step>``. The version is saved in any case.
        nonfinite: whether NaN and infinities that enter a leaf are told.
        frozen: whether floats that have changed in each save, and no longer do, are told.
        jump: the norm of a leaf is told if it is so many times that of the save before, or that part; None: never.
    """

    action: Literal["off", "warn", "raise", "tag"] = "warn"
    nonfinite: bool = True
    frozen: bool = True
    jump: Annotated[float, Field(gt=1, allow_inf_nan=False), BeforeValidator(no_bool)] | None = 10.0


AGENT_MEMORY = 64 << 30


class AgentKeys(Frozen):
    """``agent``: a process of this host that publishes what trainers have captured, and outlives them.

    Attributes:
        mode: ``auto`` uses one, and saves in the trainer's process where it cannot be had; ``required`` raises then.
        memory: bytes of captured versions that it keeps at most, of all runs; half of this host's memory at most.
        idle: seconds without a trainer and without work after which it ends.
        nice: by how much its priority is lowered, 0 to 19.
        ionice: ``idle``: its transfers wait for all others of this host.
        cpus: the CPUs that it runs on, as in ``0-3,8``; None for all.
    """

    mode: Literal["off", "auto", "required"] = "off"
    memory: Size = AGENT_MEMORY
    idle: Seconds = 600.0
    nice: Annotated[int, Field(ge=0, le=19), BeforeValidator(no_bool)] = 0
    ionice: Literal["none", "idle"] = "none"
    cpus: Annotated[str, Field(pattern=r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$")] | None = None


class RuleKeys(Frozen):
    """One of the ``rules``: settings for the leaves that match a glob.

    For each key the first rule counts that matches a leaf and has the key. None means: this rule does not have the key.

    Attributes:
        match: glob over leaf paths.
        tiers: names of the tiers that get the leaves.
        codec: how their chunks are encoded.
        pickle: whether an object of an unknown type may be pickled.
        lossy: how floating-point tensors are saved with fewer bits, in every tier.
        keep: the retention of these leaves, on every tier, in place of the tier's own ``keep``.
    """

    match: Annotated[str, AfterValidator(check_glob)]
    tiers: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    codec: Codec | None = None
    pickle: bool | None = None
    lossy: Literal["bf16", "int8"] | None = None
    keep: KeepKeys | None = None


class TierKeys(Frozen):
    """The keys that every tier has, whatever its type.

    Attributes:
        type: name of the tier's class in the entry points.
        every: steps or time between two saves to this tier; None for every save.
        keep: the retention of this tier.
        codec: how chunks are encoded in this tier.
        format: the file format of packs in this tier.
        bandwidth: most bytes per second that this process reads and writes; None for no limit.
        operations: most calls per second; None for no limit.
        retries: how often a call is repeated after a transient error.
        initialized: whether the tier must have a marker, which ``tierstate init`` writes once: without it, it counts as
            not mounted.
        on_lag: if several saves wait to be copied to this tier: ``queue`` copies all of them, ``skip`` only the newest.
        max_lag: how far the newest version in this tier may be behind the newest save; None for no bound.
        encrypt: the keys with which this tier is encrypted; True: keys that are made of the policy's ``seal``.
    """

    type: str
    every: Every | None = None
    keep: KeepKeys = KeepKeys(all=True)
    codec: Codec = "raw"
    format: Literal["native", "safetensors", "hdf5"] = "native"
    bandwidth: Rate | None = None
    operations: Times | None = None
    retries: Annotated[int, Field(ge=0, le=MAX_RETRIES), BeforeValidator(no_bool)] = 0
    on_lag: Literal["queue", "skip"] = "queue"
    initialized: bool = False
    max_lag: MaxLagKeys | None = None
    encrypt: bool | SecretKeys = False


class PolicyKeys(Frozen):
    """The top-level keys of a policy, except ``tiers``; see `tierstate.tiers.policy.policy.Policy`."""

    version: Annotated[Literal[1], BeforeValidator(no_bool)] = 1
    chunk: Annotated[Size, AfterValidator(_check_chunk)] = CHUNK_SIZE
    digest: Literal["xxh3-128", "blake3", "sha256"] = "xxh3-128"
    arena: ArenaKeys = ArenaKeys()
    ranks: RanksKeys = RanksKeys()
    on_failure: OnFailureKeys = OnFailureKeys()
    preemption: PreemptionKeys | None = None
    agent: AgentKeys = AgentKeys()
    metrics: MetricsKeys = MetricsKeys()
    statistics: bool = False
    alarms: AlarmsKeys = AlarmsKeys()
    seal: SecretKeys | None = None
    durable: str | None = None
    rules: tuple[RuleKeys, ...] = ()


@lru_cache(maxsize=256)
def keys_of(tier: type[Tier]) -> type[TierKeys]:
    """A model of a tier type's keys: those that every tier has, and the constructor's keyword-only parameters.

    Raises:
        TypeError: a parameter has the name of a common key, or an annotation that pydantic cannot validate.
    """
    where = f"{tier.__module__}.{tier.__qualname__}"
    try:
        hints = get_type_hints(tier.__init__, include_extras=True)
        fields = {
            # The prefix keeps an option such as `copy` or `schema` from hiding a method of the model.
            f"{_OPTION}{p.name}": (_checked(hints.get(p.name, Any)), _field(p))
            for p in inspect.signature(tier.__init__).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name != "arena"
        }
        model: type[TierKeys] = create_model(tier.__name__, __base__=TierKeys, **fields)  # type: ignore[call-overload]
    except (AttributeError, NameError, TypeError, PydanticUserError) as error:
        what = str(error).splitlines()[0]
        raise TypeError(f"the constructor of {where} cannot be read as keys of a policy: {what}") from error
    if taken := sorted(TierKeys.model_fields.keys() & {name.removeprefix(_OPTION) for name in fields}):
        raise TypeError(f"the constructor of {where} has the parameter {taken[0]!r}, which is a key of every tier")
    return model


def options_of(keys: TierKeys) -> dict[str, Any]:
    """The keyword arguments for the tier's constructor: those of its own keys that the file has, validated."""
    fields = type(keys).model_fields
    return {str(fields[f].alias): getattr(keys, f) for f in fields if f in keys.model_fields_set and _is_option(f)}


def key_names(model: type[BaseModel]) -> list[str]:
    """The keys of a model, as a policy file writes them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _is_option(field: str) -> bool:
    return field.startswith(_OPTION)


def _field(parameter: inspect.Parameter) -> Any:
    default = parameter.default
    if default is parameter.empty:
        return Field(alias=parameter.name)
    if default is None or isinstance(default, (bool, int, float, str)):
        return Field(default, alias=parameter.name)
    # A default that JSON does not know is kept out of the schema.
    return Field(default_factory=lambda: default, alias=parameter.name)


def _checked(annotation: Any) -> Any:
    """The annotation, with checks that pydantic does not make: no boolean as a number, no ``~`` in a path."""
    parts = _alternatives(annotation)
    check: Callable[[object], object] | None = None
    if parts & {int, float} and not parts & {bool, object}:
        check = no_bool
    elif Path in parts:
        check = _no_tilde
    return Annotated[annotation, BeforeValidator(check)] if check else annotation


def _alternatives(annotation: Any) -> set[Any]:
    """The types that a value of this annotation may have."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_alternatives, get_args(annotation)))
    return {annotation} if isinstance(annotation, type) else {object}
