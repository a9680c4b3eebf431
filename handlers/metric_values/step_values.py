"""What loggers read of an engine: the scalars of a step's output, and metrics by their full names."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.events.names import Events
from pulsetrain.engine.metrics import to_host

__all__ = ["METRIC_EVENTS", "learning_rates", "scalar", "scalars", "step_metrics", "to_host"]

# the payloads of these have `metrics` by which a run may be judged, and state.metrics holds them, too
METRIC_EVENTS = (Events.VALIDATION_COMPLETED, Events.ROLLOUT_COMPLETED, Events.POLICY_UPDATED)


def scalars(output: Any) -> dict[str, Tensor | float]:
    """The named scalars in what a step returned; what is no scalar is left out.

    Args:
        output: a number or a one-element tensor (then named "loss"), a mapping of those, or an object with `metrics`
            (such a mapping) and perhaps `loss`.

    Returns:
        Numbers as they are, tensors detached on their device: nothing is brought to the host.
    """
    if type(output) is dict or isinstance(output, Mapping):  # an ABC takes ten times as long to ask
        found = {name: scalar(value) for name, value in output.items() if isinstance(name, str)}
        return {name: value for name, value in found.items() if value is not None}
    single = scalar(output)
    if single is not None:
        return {"loss": single}
    metrics = getattr(output, "metrics", None)
    named = scalars(metrics) if isinstance(metrics, Mapping) else {}
    loss = scalar(getattr(output, "loss", None))
    return {"loss": loss, **named} if loss is not None else named


def scalar(value: Any) -> Tensor | float | None:
    """The value as a number, or as a detached tensor of shape (); None where it is no real scalar."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool or value.is_meta:
            return None
        value = value.detach() if value.requires_grad else value
        one: Tensor = value if value.dim() == 0 else value.reshape(())
        return one
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        # numpy's scalars are Real, too
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return None


def learning_rates(engine: Any) -> list[Tensor | float]:
    """The rate of each parameter group in the last update made, else now; none where there is no optimizer."""
    used = getattr(engine, "learning_rates", None)  # a trainer's: the optimizer holds the next update's already
    if used is not None:
        return list(used)
    groups = getattr(getattr(engine, "optimizer", None), "param_groups", None)
    return [group["lr"] for group in groups if "lr" in group] if isinstance(groups, list) else []


def step_metrics(engine: Any) -> dict[str, float]:
    """The scalars of the engine's last step by their full names, and the learning rate, brought to the host.

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
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    host = dict(zip(tensors, to_host(list(tensors.values())), strict=True))
    return {name: host[name] if isinstance(value, Tensor) else value for name, value in found.items()}
