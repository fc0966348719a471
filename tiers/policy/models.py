"""The keys of a policy file as frozen pydantic models, also those of ``keep``.

The options of a tier type are not listed here: they are the keyword parameters of its class's constructor, of which
`keys_of` makes a model.
"""

from __future__ import annotations

import inspect
import os
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
    Discriminator,
    Field,
    SecretStr,
    Tag,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.errors import PydanticUserError

from tierstate.manifest.chunk import CHUNK_GRAIN, CHUNK_SIZE, MAX_CHUNK_SIZE
from tierstate.manifest.format.globs import check_glob
from tierstate.manifest.history.retention import format_duration
from tierstate.tiers.base import Tier
from tierstate.tiers.keys import SecretKey, parse_key, read_key
from tierstate.tiers.units import DURATION_PATTERN, Rate, Seconds, Size, Times, format_size, parse_seconds

from .descriptions import key_descriptions
from .yaml import show_value

MIN_CHUNK_SIZE = 4096


ARENA_SIZE = 2 << 30


MAX_RETRIES = 100


Codec: TypeAlias = Literal["raw", "fast", "small", "delta", "auto"]


_OPTION = "option_"


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")


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


def _matching(pattern: str, otherwise: str) -> BeforeValidator:
    """A check of text by a pattern; ``otherwise`` says what other text is not, and what is right."""

    def check(value: object) -> object:
        if isinstance(value, str) and not re.search(pattern, value):
            raise ValueError(f"{show_value(value)} {otherwise}")
        return value

    return BeforeValidator(check)


Count: TypeAlias = Annotated[int, Field(ge=1), BeforeValidator(no_bool)]


Within: TypeAlias = Annotated[
    Seconds,
    BeforeValidator(_has_unit),
    WithJsonSchema({"title": "duration", "type": "string", "pattern": rf"^\s*(?:{DURATION_PATTERN})\s*$|\$\{{"}),
]


class Frozen(BaseModel):
    """A model that does not change and has no keys but its own."""

    # An error of pydantic itself would show the input.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class BestKeys(Frozen):
    """``best``: the best versions by a number in the metadata of `save`.

    Of equal ones the newer counts as better. A version without that number, or with NaN or infinity, is never among
    them.

    Attributes:
        metric: the number's name; dots lead into nested mappings, as in ``eval.loss``.
        mode: ``min`` if less is better, ``max`` if more is better.
        count: how many versions to keep, as in ``3``.
    """

    metric: Annotated[str, Field(min_length=1)]
    mode: Literal["min", "max"]
    count: Count = 1


