"""Pairs of meshes without a flow: what ranks plan, share out, put into packs and merge lands on any other mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mesh_states import Job, Part, check_filled, check_loaded, jobs, state_of
from support.mesh_states import Truth as Saved
from support.meshes import part_bytes

from tierstate.engine.codecs.codecs import compress
from tierstate.engine.packs.pack import PackWriter
from tierstate.engine.ranks.save.leader import record_of
from tierstate.engine.restore.restore import fill_target, plan_scatter
from tierstate.engine.store.catalog import RunCatalog
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import digest_array
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer, spans
from tierstate.manifest.digest import digest_function
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.sharded.merge import merge_parts, rows_in_merged
from tierstate.manifest.sharded.ownership import ONE_OWNER, SaveCandidates, assign_owners
from tierstate.manifest.sharded.part import PartReader, encode_part, part_of
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.unflatten import NEW, plan_restore
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.memory.pages import PAGE


def parts_of(state: Any, rank: int) -> list[tuple[int, Box, bytes, bool]]:
    """What a rank holds: leaf, box, bytes, and whether one rank saves it for all."""
    tree = flatten(state, rank=rank)
    found = []
    for i, node in enumerate(tree.nodes):
        for one in node.provider.parts if node.provider is not None else ():
            single = node.leaf.spec.kind in ONE_OWNER
            data = part_bytes(one, 48) if node.leaf.spec.kind == "tensor" else _bytes(one)
            found.append((i, one.box, data, single))
    return found


def _bytes(provider: Any) -> bytes:
    return part_bytes(provider, 1 << 20)


class Hosts:
    """A tier in memory for each host, as `nvme` is one for each, and what is saved there without a Checkpointer."""

    def __init__(self, count: int, chunk: int, codec: str) -> None:
        self.tiers = [Memory() for _ in range(count)]
        for number, one in enumerate(self.tiers):
            one.name = f"host{number}"
        self.chunk, self.codec = chunk, codec

    def save(self, job: Job, part: Part, contents: tuple[int, ...], step: int) -> None:
        """One version of what all ranks hold."""
        states = [state_of(job, part, r, contents, step, late=step > 0) for r in range(part.size)]
        held = [parts_of(state, r) for r, state in enumerate(states)]
        trees = [flatten(state, rank=r) for r, state in enumerate(states)]
        shared = [[one for one in own if one[3]] for own in held]
        tables = [
            SaveCandidates(
                [trees[r].leaves[leaf].path for leaf, *_ in own], [box for _, box, *_ in own],
                np.array([len(data) for _, _, data, _ in own], "i8"),
            )
            for r, own in enumerate(shared)
        ]  # fmt: skip
        sharing = assign_owners(tables)
        records = []
        for r in range(part.size):
            owners = iter(sharing.owners_of(r, tables[r]).tolist())
            mine = [one for one in held[r] if not one[3] or next(owners) == r]
            records.append(self._part(part, r, step, trees[r].leaves, mine))
        reader = PartReader()
        records = [reader.decode(encode_part(record)) for record in records]
        whole, rows, _ = merge_parts([record.version for record in records])
        for host in sorted(set(part.hosts)):
            here = [r for r in range(part.size) if part.hosts[r] == host]
            for r in here:
                assert np.array_equal(rows_in_merged(whole, records[r].version), rows[r])
            record = record_of(whole, [(rows[r], records[r].layout) for r in here], {"id": f"{step}-{host}"})
            TierRun(self.tiers[host], "run").publish(record)
            for r in here:
                cut = part_of(record, r)
                assert cut.layout.present.all()

    def _part(self, part: Part, rank: int, step: int, leaves: Any, own: Any) -> Record:
        head = Head("run", step + 1, step, 1.0, chunk=self.chunk, world=part.size)
        writer, digests, places = PackWriter(self.tiers[part.hosts[rank]], "run", step + 1, rank), [], []
        name = digest_function(head.digest)
        for _, _, data, _ in own:
            for at, n in spans(len(data), self.chunk):
                raw = as_buffer(data[at : at + n])
                how, stored = compress(self.codec, raw, 1)
                digests.append(name(raw))
                places.append(writer.add(stored, digests[-1], n, how))
        version = Version.build(head, leaves, [ShardRow(i, rank, box) for i, box, *_ in own], digest_array(digests))
        return Record(version, Layout.build(places, writer.close()), {"id": f"{step}-{rank}-of"})

    def restore(self, job: Job, part: Part, truth: Saved) -> None:
        """On every rank of a world, each for itself."""
        entry = next(e for p in RunCatalog([TierRun(t, "run") for t in self.tiers]).newest_first() for e in p.entries)
        room = Arena(8 * PAGE, PAGE)
        try:
            for rank in range(part.size):
                into = state_of(job, part, rank, [97] * len(job.tensors), 1000, late=not truth.first)
                target = plan_restore(entry.version.leaves, into=into, elsewhere=True, rank=rank)
                fill_target(entry, target, plan_scatter(entry.version, target), room)
                check_filled(job, part, rank, into, truth)
            target = plan_restore(entry.version.leaves, into=NEW)
            check_loaded(job, fill_target(entry, target, plan_scatter(entry.version, target), room), truth)
            assert room.in_flight == 0
        finally:
            room.close()


def check(job: Job, chunk: int, codec: str) -> None:
    """One job through all of its worlds."""
    hosts = Hosts(3, chunk, codec)
    step, truth = 0, None
    for part in job.parts:
        if truth is not None:
            hosts.restore(job, part, truth)
        for contents in part.saves:
            hosts.save(job, part, contents, step)
            truth = Saved(step, contents, part.size, step == 0)
            step += 1


CHUNKS, CODECS = st.sampled_from([16, 64, 4096]), st.sampled_from(["raw", "raw", "fast"])


@pytest.mark.slow
@settings(max_examples=40)
@given(jobs(parts=2), CHUNKS, CODECS)
def test_what_ranks_plan_lands_on_any_other_mesh(job: Job, chunk: int, codec: str) -> None:
    check(job, chunk, codec)


@pytest.mark.soak
@settings(max_examples=5000)
@given(jobs(), CHUNKS, CODECS)
def test_what_ranks_plan_lands_on_any_other_mesh_thousands_of_times(job: Job, chunk: int, codec: str) -> None:
    check(job, chunk, codec)
