"""Lightning: a real Trainer saves, ranks, removes and resumes checkpoints that are versions in tiers."""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pl = pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchdata")

import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from support import lightning_job
from support.equality import difference
from support.forked import command as forked
from support.lightning_job import Small, checkpoints, loader, policy, trainer
from support.processes import Gang

import tierstate as ts
from tierstate.integrations.lightning import RNG, TAG, RngState, TierCheckpointIO
from tierstate.integrations.lightning_strategies import RankVersions, TierModelParallelStrategy
from tierstate.integrations.lightning_versions import PathVersions
from tierstate.providers.values.values import ObjectProvider

pytestmark = [
    pytest.mark.slow,
    # Of Lightning and torchdata: about too few workers, folders that are not empty, checkpoints in mid-epoch.
    pytest.mark.filterwarnings("default"),
]
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_pickle(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Nothing is pickled or unpickled, but where a test is marked so."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle")

    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io.pl_load", refuse)
    if "allow_pickle" not in request.node.name:
        for name in ("_encode", "_decode"):
            monkeypatch.setattr(ObjectProvider, name, staticmethod(refuse))


def versions(folder: Path, run: str = "small") -> list[ts.VersionInfo]:
    with ts.Checkpointer(policy(folder), run) as ckpt:
        return ckpt.versions()


def losses(folder: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), []).append(loss)
    return found


def named(folder: Path) -> dict[str, str]:
    """By file name, the id of the version that each reference names."""
    found = {path.name: json.loads(path.read_text()) for path in (folder / "ckpt").iterdir()}
    return {name: one["targets"][0]["version"] for name, one in found.items()}


def fitted(folder: Path, **more: Any) -> Any:
    pl.seed_everything(5, verbose=False)
    job = trainer(folder, checkpoints(folder, "steps"), **more)
    job.fit(Small(), loader())
    return job


@pytest.mark.parametrize(
    ("kind", "killed_at"), [("steps", 17), pytest.param("epochs", 23, marks=pytest.mark.soak), ("link", 12)]
)
def test_after_a_kill_every_later_loss_is_the_same_to_the_last_bit(kind: str, killed_at: int, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    lightning_job.main(whole, kind)
    command = [*forked("support.lightning_job:run"), str(killed), kind, str(killed_at)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    before = losses(killed)
    lightning_job.main(killed, kind)

    truth, found = losses(whole), losses(killed)
    assert sorted(found) == sorted(truth) == list(range(30))
    assert {step: told[-1] for step, told in found.items()} == {step: told[0] for step, told in truth.items()}
    again = [step for step, told in found.items() if len(told) > 1]
    assert again == list(range(again[0], killed_at + 1)), "it went on from a version, in the right order"
    assert again[0] > 0
    assert set(before) == set(range(killed_at + 1))


class Validated(Small):
    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("validated", self.net(batch).square().mean())

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(lightning_job.Points(), batch_size=20)


class Stop(pl.Callback):  # type: ignore[misc, name-defined]
    """Ends the training with an error, if it is not this far when it begins.

    Args:
        at: the step.
    """

    def __init__(self, at: int) -> None:
        self._at = at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._at:
            raise KeyError("stop")


@pytest.mark.parametrize(
    ("kind", "validated", "ends", "stops"),
    [
        pytest.param("steps", False, {"max_steps": 30, "max_epochs": -1}, (14,), id="stateful"),
        pytest.param("epochs", True, {"max_steps": 30, "max_epochs": -1}, (23, 29), id="plain with validation"),
        pytest.param("epochs", True, {"max_epochs": 3}, (23, 29), id="until an epoch"),
    ],
)
def test_a_checkpoint_at_the_end_of_an_epoch(
    kind: str, validated: bool, ends: dict[str, int], stops: tuple[int, ...], tmp_path: Path
) -> None:
    """Lightning ends that epoch once more if it trains until a step: also what is saved then goes on exactly."""

    def train(folder: Path, *stop: int) -> Small:
        folder.mkdir(exist_ok=True)
        pl.seed_everything(5, verbose=False)
        model = (Validated if validated else Small)(losses=str(folder / "losses.txt"))
        callbacks = [checkpoints(folder, "epochs", monitor=None, save_top_k=1), *map(Stop, stop)]
        with suppress(KeyError):
            trainer(folder, *callbacks, **ends).fit(model, loader(kind), ckpt_path="last")
        return model

    whole = train(tmp_path / "whole")
    for stop in stops:
        train(tmp_path / "job", stop)
    resumed = train(tmp_path / "job")
    truth, found = losses(tmp_path / "whole"), losses(tmp_path / "job")
    assert {step: told[-1] for step, told in found.items()} == {step: told[0] for step, told in truth.items()}
    assert difference(resumed.state_dict(), whole.state_dict()) == ""


def test_tiers_have_the_checkpoints_that_lightning_keeps_and_no_others(tmp_path: Path) -> None:
    job = fitted(tmp_path)
    kept = named(tmp_path)
    assert set(kept) == {"last.ckpt", "step=21.ckpt", "step=6.ckpt"}
    found = {version.id: version for version in versions(tmp_path)}
    assert set(found) == set(kept.values())
    for name, step in (("last.ckpt", 30), ("step=21.ckpt", 21), ("step=6.ckpt", 6)):
        version = found[kept[name]]
        assert (version.step, version.tiers) == (step, ("fast", "slow"))
        assert [tag.startswith(TAG) for tag in version.tags] == [True]
        assert version.metadata["score"] == (step - 1) * 7 % 5 if name != "last.ckpt" else True
    best = Path(job.checkpoint_callback.best_model_path)
    assert best.name == "step=6.ckpt"
    assert not list(tmp_path.rglob("*.tmp"))


def test_best_and_last_are_loaded_by_a_trainer_and_by_a_module(tmp_path: Path) -> None:
    job = fitted(tmp_path)
    io = job.strategy.checkpoint_io
    best, last = (io.load_checkpoint(tmp_path / "ckpt" / name) for name in ("step=6.ckpt", "last.ckpt"))
    assert (best["global_step"], last["global_step"]) == (6, 30)
    assert difference(last["state_dict"], job.lightning_module.state_dict()) == ""

    class Seen(pl.Callback):  # type: ignore[misc, name-defined]
        weights: Any = None

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self.weights = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}

    for name, truth in (("best", best), ("last", last)):
        seen = Seen()
        job.callbacks.append(seen)
        job.validate(Validated(), loader(), ckpt_path=name, verbose=False)
        assert all(torch.equal(seen.weights[key], tensor) for key, tensor in truth["state_dict"].items())
        job.callbacks.remove(seen)
    model = Small.load_from_checkpoint(tmp_path / "ckpt" / "step=6.ckpt")
    assert model.hparams.width == 16
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in best["state_dict"].items())
    io.teardown()