class KeepKeys(Frozen):
    """``keep``: the retention of a tier. A version stays if any of the keys keeps it.

    Attributes:
        last: keeps the newest so many versions, as in ``3``.
        every: keeps the first version at or after each multiple of so many steps, as in ``1000``. Of two versions of
            one step it is the newer, so that a training that went back keeps what it has passed again.
        within: keeps what was saved in so much time before the newest version, as in ``2d``.
        best: keeps the best versions by a number in their metadata, as in ``{metric: eval.loss, mode: min, count: 2}``.
        tags: keeps the versions that have a tag. Without it, yes on a tier that survives the host, else no.
        all: keeps every version; the same as no ``keep``.
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


def _check_path(value: object) -> object:
    """The value, unless it is text that would be another path than the one that is meant, or none at all."""
    if not isinstance(value, str):
        return value
    if value.startswith("~"):
        raise ValueError(f"{value!r} starts with '~', which only shells know; write '${{HOME}}'")
    if not value.strip():  # as of a variable that is set and empty: it would be the current folder
        raise ValueError("is empty; write a path, or '.' for the folder in which the process runs")
    if _URL.match(value):
        raise ValueError(f"{show_value(value)} is a URL, where a path is right; a store is a tier of 'type: object'")
    try:
        named = b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        named = False
    if not named:
        raise ValueError(f"{show_value(value)} has a character that no file's name has; write another path")
    return value


def _check_chunk(nbytes: int) -> int:
    if nbytes % CHUNK_GRAIN or not MIN_CHUNK_SIZE <= nbytes <= MAX_CHUNK_SIZE:
        least, most = format_size(MIN_CHUNK_SIZE), format_size(MAX_CHUNK_SIZE)
        raise ValueError(
            f"{format_size(nbytes)} is no length of a chunk; write a multiple of {CHUNK_GRAIN} bytes "
            f"from {least} to {most}, as in '16MiB'"
        )
    return nbytes


class AutoEvery(Frozen):
    """``every: auto``: an interval that is chosen at run time, from what saves cost and how often jobs fail.

    Attributes:
        min: never more often than so, as in ``1min``; without it, as often as the tier can take a save.
        max: a save at the latest so long after the last one, as in ``2h``.
    """

    min: Seconds | None = None
    max: Seconds = 3600.0

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min is not None and self.min > self.max:
            raise ValueError(f"min, {self.min:g} s, is above max, {self.max:g} s; write a min that is no longer")
        return self

    def __str__(self) -> str:
        least = "at most " if self.min is None else f"{format_duration(self.min)} to "
        return f"auto ({least}{format_duration(self.max)})"


def _parse_interval(value: object) -> int | timedelta:
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
            f"{show_value(value)} is neither steps nor a time; write a number of steps, a time as in '30min', or 'auto'"
        )
    return time


_Interval: TypeAlias = Annotated[
    int | timedelta,
    BeforeValidator(_parse_interval),
    WithJsonSchema(
        {
            "title": "steps or duration",
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": rf"^\s*(?:[0-9]+|auto|{DURATION_PATTERN})\s*$|\$\{{"},
            ],
        }
    ),
]


_Auto: TypeAlias = Annotated[AutoEvery, BeforeValidator(lambda value: {} if value == "auto" else value)]


Every: TypeAlias = Annotated[
    Annotated[_Interval, Tag("interval")] | Annotated[_Auto, Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" or isinstance(value, (dict, AutoEvery)) else "interval"),
]
"""A cadence: an int counts steps, a timedelta is a time, and `AutoEvery` is chosen at run time."""


def format_every(every: int | timedelta | AutoEvery | None) -> str:
    """A cadence in the notation of a policy, as in ``100`` or ``15min``."""
    return format_duration(every.total_seconds()) if isinstance(every, timedelta) else str(every)


class MaxLagKeys(Frozen):
    """``max_lag``: how far the newest version in a tier may be behind the newest save; `save` waits before it is more.

    Attributes:
        steps: at most so many steps, as in ``200``. 0: every save that returns is in the tier.
        seconds: at most so much time between the two saves, as in ``5min``.
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
    """``on_failure``: what `save` does when an earlier save reached no tier that survives the host, or when a tier that
    fails would be further behind than its ``max_lag``.

    Attributes:
        action: ``raise``: the next `save` raises the error, once for each such save, and is not made itself. ``warn``:
            it is logged, and the training goes on.
        unprotected: with ``warn``: when no tier that survives the host has taken a save for so long, errors are raised
            as with ``raise``; as in ``2h``.
    """

    action: Literal["raise", "warn"] = "raise"
    unprotected: Seconds = 1800.0


def _one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _check_key(key: SecretStr) -> SecretStr:
    parse_key(key.get_secret_value())
    return key


_TEXTS = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}, mode="validation"
)


class SecretKeys(Frozen):
    """``seal``, and ``encrypt`` of a tier: secret keys, from variables or from files; one, or a list.

    The first key is used for what is written; with each of them what is stored can be read.

    Attributes:
        key: the variable that has a key in hexadecimal or base64, as in ``"${CHECKPOINT_KEY}"``, or a list of them.
        file: the path of a file with one key, which only its owner can read, as in ``/etc/ckpt.key``, or a list of
            them.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    key: Annotated[
        tuple[Annotated[SecretStr, AfterValidator(_check_key)], ...],
        BeforeValidator(_one_or_more),
        _TEXTS,
    ] = ()
    file: Annotated[
        tuple[Annotated[str, BeforeValidator(_check_path)], ...],
        BeforeValidator(_one_or_more),
        _TEXTS,
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
    """``arena``: the host memory into which saves copy the state, for each process.

    Attributes:
        size: its size, as in ``8GiB``; two chunks at least. It does not grow, and is pinned once the process uses CUDA.
        on_full: what a save does that finds the arena full: ``block`` waits for room; ``skip`` leaves the save out, and
            counts that.
        prepare: whether a thread gets memory for all of it as soon as the Checkpointer is made, so that the first save
            blocks for no longer than later ones. Otherwise it gets memory when it is first used; after `resume`, as
            much as the restored state needs; and in the third step of a guarded optimizer, as much as that needs.
    """

    size: Size = ARENA_SIZE
    on_full: Literal["block", "skip"] = "block"
    prepare: bool = False


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
        signals: names of the signals that announce it, as in ``[SIGTERM]``.
        grace: time from the signal until the process is killed, as in ``2min``.
    """

    signals: Annotated[tuple[Annotated[str, AfterValidator(_check_signal)], ...], Field(min_length=1)] = (
        "SIGTERM",
        "SIGUSR1",
    )
    grace: Seconds = 30.0


