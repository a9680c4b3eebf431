"""State in generators, classes, hooks, metrics and the engines' state. A run that is interrupted after it has changed,
and resumed, ends with the weights of the uninterrupted run, or the checkpoint and the resume name what they lack.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from ignite.metrics import Average
from torch import Tensor, nn

from pulsetrain import Trainer
from pulsetrain.engine import EventEnum, Events, SupervisedStrategy
from pulsetrain.handlers import Callback
from tests.support.cases import Make
from tests.support.models import loader, regression_model
from tests.support.runs_backends import needs_jax
from tests.support.runs_hidden_state import CasesOfHiddenState, check_that_what_has_changed_is_resumed_or_named

CASES = CasesOfHiddenState()
case = CASES.case


def with_handler(attach: Callable[[Any], object], **arguments: Any) -> dict[str, Any]:
    return {"attached": attach, **arguments}


class Wrapping(nn.Module):
    """Multiplies the outputs by a number that depends on what it holds."""

    def __init__(self, held: Any, number: Callable[[Any], float]) -> None:
        super().__init__()
        self.inner = regression_model()
        self.held, self.number = held, number

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * (1 + 0.1 * self.number(self.held))


@case("model.held")
def a_model_draws_from_a_generator_of_its_own() -> dict[str, Any]:
    return {"model": Wrapping(np.random.default_rng(1), lambda held: held.random())}


@case("strategy._loss", slow=True)
def a_loss_draws_from_a_generator_in_its_closure() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean() * (1 + torch.rand((), generator=generator))

    return {"strategy": SupervisedStrategy(loss)}


@case("model.held", slow=True)
def a_model_counts_with_itertools() -> dict[str, Any]:
    return {"model": Wrapping(itertools.count(), lambda held: next(held) % 3)}


def appended(held: bytearray) -> float:
    held.append(1)
    return len(held) % 3


@case("model.held", slow=True)
def a_model_fills_a_bytearray() -> dict[str, Any]:
    return {"model": Wrapping(bytearray(), appended)}


@case("model.held", slow=True)
def a_value_that_processes_share_is_set() -> dict[str, Any]:
    model = Wrapping(multiprocessing.Value("d", 0.0), lambda held: held.value)
    return {"model": model, "act": lambda: setattr(model.held, "value", 2.0)}


@case("model.held", slow=True)
def an_array_of_objects_is_written() -> dict[str, Any]:
    model = Wrapping(np.array([0, None], dtype=object), lambda held: held[0])
    return {"model": model, "act": lambda: model.held.__setitem__(0, 2)}


@case("model.held", marks=[needs_jax])
def an_array_of_jax_is_replaced() -> dict[str, Any]:
    import jax

    model = Wrapping(jax.numpy.ones(3), lambda held: float(held[0]))
    return {"model": model, "act": lambda: setattr(model, "held", 2 * model.held)}


@case("model.held", marks=[needs_jax], slow=True)
def a_model_splits_a_key_of_jax() -> dict[str, Any]:
    import jax

    def draw(held: list[Any]) -> float:
        held[0], key = jax.random.split(held[0])
        return float(jax.random.uniform(key))

    return {"model": Wrapping([jax.random.key(0)], draw)}


@case("model.level")
def a_number_becomes_another_with_the_same_hash() -> dict[str, Any]:
    model = Wrapping(None, lambda held: model.level)
    model.level = -1
    return {"model": model, "act": lambda: setattr(model, "level", -2)}


class PrivateSlot:
    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def __call__(self) -> int:
        self.__count += 1
        return self.__count % 3


@case("model.held", slow=True)
def a_private_slot_is_written() -> dict[str, Any]:
    return {"model": Wrapping(PrivateSlot(), lambda held: held())}


class WithClassAttribute(nn.Module):
    scale: ClassVar[float] = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()
        type(self).scale = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.scale


@case("model.scale", slow=True)
def an_attribute_of_a_class_is_set() -> dict[str, Any]:
    return {"model": WithClassAttribute(), "act": lambda: setattr(WithClassAttribute, "scale", 2.0)}


@case("model: parameters, buffers and modules", slow=True)
def a_module_without_parameters_is_replaced() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": lambda: model.__setitem__(2, nn.Tanh())}


@case("optimizer: parameters that are not the model's", slow=True)
def a_module_is_replaced_by_its_copy() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": lambda: model.__setitem__(0, copy.deepcopy(model[0]))}


@case(slow=True)
def the_rate_of_dropout_is_set_to_a_number_of_numpys() -> dict[str, Any]:
    model = regression_model(dropout=0.1)
    return {"model": model, "act": lambda: setattr(model[3], "p", np.float32(0.5))}


class ScalingRates(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.05 * getattr(parameter, "multiple", 1.0))


@case("model.0.weight: attributes", slow=True)
def a_handler_sets_an_attribute_of_a_parameter() -> dict[str, Any]:
    model = regression_model()
    optimizer = ScalingRates(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "act": lambda: setattr(model[0].weight, "multiple", 0.1)}


@case("optimizer: hook 0.factor", "optimizer: hooks", slow=True)
def a_hook_of_the_optimizer_is_registered() -> dict[str, Any]:
    model, factor = regression_model(), 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def scale(*given: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(factor)

    return {"model": model, "optimizer": optimizer, "act": lambda: optimizer.register_step_pre_hook(scale)}


@case("model.0: hook 0.count")
def a_hook_counts_in_its_closure() -> dict[str, Any]:
    model, count = regression_model(), [0]

    def add(module: Any, given: Any, output: Tensor) -> Tensor:
        count[0] += 1
        return output * (1 + count[0] % 3)

    model[0].register_forward_hook(add)
    return {"model": model}


def averaged_with_data() -> Callable[[Any], object]:
    """A user's own moving average, by `.data`, which is copied into the model at the end."""
    shadow: dict[str, Tensor] = {}

    def attach(engine: Any) -> None:
        shadow.update({name: each.detach().clone() for name, each in engine.model.named_parameters()})

        @engine.on(Events.ITERATION_COMPLETED)
        def average() -> None:
            for name, each in engine.model.named_parameters():
                shadow[name].data.mul_(0.9).add_(each.data, alpha=0.1)

        @engine.on(Events.COMPLETED)
        def copy_in() -> None:
            for name, each in engine.model.named_parameters():
                each.data.copy_(shadow[name])

    return attach


