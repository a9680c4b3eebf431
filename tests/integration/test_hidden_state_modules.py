"""State of modules, strategies, optimizers and handlers outside of state dicts. A run that is interrupted after it has
changed, and resumed, ends with the weights of the uninterrupted run, or the checkpoint and the resume name what they
lack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain.engine import SupervisedStrategy
from tests.support.cases import Make
from tests.support.models import regression_model
from tests.support.runs import cut_after, weights
from tests.support.runs_hidden_state import (
    CUT,
    CasesOfHiddenState,
    check_that_what_has_changed_is_resumed_or_named,
    run,
)
from tests.support.stateful_parts import Averaging

CASES = CasesOfHiddenState()
case = CASES.case


# --------------------------------------------------------------------------------------------------- flags of modules


def unfreezing() -> tuple[Any, dict[str, Any]]:
    model = regression_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, {"model": model, "optimizer": optimizer, "act": lambda: model[0].requires_grad_(True)}


@case()
def a_backbone_is_unfrozen() -> dict[str, Any]:
    model, arguments = unfreezing()
    model[0].requires_grad_(False)
    return arguments


@case()
def a_backbone_is_unfrozen_that_a_handler_freezes_when_the_run_starts() -> dict[str, Any]:
    model, arguments = unfreezing()
    return {**arguments, "start": lambda: model[0].requires_grad_(False)}


@case()
def the_rate_of_dropout_is_set() -> dict[str, Any]:
    model = regression_model(dropout=0.1)
    return {"model": model, "act": lambda: setattr(model[3], "p", 0.5)}


@case()
def a_batchnorm_is_set_to_evaluation() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": model[1].eval}


@case("model.1.momentum")
def a_setting_of_a_module_of_torch_is_changed() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": lambda: setattr(model[1], "momentum", 0.5)}


@case("model.0: hooks")
def a_hook_is_registered() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": lambda: model[0].register_forward_hook(lambda module, given, output: output * 2)}


@case("model.0: hooks")
def a_hook_of_a_parameter_is_registered() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": lambda: model[0].weight.register_hook(lambda gradient: gradient * 2)}


# ------------------------------------------------------------------------------------------- what modules remember


class Remembering(nn.Module):
    """Adds to the outputs what it has seen of the batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()
        self.keep()

    def keep(self) -> None:
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def add(self, value: Tensor) -> None:
        self.seen += value

    def forward(self, inputs: Tensor) -> Tensor:
        self.add(inputs.mean().detach())
        return self.inner(inputs) + self.seen.sum()


@case()
def a_buffer_is_not_persistent() -> dict[str, Any]:
    return {"model": Remembering()}


class WithTensor(Remembering):
    def keep(self) -> None:
        self.seen = torch.zeros(1)


@case("model.seen")
def a_tensor_is_an_attribute_of_the_model() -> dict[str, Any]:
    return {"model": WithTensor()}


class WithBank(Remembering):
    def keep(self) -> None:
        self.bank: list[Tensor] = []

    def add(self, value: Tensor) -> None:
        self.bank = [*self.bank[-5:], value]

    @property
    def seen(self) -> Tensor:
        return torch.stack(self.bank)


@case("model.bank")
def a_list_of_tensors_is_an_attribute_of_the_model() -> dict[str, Any]:
    return {"model": WithBank()}


class WithLargeTensor(Remembering):
    def keep(self) -> None:
        self.large = torch.zeros(1 << 21)

    def add(self, value: Tensor) -> None:
        self.large[1] += value

    @property
    def seen(self) -> Tensor:
        return self.large[:2]


@case("model.large")
def one_element_of_a_large_tensor_changes() -> dict[str, Any]:
    return {"model": WithLargeTensor()}


@case()
def a_loss_is_a_module_with_a_buffer() -> dict[str, Any]:
    return {"strategy": SupervisedStrategy(Averaging())}


class HoldingLosses(SupervisedStrategy):
    def __init__(self) -> None:
        super().__init__("mse")
        self.losses = {"main": Averaging(), "other": [1]}

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        return self.losses["main"](outputs, batch.targets)  # type: ignore[operator]


@case()
def a_strategy_holds_losses_in_a_dict() -> dict[str, Any]:
    return {"strategy": HoldingLosses()}


class ModuleStrategy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss, self.supervised = Averaging(), SupervisedStrategy("mse")
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.prepare_batch, self.compute_metrics = self.supervised.prepare_batch, lambda outputs, batch: {}

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        self.seen += 0.1
        return self.loss(outputs, batch.targets) * (1 + self.seen)


@case()
def a_strategy_is_a_module() -> dict[str, Any]:
    return {"strategy": ModuleStrategy()}


