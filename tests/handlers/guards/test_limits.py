import math

import pytest

from pulsetrain.engine import ConfigurationError, Engine, Events, Every, Phase
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import Checkpointer, EventRecorder, StepLimit, TimeLimit
from pulsetrain.testing import ManualClock
from tests.support.engines import UpdatingEngine, make_engine
from tests.support.models import trainer

# ---------------------------------------------------------------------------------------------------------- TimeLimit


def ticking(limit, seconds=1.0, engine=None):
    """An engine whose iterations take this many seconds of the limit's clock."""
    clock = limit.clock

    def step(iteration):
        clock.now += seconds

    engine = engine or make_engine(step)
    limit.attach(engine)
    return engine


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("2h30m", 9000.0),
        ("1d12h", 129600.0),
        ("1d 2h 3m 4.5s", 93784.5),
        ("45m", 2700.0),
        ("02:30:00", 9000.0),
        ("1-12:00:00", 129600.0),
        (12, 12.0),
        (0.5, 0.5),
    ],
)
def test_a_time_is_a_number_of_seconds_or_a_text(text, seconds):
    assert TimeLimit(text).seconds == seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": "2 hours"}, r"\(seconds='2 hours'\): needs seconds, or a time such as '2h30m'"),
        ({"seconds": ""}, r"\(seconds=''\): needs seconds"),
        ({"seconds": "30m2h"}, r"\(seconds='30m2h'\): needs seconds"),
        ({"seconds": -1}, r"\(seconds=-1\): needs seconds"),
        ({"seconds": math.inf}, r"\(seconds=inf\): needs seconds"),
        ({"seconds": True}, r"\(seconds=True\): needs seconds"),
        ({"seconds": None}, r"\(seconds=None\): needs seconds"),
        ({"seconds": "0s"}, r"\(seconds='0s'\): needs a positive time"),
        ({"seconds": "1h", "margin": "60m"}, r"\(margin='60m'\): leaves nothing of seconds='1h'; give less"),
        ({"seconds": "1h", "margin": "soon"}, r"\(margin='soon'\): needs seconds"),
        ({"seconds": "1h", "of": "job"}, r"\(of='job'\): unknown; choose one of process, run"),
    ],
)
def test_what_is_not_a_time_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=r"TimeLimit" + message):
        TimeLimit(**arguments)


def test_the_run_ends_after_the_iteration_that_used_the_time_up_and_says_why():
    limit = TimeLimit("10s", clock=ManualClock())
    engine = ticking(limit, 4.0)
    engine.run([0] * 9, max_epochs=1)
    assert engine.state.iteration == 3
    assert engine.state.stop_reason == "time limit of 10 s: 12.0 s are used"


def test_the_margin_ends_it_earlier():
    limit = TimeLimit(10, margin="5s", clock=ManualClock())
    engine = ticking(limit, 2.0)
    engine.run([0] * 9, max_epochs=1)
    assert engine.state.iteration == 3
    assert engine.state.stop_reason == "time limit of 10 s, 5 s before it: 6.0 s are used"


def test_a_run_within_its_time_is_left_alone():
    limit = TimeLimit(10, clock=ManualClock())
    engine = ticking(limit)
    engine.run([0] * 9, max_epochs=1)
    assert engine.state.stop_reason is None
    assert limit.used == 9.0


def test_the_time_of_earlier_processes_counts_and_pauses_between_them_do_not():
    first, second = TimeLimit(10, clock=ManualClock()), TimeLimit(10, clock=ManualClock())
    ticking(first).run([0] * 6, max_epochs=1)
    second.clock.now = 1000.0
    second.load_state_dict(first.state_dict())
    engine = ticking(second)
    engine.load_state_dict({"epoch_length": 6, "max_epochs": 9, "iteration": 6})
    engine.run([0] * 6)
    assert engine.state.iteration == 10
    assert second.used == 10.0


def test_a_process_limit_ignores_earlier_processes():
    limit = TimeLimit(10, of="process", clock=ManualClock())
    limit.load_state_dict({"used": 9.0})
    engine = ticking(limit)
    engine.run([0] * 20, max_epochs=1)
    assert engine.state.iteration == 10