class SecretPlace(Frozen):
    """``ranks.trust: {file: …}`` or ``{env: …}``: where the job's secret is; one of the two.

    Attributes:
        file: path of a file with the secret, which every host sees, as in ``/home/me/job.secret``. It must be of this
            user, with mode 0600 and no link, in folders that nobody else can change.
        env: name of an environment variable with the secret, as in ``JOB_SECRET``.
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
        trust: what proves that a connection is of the job: a secret of at least 32 characters that all ranks have, in a
            file, as in ``{file: /home/me/job.secret}``, or in a variable, ``{env: NAME}``. ``auto``: that of
            `TIERSTATE_JOB_SECRET` or of the file that `TIERSTATE_JOB_SECRET_FILE` names, else one that a rank draws and
            hands to the others, over a Unix socket where all are on one host, by MUNGE where the hosts have it; several
            hosts without any are refused. ``network``: nothing; whoever reaches the network between the hosts can read
            and change what ranks send.
        timeout: how far behind the others a rank may be, as in ``10min``; beyond that their save fails on all ranks.
        silence: how long a rank may give no heartbeat until it counts as dead, as in ``2min``, which fails the saves
            that wait for it. In jobs so large that heartbeats are rarer, four times the interval between two.
    """

    trust: Trust = "auto"
    timeout: Seconds = 1800.0
    silence: Seconds = 60.0


_PROM = r"\.prom$|\$\{"


_PromFile: TypeAlias = Annotated[
    str,
    Field(pattern=_PROM),
    _matching(_PROM, "does not end with '.prom', and the node exporter reads no other; write '/path/of/run.prom'"),
]


class MetricsKeys(Frozen):
    """``metrics``: what a process tells of its saves and restores to other programs.

    Attributes:
        events: whether events are logged in each persistent tier, for other processes and other days.
        port: port of HTTP on which Prometheus finds metrics at ``/metrics``, as in ``9464``; ranks of a host add their
            ``LOCAL_RANK``. Without it, none is opened.
        address: address on which they are served, as in ``0.0.0.0``; by default only this host can reach it.
        textfile: a file that is written again and again for the node exporter of Prometheus, as in
            ``/var/lib/node_exporter/run.prom``; its name ends with ``.prom``.
        interval: time between two writes of that file, as in ``1min``.
        opentelemetry: whether metrics and spans go to OpenTelemetry, if the process has its SDK.
    """

    events: bool = False
    port: Annotated[int, Field(ge=0, le=65535), BeforeValidator(no_bool)] | None = None
    address: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    textfile: _PromFile | None = None
    interval: Seconds = 15.0
    opentelemetry: bool = False


class AlarmsKeys(Frozen):
    """``alarms``: what the statistics of a save are watched for, and what is done then. Needs ``statistics: true``.

    Attributes:
        action: what is done. ``warn`` logs it; ``raise`` also raises it at the next save, or at the end; ``tag`` gives
            the version the tag ``alarm-step-<step>``. The version is saved in any case.
        nonfinite: whether NaN and infinities count that enter a leaf which had none at the save before.
        frozen: whether leaves of floats count that have changed in each of three saves, and now do not.
        jump: the norm of a leaf counts if it is so many times that of the save before, as in ``100``, or that part of
            it; never with ``null``.
    """

    action: Literal["off", "warn", "raise", "tag"] = "warn"
    nonfinite: bool = True
    frozen: bool = True
    jump: Annotated[float, Field(gt=1, allow_inf_nan=False), BeforeValidator(no_bool)] | None = 10.0


AGENT_MEMORY = 64 << 30


_CPUS = r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$"


_Cpus: TypeAlias = Annotated[
    str, Field(pattern=_CPUS), _matching(_CPUS, "is no list of CPUs; write one, as in '0-3,8'")
]


