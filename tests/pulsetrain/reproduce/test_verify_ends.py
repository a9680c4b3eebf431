"""`verify` compares how a run ended: complete, by an exception, or terminated by a handler."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pulsetrain import Trainer, verify
from pulsetrain.engine import Events
from tests.support.runs_verified import build


def test_a_run_that_ends_too_early_has_an_event_missing(run: Path, tmp_path: Path):
    found = verify(run, lambda: build(tmp_path / "again", {"max_epochs": 2}))
    assert not found
    assert (found.missing.event, found.missing.epoch) == ("epoch_started", 3)
    assert "the run ended before trainer's epoch_started at epoch 3" in str(found)
    assert "max_epochs: 3 -> 2" in str(found)


def planted(folder: Path, at: int | None, error: str = "planted", patience: int | None = None) -> Trainer:
    made = build(folder, {"early_stopping_patience": patience} if patience else None)
    if at is not None:

        @made.on(Events.ITERATION_COMPLETED(once=at))
        def fail() -> None:
            raise ValueError(error)

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now", "proven"),
    [((14, "a"), (14, "a"), True), ((14, "a"), (14, "b"), False), ((14, "a"), (None, ""), False),
     ((14, "a"), (12, "a"), False), ((None, ""), (14, "a"), False)],
)  # fmt: skip
def test_the_same_exception_must_be_raised_again(
    tmp_path: Path, before: tuple[int | None, str], now: tuple[int | None, str], proven: bool
):
    first = planted(tmp_path / "run", *before)
    with pytest.raises(ValueError, match="a") if before[0] else contextlib.nullcontext():
        first.train()
    found = verify(tmp_path / "run", lambda: planted(tmp_path / "again", *now), from_iteration=10)
    assert bool(found) is proven, str(found)
    if not proven:
        assert found.divergence is not None
        assert "exception_raised" in str(found)


def test_a_termination_by_a_handler_must_be_repeated(tmp_path: Path):
    def make(patience: int) -> Trainer:
        made = planted(tmp_path / "run", None, patience=patience)
        made.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update({"val/loss": 1.0}))
        return made

    run = make(1)
    run.add_event_handler(Events.ITERATION_COMPLETED(once=14), lambda engine: engine.terminate(reason="enough"))
    run.train()

    def again(stops: bool) -> Trainer:
        made = make(1)
        if stops:
            made.add_event_handler(
                Events.ITERATION_COMPLETED(once=14), lambda engine: engine.terminate(reason="enough")
            )
        return made

    assert verify(tmp_path / "run", lambda: again(True))
    found = verify(tmp_path / "run", lambda: again(False))
    assert not found
    assert "the run continued" in str(found)
