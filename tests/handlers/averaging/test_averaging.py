"""The contract of every handler that averages weights."""

import re

import pytest
from structlog.testing import capture_logs
from torch import nn

from pulsetrain.engine import ConfigurationError, Engine, Events, Every
from pulsetrain.engine.checkpoint import load_checkpoint
from pulsetrain.engine.optimizers import is_schedule_free
from pulsetrain.handlers import EMA, SWA, Checkpointer
from tests.support.averages import TRAINING, Setting, averaged, averaged_weight, run_of, same, snapshot
from tests.support.models import loader, trainer


def ema(**options):
    return EMA(**{"decay": 0.9, **options})


def swa(**options):
    return SWA(**{"after_epoch": 0, "bn_loader": loader(shuffle=False), **options})


each_kind = pytest.mark.parametrize("make", [ema, swa])


def losses_of_both(run, handler):
    """The validation losses of the raw and of the averaged weights, by a trainer that averages nothing."""
    plain = trainer(TRAINING, val_loader=loader(12, shuffle=False))
    plain.model.load_state_dict(run.model.state_dict())
    raw = plain.validate()["val/loss"]
    handler.copy_to(plain.model)
    return raw, plain.validate()["val/loss"]


# ------------------------------------------------------------------------------------------------------- validation


@each_kind
def test_validation_sees_the_average_however_it_is_run(make):
    handler = make()
    run = run_of(handler)
    history = run.train()
    raw, expected = losses_of_both(run, handler)
    assert raw != expected
    assert run.validate()["val/loss"] == expected
    assert run.evaluator.run(loader(12, shuffle=False)).metrics["loss"] == expected
    assert history["val/loss"][2] == expected
    with handler.applied():
        assert run.validate()["val/loss"] == expected


@each_kind
def test_the_weights_are_the_raw_ones_when_validation_is_announced_and_over(make):
    handler = make()
    run = run_of(handler)
    seen = {}
    for event in (Events.VALIDATION_STARTED, Events.VALIDATION_COMPLETED):
        run.add_event_handler(event, lambda engine, event: seen.update({event.type: snapshot(run.model)}))
    run.evaluator.add_event_handler(Events.STARTED, lambda: seen.update(inside=snapshot(run.model)))
    run.train()
    assert same(seen["validation_started"], snapshot(run.model))
    assert same(seen["validation_completed"], snapshot(run.model))
    assert same(seen["inside"], averaged(handler, run.model))
    assert not same(seen["inside"], snapshot(run.model))


@each_kind
def test_the_weights_are_the_raw_ones_after_a_validation_that_failed(make):
    run = run_of(make(), validate_every=None)
    run.train()
    before = snapshot(run.model)

    @run.evaluator.on(Events.ITERATION_COMPLETED)
    def fail():
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        run.validate()
    assert same(snapshot(run.model), before)
    assert run.model.training


@each_kind
def test_without_validate_the_raw_weights_are_validated(make):
    handler = make(validate=False)
    run = run_of(handler)
    run.train()
    assert run.validate()["val/loss"] == losses_of_both(run, handler)[0]
    assert handler.applied not in run.evaluator.contexts


@each_kind
def test_after_detaching_the_raw_weights_are_validated(make):
    handler = make()
    run = run_of(handler)
    run.train()
    assert run.evaluator.contexts.count(handler.applied) == 1
    handler.detach()
    assert handler.applied not in run.evaluator.contexts
    assert run.validate()["val/loss"] == losses_of_both(run, handler)[0]


@pytest.mark.parametrize(("first", "second"), [(ema, swa), (swa, ema)])
def test_a_second_average_of_the_same_weights_in_validation_is_refused(first, second):
    there, other = first(), second()
    run = run_of(there)
    subscribed = run.hears(Events.OPTIMIZER_STEP_COMPLETED)
    message = rf"{type(other).__name__}\(validate=True\): {type(there).__name__} validates .* validate=False to one"
    with pytest.raises(ConfigurationError, match=message):
        other.attach(run)
    assert other.applied not in run.evaluator.contexts
    assert run.hears(Events.OPTIMIZER_STEP_COMPLETED) == subscribed
    second(validate=False).attach(run)
    of_other_weights = EMA(model=nn.Linear(1, 1)).attach(run)
    assert of_other_weights.applied in run.evaluator.contexts