@pytest.mark.parametrize(("loaded", "used"), [(7.0, 7.0), (2.0, 5.0)])
def test_loading_a_state_never_lowers_the_time_already_used(loaded, used):
    limit = TimeLimit(10, clock=ManualClock())
    ticking(limit).run([0] * 5, max_epochs=1)
    limit.load_state_dict({"used": loaded})
    assert limit.used == used


class Back:
    """Makes a trainer rewind from iteration 9 to the checkpoint of 4, this many times, and counts its updates."""

    def __init__(self, times, clock=None):
        self.times, self.clock, self.made = times, clock, 0

    def attach(self, engine):
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._count, phase=Phase.COMPUTE)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._go_back)
        return self

    def _count(self):
        self.made += 1
        if self.clock is not None:
            self.clock.now += 1.0

    def _go_back(self, engine):
        if engine.state.iteration == 9 and self.times:
            self.times -= 1
            engine.rewind(5, 5 + self.times, "so")


@pytest.mark.parametrize("of", ["run", "process"])
def test_a_run_that_goes_back_to_a_checkpoint_gets_no_time_for_it(of, tmp_path):
    limit = TimeLimit(12, of=of, clock=ManualClock())
    back = Back(3, limit.clock)
    saver = Checkpointer(tmp_path, every=Every(iterations=2), keep_last=9)
    run = trainer({"max_epochs": 99, "seed": 1}, handlers=[back, limit, saver])
    run.train()
    assert (back.made, limit.used, back.times) == (12, 12.0, 2)
    assert run.state.stop_reason == "time limit of 12 s: 12.0 s are used"


def test_time_that_is_used_up_already_leaves_no_iteration():
    limit = TimeLimit(3, clock=ManualClock())
    limit.load_state_dict({"used": 3.0})
    engine = ticking(limit)
    engine.load_state_dict({"epoch_length": 6, "max_epochs": 9, "iteration": 6})
    engine.run([0] * 6)
    assert (engine.state.iteration, limit.used) == (6, 3.0)


def test_a_process_limit_counts_all_time_across_runs():
    limit = TimeLimit(10, of="process", clock=ManualClock())
    engine = ticking(limit)
    for iterations, used in ((6, 6.0), (4, 10.0)):
        engine.run([0] * 6, max_epochs=1)
        assert (engine.state.iteration, limit.used) == (iterations, used)


def test_a_resumed_run_after_its_limit_makes_no_iteration():
    limit = TimeLimit(3, clock=ManualClock())
    engine = ticking(limit)
    engine.run([0] * 9, max_epochs=1)
    engine.run([0] * 9)
    assert engine.state.iteration == 3
    assert engine.state.stop_reason.startswith("time limit")


def test_a_run_from_the_beginning_has_all_its_time():
    limit = TimeLimit(3, clock=ManualClock())
    engine = ticking(limit)
    for _ in range(2):
        engine.run([0] * 2, max_epochs=1)
        assert engine.state.iteration == 2
        assert limit.used == 2.0


def test_a_trainer_resumed_from_its_checkpoint_has_the_rest_of_the_time(tmp_path):
    def make(max_epochs):
        limit = TimeLimit(100, clock=ManualClock())
        run = trainer({"max_epochs": max_epochs, "seed": 1}, handlers=[limit, Checkpointer(tmp_path)])

        def tick():
            limit.clock.now += 3.0

        run.add_event_handler(Events.ITERATION_STARTED, tick)
        return run, limit

    make(2)[0].train()
    resumed, limit = make(9)
    resumed.train(resume="latest")
    assert limit.used == 102.0
    assert resumed.state.iteration == 34


@pytest.mark.parametrize("order", [1, -1])
def test_a_replay_ends_where_the_run_did(order, tmp_path):
    engine = make_engine()
    handlers = [TimeLimit(0.01), EventRecorder(tmp_path)]
    for handler in handlers[::order]:
        handler.attach(engine)
    engine.run(range(10**6), max_epochs=1)
    handlers[1].detach()
    assert engine.state.stop_reason.startswith("time limit of 0.01 s")

    whole = Replay(tmp_path)
    TimeLimit(1e-4).attach(whole)
    whole.run()
    assert len(whole.stops) == 1, "it continues, and reports this once"
    replay, limit = Replay(tmp_path, obey_terminate=True), TimeLimit(0.01)
    limit.attach(replay)
    replay.run()
    assert replay.state.iteration == engine.state.iteration
    assert replay.state.stop_reason == engine.state.stop_reason
    assert limit.used == handlers[0].used


