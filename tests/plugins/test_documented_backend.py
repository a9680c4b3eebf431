"""A backend written exactly as docs/backends.md says trains, records, replays and resumes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import FunctionalBackend, SupervisedStrategy
from pulsetrain.engine.optimizers.functional import SGD
from pulsetrain.engine.step.protocols import TrainingBatch
from tests.support import programs

PAGE = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
(BLOCK,) = [each for each in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "NumpyBackend" in each]

RUNS = """
from pulsetrain.engine import Events, Every
from pulsetrain.engine.recording import EventLog, Replay
from pulsetrain.handlers import Checkpointer, EventRecorder


def make(folder):
    run = Trainer(
        {name: np.zeros_like(array) for name, array in model.items()}, loader, loader,
        strategy=SupervisedStrategy("mse"), backend=NumpyBackend(), optimizer=SGD(),
        config=TrainingConfig(max_epochs=5, schedule="cosine", accumulate=2, clip_grad_norm=1.0, seed=0),
        handlers=[EventRecorder(folder), Checkpointer(folder, Every(iterations=3))],
    )
    run.losses = []
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda run: run.losses.append(run.state.output["loss"].item()))
    return run


whole = make("whole")
history = whole.train()
assert len(whole.losses) == 20
assert history["val/loss"][-1] < history["val/loss"][0]

cut = make("cut")
cut.add_event_handler(Events.ITERATION_COMPLETED(once=10), lambda: 1 / 0)
try:
    cut.train()
except ZeroDivisionError:
    pass
resumed = make("cut")
assert resumed.train(resume="latest") == history
assert resumed.losses == whole.losses[9:]
for name, array in whole.model_state.weights["parameters"].items():
    assert isinstance(array, np.ndarray)
    assert array.tobytes() == resumed.model_state.weights["parameters"][name].tobytes()

for folder in ("whole", "cut"):
    logged = [event for event in EventLog(folder).read() if event.event == "iteration_completed"]
    assert {event.iteration for event in logged if event.engine != "evaluator"} == set(range(1, 21))
replayed = []
replay = Replay("whole")
replay.add_event_handler(Events.ITERATION_COMPLETED, lambda run: replayed.append(run.state.output["loss"]))
replay.run()
assert np.allclose(replayed, whole.losses, rtol=1e-6, atol=0)
"""


def test_the_backend_of_the_page_trains_records_replays_and_resumes(tmp_path: Path) -> None:
    assert "def owns" not in BLOCK
    assert "def from_torch" not in BLOCK
    done = programs.run("-c", BLOCK + RUNS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


class Slope(FunctionalBackend):
    """outputs = slope * inputs, whose gradient is written by hand; the arrays are what the model is."""

    def split(self, model):
        return {"parameters": {"slope": model}, "buffers": {}}

    def evaluate(self, weights, batch, strategy):
        outputs = batch.inputs * weights["parameters"]["slope"]
        return outputs, strategy.compute_loss(outputs, batch)

    def loss_and_gradients(self, weights, batch, strategy, draw):
        outputs, loss = self.evaluate(weights, batch, strategy)
        return loss, {"slope": (2 * (outputs - batch.targets) * batch.inputs).mean()}, weights["buffers"]


class Descent:
    """Gradient descent for arrays of any library."""

    def init(self, params):
        return {"learning_rate": 0.1}

    def update(self, grads, opt_state, params):
        return {name: -opt_state["learning_rate"] * each for name, each in grads.items()}, opt_state


BATCH = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
MODELS = [
    pytest.param(torch.tensor(0.0), SGD(0.1), id="torch"),
    pytest.param(np.zeros((), np.float32), Descent(), id="numpy"),
    pytest.param(np.float32(0.0), Descent(), id="a number of numpy"),
]


@pytest.mark.parametrize(("model", "optimizer"), MODELS)
def test_three_methods_suffice_for_tensors_and_for_arrays_of_numpy(model, optimizer) -> None:
    config = TrainingConfig(max_epochs=20, device="cpu")
    run = Trainer(
        model, [BATCH], strategy=SupervisedStrategy("mse"), backend=Slope(), optimizer=optimizer, config=config
    )
    run.train()
    slope = run.model_state.weights["parameters"]["slope"]
    assert isinstance(slope, torch.Tensor) == isinstance(model, torch.Tensor)
    assert float(slope) == pytest.approx(3.0, abs=1e-3)


def test_arrays_of_another_library_need_the_methods_that_the_message_names() -> None:
    message = (
        r"Slope.split\(\): weights\['parameters/slope'\] is builtins.float; return torch tensors on the backend's "
        r"device or numpy arrays, or write owns\(leaf\), from_torch\(tensor\) and tensor_of\(array\)"
    )
    with pytest.raises(TypeError, match=message):
        Slope().init(0.0, Descent())
    with pytest.raises(TypeError, match=r"Slope.split\(\): weights\['parameters/slope'\] is torch.Tensor on meta"):
        Slope().init(torch.ones((), device="meta"), SGD(0.1))


def test_a_class_that_converts_its_own_arrays_is_asked() -> None:
    class Half(Slope):
        """Computes with numpy arrays in half precision, whatever it is given."""

        def owns(self, leaf):
            return isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype == np.float16

        def from_torch(self, tensor):
            return tensor.numpy().astype(np.float16)

    backend = Half()
    state = backend.init(np.zeros((), np.float16), Descent())
    batch = backend.prepare_batch(BATCH, SupervisedStrategy("mse"))
    assert isinstance(batch, TrainingBatch)
    assert batch.inputs.dtype == np.float16
    backend.check(state)
