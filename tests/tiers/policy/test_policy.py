"""Policies: what a file says is what the models hold, and what they hold can be written again."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tierstate.manifest.digest import ALGORITHMS
from tierstate.manifest.errors import NotFound, PolicyError
from tierstate.tiers.policy.models import BestKeys, KeepKeys, SecretPlace
from tierstate.tiers.policy.policy import Policy, TierPolicy
from tierstate.tiers.policy.schema import policy_schema

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "policies"
ENVIRONMENT = {"PROJECT": "astro", "BUCKET": "ckpt", "USER": "ada", "S3_ENDPOINT": "https://s3.example.org"}

FULL = """
version: 1
chunk: 1MiB
digest: blake3
arena: {size: 512MiB, on_full: skip}
ranks: {timeout: 10min, silence: 5s, trust: {env: MY_SECRET}}
durable: lustre
tiers:
  host:   {type: host, capacity: 8GiB, keep: {last: 2}}
  nvme:   {type: nvme, path: /local/ckpt, capacity: 1.5TiB, every: 30min, keep: {last: 3, every: 1000}}
  lustre: {type: lustre, path: /lustre/ckpt, stripe_count: 8, stripe_size: 16MiB, every: 10, codec: auto}
  s3:
    {type: object, url: "s3://bucket/ckpt", keep: {all: true}, format: native, options: {key: v},
     bandwidth: 500MiB/s, operations: 600/min, retries: 3}
rules:
  - {match: "optimizer.**", tiers: [host, nvme, lustre]}
  - {match: "**.exp_avg*", codec: raw, pickle: true}
  - {match: "optimizer.**", keep: {last: 2, within: 2d, best: {metric: eval.loss, mode: min, count: 2}, tags: false}}
