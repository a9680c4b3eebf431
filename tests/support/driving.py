"""What drives handlers in these tests: plain engines that fire the events, and a clock moved by hand."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from pulsetrain.engine import Engine, EventBus, Events
from pulsetrain.engine.events.payloads import (
    MetricsLogged,
    OptimizerStepCompleted,
    PolicyUpdated,
    RolloutCompleted,
    ValidationCompleted,
)


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class UpdatingEngine(Engine):
    """Makes one optimizer step an iteration, at the rates that the optimizer then holds."""

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
