"""The policy line by line, and what each line did in a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tierstate.manifest.format.globs import matches
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.printable import escape_controls
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.policy.yaml import KeyPath, PolicyErrors, read_yaml
from tierstate.tiers.units import rough_size

from .data import PolicyLine, TierReport, TierRetention

Effect = tuple[KeyPath, str]


def policy_lines(
    policy: Policy,
    tiers: Sequence[TierReport],
    retention: Sequence[TierRetention],
    leaves: Sequence[Leaf],
    effects: Mapping[KeyPath, str],
) -> list[PolicyLine]:
    """Each line of the policy as it is dumped, without secrets, with what it did.

    Args:
        leaves: of the newest version, which the globs of rules are tried on.
        effects: more texts, by the place of the key that they are about.
    """
    text = policy.dump()
    places = PolicyErrors("policy")
    read_yaml(text, places)
    did: dict[int, list[str]] = {}
    every = [*effects.items(), *_tiers(tiers), *_kept(retention), *_rules(policy, leaves)]
    for keys, what in every:
        if keys in places.lines:
            did.setdefault(places.lines[keys], []).append(what)
    return [
        PolicyLine(number, escape_controls(line), escape_controls("; ".join(did.get(number, ()))))
        for number, line in enumerate(text.splitlines(), 1)
    ]


def _tiers(tiers: Sequence[TierReport]) -> Iterator[Effect]:
    for tier in tiers:
        at: KeyPath = ("tiers", tier.name)
        if not tier.visible:
            yield at, "in the memory of the training: not seen from here"
            continue
        there = f"{tier.versions:,} versions now" + (
            "" if tier.newest is None else f", the newest is step {tier.newest}"
        )
        yield at, there
        yield (*at, "every"), f"{sum(map(sum, tier.states[1:])):,} versions were due here"
        left_out = f"{tier.counts.get('left_out', 0):,} versions were left out"
        yield (*at, "on_lag"), left_out
        yield (*at, "max_lag"), left_out
        if tier.raw_total:
            yield (*at, "codec"), f"codecs saved {rough_size(max(0, tier.by_codecs))} of {rough_size(tier.raw_total)}"


def _kept(retention: Sequence[TierRetention]) -> Iterator[Effect]:
    for tier in retention:
        at: KeyPath = ("tiers", tier.tier, "keep")
        yield at, f"keeps {tier.kept:,} now" + (f", would drop {tier.drop:,}" if tier.drop else "")
        for one in tier.reasons:
            word = one.reason.split()[0]
            yield (*at, "tags" if word == "tag" else word), f"{one.versions:,} versions: {one.reason}"


def _rules(policy: Policy, leaves: Sequence[Leaf]) -> Iterator[Effect]:
    for number, rule in enumerate(policy.rules):
        here = [leaf for leaf in leaves if leaf.spec.has_bytes and matches(rule.match, leaf.path)]
        nbytes = sum(leaf.spec.nbytes for leaf in here)
        yield ("rules", number, "match"), f"matches {len(here):,} leaves of the newest version, {rough_size(nbytes)}"
