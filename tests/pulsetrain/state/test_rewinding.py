"""Rewinding to a checkpoint: to which one, which batches are left out, and how such runs resume and verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from pulsetrain import Trainer, verify
from pulsetrain.engine import Event, Events, Every, Phase
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.handlers import Checkpointer, CSVLogger, EventRecorder, NaNGuard
from tests.support.runs import guarded_data, guarded_run


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [value.clone() for value in trainer.model.parameters()]


def same(one: Trainer, other: Trainer) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


def saver(folder: Path, every: int = 3, keep_last: int = 20, **options: Any) -> Checkpointer:
    return Checkpointer(folder, every=Every(iterations=every), keep_last=keep_last, **options)


def going_back(trainer: Trainer, *when: tuple[int, int, int]) -> Trainer:
    """Rewinds once per entry: at an iteration, leaving out the batches from the first to the last given."""
    left = list(when)

    def act(engine: Any) -> None:
        if left and engine.state.iteration == left[0][0]:
            engine.rewind(*left.pop(0)[1:], "requested")

    trainer.add_event_handler(Events.ITERATION_COMPLETED, act)
    return trainer


def plain(**settings: Any) -> Trainer:
    trainer = guarded_run(**settings)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_it_goes_back_twice_past_what_it_left_out_before(tmp_path: Path, background: bool) -> None:
    trainer = going_back(guarded_run(saver(tmp_path, background=background), max_epochs=2), (16, 14, 15), (18, 17, 17))
    trainer.train()
    assert trainer.data.left_out_since == [(14, 15), (19, 19)]
    assert trainer.rewinds == 2
    assert same(trainer, plain(max_epochs=2, skip_batches=[(14, 15), (19, 19)]))


def test_events_after_the_checkpoint_are_superseded(tmp_path: Path) -> None:
    checkpoints = saver(tmp_path)
    trainer = going_back(guarded_run(checkpoints), (11, 8, 8))
    kept: list[list[str]] = []
    trainer.add_event_handler(
        Events.STARTED, lambda: kept.append([place.name for place in checkpoints.manager.valid()])
    )
    trainer.train()
    assert kept[1] == ["000000003-checkpoint", "000000006-checkpoint", "000000006-checkpoint~4"]


def test_a_run_killed_right_after_it_resumes_with_it(tmp_path: Path) -> None:
    trainer = going_back(guarded_run(saver(tmp_path)), (11, 8, 8))

    @trainer.on(Events.ITERATION_COMPLETED)
    def fail(engine: Any) -> None:
        if engine.rewinds and engine.state.iteration == 8:
            raise RuntimeError("the power went")

    with pytest.raises(RuntimeError, match="the power went"):
        trainer.train()
    again = guarded_run(saver(tmp_path))
    again.train(resume="latest")
    assert (again.rewinds, again.data.left_out_since) == (1, [(8, 8)])
    assert same(again, plain(skip_batches=[(8, 8)]))


@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.PERSIST])
def test_a_run_killed_inside_of_it_resumes_with_every_row_of_its_table(tmp_path: Path, phase: Phase) -> None:
    settings = {"log_every_n_steps": 1}
    trainer = going_back(guarded_run(saver(tmp_path), CSVLogger(tmp_path), **settings), (11, 8, 8))

    @trainer.on(Events.CHECKPOINT_LOADED, phase=phase)
    def fail() -> None:
        raise RuntimeError("the power went")

    with pytest.raises(RuntimeError, match="the power went"):
        trainer.train()
    again = guarded_run(saver(tmp_path), CSVLogger(tmp_path), **settings)
    with structlog.testing.capture_logs() as logs:
        again.train(resume="latest")
    assert not [line for line in logs if line["log_level"] == "warning"]
    iterations = [line.partition(",")[0] for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert iterations == [str(number) for number in range(1, 17)]


def test_batches_keep_their_numbers_if_later_ones_are_left_out(tmp_path: Path) -> None:
    trainer = going_back(guarded_run(saver(tmp_path), skip_batches=[(6, 7)]), (9, 4, 4))
    trainer.train()
    assert trainer.data.left_out_since == [(4, 4)]
    assert same(trainer, plain(skip_batches=[(4, 4), (6, 7)]))


def test_numbers_survive_a_resume(tmp_path: Path) -> None:
    whole = going_back(guarded_run(saver(tmp_path / "a"), skip_batches=[(2, 3)]), (12, 10, 10))
    whole.train()
    parts = guarded_run(saver(tmp_path / "b"), skip_batches=[(2, 3)], max_iterations=6, max_epochs=None)
    parts.train()
    again = going_back(guarded_run(saver(tmp_path / "b"), skip_batches=[(2, 3)]), (12, 10, 10))
    again.train(resume="latest")
    assert again.data.left_out_since == whole.data.left_out_since == [(12, 12)]
    assert same(again, whole)


def test_a_save_at_the_same_point_does_not_delete_the_checkpoint_to_rewind_to(tmp_path: Path) -> None:
    trainer = going_back(guarded_run(saver(tmp_path, every=4, keep_last=1)), (8, 7, 7))
    trainer.train()
    assert trainer.rewinds == 1
    assert same(trainer, plain(skip_batches=[(7, 7)]))


def test_a_checkpointer_that_keeps_too_few_is_warned_about(tmp_path: Path) -> None:
    trainer = guarded_run(saver(tmp_path, every=2, keep_last=1))

    @trainer.on(Events.ITERATION_COMPLETED(once=9))
    def back(engine: Any) -> None:
        engine.rewind(5, 5, "requested")

    with pytest.raises(CheckpointError, match=r"kept was made after iteration 8; look more often, or raise keep_last"):
        trainer.train()


class TestARunThatEnds:
    def test_a_finished_run_does_not_go_back(self, tmp_path: Path) -> None:
        trainer = guarded_run(saver(tmp_path), NaNGuard("rewind", Every(iterations=100)), dataset=guarded_data((29,)))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=10), lambda engine: engine.terminate(reason="enough"))
        with structlog.testing.capture_logs() as logs:
            trainer.train()
        assert (trainer.state.iteration, trainer.state.stop_reason, trainer.rewinds) == (10, "enough", 0)
        assert any("does not rewind" in line["event"] for line in logs)

    def test_a_termination_for_another_reason_afterwards_ends_the_run(self, tmp_path: Path) -> None:
        trainer = going_back(guarded_run(saver(tmp_path)), (8, 7, 7))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=8), lambda e: e.terminate(reason="enough"))
        trainer.train()
        assert (trainer.state.iteration, trainer.state.stop_reason, trainer.rewinds) == (8, "enough", 0)

    def test_a_rewind_at_the_bound_still_goes_back(self, tmp_path: Path) -> None:
        trainer = guarded_run(saver(tmp_path), NaNGuard("rewind", Every(iterations=100)), dataset=guarded_data((29,)))
        trainer.train()
        assert (trainer.rewinds, trainer.state.iteration) == (1, 16)


def test_run_alone_just_ends_and_a_later_train_does_not_go_back(tmp_path: Path) -> None:
    trainer = going_back(guarded_run(saver(tmp_path)), (8, 7, 7))
    trainer.run(trainer.train_loader, max_epochs=1)
    assert trainer.state.iteration == 8
    trainer.train(resume="latest")
    assert (trainer.state.iteration, trainer.rewinds) == (16, 0)


def test_an_update_that_was_to_be_skipped_when_a_handler_failed_is_forgotten() -> None:
    trainer = guarded_run()

    @trainer.on(Events.GRADIENTS_READY(once=3))
    def fail(engine: Any) -> None:
        engine.skip_update(torch.tensor(True))
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        trainer.train()
    before = weights(trainer)
    trainer.add_event_handler(
        Events.OPTIMIZER_STEP_COMPLETED, lambda engine: engine.terminate(reason="one update is enough")
    )
    trainer.train()
    assert not all(map(torch.equal, before, weights(trainer)))


def test_without_a_checkpointer_it_says_so() -> None:
    with pytest.raises(ConfigurationError, match="needs exactly one Checkpointer"):
        going_back(guarded_run(), (8, 7, 7)).train()


def test_the_table_and_the_log_hold_one_run_and_the_proof_holds(tmp_path: Path) -> None:
    def build(folder: Path = tmp_path) -> Trainer:
        guard = NaNGuard("rewind", Every(iterations=3))
        handlers = [EventRecorder(folder), guard, CSVLogger(folder), saver(folder, every=2)]
        return guarded_run(*handlers, dataset=guarded_data((13,)), log_every_n_steps=2)

    trainer = build()
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    assert trainer.rewinds == 1
    assert not [line for line in logs if "resumed" in line["event"]]
    table = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert [int(row[0]) for row in table] == [2, 4, 6, 8, 10, 12, 14, 16]
    found = verify(tmp_path, build)
    assert found, str(found)
    assert found.end == 16
    assert verify(tmp_path, build, from_iteration=9)


@pytest.mark.parametrize(
    "bad_rows",
    [(13, 29, 45, 57), *(pytest.param(rows, marks=pytest.mark.slow) for rows in ((13, 14, 29, 45), (29, 45, 57, 61)))],
)
@pytest.mark.parametrize("start", [None, 6])
def test_a_run_that_ends_since_it_was_rewound_too_often_is_reproduced(
    bad_rows: tuple[int, ...], start: int | None, tmp_path: Path
) -> None:
    def build(folder: Path = tmp_path) -> Trainer:
        guard = NaNGuard("rewind", Every(iterations=2), max_rewinds=2)
        return guarded_run(
            EventRecorder(folder), guard, saver(folder, every=2), dataset=guarded_data(bad_rows), max_epochs=2
        )

    trainer = build()
    trainer.train()
    assert trainer.rewinds == 2
    assert "rewound 2 times already" in str(trainer.state.stop_reason)
    found = verify(tmp_path, build, from_iteration=start)
    assert found, str(found)
    assert (found.start < 6, found.end) == (True, trainer.state.iteration)


def test_a_run_that_ends_since_it_has_no_checkpoint_to_return_to_is_reproduced(tmp_path: Path) -> None:
    def build(folder: Path = tmp_path) -> Trainer:
        guard = NaNGuard("rewind", Every(iterations=2))
        return guarded_run(EventRecorder(folder), guard, saver(folder, every=1), dataset=guarded_data((1,)))

    trainer = build()
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    assert trainer.state.iteration == 2
    (reason,) = [line["reason"] for line in logs if line["event"] == "the run cannot return to a checkpoint, and ends"]
    assert "the oldest of those that are kept was made after iteration 1" in reason  # a rerun keeps none
    found = verify(tmp_path, build)
    assert found, str(found)


def test_a_list_of_batches_goes_back_too(tmp_path: Path) -> None:
    inputs, targets = guarded_data().tensors
    batches = list(zip(inputs.split(4), targets.split(4), strict=True))

    def begin(*handlers: Any, **settings: Any) -> Trainer:
        trainer = guarded_run(*handlers, **settings)
        trainer.train_loader = list(batches)
        return trainer

    trainer = going_back(begin(saver(tmp_path)), (8, 7, 7))
    trainer.train()
    other = begin(skip_batches=[(7, 7)])
    other.train()
    assert same(trainer, other)


def test_a_deleted_checkpoints_name_is_never_used_again_and_the_best_is_that_of_the_ranking(tmp_path: Path) -> None:
    """After two returns to iteration 6, each checkpoint has a name of its own, and `get_best` the ranking's first."""
    checkpoints = Checkpointer(tmp_path, every=Every(iterations=3), keep_last=9, metric="val/loss", mode="min")
    trainer = guarded_run(checkpoints, validates=True, validate_every=Every(iterations=2))
    going_back(trainer, (11, 8, 8), (14, 8, 8))
    names: list[str] = []
    best: list[bool] = []

    @trainer.on(Events.CHECKPOINT_SAVED)
    def note(engine: Trainer, event: Event) -> None:
        names.append(event.payload.path.name)
        found = checkpoints.manager.get_best()
        best.append(
            (found is None) == (not checkpoints.best) and (found is None or found.name == checkpoints.best[0][1])
        )

    trainer.train()
    assert len(names) > 6
    assert len(set(names)) == len(names)
    assert all(best)


@pytest.mark.parametrize("added_at", [8, 10])
def test_parameters_that_a_handler_adds_to_the_optimizer_are_those_of_the_checkpoint(
    added_at: int, tmp_path: Path
) -> None:
    def make(**settings: Any) -> Trainer:
        trainer = guarded_run(*settings.pop("handlers", ()), **settings)
        model, optimizer = trainer.model, trainer.optimizer
        late = list(model[-1].parameters())
        del optimizer.param_groups[0]["params"][-len(late) :]

        # added after the checkpoint of iteration 9 it is added again, before it the checkpoint has it
        @trainer.on(Events.ITERATION_COMPLETED)
        def add(engine: Any) -> None:
            if engine.state.iteration == added_at and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": late, "lr": 0.02})

        return trainer

    trainer = going_back(make(handlers=[saver(tmp_path)]), (12, 11, 11))
    trainer.train()
    assert trainer.rewinds == 1
    whole = make(skip_batches=[(11, 11)])
    whole.train()
    assert len(whole.optimizer.param_groups) == 2
    assert same(trainer, whole)
