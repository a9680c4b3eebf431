"""A third-party backend: the events, files and resumes of a run are those of any other."""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import CheckpointError, ConfigurationError, Events, Every, SupervisedStrategy, TorchBackend
from pulsetrain.engine.recording import EventLog, Replay
from pulsetrain.engine.step.backend import Backend
from pulsetrain.handlers import Callback, CallbackList, Checkpointer, EarlyStopping, EventRecorder
from tests.plugins.numpy_backend import Linear, NumpyBackend, NumpySGD
from tests.support.runs import cut_after

LOSSES = ["mse", "cross_entropy"]
SETTINGS = {
    "max_epochs": 3,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "schedule": "cosine",
    "clip_grad_norm": 0.5,
    "log_every_n_steps": 5,
    "device": "cpu",
}


def data(loss, rows=40, size=4):
    """Batches of this many rows; the last has the remainder."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 4, generator=generator)
    targets = inputs @ torch.randn(4, 3, generator=generator)
    targets = targets.argmax(-1) if loss == "cross_entropy" else targets
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def layer():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, 3)


def as_numpy(module):
    return Linear(module.weight.detach().numpy(), module.bias.detach().numpy())


def trainer(backend, loss="mse", handlers=(), settings=None, **arguments):
    model = as_numpy(layer()) if isinstance(backend, NumpyBackend) else layer()
    config = TrainingConfig(**{**SETTINGS, **(settings or {})})
    return Trainer(
        model,
        data(loss, 38),
        data(loss, 12),
        strategy=SupervisedStrategy(loss),
        backend=backend,
        config=config,
        handlers=handlers,
        **arguments,
    )


def followed(run):
    """The run's losses; each is read when its batch is over."""
    losses = []
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output["loss"].item()))
    return losses


def events(folder):
    """What was fired, by whom and when."""
    logged = msgspec.to_builtins(list(EventLog(folder).read()))
    return [tuple(each.get(key, 0) for key in ("event", "engine", "epoch", "iteration", "update")) for each in logged]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}, {"clip_grad_norm": None, "clip_grad_value": 0.1}], ids=str)
def test_a_run_fires_the_events_of_torch_and_has_its_losses(tmp_path, loss, settings):
    runs = {}
    for name, backend in (("numpy", NumpyBackend()), ("torch", TorchBackend())):
        folder = tmp_path / name
        handlers = [EventRecorder(folder), Checkpointer(folder, Every(iterations=4)), EarlyStopping()]
        run = trainer(backend, loss, handlers, settings)
        losses = followed(run)
        runs[name] = (losses, run.train(), events(folder))
    mine, torchs = runs["numpy"], runs["torch"]
    assert len(mine[0]) == 30
    assert mine[0][-1] < 0.9 * mine[0][0]
    np.testing.assert_allclose(mine[0], torchs[0], rtol=0, atol=1e-6)
    assert mine[1].keys() == torchs[1].keys()
    for name, values in mine[1].items():
        np.testing.assert_allclose(values, torchs[1][name], rtol=0, atol=1e-6)
    assert len(mine[2]) > 100
    assert mine[2] == torchs[2]


def test_a_recording_is_replayed(tmp_path):
    class Steps(Callback):
        def __init__(self):
            self.found = []

        def on_step_end(self, trainer, loss):
            self.found.append((trainer.state.iteration, loss.item()))

        def on_validation_end(self, trainer, metrics):
            self.found.append(dict(metrics))

    live, again = Steps(), Steps()
    trainer(NumpyBackend(), handlers=[EventRecorder(tmp_path)], callbacks=[live]).train()
    replay = Replay(tmp_path)
    CallbackList([again]).attach(replay)
    replay.run()
    assert len(live.found) == 33
    assert again.found == live.found


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}], ids=str)
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, loss, settings):
    settings = {**settings, "max_epochs": 4}
    whole = trainer(NumpyBackend(), loss, settings=settings)
    history = whole.train()
    for iteration in (7, 10, 23):
        folder = tmp_path / str(iteration)
        cut_after(
            trainer(NumpyBackend(), loss, [Checkpointer(folder, Every(iterations=iteration))], settings), iteration
        )
        resumed = trainer(NumpyBackend(), loss, [Checkpointer(folder, Every(iterations=iteration))], settings)
        assert resumed.train(resume="latest") == history
        for one, other in zip(leaves(resumed), leaves(whole), strict=True):
            assert one.tobytes() == other.tobytes()


