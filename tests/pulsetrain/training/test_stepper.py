"""A stepper is the process function of a plain engine: it needs no trainer."""

import pytest
import torch
from torch import nn

from pulsetrain.engine import Accumulate, Engine, Events, SupervisedStrategy, TorchBackend
from pulsetrain.engine.backends.model_store import InPlaceStore
from pulsetrain.training.stepper import Stepper
from tests.support.models import loader, regression_model


def make(accumulate=1, **options):
    backend, model = TorchBackend("cpu"), regression_model()
    store = InPlaceStore(backend, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return Stepper(backend, SupervisedStrategy("mse"), store, accumulate=Accumulate(batches=accumulate), **options)


def engine_of(stepper):
    engine = Engine(stepper)
    engine.state.samples = engine.state.tokens = 0
    return engine


def weights(stepper):
    return [each.clone() for each in stepper.store.module.parameters()]


def test_it_counts_in_the_engines_state_and_reports_each_step():
    steps = []
    stepper = make(accumulate=3, on_step=lambda batch, result: steps.append((batch.samples, result.loss.ndim)))
    engine = engine_of(stepper)
    engine.run(loader(), max_epochs=1)
    assert steps == [(4, 0)] * 10
    assert (engine.state.update, engine.state.samples, stepper.accumulated) == (3, 40, 1)
    assert stepper.learning_rates == (0.1,)


def test_a_step_that_fails_discards_accumulated_gradients_and_ends():
    stepper = make(accumulate=4)
    engine = engine_of(stepper)
    before = weights(stepper)
    batches = [*list(loader())[:2], (torch.ones(2, 4), torch.tensor([[1.0], [float("nan")]]))]
    with pytest.raises(ValueError, match=r"mse\(targets\[1, 0\]=nan\)"):
        engine.run(batches, max_epochs=1)
    assert (stepper.accumulated, stepper.is_stepping) == (0, False)
    assert stepper.store.gradients() == {}
    assert all(map(torch.equal, before, weights(stepper)))


def test_values_are_checked_until_the_first_update_of_a_run():
    bad = (torch.ones(2, 4), torch.tensor([[1.0], [float("nan")]]))
    stepper = make()
    engine = engine_of(stepper)
    stepper(engine, next(iter(loader())))
    stepper(engine, bad)  # not checked any more: the loss is nan
    stepper.start()
    with pytest.raises(ValueError, match="needs finite numbers"):
        stepper(engine, bad)


def test_an_update_is_skipped_where_a_receiver_says_so():
    stepper = make()
    engine = engine_of(stepper)
    before = weights(stepper)
    skipped = engine.add_event_handler(
        Events.GRADIENTS_READY, lambda: stepper.skip_update(torch.tensor(engine.state.update == 1))
    )
    stepper(engine, next(iter(loader())))
    assert all(map(torch.equal, before, weights(stepper)))
    assert engine.state.update == 1
    assert stepper.grad_norm.item() > 0
    stepper(engine, next(iter(loader())))
    assert not all(map(torch.equal, before, weights(stepper)))
    skipped.remove()


def test_its_state_continues_an_update_under_way():
    first, second = make(accumulate=2), make(accumulate=2)
    data = list(loader(shuffle=False))[:2]
    engine = engine_of(first)
    first(engine, data[0])
    second.load_state_dict(first.state_dict())
    second.store.load_gradients({name: each.clone() for name, each in first.store.gradients().items()}, 1)()
    assert second.accumulated == 1
    other = engine_of(second)
    for stepper, each in ((first, engine), (second, other)):
        stepper(each, data[1])
    assert (engine.state.update, other.state.update) == (1, 1)
    assert all(map(torch.equal, weights(first), weights(second)))
    first.reset()
    assert first.state_dict()["accumulation"]["batches"] == 0


def test_trial_steps_have_their_own_counts_and_are_rolled_back():
    stepper = make(accumulate=2)
    engine = engine_of(stepper)
    stepper(engine, next(iter(loader())))
    before, gradients, tensors = weights(stepper), stepper.store.gradients(), list(stepper.store.module.parameters())
    seen = []
    trial = stepper.trial(lambda batch, result: seen.append(result.loss))
    with stepper.store.rollback(stepper.strategy):
        trials = engine_of(trial)
        for batch in loader():
            trial(trials, batch)
        assert not all(map(torch.equal, before, weights(stepper)))
    assert (len(seen), trials.state.update, engine.state.update, stepper.accumulated) == (10, 5, 0, 1)
    assert all(map(torch.equal, before, weights(stepper)))
    assert all(mine is other for mine, other in zip(tensors, stepper.store.module.parameters(), strict=True))
    assert stepper.store.gradients().keys() == gradients.keys()
    assert all(stepper.store.gradients()[name] is gradients[name] for name in gradients)


def test_a_snapshot_is_restored_and_a_state_of_another_model_is_refused():
    stepper = make()
    engine = engine_of(stepper)
    kept, before = stepper.store.snapshot(), weights(stepper)
    for batch in loader():
        stepper(engine, batch)
    stepper.store.restore(kept)
    assert all(map(torch.equal, before, weights(stepper)))
    with pytest.raises(TypeError, match="needs a state that train_epoch or model_state of a trainer in place returned"):
        stepper.store.restore(nn.Linear(1, 1))
