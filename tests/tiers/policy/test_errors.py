"""Policies with errors: the message lists all errors with place and remedy, and prints no secret."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from tierstate.manifest.errors import NotFound, PolicyError
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.policy import policy as policy_module
from tierstate.tiers.policy.models import PolicyKeys, key_names
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.units import Rate, Seconds

GOOD = """\
version: 1
chunk: 16MiB
arena: {size: 2GiB, on_full: block}
durable: nvme
tiers:
  host:
    type: host
    capacity: 8GiB
    keep: {last: 2}
  nvme:
    type: nvme
    path: /local/ckpt
    capacity: 1TiB
    every: 10
  s3:
    type: object
    url: s3://bucket
    options: {key: ada}
rules:
  - match: optimizer.**
    tiers: [host, nvme]
    codec: raw
"""


def _model(annotation: Any) -> Any:
    """The model of the keys that a part of a policy has; None if it is a plain value, or a list."""
    if get_origin(annotation) is tuple:
        return None
    kinds = get_args(annotation) or (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def told(text: str) -> str:
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text, "p.yaml")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return without_columns(str(caught.value))


def without_columns(text: str) -> str:
    """The message without the columns, which have a test of their own; each line must have one."""
    assert all(re.match(r"p\.yaml:\d+:\d+: ", line) for line in text.splitlines())
    return re.sub(r"^(p\.yaml:\d+):\d+: ", r"\1: ", text, flags=re.MULTILINE)


def replaced(line: int, text: str) -> str:
    lines = GOOD.splitlines()
    lines[line - 1] = text
    return "\n".join(lines)


def test_the_good_one_is_good() -> None:
    assert Policy.parse(GOOD).durable == "nvme"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (1, "version: 2", "version: 2 is not known; write 1"),
        (1, "version: true", "version: true is not a number; write one"),
        (1, "vershun: 1", "vershun: unknown key; did you mean 'version'?"),
        (1, "tires: 1", "tires: unknown key; did you mean 'tiers'?"),
        (
            1,
            "xyz: 1",
            "xyz: unknown key; known are version, chunk, digest, arena, ranks, on_failure, preemption, agent, "
            "failures, metrics, statistics, alarms, seal, durable, rules, tiers",
        ),
        (2, "chunk: 17", "chunk: 17B is no length of a chunk; write a multiple of 16 bytes from 4KiB to 1GiB, as in"),
        (2, "chunk: 2KiB", "chunk: 2KiB is no length of a chunk"),
        (2, "chunk: 2GiB", "chunk: 2GiB is no length of a chunk"),
        (2, "digest: md5", "digest: 'md5' is not known; write 'xxh3-128', 'blake3' or 'sha256'"),
        (
            3,
            "ranks: {trust: netwrok}",
            "ranks.trust: 'netwrok' is not known; write 'auto', '{file:",
        ),
        (3, "ranks: {trust: {}}", "ranks.trust: a mapping is not known; write 'auto'"),
        (3, "ranks: {trust: {env: 1x}}", "ranks.trust: a mapping is not known; write 'auto'"),
        (3, "ranks: {trust: {file: a, env: B}}", "ranks.trust: a mapping is not known; write"),
        (3, "arena: {on_full: off}", "arena.on_full: 'off' is not known; write 'block' or 'skip'"),
        (3, "arena: {size: 20MiB}", "arena.size: 20MiB is less than two chunks of 16MiB; write at least '32MiB', or a"),
        (3, "arena: {siz: 1GiB}", "arena.siz: unknown key; did you mean 'size'?"),
        (3, "arena: 2GiB", "arena: '2GiB' is not a mapping; write keys and values"),
        (1, "agent: {cpus: all}", "agent.cpus: 'all' is no list of CPUs; write one, as in '0-3,8'"),
        (1, "metrics: {textfile: m.txt}", "metrics.textfile: 'm.txt' does not end with '.prom', and the node exporter"),
        (1, "alarms: {jump: 1}", "alarms.jump: 1 is too small; write more than 1"),
        (1, "alarms: {jump: 9.0e+999}", "alarms.jump: inf is not a number; write one"),
        (4, "durable: host", "durable: what 'host' keeps does not survive the host; name one that does: nvme, s3"),
        (4, "durable: nvm", "durable: 'nvm' is no tier of this policy; did you mean 'nvme'?"),
        (4, "durable: [nvme]", "durable: a list is not text; put it in quotes"),
        (8, "    capacity: yes", "tiers.host.capacity: 'yes' is not a size; write a number and KiB, MiB, GiB or TiB"),
        (
            8,
            "    arena: 1",
            "tiers.host.arena: unknown key; known are type, every, keep, codec, format, bandwidth, "
            "operations, retries, on_lag, initialized, max_lag, encrypt, capacity",
        ),
        (9, "    keep: {}", "tiers.host.keep: keeps nothing; write 'last: N', 'every: N', 'within: 2d', 'best: "),
        (
            9,
            "    keep: {all: false}",
            "tiers.host.keep: keeps nothing; write 'last: N', 'every: N', 'within: 2d', 'best: ",
        ),
        (9, "    keep: {last: 0}", "tiers.host.keep.last: 0 is too small; write at least 1"),
        (9, "    keep: {last: true}", "tiers.host.keep.last: true is not a number; write one, as in 8"),
        (9, "    keep: {last: 1.5}", "tiers.host.keep.last: 1.5 is not a whole number; write one, as in 8"),
        (9, "    keep: {tags: false}", "tiers.host.keep: keeps nothing; write 'last: N', 'every: N', 'within: 2d', "),
        (9, "    keep: {within: 2}", "tiers.host.keep.within: 2 has no unit; write a number and s, min, h or d, as in"),
        (9, "    keep: {within: 2 moons}", "tiers.host.keep.within: '2 moons' is not a duration; write a number and s"),
        (9, "    keep: {within: 0s}", "tiers.host.keep.within: '0s' is not more than nothing and at most a century;"),
        (9, "    keep: {best: loss}", "tiers.host.keep.best: 'loss' is not a mapping; write keys and values"),
        (9, "    keep: {best: {metric: loss}}", "tiers.host.keep.best.mode: is missing; write 'mode: ...'"),
        (9, "    keep: {best: {mode: min}}", "tiers.host.keep.best.metric: is missing; write 'metric: ...'"),
        (9, "    keep: {best: {metric: '', mode: min}}", "tiers.host.keep.best.metric: is empty; write at least one"),
        (
            9,
            "    keep: {best: {metric: l, mode: low}}",
            "tiers.host.keep.best.mode: 'low' is not known; write 'min' or",
        ),
        (
            9,
            "    keep: {best: {metric: l, mode: min, count: 0}}",
            "tiers.host.keep.best.count: 0 is too small; write at",
        ),
        (
            9,
            "    keep: {best: {metric: l, mode: min, top: 2}}",
            "tiers.host.keep.best.top: unknown key; known are metric",
        ),
        (9, "    keep: {last: 1, tags: some}", "tiers.host.keep.tags: 'some' is neither true nor false; write one of"),
        (9, "    keep: {lst: 1}", "tiers.host.keep.lst: unknown key; did you mean 'last'?"),
        (9, "    keep: {all: maybe}", "tiers.host.keep.all: 'maybe' is neither true nor false; write one of them"),
        (9, "    keep:", "tiers.host.keep: an empty value is not a mapping; write keys and values"),
        (11, "    type: nvm", "tiers.nvme.type: "),
        (11, "    type:", "tiers.nvme.type: an empty value is not text; put it in quotes"),
        (12, "    path: ~/x", "tiers.nvme.path: '~/x' starts with '~', which only shells know; write '${HOME}'"),
        (
            12,
            "    path: ''",
            "tiers.nvme.path: is empty; write a path, or '.' for the folder in which the process runs",
        ),
        (12, "    path: ${NOT_SET_AT_ALL:-}", "tiers.nvme.path: is empty; write a path"),
        (12, "    path: s3://bucket/ckpt", "tiers.nvme.path: 's3://bucket/ckpt' is a URL, where a path is right; a st"),
        (12, '    path: "a\\0b"', "tiers.nvme.path: 'a\\x00b' has a character that no file's name has; write another"),
        (
            12,
            '    path: "a\\ud800b"',
            "tiers.nvme.path: 'a\\ud800b' has a character that no file's name has; write ano",
        ),
        (12, "    path: 5", "tiers.nvme.path: 5 is not text; put it in quotes"),
        (13, "    capacity: 2 tebibyte", "tiers.nvme.capacity: '2 tebibyte' is not a size; write a number and KiB"),
        (13, "    capacity: ${NOT_SET_AT_ALL}", "tiers.nvme.capacity: the variable NOT_SET_AT_ALL is not set; set it"),
        (
            14,
            "    every: 1:30",
            "tiers.nvme.every: '1:30' is neither steps nor a time; write a number of steps, a time as in '30min', "
            "or 'auto'",
        ),
        (14, "    every: {max: 0s}", "tiers.nvme.every.max: "),
        (14, "    every: {min: 2h}", "tiers.nvme.every: "),
        (14, "    every: {interval: 2h}", "tiers.nvme.every.interval: unknown key; known are min, max"),
        (14, "    every: {auto: 2h}", "tiers.nvme.every.auto: unknown key; known are min, max"),
        (14, "    every: 0", "tiers.nvme.every: 0 is neither steps nor a time"),
        (14, "    every: true", "tiers.nvme.every: true is neither steps nor a time"),
        (14, "    every: 1.5", "tiers.nvme.every: 1.5 is neither steps nor a time"),
        (14, "    bandwidth: 500MiB", "tiers.nvme.bandwidth: '500MiB' is not a rate; write a size per second, as in"),
        (14, "    operations: 5/year", "tiers.nvme.operations: '5/year' is not a number of times per second; write a"),
        (14, "    operations: 0", "tiers.nvme.operations: 0 is not more than nothing and at most a billion per second"),
        (14, "    retries: 101", "tiers.nvme.retries: 101 is too big; write at most 100"),
        (14, "    retries: -1", "tiers.nvme.retries: -1 is too small; write at least 0"),
        (14, "    retries: true", "tiers.nvme.retries: true is not a number; write one, as in 8"),
        (14, "    codec: zip", "tiers.nvme.codec: 'zip' is not known; write 'raw', 'fast', 'small', 'delta' or 'auto'"),
        (14, "    format: hdf", "tiers.nvme.format: 'hdf' is not known; write 'native', 'safetensors' or 'hdf5'"),
        (14, "    pth: x", "tiers.nvme.pth: unknown key; did you mean 'path'?"),
        (
            14,
            "    <<: {a: b}",
            "tiers.nvme.<<: YAML's merge key is not known here; write the keys out that are merged",
        ),
        (15, "  s 3:", "tiers.s 3: 's 3' is no name of a tier; write at most 64 letters, digits, - and _"),
        (20, "  - match: a..b", "rules.0.match: 'a..b' is not a pattern of leaf paths; write keys with dots between"),
        (21, "    tiers: [nvm]", "rules.0.tiers.0: 'nvm' is no tier of this policy; did you mean 'nvme'?"),
        (21, "    tiers: [nvme, nvme]", "rules.0.tiers.1: 'nvme' is named twice; keep one"),
        (21, "    tiers: []", "rules.0.tiers: is empty; write at least one, or leave the key out"),
        (21, "    tiers: nvme", "rules.0.tiers: 'nvme' is not a list; write one, as in '[nvme]'"),
        (22, "    keep: {}", "rules.0.keep: keeps nothing; write 'last: N', 'every: N', 'within: 2d', 'best: ...' or"),
        (22, "    keep: {last: none}", "rules.0.keep.last: 'none' is not a number; write one, as in 8"),
        (22, "    keep: {lst: 1}", "rules.0.keep.lst: unknown key; did you mean 'last'?"),
        (22, "    pickel: true", "rules.0.pickel: unknown key; did you mean 'pickle'?"),
    ],
)
def test_one_wrong_line_is_one_finding_there(line: int, text: str, message: str) -> None:
    found = told(replaced(line, text))
    assert found.startswith(f"p.yaml:{line}: {message}")
    assert "\n" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("    path: /local/ckpt\n", ""), "p.yaml:10: tiers.nvme.path: is missing; write 'path: ...'"),
        (GOOD.replace("    type: host\n", ""), "p.yaml:6: tiers.host.type: is missing; write 'type: ...'"),
        (
            "chunk: 16MiB",
            "p.yaml:1: tiers: is missing; write at least one tier, as in 'nvme: {type: nvme, path: ckpt}'",
        ),
        ("a: 1\ntiers: {}".replace("a: 1", ""), "p.yaml:2: tiers: is empty; write at least one tier"),
        ("\ntiers: [nvme]", "p.yaml:2: tiers: a list is not a mapping; write at least one tier"),
        ("tiers:\n  n:", "p.yaml:2: tiers.n: an empty value is not a mapping; write keys and values, as in"),
        ("tiers:\n  h: {type: host}", "p.yaml:1: tiers: no tier survives the host; add one whose type is nvme"),
        ("tiers:\n  h: {type: host}\ndurable: h", "p.yaml:3: durable: what 'h' keeps does not survive the host; add a"),
        ("tiers: {n: {type: nvme, path: x}}\nrules: 5", "p.yaml:2: rules: 5 is not a list; write one"),
        ("tiers: {n: {type: nvme, path: x}}\nrules: [5]", "p.yaml:2: rules.0: 5 is not a mapping; write keys"),
    ],
)
def test_what_is_missing_is_told_at_what_lacks_it(text: str, message: str) -> None:
    assert told(text).startswith(message)


@pytest.mark.parametrize(
    "key",
    [
        "statistics: {on: true}", "arena: {prepare: {}}", "metrics: {events: {level: info}}", "alarms: {frozen: {}}",
        "rules: [{match: 'a.**', pickle: {trust: true}}]", "tiers: {a: {type: nvme, path: x, initialized: {}}}",
        "tiers: {a: {type: nvme, path: x, keep: {all: {}}}}",
    ],
)  # fmt: skip
def test_a_mapping_in_place_of_true_or_false_drops_no_key(key: str) -> None:
    """All keys beside it were dropped with it, without a word: the chunk's length, the rules, a whole tier."""
    rest = "chunk: 1MiB\ntiers: {a: {type: nvme, path: x}, b: {type: nvme, path: y}}\n"
    text = f"chunk: 1MiB\n{key}\n" if key.startswith("tiers") else f"{rest}{key}\n"
    assert re.search(r"a mapping is neither true nor false; write one of them$", told(text))


