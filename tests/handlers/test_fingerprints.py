"""Digests in the log show a difference at the update at which it arises."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import make_engine

from engine import ConfigurationError, Events, Every
from engine.recording import EventLog
from handlers import EventRecorder, Fingerprints
from tests.pulsetrain.small import trainer


def record(folder: Path, disturb: Any = None, **options: Any) -> EventLog:
    torch.manual_seed(0)
    fingerprints = Fingerprints(Every(updates=1), batches=True, **options)
    recorder = EventRecorder(folder)
    run = trainer({"max_epochs": 1, "optimizer": "adamw", "seed": 3}, handlers=[fingerprints, recorder])
    if disturb is not None:
        disturb(run)
    run.train()
    return EventLog(folder)


def taken(log: EventLog, event: str) -> list[dict[str, int]]:
    return [each.payload for each in log.read(event=event)]


def test_two_equal_runs_have_equal_fingerprints_and_one_for_each_update_and_batch(tmp_path: Path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    for event in ("state_fingerprinted", "batch_fingerprinted"):
        assert taken(a, event) == taken(b, event)
        assert len(taken(a, event)) == 10
        assert len({str(each) for each in taken(a, event)}) == 10  # each is another


@pytest.mark.parametrize("part", ["weights", "buffers", "optimizer", "rng"])
def test_a_change_shows_in_its_own_part_at_its_own_update(part: str, tmp_path: Path):
    def disturb(run: Any) -> None:
        @run.on(Events.OPTIMIZER_STEP_COMPLETED(once=4))
        def change(engine: Any) -> None:
            with torch.no_grad():
                if part == "weights":
                    engine.model[0].bias[0] += 1e-6
                elif part == "buffers":
                    engine.model[1].running_var[0] += 1e-6
                elif part == "rng":
                    random.random()
                else:
                    next(iter(engine.optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-9

    a = taken(record(tmp_path / "a"), "state_fingerprinted")
    b = taken(record(tmp_path / "b", disturb), "state_fingerprinted")
    assert a[:3] == b[:3]
    assert {name for name in a[3] if a[3][name] != b[3][name]} == {part}


def test_a_batch_in_another_order_has_another_fingerprint(tmp_path: Path):
    def swap(run: Any) -> None:
        run.train_loader = [(x.flip(0), y) for x, y in run.train_loader]

    def keep(run: Any) -> None:
        run.train_loader = [(x, y) for x, y in run.train_loader]

    a = taken(record(tmp_path / "a", keep), "batch_fingerprinted")
    b = taken(record(tmp_path / "b", swap), "batch_fingerprinted")
    assert all(x != y for x, y in zip(a, b, strict=True))


def test_an_engine_without_a_model_is_refused():
    engine = make_engine()
    with pytest.raises(ConfigurationError, match="pass model="):
        Fingerprints().attach(engine)
