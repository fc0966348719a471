"""Ownership: which rank of a team saves a replicated leaf that several ranks hold. Agreed when the structure changes.

A save with an unchanged structure waits for no rank. At every save each rank posts, from a background thread, whether
its structure is unchanged. A rank whose structure has changed posts its table and waits for the coordinator's answer:

* All ranks have changed, as at the first save, or after the first step has made an optimizer's state: all owners are
  assigned again.
* Only some ranks have changed: these ranks save what is new to them, and what any of them owned before. Some shards may
  then be saved by two ranks; they are compared and kept once. If that is `WORTH` bytes or more, all ranks assign owners
  again at their next save.

A leaf that disappears on its owner alone makes that save fail on all ranks. Then no earlier assignment is valid.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from tierstate.engine.capture.plan import CaptureSource
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import RankFailed, TierstateError, error_text
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.manifest.sharded.ownership import ONE_OWNER, Ownership, SaveCandidates, assign_owners

from .save import due_key

log = logging.getLogger("tierstate")


WORTH = 1 << 20
"""Bytes that are saved twice, at and above which all ranks assign owners again."""


NO_OWNER = -1
"""Owner of a shard that no assignment has named."""


STEADY, CHANGED, SHARED, APART, FAILED = b"=", b"T", b"S", b"A", b"E"
"""First byte of a report (`STEADY`: unchanged; `CHANGED`: a table follows) and of an answer (`STEADY`: no rank has
changed; `SHARED`: owners are assigned again; `APART`: only some ranks have changed; `FAILED`: an error follows)."""


class _Report(NamedTuple):
    """One rank's report of one save.

    Attributes:
        seq: the save's number.
        data: `STEADY`; or `CHANGED`, the bytes that had no owner (8 bytes, little-endian), and the encoded table.
        answer: receives the coordinator's answer and this rank's assignment; None if nobody waits for them.
    """

    seq: int
    data: bytes
    answer: Future[tuple[bytes, bytes]] | None = None


class OwnershipPlanner:
    """Decides what this rank saves of the leaves that several ranks hold.

    Args:
        team: the ranks.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._lock = threading.Lock()
        self._since = self._reported = -1
        self._owners: dict[tuple[str, Box], int] = {}
        self._digest: Any = None
        self._mine: Array = np.zeros(0, bool)
        self._called = True
        self._shared: list[str] = []
        self._ended = threading.Event()
        self._reports: SimpleQueue[_Report | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tierstate-sharing", daemon=True)
        self._thread.start()

    @property
    def called(self) -> bool:
        """Whether owners are to be assigned at the next save even if its plan is the same as the last one."""
        return self._called

    def steady(self, seq: int) -> None:
        """Report that this rank saves the same shards as last time, or nothing."""
        self._report(_Report(seq, STEADY))

    def absent(self, seq: int) -> None:
        """Report that this rank saves nothing, unless it has already reported for that save."""
        if self._reported < seq:
            self.steady(seq)

    def _report(self, report: _Report) -> None:
        self._reported = report.seq
        self._reports.put(report)

    def ask(self, seq: int, leaves: Sequence[Leaf], sources: Sequence[CaptureSource]) -> Array:
        """Which of the shards that this rank holds it saves. Waits for all ranks only if the structure has changed.

        Returns:
            ``(sources,)`` of bool.

        Raises:
            RankFailed: a rank does not take part in this save.
        """
        single = np.array([leaves[s.leaf].spec.kind in ONE_OWNER for s in sources], bool)
        rows = [sources[i] for i in np.flatnonzero(single).tolist()]
        names = {leaf: encode_path(leaves[leaf].path) for leaf in {s.leaf for s in rows}}
        mine = np.ones(len(sources), bool)
        mine[single] = self._ask(seq, [names[s.leaf] for s in rows], rows)
        return mine

    def _ask(self, seq: int, paths: Sequence[str], rows: Sequence[CaptureSource]) -> Array:
        boxes, nbytes = [s.box for s in rows], np.array([s.nbytes for s in rows], "i8")
        table = SaveCandidates(paths, boxes, nbytes)
        if not self._called and table.digest == self._digest:
            self.steady(seq)
            return self._mine
        keys = list(zip(paths, boxes, strict=True))
        with self._lock:
            owners = self._owners
        before = np.array([owners.get(key, NO_OWNER) for key in keys], "i8")
        more = int(nbytes[before == NO_OWNER].sum())
        answer, found = self._answer(seq, CHANGED + more.to_bytes(8, "little") + table.encode())
        if answer[:1] == SHARED:
            now = Ownership.decode(found).owners_of(self._team.rank, table)
            with self._lock:
                self._owners, self._since = dict(zip(keys, now.tolist(), strict=True)), seq
            mine: Array = now == self._team.rank
        else:
            mine = np.isin(before, [NO_OWNER, *json.loads(answer[1:])["changed"]])
        self._digest, self._mine = table.digest, mine
        return mine

    def _answer(self, seq: int, data: bytes) -> tuple[bytes, bytes]:
        future: Future[tuple[bytes, bytes]] = Future()
        self._report(_Report(seq, data, future))
        answer, found = future.result()
        if answer[:1] == FAILED:
            said = json.loads(answer[1:])
            raise RankFailed(f"what the ranks hold could not be shared out: {said['text']}", said["ranks"])
        return answer, found

    def forget(self, seq: int) -> None:
        """Drop the assignment if it was made at or before a version whose parts did not fit together."""
        with self._lock:
            if self._since <= seq:
                self._owners, self._called = {}, True

    def close(self) -> None:
        """End the thread. A caller that waits for an answer gets an error."""
        self._ended.set()
        self._reports.put(None)
        self._thread.join()

    # The thread

    def _run(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                answer = self._answer_all(report) if self._team.coordinator else self._exchange(report)
                self._apply(answer[0])
            except BaseException as error:
                # Any error is raised in the waiting caller, and the thread goes on: the next save may succeed.
                log.debug("what ranks hold at save %d could not be told: %s", report.seq, error_text(error))
                if report.answer is not None:
                    report.answer.set_exception(_as_ours(error))
            else:
                if report.answer is not None:
                    report.answer.set_result(answer)

    def _apply(self, answer: bytes) -> None:
        """Note from an answer whether the next save must assign owners again."""
        with self._lock:
            if answer[:1] == SHARED:
                self._called = False
            elif answer[:1] == APART:
                self._called = self._called or bool(json.loads(answer[1:])["call"])

    def _exchange(self, report: _Report) -> tuple[bytes, bytes]:
        """Post a report; receive the answer, and the assignment if the answer announces one."""
        team, key = self._team, _key("plan", report.seq)
        team.post(key, report.data)
        answer, found = team.receive(0, _key("answer", report.seq), stop=self._ended.is_set), b""
        if answer[:1] == SHARED:
            found = team.receive(0, _key("share", report.seq, team.rank), stop=self._ended.is_set)
        team.forget([key])
        return answer, found

    def _answer_all(self, report: _Report) -> tuple[bytes, bytes]:
        """On the coordinator: wait for the reports of all ranks, and post the answer and the assignments."""
        team, seq = self._team, report.seq
        try:
            asked = dict.fromkeys(range(1, team.size), _key("plan", seq))
            reports = {0: report.data, **team.receive_all(asked, stop=self._ended.is_set)}
            answer, shares = _answer_to(reports)
            for rank, share in shares.items():
                team.post(_key("share", seq, rank), share)
        except Exception as error:
            team.post(_key("answer", seq), FAILED + _encode_failure(error))
            raise
        team.post(_key("answer", seq), answer)
        # All ranks have reported for this save, so all have received the messages of the last one.
        team.forget([_key("answer", seq - 1), due_key(seq - 1), *self._shared])
        self._shared = [_key("share", seq, rank) for rank in shares]
        return answer, shares.get(0, b"")


def _answer_to(reports: dict[int, bytes]) -> tuple[bytes, dict[int, bytes]]:
    """The answer to the reports of all ranks, and by rank its assignment, if owners are assigned again."""
    changed = {rank: data for rank, data in reports.items() if data[:1] == CHANGED}
    if not changed:
        return STEADY, {}
    if len(changed) == len(reports):
        sharing = assign_owners([SaveCandidates.decode(reports[rank][9:]) for rank in range(len(reports))])
        return SHARED, {rank: sharing.of([rank]).encode() for rank in reports}
    more = sum(int.from_bytes(data[1:9], "little") for data in changed.values())
    return APART + json.dumps({"changed": sorted(changed), "call": more >= WORTH}).encode(), {}


def _key(*what: object) -> str:
    return "sharing/" + "/".join(map(str, what))


def _encode_failure(error: BaseException) -> bytes:
    return json.dumps({"text": str(error)[:4096], "ranks": list(getattr(error, "ranks", ()))}).encode()


def _as_ours(error: BaseException) -> TierstateError:
    return error if isinstance(error, TierstateError) else RankFailed(f"sharing out failed: {error_text(error)}")