def test_all_is_told_at_once_in_the_files_order() -> None:
    text = replaced(13, "    capacity: 2 tebibyte\n    pth: x\n    capacity: 1")
    text = text.replace("chunk: 16MiB", "chunk: 1").replace("url:", "ulr:").replace("on_full: block", "on_full: no")
    assert re.findall(r"^p\.yaml:(\d+): ([\w.]+): ", told(text), re.MULTILINE) == [
        ("2", "chunk"),
        ("3", "arena.on_full"),
        ("13", "tiers.nvme.capacity"),
        ("14", "tiers.nvme.pth"),
        ("15", "tiers.nvme.capacity"),
        ("17", "tiers.s3.url"),
        ("19", "tiers.s3.ulr"),
    ]


@given(st.integers(0, len(GOOD)), st.text("abc:{}[]-\n '\"&*!#$,1~", max_size=4), st.integers(0, 12))
def test_any_change_gives_a_policy_or_findings(at: int, inserted: str, dropped: int) -> None:
    text = GOOD[:at] + inserted + GOOD[at + dropped :]
    found = ""
    try:
        assert Policy.parse(text, "p.yaml").tiers
    except PolicyError as error:
        found = str(error)
    assert all(re.match(r"p\.yaml:\d+:\d+: ", line) for line in found.splitlines())


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=2)))
def test_any_value_anywhere_gives_a_policy_or_findings(value: Any) -> None:
    for place in (("chunk",), ("arena", "size"), ("tiers",), ("tiers", "s3"), ("tiers", "s3", "options"), ("rules",)):
        document = yaml.safe_load(GOOD)
        inner = document
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        found = ""
        try:
            Policy.parse(yaml.safe_dump(document), "p.yaml")
        except PolicyError as error:
            found = str(error)
        assert all(line.startswith("p.yaml:") for line in found.splitlines())


