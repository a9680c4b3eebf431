"""The public seam of the run loop: where batches come from, where a run resumes, and who makes the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from pulsetrain.engine import Engine, Events
from pulsetrain.engine.events.data_source import IterableSource


class Source(IterableSource):
    """Notes what the loop asks of it, and resumes after two batches of a pass."""

    def __init__(self, position: int = 0) -> None:
        self.asked: list[str] = []
        self.position = position

    def begin(self, data: Iterable[object], iteration: int) -> Iterator[object]:
        self.asked.append(f"begin after {iteration}")
        return iter(data)

    def resume(self, data: Iterable[object], iteration: int, epoch_length: int | None) -> tuple[Iterator[object], int]:
        self.asked.append(f"resume after {iteration}")
        return iter(list(data)[self.position :]), self.position


def engine_over(source: Source | None = None) -> tuple[Engine, list[object]]:
    engine, seen = Engine(lambda engine, batch: batch), []
    engine.source = source or engine.source
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append((e.state.iteration, e.state.output)))
    return engine, seen


def test_a_source_is_asked_for_the_place_of_the_run_and_then_for_each_pass():
    source = Source()
    engine, seen = engine_over(source)
    engine.run("abc", max_epochs=2)
    assert source.asked == ["resume after 0", "begin after 3"]
    assert seen == list(enumerate("abcabc", start=1))


def test_a_run_resumes_where_its_source_says():
    source = Source(position=2)
    engine, seen = engine_over(source)
    engine.state.iteration, engine.state.epoch, engine.state.epoch_length = 5, 1, 3
    engine.resume("abc", max_epochs=3)
    assert source.asked == ["resume after 5", "begin after 6"]
    assert seen == list(enumerate("cabc", start=6))
    assert engine.state.epoch == 3


def test_a_run_that_resumes_at_its_bound_has_only_its_end_left():
    engine, seen = engine_over()
    engine.run("abc", max_epochs=2)
    events: list[str] = []
    for event in (Events.STARTED, Events.EPOCH_STARTED, Events.COMPLETED):
        engine.add_event_handler(event, lambda event=event: events.append(event.name))
    engine.resume("abc", max_epochs=2)
    assert (len(seen), events) == (6, ["STARTED", "COMPLETED"])


def test_around_an_epoch_a_subclass_enters_a_context():
    entered: list[object] = []

    class Around(Engine):
        @contextmanager
        def around_epoch(self, done: int) -> Iterator[None]:
            entered.append((self.state.epoch, done))
            yield
            entered.append("left")

    engine = Around(lambda engine, batch: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda e: e.terminate())
    engine.run("abc", max_epochs=3)
    assert entered == [(1, 0), "left", (2, 0)]


def test_a_step_may_be_made_outside_of_the_loop():
    engine, seen = engine_over()
    engine.external_step = True
    engine.run("ab", max_epochs=2)
    while engine.awaits_step:
        assert engine.is_paused
        engine.state.output = engine.state.batch.upper()
        engine.proceed()
    assert seen == list(enumerate("ABAB", start=1))
    assert (engine.is_paused, engine.is_done) == (False, True)


def test_a_run_that_was_abandoned_does_not_continue():
    engine, seen = engine_over()
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda e: e.interrupt())
    engine.run("abc", max_epochs=1)
    assert engine.is_paused
    engine.abandon()
    assert not engine.is_paused
    assert engine.proceed() is engine.state
    assert len(seen) == 2


@pytest.mark.parametrize("method", ["run", "resume", "proceed"])
def test_a_run_cannot_be_started_from_inside_itself(method: str):
    engine, _ = engine_over()
    arguments = () if method == "proceed" else ("abc",)
    engine.add_event_handler(Events.STARTED, lambda e: getattr(e, method)(*arguments))
    with pytest.raises(RuntimeError, match=rf"{method}\(\) was called from inside its own run"):
        engine.run("abc")
