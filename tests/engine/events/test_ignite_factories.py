"""Trainers and evaluators of our factories compute what those of ignite's do, bit for bit."""

from __future__ import annotations

import inspect
from typing import Any

import ignite.engine
import ignite.utils
import pytest
import torch
from ignite.metrics import Accuracy, Loss
from torch import Tensor, nn

from pulsetrain import engine

LIBRARIES = [engine, ignite.engine]
FACTORIES = ["create_supervised_trainer", "create_supervised_evaluator"]


def batches(count: int = 7) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def trained(library: Any, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The outputs of 14 iterations, and the weights after them."""
    network, outputs = model(), []
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    trainer = library.create_supervised_trainer(network, optimizer, nn.functional.cross_entropy, **options)
    trainer.add_event_handler(library.Events.ITERATION_COMPLETED, lambda each: outputs.append(each.state.output))
    trainer.run(batches(), max_epochs=2)
    return outputs, network.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device": "cpu"},
        {"device": torch.device("cpu"), "non_blocking": True},
        {"gradient_accumulation_steps": 3},
        {"output_transform": lambda x, y, y_pred, loss: (y_pred.sum() + x.sum() + y.sum() + loss).item()},
        {"model_transform": lambda output: 2 * output, "model_fn": lambda network, x: network(x + 1)},
        {"prepare_batch": lambda batch, device, non_blocking: (batch[0].flip(0), batch[1])},
    ],
    ids=["plain", "device by name", "device", "accumulation", "output", "model", "batch"],
)
def test_a_trainer_reports_ignites_losses_and_reaches_its_weights(options: dict[str, Any]):
    (ours, weights), (theirs, expected) = (trained(library, **options) for library in LIBRARIES)
    assert ours == theirs
    assert len(ours) == len(set(ours)) == 14
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert options == {} or "device" in options or ours != trained(engine)[0], "the option has an effect"


def test_an_evaluator_gives_ignites_outputs_and_metrics_and_leaves_the_model_alone():
    results = []
    for library in LIBRARIES:
        network, outputs = model(), []
        before = {name: value.clone() for name, value in network.state_dict().items()}
        metrics = {"accuracy": Accuracy(), "loss": Loss(nn.functional.cross_entropy)}
        evaluator = library.create_supervised_evaluator(network, metrics, model_transform=lambda output: output / 2)
        evaluator.add_event_handler(library.Events.ITERATION_COMPLETED, lambda e, to=outputs: to.append(e.state.output))
        results.append((evaluator.run(batches()).metrics, outputs))
        assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
        assert not any(predicted.requires_grad for predicted, _ in outputs)
    (ours, outputs), (theirs, expected) = results
    assert ours == theirs
    assert ours.keys() == {"accuracy", "loss"}
    assert len(outputs) == 7
    for pair, expected_pair in zip(outputs, expected, strict=True):
        assert all(map(torch.equal, pair, expected_pair))


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_has_ignites_parameters_and_makes_our_engine(name: str):
    ours, theirs = (inspect.signature(getattr(library, name)).parameters for library in LIBRARIES)
    assert list(ours) == list(theirs)
    for parameter, default in ((each, theirs[each].default) for each in theirs):
        assert ours[parameter].kind is theirs[parameter].kind
        assert callable(default) or ours[parameter].default == default
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    arguments = (network, optimizer, nn.functional.cross_entropy) if name.endswith("trainer") else (network,)
    assert type(getattr(engine, name)(*arguments)) is engine.Engine


def test_convert_tensor_is_ignites():
    assert engine.convert_tensor is ignite.utils.convert_tensor


@pytest.mark.filterwarnings("ignore:.*CUDA is not available", "ignore:.*GradScaler is enabled, but CUDA")
def test_a_gradient_scaler_is_in_the_state_if_the_factory_made_it():
    network = model()
    arguments = (network, torch.optim.SGD(network.parameters(), lr=0.1), nn.functional.cross_entropy)
    given = torch.amp.GradScaler(enabled=False)
    for library in LIBRARIES:
        made = library.create_supervised_trainer(*arguments, amp_mode="amp", scaler=True)
        assert isinstance(made.state.scaler, torch.amp.GradScaler)
        for options in ({"amp_mode": "amp", "scaler": given}, {"amp_mode": "amp"}, {}):
            assert not hasattr(library.create_supervised_trainer(*arguments, **options).state, "scaler")


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_automatic_mixed_precision_computes_what_ignites_does():
    options = {"amp_mode": "amp", "scaler": torch.amp.GradScaler(enabled=False), "gradient_accumulation_steps": 2}
    (ours, weights), (theirs, expected) = (trained(library, **options) for library in LIBRARIES)
    assert ours == theirs
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    outputs = [
        library.create_supervised_evaluator(model(), amp_mode="amp").run(batches(1)).output for library in LIBRARIES
    ]
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, r"deterministic=True\): .* use pulsetrain.Trainer"),
        ({"amp_mode": "fp16"}, r"amp_mode='fp16'\): choose \"amp\", \"apex\" or None"),
        ({"amp_mode": "amp", "device": "mps"}, r"amp_mode='amp', device='mps'\): is for CUDA devices"),
        ({"amp_mode": "amp", "device": torch.device("xla")}, r"amp_mode='amp', device=.*xla.*is for CUDA devices"),
        ({"scaler": True}, r"scaler=True, amp_mode=None\): is for amp_mode=\"amp\" alone"),
        ({"gradient_accumulation_steps": 0}, "strictly positive"),
    ],
)
def test_a_trainer_refuses(options: dict[str, Any], message: str):
    network = model()
    with pytest.raises(ValueError, match=message):
        engine.create_supervised_trainer(
            network, torch.optim.SGD(network.parameters(), lr=0.1), nn.MSELoss(), **options
        )


@pytest.mark.skipif(ignite.distributed.has_xla_support, reason="torch_xla is installed")
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_xla_device_needs_torch_xla(library: Any):
    with pytest.raises(RuntimeError, match=r"(?i)xla"):
        library.create_supervised_evaluator(model(), device="xla")
