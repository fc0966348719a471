"""The public API: a `Checkpointer` saves and restores the training state of a run through a policy's tiers.

`Save` is the handle of an asynchronous save: wait until the state is captured, or until the version is durable.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from tierstate.agent.handing import HandingPipeline
from tierstate.agent.memory_tier import open_handed_tier
from tierstate.agent.pipeline import pipeline_of
from tierstate.agent.shared_pipeline import shared_pipeline_of
from tierstate.engine.cadence import Level, auto_cadence, hosts_of_job
from tierstate.engine.capture.graph_steps import wait_for_captures
from tierstate.engine.capture.guard import Guard
from tierstate.engine.capture.plan import CapturePlan, Planner, new_head
from tierstate.engine.events import EVERY
from tierstate.engine.info import Stats, TierStats, VersionInfo
from tierstate.engine.maintain.prune import PendingSaves
from tierstate.engine.packs.formats import format_of
from tierstate.engine.placement import lossy_rules, may_pickle, retention_of, rule_retention_of
from tierstate.engine.progress import Progress, drain_progress, no_progress
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.publish.tier_queue import HISTORY
from tierstate.engine.ranks.restore.restore import restore_together
from tierstate.engine.ranks.save.join import join_team
from tierstate.engine.ranks.save.preemption import SharedPreemption
from tierstate.engine.restore.restore import OnDamage, Restored, RestoreSpec, check_wanted, restore
from tierstate.engine.save.pipeline import SavePipeline
from tierstate.engine.save.preemption import Preemption, PreemptionWish, keys_of
from tierstate.engine.store.catalog import RunCatalog
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions.alarm_tags import AlarmTags
from tierstate.manifest.arguments import as_path, as_text, as_timeout
from tierstate.manifest.errors import CaptureError, TierstateError, TierUnavailable
from tierstate.manifest.format.globs import check_globs
from tierstate.manifest.format.leaf_path import Path
from tierstate.manifest.format.version import Head
from tierstate.manifest.history.log import check_run
from tierstate.manifest.history.tags import TaggedVersion
from tierstate.providers.tree.flatten_cache import FlattenCache
from tierstate.providers.tree.rename import Rename
from tierstate.providers.tree.unflatten import NEW
from tierstate.telemetry.telemetry import Telemetry, check_packages
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.cudart import is_capturing
from tierstate.tiers.places import check_places
from tierstate.tiers.policy.models import PreemptionKeys
from tierstate.tiers.policy.policy import Policy, open_policy_tier
from tierstate.tiers.trace import begin as begin_trace
from tierstate.tiers.trace import begin_by_environment, span
from tierstate.tiers.trace import end as end_trace

from .copy import CopyResult, copy
from .not_reentrant import not_reentrant, refuse_inside
from .pause_gc import gc_paused
from .run import Run

log = logging.getLogger("tierstate")


TURN_CHECK = 1.0
"""Seconds after which a `close` that waits for another thread's save looks again how long it may wait."""


_STARTS_NO_THREAD_AT_EXIT = {"3.12.0", "3.12.1", "3.12.2"}
"""Versions of Python whose functions at exit cannot start a thread (https://github.com/python/cpython/issues/113964)."""