class Odd:
    """A tier of somebody else, as far as a policy looks at it."""

    def __init__(
        self,
        *,
        where: Path | str,
        schema: int = 1,
        limit: Rate | None = None,
        grace: Seconds = 5.0,
        level: Annotated[int, Field(ge=1, le=9)] = 3,
        loud: bool = False,
        options: dict[str, int] | None = None,
        arena: object = None,
    ) -> None: ...


class Clashing:
    def __init__(self, *, keep: int = 1) -> None: ...


class Unreadable:
    def __init__(self, *, stuff: "NoSuchName" = None) -> None: ...  # type: ignore[name-defined] # noqa: F821, UP037


@pytest.fixture
def own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"odd": Odd, "clashing": Clashing, "unreadable": Unreadable}

    def tier_class(name: str) -> type:
        if name == "lazy":
            raise ImportError("tier type 'lazy' needs the package idle: pip install idle")
        if name not in types:
            raise NotFound(f"{name!r} is no type of tier; known are {', '.join(types)}")
        return types[name]

    monkeypatch.setattr(policy_module, "tier_class", tier_class)


@pytest.mark.usefixtures("own_types")
def test_a_tier_of_somebody_else_needs_nothing_but_its_constructor() -> None:
    policy = Policy.parse("tiers: {a: {type: odd, where: x, schema: 2, limit: 1MiB/s, grace: 2min, loud: true}}")
    tier = policy.tier("a")
    assert tier.options == {"where": "x", "schema": 2, "limit": 1 << 20, "grace": 120.0, "loud": True}
    assert tier.persistent
    Odd(**tier.options)


