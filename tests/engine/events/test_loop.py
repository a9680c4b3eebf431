"""The run loop: order of events, ends and pauses of a run, and how the next run continues."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents
from torch.utils.data import DataLoader, IterableDataset

from pulsetrain.engine import Engine, Events
from pulsetrain.engine.events.payloads import EpochTerminated, Terminated

STEP = ["GET_BATCH_STARTED", "GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED"]


def nothing(engine, batch):
    return None


def upper(types):
    return [name.upper() for name in types]


# ---------------------------------------------------------------------------------------- the order of events


def test_the_order_of_events_in_a_run(engine, recorder):
    recorder.attach(engine)
    engine.run([1, 2], max_epochs=2)
    assert (
        upper(recorder.types)
        == [
            "STARTED",
            "EPOCH_STARTED",
            *STEP,
            *STEP,
            "EPOCH_COMPLETED",
            "EPOCH_STARTED",
            "GET_BATCH_STARTED",  # the iterator of the first epoch is exhausted: a new one is made
            "DATALOADER_STOP_ITERATION",
            *STEP[1:],
            *STEP,
            "EPOCH_COMPLETED",
            "COMPLETED",
        ]
    )


def test_without_data_the_loop_fires_no_events_of_the_loader(engine, recorder):
    recorder.attach(engine)
    engine.run(epoch_length=2, max_epochs=2)
    epoch = ["EPOCH_STARTED", *STEP[2:], *STEP[2:], "EPOCH_COMPLETED"]
    assert upper(recorder.types) == ["STARTED", *epoch, *epoch, "COMPLETED"]
    assert engine.state.batch is None


def test_counters_are_one_based_in_a_run_and_zero_before(engine, recorder):
    recorder.attach(engine)
    assert (engine.state.epoch, engine.state.iteration) == (0, 0)
    engine.run([1], max_epochs=1)
    assert {event.type: (event.epoch, event.iteration) for event in recorder.events} == {
        "started": (0, 0),
        "epoch_started": (1, 0),
        "get_batch_started": (1, 0),
        "get_batch_completed": (1, 0),
        "iteration_started": (1, 1),
        "iteration_completed": (1, 1),
        "epoch_completed": (1, 1),
        "completed": (1, 1),
    }


def test_the_step_gets_the_batch_that_handlers_left_and_its_output_is_kept():
    engine = Engine(lambda engine, batch: batch * 10)
    outputs = []

    @engine.on(Events.GET_BATCH_COMPLETED)
    def prepare(engine):
        assert engine.state.output is None
        engine.state.batch += 1

    engine.on(Events.ITERATION_COMPLETED)(lambda engine: outputs.append(engine.state.output))
    engine.run([1, 2])
    assert outputs == [20, 30]


def test_times_are_filled_in(engine):
    engine.run([1])
    assert engine.state.times["COMPLETED"] >= engine.state.times["EPOCH_COMPLETED"] > 0


# ------------------------------------------------- the truth table of terminations, the same on both engines

WAYS = {
    "none": lambda engine: None,
    "terminate": lambda engine: engine.terminate(),
    "terminate, skip_completed": lambda engine: engine.terminate(skip_completed=True),
    "terminate_epoch": lambda engine: engine.terminate_epoch(),
    "terminate_epoch, skip_epoch_completed": lambda engine: engine.terminate_epoch(skip_epoch_completed=True),
}
#           way                                      single, epoch_completed, terminate, completed: in 3 epochs of 3
TABLE = {
    "none": (0, 3, 0, 1),
    "terminate": (0, 1, 1, 1),
    "terminate, skip_completed": (0, 1, 1, 0),
    "terminate_epoch": (1, 3, 0, 1),
    "terminate_epoch, skip_epoch_completed": (1, 2, 0, 1),
}
COUNTED = [Events.TERMINATE_SINGLE_EPOCH, Events.EPOCH_COMPLETED, Events.TERMINATE, Events.COMPLETED]


@pytest.mark.parametrize("moment", STEP, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_what_each_way_of_ending_fires_in_mid_epoch(either, log_of, way, moment):
    engine = either(nothing)
    log = log_of(engine, *(IgniteEvents[event.name] for event in COUNTED))
    fired = []

    @engine.on(IgniteEvents[moment])
    def end(engine):
        if engine.state.iteration == 5 and not fired:  # in the second epoch
            fired.append(1)
            WAYS[way](engine)

    engine.run(range(3), max_epochs=3)
    assert tuple(log.count(event.name) for event in COUNTED) == TABLE[way]


PLACES = [event.name for event in IgniteEvents if event.name not in ("EXCEPTION_RAISED", "INTERRUPT")]


@pytest.mark.parametrize("moment", PLACES)
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_a_run_ended_anywhere_fires_what_it_fires_on_ignite(log_of, way, moment):
    logs = []
    for kind in (IgniteEngine, Engine):
        engine = kind(nothing)
        done = []
        if moment == "TERMINATE":
            engine.on(IgniteEvents.ITERATION_COMPLETED(once=4))(lambda engine: engine.terminate())
        if moment == "TERMINATE_SINGLE_EPOCH":
            engine.on(IgniteEvents.ITERATION_COMPLETED(once=4))(lambda engine: engine.terminate_epoch())
        log = log_of(engine)

        def end(engine, *_, done=done, **__):
            if not done:
                done.append(1)
                WAYS[way](engine)

        engine.add_event_handler(IgniteEvents[moment], end)
        failed = False
        try:
            engine.run(range(3), max_epochs=3)
        except RuntimeError:  # terminate_epoch() before the first batch
            failed = True
        log.append((engine.state.epoch, engine.state.iteration))
        if not failed:  # after a failure ignite's next run does nothing
            engine.run(range(3), max_epochs=4)
            log.append((engine.state.epoch, engine.state.iteration))
        logs.append(log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("moment", [Events.STARTED, Events.EPOCH_STARTED], ids=str)
def test_terminate_epoch_before_the_first_batch_is_a_runtime_error(engine, moment):
    engine.on(moment)(engine.terminate_epoch)
    with pytest.raises(RuntimeError, match=r"terminate_epoch\(\) should not be called on Event.STARTED or"):
        engine.run([1])


def test_terminate_says_why_in_payload_and_state(engine, recorder):
    recorder.attach(engine, Events.TERMINATE)
    engine.on(Events.ITERATION_COMPLETED(once=2))(lambda: engine.terminate(reason="loss is nan"))
    assert engine.run(range(9)).stop_reason == "loss is nan"
    assert recorder.events[0].payload == Terminated(reason="loss is nan")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda engine: engine.terminate(), "terminate() was called"),
        (lambda engine: setattr(engine, "should_terminate", True), "should_terminate was set"),
    ],
    ids=["terminate", "flag"],
)
def test_a_reason_is_there_though_none_was_given(engine, end, reason):
    engine.on(Events.ITERATION_COMPLETED(once=2))(end)
    assert engine.run(range(9)).stop_reason == reason


def test_a_run_that_reaches_its_bound_has_no_stop_reason(engine):
    engine.on(Events.ITERATION_COMPLETED(once=2))(engine.terminate)
    engine.run(range(3), max_epochs=2)
    assert engine.state.stop_reason is not None
    assert engine.run(range(3), max_epochs=2).stop_reason is None


def test_terminate_epoch_says_how_many_batches_were_seen(engine, recorder):
    recorder.attach(engine, Events.TERMINATE_SINGLE_EPOCH)
    engine.on(Events.ITERATION_COMPLETED(once=5))(engine.terminate_epoch)
    engine.run(range(3), max_epochs=2)
    assert recorder.events[0].payload == EpochTerminated(iter_counter=2)


def test_a_terminated_epoch_is_followed_by_one_from_the_start_of_the_data():
    seen = []
    engine = Engine(lambda engine, batch: seen.append(batch))
    engine.on(Events.ITERATION_COMPLETED(once=2))(engine.terminate_epoch)
    engine.run(range(4), max_epochs=2)
    assert seen == [0, 1, 0, 1, 2, 3]


def test_a_loader_may_terminate_the_run_from_within(engine):
    seen = []
    engine.on(Events.ITERATION_STARTED)(lambda: seen.append(engine.state.iteration))

    def loader():
        yield 1
        engine.terminate(reason="the loader's")
        yield 2

    engine.run(loader(), epoch_length=5)
    assert seen == [1]
    assert engine.state.stop_reason == "the loader's"


def test_the_step_may_terminate_the_run():
    engine = Engine(lambda engine, batch: engine.terminate() if batch == 2 else None)
    assert engine.run(range(9)).iteration == 3


# ----------------------------------------------------------------------------------------- bounds and continuing


def test_a_finished_engine_starts_over_from_zero(engine):
    engine.run(range(3), max_epochs=2)
    assert engine.run(range(3), max_epochs=2).iteration == 6
    assert engine.run_number == 2


def test_a_larger_max_epochs_continues(either):
    seen = []
    engine = either(lambda engine, batch: seen.append(engine.state.iteration))
    engine.run(range(3), max_epochs=2)
    engine.run(range(3), max_epochs=4)
    assert seen == list(range(1, 13))


def test_lowering_max_epochs_or_changing_epoch_length_in_mid_run_is_a_value_error(either):
    engine = either(nothing)
    engine.on(IgniteEvents.ITERATION_COMPLETED(once=7))(lambda engine: engine.terminate())
    engine.run(range(3), max_epochs=5)
    with pytest.raises(ValueError, match="max_epochs should be greater than or equal to the start epoch"):
        engine.run(range(3), max_epochs=2)
    with pytest.raises(ValueError, match="epoch_length should be same as in the state"):
        engine.run(range(4), epoch_length=4)


def test_max_iters_ends_the_run_there(engine, recorder):
    recorder.attach(engine, Events.TERMINATE, Events.COMPLETED)
    state = engine.run(range(4), max_iters=6)
    assert (state.epoch, state.iteration) == (2, 6)
    assert state.stop_reason == "max_iters=6 was reached"
    assert recorder.types == ["terminate", "completed"]


@pytest.mark.parametrize("max_iters", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("sized", [True, False], ids=["with length", "without length"])
def test_max_iters_fires_what_it_fires_on_ignite(log_of, max_iters, sized):
    logs = []
    for kind in (IgniteEngine, Engine):
        engine = kind(nothing)
        log = log_of(engine)
        engine.run(range(4) if sized else Unsized(4), max_iters=max_iters)
        logs.append([*log, engine.state.epoch, engine.state.iteration, engine.state.epoch_length])
    assert logs[0] == logs[1]


def test_max_iters_and_max_epochs_exclude_each_other(engine):
    with pytest.raises(ValueError, match="mutually exclusive"):
        engine.run([1], max_iters=1, max_epochs=1)


class Unsized:
    """A loader that can be run over again and does not say how long it is."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_epoch_length_cuts_the_data_into_epochs(either):
    seen = []
    engine = either(lambda engine, batch: seen.append((engine.state.epoch, batch)))
    engine.run(range(5), epoch_length=2, max_epochs=3)
    assert seen == [(1, 0), (1, 1), (2, 2), (2, 3), (3, 4), (3, 0)]


def test_the_length_of_a_loader_is_learnt_in_the_first_epoch(either):
    engine = either(nothing)
    state = engine.run(Unsized(3), max_epochs=2)
    assert (state.epoch_length, state.epoch, state.iteration) == (3, 2, 6)


def test_an_iterable_dataset_runs(engine):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(6))

    state = engine.run(DataLoader(Stream(), batch_size=2), max_epochs=2)
    assert (state.epoch_length, state.iteration) == (3, 6)


def test_set_data_takes_the_next_batch_from_the_new_data(either):
    seen = []
    engine = either(lambda engine, batch: seen.append(batch))
    engine.on(IgniteEvents.ITERATION_COMPLETED(once=2))(lambda engine: engine.set_data("xyz"))
    engine.run("abcd")
    assert seen == ["a", "b", "x", "y"]