def test_in_a_replay_a_process_begins_where_a_checkpoint_was_loaded(tmp_path):
    for max_epochs in (1, 2):
        recorder, clocked = EventRecorder(tmp_path), TimeLimit("1h", of="process")
        run = trainer({"max_epochs": max_epochs, "seed": 1}, handlers=[recorder, clocked, Checkpointer(tmp_path)])
        run.train(resume="latest")
        recorder.detach()
    replay = Replay(tmp_path)
    limit = TimeLimit("1h", of="process").attach(replay)
    replay.run()
    assert limit.used == pytest.approx(clocked.used)


# ---------------------------------------------------------------------------------------------------------- StepLimit


def test_the_limit_counts_iterations_from_where_the_run_began():
    engine = make_engine()
    StepLimit(iterations=4).attach(engine)
    engine.run([0] * 3, max_epochs=9)
    assert engine.state.iteration == 4
    assert engine.state.stop_reason == "step limit: 4 iterations of this run are made"
    engine.load_state_dict({"epoch_length": 3, "max_epochs": 9, "iteration": 6})
    engine.run([0] * 3)
    assert engine.state.iteration == 10


@pytest.mark.parametrize(("limits", "iterations"), [((None, 2), 6), ((5, 2), 5), ((7, 2), 6)])
def test_updates_end_it_after_their_iteration_and_what_comes_first_counts(limits, iterations):
    engine = UpdatingEngine(accumulate=3)
    StepLimit(*limits).attach(engine)
    engine.run([0] * 20, max_epochs=1)
    assert engine.state.iteration == iterations


def test_a_resumed_trainer_makes_as_many_again(tmp_path):
    def last_iteration(**arguments):
        run = trainer({"max_epochs": 9, "seed": 1}, handlers=[StepLimit(7), Checkpointer(tmp_path)])
        run.train(**arguments)
        return run.state.iteration

    assert [last_iteration(), last_iteration(resume="latest")] == [7, 14]


@pytest.mark.slow
@pytest.mark.parametrize(("limits", "made"), [((10, None), 10), ((None, 10), 10), ((9, None), 9), ((14, None), 14)])
def test_a_run_that_goes_back_to_a_checkpoint_gets_no_steps_for_it(limits, made, tmp_path):
    back = Back(1)
    saver = Checkpointer(tmp_path, every=Every(iterations=2), keep_last=9)
    run = trainer({"max_epochs": 99, "seed": 1}, handlers=[back, StepLimit(*limits), saver])
    run.train()
    assert back.made == made
    assert run.state.stop_reason.startswith(f"step limit: {made} ")
    run.train()
    assert back.made == 2 * made, "another run makes as many again"


def test_attached_in_the_middle_of_a_run_it_counts_from_there():
    engine, limit = make_engine(), StepLimit(iterations=2)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: limit.attach(engine))
    engine.run([0] * 9, max_epochs=1)
    assert engine.state.iteration == 5


@pytest.mark.parametrize("order", [1, -1])
def test_a_replay_of_a_run_that_continued_is_ended_once_by_each_run_of_it(order, tmp_path):
    recorder = EventRecorder(tmp_path)
    engine = Engine(lambda engine, batch: 0.0, name="trainer")
    recorder.attach(engine)
    engine.run([0] * 10, max_epochs=1)
    recorder.detach()
    replay = Replay(tmp_path)
    for limit in [StepLimit(iterations=3), StepLimit(iterations=5)][::order]:
        limit.attach(replay)
    replay.run()
    assert [(stop.iteration, stop.reason) for stop in replay.stops] == [
        (3, "step limit: 3 iterations of this run are made"),
        (5, "step limit: 5 iterations of this run are made"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"\(iterations=None, updates=None\): needs iterations or updates"),
        ({"iterations": 0}, r"\(iterations=0\): needs a whole number"),
        ({"updates": 1.5}, r"\(updates=1.5\): needs a whole number"),
        ({"iterations": True}, r"\(iterations=True\): needs a whole number"),
    ],
)
def test_invalid_limits_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=r"StepLimit" + message):
        StepLimit(**arguments)
