"""torch.compile for real: the same training as without, alone and with recomputed activations."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn

from pulsetrain.engine import ActivationCheckpointing, SupervisedStrategy, TorchBackend
from pulsetrain.engine.step.protocols import BackendSettings, TrainingBatch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"),
]


def train(*, compile: bool, pattern: str | ActivationCheckpointing | None) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
    backend = TorchBackend("cpu", compile=compile, activation_checkpointing=pattern)
    backend.configure(BackendSettings(device="cpu"))
    model = backend.module_to_device(nn.Sequential(block, nn.Linear(6, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = backend.init(model, optimizer)
    strategy, losses = SupervisedStrategy("mse"), []
    for step in range(4):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        batch = TrainingBatch(inputs, inputs.sum(1, keepdim=True), 8)
        losses.append(backend.train_step(state, batch, strategy).loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("pattern", [None, "0", ActivationCheckpointing("0", keep=["matmul"])], ids=str)
def test_a_compiled_model_trains_as_the_plain_one(pattern: str | ActivationCheckpointing | None):
    losses, state = train(compile=False, pattern=None)
    compiled, compiled_state = train(compile=True, pattern=pattern)
    assert compiled == pytest.approx(losses, rel=1e-5)
    assert compiled_state.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(compiled_state[name], value, rtol=1e-4, atol=1e-6)
