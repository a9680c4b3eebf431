"""Rollouts in a Trainer's run: replayed, started over, rewound, skipped, trained by the epoch, and rejected."""

from __future__ import annotations

import copy
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pulsetrain import Trainer
from pulsetrain.cli import main
from pulsetrain.engine import Events, Every
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.recording import EventLog, diff
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import Checkpointer, EarlyStopping, EventRecorder, JSONLinesLogger, NaNGuard
from tests.support.runs_backends import programs_kept, saved, whole_state
from tests.support.runs_strategies import (
    CARTPOLE,
    COPIED,
    GROUPS,
    JAX,
    PRETRAIN,
    TEXTS,
    TORCH,
    Task,
    detach_recorder,
    differences,
    language_model,
    logged_steps,
    make,
    on_each,
)

ROLLOUT = (Events.ROLLOUT_STARTED, Events.REWARDS_COMPUTED, Events.ROLLOUT_COMPLETED, Events.POLICY_UPDATED)
ON_TORCH = [TORCH]


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    with programs_kept():
        yield


# ------------------------------------------------------------------------------------------------------------- replays


class Recorder:
    """The payloads that a handler gets at the events of rollouts."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def attach(self, engine: Any) -> Recorder:
        for event in ROLLOUT:
            engine.add_event_handler(event, self._receive)
        engine.add_event_handler(Events.ROLLOUT_COMPLETED(every=2), self._receive_every_other)
        return self

    def _receive(self, engine: Any, event: Any) -> None:
        self.found.append((event.type, event.iteration, repr(event.payload), engine.state.rollout_round))

    def _receive_every_other(self, engine: Any) -> None:
        self.found.append(("every other", engine.state.rollout_round, dict(engine.state.metrics)))


@pytest.mark.slow
@on_each([CARTPOLE, TEXTS, GROUPS, PRETRAIN], ON_TORCH)
def test_handlers_find_in_a_replay_what_they_found_in_the_run(task: Task, on: str, tmp_path: Path) -> None:
    def stopping() -> EarlyStopping:
        # no value is enough better than the first: the second evaluation ends the run
        return EarlyStopping(metric=task.metric, patience=1, min_delta=1000.0, mode="max" if task.acts else "min")

    mine, recorded = stopping(), Recorder()
    live = make(task, on, tmp_path / "run", JSONLinesLogger(tmp_path / "live"), recorded, mine)
    live.train()
    # before the first batch of the second rollout is learnt from; at the end of the second epoch
    assert live.state.iteration == {CARTPOLE: 4, TEXTS: 2, GROUPS: 4, PRETRAIN: 10}[task]
    assert (live.state.stop_reason or "").startswith(f"early stopping: {task.metric} has not improved")
    stopped = Replay(tmp_path / "run", obey_terminate=True)
    stopping().attach(stopped)
    assert stopped.run().stop_reason == live.state.stop_reason
    assert stopped.state.iteration == live.state.iteration
    replay, again = Replay(tmp_path / "run"), Recorder()
    again.attach(replay)
    JSONLinesLogger(tmp_path / "replay").attach(replay)
    replay.run()
    assert again.found == recorded.found
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("live", "replay")]
    assert [json.loads(line) for line in lines[1]] == [json.loads(line) for line in lines[0]]


@pytest.mark.slow
@on_each([CARTPOLE, TEXTS, GROUPS], ON_TORCH)
def test_each_event_of_a_rollout_is_in_the_log_once_and_in_order(task: Task, on: str, tmp_path: Path) -> None:
    recorded = Recorder()
    make(task, on, tmp_path, recorded).train()
    events = list(EventLog(tmp_path).read(event={event.value for event in ROLLOUT}))
    replayed = Recorder()
    replay = Replay(tmp_path)
    replayed.attach(replay)
    replay.run()
    assert replayed.found == recorded.found
    assert [(each.event, each.iteration) for each in events] == [
        each[:2] for each in recorded.found if each[0] != "every other"
    ]
    names = [each.event for each in events]
    whole_rounds = len(names) // 4
    assert names == [event.value for event in ROLLOUT] * whole_rounds
    assert whole_rounds >= 3


# --------------------------------------------------------------------------------------- started over, resumed, rewound


def without_a_folder(task: Task, folder: Path) -> Trainer:
    """A run that writes no files and can therefore start over."""
    trainer = make(task, TORCH, folder)
    for handler in trainer.handlers:
        if isinstance(handler, (Checkpointer, EventRecorder)):
            handler.detach()
    return trainer


@pytest.mark.slow
@on_each([CARTPOLE, TEXTS], ON_TORCH)
def test_a_second_train_starts_over(task: Task, on: str, tmp_path: Path) -> None:
    """Rollouts, prompts, episodes and the coefficient too; weights and optimizer stay as the first run left them."""
    twice, other = without_a_folder(task, tmp_path / "twice"), without_a_folder(task, tmp_path / "other")
    twice.train()
    learnt = copy.deepcopy([twice.model.state_dict(), twice.optimizer.state_dict()])
    twice.train()
    other.model.load_state_dict(learnt[0])
    other.optimizer.load_state_dict(learnt[1])
    other.train()
    assert twice.state.rollout_round == twice.train_loader.rollouts >= 3
    assert differences(twice, other) == set()


@pytest.mark.slow
@on_each([CARTPOLE, TEXTS], ON_TORCH)
def test_a_run_continues_after_its_termination_with_a_new_rollout(task: Task, on: str, tmp_path: Path) -> None:
    """And resuming after that gives the same result."""
    run = make(task, on, tmp_path / "run")
    run.add_event_handler(Events.ITERATION_COMPLETED(once=5), run.terminate)
    run.train()
    rollouts = run.train_loader.rollouts
    run.train()
    begun = [event.iteration for event in EventLog(tmp_path / "run").read(event="rollout_started")]
    assert begun[rollouts] == 5
    again = make(task, on, tmp_path / "again")
    again.train(resume=saved(tmp_path / "run", 6))
    assert differences(again, run) == set()


class Spoilt:
    """Makes the loss of one iteration NaN, the first time."""

    def __init__(self, strategy: Any, at: int) -> None:
        self.strategy, self.at, self.spoils = strategy, at, False
        self.loss = strategy.compute_loss
        strategy.compute_loss = self.compute_loss

    def attach(self, trainer: Any) -> None:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=self.at), self._begin)

    def _begin(self) -> None:
        self.spoils = True

    def compute_loss(self, outputs: Any, batch: Any) -> Any:
        spoils, self.spoils = self.spoils, False
        return self.loss(outputs, batch) * (float("nan") if spoils else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("at", [6, 8])
@on_each([CARTPOLE, GROUPS], ON_TORCH)
def test_a_run_rewinds_past_an_anomaly_that_a_guard_found(task: Task, on: str, at: int, tmp_path: Path) -> None:
    """Inside a rollout and past its last batch: it still ends."""
    strategy = task.strategy()
    handlers = [Spoilt(strategy, at), NaNGuard("rewind", Every(iterations=1))]
    back = make(task, on, tmp_path / "back", *handlers, strategy=strategy, every=Every(iterations=2), accumulate=1)
    back.train()
    assert (back.rewinds, back.data.left_out_since) == (1, [(at, at)])
    left_out = make(task, on, tmp_path / "left out", skip_batches=[(at, at)], accumulate=1)
    left_out.train()
    assert {path for path in differences(back, left_out) if path.split("/")[0] in ("model", "optimizer")} == set()
    begun = [event.iteration for event in EventLog(tmp_path / "left out").read(event="rollout_started")]
    assert begun == [0, 4, 7, 11]
    updated = [event.iteration for event in EventLog(tmp_path / "left out").read(event="policy_updated")]
    assert updated == [4, 7, 11]
    again = make(task, on, tmp_path / "again", skip_batches=[(at, at)], accumulate=1)
    again.train(resume=saved(tmp_path / "left out", 7))
    assert differences(again, left_out) == set()


@pytest.mark.slow
@on_each([CARTPOLE, TEXTS], ON_TORCH)
def test_training_epoch_by_epoch_resumes_exactly_as_well(task: Task, on: str, tmp_path: Path) -> None:
    by_epochs = make(task, on, tmp_path / "by epochs")
    state = by_epochs.train_epoch()
    for _ in range(2):
        state = by_epochs.train_epoch(model_state=state)
    assert by_epochs.state.iteration == 12
    again = make(task, on, tmp_path / "again")
    again.load_checkpoint(saved(tmp_path / "by epochs", 6))
    again.train_epoch()
    assert again.state.iteration == 8
    again.train_epoch()
    assert differences(again, by_epochs) == set()


def test_nothing_is_saved_inside_of_a_rollout(tmp_path: Path) -> None:
    for event in ROLLOUT[:3]:
        run = make(TEXTS, TORCH, tmp_path / event.name, every=Every(epochs=9))
        run.add_event_handler(event, lambda trainer: trainer.save_checkpoint("best"))
        with pytest.raises(RuntimeError, match=r"no run could resume exactly; save on ITERATION_COMPLETED"):
            run.train()
        assert not run.is_stepping
    run = make(TEXTS, TORCH, tmp_path / "updated", every=Every(epochs=9))
    places: list[Any] = []
    run.add_event_handler(Events.POLICY_UPDATED(once=1), lambda trainer: places.append(trainer.save_checkpoint("best")))
    run.train()
    again = make(TEXTS, TORCH, tmp_path / "again", every=Every(epochs=9))
    again.train(resume=places[0])
    assert (
        logged_steps(tmp_path / "again") == logged_steps(tmp_path / "updated")[-len(logged_steps(tmp_path / "again")) :]
    )
    assert {path for path in differences(again, run) if path.split("/")[0] in ("model", "optimizer", "rng")} == set()


# -------------------------------------------------------------------------------------------------- what a resume needs


@pytest.mark.slow
@on_each([CARTPOLE, TEXTS], ON_TORCH)
def test_a_resume_draws_by_the_seed_that_the_run_began_with(task: Task, on: str, tmp_path: Path) -> None:
    """Not by that of the process that resumes."""
    run = make(task, on, tmp_path, seed=None)
    run.train()
    detach_recorder(run)
    again = make(task, on, tmp_path / "again", seed=77)
    assert again.seed != run.seed
    again.train(resume=saved(tmp_path, 5))
    assert again.seed == run.seed
    assert differences(again, run) == {"made_with/settings/seed"}


@on_each([COPIED, GROUPS], [TORCH, JAX])
def test_a_changed_reference_is_rejected(task: Task, on: str, tmp_path: Path) -> None:
    place = make(task, on, tmp_path / "run").save_checkpoint()
    make(task, on, tmp_path / "same").load_checkpoint(place)
    if on == JAX:
        net, weights = task.jax_model()
        model: Any = (net, {**weights, "head": weights["head"] * np.float32(1.5)})
    else:
        model = language_model()
        with torch.no_grad():
            model.head.weight.mul_(1.5)
    other = make(task, on, tmp_path / "other", model=model)
    before = whole_state(other)
    with pytest.raises(CheckpointError, match=rf": {type(other.strategy).__name__}: the reference model has other"):
        other.load_checkpoint(place)
    assert whole_state(other) == before


# ------------------------------------------------------------------------------------------------------ from a config

PARTS = """
    from pulsetrain.engine.rollouts import EnvironmentRollouts
    from tests.support.runs_strategies import ActorCritic

    def cartpole(environments: int = 2) -> EnvironmentRollouts:
        return EnvironmentRollouts("CartPole-v1", environments=environments, steps=16)