class Save:
    """The handle of one save in progress, returned by `Checkpointer.save`."""

    def __init__(self, save_state: SaveState, durable: str) -> None:
        self._save_state, self._durable = save_state, durable

    @property
    def step(self) -> int:
        """The step that was given."""
        return self._save_state.head.step

    @property
    def seq(self) -> int:
        """The sequence number of the version in its run."""
        return self._save_state.head.seq

    @property
    def run(self) -> str:
        """The name of the run."""
        return self._save_state.head.run

    @property
    def version(self) -> str:
        """The version's id, 32 hexadecimal digits, once a tier has committed it; empty before. If several ranks save
        together, rank 0 knows it, and the first rank of each host for a tier of each host; elsewhere it stays empty."""
        return self._save_state.version

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers that get this save. All other tiers were not due, or no rule sends a leaf to them."""
        return tuple(self._save_state.tiers)

    @property
    def skipped(self) -> bool:
        """Whether nothing was saved, since the arena was full and the policy has ``on_full: skip``."""
        return self._save_state.skipped

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds from the call of ``save`` to the commit, for each tier that has the version by now."""
        return dict(self._save_state.seconds)

    def wait_captured(self, timeout: float | None = None) -> None:
        """Wait until every byte of the state is copied, so that it may change again.

        Raises:
            CaptureError: the state could not be copied.
            TimeoutError: it took longer than ``timeout`` seconds; the capture continues.
            Reentered: called by a signal handler that has interrupted a call of a `Checkpointer`.
        """
        refuse_inside("wait_captured")
        timeout = as_timeout(timeout)
        try:
            self._save_state.captured.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"step {self.step} is not captured after {timeout} s yet") from None

    def wait(self, tier: str | None = None, timeout: float | None = None) -> None:
        """Wait until the version is committed on a tier, by default the policy's ``durable`` one.

        Raises:
            NotFound: the tier does not get this save; the message says why.
            TierUnavailable: the commit took longer than ``timeout`` seconds; the save continues.
            TierstateError: the save failed on that tier.
            Reentered: called by a signal handler that has interrupted a call of a `Checkpointer`.
        """
        refuse_inside("wait")
        self._save_state.wait(self._tier(tier), as_timeout(timeout))

    def done(self, tier: str | None = None) -> bool:
        """Whether the version is committed on a tier by now; False also if the tier does not get it.

        Raises:
            NotFound: the policy has no such tier.
        """
        name = self._tier(tier)
        self._save_state.check_tier(name)  # a loop until it is done would not end
        return self._save_state.done(name)

    def _tier(self, name: str | None) -> str:
        if name is None:
            return self._durable
        return as_text(name, "tier", "name a tier of the policy; seconds to wait are the timeout")

    def errors(self) -> dict[str, TierstateError | BaseException]:
        """The errors so far, by the tier's name. That a tier left the save out (``on_lag``) is not an error."""
        found = {name: self._save_state.failure(name) for name in self._save_state.tiers}
        return {name: error for name, error in found.items() if error is not None}

    def __repr__(self) -> str:
        states = ", ".join(f"{n}: {'done' if self.done(n) else 'under way'}" for n in self.tiers)
        return f"<Save step {self.step}: {states or 'skipped' if self.skipped else states}>"


def raise_failures(
    error: BaseException | None, failures: Sequence[tuple[SaveState, str, BaseException]], owed: str = ""
) -> None:
    """Raise the error, or else the first failure, with a note for every failure; return if there is neither.

    Args:
        owed: what becomes of the versions that are still missing; one more note.
    """
    error = error or next((reason for _, _, reason in failures), None)
    if error is not None:
        for save_state, tier, reason in failures:
            error.add_note(f"step {save_state.head.step} did not arrive at {tier}: {reason}")
        if owed:
            error.add_note(f"still owed: {owed}")
        raise error


