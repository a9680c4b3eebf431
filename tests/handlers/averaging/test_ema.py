import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pulsetrain.engine import CheckpointError, ConfigurationError, Engine, Events, Every, Phase
from pulsetrain.handlers import EMA, Checkpointer
from tests.support.averages import (
    PlugPulled,
    Setting,
    averaged,
    averaged_weight,
    pull_the_plug,
    run_of,
    same,
    snapshot,
)
from tests.support.models import regression_model

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


# --------------------------------------------------------------------------------- checkpoints, resuming, repeated runs


def saving_run(folder, every, iteration):
    ema, checkpointer = EMA(decay=0.9, every=every), Checkpointer(folder, every=Every(iterations=iteration))
    return run_of(ema, checkpointer, accumulate=3, validate_every=Every(iterations=7)), ema


# 10 batches an epoch, 3 an update: inside an update, at an update, at an epoch's last batch before it is completed
@pytest.mark.slow
@pytest.mark.parametrize("every", [None, Every(iterations=5, epochs=1)])
@pytest.mark.parametrize("iteration", [5, 6, 10, 21])
def test_a_resumed_run_equals_the_uninterrupted_one(iteration, every, tmp_path):
    whole, expected = saving_run(tmp_path / "whole", every, 99)
    history = whole.train()
    run, _ = saving_run(tmp_path / "cut", every, iteration)

    run.add_event_handler(Events.ITERATION_COMPLETED(once=iteration), pull_the_plug, phase=Phase.PERSIST)
    with pytest.raises(PlugPulled):
        run.train()
    torch.manual_seed(999)  # another process
    again, ema = saving_run(tmp_path / "cut", every, 99)
    assert again.train(resume="latest") == history
    assert same(snapshot(again.model), snapshot(whole.model))
    assert ema.number_averaged == expected.number_averaged
    assert same(averaged(ema, again.model), averaged(expected, whole.model))


def test_the_average_of_a_different_model_is_refused_and_the_trainer_is_unchanged(tmp_path):
    run = run_of(EMA(model=nn.Linear(1, 2), every=Every(iterations=1)), Checkpointer(tmp_path))
    run.train()
    again = run_of(EMA(model=nn.Linear(1, 3), every=Every(iterations=1)), Checkpointer(tmp_path))
    before = snapshot(again.model)
    with pytest.raises(CheckpointError, match=r"shape: bias is \(2,\) float32 in the checkpoint, \(3,\) float32 in"):
        again.train(resume="latest")
    assert same(snapshot(again.model), before)
    assert again.handlers[0].number_averaged == 0


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan"), "0.9", True, None])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ConfigurationError, match=r"EMA\(decay=.*\): needs a number of at least 0 and below 1"):
        EMA(decay=decay)
