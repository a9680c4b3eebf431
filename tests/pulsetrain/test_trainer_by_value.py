"""A Trainer on a by-value backend: its pure steps, and the input it rejects."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import (
    CheckpointError,
    ConfigurationError,
    Events,
    Every,
    JaxBackend,
    TorchBackend,
)
from pulsetrain.handlers import (
    Checkpointer,
    ReduceLROnPlateau,
)
from tests.support.models import batches, bits, function_model, torch_model
from tests.support.runs_backends import needs_jax, programs_kept
from tests.support.runs_by_value import MAKE, SETTINGS, each_backend, state_of, torch_norm_model, trainer


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    with programs_kept():
        yield


# ----------------------------------------------------------------------------------------------------- pure steps


@each_backend
def test_a_pure_step_of_a_trainer_changes_neither_its_arguments_nor_the_trainer(on):
    run = trainer(on, max_epochs=1)
    run.train()
    batch, state = batches(1)[0], run.model_state
    given = bits(run.backend, state), bits(run.backend, list(batch)), state_of(run), run.state.update
    first, second = run.train_step(batch, state), run.train_step(batch, state, state.optimizer)
    assert (bits(run.backend, state), bits(run.backend, list(batch)), state_of(run), run.state.update) == given
    assert bits(run.backend, first.state) == bits(run.backend, second.state) != given[0]
    assert list(first.metrics) == ["loss", "grad_norm", "seconds"]
    assert set(first.diagnostics) == {"memory_bytes", "communication_bytes"}
    assert first.state.metadata["step"] == 11


@each_backend
def test_an_epoch_of_a_trainer_starts_from_any_state_and_leaves_it_unchanged(on):
    run = trainer(on)
    start = run.model_state
    before, batch_bits = bits(run.backend, start), [bits(run.backend, list(each)) for each in run.train_loader]
    received = []
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda: received.append(run.state.iteration))
    torch.manual_seed(5)
    first = run.train_epoch(model_state=start)
    assert received == list(range(1, 11))
    assert bits(run.backend, start) == before
    kept = bits(run.backend, first)
    torch.manual_seed(5)
    assert bits(run.backend, run.train_epoch(model_state=start)) == kept != before
    run.train_epoch(model_state=first)
    assert bits(run.backend, first) == kept
    assert [bits(run.backend, list(each)) for each in run.train_loader] == batch_bits
    foreign = replace(start, optimizer={})
    last = state_of(run)
    with pytest.raises(ConfigurationError, match="does not fit the weights"):
        run.train_epoch(model_state=foreign)
    assert state_of(run) == last


def test_a_trainer_in_place_has_no_pure_step():
    run = Trainer(torch_model(), batches(3), config=TrainingConfig(**SETTINGS))
    with pytest.raises(ConfigurationError, match=r"TorchBackend\): computes in place"):
        run.train_step(batches(1)[0], run.model_state)
    kept = run.model_state
    before = {name: tensor.clone() for name, tensor in kept.weights.items()}
    run.train_epoch()
    assert all(torch.equal(kept.weights[name], tensor) for name, tensor in before.items())
    run.train_epoch(model_state=kept)


# ------------------------------------------------------------------------------------------------------- mistakes


class Turns:
    """Trains several modules in turn."""

    def prepare_batch(self, batch):
        return batch

    def compute_losses(self, model, batch):
        yield "a", model["a"](batch).mean()


@each_backend
def test_a_strategy_of_several_modules_is_refused(on):
    message = r"Trainer\(backend=\w+\): Turns trains several modules in turn, which works in place"
    with pytest.raises(ConfigurationError, match=message):
        trainer(on, strategy=Turns())


@each_backend
def test_an_optimizer_of_torch_is_refused(on):
    optimizer = torch.optim.SGD(torch_model().parameters(), lr=0.1)
    for given in (optimizer, torch.optim.SGD, {"a": "sgd"}):
        with pytest.raises(ConfigurationError, match=r"Trainer\(optimizer=\w+\): \w+ computes with values"):
            trainer(on, optimizer_object=given)


@each_backend
def test_a_backend_serves_one_trainer(on):
    run = trainer(on)
    with pytest.raises(ConfigurationError, match="serves another trainer already; give each Trainer a backend of its"):
        trainer(on, backend=run.backend)


@each_backend
def test_a_batch_that_fails_leaves_the_weights_as_they_were(on):
    data = [*batches(3), {"inputs": 1}]
    run = trainer(on, (), data, max_epochs=1, schedule=None)
    before = {}
    run.add_event_handler(Events.ITERATION_STARTED, lambda: before.update(state_of(run)))
    with pytest.raises(TypeError, match="SupervisedStrategy: a batch with inputs has no field 'labels' or 'label'"):
        run.train()
    assert run.state.update == 3
    assert state_of(run) == before


@pytest.mark.parametrize(
    ("made", "read"),
    [
        pytest.param("torch", "jax", marks=needs_jax),
        pytest.param("jax", "numpy", marks=needs_jax),
        ("torch", "in place"),
        ("in place", "torch"),
        ("numpy", "torch"),
    ],
)
def test_a_checkpoint_of_another_backend_is_refused_and_nothing_changes(made, read, tmp_path):
    MAKE["in place"] = TorchBackend, torch_norm_model
    try:
        trainer(made, [Checkpointer(tmp_path)], max_epochs=1).train()
        run = trainer(read, [Checkpointer(tmp_path)])
    finally:
        del MAKE["in place"]
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"do not fit the model|the checkpoint was made with"):
        run.train(resume="latest")
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert run.state.iteration == 0


@pytest.mark.slow
@needs_jax
def test_an_optimizer_of_optax_trains_and_its_rate_can_be_set_where_it_is_injected():
    import optax

    plain = trainer("jax", optimizer_object=optax.adam(0.01), schedule=None)
    history = plain.train()
    assert np.isnan(history["learning_rate"]).all()
    assert history["train/loss"][-1] < history["train/loss"][0]
    with pytest.raises(ConfigurationError, match=r"schedule='cosine', warmup_steps=0\): the state of the given"):
        trainer("jax", optimizer_object=optax.adam(0.01), schedule="cosine")
    late = trainer("jax", [ReduceLROnPlateau(patience=1)], optimizer_object=optax.adam(0.01), schedule=None)
    late.optimizer.param_groups[0]["lr"] = 0.1
    before = bits(late.backend, late.model_store._state)
    with pytest.raises(ConfigurationError, match=r"sets the learning rate, and the optimizer's state holds none"):
        late.train()
    assert bits(late.backend, late.model_store._state) == before
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=0.05)
    scheduled = trainer("jax", optimizer_object=injected, schedule="cosine").train()["learning_rate"]
    assert 0.05 > scheduled[0] > scheduled[1] > scheduled[2] >= 0


@needs_jax
def test_jax_weights_under_torchs_names_train_and_resume(tmp_path):
    def make(handlers=()):
        return Trainer(
            function_model(torch_model().state_dict()),
            batches(10),
            backend=JaxBackend(),
            config=TrainingConfig(**SETTINGS),
            handlers=[Checkpointer(tmp_path, Every(iterations=15)), *handlers],
        )

    run = make()
    run.train()
    assert set(run.model.state_dict()) == {"0/weight", "0/bias", "2/weight", "2/bias"}
    again = make()
    again.load_checkpoint(next((tmp_path / "checkpoints").glob("*015-*")))
    again.train()
    assert state_of(again) == state_of(run)