@pytest.mark.usefixtures("own_types")
@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ("{type: odd}", "a.where: is missing; write 'where: ...'"),
        ("{type: odd, where: [1]}", "a.where: a list is not text; put it in quotes"),
        ("{type: odd, where: x, schema: true}", "a.schema: true is not a number; write one, as in 8"),
        ("{type: odd, where: x, schema: x}", "a.schema: 'x' is not a number; write one, as in 8"),
        ("{type: odd, where: x, level: 10}", "a.level: 10 is too big; write at most 9"),
        (
            "{type: odd, where: x, arena: 1}",
            "a.arena: unknown key; known are type, every, keep, codec, format, bandwidth, operations, retries, on_lag,",
        ),
        ("{type: clashing}", "a.type: the constructor of .*Clashing has the parameter 'keep', which is a key of every"),
        ("{type: unreadable}", "a.type: the constructor of .*Unreadable cannot be read as keys of a policy: .*NoSuch"),
        ("{type: lazy}", "a.type: tier type 'lazy' needs the package idle: pip install idle"),
        ("{type: od}", "a.type: 'od' is no type of tier; known are odd, clashing, unreadable"),
    ],
)
def test_what_does_not_fit_its_constructor_is_told(tier: str, message: str) -> None:
    assert re.match(rf"p\.yaml:1: tiers\.{message}", told(f"tiers: {{a: {tier}}}"))


