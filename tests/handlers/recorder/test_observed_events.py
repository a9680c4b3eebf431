"""Events triggered by the clock are recorded as observed: they need not be reproduced when the run is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsetrain.engine import Engine, Events, Every
from pulsetrain.engine.events.payloads import MetricsLogged
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.records import without_observed
from pulsetrain.engine.recording.replay.payloads import payload_of
from pulsetrain.handlers import EventRecorder


def test_a_validation_that_the_clock_triggers_is_observed_with_all_that_it_fires(tmp_path: Path):
    trainer = Engine(lambda engine, batch: 0.5, name="trainer")
    evaluator = Engine(lambda engine, batch: None, bus=trainer.bus, name="evaluator")
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    @trainer.on(Every(seconds=3).events(clock))
    def validate(engine: Engine) -> None:
        evaluator.run([1, 2], max_epochs=1)

    EventRecorder(tmp_path).attach(trainer)
    trainer.run(range(8), max_epochs=1)
    events = list(EventLog(tmp_path).read())
    ords = [event.ord for event in events if event.engine == "evaluator"]
    assert len(ords) == 2 * 8  # both times: the run, its epoch and its iterations
    assert set(ords) == {-1}
    iterations = [event for event in events if event.engine == "trainer" and "iteration" in event.event]
    assert len(iterations) == 16
    assert min(event.ord for event in iterations) >= 0
    assert trainer.bus.sequence.observed is False


def test_a_handler_that_fails_by_the_clock_leaves_the_mark_as_it_was():
    trainer = Engine(lambda engine, batch: 0.5, name="trainer")
    times = iter([0.0, 5.0, 5.0])

    @trainer.on(Every(seconds=3).events(lambda: next(times)))
    def fail(engine: Engine) -> None:
        raise RuntimeError(f"by the clock: {engine.bus.sequence.observed}")

    with pytest.raises(RuntimeError, match="by the clock: True"):
        trainer.run(range(3), max_epochs=1)
    assert trainer.state.iteration == 2
    assert trainer.bus.sequence.observed is False


@pytest.mark.parametrize("counts", [True, False])
def test_logged_metrics_note_the_tokens_of_a_run_that_counts_them(counts: bool, tmp_path: Path):
    trainer = Engine(lambda engine, batch: 0.5, name="trainer")

    @trainer.on(Events.ITERATION_COMPLETED)
    def log(engine: Engine) -> None:
        if counts:
            engine.state.tokens = 100 * engine.state.iteration
        engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics={"train/loss": 0.5, "tokens_per_second": 3.0}))

    EventRecorder(tmp_path).attach(trainer)
    trainer.run(range(2), max_epochs=1)
    events = list(EventLog(tmp_path).read(event="metrics_logged"))
    metrics = {"train/loss": 0.5, "tokens_per_second": 3.0}
    noted = [{"tokens": 100}, {"tokens": 200}] if counts else [{}, {}]
    assert [event.payload for event in events] == [{"metrics": metrics, **each} for each in noted]
    assert [without_observed(event).payload for event in events] == [{"metrics": {"train/loss": 0.5}}] * 2
    assert [payload_of(Events.METRICS_LOGGED, event) for event in events] == [MetricsLogged(metrics=metrics)] * 2