class Checkpointer(Run):
    """Saves and restores the state of one run, and looks after its versions.

    In a training loop:

        with ts.Checkpointer(ts.Policy.default("checkpoints"), run="gpt") as ckpt:
            ckpt.resume(into=state)  # the newest version; None: there is none yet
            for step in range(state["step"] + 1, 1001):
                state["step"] = step
                ...  # train
                ckpt.save(state, step=step)  # returns once every byte is captured

    Save: `save`, `guard`, `preempted`, `close`. Restore: `resume`, `restore`, `load`. Look: `versions`, `info`,
    `leaves`, `diff`, `tags`, `statistics`, `history`, `layers`, `stats`, `events`, `on`, `trace`. Change: `tag`,
    `untag`, `fork`, `copy`, `remove`, `remove_run`, `prune`. Repair: `verify`, `doctor`, `rebuild`.

    Threads may share it. In one thread its calls cannot be made inside one another, as a signal handler would: that
    raises `Reentered`, which says what a handler may do.

    Args:
        policy: which state goes to which tier; a `Policy`, or the path of a policy file.
        run: name of the run: letters, digits, ``.``, ``_`` and ``-``.
        process_group: the ranks that save together; or a `Team`. Each rank makes a Checkpointer, at the same time, and
            calls `save` for the same steps. None, or a group of one rank: only this process.
        allow_pickle: globs of leaves that may be saved and loaded as pickles, besides those that the policy's rules
            allow. Loading a pickle runs the code in it.
        preemption: what to do when a signal announces the end of the process: keys as the policy's ``preemption``,
            True for the defaults, False for nothing; by default what the policy says.

    Attributes:
        policy: the `Policy`.
        run: the name of the run.
        restored: the version that was restored last (`VersionInfo`); None before.

    Raises:
        PolicyError: the policy cannot be used.
        TierstateError: a tier could not be opened.
        RankFailed: not all ranks made a Checkpointer in time.
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str],
        run: str,
        process_group: Any = None,
        *,
        allow_pickle: Sequence[str] = (),
        preemption: PreemptionWish = None,
    ) -> None:
        begin_by_environment()
        policy = policy if isinstance(policy, Policy) else Policy.load(policy)
        run = check_run(run)  # before any tier is opened
        signals = keys_of(preemption, policy.preemption)
        self._together = join_team(process_group, run, policy, preemption=signals is not None)
        self._blocked: deque[float] = deque(maxlen=HISTORY)
        self._saves = 0
        # Saves of several threads are planned and numbered one after the other: a plan is the last one with what has
        # changed. Entered and left in C, so that an interrupt leaves it as it found it.
        self._turn = threading.RLock()
        self._pid = os.getpid()
        self._telemetry: Telemetry | None = None
        try:
            with ExitStack() as undo:
                self._begin(policy, run, may_pickle(policy, check_globs(allow_pickle)), undo)
                undo.pop_all()
        except BaseException:
            if self._together is not None:
                self._together.close()  # the other ranks wait for this rank
            raise
        try:
            self._preemption = None if signals is None else self._watch(signals)
        except BaseException:
            self._release()
            raise
        self.restored: VersionInfo | None = None
        """The version of the last `restore` or `load`."""
        atexit.register(self._at_exit)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Trace what all threads of this process do for saves and restores in the block, to a file.

        Chrome (``chrome://tracing``) and https://ui.perfetto.dev show it. At the end of the block, saves that are under
        way are not waited for. The variable ``TIERSTATE_TRACE`` traces a whole process.

        Args:
            path: of the file, which is made anew.

        Raises:
            RuntimeError: this process is being traced already.
            OSError: the file cannot be written.
        """
        begin_trace(as_path(path, "path"))
        try:
            yield
        finally:
            end_trace()

    def _begin(self, policy: Policy, run: str, pickles: Callable[[Path], bool], undo: ExitStack) -> None:
        """Open all. ``undo``: gets what closes it again, in the order of `_release`."""
        for spec in policy.tiers:
            # Before `_at_exit` is registered: it then runs before h5py undoes its own set-up at exit, without which the
            # saves that are finished there would fail, or crash the interpreter.
            format_of(spec.format)
        check_packages(policy.metrics)
        together = self._together
        arena = Arena(policy.arena.size, policy.chunk, shared=policy.agent.mode != "off")
        undo.callback(arena.close)
        tier_run = TierRun if together is None else together.tier_run
        open_tier = open_policy_tier if policy.agent.mode == "off" else open_handed_tier
        opening = []
        for spec in policy.tiers:
            opening.append((tier := open_tier(spec, arena), spec))
            undo.callback(tier.close)
        tier_runs = [tier_run(tier, run, retention_of(spec), rule_retention_of(policy, spec)) for tier, spec in opening]
        super().__init__(policy, run, tier_runs, arena)
        undo.callback(self._end_telemetry)
        undo.callback(self._events.close)
        self._pickles, self._guard, sharing = pickles, Guard(), None
        self._guard.when_waited = lambda seconds: self._events.emit("waited", seconds=seconds)
        if together is None:
            self._pipeline: SavePipeline = pipeline_of(policy, run, tier_runs, arena)
        else:
            make = partial(shared_pipeline_of, run=run)
            self._pipeline, sharing = together.begin(policy, tier_runs, arena, make)
        undo.callback(self._pipeline.stop)
        rank, hosts = 0, hosts_of_job()
        if together is not None:
            rank, hosts = together.team.rank, len(set(together.team.hosts))
            together.team.on_silence(lambda text: self._events.emit("rank_silent", reason=text))
        levels = [Level(one.name, one.tier.traits.persistent, one.tier.traits.shared) for one in tier_runs]
        self._pipeline.auto = auto_cadence(policy, levels, hosts, self._events)
        cache = FlattenCache(allow_pickle=pickles, lossy=lossy_rules(policy), rank=rank)
        self._planner = Planner(cache, self._guard, sharing)
        if policy.statistics and policy.alarms.action == "tag":
            tagging = AlarmTags(self._tags, [one for one in tier_runs if one.tier.traits.persistent])
            self._events.subscribe(EVERY, tagging.event)
        self._telemetry = Telemetry(policy.metrics, self._events, run, tier_runs, self._statistics)
        if policy.arena.prepare:
            arena.prepare(policy.arena.size)
        else:
            self._guard.when_sized = arena.prepare  # so that a first save finds memory that is touched

    def _begin_child(self) -> None:
        super()._begin_child()
        # In place of the parent's, with its locks and its connection to the agent, over which only the parent may
        # speak. This one saves nothing (`_check_process`).
        self._pipeline = SavePipeline(self.policy, self._tier_runs, self._arena)

    def _check_process(self) -> None:
        """Raise CaptureError in a child that was forked: its parent has the threads."""
        if os.getpid() != self._pid:
            raise CaptureError("this Checkpointer was made in another process; make one in the process that saves")

    def _watch(self, keys: PreemptionKeys) -> Preemption:
        if self._together is not None:
            return SharedPreemption(keys, self._pipeline, self._together.team, self._is_saving)
        return Preemption(keys, self._pipeline, self._is_saving)

    def _is_saving(self) -> bool:
        """Whether another thread than this one is within `save`."""
        free = self._turn.acquire(blocking=False)
        if free:
            self._turn.release()
        return not free

    @property
    def preempted(self) -> bool:
        """Whether a signal of `preemption` has announced the end of this process; False without `preemption`.

        A loop that asks after each step makes a last save and ends, for which it has the grace; then `close` finishes
        what it can in what is left of it. If several ranks save together, all must ask in each step, and all get the
        same answer.
        """
        return self._preemption is not None and self._preemption.preempted()

    @not_reentrant
    def guard(self, optimizer: object) -> None:
        """Lazy capture of what only the steps of an optimizer change: its parameters and its state.

        `save` then returns as soon as everything else is captured. The guarded tensors are captured during the next
        forward and backward pass, and the next step of any optimizer waits until that is done, before its hooks.
        `restore`, `unguard` and `close` wait too. Whether guarded tensors were changed in another way meanwhile is
        found out by their version counters; that save fails then, and is never committed. Code that changes
        parameters by other means than a step can call `wait_captured` of the returned `Save` first.

        Args:
            optimizer: a torch optimizer, or what wraps one: accelerate's, DeepSpeed's engine or optimizer,
                ``ZeroRedundancyOptimizer`` and others that have the wrapped one as an attribute.

        Raises:
            TypeError: it is no optimizer, and wraps none.
        """
        self._check_open()
        self._guard.add(optimizer)

    @not_reentrant
    def unguard(self, optimizer: object) -> None:
        """End `guard` for an optimizer, as it was given there: its steps are as they were, and `save` returns when its
        tensors are captured. Waits for captures under way. Nothing happens if it is not guarded. `close` does it too.
        """
        self._guard.remove(optimizer)

    @not_reentrant
    def before_step(self) -> None:
        """Wait until guarded tensors may change: for loops whose steps no optimizer of torch makes.

        The steps of guarded optimizers, and replays of CUDA graphs with such a step, call it themselves. A loop that
        changes guarded tensors in another way (a kernel of its own, a graph that was captured without an optimizer)
        calls it before each change. If copies from a CUDA device are under way, it does not wait for them: what is
        queued later on the current stream runs after them.
        """
        self._check_open()
        self._guard.before_step()

    @not_reentrant
    def save(self, state: Any, step: int, metadata: Mapping[str, Any] | None = None) -> Save:
        """Save a state. Returns when all of it is captured, except what is guarded; then the state may change again.

        Args:
            state: nested dict, list, tuple of tensors, arrays, plain values, modules, optimizers, or anything with a
                provider.
            step: the training step, an int of 0 or more.
            metadata: what is stored with the version as JSON values, such as the loss: numbers (also scalars of NumPy
                and torch), text, lists, dicts; dates, paths and Enums as text or their values.

        Raises:
            CaptureError: the state could not be copied; nothing was saved.
            TierstateError: an earlier save reached no persistent tier; raised once, and this save was not made. Or a
                tier fails and would be further behind than its ``max_lag``; this save goes on in the other tiers. With
                ``on_failure: {action: warn}`` both are logged for a while.
            StateAlarm: the statistics of an earlier save are alarming (``alarms: {action: raise}``); raised once, and
                this save was not made.
            Reentered: called by a signal handler that has interrupted a call of a `Checkpointer`.
        """
        start = time.monotonic()
        self._check_open()
        with span("save", step=step):
            save = self._save_state(state, step, metadata)
            try:
                self._pipeline.keep_up(save._save_state)
                return save
            finally:
                seconds = time.monotonic() - start
                self._blocked.append(seconds)
                self._events.emit("saved", step=save.step, seq=save.seq, seconds=seconds)

    def _save_state(self, state: Any, step: int, metadata: Mapping[str, Any] | None) -> Save:
        return self._save_planned(lambda seq: self._plan(state, seq), step, metadata, planned=False)

    def _plan(self, state: Any, seq: int) -> CapturePlan:
        # What refuses a save on one rank alone is asked here, where the other ranks are told of it.
        if is_capturing():
            raise CaptureError(
                "save was called while a CUDA graph is being captured, and a graph cannot save: call it after the "
                "capture. Nothing was saved, and the capture goes on"
            )
        self._pipeline.alarms.tell()
        with span("plan") as traced:
            plan = self._planner.plan(state, seq)
            traced.also(leaves=len(plan.leaves), bytes=plan.total)
        return plan

    def _save_planned(
        self, plan: Callable[[int], CapturePlan], step: int, metadata: Mapping[str, Any] | None, *, planned: bool = True
    ) -> Save:
        """Save what a plan says.

        Args:
            plan: returns the plan; called with the version's number if several ranks save together, or else with 0.
            planned: the plan says already what this rank saves of what several ranks have.
        """
        self._check_process()  # first: in a forked child, the turn may be another thread's for ever
        with self._turn, gc_paused():
            self._check_open()  # again: another thread may have closed it meanwhile
            if (together := self._together) is None:
                return self._submit(plan(0), step, metadata)
            seq = self._pipeline.next_seq()
            with together.taking_part(seq, step, planned=planned):
                made = plan(seq)
                head = new_head(self.policy, self.run, seq, step, metadata)
            save = self._carry(made, head)
        together.tell_lost(seq)
        return save

    def _submit(self, plan: CapturePlan, step: int, metadata: Mapping[str, Any] | None = None) -> Save:
        """Save the state of this plan."""
        self._check_process()
        with self._turn:
            self._check_open()
            return self._carry(plan, new_head(self.policy, self.run, self._pipeline.next_seq(), step, metadata))

    def _carry(self, plan: CapturePlan, head: Head) -> Save:
        self._check_open()  # once more, for a `close` that did not wait so long: its threads have ended
        try:
            save_state = self._pipeline.submit(plan, head)
            save_state.freed.wait()
            self._guard.watch(save_state)
            if save_state.captured.done() and not save_state.skipped:
                save_state.captured.result()
        except BaseException:
            # `save` must not return to the caller while another thread still reads the state.
            self._pipeline.abandon(head.seq)
            raise
        self._saves += 1
        return Save(save_state, self.policy.durable)

    @not_reentrant
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
        rename: Rename | None = None,
    ) -> Any:
        """Restore a state in place and return it.

        Tensors, arrays, modules, optimizers and generators are filled in place; plain values are replaced in their
        dicts and lists. The digest of every chunk is verified: after the read where a disk is read directly into a
        tensor, in all other cases before the bytes are copied to the tensor. `restore` returns when all are verified.

        Args:
            into: the state to fill, of the structure that was saved.
            step, version, tag: which version, by its step, the beginning of its id, or a tag; by default the newest
                complete one.
            only: globs of leaf paths; leaves that do not match are left unchanged.
            on_damage: ``older`` falls back to the newest undamaged version instead of raising `Damaged`, `FormatError`
                or `OutOfMemory`; not where a version cannot be read now.
            allow_lossy: also restore leaves that were saved with fewer bits, whose values are not exact.
            rename: how saved leaves are named in the given state, if otherwise: `ts.unwrapped`, where only wrappers of
                modules differ (``module.``, ``_orig_mod.``); a mapping as ``{"model.encoder": "model.backbone"}``; a
                function of a path, a tuple of keys; or a list of these. ``only`` matches the new names. Bytes and ties
                are as saved.

        Raises:
            NotFound: there is no such version.
            WrongTier: a tier is not the one that is expected, so that the newest version, or one that was not found,
                may be out of sight.
            ValueError: more than one of step, version and tag is given, a step is no int, or ``on_damage`` is another
                word.
            StateMismatch: leaves are missing, unexpected, or of another shape or dtype; nothing was changed.
            RankFailed: another rank failed, or did not call `restore`. With a process group all ranks must call it.
            Damaged: a chunk is missing or damaged in every tier.
            Unreadable: what is wanted is stored, and the tiers that have it cannot be read now. So it is never passed
                over for an older version: `NewestUnreadable` where it is the newest one.
            Unsafe: a leaf is a pickle, or lossy, and that was not allowed.
            Reentered: called by a signal handler that has interrupted a call of a `Checkpointer`.
        """
        wanted = RestoreSpec(step, version, into, only, None, on_damage, self._pickles, allow_lossy, rename=rename)
        return self._restored(wanted, tag)

    @not_reentrant
    def resume(
        self,
        into: Any,
        *,
        only: Sequence[str] | None = None,
        on_damage: OnDamage = "raise",
        allow_lossy: bool = False,
        rename: Rename | None = None,
    ) -> VersionInfo | None:
        """Restore the newest version in place, or say that there is none yet: the first call of a training job.

        It says so only if every persistent tier of the policy answers and none has a version of the run, and nothing
        says that a tier is missing. If several ranks save together, all of them call it and get the same answer.

        Args:
            into, only, on_damage, allow_lossy, rename: as in `restore`.

        Returns:
            The restored version; None if the run has none yet, and then nothing was changed.

        Raises:
            WrongTier: a tier is not the one that is expected: its file system is not mounted, or another one is.
            PolicyError: two tiers lie in one place.
            TierUnavailable: nothing was found, and a persistent tier cannot be asked now.
            Damaged, Unreadable, StateMismatch, Unsafe, RankFailed: as `restore`.
        """
        self._check_open()
        if self._together is None:  # many ranks have checked it together when they began
            check_places([tier_run.tier for tier_run in self._tier_runs])
        wanted = RestoreSpec(
            None, None, into, only, None, on_damage, self._pickles, allow_lossy, optional=True, rename=rename
        )
        if (found := self._restore(wanted, None)) is None:
            log.info("run %s has no version yet: a fresh start", self.run)
            return None
        # Saves of about as much will come.
        ranks = 1 if self._together is None else self._together.team.size
        self._arena.prepare(found.entry.version.nbytes // ranks)
        return VersionInfo.of(found.entry)

    @not_reentrant
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
        rename: Rename | None = None,
        progress: Progress = no_progress,
    ) -> Any:
        """Load a version as a new state, without a template: the same containers, modules and optimizers as their
        ``state_dict``.

        Args:
            device: the device of the new tensors; by default the host.
            step, version, tag, only, on_damage, allow_lossy, rename: as in `restore`. With ``only``, a list of which
                not all items match comes back as a dict by index.
            progress: called with the raw bytes read since the last call, from several threads; not if several ranks
                restore together.

        Raises: as `restore`; ValueError: tensors cannot be loaded to this device, or this process has no such one.
        """
        wanted = RestoreSpec(
            step, version, NEW, only, device, on_damage, self._pickles, allow_lossy, rename=rename, progress=progress
        )
        return self._restored(wanted, tag)

    def _restored(self, wanted: RestoreSpec, tag: str | None) -> Any:
        found = self._restore(wanted, tag)
        assert found is not None  # it is not optional
        return found.state

    def _restore(self, wanted: RestoreSpec, tag: str | None) -> Restored | None:
        self._check_open()
        wait_for_captures()
        start = time.monotonic()
        with gc_paused(), span("restore"):
            found = self._found(wanted, tag)
        if found is None:
            return None
        self.restored = VersionInfo.of(found.entry)
        self._pipeline.continue_from(self.restored.id)
        about = {"step": self.restored.step, "seq": self.restored.seq, "version": self.restored.id}
        tiers = ", ".join(self.restored.tiers)
        self._events.emit(
            "restored", nbytes=self.restored.nbytes, seconds=time.monotonic() - start, tier=tiers, **about
        )
        log.info("restored step %d of run %s from %s", self.restored.step, self.run, tiers)
        return found

    def _found(self, wanted: RestoreSpec, tag: str | None) -> Restored | None:
        def resolve(name: str | None) -> TaggedVersion | None:
            return self._tagged(name, wanted.step, wanted.version)

        if self._together is not None:
            if os.getpid() != self._pid:
                raise TierstateError(
                    "this Checkpointer was made in another process, which restores together with other ranks, and this "
                    "one is none of them; make one without a process group in the process that reads"
                )
            return restore_together(self._together.team, self._catalog(), self._arena, wanted, tag, resolve)
        wanted = check_wanted(wanted)
        return restore(self._catalog(), self._arena, self.run, wanted._replace(tag=resolve(tag)))

    def _catalog(self) -> RunCatalog:
        """The versions in all tiers, and before them those that an agent has in memory."""
        memory = self._pipeline.memory if isinstance(self._pipeline, HandingPipeline) else None
        self._check_open()
        return RunCatalog(self._tier_runs if memory is None else [memory, *self._tier_runs])

    def _saving(self) -> PendingSaves:
        return self._pipeline

    @not_reentrant
    def stats(self) -> Stats:
        """Counters and times of this Checkpointer so far, in all and by tier."""
        return self._statistics()

    def _statistics(self) -> Stats:
        tiers = {s.name: self._tier_stats(s) for s in self._tier_runs}
        peak = self._arena.peak * self._arena.slab_size
        return Stats(self._saves, self._pipeline.skipped, tuple(self._blocked), self._guard.waited, peak, tiers)

    def _tier_stats(self, tier_run: TierRun) -> TierStats:
        pipeline, name = self._pipeline, tier_run.name
        found = pipeline.tier_stats(name) if isinstance(pipeline, HandingPipeline) else None
        found = found or TierStats.of(pipeline.queues.get(name)).measured(tier_run.tier)
        return replace(found, hung=tier_run.tier.trouble, durable_lag=pipeline.lag(name), waited=pipeline.waited(name))

    @not_reentrant
    def copy(
        self,
        *,
        step: int | None = None,
        version: str | None = None,
        to: str | None = None,
        into: Policy | str | os.PathLike[str] | None = None,
        run: str | None = None,
        progress: Progress = no_progress,
    ) -> CopyResult:
        """Copy a version to another tier, or into the tiers of another policy, and verify every chunk. Give either
        ``to`` or ``into``.

        A tier that has it already gets what was in packs of it that are missing or cut off.

        Args:
            step, version: which version; by default the newest.
            to: the name of a tier of this policy. The copy is the same version, with the leaves that the rules send to
                that tier; the tier's ``keep`` applies to it from the next save on.
            into: another policy. The copy is a new version, in every tier to which the rules of that policy send a
                leaf; ``every`` is ignored. It has the same leaves, step and metadata, and the same digests if both
                policies have the same chunk length and digest function. If some of the tiers have it already, the
                others get it.
            run: the name of the run in the other policy; by default the same name.
            progress: called with the raw bytes read since the last call.

        Raises:
            NotFound: there is no such version or tier, or no rule sends a leaf to the target.
            StateMismatch: leaves that go there are in no tier: `keep` has dropped them.
            WrongTier: the tier ``to`` is not the expected one; it may not be mounted.
            AlreadyExists: the tier ``to`` has another version of that number.
            Damaged: a chunk is missing or damaged in every tier.
        """
        self._check_open()
        return copy(self, Checkpointer, step=step, version=version, to=to, into=into, into_run=run, progress=progress)

    @not_reentrant
    def close(self, timeout: float | None = None) -> None:
        """Finish all saves in progress, retry those that failed, then close all tiers and free the memory.

        A tier that hangs is waited for until its ``deadline``, once for all its saves. What is still missing there is
        copied by the next process that saves this run, where a faster persistent tier has it.

        Args:
            timeout: seconds to wait at most. On a terminal a wait of more than a second shows its progress.

        Raises:
            TierstateError: saves failed on some tiers and their errors were not raised before; all of them are listed.
                That a memory tier had no room for a version which a persistent tier has, is none of them.
        """
        if self._closed:
            return
        if os.getpid() != self._pid:
            self._closed = True
            return  # a forked child: threads, files and locks belong to the parent
        error: BaseException | None = None
        owed, preemption, timeout = "", self._preemption, as_timeout(timeout)
        end = math.inf if timeout is None else time.monotonic() + timeout
        mine = self._last_turn(end)
        if self._closed_meanwhile(mine):
            return
        self._closed = True
        try:  # an interrupt comes before the line above, or in here
            if mine:
                self._turn.release()
            if preemption is not None:
                preemption.close_begins()
            owed = self._drain(end)
        except TierUnavailable as late:
            error = late
        finally:
            with ExitStack() as last:
                last.callback(atexit.unregister, self._at_exit)
                if preemption is not None:
                    last.callback(preemption.close_ends)
                self._release()
        raise_failures(error, self._pipeline.failures(), owed)
        self._pipeline.alarms.tell()

    def _closed_meanwhile(self, mine: bool) -> bool:
        """Whether another thread has closed it while this one waited. Then the turn is given back, if it is mine."""
        if self._closed and mine:
            self._turn.release()
        return self._closed

    def _last_turn(self, end: float) -> bool:
        """Wait for the saves that other threads are making, until ``end`` and within the grace: after `close` has begun
        nobody would capture them, and they would wait for ever. Returns whether there are none."""
        left = math.inf
        while left > 0:
            # A preemption may come meanwhile, whose grace ends sooner.
            left = min(end - time.monotonic(), self._pipeline.seconds_left())
            if self._turn.acquire(timeout=min(max(0.0, left), TURN_CHECK)):
                return True
        return False

    def _drain(self, end: float) -> str:
        with drain_progress() as progress:
            return self._pipeline.close(None if end == math.inf else max(0.0, end - time.monotonic()), progress)

    def _release(self) -> None:
        with ExitStack() as closing:  # each is closed, even if closing another one raises
            if self._together is not None:
                closing.callback(self._together.close)
            for close in (self._arena.close, *(s.tier.close for s in self._tier_runs), self._guard.close):
                closing.callback(close)
            closing.callback(self._end_telemetry)
            closing.callback(self._events.close)
            closing.callback(self._pipeline.stop)

    def _end_telemetry(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    @not_reentrant
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TierstateError as failure:
            if error is None:
                raise
            # The error of the block is raised; an error of the saves is only a note on it, and must not hide it.
            error.add_note(f"and saves failed too: {failure}")

    def _at_exit(self) -> None:
        if (python := platform.python_version()) in _STARTS_NO_THREAD_AT_EXIT:
            log.warning(
                "Python %s starts no thread while it ends, so that saves under way may not be finished; call close() "
                "before the end of the script, or use Python 3.12.3 or later",
                python,
            )
        try:
            self.close()
        except TierstateError as failure:
            log.error("at exit: %s", failure)


def open_quietly(
    policy: Policy | str | os.PathLike[str], run: str, *, allow_pickle: Sequence[str] = ()
) -> Checkpointer:
    """A `Checkpointer` for a process that looks at a run, or changes it by a command, and does not train: no agent is
    started, and signals are left alone.

    Raises: as `Checkpointer`.
    """
    policy = policy if isinstance(policy, Policy) else Policy.load(policy)
    return Checkpointer(policy.quiet(), run, allow_pickle=allow_pickle, preemption=False)