def test_a_checkpoint_comes_back_as_it_was_given(tmp_path: Path) -> None:
    job = fitted(tmp_path)
    io = TierCheckpointIO(policy(tmp_path), run="other")
    truth = job._checkpoint_connector.dump_checkpoint(False)
    io.save_checkpoint(truth, tmp_path / "one.ckpt")
    io.save_checkpoint(truth, tmp_path / "deep" / "two.ckpt")
    found = [io.load_checkpoint(tmp_path / name) for name in ("one.ckpt", "deep/two.ckpt")]
    assert difference(dict(truth), found[0]) == ""
    assert difference(dict(truth), found[1]) == ""
    io.teardown()
    first, second = versions(tmp_path, "other")
    assert first.step == second.step == 30
    packs = [path.stat().st_size for path in sorted((tmp_path / "fast" / "packs" / "other").iterdir())]
    assert sum(packs[1:]) * 3 < packs[0], "what two paths of one step have in common is stored once"


def test_a_tier_that_keeps_one_keeps_all_that_have_a_path(tmp_path: Path) -> None:
    text = f"version: 1\ntiers: {{a: {{type: nvme, path: {tmp_path / 'a'}, keep: {{last: 1}}}}}}\n"
    io = TierCheckpointIO(ts.Policy.parse(text), run="r")
    paths = [tmp_path / f"{step}.ckpt" for step in range(12)]
    for step, path in enumerate(paths):
        io.save_checkpoint({"global_step": step, "w": torch.full((9,), step), "pytorch-lightning_version": "2"}, path)
    for path in paths[:6]:
        io.remove_checkpoint(path)
    io.teardown()
    assert [path.exists() for path in paths] == [False] * 6 + [True] * 6
    for step, path in list(enumerate(paths))[6:]:
        assert io.load_checkpoint(path)["w"][0] == step
    io.teardown()
    with ts.Checkpointer(ts.Policy.parse(text), "r") as ckpt:
        assert [version.step for version in ckpt.versions()] == list(range(6, 12))
        assert len(ckpt.tags()) == 6
    with pytest.raises(ts.PolicyError, match=r"tiers\.a\.keep\.tags"):
        TierCheckpointIO(ts.Policy.parse(text.replace("last: 1", "last: 1, tags: false")), run="r")


