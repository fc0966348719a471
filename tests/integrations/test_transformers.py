"""Hugging Face's Trainer itself: killed and resumed to the last bit, and its arguments keep their meaning."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from support.trainer_job import Losses, Net, run, trainer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

import tierstate as ts
from tierstate.engine.publish.tier_queue import TierQueue
from tierstate.integrations.transformers import TierTrainer, TierTrainerMixin, use


def policy_of(place: Path, keep: str = "") -> ts.Policy:
    return ts.Policy.parse(
        f"version: 1\narena: {{size: 64MiB}}\ntiers: {{nvme: {{type: nvme, path: '{place}'{keep}}}}}\n"
    )


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["support.trainer_job"])


def run_job(output: Path, *, code: int, **job: Any) -> None:
    """Train in a process of its own, which ends with this code. It is forked off one that has imported all there is."""
    process = SERVER.Process(target=run, args=({"output": str(output), "log": str(output) + ".jsonl", **job},))
    process.start()
    process.join(100)
    assert process.exitcode == code


def logged(output: Path) -> dict[int, str]:
    lines = Path(str(output) + ".jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def uninterrupted(tmp_path: Path, **given: Any) -> dict[int, str]:
    losses = Losses()
    given = given | {"save_strategy": "no", "load_best_model_at_end": False}
    trainer(tmp_path / "whole", losses, Trainer, **given).train()
    return losses.found


def steps_of(folder: Path) -> list[int]:
    return sorted(int(one.name.split("-")[1]) for one in folder.glob("checkpoint-*"))


def versions(output: Path, policy: ts.Policy) -> dict[int, ts.VersionInfo]:
    with ts.Checkpointer(policy, run=output.name) as ckpt:
        return {version.step: version for version in ckpt.versions()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 3}, id="accumulated", marks=pytest.mark.soak),
        pytest.param({"bf16": True}, id="bf16", marks=pytest.mark.soak),
        pytest.param({"logging_steps": 3, "save_steps": 1}, id="saved between two logged means"),
        pytest.param(
            {"eval_strategy": "steps", "eval_steps": 3, "dataloader_num_workers": 0},
            id="evaluated",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_killed_and_resumed_to_the_last_bit(given: dict[str, Any], tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path, **given)
    output = tmp_path / "job"
    at = 9 if given.get("logging_steps") else 7
    run_job(output, code=-9, kill=at, wait="checkpoint-2", arguments=given)
    before = logged(output)
    assert before == {step: loss for step, loss in whole.items() if step <= at}
    assert steps_of(output)

    losses = Losses()
    job = trainer(output, losses, **given)
    job.train(resume_from_checkpoint=True)
    assert losses.found
    assert min(losses.found) <= at + given.get("logging_steps", 1)
    assert losses.found == {step: whole[step] for step in losses.found}
    assert max(losses.found) == max(whole)


def gpt(output: Path, losses: Losses | None = None, **given: Any) -> Any:
    torch.manual_seed(4)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=50))
    made = trainer(output, losses, model=model, remove_unused_columns=False, **given)
    tokens = torch.randint(0, 50, (40, 16), generator=torch.Generator().manual_seed(1))
    made.train_dataset = [{"input_ids": row, "labels": row} for row in tokens]
    return made


def test_a_language_model_with_tied_weights(tmp_path: Path) -> None:
    whole, losses = Losses(), Losses()
    gpt(tmp_path, whole).train()
    gpt(tmp_path, losses).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert losses.found == {step: whole.found[step] for step in range(7, 13)}


def test_operations_since_the_last_log_are_counted_after_a_resumption(tmp_path: Path) -> None:
    whole, again = (gpt(tmp_path, logging_steps=4) for _ in range(2))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.state.total_flos == whole.state.total_flos > 0


def test_no_file_of_the_trainer_itself_is_written(tmp_path: Path) -> None:
    output = tmp_path / "job"
    trainer(output).train()
    for folder in output.glob("checkpoint-*"):
        assert {file.name for file in folder.iterdir()} == {"trainer_state.json", "tierstate.json"}
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in files if file.read_bytes()[:4] == b"PK\x03\x04"], "torch.save writes zip files"
    assert not [file for file in files if file.suffix in (".bin", ".pt", ".pth", ".pkl", ".safetensors")]


def test_save_total_limit_is_the_retention_of_tiers_that_have_none(tmp_path: Path) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier")
    trainer(output, tier={"policy": policy}, save_total_limit=2).train()
    assert steps_of(output) == [10, 12]
    assert sorted(versions(output, policy)) == [10, 12]


def test_a_tier_with_a_retention_of_its_own_keeps_what_that_says(tmp_path: Path) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier", ", keep: {last: 1, every: 4}")
    trainer(output, tier={"policy": policy}, save_total_limit=2).train()
    assert sorted(versions(output, policy)) == [2, 4, 8, 12]
    assert steps_of(output) == [8, 12], "as many folders as save_total_limit says"


@pytest.mark.parametrize("seconds", [0, 0.5], ids=["", "late"])
def test_folders_of_versions_that_retention_has_dropped_go_as_well(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire = TierQueue.retire

    def late(queue: TierQueue, **how: bool) -> None:
        time.sleep(seconds)
        retire(queue, **how)

    monkeypatch.setattr(TierQueue, "retire", late)
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier", ", keep: {last: 3}")
    trainer(output, tier={"policy": policy}).train()
    assert steps_of(output) == sorted(versions(output, policy)) == [8, 10, 12]


def best_given(**given: Any) -> dict[str, Any]:
    return {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss",
        "greater_is_better": True, **given,
    }  # fmt: skip


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_the_best_model_is_kept_and_loaded_at_the_end(limit: int | None, tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", kind=Trainer, **best_given(save_total_limit=limit))
    plain.train()
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier")
    job = trainer(output, tier={"policy": policy}, **best_given(save_total_limit=limit))
    job.train()
    assert job.state.best_global_step == plain.state.best_global_step < 12
    assert job.state.best_metric == plain.state.best_metric
    assert steps_of(output) == steps_of(tmp_path / "plain")
    expected = plain.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in job.model.state_dict().items())
    found = versions(output, policy)
    assert found[job.state.best_global_step].tags == ("best",)
    assert found[12].metadata["eval_loss"] == job.state.log_history[-2]["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, best_given(), {"save_strategy": "no"}], ids=["steps", "evaluated", "no"])
def test_a_signal_saves_at_the_end_of_the_step_and_stops(given: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"enable_jit_checkpoint": True, **given}
    whole = uninterrupted(tmp_path, **given)
    output = tmp_path / "job"
    run_job(output, code=0, kill=5, signal="SIGTERM", arguments=arguments)
    assert max(logged(output)) == 6
    assert steps_of(output)[-1] == 6
    losses = Losses()
    trainer(output, losses, **given).train(resume_from_checkpoint=True)
    assert losses.found == {step: whole[step] for step in range(7, 13)}


def test_the_trainers_own_way_with_signals_is_undone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer(tmp_path, enable_jit_checkpoint=True)
    assert signal.getsignal(signal.SIGTERM) == before


def test_folders_that_are_lost_are_made_again_of_the_versions(tmp_path: Path) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier")
    whole = Losses()
    trainer(output, whole, tier={"policy": policy}, max_steps=12, save_steps=5).train()
    shutil.rmtree(output)
    losses = Losses()
    trainer(output, losses, tier={"policy": policy}).train(resume_from_checkpoint=str(output / "checkpoint-10"))
    assert losses.found == {step: whole.found[step] for step in (11, 12)}
    shutil.rmtree(output)
    job = trainer(output, losses, tier={"policy": policy}, max_steps=14)
    job.train(resume_from_checkpoint=True)
    assert job.state.global_step == 14
    assert [line["step"] for line in job.state.log_history if "loss" in line] == [*range(1, 15)]


@pytest.mark.parametrize("lost", [False, True])
def test_no_older_version_is_resumed_from_where_the_newest_cannot_be_read(lost: bool, tmp_path: Path) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier")
    trainer(output, tier={"policy": policy}).train()
    there = steps_of(output)
    *_, newest = sorted((tmp_path / "tier/versions/job").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    if lost:
        shutil.rmtree(output)
    with pytest.raises(ts.Damaged, match="is the newest, and its record cannot be read"):
        trainer(output, tier={"policy": policy}, max_steps=13).train(resume_from_checkpoint=True)
    assert lost or steps_of(output) == there


@pytest.mark.parametrize("file", ["tierstate.json", "trainer_state.json"])
@pytest.mark.parametrize("resume", [True, "checkpoint-12"])
def test_a_folder_that_a_crash_has_torn_is_made_again(resume: bool | str, file: str, tmp_path: Path) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier")
    trainer(output, tier={"policy": policy}).train()
    torn = output / "checkpoint-12" / file
    torn.write_bytes(torn.read_bytes()[:9] + bytes(20))
    (output / "checkpoint-99").mkdir()
    (output / "checkpoint-99" / "tierstate.json").touch()  # of a version that is lost
    losses = Losses()
    job = trainer(output, losses, tier={"policy": policy}, max_steps=13)
    job.train(resume_from_checkpoint=resume if resume is True else str(output / resume))
    assert list(losses.found) == [13]
    assert json.loads((output / "checkpoint-12" / "tierstate.json").read_text())["step"] == 12


def test_folders_with_names_of_their_own_stay_and_are_not_counted(tmp_path: Path) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier", ", keep: {last: 1}")
    trainer(output, tier={"policy": policy}, max_steps=2).train()
    shutil.copytree(output / "checkpoint-2", output / "checkpoint-best")
    (output / "checkpoint-1").mkdir()
    (output / "checkpoint-1" / "tierstate.json").write_text("[]")  # of another tool
    trainer(output, tier={"policy": policy}).train(resume_from_checkpoint=True)
    assert {folder.name for folder in output.glob("checkpoint-*")} == {
        "checkpoint-1", "checkpoint-12", "checkpoint-best",
    }  # fmt: skip


def test_only_durable_versions_have_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = f"ram: {{type: host, capacity: 64MiB}}, nvme: {{type: nvme, every: 4, path: '{tmp_path}/tier'}}"
    policy = ts.Policy.parse(f"version: 1\narena: {{size: 64MiB}}\ntiers: {{{tiers}}}\n")
    trainer(tmp_path / "job", tier={"policy": policy}, max_steps=10).train()
    assert steps_of(tmp_path / "job") == list(versions(tmp_path / "job", policy)) == [2, 4, 8]
    assert "has no folder" not in caplog.text


def test_whatever_keeps_a_version_from_its_folder_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstate.integrations.transformers.saved_version", {}.__getitem__)
    trainer(tmp_path, max_steps=4).train()
    for step in (2, 4):
        assert f"checkpoint-{step} has no folder: TypeError" in caplog.text


def test_folders_of_another_run_stay(tmp_path: Path) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier", ", keep: {last: 1}")
    trainer(output, tier={"policy": policy, "run": "first"}, max_steps=3, save_steps=3).train()
    trainer(output, tier={"policy": policy, "run": "second"}).train()
    assert steps_of(output) == [3, 12]
    assert json.loads((output / "checkpoint-3" / "tierstate.json").read_text())["run"] == "first"


def test_the_training_goes_on_while_its_state_is_captured(tmp_path: Path) -> None:
    job = trainer(tmp_path, kind=Recorded, max_steps=2)
    for _ in range(2):
        job.train()
    assert job.lazy == [True] * 4


def test_a_folder_whose_version_is_gone_is_not_resumed_from(tmp_path: Path) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier")
    trainer(output, tier={"policy": policy}).train()
    with ts.Checkpointer(policy, run="job") as ckpt:
        ckpt.remove(step=12, force=True)
    assert steps_of(output)[-1] == 12
    losses = Losses()
    trainer(output, losses, tier={"policy": policy}).train(resume_from_checkpoint=True)
    assert min(losses.found) == 11


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("resume", [True, "checkpoint-12"])
def test_a_folder_that_a_plain_trainer_has_written_anew_is_its_own(
    resume: bool | str, dropped: bool, tmp_path: Path
) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier")
    trainer(output, tier={"policy": policy}).train()
    trainer(output, kind=Trainer, learning_rate=0.5).train()
    assert (output / "checkpoint-12" / "tierstate.json").exists()  # beside the plain Trainer's files
    if dropped:
        with ts.Checkpointer(policy, run="job") as ckpt:
            ckpt.remove(step=12, force=True)
    expected, losses = Losses(), Losses()
    alone = shutil.copytree(output, tmp_path / "alone")
    for place, found, options in ((alone, expected, {"kind": Trainer}), (output, losses, {"tier": {"policy": policy}})):
        job = trainer(place, found, max_steps=13, learning_rate=0.5, **options)
        job.train(resume_from_checkpoint=resume if resume is True else str(place / resume))
    assert list(losses.found) == [13]
    assert losses.found == expected.found


def test_errors_say_what_does_not_fit(tmp_path: Path) -> None:
    output, policy = tmp_path / "job", policy_of(tmp_path / "tier")
    trainer(output, tier={"policy": policy}).train()
    folder = str(output / "checkpoint-4")
    with pytest.raises(ts.StateMismatch, match=r"body\.0\.weight.*\(48, 16\) here, \(32, 16\) in") as error:
        trainer(output, model=Net(48), tier={"policy": policy}).train(resume_from_checkpoint=folder)
    assert f"while resuming from {folder}" in error.value.__notes__
    other = trainer(output, tier={"policy": policy, "run": "other"})
    with pytest.raises(ts.StateMismatch, match=r"is of the run 'job', and here is 'other'"):
        other.train(resume_from_checkpoint=folder)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer(tmp_path / "empty", tier={"policy": policy}).train(resume_from_checkpoint=True)
    shutil.rmtree(tmp_path / "tier" / "versions")
    with pytest.raises(ts.TierstateError) as error:
        trainer(output, tier={"policy": policy}).train(resume_from_checkpoint=folder)
    assert isinstance(error.value, ts.NotFound | ts.WrongTier)


def test_changed_arguments_and_a_fresh_start_beside_versions_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "job"
    trainer(output).train()
    trainer(output, seed=6).train(resume_from_checkpoint=True)
    assert "was saved with seed=5, and it is 6 now" in caplog.text
    assert "starts anew" not in caplog.text
    trainer(output).train()
    assert "run job has versions already, and this training starts anew" in caplog.text


def test_the_scale_of_a_gradient_scaler(tmp_path: Path) -> None:
    def job(losses: Losses) -> Any:
        made = trainer(tmp_path / "job", losses)
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        return made

    whole, losses = Losses(), Losses()
    first = job(whole)
    first.train()
    again = job(losses)
    again.train(resume_from_checkpoint=str(tmp_path / "job" / "checkpoint-8"))
    assert again.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()
    assert again.accelerator.scaler.get_scale() == 2.0**14
    assert losses.found == {step: whole.found[step] for step in range(9, 13)}


def test_models_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = tmp_path / "job"
    trainer(output, save_only_model=True).train()
    job = trainer(output)
    job.train(resume_from_checkpoint=str(output / "checkpoint-10"))
    assert job.state.global_step == 12
    assert "has no loss, optimizer, scheduler (save_only_model): they stay as they are" in caplog.text


class Own(Trainer):
    """A trainer with a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class Mixed(TierTrainerMixin, Own):
    """With versions."""


