"""A run interrupted anywhere and resumed ends with bit for bit the weights of the uninterrupted run."""

from __future__ import annotations

import shutil
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from ignite.metrics import Average
from torch import nn

from pulsetrain import Trainer
from pulsetrain.engine import CheckpointError, ConfigurationError, Events, Every, GRPOStrategy, Preempted
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint, load_weights
from pulsetrain.engine.rollouts import Sampling, TextRollouts
from pulsetrain.handlers import Checkpointer, EarlyStopping
from tests.support.models import Tokens, loader, regression_model, trainer
from tests.support.runs import RESUMABLE_CONFIG, cut_after, resumable_run, weights


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    run = resumable_run(tmp_path_factory.mktemp("whole"))
    run.train()
    return run


# an epoch has 10 batches, an update 3: first, inside an update, at an update, at an epoch's last batch, in later epochs
@pytest.mark.parametrize(
    "iteration", [5, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 6, 10, 11, 20, 25, 39))]
)
def test_a_resumed_run_equals_the_uninterrupted_one(iteration: int, uninterrupted: Trainer, tmp_path: Path):
    cut_after(resumable_run(tmp_path), iteration)
    torch.manual_seed(999)  # another process
    again = resumable_run(tmp_path)
    history = again.train(resume="latest")
    expected = weights(uninterrupted)
    assert all(torch.equal(expected[name], value) for name, value in weights(again).items())
    assert history == uninterrupted.history
    assert again.state.update == uninterrupted.state.update
    assert again.handlers[1].state_dict() == uninterrupted.handlers[1].state_dict()


def test_a_checkpoint_at_an_epochs_end_resumes_with_the_next_epoch(uninterrupted: Trainer, tmp_path: Path):
    run = resumable_run(tmp_path, every=Every(epochs=1))
    run.add_event_handler(Events.EPOCH_STARTED(once=3), lambda engine: engine.terminate())
    run.train()
    again = resumable_run(tmp_path, every=Every(epochs=1))
    epochs: list[int] = []
    again.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: epochs.append(engine.state.epoch))
    again.train(resume="latest")
    assert epochs == [3, 4]
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


def test_a_preempted_run_saves_and_resumes(uninterrupted: Trainer, tmp_path: Path):
    run = trainer(
        RESUMABLE_CONFIG,
        model=regression_model(dropout=0.3),
        val_loader=loader(12, shuffle=False),
        handlers=[Checkpointer(tmp_path, every=Every(epochs=9)), EarlyStopping(patience=50)],
    )
    run.add_event_handler(
        Events.ITERATION_COMPLETED(once=17), lambda engine: engine.post(Events.PREEMPTED, Preempted(signal="SIGTERM"))
    )
    run.train()
    assert run.state.stop_reason == "SIGTERM was received"
    assert run.state.iteration == 17
    again = resumable_run(tmp_path)
    again.train(resume="latest")
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


def test_a_termination_between_a_batch_and_its_step_does_not_count_the_batch(uninterrupted: Trainer, tmp_path: Path):
    run = resumable_run(tmp_path, every=Every(epochs=9))
    run.handlers[0].detach()
    run.handlers[0].at_end = True
    run.handlers[0].attach(run)
    run.add_event_handler(Events.ITERATION_STARTED(once=17), lambda engine: engine.terminate())
    run.train()
    again = resumable_run(tmp_path)
    again.train(resume="latest")
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


@pytest.mark.slow
def test_resuming_a_finished_run_trains_nothing_more(tmp_path: Path):
    run = resumable_run(tmp_path)
    history = run.train()
    again = resumable_run(tmp_path)
    steps: list[int] = []
    again.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: steps.append(1))
    assert again.train(resume="latest") == history
    assert steps == []


@pytest.mark.slow
def test_a_finished_run_continues_to_a_larger_bound(tmp_path: Path):
    resumable_run(tmp_path, config={"schedule": None, "warmup_steps": 0}).train()
    again = resumable_run(tmp_path, config={"schedule": None, "warmup_steps": 0, "max_epochs": 6})
    again.train(resume="latest")
    assert (again.state.epoch, again.state.iteration) == (6, 60)


def test_resume_latest_starts_a_run_if_there_is_no_checkpoint(tmp_path: Path):
    run = resumable_run(tmp_path, config={"max_epochs": 2})
    run.train(resume="latest")
    assert run.state.iteration == 20


@pytest.mark.slow
def test_resume_takes_a_path(uninterrupted: Trainer, tmp_path: Path):
    cut_after(resumable_run(tmp_path), 12)
    path = sorted((tmp_path / "checkpoints").glob("000000004-*"))[0]
    again = resumable_run(tmp_path / "elsewhere")
    loaded: list[Any] = []

    @again.on(Events.CHECKPOINT_LOADED)
    def keep(engine: Trainer, event: Any) -> None:
        loaded.append(event.payload)

    again.train(resume=path)
    assert [(entry.path, entry.iteration) for entry in loaded] == [(path, 4)]
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