def saved(folder: Path, *steps: int) -> TierCheckpointIO:
    """Saves to ``last.ckpt``, all durable."""
    io = TierCheckpointIO(policy(folder), run="r")
    for step in steps:
        state = {"global_step": step, "w": torch.full((5000,), float(step)), "pytorch-lightning_version": "2"}
        io.save_checkpoint(state, folder / "last.ckpt")
    io.teardown()
    return io


def damage(folder: Path) -> None:
    for path in (folder / "packs").rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[1000] ^= 1
            path.chmod(0o600)
            path.write_bytes(data)


def test_what_one_tier_has_damaged_is_read_from_the_next(tmp_path: Path) -> None:
    io = saved(tmp_path, 3)
    damage(tmp_path / "fast")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["w"][0] == 3
    io.teardown()
    for name in ("fast", "slow"):
        for path in (tmp_path / name / "packs").rglob("*"):
            if path.is_file():
                path.chmod(0o600)
                path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ts.Damaged) as caught:
        io.load_checkpoint(tmp_path / "last.ckpt")
    assert "last.ckpt" in "".join(caught.value.__notes__)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    io = saved(tmp_path, 3)
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "none.ckpt")
    (tmp_path / "own.ckpt").write_bytes(b"PK\x03\x04 a zip file with a pickle")
    with pytest.raises(ts.FormatError, match="a pickle"):
        io.load_checkpoint(tmp_path / "own.ckpt")
    io.remove_checkpoint(tmp_path / "none.ckpt")
    io.remove_checkpoint(tmp_path / "own.ckpt")
    assert not (tmp_path / "own.ckpt").exists()
    io.teardown()
    for name in ("fast", "slow"):
        shutil.rmtree(tmp_path / name / "versions")
    with pytest.raises(ts.NotFound) as caught:
        io.load_checkpoint(tmp_path / "last.ckpt")
    assert "last.ckpt refers to it" in "".join(caught.value.__notes__)
    io.teardown()


def interrupted(path: Path, step: int, *, alone: bool = False) -> None:
    """Make the reference as a process leaves it that was killed during a save."""
    found = json.loads(path.read_text())
    found["targets"] = [{"key": "f" * 32, "step": step, "version": ""}, *([] if alone else found["targets"])]
    path.write_text(json.dumps(found))


def test_a_save_that_was_killed_leaves_what_was_there_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io = saved(tmp_path, 2, 3)
    interrupted(tmp_path / "last.ckpt", 4)
    assert io.load_checkpoint(tmp_path / "last.ckpt")["w"][0] == 3
    assert "the save of step 4" in caplog.text
    shutil.copy(tmp_path / "last.ckpt", tmp_path / "new.ckpt")
    interrupted(tmp_path / "new.ckpt", 4, alone=True)
    with pytest.raises(ts.NotFound, match="the newest is step 3"):
        io.load_checkpoint(tmp_path / "new.ckpt")
    (tmp_path / "link.ckpt").symlink_to("new.ckpt")
    assert io.load_checkpoint(tmp_path / "link.ckpt")["w"][0] == 3
    io.teardown()
    # A tier that cannot be asked may have what is looked for: nothing older is taken in its place.
    (tmp_path / "slow").rename(tmp_path / "away")
    (tmp_path / "slow").write_text("no folder")
    with pytest.raises(ts.Unreadable, match="slow"):
        io.load_checkpoint(tmp_path / "last.ckpt")
    io.teardown()


def test_a_save_that_was_durable_when_its_process_was_killed_is_what_its_path_names(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    found = json.loads((tmp_path / "last.ckpt").read_text())
    found["targets"][0]["version"] = ""  # the process had no time to write it
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "old.ckpt").write_text(json.dumps(found))
    io = saved(tmp_path, 4)
    assert io.load_checkpoint(tmp_path / "old.ckpt")["w"][0] == 3
    io.teardown()