@pytest.mark.usefixtures("own_types")
@pytest.mark.parametrize("options", ["{key: '${TOKEN}'}", "{'${TOKEN}': 1, 1: 2}", "'${TOKEN}'", "['${TOKEN}']"])
def test_no_value_under_options_is_told(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    found = told(f"tiers: {{a: {{type: odd, where: x, options: {options}}}}}")
    assert "tiers.a.options" in found or "is not text" in found
    assert "hunter2" not in found


@pytest.mark.parametrize("name", ["safetensors", "hdf5"])
def test_a_format_of_raw_bytes_takes_no_codec(name: str) -> None:
    found = told(GOOD.replace("    every: 10\n", f"    codec: auto\n    format: {name}\n"))
    assert found == (
        f"p.yaml:14: tiers.nvme.codec: 'auto' cannot be with 'format: {name}', whose files hold raw bytes; "
        "leave the codec out"
    )
    Policy.parse(GOOD.replace("    every: 10\n", f"    codec: raw\n    format: {name}\n"))


URLS = {
    "s3:/b": "is no URL; write two slashes and the bucket, as in 's3://bucket/ckpt'",
    "s3:b": "is no URL; write two slashes",
    "/plain": "is a path and no URL; write 'file:///path', or a tier of 'type: nvme'",
    "plain": "is no URL; write protocol, bucket and path",
    "s3:///x": "names no bucket; write it after two slashes",
    "s3://": "does not say where; write protocol, bucket and path",
    "s33://b/x": "has a protocol that is not known here; did you mean 's3://'?",
    "file:relative": "is no URL; write three slashes and the whole path, as in 'file:///ckpt'",
    "file://": "does not say where; write protocol, bucket and path",
}


@pytest.mark.parametrize("url", URLS)
def test_urls_that_cannot_be_any_are_refused_where_the_policy_is_read(url: str) -> None:
    found = told(GOOD.replace("s3://bucket", url))
    assert found.startswith(f"p.yaml:17: tiers.s3.url: {url!r} {URLS[url]}")


@given(st.text("s3:/filembucket.@-", max_size=14))
def test_any_text_is_a_url_that_opens_or_is_refused(url: str) -> None:
    """What a policy takes, the class takes too, so that nothing fails later that could be told at once."""
    try:
        Policy.parse(json.dumps({"tiers": {"n": {"type": "nvme", "path": "x"}, "o": {"type": "object", "url": url}}}))
    except PolicyError:
        return
    ObjectStore(url=url).close()


def test_no_password_of_a_url_is_told() -> None:
    for url in ("s3:/ada:hunter2@bucket", "s33://ada:hunter2@b/x", "s3:///ada:hunter2@b"):
        assert "hunter2" not in told(GOOD.replace("s3://bucket", url))


@pytest.mark.parametrize("kind", ["{type: object, url: 'memory://x'}", "{type: host}", "{type: memory}"])
def test_a_durable_tier_must_persist(kind: str) -> None:
    found = told(f"tiers: {{n: {{type: nvme, path: x}}, o: {kind}}}\ndurable: o")
    assert found == "p.yaml:2: durable: what 'o' keeps does not survive the host; name one that does: n"
    assert "no tier survives the host" in told(f"tiers: {{o: {kind}}}")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("stripes", "stripe_count"),
        ("Stripe_Size", "stripe_size"),
        ("interval", "every"),
        ("dir", "path"),
        ("pth", "path"),
    ],
)
def test_a_key_is_taken_for_the_nearest_in_spelling_or_meaning(key: str, meant: str) -> None:
    found = told(f"tiers: {{n: {{type: lustre, path: x, {key}: 8}}}}")
    assert f"tiers.n.{key}: unknown key; did you mean {meant!r}?" in found