def leaves(run):
    state = run.model_state
    trees = state.weights["parameters"], state.optimizer["momentum_buffer"]
    return [np.asarray(array) for tree in trees for array in tree.values()]


def test_inputs_and_outputs_do_not_share_memory_with_the_run():
    model = as_numpy(layer())
    run = Trainer(model, data("mse"), strategy="supervised", backend=NumpyBackend(), config=TrainingConfig(**SETTINGS))
    before = [array.copy() for array in model]
    state = run.model_state
    state.weights["parameters"]["weight"][:] = 7.0
    np.testing.assert_array_equal(run.model_state.weights["parameters"]["weight"], before[0])
    for array, kept in zip(model, before, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_the_model_of_the_trainer_is_a_module_that_can_be_called_and_written_into():
    run = trainer(NumpyBackend())
    inputs = data("mse")[0][0]
    torch.testing.assert_close(run.model(inputs), layer()(inputs).detach())
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    assert not run.model(inputs).any()
    assert not run.model_state.weights["parameters"]["weight"].any()


def test_it_has_every_part_of_the_protocol():
    wanted = {name for name in (*vars(Backend), *Backend.__annotations__) if not name.startswith("_")}
    assert [name for name in sorted(wanted) if not hasattr(NumpyBackend(), name)] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adamw"}, "NumpyBackend: knows sgd without weight decay, not 'adamw'; pass an optimizer"),
        ({"optimizer": "sgd", "weight_decay": 0.1}, "knows sgd without weight decay"),
        ({"precision": "bf16"}, "precision='bf16'.: NumpyBackend computes in the precision of the weights"),
        ({"compile": True}, "compile=True.: not with NumpyBackend; leave it out"),
        ({"activation_checkpointing": "*"}, "activation_checkpointing='.'.: not with NumpyBackend"),
    ],
    ids=str,
)
def test_settings_that_it_does_not_know_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        trainer(NumpyBackend(), settings=arguments)


def test_a_model_of_another_kind_and_another_loss_are_refused():
    with pytest.raises(TypeError, match=r"NumpyBackend: model=Linear: needs a Linear\(weight, bias\)"):
        Trainer(layer(), data("mse"), backend=NumpyBackend(), config=TrainingConfig(max_epochs=1, optimizer="sgd"))
    run = trainer(NumpyBackend(), "l1")
    before = run.model_state.weights["parameters"]["weight"]
    with pytest.raises(ConfigurationError, match="has no gradient of 'l1'; mse and cross_entropy"):
        run.train()
    np.testing.assert_array_equal(run.model_state.weights["parameters"]["weight"], before)


@pytest.mark.parametrize("direction", ["to torch", "from torch"])
def test_a_checkpoint_of_another_backend_is_refused(tmp_path, direction):
    made, read = (NumpyBackend, TorchBackend) if direction == "to torch" else (TorchBackend, NumpyBackend)
    trainer(made(), handlers=[Checkpointer(tmp_path)]).train()
    run = trainer(read(), handlers=[Checkpointer(tmp_path)])
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"the checkpoint was made with .* this trainer has .*SGD"):
        run.train(resume="latest")
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_optimizer_whose_state_has_no_learning_rate_trains_and_refuses_a_schedule():
    class Steps(NumpySGD):
        def init(self, params):
            return {}

        def update(self, grads, opt_state, params):
            return {name: -0.1 * gradient for name, gradient in grads.items()}, {}

    run = trainer(NumpyBackend(), settings={"schedule": None}, optimizer=Steps(0.1))
    history = run.train()
    assert np.isnan(history["learning_rate"]).all()
    assert history["train/loss"][-1] < history["train/loss"][0]
    with pytest.raises(ConfigurationError, match=r"schedule='cosine', warmup_steps=0\): the state of the given optimi"):
        trainer(NumpyBackend(), optimizer=Steps(0.1))