def test_ways_to_switch_on(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path)
    plain = tmp_path / "plain"
    trainer(plain, kind=Own).train()
    losses = Losses()
    made = trainer(plain, losses, kind=Own)
    use(made, policy_of(tmp_path / "tier"), run="mine")
    assert isinstance(made, TierTrainer)
    assert isinstance(made, Own)
    made.train(resume_from_checkpoint=str(plain / "checkpoint-4"))  # of a plain Trainer
    assert losses.found == {step: whole[step] for step in range(5, 13)}
    assert json.loads((plain / "checkpoint-12" / "tierstate.json").read_text())["run"] == "mine"

    losses = Losses()
    again = trainer(plain, losses, kind=Mixed, tier={"policy": policy_of(tmp_path / "tier"), "run": "mine"})
    again.train(resume_from_checkpoint=str(plain / "checkpoint-8"))
    assert losses.found == {step: whole[step] for step in range(9, 13)}


def test_a_run_is_named_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a/b' cannot name a run"):
        trainer(tmp_path, tier={"run": "a/b"})
    for folder, name in (("größe 7", "gr--e-7"), ("_new", "run_new"), (".new", "run.new"), ("gpt-2.b", "gpt-2.b")):
        assert trainer(tmp_path / folder)._versions._run == name
    long = [trainer(tmp_path / ("x" * length + end))._versions._run for length in (99, 100, 200) for end in "ab"]
    assert long[:2] == ["x" * 99 + "a", "x" * 99 + "b"]
    assert {len(name) for name in long} == {100}
    assert len(set(long)) == 6


