import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pulsetrain.engine import CheckpointError, ConfigurationError, Engine, Events, Every, OptimizerStepCompleted, Phase
from pulsetrain.engine.checkpoint import load_checkpoint
from pulsetrain.engine.optimizers import is_schedule_free
from pulsetrain.handlers import EMA, SWA, Checkpointer
from tests.support.engines import UpdatingEngine
from tests.support.models import loader, regression_model, trainer

TRAINING = {"optimizer": "adamw", "learning_rate": 0.05, "max_epochs": 3, "seed": 7}


class Setting(Engine):
    """Makes one weight each batch's value, and that an update."""

    def __init__(self):
        super().__init__(self._step, name="trainer")
        self.model = nn.Linear(1, 1, bias=False)

    def _step(self, engine, batch):
        nn.init.constant_(self.model.weight, batch)
        self.state.update += 1
        self.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=(1.0,)))


def averaged_weight(handler, engine):
    with handler.applied():
        return engine.model.weight.item()


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def averaged(handler, model):
    with handler.applied():
        return snapshot(model)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_of(*handlers, **config):
    return trainer(
        {**TRAINING, **config},
        model=regression_model(dropout=0.3),
        val_loader=loader(12, shuffle=False),
        handlers=list(handlers),
    )


# ------------------------------------------------------------------------------------------------- averaged values


def test_the_average_of_one_weight_follows_the_formula():
    engine = Setting()
    ema = EMA(decay=0.75).attach(engine)
    engine.run([8.0, 4.0, 0.0], max_epochs=1)
    assert ema.number_averaged == 3
    assert averaged_weight(ema, engine) == 0.75 * (0.75 * 8.0 + 0.25 * 4.0) + 0.25 * 0.0
    assert engine.model.weight.item() == 0.0


def test_a_trainers_average_is_torchs_bit_for_bit():
    ema = EMA(decay=0.9)
    run = run_of(ema, accumulate=3)
    theirs = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, lambda: theirs.update_parameters(run.model))
    run.train()
    assert ema.number_averaged == 10  # of 30 batches
    copied = regression_model()
    ema.copy_to(copied)
    assert same(snapshot(copied), theirs.module.state_dict())


def test_a_plain_engine_without_updates_averages_at_its_iterations():
    model = nn.Linear(1, 1, bias=False)
    engine = Engine(lambda engine, batch: nn.init.constant_(model.weight, batch))
    ema = EMA(decay=0.5, model=model, every=Every(iterations=1)).attach(engine)
    engine.run([8.0, 4.0], max_epochs=1)
    with ema.applied():
        assert model.weight.item() == 6.0


@pytest.mark.parametrize(
    ("every", "weights"),
    [
        (Every(updates=2), [4.0, 2.0, 4.0, 2.0]),
        (Every(iterations=3), [3.0, 4.0]),
        (Every(epochs=1), [2.0, 2.0]),
        (Every(iterations=4, epochs=1, updates=4), [2.0, 2.0]),  # where they meet, one occasion
    ],
)
def test_the_cadence_says_which_weights_are_averaged(every, weights):
    engine, seen = Setting(), {}
    ema = EMA(decay=0.0, every=every).attach(engine)  # the average is the last weight that was taken
    for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
        engine.add_event_handler(event, lambda: seen.update({ema.number_averaged: averaged_weight(ema, engine)}))
    engine.run([5.0, 4.0, 3.0, 2.0], max_epochs=2)
    seen.pop(0, None)
    assert seen == dict(enumerate(weights, start=1))


def test_a_second_run_of_an_engine_continues_with_the_average_from_its_first_iteration_on():
    model = nn.Linear(1, 1, bias=False)
    engine = Engine(lambda engine, batch: nn.init.constant_(model.weight, batch))
    ema = EMA(decay=0.5, model=model, every=Every(iterations=1)).attach(engine)
    engine.run([8.0], max_epochs=1)
    engine.run([4.0], max_epochs=1)
    with ema.applied():
        assert model.weight.item() == 6.0


def test_attached_to_another_model_the_average_starts_over():
    first, second = Setting(), Setting()
    ema = EMA(decay=0.5).attach(first)
    first.run([8.0], max_epochs=1)
    ema.detach()
    assert averaged_weight(ema, first) == 8.0
    second.add_event_handler(Events.EPOCH_STARTED, lambda: ema.attach(second))  # in the middle of a run, too
    second.run([4.0], max_epochs=1)
    assert ema.number_averaged == 1
    assert averaged_weight(ema, second) == 4.0


def test_attached_again_to_its_model_the_average_continues():
    engine = Setting()
    ema = EMA(decay=0.5).attach(engine)
    engine.run([8.0], max_epochs=1)
    ema.detach()
    ema.attach(engine)
    engine.run([4.0], max_epochs=1)
    assert averaged_weight(ema, engine) == 6.0


# ------------------------------------------------------------------------------------------------------- validation


