"""Runs whose handlers write into one folder, in this process or in a forked one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pulsetrain import Trainer
from pulsetrain.engine import Events
from pulsetrain.handlers import (
    BestModel,
    Checkpointer,
    CSVLogger,
    EventRecorder,
    JSONLinesLogger,
    Plots,
    SampleText,
    TensorBoardLogger,
)
from tests.support.models import loader, trainer

Make = Callable[[Path], Any]
RECORDING: dict[str, Make] = {  # what later runs must not be mixed with
    "Checkpointer": Checkpointer,
    "Checkpointer in the background": lambda folder: Checkpointer(folder, background=True),
    "EventRecorder": EventRecorder,
    "CSVLogger": CSVLogger,
    "JSONLinesLogger": JSONLinesLogger,
    "TensorBoardLogger": TensorBoardLogger,
    "Plots": lambda folder: Plots(folder, formats=["svg"]),
    "BestModel": lambda folder: BestModel(folder=folder),
    "SampleText": lambda folder: SampleText("a", folder=folder, generate=lambda *arguments, **options: "text"),
}


def make(folder: Path, *handlers: Make, epochs: int = 1) -> Trainer:
    made = [each(folder) for each in handlers]
    return trainer({"max_epochs": epochs, "seed": 0}, val_loader=loader(8), handlers=made)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def child(body: Callable[[Callable[[], None], Callable[[], None]], None]) -> Iterator[tuple[int, Callable[[], None]]]:
    """A forked process in `body(ready, wait)`; the block begins when it is ready. Yields its id, and ends `wait`."""
    to_parent, to_child = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(to_child[1])  # so that the parent's end also ends the wait
            body(lambda: os.write(to_parent[1], b"1") and None, lambda: os.read(to_child[0], 1) and None)
            status = 0
        finally:
            os._exit(status)
    try:
        os.close(to_parent[1])
        assert os.read(to_parent[0], 1), "the child has failed"
        yield pid, lambda: os.write(to_child[1], b"1") and None
    finally:
        for end in (to_parent[0], *to_child):
            os.close(end)
        os.waitpid(pid, 0)


def in_a_run(run: Trainer, iteration: int, call: Callable[[], object]) -> None:
    run.add_event_handler(Events.ITERATION_COMPLETED(once=iteration), lambda: call() and None)
