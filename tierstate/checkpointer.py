"""The front door: a Checkpointer saves a run's state through a policy and restores it."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from tierstate.manifest.errors import TierstateError, TierUnavailable
from tierstate.manifest.head import Head
from tierstate.manifest.leaf import Path, check_glob
from tierstate.manifest.log import check_run
from tierstate.providers.recall import Recall
from tierstate.providers.target import NEW
from tierstate.tiers.arena import Arena
from tierstate.tiers.flow import Flow
from tierstate.tiers.opening import opened
from tierstate.tiers.placement import lossy_methods
from tierstate.tiers.plan import Plan
from tierstate.tiers.policy import Policy
from tierstate.tiers.shelf import Shelf
from tierstate.tiers.tally import HISTORY

from .collecting import uncollected
from .finding import OnDamage, Restored, Wanted, restore
from .guard import Guard
from .info import Stats, TierStats, VersionInfo
from .planning import Planner, allowed_pickles, new_head, retention, rule_retention
from .progress import draining
from .pruning import Saving
from .restoring import restore_together
from .run import Run
from .save import Save, tell
from .tagging import Tagged
from .together import joined

log = logging.getLogger("tierstate")


class Checkpointer(Run):
    """Saves and restores the state of one run.

    Args:
        policy: which state goes to which tier; a `Policy`, or the path of a policy file.
        run: name of the run: letters, digits, ``.``, ``_`` and ``-``.
        process_group: the ranks that save together, of which each makes a Checkpointer, at the same time, and calls
            `save` as often and with the same steps; or a `Team`. None, or a group of one rank: this process alone.
        allow_pickle: globs of leaves that may be saved and loaded as pickles, beside those the policy's rules allow.
            Loading a pickle runs whatever code it holds.

    Raises:
        PolicyError: the policy cannot be used.
        TierstateError: a tier could not be opened.
        RankFailed: the other ranks did not come, or not all of them.
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str],
        run: str,
        process_group: Any = None,
        *,
        allow_pickle: Sequence[str] = (),
    ) -> None:
        policy = policy if isinstance(policy, Policy) else Policy.load(policy)
        check_run(run)  # before any tier is opened
        self._together = joined(process_group, run, policy)
        try:
            self._begin(policy, run, allowed_pickles(policy, [check_glob(p) for p in allow_pickle]))
        except BaseException:
            if self._together is not None:
                self._together.close()  # the others wait for this rank
            raise
        self._blocked: deque[float] = deque(maxlen=HISTORY)
        self._saves = 0
        self._pid = os.getpid()
        self.restored: VersionInfo | None = None
        """The version that the last `restore` or `load` gave."""
        atexit.register(self._at_exit)

    def _begin(self, policy: Policy, run: str, pickles: Callable[[Path], bool]) -> None:
        arena, together = Arena(policy.arena.size, policy.chunk), self._together
        shelf = Shelf if together is None else together.shelf
        opening = [(opened(tier, arena), tier) for tier in policy.tiers]
        shelves = [shelf(tier, run, retention(spec), rule_retention(policy, spec)) for tier, spec in opening]
        super().__init__(policy, run, shelves, arena)
        self._pickles, self._guard, sharing = pickles, Guard(), None
        if together is None:
            self._flow = Flow(policy, shelves, arena)
        else:
            self._flow, sharing = together.begin(policy, shelves, arena)
        rank = 0 if together is None else together.team.rank
        recall = Recall(allow_pickle=pickles, lossy=lossy_methods(policy), rank=rank)
        self._planner = Planner(recall, self._guard, sharing)

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Capture lazily what only this optimizer's step changes: its parameters and its state.

        `save` then returns as soon as everything else is captured. The rest is captured while the next forward and
        backward pass runs, and the optimizer's next step waits for it. Whoever changes parameters otherwise, beside
        ``optimizer.step()``, waits for ``save.wait_captured()`` first. `restore` and `close` wait by themselves.
        """
        self._check_open()
        self._guard.add(optimizer)

    def save(self, state: Any, step: int, metadata: Mapping[str, Any] | None = None) -> Save:
        """Save a state. Returns once every byte of it is captured, but for what is guarded: then it may change again.

        Args:
            state: nested dict, list, tuple of tensors, arrays, plain values, modules, optimizers, or anything with a
                provider.
            step: the training step, 0 or more.
            metadata: JSON values to find with the version, such as the loss.

        Raises:
            CaptureError: the state could not be copied; nothing was saved.
            TierstateError: an earlier save reached no persistent tier; told once, and this save was not made.
        """
        start = time.monotonic()
        self._check_open()
        with uncollected():
            if (together := self._together) is None:
                return self._submit(self._planner.plan(state), step, metadata, start)
            seq = self._flow.next_seq()
            with together.taking_part(seq, step):
                plan = self._planner.plan(state, seq)
                head = new_head(self.policy, self.run, seq, step, metadata)
            save = self._carry(plan, head, start)
        together.tell_lost()
        return save

    def _submit(
        self, plan: Plan, step: int, metadata: Mapping[str, Any] | None = None, start: float | None = None
    ) -> Save:
        """Save what is planned; ``start`` is when that began."""
        head = new_head(self.policy, self.run, self._flow.next_seq(), step, metadata)
        return self._carry(plan, head, time.monotonic() if start is None else start)

    def _carry(self, plan: Plan, head: Head, start: float) -> Save:
        ticket = self._flow.submit(plan, head)
        try:
            ticket.freed.wait()
            self._guard.watch(ticket)
            if ticket.captured.done() and not ticket.skipped:
                ticket.captured.result()
        except BaseException:
            # The state must not be given back while a byte of it is still being read.
            ticket.cancelled.set()
            self._arena.wake()
            ticket.captured.exception()
            ticket.told |= set(ticket.tiers)
            raise
        self._saves += 1
        self._blocked.append(time.monotonic() - start)
        return Save(ticket, self.policy.durable)

    def restore(
        self,
        into: Any,
        *,
        step: int | None = None,
        version: str | None = None,
        tag: str | None = None,
        only: Sequence[str] | None = None,
        on_damage: OnDamage = "raise",
        allow_lossy: bool = False,
    ) -> Any:
        """Restore a state in place, and return it.

        Tensors, arrays, modules, optimizers and generators are filled where they are; plain values are replaced in
        their dicts and lists. Every chunk is verified: what comes straight from a disk into a tensor where it lies, all
        else before it is copied there. Nothing counts as restored before all of it is verified.

        Args:
            into: the state to fill, of the structure that was saved.
            step, version, tag: which version, by step, by the beginning of its id, or by a name that it was given; by
                default the newest whole one.
            only: globs of leaf paths; what does not match is left as it is.
            on_damage: ``older`` goes back to the newest version that is whole instead of raising `Damaged`.
            allow_lossy: also restore leaves that were saved with fewer bits, on request, and are not exact.

        Raises:
            NotFound: there is no such version.
            StateMismatch: leaves are missing, unexpected, or of another shape or dtype; nothing was touched.
            RankFailed: with a process group, all ranks call this together, and another one failed or did not come.
            Damaged: a chunk is whole in no tier.
            Unsafe: a leaf is a pickle, or lossy, and that was not allowed.
        """
        return self._restore(Wanted(step, version, into, only, None, on_damage, self._pickles, allow_lossy), tag)

    def load(
        self,
        *,
        step: int | None = None,
        version: str | None = None,
        tag: str | None = None,
        only: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        on_damage: OnDamage = "raise",
        allow_lossy: bool = False,
    ) -> Any:
        """A version as a fresh state, without a template: containers as they were, modules and optimizers as their
        ``state_dict``.

        Args:
            device: where tensors go; by default the host.
            step, version, tag, only, on_damage, allow_lossy: as in `restore`. With ``only``, a list of which not all
                items match comes back as a dict by index.

        Raises: as `restore`.
        """
        place = torch.device(device) if device is not None else None
        return self._restore(Wanted(step, version, NEW, only, place, on_damage, self._pickles, allow_lossy), tag)

    def _restore(self, wanted: Wanted, tag: str | None) -> Any:
        self._check_open()
        self._guard.wait()
        with uncollected():
            found = self._found(wanted, tag)
        self.restored = VersionInfo.of(found.entry)
        self._flow.continue_from(self.restored.id)
        log.info("restored step %d of run %s from %s", self.restored.step, self.run, ", ".join(self.restored.tiers))
        return found.state

    def _found(self, wanted: Wanted, tag: str | None) -> Restored:
        def resolve(name: str | None) -> Tagged | None:
            return self._tagged(name, wanted.step, wanted.version)

        if self._together is not None:
            return restore_together(self._together.team, self._catalog(), self._arena, wanted, tag, resolve)
        return restore(self._catalog(), self._arena, self.run, wanted._replace(tag=resolve(tag)))

    def _saving(self) -> Saving:
        return self._flow

    def stats(self) -> Stats:
        """What this Checkpointer has done so far."""
        tiers = {s.name: TierStats.of(self._flow.lanes.get(s.name)).measured(s.tier) for s in self._shelves}
        peak = self._arena.peak * self._arena.slab_size
        return Stats(self._saves, self._flow.skipped, tuple(self._blocked), self._guard.waited, peak, tiers)

    def close(self, timeout: float | None = None) -> None:
        """Bring what is under way, and what is owed, to every tier, then let go of everything.

        Args:
            timeout: seconds to wait at most. On a terminal a wait of more than a second shows its progress.

        Raises:
            TierstateError: a save did not arrive somewhere and nobody has been told yet; every such failure is listed.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if os.getpid() != self._pid:
            return  # a forked child: threads, files and locks are the parent's
        error: BaseException | None = None
        try:
            with ExitStack() as closing:  # each is closed, whatever happens to those before
                if self._together is not None:
                    closing.callback(self._together.close)
                for close in (self._arena.close, *(s.tier.close for s in self._shelves), self._guard.close):
                    closing.callback(close)
                self._flow.close(timeout, closing.enter_context(draining()))
        except TierUnavailable as late:
            error = late
        tell(error, self._flow.failures())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TierstateError as failure:
            if error is None:
                raise
            # What went wrong in the block comes first; what went wrong with the saves must not hide it.
            error.add_note(f"and saves failed too: {failure}")

    def _at_exit(self) -> None:
        try:
            self.close()
        except TierstateError as failure:
            log.error("at exit: %s", failure)
