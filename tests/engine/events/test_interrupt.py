"""Interrupting a run, then resuming or discarding it."""

from __future__ import annotations

import gc

import pytest
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents

from pulsetrain.engine import Engine, Events

PLACES = [
    event.name
    for event in IgniteEvents
    if event.name not in ("EXCEPTION_RAISED", "INTERRUPT", "DATALOADER_STOP_ITERATION")
]


def nothing(engine, batch):
    return None


def test_interrupt_pauses_and_the_next_run_continues_with_the_next_batch(either):
    seen = []
    engine = either(lambda engine, batch: seen.append(batch))
    engine.on(IgniteEvents.ITERATION_COMPLETED(once=5))(lambda engine: engine.interrupt())
    events = []
    engine.on(IgniteEvents.INTERRUPT)(lambda engine: events.append(engine.state.iteration))
    state = engine.run(range(3), max_epochs=3)
    assert state is engine.state
    assert (state.epoch, state.iteration) == (2, 5)
    assert events == [5]
    engine.run(range(3), max_epochs=3)
    assert seen == [0, 1, 2] * 3
    assert (state.epoch, state.iteration) == (3, 9)


@pytest.mark.parametrize("moment", PLACES)
def test_a_run_interrupted_anywhere_and_resumed_fires_what_ignites_does(log_of, moment):
    logs = []
    for kind in (IgniteEngine, Engine):
        engine = kind(nothing)
        log = log_of(engine)
        engine.add_event_handler(
            IgniteEvents[moment], lambda *_, engine=engine, log=log, **__: log.count(moment) == 1 and engine.interrupt()
        )
        for _ in range(3):
            engine.run(range(2), max_epochs=2)
            log.append(engine.state.iteration)
        logs.append(log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("kind", "times"), [(IgniteEngine, 2), (Engine, 1)], ids=["ignite", "ours"])
def test_interrupted_where_the_loader_is_exhausted_get_batch_started_is_fired_once_a_batch(log_of, kind, times):
    engine = kind(nothing)
    log = log_of(engine, IgniteEvents.GET_BATCH_STARTED, IgniteEvents.DATALOADER_STOP_ITERATION)
    engine.on(IgniteEvents.DATALOADER_STOP_ITERATION)(lambda engine: engine.interrupt())
    engine.run([1], max_epochs=2)
    engine.run([1], max_epochs=2)
    assert log == ["GET_BATCH_STARTED", "GET_BATCH_STARTED", "DATALOADER_STOP_ITERATION"] + ["GET_BATCH_STARTED"] * (
        times - 1
    )


def test_interrupting_can_be_switched_off_as_in_ignite(engine):
    engine.interrupt_resume_enabled = False
    engine.on(Events.ITERATION_COMPLETED)(engine.interrupt)
    with pytest.raises(RuntimeError, match="'interrupt/resume' feature is disabled"):
        engine.run([1])


def test_an_interrupted_run_discarded_for_a_new_one_fires_nothing_more(engine, recorder):
    data = iter(range(100))
    with engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.interrupt):
        engine.run(data, epoch_length=4)
    recorder.attach(engine)
    engine.state.max_epochs = None  # ignite's way to start over
    seen = []
    engine.on(Events.ITERATION_STARTED)(lambda: seen.append(engine.state.batch))
    engine.run(["a", "b"])
    assert seen == ["a", "b"]
    assert recorder.types.count("exception_raised") == recorder.types.count("interrupt") == 0
    assert recorder.types[0] == "started"
    assert recorder.types.count("completed") == 1


def test_dropping_an_interrupted_engine_raises_no_error(make_engine):
    seen = []

    def make():
        engine = make_engine()
        engine.on(Events.ITERATION_COMPLETED(once=1))(lambda engine: engine.interrupt())
        engine.on(Events.EXCEPTION_RAISED | Events.COMPLETED)(lambda *_: seen.append(1))
        engine.run([1, 2])

    make()
    gc.collect()
    assert seen == []