@pytest.mark.parametrize("name", [name for name, at in PolicyKeys.model_fields.items() if _model(at.annotation)])
def test_an_unknown_key_of_any_part_names_the_known_ones(name: str) -> None:
    keys = key_names(_model(PolicyKeys.model_fields[name].annotation))
    found = told(f"tiers: {{n: {{type: nvme, path: x}}}}\n{name}: {{{keys[0]}_: 1}}")
    assert f"{name}.{keys[0]}_: unknown key; did you mean {keys[0]!r}?" in found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_lag: {}", "n.max_lag: bounds nothing; write 'steps: N', 'seconds: 5min', or both"),
        ("max_lag: 3", "n.max_lag: 3 is not a mapping; write keys and values"),
        ("max_lag: {steps: -1}", "n.max_lag.steps: -1 is too small; write at least 0"),
        ("max_lag: {steps: true}", "n.max_lag.steps: true is not a number; write one, as in 8"),
        ("max_lag: {seconds: soon}", "n.max_lag.seconds: 'soon' is not a duration; write a number and s, min"),
        ("max_lag: {step: 1}", "n.max_lag.step: unknown key; did you mean 'steps'?"),
    ],
)
def test_bounds_that_are_none(line: str, message: str) -> None:
    assert told(f"tiers: {{n: {{type: nvme, path: x, {line}}}}}").startswith(f"p.yaml:1: tiers.{message}")


