import copy
import math
import random

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau

from pulsetrain.engine import ConfigurationError, Engine, Events
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.engine.schedules import Constant, Cosine, Warmup
from pulsetrain.handlers import Checkpointer, EventRecorder, LRScheduler, ReduceLROnPlateau
from tests.support.engines import UpdatingEngine, validate_each_epoch
from tests.support.models import loader, regression_model, trainer

NAN = math.nan


def sgd(*rates):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=rates[0])


def rates_of(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def driven(handler, values, *others, rates=(1.0,)):
    """An engine that validates each epoch of one update, and the handler on it."""
    engine = UpdatingEngine(sgd(*rates))
    for each in (*others, handler):
        each.attach(engine)
    validate_each_epoch(engine, [{"val/loss": value} for value in values])
    engine.run([0], max_epochs=len(values))
    return engine


# ------------------------------------------------------------------------------------------------------ as torch does


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
def test_the_rates_and_the_progress_equal_torchs_bit_for_bit(mode, threshold_mode):
    draw = random.Random(f"{mode} {threshold_mode}")
    for _ in range(40):
        options = {
            "factor": draw.uniform(0.05, 0.95),
            "patience": draw.randrange(4),
            "threshold": draw.choice([0.0, 1e-4, 0.1]),
            "cooldown": draw.randrange(3),
            "min_lr": draw.choice([0.0, 1e-3]),
        }
        ours, theirs = sgd(0.3, 0.01), sgd(0.3, 0.01)
        handler = ReduceLROnPlateau(mode=mode, threshold_mode=threshold_mode, optimizer=ours, **options)
        reference = TorchReduceLROnPlateau(theirs, mode, threshold_mode=threshold_mode, **options)
        lowered = 0
        for _ in range(60):
            value = draw.choice([draw.gauss(0, 1), draw.gauss(0, 1), NAN, math.inf, -math.inf, 1.0])
            before = rates_of(theirs)
            reference.step(value)
            assert handler.step(value) == (rates_of(theirs) != before)
            assert rates_of(ours) == rates_of(theirs)
            state = handler.state_dict()
            for name in ("best", "num_bad_epochs", "cooldown_counter"):
                assert state[name] == getattr(reference, name)
            lowered += rates_of(theirs) != before
        assert lowered


def test_nothing_but_nan_lowers_the_rate_as_torch_does():
    optimizer = sgd(1.0)
    handler = ReduceLROnPlateau(patience=2, optimizer=optimizer)
    assert [handler.step(NAN) for _ in range(3)] == [False, False, True]
    assert rates_of(optimizer) == [0.1]


def test_it_judges_each_validation_of_the_engine_and_the_next_update_has_the_lowered_rate():
    engine = driven(ReduceLROnPlateau(factor=0.5, patience=1), [3.0, 3.0, 3.0, 2.0, 3.0, 3.0], rates=(1.0, 0.2))
    assert engine.used == [[1.0, 0.2]] * 3 + [[0.5, 0.1]] * 3
    assert rates_of(engine.optimizer) == [0.25, 0.05]


def test_underscore_names_are_accepted():
    assert rates_of(driven(ReduceLROnPlateau("val_loss", patience=0), [1.0, 1.0]).optimizer) == [0.1]


def test_a_rate_that_is_a_tensor_is_filled_in_place():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=rate)
    handler = ReduceLROnPlateau(patience=0, optimizer=optimizer)
    handler.step(1.0)
    assert handler.step(1.0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


def test_detached_it_leaves_the_rate_as_low_as_it_is():
    handler = ReduceLROnPlateau(patience=0)
    engine = driven(handler, [1.0, 1.0])
    handler.detach()
    assert rates_of(engine.optimizer) == [0.1]


# ------------------------------------------------------------------------------------------------- beside a schedule


@pytest.mark.parametrize("first", ["plateau", "schedule"])
def test_beside_a_schedule_each_update_runs_at_the_schedules_rate_times_the_factor(first):
    schedule = Cosine(initial_lr=1.0, total_steps=8)
    handlers = [LRScheduler(schedule), ReduceLROnPlateau(factor=0.5, patience=0)]
    if first == "plateau":
        handlers.reverse()
    engine = UpdatingEngine(sgd(1.0, 0.2))
    for handler in handlers:
        handler.attach(engine)
    validate_each_epoch(engine, [{"val/loss": value} for value in (3.0, 2.0, 2.0, 1.0, 1.0, 0.5)])
    engine.run([0], max_epochs=6)
    factors = [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    wanted = [factor * schedule.get_lr(step) for step, factor in enumerate(factors)]
    assert [used[0] for used in engine.used] == wanted
    assert [used[1] for used in engine.used] == [rate * 0.2 for rate in wanted]


def test_a_warm_up_is_followed_by_lowering_and_the_scheduler_knows_the_rate_in_force():
    scheduler = LRScheduler(Warmup(target_lr=1.0, warmup_steps=2) >> Constant(1.0))
    engine = driven(ReduceLROnPlateau(patience=1), [1.0] * 6, scheduler)
    assert engine.used == [[0.0], [0.5], [1.0], [0.1], [0.1], [pytest.approx(0.01)]]
    assert scheduler.get_last_lr() == rates_of(engine.optimizer)[0]


def test_until_it_lowers_the_rate_the_schedule_is_followed_bit_for_bit():
    schedule = Cosine(initial_lr=0.3, total_steps=7)
    engine = driven(ReduceLROnPlateau(patience=9), [1.0] * 5, LRScheduler(schedule), rates=(0.3,))
    assert [used[0] for used in engine.used] == [schedule.get_lr(step) for step in range(5)]


def torch_scheduler(engine):
    return LRScheduler(torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=2), by="epoch")


@pytest.mark.parametrize(
    ("plateau", "others", "message"),
    [
        (
            {},
            lambda engine: [torch_scheduler(engine)],
            r"LRScheduler\(schedule=StepLR\) sets the rates itself.*use a schedule",
        ),
        ({"min_lr": 0.01}, lambda engine: [LRScheduler(Constant(1.0))], r"min_lr=0.01.*pass min_lr=0.0"),
        (
            {},
            lambda engine: [LRScheduler(Constant(1.0)), ReduceLROnPlateau("val/error")],
            r"\(metric='val/loss'\): ReduceLROnPlateau\(metric='val/error'\) .*use one of the two",
        ),
    ],
)
def test_what_has_no_clear_meaning_beside_a_schedule_is_refused_at_attach(plateau, others, message):
    engine = UpdatingEngine(sgd(1.0))
    for each in others(engine):
        each.attach(engine)
    handler = ReduceLROnPlateau(**plateau)
    with pytest.raises(ConfigurationError, match=message):
        handler.attach(engine)
    handler.detach()


def test_a_schedule_that_comes_later_is_refused_before_the_first_step():
    engine = UpdatingEngine(sgd(1.0))
    ReduceLROnPlateau(min_lr=0.01).attach(engine)
    LRScheduler(Constant(1.0)).attach(engine)
    with pytest.raises(ConfigurationError, match=r"pass min_lr=0.0"):
        engine.run([0], max_epochs=1)
    assert engine.used == []


def test_a_schedule_of_another_optimizer_is_left_alone():
    engine = UpdatingEngine(sgd(1.0))
    LRScheduler(Constant(1.0), sgd(1.0)).attach(engine)
    ReduceLROnPlateau(min_lr=0.01, patience=0).attach(engine)
    validate_each_epoch(engine, [{"val/loss": 1.0}] * 2)
    engine.run([0], max_epochs=2)
    assert rates_of(engine.optimizer) == [0.1]


def test_a_schedule_of_some_of_its_groups_is_refused():
    optimizer, part = sgd(1.0, 1.0), sgd(1.0)
    part.param_groups[0] = optimizer.param_groups[0]
    engine = UpdatingEngine(optimizer)
    LRScheduler(Constant(1.0), part).attach(engine)
    with pytest.raises(ConfigurationError, match=r"\(optimizer=None\): .* of some parameter groups; pass optimizer="):
        ReduceLROnPlateau().attach(engine)


def lowered_once():
    handler = ReduceLROnPlateau(factor=0.5, patience=0, optimizer=sgd(1.0))
    handler._torch.optimizer = handler._scale  # as beside a schedule
    for _ in range(2):
        handler.step(1.0)
    return handler.state_dict()


@pytest.mark.parametrize("first", ["attach", "load"])
def test_a_progress_that_is_loaded_multiplies_the_schedule_at_once(first):
    engine = UpdatingEngine(sgd(1.0))
    scheduler = LRScheduler(Constant(0.5)).attach(engine)
    handler = ReduceLROnPlateau()
    if first == "attach":
        handler.attach(engine)
        assert scheduler.factor == 1.0
        handler.load_state_dict(lowered_once())
    else:
        handler.load_state_dict(lowered_once())
        handler.attach(engine)
    assert scheduler.factor == 0.5
    assert rates_of(engine.optimizer) == [0.25]


# ------------------------------------------------------------------------------------------------------------- resume


def run_of(folder, *more, **config):
    handlers = [ReduceLROnPlateau(factor=0.5, patience=0, threshold=0.9), Checkpointer(folder), *more]
    settings = {"max_epochs": 6, "learning_rate": 0.02, "optimizer": "adam", "seed": 3, **config}
    return trainer(settings, model=regression_model(), val_loader=loader(12, shuffle=False), handlers=handlers)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"schedule": "cosine", "warmup_steps": 3}])
