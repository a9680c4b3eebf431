"""The bar that ProgressBar shows in a notebook, drawn into a list in place of a cell's output."""

from typing import Any

import pytest

from pulsetrain.engine import Events
from pulsetrain.handlers import ProgressBar
from pulsetrain.handlers.loggers import notebook_bar, progress_bar
from tests.support.engines import log_each_iteration, make_engine, validate_each_epoch


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What is shown below the cell, the oldest first."""
    found: list[dict[str, str]] = []

    class Output:
        def show(self, content: Any, sizes: Any = None) -> None:
            found.append(content)

    monkeypatch.setattr(progress_bar, "notebook_shell", object)
    monkeypatch.setattr(notebook_bar, "CellOutput", Output)
    return found


def test_the_bar_moves_while_the_run_trains(shown, clock):
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1 / i})

    @engine.on(Events.ITERATION_STARTED)
    def pass_time(engine):
        clock.now += 2

    ProgressBar(clock=clock).attach(engine)
    engine.run(range(4), max_epochs=1)
    texts = [each["text/plain"] for each in shown]
    assert texts[0] == "epoch 1/1, iteration 1/4 (25%), 2.0 s, 6.0 s left, 0.5 it/s, loss=1"
    assert texts[-1] == "epoch 1/1, iteration 4/4 (100%), 8.0 s, 0.5 it/s, loss=0.25"
    assert len(texts) > 2
    assert 'value="1" max="4"' in shown[0]["text/html"]


def test_a_run_of_unknown_length_shows_what_is_done(shown, clock):
    engine = make_engine()
    ProgressBar(clock=clock).attach(engine)
    engine.run(iter(range(3)))
    assert shown[-1]["text/plain"].startswith("epoch 1/1, iteration 3")
    assert "<progress  " in shown[0]["text/html"]  # without a value: it moves, and says nothing


def test_names_of_metrics_are_text_and_not_html(shown, clock):
    engine = make_engine()
    validate_each_epoch(engine, [{"<b>/loss": 1.0}])
    ProgressBar(clock=clock).attach(engine)
    engine.run([0])
    assert "&lt;b&gt;/loss=1" in shown[-1]["text/html"]


def test_a_given_stream_gets_lines_also_in_a_notebook(shown, capsys):
    import sys

    engine = make_engine()
    ProgressBar(stream=sys.stdout).attach(engine)
    engine.run([0])
    assert shown == []
    assert capsys.readouterr().out == "epoch 1/1, iteration 1/1 (100%)\n"
