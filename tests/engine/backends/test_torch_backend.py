"""The PyTorch backend: its device, how batches reach the model, and the results of a step."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

from pulsetrain.engine import ConfigurationError, SupervisedStrategy, TorchBackend
from pulsetrain.engine.backends.torch import find_device
from pulsetrain.engine.step.backend import Backend
from pulsetrain.engine.step.protocols import BackendSettings, GradientInfo, TrainingBatch, TrainingStrategy

Pair = namedtuple("Pair", ["inputs", "targets"])


class Add(nn.Module):
    """Adds its two inputs, once they are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.scale * left + right


def test_it_is_a_backend_and_ours_are_strategies():
    backend: Backend = TorchBackend()
    assert backend.state_dict()["scaler"] is None
    assert isinstance(SupervisedStrategy("mse"), TrainingStrategy)


@pytest.mark.parametrize(
    "inputs", [(torch.ones(3), torch.ones(3)), {"left": torch.ones(3), "right": torch.ones(3)}, [torch.ones(3)] * 2]
)
def test_several_inputs_reach_the_model_by_position_or_by_name(inputs: object):
    backend = TorchBackend("cpu")
    outputs = backend.forward(Add(), TrainingBatch(inputs, None, 3))
    assert outputs.tolist() == [3.0, 3.0, 3.0]


def test_gradients_add_up_until_they_are_applied():
    backend, strategy, model = TorchBackend("cpu"), SupervisedStrategy("mse"), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = strategy.prepare_batch((torch.ones(4, 2), torch.zeros(4, 1)))
    before = model.weight.detach().clone()
    state = backend.init(model, optimizer)
    first = backend.forward_backward(state, batch, strategy)
    whole, gradient = first.loss, model.weight.grad.clone()
    gradients = backend.forward_backward(state, batch, strategy, 0.5, first)
    torch.testing.assert_close(model.weight.grad, 1.5 * gradient)
    assert backend.apply_gradients(state, gradients) is state
    assert model.weight.grad is None
    torch.testing.assert_close(model.weight.detach(), before - 1.5 * gradient)
    assert not whole.requires_grad
    assert whole.shape == ()


def test_an_evaluation_step_leaves_no_gradients():
    backend, strategy, model = TorchBackend("cpu"), SupervisedStrategy("mse"), nn.Linear(2, 1)
    batch = backend.prepare_batch((torch.ones(4, 2), torch.zeros(4, 1)), strategy)
    outputs, metrics = backend.eval_step(backend.init(model, None), batch, strategy)
    assert not outputs.requires_grad
    assert list(metrics) == ["loss"]
    assert not metrics["loss"].requires_grad
    assert model.weight.grad is None


def test_every_tensor_of_a_batch_is_moved_whatever_holds_it():
    backend = TorchBackend("meta")  # a device that every machine has and that is not the CPU
    moved = backend.to_device({"a": [torch.ones(2)], "b": (torch.ones(2), "text"), "c": Pair(torch.ones(2), 3)})
    assert {moved["a"][0].device.type, moved["b"][0].device.type, moved["c"].inputs.device.type} == {"meta"}
    assert moved["b"][1] == "text"
    assert isinstance(moved["c"], Pair)


def test_on_the_cpu_a_batch_is_handed_on_as_it_is():
    batch = [torch.ones(2), torch.ones(2)]
    assert TorchBackend("cpu").to_device(batch) is batch


def test_what_the_constructor_fixes_the_configuration_does_not_change():
    backend = TorchBackend("cpu", precision="bf16")
    backend.configure(BackendSettings())
    assert backend.precision.name == "bf16"


def test_a_gradient_scale_survives_a_round_trip():
    backend = TorchBackend("cpu", precision="fp16")
    backend.configure(BackendSettings(device="cpu"))
    backend.scaler.scale(torch.ones(()))
    backend.scaler.update(new_scale=128.0)
    other = TorchBackend("cpu", precision="fp16")
    other.configure(BackendSettings(device="cpu"))
    other.load_state_dict(backend.state_dict())
    assert other.scaler.get_scale() == 128.0


def test_the_models_own_compile_is_called(monkeypatch: pytest.MonkeyPatch):
    asked: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: asked.append(self))
    model = TorchBackend("cpu", compile=True).module_to_device(nn.Linear(1, 1))
    assert asked == [model]


@pytest.mark.parametrize("name", ["cuda:99", "nonsense", "xla"])
def test_a_device_that_is_not_there_is_named_with_those_that_are(name: str):
    with pytest.raises(ConfigurationError, match=r"cpu|no such device"):
        find_device(name)


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        TorchBackend("cpu").module_to_device(lambda x: x)  # type: ignore[arg-type]


def test_an_fp16_run_with_momentum_survives_a_skipped_first_step():
    # torch's fused SGD reads uninitialised momentum then; the Trainer asks for the other one
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=False)
    backend = TorchBackend("cpu", precision="fp16")
    backend.configure(BackendSettings(device="cpu"))
    for gradient in (float("inf"), 1.0):
        loss = model.weight.sum() * 0 + model.bias.sum() * 0
        backend.scaler.scale(loss).backward()
        for parameter in model.parameters():
            parameter.grad.fill_(gradient)
        before = model.weight.detach().clone()
        scale = backend.scaler.get_scale()
        backend.apply_gradients(backend.init(model, optimizer), GradientInfo(loss))
        expected = before if gradient == float("inf") else before - 0.1 / scale
        torch.testing.assert_close(model.weight.detach(), expected)