class AgentKeys(Frozen):
    """``agent``: a process of this host that publishes what trainers have captured, and outlives them.

    Attributes:
        mode: ``auto`` uses one, and saves in the trainer's process where it cannot be had; ``required`` raises then. Of
            several ranks that save together all have one or none.
        memory: captured versions that it keeps in memory at most, of all runs, as in ``128GiB``; half of the host's or
            container's memory at most.
        idle: it ends after so long without a trainer and without work, as in ``1h``; after so long without progress it
            leaves what does not arrive to the next process.
        nice: by how much its priority is lowered, 0 to 19, as in ``10``.
        ionice: ``idle``: its transfers wait for all others of this host.
        cpus: the CPUs that it runs on, as in ``0-3,8``; without it, all.
    """

    mode: Literal["off", "auto", "required"] = "off"
    memory: Size = AGENT_MEMORY
    idle: Seconds = 600.0
    nice: Annotated[int, Field(ge=0, le=19), BeforeValidator(no_bool)] = 0
    ionice: Literal["none", "idle"] = "none"
    cpus: _Cpus | None = None


class FailuresKeys(Frozen):
    """``failures``: how often the job dies, for ``every: auto`` and ``tierstate plan``.

    Attributes:
        mtbf: mean time between two ends of the whole job that nobody has planned, as in ``6h``. Without it, 264 days
            divided by the number of hosts: Llama 3 had 419 of them in 54 days on 2,048 hosts of 8 GPUs
            (arXiv:2407.21783).
        host_lost: for which share of them a host does not come back, and with it all that lies on it, as in ``0.5``.
            78 % of those of Llama 3 had to do with hardware.
    """

    mtbf: Seconds | None = None
    host_lost: Annotated[float, Field(ge=0, le=1), BeforeValidator(no_bool)] = 0.78


