"""What a model's forward accepts, and how it weighs an auxiliary loss of its own."""

from __future__ import annotations

import inspect

from torch import nn

__all__ = ["accepted_by", "own_coefficient", "takes"]


def takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward accepts a keyword; True if that is unknown."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError, AttributeError):
        return True
    return any(each.name == name or each.kind == each.VAR_KEYWORD for each in parameters)


def accepted_by(model: nn.Module) -> frozenset[str] | None:
    """The names that a model's forward accepts beside input_ids; None if it accepts any, or that is unknown.

    Models of transformers accept further keywords and ignore them, so that only their parameters count.
    """
    base = getattr(model, "get_base_model", None)  # of adapters, which pass all keywords to it
    try:
        parameters = inspect.signature((base() if callable(base) else model).forward).parameters
    except (TypeError, ValueError, AttributeError):
        return None
    if "input_ids" in parameters:
        return frozenset(parameters)
    passes = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    return None if passes else frozenset()


def own_coefficient(model: nn.Module) -> float:
    """The weight that a model of transformers gives its auxiliary loss; 0 if it has none."""
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        found = getattr(model, name, getattr(getattr(model, "config", None), name, None))
        if isinstance(found, (int, float)):
            return float(found)
    return 0.0