@case(f"handler {__name__}.averaged_with_data.<locals>.attach.<locals>.average.shadow")
def an_average_of_the_users_is_written_through_data() -> dict[str, Any]:
    return with_handler(averaged_with_data())


@case(f"handler {__name__}.a_handler_of_the_evaluator_counts.<locals>.attach.<locals>.count.counts", slow=True)
def a_handler_of_the_evaluator_counts() -> dict[str, Any]:
    counts = [0]

    def attach(engine: Any) -> None:
        @engine.evaluator.on(Events.COMPLETED)
        def count() -> None:
            counts[0] += 1
            engine.optimizer.param_groups[0]["lr"] = 0.05 / counts[0]

    return with_handler(attach, val_loader=loader(8, shuffle=False))


class Best:
    """A metric that remembers across validations."""

    def __init__(self) -> None:
        self.best, self.sum = 0.0, 0.0

    def reset(self) -> None:
        self.sum = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.sum += float((outputs - targets).square().sum())

    def compute(self) -> float:
        self.best = max(self.best, self.sum)
        return self.best


@case("metric val/best.best")
def a_metric_remembers_across_validations() -> dict[str, Any]:
    def attach(engine: Any) -> None:
        @engine.on(Events.VALIDATION_COMPLETED)
        def rate() -> None:
            engine.optimizer.param_groups[0]["lr"] = 0.01 + 0.001 * engine.state.metrics["val/best"]

    return with_handler(attach, val_loader=loader(8, shuffle=False), metrics={"best": Best()})


