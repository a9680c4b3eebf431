"""Plain engines that fire the events handlers react to, and a clock moved by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pulsetrain.engine import Engine, EventBus, Events, Every, Phase
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.events.payloads import (
    MetricsLogged,
    OptimizerStepCompleted,
    PolicyUpdated,
    RolloutCompleted,
    ValidationCompleted,
)
from pulsetrain.handlers import Checkpointer


class UpdatingEngine(Engine):
    """Makes one optimizer step per iteration, at the optimizer's current rates."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None, *, accumulate: int = 1) -> None:
        super().__init__(self._step, name="trainer")
        self.model = nn.Linear(2, 1)
        self.optimizer = optimizer or torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.accumulate = accumulate
        self.used: list[list[float]] = []  # the groups' rates in each update

    def _step(self, engine: Engine, batch: object) -> float:
        if self.state.iteration % self.accumulate == 0:
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            self.optimizer.step()
            self.used.append(rates)
            self.state.update += 1  # as for each engine that fires no GRADIENTS_READY
            self.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=tuple(rates)))
        return 0.0


def make_engine(
    step: Callable[[int], object] = lambda iteration: 1.0 / iteration, bus: EventBus | None = None
) -> Engine:
    """An engine named "trainer" whose output is `step(iteration)`."""
    return Engine(lambda engine, batch: step(engine.state.iteration), name="trainer", bus=bus)


def log(engine: Engine, metrics: Mapping[str, float]) -> None:
    engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics=metrics))


def validated(engine: Engine, metrics: Mapping[str, float]) -> None:
    engine.fire(Events.VALIDATION_STARTED)
    engine.state.metrics.update(metrics)
    engine.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics=metrics, seconds=0.5))


def rolled_out(engine: Engine, metrics: Mapping[str, float]) -> None:
    engine.fire(Events.ROLLOUT_STARTED)
    engine.state.metrics.update(metrics)
    engine.fire(Events.ROLLOUT_COMPLETED, RolloutCompleted(metrics=metrics, seconds=0.5))


def policy_updated(engine: Engine, metrics: Mapping[str, float]) -> None:
    engine.state.metrics.update(metrics)
    engine.fire(Events.POLICY_UPDATED, PolicyUpdated(metrics=metrics))


def roll_out_before_each_batch(engine: Engine, rounds: list[Mapping[str, float]]) -> None:
    engine.add_event_handler(Events.GET_BATCH_STARTED, lambda: rolled_out(engine, rounds[engine.state.rollout_round]))


def log_each_iteration(engine: Engine, make: Callable[[int], Mapping[str, float]]) -> None:
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: log(engine, make(engine.state.iteration)))


def validate_each_epoch(engine: Engine, rounds: list[Mapping[str, float]]) -> None:
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: validated(engine, rounds[engine.state.epoch - 1]))


def subscriptions(bus: EventBus) -> dict[str, int]:
    """How many receivers each event of the bus has."""
    return {name: len(signal.receivers) for name, signal in bus.items() if signal.receivers}


# --------------------------------------------------------------------------------------------- saving in the background


class SavingEngine(Engine):
    """An engine whose step adds 1 to each weight, in place, and whose validation reports the given values."""

    def __init__(self, values: list[float] | None = None) -> None:
        super().__init__(self.step, name="trainer")
        self.weight = torch.zeros(1000)
        self.handlers: list[Any] = []
        self.values = iter(values or [])
        if values is not None:
            self.add_event_handler(Events.EPOCH_COMPLETED, self.validate, phase=Phase.COMPUTE)

    def step(self, engine: Engine, batch: object) -> None:
        self.weight.add_(1)

    def validate(self) -> None:
        self.state.metrics["val/loss"] = next(self.values)
        self.fire(Events.VALIDATION_STARTED)

    def checkpoint_state(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "save": self.state.save,
            "handlers": [handler.state_dict() for handler in self.handlers],
        }


class Gate:
    """Blocks each write of a manager until it is opened; records the threads that write."""

    def __init__(self, manager: CheckpointManager, *, opened: bool = False) -> None:
        self.opened = threading.Event()
        if opened:
            self.opened.set()
        self.threads: list[str] = []
        self.error: BaseException | None = None
        self._save = manager.save
        manager.save = self.save  # type: ignore[method-assign]

    def save(self, *args: Any, **kwargs: Any) -> Path:
        self.threads.append(threading.current_thread().name)
        assert self.opened.wait(60), "the gate was not opened"
        if self.error is not None:
            raise self.error
        return self._save(*args, **kwargs)

    def open(self) -> None:
        self.opened.set()

    def pass_through(self) -> None:
        """Open it, and wait until the blocked write has ended."""
        self.opened.set()
        join_writers()


def join_writers() -> None:
    # not threading.enumerate(): since Python 3.13, a thread that ends leaves it before is_alive() says so
    for thread in list(threading._dangling):
        if thread.name == "checkpoint":
            thread.join()


def saved(handler: Checkpointer) -> list[int]:
    return [int(path.name.split("-")[0]) for path in handler.manager.valid()]


def payloads_of(engine: Engine, event: Any) -> list[Any]:
    payloads: list[Any] = []
    engine.bus.subscribe(event, lambda engine, event: payloads.append(event.payload))
    return payloads


def in_background(engine: SavingEngine, folder: Path, every: Every, **kwargs: Any) -> Checkpointer:
    handler = Checkpointer(folder, every, keep_last=99, background=True, **kwargs)
    engine.handlers.append(handler)
    return handler.attach(engine)