"""

ARENAS = st.sampled_from(["64MiB", "${UNSET:-1GiB}", 1 << 30])
SIZES = st.sampled_from(["16MiB", "4KiB", "65536B", 1 << 20, "${UNSET:-1MiB}", "32 KiB"])
BEST = st.fixed_dictionaries(
    {"metric": st.sampled_from(["loss", "eval.loss"]), "mode": st.sampled_from(["min", "max", "${UNSET:-min}"])},
    optional={"count": st.integers(1, 9)},
)
KEEPS = st.fixed_dictionaries(
    {"last": st.integers(1, 99)},
    optional={
        "every": st.integers(1, 9),
        "within": st.sampled_from(["2d", "1h30min", "${UNSET:-90s}", "2 w"]),
        "best": BEST,
        "tags": st.booleans(),
        "all": st.booleans(),
    },
)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="$"), max_size=8)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "every": st.integers(1, 10**6) | st.sampled_from(["30min", "1h30min", "90s", "7"]),
    "keep": KEEPS,
    "codec": st.sampled_from(["raw", "fast", "small", "delta", "auto"]),
    "bandwidth": st.integers(1, 10**12) | st.sampled_from(["500MiB/s", "1.5 GB/s"]),
    "operations": st.integers(1, 10**6) | st.sampled_from([0.5, "100", "100/s", "600 / min"]),
    "retries": st.integers(0, 100),
    "max_lag": st.sampled_from([{"steps": 0}, {"seconds": "5min"}, {"steps": 100, "seconds": "${UNSET:-2h}"}]),
}
PATHS = st.builds("/c/{}{}".format, WORDS, st.sampled_from(["", "${UNSET:-x}", "$$", "$${UNSET}"]))


URLS = PATHS.filter(lambda path: "@" not in path).map("s3://b{}".format)
"""What stands before an "@" may be a password, and is not in a dump."""


def _tier(kind: str, given: dict[str, Any], **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **given}, optional={**COMMON, **optional})


OPTIONS = st.dictionaries(WORDS, WORDS | st.integers() | st.booleans() | st.none() | st.sampled_from(["off", "1:30"]))
TIERS = (
    _tier("host", {}, capacity=SIZES)
    | _tier("nvme", {"path": PATHS}, capacity=SIZES)
    | _tier("object", {"url": URLS}, options=OPTIONS)
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    names = st.from_regex(r"[a-z][a-z0-9_\-]{0,6}", fullmatch=True)
    tiers = {**draw(st.dictionaries(names, TIERS, max_size=3)), "last": draw(_tier("nvme", {"path": PATHS}))}
    rule = st.fixed_dictionaries(
        {"match": st.sampled_from(["**", "model.*", '"a.b".**'])},
        optional={
            "tiers": st.lists(st.sampled_from(sorted(tiers)), min_size=1, unique=True),
            "pickle": st.booleans(),
            "keep": KEEPS,
        },
    )
    head = st.fixed_dictionaries(
        {},
        optional={
            "version": st.just(1),
            "chunk": SIZES,
            "digest": st.sampled_from(["xxh3-128", "blake3"]),
            "arena": st.fixed_dictionaries(
                {}, optional={"size": ARENAS, "on_full": st.sampled_from(["block", "skip"]), "prepare": st.booleans()}
            ),
            "durable": st.just("last"),
            "on_failure": st.fixed_dictionaries(
                {},
                optional={
                    "action": st.sampled_from(["raise", "warn"]),
                    "unprotected": st.sampled_from(["30min", 600]),
                },
            ),
            "preemption": st.fixed_dictionaries(
                {},
                optional={
                    "signals": st.lists(st.sampled_from(["SIGTERM", "USR1"]), min_size=1, max_size=2),
                    "grace": st.sampled_from(["30s", 90]),
                },
            ),
            "ranks": st.fixed_dictionaries(
                {},
                optional={
                    "trust": st.sampled_from(
                        ["auto", "network", {"file": "/secret"}, {"env": "MY_SECRET"}, "${UNSET:-auto}"]
                    ),
                    "timeout": st.sampled_from(["10min", 90]),
                    "silence": st.sampled_from(["5s", "${UNSET:-1min}"]),
                },
            ),
            "rules": st.lists(rule, max_size=3),
        },
    )
    return {**draw(head), "tiers": tiers}


@given(documents())
def test_a_dumped_policy_parses_to_an_equal_one(document: dict[str, Any]) -> None:
    policy = Policy.parse(yaml.safe_dump(document, allow_unicode=True, sort_keys=False))
    again = Policy.parse(policy.dump())
    assert again == policy
    assert again.dump() == policy.dump()
    assert [tier.name for tier in policy.tiers] == list(document["tiers"])


@given(documents(), documents())
def test_policies_are_equal_only_if_they_say_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = (Policy.parse(yaml.safe_dump(document, sort_keys=False)) for document in (one, other))
    assert (a == b) == (repr(a) == repr(b) and [t.options for t in a.tiers] == [t.options for t in b.tiers])


@given(documents())
def test_what_parses_fits_the_schema(document: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    Policy.parse(yaml.safe_dump(document, sort_keys=False))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)


SCHEMA = policy_schema()


def test_every_key_is_read() -> None:
    policy = Policy.parse(FULL)
    assert (policy.version, policy.chunk, policy.digest, policy.durable) == (1, 1 << 20, "blake3", "lustre")
    assert (policy.arena.size, policy.arena.on_full) == (512 << 20, "skip")
    assert (policy.ranks.timeout, policy.ranks.silence) == (600.0, 5.0)
    assert policy.ranks.trust == SecretPlace(env="MY_SECRET")
    host, nvme, lustre, s3 = policy.tiers
    assert (host.name, host.type, host.every, host.persistent) == ("host", "host", None, False)
    assert (nvme.every, nvme.keep, nvme.persistent) == (timedelta(minutes=30), KeepKeys(last=3, every=1000), True)
    assert nvme.options == {"path": Path("/local/ckpt"), "capacity": 3 << 39}
    assert lustre.options == {"path": Path("/lustre/ckpt"), "stripe_count": 8, "stripe_size": 16 << 20}
    assert (lustre.every, lustre.codec, lustre.keep) == (10, "auto", KeepKeys(all=True))
    assert (s3.format, s3.keep, s3.options) == (
        "native",
        KeepKeys(all=True),
        {"url": "s3://bucket/ckpt", "options": {"key": "v"}},
    )
    assert (s3.bandwidth, s3.operations, s3.retries) == (500 << 20, 10.0, 3)
    assert (nvme.bandwidth, nvme.operations, nvme.retries) == (None, None, 0)
    assert policy.rules[0].tiers == ("host", "nvme", "lustre")
    assert (policy.rules[1].tiers, policy.rules[1].codec, policy.rules[1].pickle) == (None, "raw", True)
    best = BestKeys(metric="eval.loss", mode="min", count=2)
    assert policy.rules[2].keep == KeepKeys(last=2, within="2d", best=best, tags=False)
    assert policy.rules[2].keep.within == 172800.0
    assert (policy.rules[0].keep, policy.rules[2].tiers, nvme.keep.tags) == (None, None, None)


def test_defaults() -> None:
    policy = Policy.parse("tiers: {a: {type: host}, b: {type: nvme, path: x}, c: {type: nvme, path: y}}")
    assert (policy.version, policy.chunk, policy.digest, policy.durable) == (1, 16 << 20, "xxh3-128", "b")
    assert (policy.arena.size, policy.arena.on_full, policy.rules) == (2 << 30, "block", ())
    assert (policy.ranks.timeout, policy.ranks.silence, policy.ranks.trust) == (1800.0, 60.0, "auto")
    tier = policy.tier("a")
    assert (tier.every, tier.keep, tier.codec, tier.format, tier.options) == (
        None,
        KeepKeys(all=True),
        "raw",
        "native",
        {},
    )


def test_two_texts_that_say_the_same_are_equal_and_dumped_as_written() -> None:
    one, other = (Policy.parse(f"chunk: {size}\ntiers: {{n: {{type: nvme, path: x}}}}") for size in ("1MiB", 1048576))
    assert one == other
    assert one.dump() != other.dump()


def test_the_digests_are_those_that_there_are() -> None:
    schema = SCHEMA["properties"]["digest"]["anyOf"][0]
    assert set(schema["enum"]) == set(ALGORITHMS)


def test_a_policy_does_not_change() -> None:
    policy = Policy.parse(FULL)
    for model, key in (
        (policy, "chunk"),
        (policy.arena, "size"),
        (policy.tiers[0], "codec"),
        (policy.rules[0], "match"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(model, key, getattr(model, key))


def test_copies_are_equal_and_can_be_dumped() -> None:
    policy = Policy.parse(FULL)
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert other == policy
        assert other.dump() == policy.dump()
    assert policy != "a policy"


def test_a_tier_is_found_by_name() -> None:
    policy = Policy.parse(FULL)
    assert policy.tier("nvme") is policy.tiers[1]
    with pytest.raises(NotFound, match=r"'lustr' is no tier of this policy; did you mean 'lustre'\?"):
        policy.tier("lustr")


def test_the_default_is_a_directory_behind_memory() -> None:
    policy = Policy.default(Path("/data/$weird ${dir}"))
    assert [tier.type for tier in policy.tiers] == ["host", "nvme"]
    assert policy.durable == "nvme"
    assert policy.tier("nvme").options == {"path": Path("/data/$weird ${dir}")}
    assert Policy.parse(policy.dump()) == policy


@pytest.mark.parametrize("path", [b"ckpt", Path("ckpt"), "ckpt"], ids=repr)
def test_the_default_takes_any_name_of_a_folder(path: Any) -> None:
    assert Policy.default(path).tier("nvme").options == {"path": Path("ckpt")}


@pytest.mark.parametrize("path", ["s3://bucket/ckpt", "file:///ckpt", "", "  "])
def test_the_default_takes_no_url_and_no_empty_name(path: str) -> None:
    """A folder of the name ``s3:`` would be made where the process runs."""
    with pytest.raises(PolicyError, match=r"tiers\.nvme\.path: "):
        Policy.default(path)


def test_variables_are_put_in_and_dumped_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    monkeypatch.setenv("STRIPES", "4")
    policy = Policy.parse(
        """
        tiers:
          l: {type: lustre, path: "${DIR:-/x}/y", stripe_count: "${STRIPES}", every: "${STRIPES}"}
          s: {type: object, url: "s3://b", options: {secret: "${TOKEN}", "${TOKEN}": 1}}
        """
    )
    assert policy.tier("l").options == {"path": Path("/x/y"), "stripe_count": 4}
    assert policy.tier("l").every == 4
    assert policy.tier("s").options["options"] == {"secret": "hunter2", "${TOKEN}": 1}
    assert "hunter2" not in policy.dump() + repr(policy) + str(policy)
    assert "${TOKEN}" in policy.dump()
    monkeypatch.setenv("TOKEN", "hunter3")
    assert Policy.parse(policy.dump()) != policy


def test_a_policy_without_a_text_has_none_to_dump() -> None:
    tier = TierPolicy(name="n", type="nvme", options={"path": Path("x")})
    with pytest.raises(PolicyError, match=r"make it by Policy\.parse"):
        Policy(durable="n", tiers=(tier,)).dump()


def test_a_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + FULL.encode())
    assert Policy.load(path) == Policy.load(str(path)) == Policy.parse(FULL)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    with pytest.raises(PolicyError, match=r"cluster\.yaml: cannot be read \(No such file or directory\); name a YAML"):
        Policy.load(path)
    path.write_bytes(b"a: \xff")
    with pytest.raises(PolicyError, match=r"cluster\.yaml: is not UTF-8 at byte 3; save it as UTF-8 text"):
        Policy.load(path)
    path.write_bytes(b"chunk: 1\n")
    with pytest.raises(PolicyError, match=r"cluster\.yaml:1:1: chunk: 1B is no length of a chunk"):
        Policy.load(path)


@pytest.mark.parametrize("path", [*sorted(DOCS.glob("*.yaml")), ROOT / "examples" / "policy.yaml"], ids=str)
def test_the_policies_in_docs_and_examples_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    policy = Policy.load(path)
    assert Policy.parse(policy.dump()) == policy
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(SCHEMA).validate(yaml.safe_load(path.read_text()))


def test_there_are_policies_in_the_docs() -> None:
    assert {path.stem for path in DOCS.glob("*.yaml")} >= {"laptop", "h200-node", "polaris-lustre", "cloud-nvme-s3"}


@pytest.mark.slow
def test_the_schema_is_one_and_refuses_what_parse_refuses() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(yaml.safe_load(FULL))
    for key, value in (
        ("pth", "x"),
        ("capacity", "2 tebibyte"),
        ("every", 0),
        ("keep", {}),
        ("keep", {"within": "2 moons"}),
        ("keep", {"best": {"metric": "loss"}}),
        ("keep", {"best": {"metric": "loss", "mode": "low"}}),
        ("keep", {"last": 1, "tags": "some"}),
        ("codec", "zip"),
        ("max_lag", {}),
        ("max_lag", {"steps": -1}),
        ("max_lag", {"seconds": "soon"}),
        ("type", "nvm"),
    ):
        document = yaml.safe_load(FULL)
        document["tiers"]["nvme"][key] = value
        assert not validator.is_valid(document), key
        with pytest.raises(PolicyError, match=rf"tiers\.nvme\.{key}[.:]"):
            Policy.parse(yaml.safe_dump(document))
    for failing in ({"action": "ignore"}, {"unprotected": "soon"}, "warn"):
        assert not validator.is_valid({**yaml.safe_load(FULL), "on_failure": failing})
    for url, fits in (("s3://b/c", True), ("/plain", False), ("s3:/b", False), ("${PLACE}", True)):
        assert validator.is_valid({"tiers": {"o": {"type": "object", "url": url}}}) is fits
    assert not validator.is_valid({"version": 1})
    assert not validator.is_valid({"tiers": {"n": {"type": "nvme"}}})


def test_a_retention_for_tiers_whose_text_has_none() -> None:
    tiers = "{a: {type: nvme, path: a}, b: {type: nvme, path: b, keep: {all: true}}}"
    kept = {tier.name: tier.keep for tier in Policy.parse(f"version: 1\ntiers: {tiers}").keeping_last(2).tiers}
    assert kept == {"a": KeepKeys(last=2), "b": KeepKeys(all=True)}
