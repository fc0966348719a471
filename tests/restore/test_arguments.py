"""Wrong arguments of the public calls are refused at once, by an error that names the argument and what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpointer_worlds import alone
from torch._subclasses.fake_tensor import FakeTensorMode

import tierstate as ts


@pytest.fixture
def saved(place: Any) -> Any:
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": torch.full((4,), float(step))}, step=step).wait("only")
        yield ckpt


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "load(tag=[5])": (lambda ckpt: ckpt.load(tag=[5]), r"tag \[5\]: a tag is text"),
    "load(only=5)": (lambda ckpt: ckpt.load(only=5), r"5 is no list of patterns of leaf paths; write one, as in"),
    "load(only='w')": (
        lambda ckpt: ckpt.load(only="w"),
        r"'w' is one glob where a list of them is right, as in \['w'\]",
    ),
    "load(only=[])": (lambda ckpt: ckpt.load(only=[]), r"no leaf of the version matches an empty list; it has w"),
    "load(device='xx')": (
        lambda ckpt: ckpt.load(device="xx"),
        r"load\(device='xx'\): .*; write as in 'cpu' or 'cuda:0'",
    ),
    "load(device=[])": (lambda ckpt: ckpt.load(device=[]), r"load\(device=\[\]\): .*; write as in 'cpu' or 'cuda:0'"),
    "load(progress=5)": (lambda ckpt: ckpt.load(progress=5), r"progress 5 cannot be called; give a function"),
    "load(allow_lossy='no')": (lambda ckpt: ckpt.load(allow_lossy="no"), r"allow_lossy 'no': text counts as true"),
    "load(step=-1)": (lambda ckpt: ckpt.load(step=-1), r"step -1: a step is an int, 0 or more"),
    "load(step=2**63)": (
        lambda ckpt: ckpt.load(step=1 << 63),
        r"step 9223372036854775808: a step is .* less than 2\^63",
    ),
    "tag(None)": (lambda ckpt: ckpt.tag(None), r"tag None: a tag is text, as in 'best'"),
    "untag(5)": (lambda ckpt: ckpt.untag(5), r"tag 5: a tag is text"),
    "fork(5)": (lambda ckpt: ckpt.fork(5), r"run 5: the name of a run is text, as in 'gpt-small'"),
    "copy(run='')": (lambda ckpt: ckpt.copy(into=ckpt.policy, run=""), r"'' cannot name a run"),
    "copy(progress=5)": (lambda ckpt: ckpt.copy(to="only", progress=5), r"progress 5 cannot be called"),
    "copy(into={})": (
        lambda ckpt: ckpt.copy(into={}),
        r"policy of type dict: give the path of a YAML file, or a Policy",
    ),
    "diff(None, 2)": (lambda ckpt: ckpt.diff(None, 2), r"step None: a step is an int"),
    "diff(values='no')": (lambda ckpt: ckpt.diff(1, 2, values="no"), r"values 'no': text counts as true"),
    "diff(progress=5)": (lambda ckpt: ckpt.diff(1, 2, values=True, progress=5), r"progress 5 cannot be called"),
    "verify(progress=5)": (lambda ckpt: ckpt.verify(progress=5), r"progress 5 cannot be called"),
    "verify(mend='no')": (lambda ckpt: ckpt.verify(mend="no"), r"mend 'no': text counts as true"),
    "verify(sample='5%')": (lambda ckpt: ckpt.verify(sample="5%"), r"sample '5%': a share is between 0 and 1"),
    "verify(seed=5)": (lambda ckpt: ckpt.verify(seed=5), r"seed 5: it draws a sample, and no sample is read"),
    "verify(seed=0.5)": (lambda ckpt: ckpt.verify(sample=0.5, seed=0.5), r"seed 0.5: write an int, 0 or more"),
    "doctor(apply='no')": (lambda ckpt: ckpt.doctor(apply="no"), r"apply 'no': text counts as true"),
    "doctor(progress=5)": (lambda ckpt: ckpt.doctor(progress=5), r"progress 5 cannot be called"),
    "rebuild(partial='no')": (lambda ckpt: ckpt.rebuild("only", partial="no"), r"partial 'no': text counts as true"),
    "prune(grace='1h')": (lambda ckpt: ckpt.prune(grace="1h"), r"grace '1h': right is a number of seconds, 0 or more"),
    "prune(grace=nan)": (lambda ckpt: ckpt.prune(grace=math.nan), r"grace nan: right is a number of seconds"),
    "prune(dry_run='no')": (lambda ckpt: ckpt.prune(dry_run="no"), r"dry_run 'no': text counts as true"),
    "prune(progress=5)": (lambda ckpt: ckpt.prune(progress=5), r"progress 5 cannot be called"),
    "remove(seq=0.5)": (lambda ckpt: ckpt.remove(seq=0.5), r"seq 0.5: write the number of a version"),
    "remove(force='no')": (lambda ckpt: ckpt.remove(step=3, force="no"), r"force 'no': text counts as true"),
    "history(last='2')": (lambda ckpt: ckpt.history(last="2"), r"last '2': write how many of the newest versions"),
    "history(last=True)": (lambda ckpt: ckpt.history(last=True), r"last True: write how many of the newest versions"),
    "layers(last=0.5)": (lambda ckpt: ckpt.layers(last=0.5), r"last 0.5: write how many of the newest versions"),
    "layers(seqs=['1'])": (lambda ckpt: ckpt.layers(seqs=["1"]), r"seqs '1': write numbers of versions"),
    "events(since='now')": (lambda ckpt: ckpt.events(since="now"), r"since 'now': write seconds since 1970"),
    "on([], print)": (lambda ckpt: ckpt.on([], print), r"event \[\]: name a kind of event, as 'committed'"),
    "on(None, print)": (lambda ckpt: ckpt.on(None, print), r"event None: name a kind of event, as 'committed'"),
    "trace(5)": (lambda ckpt: ckpt.trace(5).__enter__(), r"path of type int: give text, or a pathlib.Path"),
    "close('5')": (lambda ckpt: ckpt.close("5"), r"timeout '5': write a number of seconds, or None for no limit"),
    "close(nan)": (lambda ckpt: ckpt.close(math.nan), r"timeout nan: write a number of seconds, or None for no limit"),
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_argument_is_named_and_changes_nothing(saved: Any, call: str) -> None:
    before = saved.versions()
    made, right = WRONG[call]
    with pytest.raises((TypeError, ValueError, ts.StateMismatch), match=right):
        made(saved)
    assert saved.versions() == before


MAKING: dict[str, tuple[Callable[[], Any], str]] = {
    "run": (lambda: ts.Checkpointer(ts.Policy.default("x"), run=5), r"run 5: the name of a run is text"),
    "policy": (lambda: ts.Checkpointer({"tiers": {}}, "run"), r"policy of type dict: give the path of a YAML file"),
    "process_group": (
        lambda: ts.Checkpointer(ts.Policy.default("x"), "run", 5),
        r"process group 5: give a group of torch.distributed",
    ),
    "preemption": (
        lambda: ts.Checkpointer(ts.Policy.default("x"), "run", preemption="SIGTERM"),
        r"preemption 'SIGTERM': give True, False, or keys as of a policy",
    ),
    "Policy.parse": (lambda: ts.Policy.parse(b"version: 1"), r"policy b'version: 1': give the text of one"),
    "Policy.load": (lambda: ts.Policy.load("a\0b"), r"policy 'a\\x00b': no file has NUL"),
    "Policy.default": (lambda: ts.Policy.default(5), r"path of type int: give text"),
    "Policy.auto": (lambda: ts.Policy.auto(["x"]), r"place of type list: give text"),
    "keeping_last": (lambda: ts.Policy.default("x").keeping_last(0), r"count 0: write how many versions are kept"),
    "trusting": (lambda: ts.Policy.default("x").trusting([5]), r"file of type int: give text"),
    "register_tier": (lambda: ts.register_tier(None, ts.Tier), r"name None: a type of tier is named by text"),
    "register_provider": (lambda: ts.register_provider(5), r"value_type 5: give a class"),
    "its provider": (
        lambda: ts.register_provider(set, 5),
        r"provider 5: give a class derived from tierstate's Provider",
    ),
    "its type": (lambda: ts.register_provider({}, ts.Provider), r"value_type {}: give a class"),
    "Shard": (lambda: ts.Shard([1.0], (0,), (4,)), r"tensor \[1.0\]: give the part of the global tensor"),
}


@pytest.mark.parametrize("name", MAKING)
def test_what_is_made_of_wrong_arguments_names_them(name: str) -> None:
    make, right = MAKING[name]
    with pytest.raises((TypeError, ValueError), match=right):
        make()


def test_the_text_of_a_policy_in_place_of_its_path_is_not_shown() -> None:
    """It may hold credentials."""
    with pytest.raises(ts.PolicyError, match=r"several lines; .* give ts.Policy.parse\(text\)") as caught:
        ts.Checkpointer("version: 1\ntiers: {s3: {type: object, options: {key: hidden}}}\n", "run")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("step", [np.int64(5), np.uint8(5), torch.tensor(5), np.array(5)], ids=repr)
def test_a_save_takes_any_integer_as_its_step(saved: Any, step: Any) -> None:
    events = list[ts.Event]()
    saved.on("saved", events.append)
    save = saved.save({"w": torch.zeros(4)}, step=step)
    save.wait()
    assert (save.step, type(save.step)) == (5, int)
    saved.close()
    assert [(event.step, type(event.step)) for event in events] == [(5, int)]


def test_a_run_and_a_tag_that_are_enums_have_their_text_as_names(place: Any) -> None:
    class Name(str, Enum):  # noqa: UP042 - a StrEnum has its text in f-strings too
        RUN = "gpt"
        TAG = "best"

    with ts.Checkpointer(alone("nvme", place), Name.RUN) as ckpt:
        ckpt.save({"w": torch.zeros(4)}, step=1).wait()
        ckpt.tag(Name.TAG)
        assert ckpt.load(tag=Name.TAG).keys() == {"w"}
    with ts.Checkpointer(alone("nvme", place), "gpt") as ckpt:
        assert [version.tags for version in ckpt.versions()] == [("best",)]


def test_layers_of_numbers_that_an_iterator_gives(saved: Any) -> None:
    numbers = [version.seq for version in saved.versions()]
    assert list(saved.layers(seqs=iter(numbers)).seqs) == numbers
    assert list(saved.layers(seqs=np.array(numbers[1:])).seqs) == numbers[1:]


def test_a_number_of_numpy_names_the_version_to_remove(saved: Any) -> None:
    oldest = saved.versions()[0]
    assert saved.remove(seq=np.int64(oldest.seq)).seq == oldest.seq
    assert [version.step for version in saved.versions()] == [2, 3]


@pytest.mark.parametrize("tier", ["", "nmve"])
def test_a_save_knows_no_other_tiers_than_those_of_the_policy(saved: Any, tier: str) -> None:
    """A loop until a save is done in a tier of a misspelt name would not end."""
    save = saved.save({"w": torch.zeros(4)}, step=4)
    for call in (save.wait, save.done):
        with pytest.raises(ts.NotFound, match=f"tier '{tier}': the policy has no such tier; it has only"):
            call(tier)
        with pytest.raises(TypeError, match="tier 30: name a tier of the policy; seconds to wait are the timeout"):
            call(30)


def test_a_closed_checkpointer_does_nothing(saved: Any) -> None:
    saved.close()
    asks = (saved.versions, saved.tags, saved.info, saved.leaves, saved.layers, saved.prune, saved.doctor)
    changes = (lambda: saved.remove(seq=1), lambda: saved.remove_run(force=True), lambda: saved.untag("best"))
    for call in (saved.__enter__, lambda: saved.on("saved", print), *asks, *changes):
        with pytest.raises(ts.TierstateError, match="this Checkpointer is closed; make a new one"):
            call()


@pytest.mark.parametrize("call", ["load", "restore", "resume", "info"])
def test_nothing_is_read_where_tensors_have_no_memory(saved: Any, call: str) -> None:
    into = {"w": torch.zeros(4)}
    asked = {} if call in ("load", "info") else {"into": into}
    with FakeTensorMode(), pytest.raises(ts.StateMismatch, match="as in the block of a FakeTensorMode"):
        getattr(saved, call)(**asked)
    assert saved.restore(into)["w"].tolist() == [3.0] * 4


@pytest.mark.parametrize("timeout", [math.inf, 10**400, np.float32(60), torch.tensor(60)], ids=repr)
def test_timeouts_are_any_numbers_of_seconds(saved: Any, timeout: Any) -> None:
    save = saved.save({"w": torch.zeros(4)}, step=4)
    save.wait_captured(timeout)
    save.wait(timeout=timeout)
    saved.close(timeout)
    for wrong in (math.nan, "5"):
        for call in (save.wait_captured, lambda timeout: save.wait(timeout=timeout)):
            with pytest.raises((TypeError, ValueError), match=r"timeout .*: write a number of seconds, or None"):
                call(wrong)