@pytest.mark.slow
def test_the_newest_checkpoint_is_skipped_if_damaged(uninterrupted: Trainer, tmp_path: Path):
    cut_after(resumable_run(tmp_path), 12)
    newest = sorted((tmp_path / "checkpoints").glob("0*"))[-1] / "state.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    again = resumable_run(tmp_path)
    again.train(resume="latest")
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


def test_weights_that_do_not_fit_are_listed_by_name(tmp_path: Path):
    run = trainer({}, handlers=[Checkpointer(tmp_path)])
    run.train()
    path = CheckpointManager(tmp_path / "checkpoints").get_latest()
    other = trainer({}, model=nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9)))
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(path)
    assert "shape: 0.weight is (8, 4) in the checkpoint, (9, 4) in the model" in str(caught.value)
    assert "unexpected: 4.weight (1, 8)" in str(caught.value)


@pytest.mark.slow
def test_a_changed_schedule_is_refused(tmp_path: Path):
    resumable_run(tmp_path).train()
    with pytest.raises(CheckpointError, match="total_steps"):
        resumable_run(tmp_path, config={"max_epochs": 9}).train(resume="latest")


def test_saving_by_hand_needs_one_checkpointer(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="exactly one Checkpointer"):
        trainer().save_checkpoint("mine")
    run = trainer(handlers=[Checkpointer(tmp_path)])
    run.train()
    path = run.save_checkpoint("mine", is_best=True)
    assert path.name == "000000010-mine"
    assert CheckpointManager(tmp_path / "checkpoints").get_best() == path


@pytest.mark.parametrize(("name", "iteration"), [("checkpoints/best", 4), ("best", 4), ("latest", 10), (".", 10)])
def test_a_checkpoint_may_be_named_by_what_it_is(tmp_path: Path, name: str, iteration: int):
    saver = Checkpointer(tmp_path, every=Every(iterations=4), keep_last=9)
    run = trainer(handlers=[saver])
    run.add_event_handler(Events.CHECKPOINT_SAVED(once=1), saver.manager.set_best, "000000004-checkpoint")
    run.train()
    path = tmp_path / name
    again = trainer()
    with suppress(CheckpointError):  # what was loaded is asserted below
        again.load_checkpoint(path)
    assert again.state.iteration == iteration
    saved = load_checkpoint(path)
    assert saved["counters"]["iteration"] == iteration
    load_weights(run.model, path)
    assert all(torch.equal(value, saved["model"][key]) for key, value in weights(run).items())


def test_a_folder_without_a_best_checkpoint_says_so(tmp_path: Path):
    run = trainer(handlers=[Checkpointer(tmp_path)])
    run.train()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* was saved as the best; name one, or 'latest'"):
        run.load_checkpoint(tmp_path / "checkpoints" / "best")


