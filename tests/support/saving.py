"""An engine whose checkpoints are saved beside its training, and a gate that holds up their writing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from pulsetrain.engine import Engine, Events, Every, Phase
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.handlers import Checkpointer


class Trainer(Engine):
    """An engine whose step adds 1 to each weight, in place, and whose validation says what it is told."""

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
    """Holds up each write of a manager until it is opened; knows in which threads they were made."""

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
        assert self.opened.wait(60), "nobody opened the gate"
        if self.error is not None:
            raise self.error
        return self._save(*args, **kwargs)

    def open(self) -> None:
        self.opened.set()

    def pass_through(self) -> None:
        """Open it, and wait until the write behind it has ended."""
        self.opened.set()
        join_writers()


def join_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def saved(handler: Checkpointer) -> list[int]:
    return [int(path.name.split("-")[0]) for path in handler.manager.valid()]


def heard(engine: Engine, event: Any) -> list[Any]:
    payloads: list[Any] = []
    engine.bus.subscribe(event, lambda engine, event: payloads.append(event.payload))
    return payloads


def in_background(engine: Trainer, folder: Path, every: Every, **kwargs: Any) -> Checkpointer:
    handler = Checkpointer(folder, every, keep_last=99, background=True, **kwargs)
    engine.handlers.append(handler)
    return handler.attach(engine)