"""
CONFIG = {
    "model": "tests.support.runs_strategies.ActorCritic",
    "data": {"class_path": "parts_of_rollouts.cartpole", "init_args": {"environments": 2}},
    "strategy": {"class_path": "PPOStrategy", "init_args": {"minibatch_size": 16, "minibatch_epochs": 2}},
    "training": {"max_epochs": 3, "learning_rate": 0.02, "seed": 3, "device": "cpu", "log_every_n_steps": 2},
    "handlers": [
        "EventRecorder",
        {"class_path": "Checkpointer", "init_args": {"every": {"iterations": 3}, "keep_last": 20}},
    ],
}


@pytest.mark.slow
def test_a_configuration_makes_a_run_of_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    (tmp_path / "parts_of_rollouts.py").write_text(textwrap.dedent(PARTS))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        assert main(["train", "config.yaml", "--run", "a"]) == 0
        assert main(["train", "config.yaml", "--run", "b", "--training.max_epochs", "1"]) == 0
        assert main(["train", "config.yaml", "--run", "b", "--resume", "latest"]) == 0
        assert not diff(tmp_path / "a", tmp_path / "b")
        assert [event.iteration for event in EventLog(tmp_path / "b").read(event="rollout_started")] == [0, 4, 8]
        assert main(["verify", "a", "--from", "6"]) == 0
        assert "iterations 4 to 12: reproduced" in capsys.readouterr().out
    finally:
        sys.modules.pop("parts_of_rollouts", None)
