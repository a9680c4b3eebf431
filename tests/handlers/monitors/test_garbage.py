import gc

import pytest

from pulsetrain.engine import ConfigurationError, Events, Every
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder, Garbage
from tests.support.engines import make_engine
from tests.support.models import loader, trainer


class Collections:
    """Notes each collection: where in the run it came, and up to which generation."""

    def __init__(self, engine):
        self.engine, self.place, self.found = engine, "outside", []
        for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED):
            engine.add_event_handler(event, self._at, event.value, phase=0)

    def _at(self, event):
        self.place = event

    def __call__(self, phase, info):
        if phase == "start":
            self.found.append((self.engine.state.epoch, self.engine.state.iteration, self.place, info["generation"]))


@pytest.fixture(autouse=True)
def collector():
    gc.enable()
    frozen = gc.get_freeze_count()  # by the collection of the tests
    gc.unfreeze()
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)  # it would come in every step
    yield
    gc.set_threshold(*before)
    gc.enable()
    gc.unfreeze()
    if frozen:
        gc.freeze()


def litter(iteration):
    """A step that leaves garbage which refers to itself."""
    for _ in range(200):
        cycle = []
        cycle.append(cycle)


def collections_of(handler, run):
    engine = make_engine(litter)
    if handler is not None:
        handler.attach(engine)
    noted = Collections(engine)
    gc.callbacks.append(noted)
    try:
        run(engine)
    finally:
        gc.callbacks.remove(noted)
    return [each for each in noted.found if each[2] != "outside" and each[2] != "completed"]


def test_without_it_collections_happen_inside_steps():
    found = collections_of(None, lambda engine: engine.run([0, 1], max_epochs=3))
    assert {place for _, _, place, _ in found} >= {"iteration_started"}


def test_collections_happen_only_at_the_ends_of_epochs():
    found = collections_of(Garbage(), lambda engine: engine.run([0, 1], max_epochs=3))
    assert found == [(epoch, 2 * epoch, "epoch_completed", 2) for epoch in (1, 2, 3)]


@pytest.mark.slow
def test_the_cadence_and_the_generation_are_those_asked_for():
    handler = Garbage(Every(iterations=2) | Every(epochs=1), generation=1)
    found = collections_of(handler, lambda engine: engine.run([0, 1, 2], max_epochs=2))
    assert found == [
        (1, 2, "iteration_completed", 1),
        (1, 3, "epoch_completed", 1),
        (2, 4, "iteration_completed", 1),
        (2, 6, "iteration_completed", 1),
        (2, 6, "epoch_completed", 1),
    ]


def state():
    return gc.isenabled(), gc.get_freeze_count()


def inside(engine, event=Events.ITERATION_COMPLETED):
    seen = []
    engine.add_event_handler(event, lambda: seen.append((gc.isenabled(), gc.get_freeze_count() > 0)))
    return seen


def ended(engine):
    engine.run([0, 1], max_epochs=2)


def terminated(engine):
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.terminate)
    engine.run([0, 1], max_epochs=2)


def terminated_without_completed(engine):
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.terminate, skip_completed=True)
    engine.run([0, 1], max_epochs=2)


def failing(engine):
    def fail(*_):
        raise OSError("the disk is full")

    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), fail)
    engine.bus.subscribe(Events.EXCEPTION_RAISED, fail, sender=engine)
    with pytest.raises(OSError, match="the disk is full"):
        engine.run([0, 1], max_epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("run", [ended, terminated, terminated_without_completed, failing])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_restored_however_the_run_ends(run, enabled):
    engine = make_engine(litter)
    Garbage().attach(engine)
    seen = inside(engine)
    if not enabled:
        gc.disable()
    before = state()
    run(engine)
    assert state() == before == (enabled, 0)
    assert set(seen) == {(False, True)}


@pytest.mark.slow
def test_detaching_in_mid_run_restores_the_collector():
    engine, handler = make_engine(litter), Garbage()
    handler.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), handler.detach)
    seen = inside(engine)
    engine.run([0, 1, 2], max_epochs=1)
    assert seen == [(False, True), (True, False), (True, False)]


def test_objects_frozen_by_others_stay_frozen():
    gc.freeze()
    before = gc.get_freeze_count()
    engine = make_engine(litter)
    Garbage().attach(engine)
    engine.run([0, 1], max_epochs=1)
    # objects that have been freed since are no longer counted
    assert 0 < gc.get_freeze_count() <= before


@pytest.mark.slow
def test_it_does_not_change_training():
    runs = [trainer({"max_epochs": 2, "seed": 1}, val_loader=loader(8), handlers=each) for each in ([], [Garbage()])]
    assert runs[0].train() == runs[1].train()
    assert gc.isenabled()


@pytest.mark.slow
def test_wrong_arguments_and_a_replay_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"Garbage\(every=100\): needs an Every"):
        Garbage(100)
    with pytest.raises(ConfigurationError, match=r"Garbage\(generation=3\): needs 0, 1 or 2"):
        Garbage(generation=3)
    trainer({"max_epochs": 1}, handlers=[EventRecorder(tmp_path)]).train()
    with pytest.raises(RecordingError, match=r"Garbage.*no process that trains.*attach this handler to a run"):
        Garbage().attach(Replay(tmp_path))