class RuleKeys(Frozen):
    """One of the ``rules``: settings for the leaves that match a glob.

    For each key the first rule counts that matches a leaf and has the key. None means: this rule does not have the key.

    Attributes:
        match: pattern of leaf paths as printed, with dots, as in ``optimizer.**``. ``*``, ``?``, ``[...]`` stay within
            one key, ``**`` is any number of keys, ``"a.b"`` is that very key.
        tiers: names of the tiers that get these leaves, as in ``[host, nvme]``; without it, every tier.
        codec: how their chunks are encoded; without it, in the tier's own codec.
        pickle: whether an object of no known type may be pickled here; without it, no.
        lossy: saves floating-point tensors with fewer bits, in every tier; a restore must allow that. Without it, all
            bits are saved.
        keep: in which versions these leaves stay, on every tier, in place of the tier's own ``keep``; as in
            ``{last: 2}``.
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
        type: what kind of place it is, as in ``nvme``: one of those below, or one that another package brings.
        every: which saves go there. A number: the first save at or after each multiple of so many steps, as in ``100``,
            and the first one after the training went back. A time, ``30min``: the first save so long after the last
            one. ``auto``: a time that is chosen at run time, from what saves cost and how often jobs fail
            (``failures``), within bounds such as ``{min: 1min, max: 2h}``. The first save of a run always goes.
            Without it, every save.
        keep: which versions stay, as in ``{last: 3, every: 1000}``; without it, all.
        codec: how chunks are encoded on this tier, without loss.
        format: what kind of file a pack is. Files of the last two hold whole leaves as raw bytes, so ``codec`` must be
            ``raw`` there; a rule's codec counts for what such files cannot express and what lies in native packs
            beside.
        bandwidth: bytes per second that this process reads and writes there at most, both counted together, as in
            ``500MiB/s``; without it, no limit.
        operations: calls per second of this process at most, as in ``100/s``: one for each put, read, list, size and
            delete, and for the opening, each piece and the closing of an object that is written piece by piece. Without
            it, no limit.
        retries: how often a call that failed for a moment (no answer, a broken connection, an I/O error) is tried
            again, as in ``3``, after a pause of anything up to 0.2 s, 0.4 s, … 20 s, drawn at random; 100 at most.
        on_lag: when several saves wait to be copied there: ``queue`` copies all, oldest first (64 wait at most);
            ``skip`` leaves out those that are older than the newest that can be copied.
        initialized: whether the tier must have its marker, which ``tierstate init`` writes once: without it the tier
            counts as not mounted, and nothing is written there. Where a policy has one persistent tier only, nothing
            else could tell an empty mount point from a first run.
        max_lag: how far the newest version in this tier may be behind a save when that returns, as in ``{steps: 200}``;
            `save` waits rather than fall further behind. Without it, no bound.
        encrypt: whether the tier is encrypted: ``true`` with keys made of those of ``seal``, or with keys of its own,
            as in ``{file: /etc/ckpt.key}``. Only tiers that survive the host, with ``format: native``.
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
    """The top-level keys of a policy, except ``tiers``; see `tierstate.tiers.policy.policy.Policy`.

    Attributes:
        version: version of this format.
        chunk: length of a chunk, as in ``32MiB``: what is digested, reused, moved and verified as a whole. A multiple
            of 16 bytes, from 4 KiB to 1 GiB.
        digest: what chunks are named by. ``xxh3-128`` finds accidents; ``blake3``, which needs the package `blake3` and
            is the default with ``seal``, and ``sha256``, which is slower, also forgery.
        arena: the host memory into which saves copy the state, as in ``{size: 8GiB, on_full: block}``.
        ranks: how the ranks of a job trust each other, and how long they wait for each other, as in ``{timeout:
            10min}``.
        on_failure: what `save` does when earlier saves reached no tier that survives the host, as in ``{action:
            warn}``.
        preemption: what happens when a signal announces the end of the process, as in ``{grace: 2min}``. Without it, no
            signal is handled.
        agent: a process of this host that publishes what trainers have captured, and outlives them, as in
            ``{mode: auto}``.
        failures: how often the job dies, for ``every: auto`` and ``tierstate plan``, as in ``{mtbf: 6h}``.
        metrics: what a process tells of its saves and restores to other programs, as in ``{events: true}``.
        statistics: whether versions have statistics of their leaves: count of NaN and infinities, range and norm.
        alarms: what the statistics are watched for, as in ``{action: raise}``; needs ``statistics: true``.
        seal: keys with which records, tags and marks are authenticated, as in ``{file: /etc/ckpt.key}``: what was not
            written with one of them is refused. The first key seals, all are trusted. Without it, nothing is sealed.
        durable: the tier that `save.wait()` waits for, as in ``nvme``; it must survive the host, so a policy has at
            least one tier that does. Without it, the first one that does.
        rules: exceptions for some leaves, in the order in which they are tried, as in
            ``[{match: optimizer.**, tiers: [host, nvme]}]``.
    """

    version: Annotated[Literal[1], BeforeValidator(no_bool)] = 1
    chunk: Annotated[Size, AfterValidator(_check_chunk)] = CHUNK_SIZE
    digest: Literal["xxh3-128", "blake3", "sha256"] = "xxh3-128"
    arena: ArenaKeys = ArenaKeys()
    ranks: RanksKeys = RanksKeys()
    on_failure: OnFailureKeys = OnFailureKeys()
    preemption: PreemptionKeys | None = None
    agent: AgentKeys = AgentKeys()
    failures: FailuresKeys = FailuresKeys()
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
    meanings = key_descriptions(tier)
    try:
        hints = get_type_hints(tier.__init__, include_extras=True)
        fields = {
            # The prefix keeps an option such as `copy` or `schema` from hiding a method of the model.
            f"{_OPTION}{p.name}": (_checked(hints.get(p.name, Any)), _field(p, meanings.get(p.name)))
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


def _field(parameter: inspect.Parameter, meaning: str | None) -> Any:
    default = parameter.default
    if default is parameter.empty:
        return Field(alias=parameter.name, description=meaning)
    if default is None or isinstance(default, (bool, int, float, str)):
        return Field(default, alias=parameter.name, description=meaning)
    # A default that JSON does not know is kept out of the schema.
    return Field(default_factory=lambda: default, alias=parameter.name, description=meaning)


def _checked(annotation: Any) -> Any:
    """The annotation, with checks that pydantic does not make: no boolean as a number, a path that is one."""
    parts = _alternatives(annotation)
    check: Callable[[object], object] | None = None
    if parts & {int, float} and not parts & {bool, object}:
        check = no_bool
    elif Path in parts:
        check = _check_path
    return Annotated[annotation, BeforeValidator(check)] if check else annotation


def _alternatives(annotation: Any) -> set[Any]:
    """The types that a value of this annotation may have."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_alternatives, get_args(annotation)))
    return {annotation} if isinstance(annotation, type) else {object}