class Recorded(TierTrainer):
    """Keeps of each step the loss, and whether a save would be captured beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[float] = []
        self.lazy: list[bool] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        ckpt = self._versions._ckpt
        assert ckpt is not None
        self.lazy.append(ckpt._guard.lazy)
        loss = super().training_step(*args, **kwargs)
        self.steps.append(float(loss))
        return loss


class FailsOnce(Losses):
    failed = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self.failed:
            self.failed = True
            raise OSError("no tracker")


def test_losses_that_a_failed_resumption_has_read_are_not_counted_by_the_next_training(tmp_path: Path) -> None:
    trainer(tmp_path, logging_steps=3).train()
    losses = FailsOnce()
    job = trainer(tmp_path, losses, kind=Recorded, logging_steps=3)
    with pytest.raises(OSError, match="no tracker"):
        job.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    job.train()
    assert float.fromhex(losses.found[3]) == pytest.approx(sum(job.steps[:3]) / 3, abs=1e-3)


def test_a_policy_that_is_given_later_takes_the_place_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[ts.Policy] = []

    class Opened(ts.Checkpointer):
        def __init__(self, policy: ts.Policy, *args: Any, **kwargs: Any) -> None:
            opened.append(policy)
            super().__init__(policy, *args, **kwargs)

    monkeypatch.setattr("tierstate.integrations.transformers.Checkpointer", Opened)
    job = trainer(tmp_path / "job", tier={"policy": policy_of(tmp_path / "first")}, max_steps=2)
    use(job, second := policy_of(tmp_path / "second"))
    job.train()
    assert opened == [second]


class WithStateOfItsOwn(Own):
    """A trainer that puts a file beside the Trainer's own, as TRL's do."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", "own.json").write_text("{}")


class Below(Mixed):
    """What comes before ours is called."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)


def test_what_another_trainer_does_beside_saving_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = {"policy": policy_of(tmp_path / "tier")}
    trainer(tmp_path, kind=Below, tier=tier)
    use(trainer(tmp_path, kind=Own), **tier)
    assert not caplog.records
    use(trainer(tmp_path, kind=WithStateOfItsOwn), **tier)
    assert "not called with tierstate: WithStateOfItsOwn._save_checkpoint. What they save" in caplog.text


def test_what_cannot_be_taken_over_is_refused(tmp_path: Path) -> None:
    job = trainer(tmp_path, kind=Trainer)
    job.args.push_to_hub = True
    with pytest.raises(ValueError, match="the folders hold no model"):
        use(job)
    plugin = SimpleNamespace(fsdp_version=1)
    job.args.push_to_hub, job.is_fsdp_enabled = False, True
    job.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    with pytest.raises(ValueError, match="use fsdp_version 2"):
        use(job)
    plugin.fsdp_version = 2
    use(job)
    with pytest.raises(ValueError, match="search with a plain Trainer"):
        trainer(tmp_path).train(trial={})