@each_kind
@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_sgd"])
def test_an_average_beside_that_of_a_schedule_free_optimizer_is_not_for_validation(name, make):
    run = run_of(optimizer=name)
    assert is_schedule_free(run.optimizer)
    message = r"\(validate=True\): \w+ScheduleFree is schedule-free, and validation .*; pass validate=False, or train"
    contexts = list(run.evaluator.contexts)
    with pytest.raises(ConfigurationError, match=message):
        make().attach(run)
    assert run.evaluator.contexts == contexts
    EMA(model=nn.Linear(1, 1)).attach(run)  # of other weights
    handler = make(validate=False, every=Every(updates=1)).attach(run)
    run.train()
    assert handler.number_averaged == run.state.update


# ------------------------------------------------------------------------------------------ checkpoints, repeated runs


@each_kind
def test_a_checkpoint_keeps_the_raw_weights_as_the_models_and_the_average_as_the_handlers(make, tmp_path):
    handler = make()
    run = run_of(handler, Checkpointer(tmp_path, every=Every(epochs=9)))
    paths = []
    run.add_event_handler(Events.VALIDATION_COMPLETED, lambda: paths.append(run.save_checkpoint("validated")))
    run.train()
    saved = load_checkpoint(paths[-1])
    average = saved["handlers"][type(handler).__name__]["state"]["average"]
    assert same(saved["model"], snapshot(run.model))
    assert same(average["weights"], averaged(handler, run.model))
    assert not same(saved["model"], averaged(handler, run.model))
    assert average["buffers_kept"] == (make is swa)


@each_kind
def test_a_checkpoint_is_refused_while_the_model_holds_the_average(make, tmp_path):
    run = run_of(make(), Checkpointer(tmp_path))
    run.train()
    before = sorted(tmp_path.rglob("*-checkpoint*/*"))
    run.evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: run.save_checkpoint())
    with pytest.raises(RuntimeError, match="the model holds the averaged weights now"):
        run.validate()
    assert sorted(tmp_path.rglob("*-checkpoint*/*")) == before != []


@pytest.mark.parametrize(("make", "times"), [(ema, 30), (lambda: swa(after_epoch=1), 2)], ids=["ema", "swa"])
def test_training_from_the_start_resets_the_average(make, times):
    handler = make()
    run = run_of(handler)
    first = snapshot(run.model)
    run.train()
    once = averaged(handler, run.model)
    run.model.load_state_dict(first)
    run.optimizer.state.clear()
    run.train()
    assert handler.number_averaged == times
    assert same(averaged(handler, run.model), once)


@pytest.mark.parametrize("make", [lambda: EMA(decay=0.5), lambda: SWA(after_epoch=0)], ids=["ema", "swa"])
def test_a_state_loaded_before_there_is_a_model_waits_for_it(make):
    engine = Setting()
    handler = make().attach(engine)
    engine.run([8.0], max_epochs=1)
    again = make()
    again.load_state_dict(handler.state_dict())
    handler.detach()
    again.attach(engine)
    engine.run([4.0], max_epochs=1)
    assert averaged_weight(again, engine) == 6.0


# ------------------------------------------------------------------------------------------------------- bad input


@each_kind
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 10}, "(every=10): needs an Every"),
        ({"every": "epoch"}, "(every='epoch'): needs an Every"),
        ({"model": {}}, "(model={}): needs a torch.nn.Module"),
        ({"model": "net"}, "(model='net'): needs a torch.nn.Module"),
    ],
)
def test_a_wrong_cadence_and_a_wrong_model_are_refused(make, options, message):
    with pytest.raises(TypeError, match=f"^{make.__name__.upper()}{re.escape(message)}"):
        make(**options)


@each_kind
def test_an_engine_without_a_model_is_refused_when_attaching(make):
    with pytest.raises(ConfigurationError, match=r"(EMA|SWA)\(model=None\): 'bare' has no torch model; pass model="):
        make().attach(Engine(lambda engine, batch: None, name="bare"))


@each_kind
def test_applying_without_a_model_is_refused(make):
    with (
        pytest.raises(RuntimeError, match=r"(EMA|SWA).applied\(\): no model yet; pass model= or attach"),
        make().applied(),
    ):
        pytest.fail("entered")


@each_kind
def test_a_run_that_averaged_nothing_says_so_at_its_end(make):
    engine = Engine(lambda engine, batch: None)
    handler = make(model=nn.Linear(1, 1), every=Every(updates=1)).attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=1)
    assert f"{type(handler).__name__} has averaged nothing" in logs[0]["event"]