def losses_of_both(run, ema):
    """The validation losses of the raw and of the averaged weights, by a trainer that averages nothing."""
    plain = trainer(TRAINING, val_loader=loader(12, shuffle=False))
    plain.model.load_state_dict(run.model.state_dict())
    raw = plain.validate()["val/loss"]
    ema.copy_to(plain.model)
    return raw, plain.validate()["val/loss"]


def test_validation_sees_the_averaged_weights_however_it_is_run():
    ema = EMA(decay=0.9)
    run = run_of(ema)
    history = run.train()
    raw, expected = losses_of_both(run, ema)
    assert raw != expected
    assert run.validate()["val/loss"] == expected
    assert run.evaluator.run(loader(12, shuffle=False)).metrics["loss"] == expected
    assert history["val/loss"][2] == expected
    with ema.applied():
        assert run.validate()["val/loss"] == expected


@pytest.mark.parametrize(
    ("averaging", "validating"),
    [
        (Every(iterations=1), Every(iterations=5)),
        (Every(updates=1), Every(iterations=5)),
        (Every(epochs=1), Every(epochs=1)),
    ],
)
def test_weights_are_averaged_before_a_validation_at_the_same_point(averaging, validating):
    ema = EMA(decay=0.0, every=averaging)  # the average is the weights at its last occasion
    run = run_of(ema, validate_every=validating)
    raw, equal = {}, []
    run.add_event_handler(Events.VALIDATION_STARTED, lambda: raw.update(snapshot(run.model)))
    run.evaluator.add_event_handler(Events.STARTED, lambda: equal.append(same(snapshot(run.model), raw)))
    run.train()
    assert equal == [True] * run.state.validation_round
    assert len(equal) >= 3


def test_the_weights_are_the_raw_ones_when_validation_is_announced_and_over():
    ema = EMA(decay=0.9)
    run = run_of(ema)
    seen = {}
    for event in (Events.VALIDATION_STARTED, Events.VALIDATION_COMPLETED):
        run.add_event_handler(event, lambda engine, event: seen.update({event.type: snapshot(run.model)}))
    run.evaluator.add_event_handler(Events.STARTED, lambda: seen.update(inside=snapshot(run.model)))
    run.train()
    assert same(seen["validation_started"], snapshot(run.model))
    assert same(seen["validation_completed"], snapshot(run.model))
    assert same(seen["inside"], averaged(ema, run.model))
    assert not same(seen["inside"], snapshot(run.model))


def test_the_weights_are_the_raw_ones_after_a_validation_that_failed():
    run = run_of(EMA(decay=0.9), validate_every=None)
    run.train()
    before = snapshot(run.model)

    @run.evaluator.on(Events.ITERATION_COMPLETED)
    def fail():
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        run.validate()
    assert same(snapshot(run.model), before)
    assert run.model.training


def test_without_validate_the_raw_weights_are_validated():
    ema = EMA(decay=0.9, validate=False)
    run = run_of(ema)
    run.train()
    assert run.validate()["val/loss"] == losses_of_both(run, ema)[0]
    assert ema.applied not in run.evaluator.contexts


def test_detaching_gives_validation_back_to_the_raw_weights():
    ema = EMA(decay=0.9)
    run = run_of(ema)
    run.train()
    assert run.evaluator.contexts.count(ema.applied) == 1
    ema.detach()
    assert ema.applied not in run.evaluator.contexts
    assert run.validate()["val/loss"] == losses_of_both(run, ema)[0]


def test_a_second_average_of_the_same_weights_in_validation_is_refused():
    run = run_of(EMA())
    swa = SWA(after_epoch=0, bn_loader=loader())
    with pytest.raises(ConfigurationError, match=r"SWA\(validate=True\): EMA validates .* validate=False to one"):
        swa.attach(run)
    assert swa.applied not in run.evaluator.contexts
    SWA(after_epoch=0, bn_loader=loader(), validate=False).attach(run)
    other = EMA(model=nn.Linear(1, 1)).attach(run)  # of other weights
    assert other.applied in run.evaluator.contexts


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_sgd"])
def test_an_average_beside_that_of_a_schedule_free_optimizer_is_not_for_validation(name):
    run = run_of(optimizer=name)
    assert is_schedule_free(run.optimizer)
    message = r"\(validate=True\): \w+ScheduleFree is schedule-free, and validation .*; pass validate=False, or train"
    for handler in (EMA(), SWA(after_epoch=0, bn_loader=loader())):
        contexts = list(run.evaluator.contexts)
        with pytest.raises(ConfigurationError, match=message):
            handler.attach(run)
        assert run.evaluator.contexts == contexts
    EMA(model=nn.Linear(1, 1)).attach(run)  # of other weights
    ema = EMA(validate=False).attach(run)
    run.train()
    assert ema.number_averaged == run.state.update


# --------------------------------------------------------------------------------- checkpoints, resuming, repeated runs


class PlugPulled(Exception):  # noqa: N818
    """Raised to interrupt a run."""


def saving_run(folder, every, iteration):
    ema, checkpointer = EMA(decay=0.9, every=every), Checkpointer(folder, every=Every(iterations=iteration))
    return run_of(ema, checkpointer, accumulate=3, validate_every=Every(iterations=7)), ema