def test_what_happens_on_failure() -> None:
    tiers = "tiers: {n: {type: nvme, path: x, max_lag: {steps: 5, seconds: 2min}}}\n"
    policy = Policy.parse(tiers + "on_failure: {action: warn, unprotected: 2h}")
    assert (policy.on_failure.action, policy.on_failure.unprotected) == ("warn", 7200.0)
    bound = policy.tier("n").max_lag
    assert bound is not None
    assert (bound.steps, bound.seconds) == (5, 120.0)
    assert Policy.parse(tiers).on_failure.action == "raise"
    assert told(tiers + "on_failure: warn") == "p.yaml:2: on_failure: 'warn' is not a mapping; write keys and values"
    assert "write 'raise' or 'warn'" in told(tiers + "on_failure: {action: ignore}")
    assert "did you mean 'unprotected'" in told(tiers + "on_failure: {unprotekted: 1h}")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("{signals: [SIGTREM]}", "'SIGTREM' is no signal; write a name, as in SIGTERM"),
        ("{signals: [KILL]}", "'KILL' does not announce the end of a process"),
        ("{signals: [15]}", "15 is not text"),
        ("{signals: []}", "is empty; write at least one"),
        ("{signal: [SIGTERM]}", "unknown key; did you mean 'signals'?"),
        ("{grace: 0s}", "'0s' is not more than nothing"),
        ("{grace: 30}", ""),
        ("true", "true is not a mapping"),
    ],
)
def test_preemption(keys: str, message: str) -> None:
    tiers = "tiers: {n: {type: nvme, path: x}}\n"
    assert Policy.parse(tiers).preemption is None
    found = Policy.parse(tiers + "preemption: {signals: [USR2]}").preemption
    assert found is not None
    assert (found.signals, found.grace) == (("SIGUSR2",), 30.0)
    if message:
        assert message in told(tiers + f"preemption: {keys}")
    else:
        assert Policy.parse(tiers + f"preemption: {keys}").preemption is not None


@given(st.data())
def test_the_place_of_any_error_is_that_of_its_key(data: st.DataObject) -> None:
    """A key that is unknown, written into any mapping of the policy in any style, is told at its line and column."""
    lines = GOOD.splitlines()
    key = "qqq" + data.draw(st.text("abc_", max_size=5))
    at = data.draw(st.sampled_from([i for i, line in enumerate(lines) if re.match(r"\s*[a-z_]+: \S", line)]))
    indent = len(lines[at]) - len(lines[at].lstrip())
    lines.insert(at, f"{' ' * indent}{key}: 1")
    with pytest.raises(PolicyError) as caught:
        Policy.parse("\n".join(lines), "p.yaml")
    assert any(
        line.startswith(f"p.yaml:{at + 1}:{indent + 1}: ") and f"{key}: unknown key; " in line
        for line in str(caught.value).splitlines()
    )


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.data(), ANY, st.text(max_size=10))
def test_any_value_or_key_anywhere_loads_or_is_told_with_its_place_and_what_is_right(data, value, key):
    document = yaml.safe_load(GOOD) | {
        "on_failure": {"action": "warn"},
        "ranks": {"timeout": 5, "trust": {"env": "MY_SECRET"}},
    }
    document["tiers"]["nvme"]["max_lag"] = {"steps": 4}
    inner: Any = document
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        chosen = data.draw(st.sampled_from(keys))
        if not isinstance(inner[chosen], (dict, list)) or data.draw(st.booleans()):
            break
        inner = inner[chosen]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        inner[key] = value
    else:
        inner[chosen] = value
    text, found = yaml.safe_dump(document, allow_unicode=True), ""
    try:
        Policy.parse(text, "p.yaml")
    except PolicyError as error:
        found = str(error)
    for line in found.splitlines():
        where = re.match(r"p\.yaml:(\d+):(\d+): .+; \S", line)
        assert where, line
        assert 1 <= int(where[1]) <= text.count("\n") + 1
        assert 1 <= int(where[2]) <= len(text.splitlines()[int(where[1]) - 1]) + 1
