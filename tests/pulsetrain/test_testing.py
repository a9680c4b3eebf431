"""`pulsetrain.testing`: each assertion fails for code that breaks what it asserts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import (
    BestModel,
    CSVLogger,
    EarlyStopping,
    Events,
    Plots,
    TimeLimit,
    Trainer,
    TrainingConfig,
)
from pulsetrain.engine import Engine, EventEnum, SupervisedStrategy
from pulsetrain.testing import (
    RecordedEvents,
    assert_overfits,
    assert_replays_equal,
    assert_resumes_exactly,
    run_two_batches,
    tiny_loader,
    tiny_model,
)


def build(handlers: list[Any], model: nn.Module | None = None, **settings: Any) -> Trainer:
    config = TrainingConfig(**{"max_epochs": 2, "seed": 1, "progress": False, "learning_rate": 0.05, **settings})
    strategy = SupervisedStrategy("mse")
    return Trainer(
        model or tiny_model(dropout=0.5), tiny_loader(), tiny_loader(), strategy=strategy, config=config,
        handlers=handlers,
    )  # fmt: skip


class TestResumesExactly:
    def test_of_a_run_that_does(self, tmp_path: Path):
        assert_resumes_exactly(build, tmp_path)

    def test_not_of_a_step_that_depends_on_what_no_checkpoint_holds(self, tmp_path: Path):
        def build_counting(handlers: list[Any]) -> Trainer:
            trainer, calls = build(handlers), []

            def drift(engine: Trainer) -> None:
                calls.append(1)
                with torch.no_grad():
                    next(engine.model.parameters()).add_(0.01 * len(calls))

            trainer.add_event_handler(Events.ITERATION_STARTED, drift)
            return trainer

        with pytest.raises(AssertionError, match="differs from one without a break"):
            assert_resumes_exactly(build_counting, tmp_path, at=3)

    def test_of_a_run_with_handlers_that_measure_time_and_write_files(self, tmp_path: Path):
        folders = iter(("first", "second", "second"))

        def build_logging(handlers: list[Any]) -> Trainer:
            folder = tmp_path / next(folders)
            own = [TimeLimit("1h"), CSVLogger(folder), Plots(folder, formats=("svg",)), BestModel(), EarlyStopping()]
            return build([*handlers, *own], accumulate=3)

        assert_resumes_exactly(build_logging, tmp_path, at=3)

    def test_not_of_a_handler_that_does_not_restore_its_state(self, tmp_path: Path):
        class Counting:
            def __init__(self) -> None:
                self.calls = 0

            def attach(self, engine: Engine) -> None:
                engine.add_event_handler(Events.ITERATION_COMPLETED, self.count)

            def count(self) -> None:
                self.calls += 1

            def state_dict(self) -> dict[str, Any]:
                return {"calls": self.calls}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                pass

        with pytest.raises(AssertionError, match=r"these parts of their states differ: handlers\.Counting\.calls"):
            assert_resumes_exactly(lambda handlers: build([*handlers, Counting()]), tmp_path)

    def test_not_of_a_recording_that_has_lost_events(self, tmp_path: Path):
        def build_losing(handlers: list[Any]) -> Trainer:
            trainer = build(handlers)

            def lose() -> None:
                recorder = handlers[-1]
                log = recorder._log.writer
                log.lose(seq=log.last_seq, ord=log.next_ord, reason="the disk was full", t=0)

            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lose)
            return trainer

        with pytest.raises(AssertionError, match="were not compared, or are damaged"):
            assert_resumes_exactly(build_losing, tmp_path)

    @pytest.mark.parametrize("at", [0, 8, 100])
    def test_an_iteration_that_the_run_does_not_pass_is_refused(self, tmp_path: Path, at: int):
        with pytest.raises(ValueError, match=f"at={at}"):
            assert_resumes_exactly(build, tmp_path, at=at)


class TestReplaysEqual:
    def test_of_a_shipped_handler(self, tmp_path: Path):
        assert_replays_equal(lambda: EarlyStopping(patience=1), build, tmp_path)

    def test_not_of_a_handler_that_draws_random_numbers(self, tmp_path: Path):
        class Guessing:
            def __init__(self) -> None:
                self.guesses: list[float] = []

            def attach(self, engine: Engine) -> None:
                engine.add_event_handler(Events.EPOCH_COMPLETED, self.guess)

            def guess(self) -> None:
                self.guesses.append(random.random())

        with pytest.raises(AssertionError, match="Guessing in the run and in its replay: guesses"):
            assert_replays_equal(Guessing, build, tmp_path)


class TestOverfits:
    def test_the_trainer_stays_as_it_was(self):
        trainer = build([], tiny_model())
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        generator = torch.get_rng_state()
        losses = assert_overfits(trainer)
        assert losses[-1] <= 0.1 * losses[0]
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
        assert trainer.state.iteration == 0

    def test_not_of_a_model_that_is_frozen(self):
        model = tiny_model()
        for parameter in list(model.parameters())[:-1]:
            parameter.requires_grad_(False)
        with pytest.raises(AssertionError, match=r"did not fall to 0\.01 of that"):
            assert_overfits(build([], model), updates=20, to=0.01)


class TestTwoBatches:
    def test_two_are_trained_and_the_handlers_run(self):
        epochs: list[int] = []

        class Handler:
            def attach(self, engine: Engine) -> None:
                engine.add_event_handler(Events.COMPLETED, lambda: epochs.append(engine.state.iteration))

        trainer = build([Handler()])
        assert run_two_batches(trainer).keys() == {"train/loss", "val/loss"}
        assert epochs == [2]

    def test_a_loss_that_is_not_finite_is_found(self):
        class Broken(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * float("nan")

        with pytest.raises((AssertionError, ValueError), match=r"finite|nan"):
            run_two_batches(build([], Broken(4, 1)))


class TestRecordedEvents:
    def test_custom_events_are_recorded_when_they_are_named(self):
        class Own(EventEnum):
            DONE = "done"

        engine = Engine(lambda engine, batch: None)
        engine.register_events(*Own)
        events = RecordedEvents(engine, *Own)
        engine.fire(Own.DONE)
        assert events.names == ["done"]

    def test_it_does_not_cause_events(self):
        trainer = build([])
        events = RecordedEvents(trainer)
        trainer.train()
        assert Events.GRADIENTS_READY.value not in events.names
        assert events.names.count("iteration_completed") == 8


def test_the_fixtures_come_with_the_package(tiny_model: Any, tiny_loader: Any, manual_clock: Any):
    assert tiny_model(next(iter(tiny_loader))[0]).shape == (8, 1)
    manual_clock.now = 3.0
    assert manual_clock() == 3.0
