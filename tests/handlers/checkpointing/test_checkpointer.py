"""When the Checkpointer saves, which checkpoint it calls the best, and what a failed save costs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from pulsetrain.engine import (
    CheckpointError,
    ConfigurationError,
    Engine,
    Events,
    Every,
    MetricNotFoundError,
    Preempted,
    TorchBackend,
)
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.events.payloads import CheckpointLoaded
from pulsetrain.handlers import Checkpointer


class Trainer(Engine):
    """An engine with a state to save, and a validation that reports the given values."""

    def __init__(self, values: list[float] | None = None) -> None:
        super().__init__(lambda engine, batch: None, name="trainer")
        self.handlers: list[Any] = []
        self.values = iter(values or [])
        if values is not None:
            self.add_event_handler(Events.EPOCH_COMPLETED, self.validate, phase=0)

    def validate(self) -> None:
        self.state.metrics["val/loss"] = next(self.values)
        self.fire(Events.VALIDATION_STARTED)

    def checkpoint_state(self) -> dict[str, Any]:
        return {"iteration": self.state.iteration, "handlers": [handler.state_dict() for handler in self.handlers]}


class Run(Trainer):
    """An engine with the attributes of a training run that a Checkpointer needs."""

    is_resuming = is_stepping = is_rewinding = False
    backend = TorchBackend("cpu")

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(trained=self.state.iteration)

    def files_to_sync(self) -> list[Path]:
        return []


def saved(handler: Checkpointer) -> list[int]:
    return [int(path.name.split("-")[0]) for path in handler.manager.valid()]


def test_it_saves_by_its_cadences_and_once_where_they_meet(tmp_path: Path):
    engine = Trainer()
    handler = Checkpointer(tmp_path, every=Every(iterations=2) | Every(epochs=1), keep_last=9).attach(engine)
    engine.run(range(4), max_epochs=2)
    assert saved(handler) == [2, 4, 6, 8]


def test_the_end_of_a_run_is_saved_too_by_default(tmp_path: Path):
    for at_end, expected in ((True, [3]), (False, [])):
        engine = Trainer()
        handler = Checkpointer(tmp_path / str(at_end), every=Every(epochs=9), at_end=at_end).attach(engine)
        engine.run(range(3))
        assert saved(handler) == expected


def test_a_preemption_is_saved_at_the_safe_point(tmp_path: Path):
    engine = Trainer()
    handler = Checkpointer(tmp_path, every=Every(epochs=9), at_end=True).attach(engine)
    engine.add_event_handler(Events.PREEMPTED, lambda: engine.terminate(skip_completed=True))
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=5), lambda: engine.post(Events.PREEMPTED, Preempted(signal="SIGTERM"))
    )
    engine.run(range(9))
    assert saved(handler) == [5]


def test_the_best_is_kept_and_pointed_to(tmp_path: Path):
    engine = Trainer([3.0, 1.0, 2.0, float("nan"), 1.5])
    handler = Checkpointer(tmp_path, metric="val/loss", keep_last=1).attach(engine)
    events: list[bool] = []
    engine.add_event_handler(Events.CHECKPOINT_SAVED, lambda engine, event: events.append(event.payload.is_best))
    engine.run(range(2), max_epochs=5)
    assert saved(handler) == [4, 10]
    assert handler.manager.get_best().name.startswith("000000004")
    assert events == [True, True, False, False, False]


def test_the_largest_may_be_best_and_two_may_be_kept(tmp_path: Path):
    engine = Trainer([1.0, 3.0, 2.0, 0.0])
    handler = Checkpointer(tmp_path, metric="val_loss", mode="max", keep_last=1, keep_best=2).attach(engine)
    engine.run(range(1), max_epochs=4)
    assert saved(handler) == [2, 3, 4]


def test_one_validation_is_ranked_once(tmp_path: Path):
    engine = Trainer([1.0, 2.0])
    handler = Checkpointer(tmp_path, every=Every(iterations=1), metric="val/loss", keep_best=3, keep_last=9)
    handler.attach(engine)
    engine.run(range(3), max_epochs=2)
    # epoch 1 ends after iteration 3: its own save uses the metric, those of epoch 2 do not use it again
    assert [value for value, _ in handler.best] == [1.0, 2.0]


def test_the_ranking_names_the_folders_that_were_really_made(tmp_path: Path):
    engine = Trainer([3.0, 1.0, 2.0, 4.0])
    handler = Checkpointer(tmp_path, metric="val/loss", keep_last=1).attach(engine)
    engine.handlers.append(handler)
    by_hand = "checkpoint"  # the label of the cadence, too

    @engine.on(Events.ITERATION_COMPLETED(once=4))
    def first(engine: Trainer) -> None:
        handler.save(engine, by_hand)

    engine.run(range(2), max_epochs=4)
    best = "000000004-checkpoint~2"
    assert handler.best == [(1.0, best)]
    assert [path.name for path in handler.manager.valid()] == [best, "000000008-checkpoint"]
    assert handler.manager.get_best().name == best
    for path in handler.manager.valid():
        (inside,) = handler.manager.load(path)["handlers"]
        assert inside["best"] == [[1.0, best]]


def test_saving_by_hand_touches_neither_the_ranking_nor_the_cadence(tmp_path: Path):
    engine = Trainer([3.0, 1.0])
    handler = Checkpointer(tmp_path, metric="val/loss", keep_last=9).attach(engine)
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @engine.on(Events.EPOCH_COMPLETED, phase=2)  # a validation has been run, and not ranked yet
    def by_hand(engine: Trainer) -> None:
        before = handler.state_dict()
        handler.save(engine, "mine", False)
        seen.append((before, handler.state_dict()))

    engine.run(range(2), max_epochs=2)
    assert all(before == after for before, after in seen)
    assert [path.name.partition("-")[2] for path in handler.manager.valid()] == ["mine", "checkpoint"] * 2
    assert [value for value, _ in handler.best] == [1.0]
    assert handler.manager.get_best().name == "000000004-checkpoint"


def test_saving_best_by_hand_moves_only_the_pointer(tmp_path: Path):
    engine = Trainer([1.0, 2.0, 0.5])
    handler = Checkpointer(tmp_path, metric="val/loss", keep_last=1).attach(engine)
    pointed: list[str] = []

    @engine.on(Events.EPOCH_COMPLETED, phase=3)
    def by_hand(engine: Trainer) -> None:
        if engine.state.epoch == 2:
            ranking = handler.state_dict()
            handler.save(engine, "mine", True)
            assert handler.state_dict() == ranking
            assert saved(handler) == [1, 2]
        pointed.append(handler.manager.get_best().name)

    engine.run(range(1), max_epochs=3)
    assert pointed == ["000000001-checkpoint", "000000002-mine", "000000003-checkpoint"]


def test_saving_in_the_middle_of_a_step_is_refused(tmp_path: Path):
    engine = Run()
    handler = Checkpointer(tmp_path, every=Every(iterations=1)).attach(engine)
    engine.is_stepping = True
    with pytest.raises(RuntimeError, match="ITERATION_COMPLETED"):
        handler.save(engine)
    assert (saved(handler), handler.saved_at) == ([], -1)
    engine.is_stepping = False
    handler.save(engine)
    assert saved(handler) == [0]


def test_a_state_that_could_not_be_loaded_ends_the_run_and_names_the_place(tmp_path: Path):
    engine = Trainer([1.0])
    handler = Checkpointer(tmp_path, metric="val/loss").attach(engine)
    before = handler.state_dict()
    engine.checkpoint_state = lambda: {"handlers": {"Mine": {"rates": [1, 2, {3}]}}}
    with pytest.raises(CheckpointError, match=r"checkpoint\['handlers'\]\['Mine'\]\['rates'\]\[2\]: set:"):
        engine.run(range(2))
    assert handler.state_dict() == before
    assert list(handler.manager.checkpoint_dir.iterdir()) == []
    with pytest.raises(CheckpointError, match="Mine"):
        handler.save(engine)


def test_a_run_from_the_start_into_a_folder_with_checkpoints_is_refused_before_its_first_iteration(tmp_path: Path):
    Checkpointer(tmp_path).attach(first := Trainer())
    first.run(range(3))
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    engine = Trainer()
    received: list[str] = []
    engine.add_event_handler(Events.STARTED, lambda: received.append("started"))
    engine.add_event_handler(Events.ITERATION_STARTED, lambda: received.append("iteration"))
    Checkpointer(tmp_path).attach(engine)
    with pytest.raises(
        RunFolderError, match=r"Checkpointer\(folder=.*: already holds a run, .*; continue it with train"
    ):
        engine.run(range(3))
    assert received == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == content


def test_a_second_run_from_the_start_in_the_same_process_is_refused_too(tmp_path: Path):
    engine = Trainer()
    handler = Checkpointer(tmp_path).attach(engine)
    handler.save(engine, "initial")  # its own beginning is not in the way
    engine.run(range(3))
    assert saved(handler) == [0, 3]
    with pytest.raises(RunFolderError, match="already holds a run"):
        engine.run(range(3))


def test_a_resumed_run_may_write_beside_what_is_there(tmp_path: Path):
    Checkpointer(tmp_path).attach(first := Trainer())
    first.run(range(3))
    engine = Trainer()
    handler = Checkpointer(tmp_path).attach(engine)
    engine.load_state_dict({"iteration": 3, "epoch_length": 3, "max_epochs": 2})
    engine.run(range(3))
    assert saved(handler) == [3, 6]


@pytest.mark.parametrize("known_by", ["the run", "the event"])
def test_a_checkpoint_from_before_the_first_iteration_can_be_resumed(known_by: str, tmp_path: Path):
    first = Trainer()
    path = Checkpointer(tmp_path).attach(first).save(first)
    engine = Run()
    handler = Checkpointer(tmp_path).attach(engine)
    if known_by == "the run":
        engine.is_resuming = True
    else:
        engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=path, iteration=0))
    engine.run(range(3))
    assert saved(handler) == [0, 3]


def test_its_event_describes_what_was_written(tmp_path: Path):
    engine = Trainer()
    Checkpointer(tmp_path).attach(engine)
    payloads: list[Any] = []
    engine.add_event_handler(Events.CHECKPOINT_SAVED, lambda engine, event: payloads.append(event.payload))
    engine.run(range(3))
    (payload,) = payloads
    assert payload.path.is_dir()
    assert payload.iteration == 3
    assert payload.bytes == sum(file.stat().st_size for file in payload.path.iterdir())
    assert engine.state.save == 1


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_event_fires_after_the_write_and_before_the_deletion(by_hand: bool, tmp_path: Path):
    engine = Trainer()
    handler = Checkpointer(tmp_path, every=Every(iterations=1), keep_last=1, at_end=False).attach(engine)
    seen: list[list[int]] = []
    engine.run(range(2))
    engine.add_event_handler(Events.CHECKPOINT_SAVED, lambda: seen.append(saved(handler)))
    if by_hand:
        engine.state.iteration = 3
        handler.save(engine)
    else:
        engine.load_state_dict({"iteration": 2, "epoch_length": 3, "max_epochs": 1})
        engine.run(range(3))
    assert seen == [[2, 3]]
    assert saved(handler) == [3]


def test_an_announcement_that_fails_is_not_a_failed_save(tmp_path: Path):
    engine = Trainer([1.0])
    handler = Checkpointer(tmp_path, metric="val/loss").attach(engine)

    @engine.on(Events.CHECKPOINT_SAVED)
    def fail(engine: Trainer) -> None:
        raise OSError("a logger's own")

    with pytest.raises(OSError, match="a logger's own"):
        engine.run(range(2))
    assert saved(handler) == [2]
    assert handler.best == [(1.0, "000000002-checkpoint")]


def test_remains_of_a_crash_are_removed_when_a_run_begins_not_earlier(tmp_path: Path):
    leftover = tmp_path / "checkpoints" / ".partial-000000009-x"
    leftover.mkdir(parents=True)
    engine = Trainer()
    Checkpointer(tmp_path, every=Every(epochs=9), at_end=False).attach(engine)
    assert leftover.exists()
    engine.run(range(1))
    assert not leftover.exists()


def test_checkpoints_may_be_at_a_url():
    engine = Trainer([2.0, 1.0, 3.0])
    handler = Checkpointer("memory://test_checkpointer/run", metric="val/loss", keep_last=1).attach(engine)
    events: list[Any] = []
    engine.add_event_handler(Events.CHECKPOINT_SAVED, lambda engine, event: events.append(event.payload))
    engine.run(range(2), max_epochs=3)
    folder = "memory://test_checkpointer/run/checkpoints"
    assert [event.path for event in events] == [f"{folder}/00000000{step}-checkpoint" for step in (2, 4, 6)]
    assert all(event.bytes > 0 for event in events)
    assert saved(handler) == [4, 6]
    assert handler.manager.get_best() == f"{folder}/000000004-checkpoint"
    assert handler.manager.load(handler.manager.get_latest())["iteration"] == 6


def test_a_full_disk_loses_only_that_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = Trainer()
    handler = Checkpointer(tmp_path, every=Every(iterations=1), keep_last=9).attach(engine)
    real = os.fsync

    def sometimes(descriptor: int) -> None:
        if engine.state.iteration == 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sometimes)
    with structlog.testing.capture_logs() as logs:
        engine.run(range(3))
    assert saved(handler) == [1, 3]
    (line,) = logs
    assert "No space left" in line["error"]
    assert line["iteration"] == 2


def test_a_folder_that_cannot_be_listed_loses_only_that_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = Trainer()
    handler = Checkpointer(tmp_path, Every(iterations=2), keep_last=9, at_end=False).attach(engine)
    target = handler.manager.target

    def gone(name: str, step: int) -> Any:
        if step == 4:
            raise OSError(5, "Input/output error")
        return target(name, step)

    monkeypatch.setattr(handler.manager, "target", gone)
    failures: list[str | None] = []
    engine.add_event_handler(Events.ITERATION_STARTED(once=6), lambda: failures.append(handler.failure))
    engine.run(range(6))
    assert saved(handler) == [2, 6]
    assert failures == ["[Errno 5] Input/output error"]
    assert handler.failure is None


def test_progress_survives_a_round_trip(tmp_path: Path):
    engine = Trainer([3.0, 1.0])
    handler = Checkpointer(tmp_path, metric="val/loss").attach(engine)
    engine.run(range(2), max_epochs=2)
    other = Checkpointer(tmp_path, metric="val/loss")
    other.load_state_dict(handler.state_dict())
    assert other.state_dict() == handler.state_dict()
    assert other.best[0][0] == 1.0


def test_a_metric_that_no_validation_reports_is_named(tmp_path: Path):
    engine = Trainer([1.0])
    Checkpointer(tmp_path, metric="val/accuracy").attach(engine)
    with pytest.raises(MetricNotFoundError, match="val/loss"):
        engine.run(range(2))


def test_a_detached_checkpointer_does_not_save_and_attaching_twice_is_an_error(tmp_path: Path):
    engine = Trainer()
    handler = Checkpointer(tmp_path).attach(engine)
    with pytest.raises(RuntimeError, match=r"Checkpointer.attach\(\): already attached to 'trainer'; detach\(\) first"):
        handler.attach(engine)
    handler.detach()
    engine.run(range(2))
    assert saved(handler) == []


def test_a_metric_without_any_validation_set_is_refused_when_attached(tmp_path: Path):
    engine = Trainer()
    engine.val_loaders = {}
    with pytest.raises(ConfigurationError, match=r"Checkpointer\(metric='val/loss'\): .*the Trainer has no val_loader"):
        Checkpointer(tmp_path, metric="val/loss").attach(engine)
    Checkpointer(tmp_path).attach(engine).detach()
    engine.val_loaders = {"val": range(2)}
    Checkpointer(tmp_path, metric="val/loss").attach(engine)


def test_an_engine_without_a_state_to_save_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="checkpoint_state"):
        Checkpointer(tmp_path).attach(Engine(lambda engine, batch: None))


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ({"keep_best": 0}, r"Checkpointer\(keep_best=0\).*metric=None"),
        ({"keep_last": 0}, r"Checkpointer\(keep_last=0\)"),
        ({"keep_last": "3"}, r"Checkpointer\(keep_last='3'\)"),
        ({"mode": "least"}, r"Checkpointer\(mode='least'\).*max, min"),
        ({"form": "pickle"}, r"Checkpointer\(form='pickle'\): unknown; choose one of safetensors, torch"),
        ({"name": "a/b"}, r"Checkpointer\(name='a/b'\)"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_once(argument: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(ConfigurationError, match=says):
        Checkpointer(tmp_path / "run", **argument)
    assert not (tmp_path / "run").exists()