def test_a_missing_checkpoint_says_what_is_there(tmp_path: Path):
    run = trainer(handlers=[Checkpointer(tmp_path)])
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        run.train(resume=tmp_path / "checkpoints" / "000000123-x")
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        run.load_checkpoint(tmp_path / "nowhere" / "000000123-x")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lates", "lates: does not exist; pass a checkpoint's folder, .*mean 'latest'"),
        ("runs/a/bst", "runs/a/bst: does not exist; .*did you mean 'runs/a/best'"),
        ("runs/nowhere", "runs/nowhere: does not exist; .* or RUN/best$"),
        ("best", r"best: there is no checkpoint in \.; name the run folder, too, as RUN/checkpoints/best"),
        ("weights.pt", "weights.pt: is a file, and a checkpoint is a folder; pass a checkpoint's folder, "),
        ("empty", r"empty: no checkpoint there \(manifest.json is missing\); present: none; a checkpoint is a folder "),
    ],
)
def test_a_path_that_names_no_checkpoint_is_answered_with_the_remedy(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("weights.pt").write_bytes(b"weights")
    Path("empty").mkdir()
    run = trainer(handlers=[Checkpointer(tmp_path / "run")])
    with pytest.raises(CheckpointError, match=f"^{message}"):
        run.train(resume=given)


def test_a_misspelt_checkpoint_beside_others_is_answered_with_the_nearest(tmp_path: Path):
    run = trainer(handlers=[Checkpointer(tmp_path)])
    run.train()
    right = run.save_checkpoint("mine")
    with pytest.raises(CheckpointError, match=f"did you mean '{right.name}'"):
        run.load_checkpoint(right.with_name(f"{right.name}d"))


def test_a_checkpoint_that_does_not_fit_the_model_is_named(tmp_path: Path):
    run = trainer(handlers=[Checkpointer(tmp_path)])
    run.train()
    path = run.save_checkpoint("mine")
    other = trainer(model=torch.nn.Linear(4, 1))
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: the checkpoint's weights do not fit the model: ")
    with pytest.raises(CheckpointError) as caught:
        other.train(resume=tmp_path)
    assert str(caught.value).startswith(f"{path}: the checkpoint's weights do not fit the model: ")
    assert len([line for line in traceback.format_exception(caught.value) if "CheckpointError: " in line]) == 1


def test_ignites_state_dict_stays_three_keys():
    assert set(trainer().state_dict()) == {"epoch_length", "iteration", "max_epochs"}


def warnings_starting(logs: list[Any], start: str) -> list[Any]:
    return [entry["differences"] for entry in logs if entry["event"].startswith(start)]


STEADY = {"schedule": "constant", "warmup_steps": 0}  # suits a run of any length


def test_a_changed_environment_is_reported(tmp_path: Path):
    resumable_run(tmp_path, config={**STEADY, "max_epochs": 1}).train()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with structlog.testing.capture_logs() as logs:
            resumable_run(tmp_path, config={**STEADY, "max_epochs": 2}).train(resume="latest")
    finally:
        torch.set_num_threads(threads)
    assert warnings_starting(logs, "the environment differs") == [[f"threads: {threads} -> {threads + 1}"]]


def test_changed_settings_are_reported_unless_the_run_only_gets_longer(tmp_path: Path):
    resumable_run(tmp_path, config={**STEADY, "max_epochs": 1}).train()
    with structlog.testing.capture_logs() as logs:
        resumable_run(tmp_path, config={**STEADY, "max_epochs": 2}).train(resume="latest")
    assert not warnings_starting(logs, "the run resumes with other settings")
    assert not warnings_starting(logs, "the environment differs")
    with structlog.testing.capture_logs() as logs:
        resumable_run(tmp_path, config={**STEADY, "max_epochs": 3, "clip_grad_norm": 2.0}).train(resume="latest")
    assert warnings_starting(logs, "the run resumes with other settings") == [["clip_grad_norm: 1.0 -> 2.0"]]


@pytest.mark.parametrize(("before", "now"), [(7, 9), (7, 0), (None, 9)])
def test_another_configured_seed_is_reported_as_one_that_is_not_used(before: int | None, now: int, tmp_path: Path):
    cut_after(resumable_run(tmp_path / "a", config={"seed": before}), 6)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    torch.manual_seed(999)
    as_before, other = (
        resumable_run(tmp_path / name, config={"seed": seed}) for name, seed in (("a", before), ("b", now))
    )
    as_before.train(resume="latest")
    with structlog.testing.capture_logs() as logs:
        other.train(resume="latest")
    assert all(torch.equal(weights(as_before)[name], value) for name, value in weights(other).items())
    found = [each for each in logs if each["log_level"] == "warning"]
    assert [(each.get("checkpoint"), each.get("configured")) for each in found] == [(as_before.data.seed, now)], found
    assert "continues with the seed of its checkpoint" in found[0]["event"]
    assert "start a new run" in found[0]["event"]


@pytest.mark.parametrize("now", [7, None])
def test_a_resume_with_the_same_seed_or_none_is_not_reported(now: int | None, tmp_path: Path):
    cut_after(resumable_run(tmp_path), 6)
    with structlog.testing.capture_logs() as logs:
        resumable_run(tmp_path, config={"seed": now}).train(resume="latest")
    assert [each for each in logs if each["log_level"] == "warning"] == []


class Counting:
    """Subscribes its own methods and keeps progress, without being in a list of handlers."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def note(self, engine: Trainer) -> None:
        self.losses.append(engine.state.output.loss.item())

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [3, 10, 14])
def test_objects_subscribed_by_their_own_methods_resume_too(iteration: int, tmp_path: Path):
    def listening(folder: str) -> tuple[Trainer, Counting, list[float]]:
        run = resumable_run(tmp_path / folder, config={"schedule": None, "warmup_steps": 0, "max_epochs": 2})
        counting, averages = Counting(), []
        run.add_event_handler(Events.ITERATION_COMPLETED, counting.note)
        Average(output_transform=lambda output: output["loss"].item()).attach(run, "average")
        run.add_event_handler(Events.EPOCH_COMPLETED, lambda e: averages.append(e.state.metrics["average"]), phase=2)
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=2, gamma=0.5)
        run.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, scheduler.step)
        return run, counting, averages

    whole, everything, expected = listening("whole")
    whole.train()
    cut, _, before = listening("cut")
    cut_after(cut, iteration)
    again, counting, after = listening("cut")
    again.train(resume="latest")
    assert counting.losses == everything.losses
    assert before + after == expected
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(again).items())


def test_other_arguments_of_the_strategy_and_of_rollouts_are_reported_once_they_differ(tmp_path: Path):
    def build(top_p: float, kl_coef: float, iterations: int) -> Trainer:
        rollouts = TextRollouts(
            [[1], [2, 2]], lambda completions: [1.0 * len(each) for each in completions], max_new_tokens=3,
            prompts_per_rollout=2, sampling=Sampling(top_p=top_p),
        )  # fmt: skip
        return trainer(
            {"max_iterations": iterations}, model=Tokens(8), train_loader=rollouts,
            strategy=GRPOStrategy(2, kl_coef=kl_coef), handlers=[Checkpointer(tmp_path)],
        )  # fmt: skip

    build(0.9, 0.0, 1).train()
    with structlog.testing.capture_logs() as logs:
        build(0.9, 0.0, 2).train(resume="latest")
    assert not warnings_starting(logs, "the run resumes with other arguments")
    with structlog.testing.capture_logs() as logs:
        build(0.5, 0.1, 3).train(resume="latest")
    (differences,) = warnings_starting(logs, "the run resumes with other arguments")
    assert [each.partition(":")[0] for each in differences] == ["strategy.kl_coef", "rollouts.sampling"]
    assert "top_p=0.5" in differences[1]


@pytest.mark.parametrize("skip_epoch_completed", [False, True])
@pytest.mark.parametrize(
    ("cut", "config"),
    [
        (14, {}),
        pytest.param(20, {}, marks=pytest.mark.slow),  # after the epoch's last batch
        (34, {}),  # in the run's last epoch
        (14, {"max_epochs": None, "max_iterations": 14}),
        pytest.param(14, {"max_epochs": None, "max_iterations": 30}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_the_iteration_that_ends_its_epoch_resumes_with_the_next_one(
    cut: int, config: dict[str, Any], skip_epoch_completed: bool, tmp_path: Path
):
    moments = Events.ITERATION_COMPLETED | Events.TERMINATE_SINGLE_EPOCH | Events.EPOCH_COMPLETED
    moments |= Events.EPOCH_STARTED | Events.GET_BATCH_STARTED | Events.COMPLETED | Events.TERMINATE

    def make(folder: Path) -> tuple[Trainer, list[Any]]:
        seen: list[Any] = []
        run = resumable_run(folder, config=config)
        ends = Events.ITERATION_COMPLETED(once=cut)
        run.add_event_handler(ends, lambda engine: engine.terminate_epoch(skip_epoch_completed=skip_epoch_completed))
        run.add_event_handler(
            moments,
            lambda engine, event: seen.append((event.type, event.payload, engine.state.iteration, engine.state.epoch)),
        )
        return run, seen

    live, expected = make(tmp_path / "live")
    live.train()
    start = max(
        number for number, (event, _, at, _) in enumerate(expected) if (event, at) == ("iteration_completed", cut)
    )
    resumed, seen = make(tmp_path / "resumed")
    resumed.load_checkpoint(next((tmp_path / "live" / "checkpoints").glob(f"{cut:09}-*")))
    Checkpointer(tmp_path / "again").save(resumed)  # it still ends its epoch
    resumed.train()
    assert seen[1:] == expected[start + 1 :]  # after another EPOCH_STARTED
    assert all(torch.equal(weights(live)[name], value) for name, value in weights(resumed).items())
    again, seen_again = make(tmp_path / "third")
    again.train(resume=tmp_path / "again")
    assert seen_again == seen


def test_a_save_between_a_batch_and_its_step_does_not_replace_the_one_after_the_step(tmp_path: Path):
    def make() -> Trainer:
        saver = Checkpointer(tmp_path, every=Every(iterations=2), keep_last=100)
        return trainer({"max_iterations": 8}, model=regression_model(), handlers=[saver])

    def steps() -> list[int]:
        return [int(path.name.partition("-")[0]) for path in sorted((tmp_path / "checkpoints").glob("0*"))]

    run = make()
    run.add_event_handler(
        Events.ITERATION_STARTED(once=8), lambda engine: engine.post(Events.PREEMPTED, Preempted(signal="SIGTERM"))
    )
    announced: list[int] = []
    run.add_event_handler(Events.CHECKPOINT_SAVED, lambda engine, event: announced.append(event.payload.iteration))
    run.train()
    assert run.state.iteration == 8  # which was not trained
    assert steps() == announced == [2, 4, 6, 7]
    again = make()
    again.train(resume="latest")
    assert steps() == [2, 4, 6, 7, 8]
