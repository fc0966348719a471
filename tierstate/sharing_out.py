"""Sharing out: which rank of a team saves what several of them hold, agreed when the structure changes.

A steady save waits for nobody. At every save each rank says, from a thread of its own, whether what it holds is built
as it was; who holds something else says what, and waits for the coordinator's answer:

* all hold something else, as at the first save, and when the first step has made an optimizer's state: everything is
  shared out anew.
* some do: those of them save what was theirs, what nobody knew of, and what belonged to any of them. What is saved
  twice for that is compared, and kept once. Where it is much, all are called to share out anew at their next save.

A leaf that vanishes on its owner alone makes that save fail, on all ranks; then nothing counts as agreed any more.
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

from tierstate.manifest.box import Box
from tierstate.manifest.errors import RankFailed, TierstateError
from tierstate.manifest.index import Array
from tierstate.manifest.leaf import Leaf, encode_path
from tierstate.manifest.sharing import Sharing, Table, share_out
from tierstate.tiers.agreeing import due_key
from tierstate.tiers.plan import Source
from tierstate.tiers.team import Team

log = logging.getLogger("tierstate")

ONE_OWNER = frozenset({"tensor", "array", "storage", "cast", "quantized"})
"""Kinds of leaves that one rank saves for all that hold them. What else several hold is saved by each, and compared."""

WORTH = 1 << 20
"""Bytes that are saved twice from which on all share out anew."""

NOBODY = -1

STEADY, CHANGED, SHARED, APART, FAILED = b"=", b"T", b"S", b"A", b"E"


class _Word(NamedTuple):
    """What a rank says of one save.

    Attributes:
        seq: the save's number.
        data: the word.
        answer: where the answer goes, if anybody waits for it.
    """

    seq: int
    data: bytes
    answer: Future[tuple[bytes, bytes]] | None = None


class SharingOut:
    """One rank's share of what the team holds.

    Args:
        team: the ranks.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._lock = threading.Lock()
        self._since = self._spoken = -1
        self._owners: dict[tuple[str, Box], int] = {}
        self._digest: Any = None
        self._mine: Array = np.zeros(0, bool)
        self._called = True
        self._shared: list[str] = []
        self._ended = threading.Event()
        self._words: SimpleQueue[_Word | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tierstate-sharing", daemon=True)
        self._thread.start()

    @property
    def called(self) -> bool:
        """Whether the next plan is to be shared out, though it be as the last one."""
        return self._called

    def steady(self, seq: int) -> None:
        """This rank saves what it did, or nothing."""
        self._say(_Word(seq, STEADY))

    def absent(self, seq: int) -> None:
        """This rank saves nothing; unless it has said something of that save already."""
        if self._spoken < seq:
            self.steady(seq)

    def _say(self, word: _Word) -> None:
        self._spoken = word.seq
        self._words.put(word)

    def ask(self, seq: int, leaves: Sequence[Leaf], sources: Sequence[Source]) -> Array:
        """``(sources,)`` of bool: what this rank saves of what it holds. Waits for all ranks, unless that is as it was.

        Raises:
            RankFailed: one of them does not come to this save.
        """
        single = np.array([leaves[s.leaf].spec.kind in ONE_OWNER for s in sources], bool)
        rows = [sources[i] for i in np.flatnonzero(single).tolist()]
        names = {leaf: encode_path(leaves[leaf].path) for leaf in {s.leaf for s in rows}}
        mine = np.ones(len(sources), bool)
        mine[single] = self._ask(seq, [names[s.leaf] for s in rows], rows)
        return mine

    def _ask(self, seq: int, paths: Sequence[str], rows: Sequence[Source]) -> Array:
        boxes, nbytes = [s.box for s in rows], np.array([s.nbytes for s in rows], "i8")
        table = Table(paths, boxes, nbytes, np.ones(len(rows), bool))
        if not self._called and table.digest == self._digest:
            self.steady(seq)
            return self._mine
        keys = list(zip(paths, boxes, strict=True))
        with self._lock:
            owners = self._owners
        before = np.array([owners.get(key, NOBODY) for key in keys], "i8")
        more = int(nbytes[before == NOBODY].sum())
        answer, found = self._answer(seq, CHANGED + more.to_bytes(8, "little") + table.encode())
        if answer[:1] == SHARED:
            now = Sharing.decode(found).owners[table.digest]
            with self._lock:
                self._owners, self._since = dict(zip(keys, now.tolist(), strict=True)), seq
            mine: Array = now == self._team.rank
        else:
            mine = np.isin(before, [NOBODY, *json.loads(answer[1:])["changed"]])
        self._digest, self._mine = table.digest, mine
        return mine

    def _answer(self, seq: int, word: bytes) -> tuple[bytes, bytes]:
        future: Future[tuple[bytes, bytes]] = Future()
        self._say(_Word(seq, word, future))
        answer, found = future.result()
        if answer[:1] == FAILED:
            said = json.loads(answer[1:])
            raise RankFailed(f"what the ranks hold could not be shared out: {said['text']}", said["ranks"])
        return answer, found

    def forget(self, seq: int) -> None:
        """The parts of a version did not fit together: nothing counts that was agreed before it."""
        with self._lock:
            if self._since <= seq:
                self._owners, self._called = {}, True

    def close(self) -> None:
        """End the thread; who waits for an answer gets none."""
        self._ended.set()
        self._words.put(None)
        self._thread.join()

    # The thread

    def _run(self) -> None:
        while (word := self._words.get()) is not None:
            try:
                answer = self._judge(word) if self._team.coordinator else self._heard(word)
            except Exception as error:
                # Whatever it is: who waits is told, and the next save may go better.
                log.debug("what ranks hold at save %d could not be told: %s", word.seq, error)
                if word.answer is not None:
                    word.answer.set_exception(_told(error))
                continue
            self._heed(answer[0])
            if word.answer is not None:
                word.answer.set_result(answer)

    def _heed(self, answer: bytes) -> None:
        """Take note of what is to be done at the next save."""
        with self._lock:
            if answer[:1] == SHARED:
                self._called = False
            elif answer[:1] == APART:
                self._called = self._called or bool(json.loads(answer[1:])["call"])

    def _heard(self, word: _Word) -> tuple[bytes, bytes]:
        """Say a word, and hear the answer, and what is shared out, if that is the answer."""
        team, said = self._team, _key("plan", word.seq)
        team.say(said, word.data)
        answer, found = team.hear(0, _key("answer", word.seq), stop=self._ended.is_set), b""
        if answer[:1] == SHARED:
            found = team.hear(0, _key("share", word.seq, team.rank), stop=self._ended.is_set)
        team.forget([said])
        return answer, found

    def _judge(self, word: _Word) -> tuple[bytes, bytes]:
        """The coordinator's answer to what all ranks say of a save."""
        team, seq = self._team, word.seq
        try:
            asked = dict.fromkeys(range(1, team.size), _key("plan", seq))
            words = {0: word.data, **team.hear_all(asked, stop=self._ended.is_set)}
            answer, shares = _answer_to(words)
            for rank, share in shares.items():
                team.say(_key("share", seq, rank), share)
        except Exception as error:
            team.say(_key("answer", seq), FAILED + _said(error))
            raise
        team.say(_key("answer", seq), answer)
        # All have come to this save, and so have heard what they were told at the last one.
        team.forget([_key("answer", seq - 1), due_key(seq - 1), *self._shared])
        self._shared = [_key("share", seq, rank) for rank in shares]
        return answer, shares.get(0, b"")


def _answer_to(words: dict[int, bytes]) -> tuple[bytes, dict[int, bytes]]:
    """The answer to what all say, and to each rank what it is given."""
    changed = {rank: data for rank, data in words.items() if data[:1] == CHANGED}
    if not changed:
        return STEADY, {}
    if len(changed) == len(words):
        sharing = share_out([Table.decode(words[rank][9:]) for rank in range(len(words))])
        return SHARED, {rank: sharing.of([rank]).encode() for rank in words}
    more = sum(int.from_bytes(data[1:9], "little") for data in changed.values())
    return APART + json.dumps({"changed": sorted(changed), "call": more >= WORTH}).encode(), {}


def _key(*what: object) -> str:
    return "sharing/" + "/".join(map(str, what))


def _said(error: BaseException) -> bytes:
    return json.dumps({"text": str(error)[:4096], "ranks": list(getattr(error, "ranks", ()))}).encode()


def _told(error: BaseException) -> TierstateError:
    return error if isinstance(error, TierstateError) else RankFailed(f"sharing out failed: {error!r}")
