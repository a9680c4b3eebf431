"""Logs written by hand, the contents of a log as plain values, and the events of a replay."""

from pathlib import Path
from typing import Any

import msgspec

from pulsetrain.engine import Events
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter


def recorded(folder):
    """The log's events as plain values, without absent fields."""
    events = msgspec.to_builtins(list(EventLog(folder).read()))
    return [{"epoch": 0, "iteration": 0, **event} for event in events]


def types(folder):
    return [event["event"] for event in recorded(folder)]


# -------------------------------------------------------------------------------------------------------------- replays


START = 1_700_000_000_000_000_000
SECOND = 1_000_000_000


class Writing:
    """A log under construction, with one event per second."""

    def __init__(self, folder: Path) -> None:
        self.writer = LogWriter(folder)
        self.seq = self.ord = 0

    def add(self, event: Any, epoch: int = 1, iteration: int = 1, engine: str = "trainer", **fields: Any) -> int:
        self.seq += 1
        if not fields.pop("is_observed", False):
            fields["ord"], self.ord = self.ord, self.ord + 1
        name = event if isinstance(event, str) else event.value
        self.writer.add(
            LoggedEvent(
                engine=engine,
                event=name,
                epoch=epoch,
                iteration=iteration,
                seq=self.seq,
                t=START + self.seq * SECOND,
                **fields,
            )
        )
        return self.seq

    def close(self) -> None:
        self.writer.end()
        self.writer.close()


def train(log: Writing, epochs: int = 2, length: int = 3, validate: bool = True) -> None:
    """A run like a trainer's: updates in iterations, validations at the ends of epochs."""
    log.add(Events.STARTED, 0, 0, is_observed=True)
    for epoch in range(1, epochs + 1):
        log.add(Events.EPOCH_STARTED, epoch, (epoch - 1) * length)
        for iteration in range((epoch - 1) * length + 1, epoch * length + 1):
            log.add(Events.ITERATION_STARTED, epoch, iteration)
            log.add(Events.GRADIENTS_READY, epoch, iteration, payload={"grad_norm": 0.5})
            rates = [0.1 / iteration]
            log.add(Events.OPTIMIZER_STEP_COMPLETED, epoch, iteration, payload={"learning_rates": rates})
            log.add(Events.ITERATION_COMPLETED, epoch, iteration, output={"loss": 1.0 / iteration}, lr=rates)
        metrics = {"val/loss": 1.0 / epoch}
        log.add(Events.EPOCH_COMPLETED, epoch, epoch * length, metrics=metrics if validate else None)
        if validate:
            at = (epoch, epoch * length)
            log.add(Events.VALIDATION_STARTED, *at)
            evaluate(log)
            validated = {"payload": {"metrics": metrics}, "observed": {"seconds": 0.5}, "metrics": metrics}
            log.add(Events.VALIDATION_COMPLETED, *at, **validated)
    log.add(Events.COMPLETED, epochs, epochs * length, is_observed=True)


def evaluate(log: Writing, batches: int = 2) -> None:
    log.add(Events.STARTED, 0, 0, "evaluator", is_observed=True)
    for iteration in range(1, batches + 1):
        log.add(Events.ITERATION_COMPLETED, 1, iteration, "evaluator", output={"loss": 2.0})
    log.add(Events.EPOCH_COMPLETED, 1, batches, "evaluator", metrics={"loss": 2.0})
    log.add(Events.COMPLETED, 1, batches, "evaluator", is_observed=True)


def hear(replay: Any, *events: Any, **options: Any) -> list[Any]:
    """Collects what handlers of these events receive."""
    received: list[Any] = []
    for each in events:

        @replay.on(each, **options)
        def note(engine, event):
            received.append(event)

    return received
