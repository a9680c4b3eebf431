"""What a run leaves and takes up: state_dict, loaders that give nothing, memory."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from ignite.engine import State as IgniteState

from pulsetrain.engine import Engine, Events, State


def nothing(engine, batch):
    return None


# ------------------------------------------------------------------------------------------------ state_dict


def test_state_dict_holds_only_ignites_keys(engine):
    engine.run(range(3), max_epochs=2)
    assert dict(engine.state_dict()) == {"epoch_length": 3, "iteration": 6, "max_epochs": 2}
    other = Engine(nothing)
    other.run(range(3), max_iters=4)
    assert dict(other.state_dict()) == {"epoch_length": 3, "iteration": 4, "max_iters": 4}


@pytest.mark.parametrize("stop_at", [3, 4, 5])
def test_a_run_resumed_from_a_state_dict_makes_the_remaining_iterations(either, stop_at):
    from ignite.engine import Events as IgniteEvents

    first = either(nothing)
    first.on(IgniteEvents.ITERATION_COMPLETED(once=stop_at))(lambda engine: engine.terminate())
    first.run(range(3), max_epochs=3)
    seen = []
    second = either(lambda engine, batch: seen.append(engine.state.iteration))
    second.load_state_dict(first.state_dict())
    state = second.run(range(3))
    assert seen == list(range(stop_at + 1, 10))
    assert (state.epoch, state.iteration) == (3, 9)


def test_user_keys_travel_in_the_state_dict(engine):
    engine.state_dict_user_keys.append("alpha")
    engine.state.alpha = 0.1
    engine.run([1])
    other = Engine(nothing)
    other.state_dict_user_keys.append("alpha")
    other.load_state_dict(engine.state_dict())
    assert other.state.alpha == 0.1
    with pytest.raises(ValueError, match="'alpha' is absent"):
        other.load_state_dict({"epoch_length": 3, "iteration": 3, "max_epochs": 1})


@pytest.mark.parametrize(
    "state", [{}, {"iteration": 3}, {"iteration": 3, "epoch": 1, "epoch_length": 3, "max_epochs": 2}], ids=str
)
def test_a_state_dict_that_does_not_fit_is_a_value_error(engine, state):
    with pytest.raises(ValueError, match=r"[Ss]tate.?dict"):
        engine.load_state_dict(state)


def test_the_state_has_ignites_attributes_and_ours(engine):
    from ignite.engine import State as IgniteState

    assert isinstance(engine.state, State)
    assert isinstance(engine.state, IgniteState)
    assert vars(IgniteState()).keys() <= vars(engine.state).keys()
    assert (engine.state.update, engine.state.validation_round, engine.state.save) == (0, 0, 0)
    assert engine.state.stop_reason is None
    assert "iteration: 0" in repr(engine.state)


def test_a_state_of_ignites_put_in_place_of_ours_works(engine):
    from ignite.engine import State as IgniteState

    engine.state = IgniteState()
    seen = []
    engine.on(Events.ITERATION_COMPLETED(every=2))(lambda: seen.append(engine.state.iteration))
    engine.on(Events.CHECKPOINT_LOADED(every=1))(lambda: None)
    assert engine.run(range(4)).iteration == 4
    assert seen == [2, 4]


# -------------------------------------------------------------------------------------------------- bad input


def test_a_missing_or_wrong_process_function_is_a_value_error():
    with pytest.raises(ValueError, match="must be given a processing function"):
        Engine(None)
    with pytest.raises(ValueError, match=r"takes parameters \['batch'\] but will be called with \(engine, batch\)"):
        Engine(lambda batch: None)


def test_data_that_is_not_an_iterable_is_a_type_error(engine):
    with pytest.raises(TypeError, match="data should be iterable"):
        engine.run(3)


def test_neither_data_nor_epoch_length_is_a_value_error(engine):
    with pytest.raises(ValueError, match="epoch_length should be provided if data is None"):
        engine.run()


@pytest.mark.parametrize("arguments", [{"max_epochs": 0}, {"max_iters": 0}, {"max_epochs": -1}], ids=str)
def test_a_bound_below_one_is_a_value_error_in_mid_run(engine, arguments):
    engine.on(Events.ITERATION_COMPLETED(once=2))(engine.terminate)
    engine.run(range(3), **dict.fromkeys(arguments, 5))
    with pytest.raises(ValueError, match="Please, set a correct"):
        engine.run(range(3), **arguments)


def test_an_empty_loader_is_a_value_error(engine):
    with pytest.raises(ValueError, match=r"zero size\. Please provide non-empty data"):
        engine.run([])


@pytest.mark.parametrize("epoch_length", [None, 3], ids=["length unknown", "length given"])
def test_an_exhausted_iterator_is_a_value_error_that_names_the_remedy(engine, epoch_length):
    data = iter(range(3))
    engine.run(data, epoch_length=epoch_length)
    engine.state.max_epochs = None
    engine.state.epoch_length = None
    with pytest.raises(
        ValueError, match=r"range_iterator.*: the loader gave no batch; an iterator can be run over once"
    ):
        engine.run(data, epoch_length=epoch_length)


def test_after_an_empty_iterator_a_good_one_runs(engine):
    with pytest.raises(ValueError, match="the loader gave no batch"):
        engine.run(iter([]))
    assert engine.run(iter([1, 2])).iteration == 2


def test_a_loader_that_runs_out_in_mid_run_warns_as_in_ignite(either):
    engine = either(nothing)
    with pytest.warns(UserWarning, match="Data iterator can not provide data anymore"):
        state = engine.run(iter(range(5)), epoch_length=3, max_epochs=3)
    assert state.iteration == 5


def test_a_name_already_on_the_bus_leaves_no_incomplete_engine(engine):
    with pytest.raises(ValueError, match="this bus has an engine of that name"):
        Engine(nothing, name=engine.name, bus=engine.bus)
    assert engine.bus.engines == [engine]


# ----------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
def test_memory_stays_flat_over_a_hundred_thousand_iterations(engine):
    def plain(sender, event):
        pass

    engine.on(Events.ITERATION_COMPLETED)(lambda: None)
    engine.on(Events.ITERATION_COMPLETED(every=100))(lambda engine, event: None)
    engine.on(Events.ITERATION_STARTED)(lambda engine, event: None)
    engine.on(Events.GET_BATCH_COMPLETED(every=7), on_error="warn")(lambda: None)
    engine.bus.signal(Events.ITERATION_COMPLETED).connect(plain)
    sizes = []

    @engine.on(Events.ITERATION_COMPLETED(every=10_000))
    def measure():
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        engine.run(range(100_000))
    finally:
        tracemalloc.stop()
    first, second = max(sizes[1:5]), max(sizes[5:])
    assert len(sizes) == 10
    assert second - first < 2_000  # bytes: the list of sizes itself, and counters that have left the small integers


@pytest.mark.slow
def test_a_thousand_short_runs_leaves_nothing(make_engine):
    trainer, evaluator = make_engine(), make_engine()
    evaluator.on(Events.COMPLETED)(lambda engine, event: None)
    trainer.on(Events.ITERATION_COMPLETED)(lambda: evaluator.run([1, 2]))
    sizes = []

    @trainer.on(Events.ITERATION_COMPLETED(every=250))
    def measure():
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        trainer.run(range(1000))
    finally:
        tracemalloc.stop()
    assert sizes[3] - sizes[1] < 2_000


def test_whether_a_state_has_reached_its_bound_can_be_asked_of_the_class_as_with_ignite(either):
    state = IgniteState(iteration=10, epoch=1, max_epochs=2, max_iters=None, epoch_length=10)
    assert not either._is_done(state)
    state.iteration = 20
    assert either._is_done(state)