@pytest.mark.parametrize("kind", [PathVersions, RankVersions])
def test_the_checkpoint_before_a_requeue_is_durable_when_its_save_returns(
    kind: type[PathVersions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning lets SLURM requeue the job then, which ends the process."""

    def slow(self: Any, save: Any) -> Any:
        time.sleep(0.5)
        return wait(self, save)

    wait = PathVersions._wait
    saved(tmp_path, 3)
    monkeypatch.setattr(PathVersions, "_wait", slow)
    io = TierCheckpointIO(policy(tmp_path), run="r")
    io._versions = kind(io._versions.policy, "r", ())
    io.load_checkpoint(tmp_path / "last.ckpt")
    state = {"global_step": 4, "w": torch.ones(9), "pytorch-lightning_version": "2"}
    for name, durable in (("step=4.ckpt", False), ("hpc_ckpt_1.ckpt", True)):
        io.save_checkpoint(state, tmp_path / name)
        (target,) = json.loads((tmp_path / name).read_text())["targets"]
        assert bool(target["version"]) is durable
    io.teardown()


def test_a_save_that_fails_is_told_and_nothing_older_is_removed(tmp_path: Path) -> None:
    io = saved(tmp_path, 3)
    old = tmp_path / "old.ckpt"
    state = {"global_step": 4, "w": torch.ones(9), "pytorch-lightning_version": "2"}
    io.save_checkpoint(state, old)
    io._versions.settle()
    away = [(tmp_path / name, tmp_path / f"{name}-away") for name in ("fast", "slow")]
    for here, there in away:
        here.rename(there)
        here.write_text("no folder")
    io.save_checkpoint(state, tmp_path / "last.ckpt")
    io.remove_checkpoint(old)
    io._versions.settle()
    with pytest.raises(ts.TierstateError):
        io.save_checkpoint(state, tmp_path / "last.ckpt")
    with suppress(ts.TierstateError):  # the other tier's failure, if it was not told yet
        io.teardown()
    for here, there in away:
        here.unlink()
        there.rename(here)
    assert old.exists()
    assert io.load_checkpoint(old)["global_step"] == 4
    assert io.load_checkpoint(tmp_path / "last.ckpt")["w"][0] == 3
    io.teardown()


def test_a_path_that_takes_no_reference_is_told_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    io = saved(tmp_path, 3)
    (tmp_path / "folder.ckpt").mkdir()
    before = sorted(tmp_path.iterdir())
    state = {"global_step": 4, "w": torch.ones(9), "pytorch-lightning_version": "2"}
    with pytest.raises(IsADirectoryError, match=r"folder\.ckpt"):
        io.save_checkpoint(state, tmp_path / "folder.ckpt")
    io.teardown()
    assert sorted(tmp_path.iterdir()) == before


def test_a_reference_does_not_grow_while_tiers_are_away(tmp_path: Path) -> None:
    io = saved(tmp_path, 3)
    found = json.loads((tmp_path / "last.ckpt").read_text())
    found["targets"] = [{"key": f"{n:032x}", "step": 9, "version": ""} for n in range(300)] + found["targets"]
    (tmp_path / "last.ckpt").write_text(json.dumps(found))
    assert io.load_checkpoint(tmp_path / "last.ckpt")["w"][0] == 3
    state = {"global_step": 10, "w": torch.zeros(9), "pytorch-lightning_version": "2"}
    io.save_checkpoint(state, tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").stat().st_size < 10_000
    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 10
    io.teardown()


def test_values_without_a_form_are_refused_by_their_key(tmp_path: Path) -> None:
    io = TierCheckpointIO(policy(tmp_path), run="r")
    for bad, told in ((print, r"hyper_parameters\.f.*allow pickle"), (torch.nn.ReLU(), r"hyper_parameters\.f: a ReLU")):
        with pytest.raises(ts.CaptureError, match=told):
            io.save_checkpoint({"hyper_parameters": {"f": bad}}, tmp_path / "x.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})
    assert not (tmp_path / "x.ckpt").exists()
    io.teardown()


def test_allow_pickle_is_by_key(tmp_path: Path) -> None:
    io = TierCheckpointIO(policy(tmp_path), run="r", allow_pickle=["hyper_parameters.**"])
    io.save_checkpoint({"hyper_parameters": {"f": print}}, tmp_path / "x.ckpt")
    assert io.load_checkpoint(tmp_path / "x.ckpt")["hyper_parameters"]["f"] is print
    io.teardown()
    with pytest.raises(ts.Unsafe):
        (closed := TierCheckpointIO(policy(tmp_path), run="r")).load_checkpoint(tmp_path / "x.ckpt")
    closed.teardown()


def test_under_lightnings_own_asynchronous_plugin(tmp_path: Path) -> None:
    inner = TierCheckpointIO(policy(tmp_path), run="small")
    fitted(tmp_path, plugins=[AsyncCheckpointIO(inner)])
    assert inner.load_checkpoint(tmp_path / "ckpt" / "last.ckpt")["global_step"] == 30
    inner.teardown()


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    io = TierCheckpointIO(policy(tmp_path), run="fabric")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    model = fabric.setup(torch.nn.Linear(3, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fabric.save(tmp_path / "f.ckpt", {"model": model, "step": 7})
    with torch.no_grad():
        model.weight.zero_()
    state = {"model": model, "step": 0}
    fabric.load(tmp_path / "f.ckpt", state)
    assert state["step"] == 7
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    io.teardown()


class Drawn(pl.Callback):  # type: ignore[misc, name-defined]
    """Keeps what the generator would draw when a training starts."""

    def on_train_start(self, *_: Any) -> None:
        state = torch.get_rng_state()
        self.numbers = torch.rand(3).tolist()
        torch.set_rng_state(state)


def test_a_training_that_does_not_resume_draws_other_numbers_than_a_checkpoint_would(tmp_path: Path) -> None:
    """The trainer has loaded a checkpoint within an epoch before, for something else than to train on from it."""
    fitted(tmp_path)
    within = str(tmp_path / "ckpt" / "step=21.ckpt")

    def drawn(earlier: Callable[[Any], object]) -> list[float]:
        start = Drawn()
        job = trainer(tmp_path, start, max_epochs=-1, max_steps=21)
        earlier(job)
        torch.manual_seed(8)
        job.fit_loop.epoch_loop.max_steps = 24
        job.fit(Small(), loader())
        return start.numbers

    def evaluate(path: str | None) -> torch.Tensor:
        torch.manual_seed(8)
        trainer(tmp_path).validate(Validated(), ckpt_path=path, verbose=False)
        return torch.get_rng_state()

    assert torch.equal(evaluate(within), evaluate(None)), "an evaluation is no training that resumes"
    plain = drawn(lambda job: None)
    assert drawn(lambda job: job.validate(Validated(), ckpt_path=within, verbose=False)) == plain
    assert drawn(lambda job: job.fit(Small(), loader(), ckpt_path=within)) == plain, "it was over, and never started"


@pytest.mark.parametrize("made", [TierCheckpointIO, TierModelParallelStrategy])
def test_wrong_arguments_are_told_before_a_training_begins(made: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a/b' cannot name a run"):
        made(policy(tmp_path), run="a/b")
    with pytest.raises(TypeError, match="is one glob where a list of them is right"):
        made(policy(tmp_path), run="small", allow_pickle="hyper_parameters.**")


def test_two_ranks_of_ddp(tmp_path: Path) -> None:
    for folder, more in ((tmp_path / "whole", []), (tmp_path / "cut", [2])):
        folder.mkdir()
        with Gang(2, "support.lightning_job:ddp", folder, *more) as gang:
            gang.wait(300)
    with Gang(2, "support.lightning_job:ddp", tmp_path / "cut") as gang:
        gang.wait(300)
    truth, found = ((tmp_path / name / "ends.txt").read_text().split("\n") for name in ("whole", "cut"))
    assert sorted(truth)[1:] == sorted(found)[-2:]
    assert len({version.step for version in versions(tmp_path / "cut")}) >= 1


def test_generators_of_another_number_of_ranks_are_not_restored(caplog: pytest.LogCaptureFixture) -> None:
    one = RngState()
    job = SimpleNamespace(world_size=2, global_rank=0, state=SimpleNamespace(fn="fit"))
    before = torch.get_rng_state()
    one.on_load_checkpoint(job, None, {RNG: {"ranks": [ts.Rng().state_dict()], "epoch_ended": False}})
    torch.rand(3)
    one.on_train_start(job, None)
    assert not torch.equal(before, torch.get_rng_state())
    assert "2 ranks resume what 1 saved" in caplog.text


@pytest.mark.soak
def test_the_example() -> None:
    example = TESTS.parent / "examples" / "lightning_resume.py"
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        [sys.executable, str(example)], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "status -9" in done.stdout
    assert "Every later loss is the same" in done.stdout
