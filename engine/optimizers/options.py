"""Keywords of optimizers: familiar names translated, and values refused that torch would take in silence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers.registry import optimizer_class

__all__ = ["check_number", "checked_options"]

_Rule = tuple[Callable[[Any], bool], str]

_BELOW_ONE: _Rule = (lambda value: 0 <= value < 1, "a number from 0 up to, but not including, 1")
_INSIDE: _Rule = (lambda value: 0 < value < 1, "a number between 0 and 1, since the average divides by it")
_NOT_NEGATIVE: _Rule = (lambda value: 0 <= value < math.inf, "a number that is not negative")

# torch takes each without a word where it is nan, infinite, or (momentum, alpha, rho) makes the averages grow
_NUMBERS: dict[str, _Rule] = {
    "momentum": _BELOW_ONE,
    "alpha": _BELOW_ONE,
    "rho": _BELOW_ONE,
    "dampening": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "eps": _NOT_NEGATIVE,
    "adam_epsilon": _NOT_NEGATIVE,
    "lr_decay": _NOT_NEGATIVE,
    "initial_accumulator_value": _NOT_NEGATIVE,
    "momentum_decay": _NOT_NEGATIVE,
    "r": _NOT_NEGATIVE,
    "weight_lr_power": _NOT_NEGATIVE,
    "ns_steps": (lambda value: isinstance(value, int) and 1 <= value < 100, "a whole number from 1 to 99"),
    "warmup_steps": (lambda value: isinstance(value, int) and value >= 0, "a whole number, 0 or more"),
}

# they would take any other value for true, the text "false" too
_SWITCHES = ("nesterov", "amsgrad", "centered", "maximize", "capturable", "differentiable", "decoupled_weight_decay",
             "use_triton")  # fmt: skip
_OPEN_SWITCHES = ("fused", "foreach")

# what of AdamW's the other half of "muon" takes; `maximize` and the like would hold for that half alone
_BESIDE_MUON = ("betas", "amsgrad", "foreach", "fused")


def check_number(argument: str, value: object, rule: Callable[[Any], bool], needs: str) -> None:
    """Raises ConfigurationError unless the value is a number (True is none) and the rule holds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not rule(value):
        raise ConfigurationError(f"needs {needs}", "create_optimizer", **{argument: value})


def checked_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords under torch's names, checked against what the optimizer takes.

    For "muon", `adam_epsilon` stays what it is, since Muon has an `eps` of its own.

    Raises:
        ConfigurationError: an unknown name or keyword, or a value out of range.
    """
    taken = _taken(name)
    choices = list(taken)
    if "betas" in taken:
        choices += ["adam_beta1", "adam_beta2"]
        if "eps" in taken:
            choices.append("adam_epsilon")
    if name == "muon":
        choices.append("muon_rule")
    for key, value in given.items():
        if key not in choices:
            raise ConfigurationError(
                f"unknown to {name!r}; it takes {', '.join(sorted(choices))}", "create_optimizer", **{key: value}
            )
    options = dict(given)
    _check_values(name, options)
    _translate(name, taken, options)
    if "betas" in options:
        _check_betas(name, given, options)
    if isinstance(options.get("ns_coefficients"), list):
        options["ns_coefficients"] = tuple(options["ns_coefficients"])
    if options.get("use_triton") and find_spec("triton") is None:
        # lion-pytorch would end the process
        raise ConfigurationError("needs the package triton; pip install triton", "create_optimizer", use_triton=True)
    return options


def _taken(name: str) -> dict[str, Any]:
    """The keywords that the optimizer takes, and their defaults."""
    parameters = dict(inspect.signature(optimizer_class(name)).parameters)
    if name == "muon":
        adamw = inspect.signature(torch.optim.AdamW).parameters
        parameters.update({key: adamw[key] for key in _BESIDE_MUON})
    return {key: each.default for key, each in parameters.items() if key not in ("params", "lr", "weight_decay")}


def _check_values(name: str, options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key == "momentum" and name == "schedule_free_sgd":
            check_number(key, value, *_INSIDE)
        elif key in _NUMBERS:
            check_number(key, value, *_NUMBERS[key])
        elif (key in _SWITCHES or key in _OPEN_SWITCHES) and not (
            isinstance(value, bool) or (value is None and key in _OPEN_SWITCHES)
        ):
            raise ConfigurationError("needs to be True or False", "create_optimizer", **{key: value})


def _translate(name: str, taken: Mapping[str, Any], options: dict[str, Any]) -> None:
    """adam_beta1 and adam_beta2 become betas, adam_epsilon becomes eps."""
    pairs = [("betas", "adam_beta1"), ("betas", "adam_beta2")]
    if name != "muon":
        pairs.append(("eps", "adam_epsilon"))
    for new, old in pairs:
        if old in options and new in options:
            raise ConfigurationError("pass one of both", "create_optimizer", **{old: options[old], new: options[new]})
    if name != "muon" and "adam_epsilon" in options:
        options["eps"] = options.pop("adam_epsilon")
    if "adam_beta1" in options or "adam_beta2" in options:
        default = taken["betas"]
        options["betas"] = (options.pop("adam_beta1", default[0]), options.pop("adam_beta2", default[1]))


def _check_betas(name: str, given: Mapping[str, Any], options: dict[str, Any]) -> None:
    betas = options["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigurationError("needs two numbers", "create_optimizer", betas=betas)
    for index, beta in enumerate(betas):
        source = f"adam_beta{index + 1}" if f"adam_beta{index + 1}" in given else f"betas[{index}]"
        check_number(source, beta, *(_INSIDE if name == "schedule_free_adamw" and index == 0 else _BELOW_ONE))
    options["betas"] = tuple(betas)
