"""The files of CSVLogger and JSONLinesLogger, and what their tests do to an engine."""

import csv
import json

import pytest

from pulsetrain.engine import Events
from pulsetrain.engine.events.payloads import CheckpointLoaded
from tests.support.engines import log


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def lines(folder):
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def at(engine, epoch, iteration, metrics):
    """The engine logs these at that place."""
    engine.state.epoch, engine.state.iteration = epoch, iteration
    log(engine, metrics)


def loaded(logger, engine, iteration, state, run_folder=None):
    """The run resumes from a checkpoint with this state of the logger, by default one in the logger's run folder."""
    logger.load_state_dict(state)
    engine.state.iteration = iteration
    path = (run_folder or logger.folder) / "checkpoints" / f"{iteration:09d}-checkpoint"
    engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=path, iteration=iteration))