class Teaching(SupervisedStrategy):
    """Learns from a teacher, which follows the model's first layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__("mse")
        self.followed = (model[0].weight,)  # type: ignore[index]
        self.teacher = nn.Linear(4, 8).requires_grad_(False)

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        self.teacher.weight.data.mul_(0.9).add_(self.followed[0].detach(), alpha=0.1)
        return super().compute_loss(outputs, batch) * (1 + self.teacher(batch.inputs).square().mean())


@case()
def a_frozen_teacher_follows_the_model() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "strategy": Teaching(model)}


class Weighing(SupervisedStrategy):
    def __init__(self) -> None:
        super().__init__("mse")
        self.scale = torch.ones(())

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        self.scale = self.scale * 1.1
        return super().compute_loss(outputs, batch) * self.scale


@case("strategy.scale")
def a_tensor_is_an_attribute_of_the_strategy() -> dict[str, Any]:
    return {"strategy": Weighing()}


def closing() -> Callable[[Any, Any], Tensor]:
    seen = {"batches": 0}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen["batches"] += 1
        return (outputs - targets).square().mean() * seen["batches"]

    return loss


class RelativeLoss(nn.Module):
    """A loss relative to its average so far, which is not in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(())

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = (outputs - targets).square().mean()
        self.mean = self.mean.lerp(loss.detach(), 0.1)
        return loss / self.mean


@case("strategy._loss")
def a_loss_has_a_module_in_its_closure() -> dict[str, Any]:
    relative = RelativeLoss()
    return {"strategy": SupervisedStrategy(lambda outputs, targets: relative(outputs, targets))}


class Unlabelled(SupervisedStrategy):
    """Draws a second batch from a loader of its own."""

    def __init__(self) -> None:
        super().__init__("mse")
        self.batches = iter(DataLoader(torch.arange(400.0), 4, shuffle=True))

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().compute_loss(outputs, batch) * (1 + next(self.batches).mean())


@case("strategy.batches")
def a_strategy_has_the_iterator_of_a_loader() -> dict[str, Any]:
    return {"strategy": Unlabelled()}


@case("strategy._loss")
def the_arguments_of_a_loss_of_torchs_are_replaced() -> dict[str, Any]:
    strategy = SupervisedStrategy(partial(F.huber_loss, delta=1.0))
    return {"strategy": strategy, "act": lambda: setattr(strategy, "_loss", partial(F.huber_loss, delta=0.01))}


@case("strategy._loss", slow=True)
def a_loss_of_torchs_with_arguments_is_replaced() -> dict[str, Any]:
    strategy = SupervisedStrategy(partial(F.mse_loss, reduction="mean"))
    return {"strategy": strategy, "act": lambda: setattr(strategy, "_loss", partial(F.l1_loss, reduction="mean"))}


@case("strategy._loss", slow=True)
def a_loss_counts_in_an_attribute_of_the_function() -> dict[str, Any]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        loss.calls += 1  # type: ignore[attr-defined]
        return (outputs - targets).square().mean() * loss.calls  # type: ignore[attr-defined]

    loss.calls = 0  # type: ignore[attr-defined]
    return {"strategy": SupervisedStrategy(loss)}


@case("strategy._loss")
def a_loss_has_a_dict_in_its_closure() -> dict[str, Any]:
    return {"strategy": SupervisedStrategy(closing())}


@case(f"handler {__name__}.a_handler_has_a_dict_in_its_closure.<locals>.look.seen")
def a_handler_has_a_dict_in_its_closure() -> dict[str, Any]:
    model, seen = regression_model(), {"batches": 0}

    def look() -> None:
        seen["batches"] += 1
        if seen["batches"] == 15:
            model[0].requires_grad_(False)

    return {"model": model, "always": look}


# -------------------------------------------------------------------------------------------------- the optimizer


class Counting(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.steps
        return super().step(closure)


@case("optimizer.steps")
def an_optimizer_counts_its_steps() -> dict[str, Any]:
    return {"optimizer": Counting}


@case()
def a_group_is_added_to_the_optimizer() -> dict[str, Any]:
    model = regression_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1:].parameters(), lr=0.05)

    def unfreeze() -> None:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    return {"model": model, "optimizer": optimizer, "act": unfreeze}


@case("model.0: parameters, buffers and modules")
def an_adapter_is_added_to_the_model() -> dict[str, Any]:
    model = regression_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "act": lambda: add_adapter(model, optimizer)}


def add_adapter(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[0].register_parameter("adapter", nn.Parameter(torch.zeros(8)))
    model[0].register_forward_hook(lambda module, given, output: output + module.adapter)
    optimizer.add_param_group({"params": [model[0].adapter]})


# ------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(("make", "lacks"), CASES)
def test_what_has_changed_is_resumed_or_named(make: Make, lacks: tuple[str, ...], tmp_path: Path):
    check_that_what_has_changed_is_resumed_or_named(make, lacks, tmp_path)


def test_a_run_resumes_if_its_model_is_built_with_the_adapter_that_a_handler_has_added(tmp_path: Path):
    whole = run(tmp_path / "whole", an_adapter_is_added_to_the_model)
    whole.train()
    cut_after(run(tmp_path / "cut", an_adapter_is_added_to_the_model), CUT)

    def built() -> dict[str, Any]:
        made = an_adapter_is_added_to_the_model()
        made.pop("act")()
        return made

    again = run(tmp_path / "cut", built)
    again.train(resume="latest")
    expected, found = weights(whole), weights(again)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
