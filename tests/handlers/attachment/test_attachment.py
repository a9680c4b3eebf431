import gc
import inspect
import pickle
import weakref

import pytest
import structlog

from pulsetrain.engine import Engine, EventBus, Events
from pulsetrain.engine.errors import ArgumentTypeError, RunFolderError
from pulsetrain.handlers import CrashBundle, CSVLogger, HangWatchdog, JSONLinesLogger, Plots, TensorBoardLogger
from pulsetrain.handlers.attachment.attachment import Attachment, Handler
from tests.support.engines import make_engine, subscriptions


def nothing(engine):
    pass


class Bound(Handler):
    """A handler as users write it."""

    def __init__(self, limit: float, *, margin: float = 0.5) -> None:
        self.limit, self.margin = limit, margin


class Named(Bound):
    def __init__(self, name: str, **options: float) -> None:
        super().__init__(**options)
        self.name = name


class Inherited(Bound): ...


def test_a_misspelt_keyword_of_a_users_handler_is_answered_with_the_nearest():
    for make, name in ((Bound, "Bound"), (Inherited, "Inherited"), (lambda **options: Named("a", **options), "Bound")):
        rule = rf"^{name}\(margn=1\): is not an argument; did you mean 'margin'\?$"
        with pytest.raises(ArgumentTypeError, match=rule):
            make(limit=2.0, margn=1)


def test_other_wrong_arguments_have_pythons_own_message():
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'limit'"):
        Bound()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        Bound(1.0, 2.0)  # type: ignore[call-arg, misc]


def test_a_users_handler_keeps_its_signature_and_is_pickled():
    assert str(inspect.signature(Bound)) == "(limit: float, *, margin: float = 0.5) -> None"
    assert str(inspect.signature(Named)) == "(name: str, **options: float) -> None"
    assert Bound.__init__.__qualname__ == "Bound.__init__"
    assert vars(pickle.loads(pickle.dumps(Named("a", limit=2.0)))) == {"name": "a", "limit": 2.0, "margin": 0.5}


def test_an_attach_that_fails_half_way_leaves_nothing_and_can_be_tried_again():
    engine, attachment = make_engine(), Attachment("Place")
    before = subscriptions(engine.bus)

    def attach(event):
        with attachment.to(engine) as subscribe:
            subscribe(Events.STARTED, nothing)
            subscribe(event, nothing)

    with pytest.raises(ValueError, match="counter"):
        attach(Events.TERMINATE(every=2))
    assert subscriptions(engine.bus) == before
    attach(Events.COMPLETED)
    assert subscriptions(engine.bus) != before


def test_it_subscribes_to_one_engine_and_not_to_others_on_the_bus():
    bus, seen = EventBus(), []
    mine, other = make_engine(bus=bus), Engine(lambda engine, batch: None, bus=bus)
    with Attachment("Place").to(mine) as subscribe:
        subscribe(Events.EPOCH_COMPLETED | Events.STARTED, lambda engine: seen.append(engine.name))
    other.run([0], max_epochs=1)
    mine.run([0], max_epochs=1)
    assert seen == ["trainer", "trainer"]


def test_a_handler_of_exceptions_does_not_swallow_them():
    engine = make_engine(lambda i: 1 / 0)
    with Attachment("Place").to(engine) as subscribe:
        subscribe(Events.EXCEPTION_RAISED, lambda engine, event: None)
    with pytest.raises(ZeroDivisionError):
        engine.run([0], max_epochs=1)


@pytest.mark.slow
def test_it_keeps_no_engine_alive():
    bus, attachment = EventBus(), Attachment("Place")
    engine = make_engine(bus=bus)
    with attachment.to(engine) as subscribe:
        subscribe(Events.STARTED, nothing)
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    attachment.cancel()


@pytest.mark.parametrize(
    "make",
    [CSVLogger, JSONLinesLogger, TensorBoardLogger, Plots, HangWatchdog, CrashBundle],
    ids=lambda make: make.__name__,
)
def test_an_observer_without_its_folder_is_left_out_and_the_run_continues(make, tmp_path):
    (tmp_path / "file").touch()
    engine = Engine(lambda engine, batch: 1.0, name="trainer")
    before = subscriptions(engine.bus)
    with structlog.testing.capture_logs() as logs:
        handler = make(tmp_path / "file" / "run").attach(engine)
    assert [line["event"] for line in logs] == [f"the run continues without {make.__name__}"]
    assert "cannot be written" in logs[0]["reason"]
    assert subscriptions(engine.bus) == before
    engine.run([1, 2], max_epochs=1)
    handler.detach()
    if "on_error" in inspect.signature(make.__init__).parameters:
        with pytest.raises(RunFolderError, match="cannot be written"):
            make(tmp_path / "file" / "run", on_error="raise").attach(engine)