class Averages(Callback):
    def __init__(self) -> None:
        self.average = Average()

    def on_step_end(self, trainer: Any, loss: Tensor) -> None:
        self.average.update(float(loss))
        trainer.optimizer.param_groups[0]["lr"] = 0.05 / (1 + self.average.compute())


@case("handler Averages.average", slow=True)
def a_callback_holds_a_metric_of_ignites() -> dict[str, Any]:
    return {"callbacks": [Averages()]}


class Halving:
    def __call__(self, engine: Any) -> None:
        engine.optimizer.param_groups[0]["lr"] *= 0.9


@case(f"handler {__name__}.Halving", slow=True)
def a_handler_is_added_during_the_run() -> dict[str, Any]:
    def attach(engine: Any) -> None:
        @engine.on(Events.EPOCH_COMPLETED(once=2))
        def add() -> None:
            engine.add_event_handler(Events.ITERATION_STARTED, Halving())

    return with_handler(attach)


class Scaling:
    """A handler without a state that changes an attribute of a module, in which the loss is computed."""

    def __init__(self) -> None:
        self.module = nn.Identity()
        self.module.gain = 1.0

    def __call__(self) -> None:
        self.module.gain *= 0.9


@case("handler Scaling.module")
def a_handler_changes_an_attribute_of_a_module_that_it_holds() -> dict[str, Any]:
    scaling = Scaling()
    strategy = SupervisedStrategy(lambda outputs, targets: scaling.module.gain * (outputs - targets).square().mean())
    return with_handler(lambda run: run.add_event_handler(Events.ITERATION_STARTED, scaling), strategy=strategy)


class Ticks(EventEnum):
    TICK = "tick"


@case()
def a_custom_event_is_counted() -> dict[str, Any]:
    def attach(engine: Any) -> None:
        engine.register_events(Ticks.TICK, event_to_attr={Ticks.TICK: "tick"})
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.fire(Ticks.TICK))

        @engine.on(Ticks.TICK(every=3))
        def lower() -> None:
            engine.optimizer.param_groups[0]["lr"] *= 0.9

    return with_handler(attach)


def cooling(prepare: Callable[[Any], None], kind: type[Trainer] = Trainer) -> dict[str, Any]:
    """A run whose loss depends on an attribute of the trainer, which a handler changes."""
    made: list[Any] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean() * made[0].temperature

    def attach(engine: Any) -> None:
        made.append(engine)
        prepare(engine)

        @engine.on(Events.EPOCH_COMPLETED)
        def cool() -> None:
            engine.temperature *= 0.5

    return with_handler(attach, strategy=SupervisedStrategy(loss), kind=kind)


@case("trainer.temperature")
def an_attribute_of_the_trainer_is_set() -> dict[str, Any]:
    return cooling(lambda engine: setattr(engine, "temperature", 1.0))


class Before(Trainer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.temperature = 1.0
        super().__init__(*arguments, **options)


class After(Trainer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.temperature = 1.0


class OfClass(Trainer):
    temperature = 1.0


def of_subclass(kind: type[Trainer]) -> Make:
    return lambda: cooling(lambda engine: None, kind)


CASES += [
    pytest.param(of_subclass(kind), ("trainer.temperature",), id=f"of a subclass: {kind.__name__}")
    for kind in (Before, After, OfClass)
]


@case("state.level", slow=True)
def an_attribute_of_the_engines_state_is_set() -> dict[str, Any]:
    def attach(engine: Any) -> None:
        @engine.on(Events.ITERATION_STARTED)
        def use() -> None:
            level = engine.state.level = getattr(engine.state, "level", 0) + 1
            engine.optimizer.param_groups[0]["lr"] = 0.05 / (1 + level % 3)

    return with_handler(attach)


@pytest.mark.parametrize(("make", "lacks"), CASES)
def test_what_has_changed_is_resumed_or_named(make: Make, lacks: tuple[str, ...], tmp_path: Path):
    check_that_what_has_changed_is_resumed_or_named(make, lacks, tmp_path)
