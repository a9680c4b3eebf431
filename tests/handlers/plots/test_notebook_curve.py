"""The picture of the losses below a notebook's cell, drawn into a list in place of a cell's output."""

import base64
from typing import Any

import pytest

from pulsetrain.engine import Events
from pulsetrain.handlers.plots import figures, notebook_curve
from pulsetrain.handlers.plots.notebook_curve import NotebookCurve
from tests.support.engines import log_each_iteration, make_engine, validate_each_epoch


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, str]]:
    """The output and the content of each picture."""
    found: list[tuple[object, str]] = []

    class Output:
        def show(self, content: Any, sizes: Any = None) -> None:
            assert sizes["width"] > 0
            found.append((self, content["image/png"]))

    monkeypatch.setattr(notebook_curve, "CellOutput", Output)
    return found


def engine_with_losses():
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1 / i})
    validate_each_epoch(engine, [{"val/loss": 0.5, "val/accuracy": 0.9}] * 3)
    return engine


def test_a_short_run_is_drawn_once_at_its_end(shown, clock):
    engine = engine_with_losses()
    NotebookCurve(clock=clock).attach(engine)
    engine.run([0, 1], max_epochs=2)
    assert len(shown) == 1
    assert base64.b64decode(shown[0][1]).startswith(b"\x89PNG")


def test_a_long_run_is_drawn_while_it_trains_into_one_output(shown, clock, monkeypatch):
    engine = engine_with_losses()
    drawing = 0.5  # seconds
    monkeypatch.setattr(figures, "render", lambda figure, kind: setattr(clock, "now", clock.now + drawing) or b"")

    @engine.on(Events.ITERATION_STARTED)
    def pass_time(engine):
        clock.now += 4

    NotebookCurve(clock=clock).attach(engine)
    start = clock.now
    engine.run(range(20), max_epochs=2)
    assert len(shown) > 2
    assert len({output for output, _ in shown}) == 1
    assert (len(shown) - 1) * drawing <= notebook_curve.SHARE * (clock.now - start)  # and one at the end


def test_each_run_has_a_picture_of_its_own(shown, clock):
    engine = engine_with_losses()
    NotebookCurve(clock=clock).attach(engine)
    engine.run([0])
    engine.run([0])
    assert len({output for output, _ in shown}) == 2


def test_a_run_without_losses_has_no_picture(shown, clock):
    engine = make_engine()
    NotebookCurve(clock=clock).attach(engine)
    engine.run([0, 1])
    assert shown == []


def test_a_run_that_fails_keeps_its_losses(shown, clock):
    engine = engine_with_losses()
    NotebookCurve(clock=clock).attach(engine)

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def fail(engine):
        raise RuntimeError("out of patience")

    with pytest.raises(RuntimeError, match="out of patience"):
        engine.run([0, 1, 2])
    assert len(shown) == 1