# 10 batches an epoch, 3 an update: inside an update, at an update, at an epoch's last batch before it is completed
@pytest.mark.parametrize("every", [None, Every(iterations=5, epochs=1)])
@pytest.mark.parametrize("iteration", [5, 6, 10, 21])
def test_a_resumed_run_equals_the_uninterrupted_one(iteration, every, tmp_path):
    whole, expected = saving_run(tmp_path / "whole", every, 99)
    history = whole.train()
    run, _ = saving_run(tmp_path / "cut", every, iteration)

    @run.on(Events.ITERATION_COMPLETED(once=iteration), phase=Phase.PERSIST)
    def pull():
        raise PlugPulled

    with pytest.raises(PlugPulled):
        run.train()
    torch.manual_seed(999)  # another process
    again, ema = saving_run(tmp_path / "cut", every, 99)
    assert again.train(resume="latest") == history
    assert same(snapshot(again.model), snapshot(whole.model))
    assert ema.number_averaged == expected.number_averaged
    assert same(averaged(ema, again.model), averaged(expected, whole.model))


def test_a_checkpoint_keeps_the_raw_weights_as_the_models_and_the_average_as_the_handlers(tmp_path):
    ema = EMA(decay=0.9)
    run = run_of(ema, Checkpointer(tmp_path, every=Every(epochs=9)))
    paths = []
    run.add_event_handler(Events.VALIDATION_COMPLETED, lambda: paths.append(run.save_checkpoint("validated")))
    run.train()
    saved = load_checkpoint(paths[-1])
    assert same(saved["model"], snapshot(run.model))
    assert same(saved["handlers"]["EMA"]["state"]["average"]["weights"], averaged(ema, run.model))
    assert not same(saved["model"], averaged(ema, run.model))


def test_a_checkpoint_is_refused_while_the_model_holds_the_average(tmp_path):
    run = run_of(EMA(), Checkpointer(tmp_path))
    run.train()
    before = sorted(tmp_path.rglob("*"))
    run.evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: run.save_checkpoint())
    with pytest.raises(RuntimeError, match="the model holds the averaged weights now"):
        run.validate()
    assert sorted(tmp_path.rglob("*")) == before


def test_an_average_of_another_model_is_refused_and_the_trainer_is_as_it_was(tmp_path):
    run = run_of(EMA(model=nn.Linear(1, 2), every=Every(iterations=1)), Checkpointer(tmp_path))
    run.train()
    again = run_of(EMA(model=nn.Linear(1, 3), every=Every(iterations=1)), Checkpointer(tmp_path))
    before = snapshot(again.model)
    with pytest.raises(CheckpointError, match=r"shape: bias is \(2,\) float32 in the checkpoint, \(3,\) float32 in"):
        again.train(resume="latest")
    assert same(snapshot(again.model), before)
    assert again.handlers[0].number_averaged == 0


def test_training_from_the_start_resets_the_average():
    ema = EMA(decay=0.9)
    run = run_of(ema)
    first = snapshot(run.model)
    run.train()
    once = averaged(ema, run.model)
    run.model.load_state_dict(first)
    run.optimizer.state.clear()
    run.train()
    assert ema.number_averaged == 30
    assert same(averaged(ema, run.model), once)


def test_a_state_loaded_before_there_is_a_model_waits_for_it():
    engine = Setting()
    ema = EMA(decay=0.5).attach(engine)
    engine.run([8.0], max_epochs=1)
    again = EMA(decay=0.5)
    again.load_state_dict(ema.state_dict())
    ema.detach()
    again.attach(engine)
    engine.run([4.0], max_epochs=1)
    assert averaged_weight(again, engine) == 6.0


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan"), "0.9", True, None])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ConfigurationError, match=r"EMA\(decay=.*\): needs a number of at least 0 and below 1"):
        EMA(decay=decay)


def test_a_cadence_that_is_not_an_every_and_a_model_that_is_none_are_refused():
    with pytest.raises(TypeError, match=r"EMA\(every=10\): needs an Every"):
        EMA(every=10)
    with pytest.raises(TypeError, match=r"EMA\(model=dict\): needs a torch.nn.Module"):
        EMA(model={})


def test_an_engine_without_a_model_is_refused_when_attaching():
    with pytest.raises(ConfigurationError, match=r"EMA\(model=None\): 'bare' has no torch model; pass model="):
        EMA().attach(Engine(lambda engine, batch: None, name="bare"))


def test_without_a_model_there_is_nothing_to_apply():
    with pytest.raises(RuntimeError, match=r"EMA.applied\(\): no model yet; pass model= or attach"):
        EMA().applied()


def test_a_run_that_averaged_nothing_says_so_at_its_end():
    engine = Engine(lambda engine, batch: None)
    EMA(model=nn.Linear(1, 1)).attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=1)
    assert "EMA has averaged nothing" in logs[0]["event"]
    assert logs[0]["every"].startswith("Every(")
    updating = UpdatingEngine()
    EMA().attach(updating)
    with capture_logs() as logs:
        updating.run([0], max_epochs=1)
    assert logs == []