def test_a_resumed_run_has_the_lowered_rate_and_the_weights_of_the_run_never_cut(config, tmp_path):
    whole = run_of(tmp_path / "whole", **config)
    history = whole.train()
    assert history["learning_rate"][-1] < history["learning_rate"][0]

    cut = run_of(tmp_path / "cut", **config)
    cut.add_event_handler(Events.EPOCH_STARTED(once=5), cut.terminate)
    cut.train()
    resumed = run_of(tmp_path / "cut", **config)
    assert resumed.train(resume="latest") == history
    assert rates_of(resumed.optimizer) == rates_of(whole.optimizer)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)


def test_a_run_from_the_start_resets_the_best_value(tmp_path):
    run = trainer(
        {"max_epochs": 3, "schedule": "cosine"},
        val_loader=loader(8),
        handlers=[ReduceLROnPlateau(patience=0, threshold=0.9)],
    )
    first = copy.deepcopy(run.train()["learning_rate"])
    assert run.train()["learning_rate"] == first


# -------------------------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1.0}, r"\(factor=1.0\): needs"),
        ({"factor": True}, r"\(factor=True\): needs"),
        ({"patience": -1}, r"\(patience=-1\): needs"),
        ({"cooldown": 1.5}, r"\(cooldown=1.5\): needs"),
        ({"threshold": NAN}, r"\(threshold=nan\): needs"),
        ({"min_lr": -0.1}, r"\(min_lr=-0.1\): needs"),
        ({"min_lr": [0.1]}, r"\(min_lr=\[0.1\]\): needs"),
        ({"mode": "minimum"}, r"\(mode='minimum'\): unknown; choose one of max, min"),
        ({"threshold_mode": "relative"}, r"\(threshold_mode='relative'\): unknown; choose one of abs, rel"),
        ({"metric": ""}, r"\(metric=''\): needs"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, message):
    with pytest.raises(ConfigurationError, match=r"ReduceLROnPlateau" + message):
        ReduceLROnPlateau(**arguments)


def test_what_is_not_an_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau\(optimizer='adam'\): needs a torch.optim.Optimizer"):
        ReduceLROnPlateau(optimizer="adam")


def test_without_an_optimizer_there_is_nothing_to_lower(tmp_path):
    with pytest.raises(RuntimeError, match="no optimizer yet; pass optimizer="):
        ReduceLROnPlateau().step(1.0)
    with pytest.raises(ConfigurationError, match=r"'plain' has no torch optimizer; pass optimizer="):
        ReduceLROnPlateau().attach(Engine(lambda engine, batch: 0.0, name="plain"))
    trainer({"max_epochs": 1}, handlers=[EventRecorder(tmp_path)]).train()
    with pytest.raises(RecordingError, match=r"has no optimizer whose rates.*pass optimizer="):
        ReduceLROnPlateau().attach(Replay(tmp_path))
