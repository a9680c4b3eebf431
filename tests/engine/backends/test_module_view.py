"""The torch module that represents weights that are not torch tensors: copied, pickled, read and written into."""

import copy
import pickle

import numpy as np
import pytest
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Every, JaxBackend, SupervisedStrategy
from pulsetrain.engine.backends.model_store import ValueStore
from pulsetrain.engine.backends.module_view import ArraysView, reading_once
from pulsetrain.engine.step.protocols import BackendSettings, TrainingResult
from pulsetrain.handlers import (
    Checkpointer,
    CrashBundle,
    CSVLogger,
    EventRecorder,
    Fingerprints,
    GradientMonitor,
    LossSpikeGuard,
    NaNGuard,
    Plots,
    Throughput,
)
from tests.plugins.numpy_backend import Linear, NumpyBackend, NumpySGD
from tests.support.models import batches, function_model, torch_model


@pytest.fixture
def store():
    backend = NumpyBackend()
    backend.configure(BackendSettings())
    model = Linear(np.full((3, 4), 0.5, "float32"), np.zeros(3, "float32"))
    return ValueStore(backend, model, backend.init(model, NumpySGD(0.1)))


def step(store):
    generator, strategy = torch.Generator().manual_seed(1), SupervisedStrategy("mse")
    pair = torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)
    prepared = store.backend.prepare_batch(pair, strategy)
    store.commit(store.backend.train_step(store.state, prepared, strategy, donate=True).state)


def weight_of(store):
    """The state's value, as a copy."""
    return torch.tensor(store._state.weights["parameters"]["weight"])


def test_a_deepcopy_has_the_newest_weights_and_is_independent(store):
    step(store)
    store.module.eval()
    copied, expected = copy.deepcopy(store.module), weight_of(store)
    assert isinstance(copied, ArraysView)
    assert not copied.training
    assert torch.equal(copied.weight, expected)
    inputs = torch.ones(2, 4)
    outputs = copied(inputs)
    assert torch.equal(outputs, store.module(inputs))
    step(store)
    assert torch.equal(copied.weight, expected)
    assert torch.equal(copied(inputs), outputs)
    newest, another = weight_of(store), copy.deepcopy(store.module)
    with torch.no_grad():
        for parameter in another.parameters():
            parameter.zero_()
    assert torch.equal(weight_of(store), newest)
    assert torch.equal(store.module.weight, newest)
    assert not another(inputs).any(), "it computes with what was written into it"


def test_it_is_not_pickled_and_says_what_to_save(store):
    with pytest.raises(TypeError, match=r"model of a NumpyBackend cannot be pickled .*; save its state_dict\(\)"):
        pickle.dumps(store.module)


def test_a_parameter_that_is_asked_for_by_its_name_is_up_to_date_and_stays_so(store):
    step(store)
    by_name = store.module.get_parameter("weight")
    assert torch.equal(by_name, weight_of(store))
    step(store)
    assert torch.equal(by_name, weight_of(store))
    assert store.module.weight is by_name


def test_writing_through_a_tensor_of_an_older_state_is_refused(store):
    old = store.module.state_dict()["weight"]
    step(store)
    before = weight_of(store)
    assert not torch.equal(old, before)
    old.zero_()
    with pytest.raises(RuntimeError, match=r"through a tensor that is no longer up to date; read it from"):
        _ = store.state
    assert torch.equal(weight_of(store), before)


def test_reading_them_by_a_state_dict_makes_no_copy_at_each_step(store):
    tensor = store.module.state_dict()["weight"]
    step(store)
    assert not torch.equal(tensor, weight_of(store)), "nobody has asked again"
    assert torch.equal(store.module.state_dict()["weight"], weight_of(store))


def test_what_was_read_once_is_not_copied_after_each_step(store, monkeypatch):
    with reading_once(store.module):
        first = next(store.module.parameters()).clone()
    copied = []
    monkeypatch.setattr(store.backend, "flat", lambda tree: copied.append(tree) or {})
    step(store)
    assert copied == []
    monkeypatch.undo()
    assert not torch.equal(next(store.module.parameters()), first), "read again, it is the newest"


def test_reading_once_leaves_those_who_keep_a_tensor_up_to_date(store):
    kept = store.module.weight
    with reading_once(store.module):
        list(store.module.parameters())
    step(store)
    assert torch.equal(kept, weight_of(store))


@pytest.mark.parametrize(
    "make_handlers",
    [
        lambda folder: [],
        lambda folder: [EventRecorder(folder), NaNGuard(), Checkpointer(folder, every=Every(iterations=5))],
        lambda folder: [GradientMonitor(every=Every(updates=4)), Fingerprints(every=Every(updates=4))],
        lambda folder: [CrashBundle(folder), LossSpikeGuard(), Throughput(), CSVLogger(folder), Plots(folder)],
    ],
    ids=["none", "the usual ones", "those that read weights at times", "the others of the demo"],
)
def test_handlers_that_look_at_weights_at_times_do_not_make_a_run_copy_them_after_each_step(
    make_handlers, tmp_path, monkeypatch
):
    pytest.importorskip("jax", reason="pip install 'pulsetrain[jax]'")
    copies = []
    refresh = ArraysView.refresh
    monkeypatch.setattr(ArraysView, "refresh", lambda view: (copies.append(view._stale), refresh(view)))
    model = function_model(torch_model().state_dict())
    config = TrainingConfig(max_epochs=1, learning_rate=0.01, device="cpu", log_every_n_steps=10)
    handlers = make_handlers(tmp_path)
    Trainer(model, batches(20), backend=JaxBackend("cpu"), config=config, handlers=handlers).train()
    assert sum(copies) <= 12, "20 iterations, 2 log points and 4 or 5 readings by the handlers"


class LossAlone(NumpyBackend):
    """A backend whose result has the loss and nothing else, which is all that it has to have."""

    def train_step(self, *args, **named):
        result = super().train_step(*args, **named)
        return TrainingResult({"loss": result.metrics["loss"]}, result.state)


def test_a_backend_may_report_the_loss_alone():
    model = Linear(np.full((2, 4), 0.5, "float32"), np.zeros(2, "float32"))
    pair = torch.ones(6, 4), torch.zeros(6, 2)
    config = TrainingConfig(max_epochs=1, device="cpu", log_every_n_steps=2)
    run = Trainer(
        model,
        [pair] * 4,
        strategy=SupervisedStrategy("mse"),
        optimizer=NumpySGD(0.1),
        backend=LossAlone(),
        config=config,
    )
    run.train()
    assert run.state.update == 4
    assert run.history["train/loss"][-1] > 0.0
