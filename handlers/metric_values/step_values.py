"""The scalars of a step's output, metrics by their full names, and learning rates."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

from pulsetrain.engine import Engine, Events, TrainingResult, is_training_run
from pulsetrain.engine.metrics import to_host
from pulsetrain.handlers.attachment.engine_queries import attribute

__all__ = ["METRIC_EVENTS", "is_on_host", "learning_rates", "on_host", "scalar", "scalars", "step_metrics", "to_host"]

# their payloads have `metrics`, by which a run may be judged; state.metrics holds these too
METRIC_EVENTS = (Events.VALIDATION_COMPLETED, Events.ROLLOUT_COMPLETED, Events.POLICY_UPDATED)


def scalars(output: object) -> dict[str, Tensor | float]:
    """The named scalars in what a step returned; other values are left out.

    Args:
        output: a number or a one-element tensor (then named "loss"), a mapping of those, or an object with `metrics`
            (such a mapping) and perhaps `loss`.

    Returns:
        Numbers as they are, tensors detached on their device: nothing is copied to the host.

    >>> scalars(0.5)
    {'loss': 0.5}
    >>> scalars({"loss": 0.5, "logits": [0.1, 0.2]})
    {'loss': 0.5}
    """
    if type(output) is TrainingResult:
        output = output.metrics
    if type(output) is dict or isinstance(output, Mapping):  # isinstance() of an ABC takes ten times as long
        found = {name: scalar(value) for name, value in output.items() if isinstance(name, str)}
        return {name: value for name, value in found.items() if value is not None}
    single = scalar(output)
    if single is not None:
        return {"loss": single}
    metrics = getattr(output, "metrics", None)
    named = scalars(metrics) if isinstance(metrics, Mapping) else {}
    loss = scalar(getattr(output, "loss", None))
    return {"loss": loss, **named} if loss is not None else named


def scalar(value: object) -> Tensor | float | None:
    """The value as a number, or as a detached tensor of shape (); None if it is not a real scalar."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        if value.is_cpu and not value.dim() and value.is_floating_point():  # by far the most common
            return value.detach() if value.requires_grad else value
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool or value.is_meta:
            return None
        value = value.detach() if value.requires_grad else value
        one: Tensor = value if value.dim() == 0 else value.reshape(())
        return one
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        # numpy's scalars are Real too
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return None


def is_on_host(value: Tensor) -> bool:
    """Whether reading the value waits for no device.

    >>> is_on_host(torch.tensor(0.5))
    True
    """
    return bool(value.is_cpu)


def learning_rates(engine: Engine) -> list[Tensor | float]:
    """The rate of each parameter group: of the last update on a trainer, else the optimizer's; empty without one."""
    if is_training_run(engine):
        return list(engine.learning_rates)  # its optimizer already holds those of the next update
    groups = attribute(attribute(engine, "optimizer", object), "param_groups", list)
    return [group["lr"] for group in groups or () if "lr" in group]


def step_metrics(engine: Engine) -> dict[str, float]:
    """The scalars of the engine's last step by their full names, and the learning rate, copied to the host.

    The names begin with "val/" on an engine named "evaluator" or "NAME.evaluator", else with "train/".
    """
    prefix = "val/" if engine.name.rpartition(".")[2] == "evaluator" else "train/"
    found = {
        name if name.startswith(prefix) else prefix + name: value
        for name, value in scalars(engine.state.output).items()
    }
    rates = learning_rates(engine)
    if rates:
        found["learning_rate"] = rates[0]
    return on_host(found)


def on_host(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The values with tensors copied to the host together.

    >>> on_host({"loss": torch.tensor(0.5), "learning_rate": 0.1})
    {'loss': 0.5, 'learning_rate': 0.1}
    """
    tensors = {name: value.reshape(()) for name, value in values.items() if isinstance(value, Tensor)}
    host = dict(zip(tensors, to_host(list(tensors.values())), strict=True))
    return {name: host[name] if isinstance(value, Tensor) else value for name, value in values.items()}
