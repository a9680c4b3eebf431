"""Keywords of optimizers: translates familiar names, and rejects values that torch would silently accept."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from pulsetrain.engine.argument_checks import is_number, is_whole
from pulsetrain.engine.errors import ConfigurationError, did_you_mean
from pulsetrain.engine.optimizers.registry import CREATE, optimizer_class

__all__ = ["LEARNING_RATE", "POSITIVE", "check_number", "check_rates", "checked_options"]

LEARNING_RATE = 1e-3  # where none is given

_Rule = tuple[Callable[[Any], bool], str]

_BELOW_ONE: _Rule = (lambda value: 0 <= value < 1, "a number from 0 up to, but not including, 1")
_INSIDE: _Rule = (lambda value: 0 < value < 1, "a number between 0 and 1, since the average divides by it")
POSITIVE: _Rule = (lambda value: 0 < value < math.inf, "a positive number")
_NOT_NEGATIVE: _Rule = (lambda value: 0 <= value < math.inf, "a number that is not negative")

# torch silently accepts nan and infinity for each, and values of momentum, alpha and rho that make averages grow
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
    "ns_steps": (lambda value: is_whole(value) and 1 <= value < 100, "a whole number from 1 to 99"),
    "warmup_steps": (lambda value: is_whole(value) and value >= 0, "a whole number, 0 or more"),
}

# torch would treat any other value as true, even the string "false"
_SWITCHES = ("nesterov", "amsgrad", "centered", "maximize", "capturable", "differentiable", "decoupled_weight_decay",
             "use_triton")  # fmt: skip
_OPEN_SWITCHES = ("fused", "foreach")

# a part of a keyword, or another name of it
_ALIASES = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}

# AdamW's keywords for its half of "muon"; others, such as `maximize`, would apply to that half alone
_ADAMW_HALF = ("betas", "amsgrad", "foreach", "fused")


def check_number(argument: str, value: object, rule: Callable[[Any], bool], needs: str, place: str = CREATE) -> None:
    """Raises ConfigurationError unless the value is a number (not a bool) for which the rule holds.

    >>> check_number("momentum", 1.5, lambda value: 0 <= value < 1, "a number below 1")
    Traceback (most recent call last):
        ...
    pulsetrain.engine.errors.ConfigurationError: create_optimizer(momentum=1.5): needs a number below 1
    """
    if not is_number(value) or not rule(value):
        raise ConfigurationError(f"needs {needs}", place, **{argument: value})


def check_rates(learning_rate: object, weight_decay: object, place: str = CREATE) -> None:
    """Raises ConfigurationError unless the rate is positive and the decay not negative."""
    check_number("learning_rate", learning_rate, *POSITIVE, place)
    check_number("weight_decay", weight_decay, *_NOT_NEGATIVE, place)


def checked_options(name: str, given: Mapping[str, Any], place: str = CREATE) -> dict[str, Any]:
    """The checked keywords under torch's names; `place` is the caller that an error names.

    For "muon", `adam_epsilon` keeps its name, since `eps` is Muon's.

    >>> checked_options("adamw", {"adam_beta2": 0.95, "adam_epsilon": 1e-6})
    {'eps': 1e-06, 'betas': (0.9, 0.95)}

    Raises:
        ConfigurationError: a name or keyword is unknown, or a value is out of range.
    """
    accepted = _accepted(name)
    aliases = {old: new for old, new in _ALIASES.items() if {"betas", new} <= accepted.keys()}
    choices = {*accepted, *aliases, *(("muon_rule",) if name == "muon" else ())}
    for key, value in given.items():
        if key not in choices:
            rule = f"unknown to {name!r}; it takes {', '.join(sorted(choices))}{did_you_mean(key, choices)}"
            raise ConfigurationError(rule, place, **{key: value})
    options = dict(given)
    _check_values(place, name, options)
    if name == "muon":
        aliases.pop("adam_epsilon")  # eps is Muon's, and this one AdamW's
    for old, new in aliases.items():
        if old in options and new in options:
            raise ConfigurationError("pass only one of them", place, **{old: options[old], new: options[new]})
    if "adam_epsilon" in aliases.keys() & options.keys():
        options["eps"] = options.pop("adam_epsilon")
    if {"adam_beta1", "adam_beta2"} & options.keys():
        first, second = accepted["betas"]
        options["betas"] = (options.pop("adam_beta1", first), options.pop("adam_beta2", second))
    if "betas" in options:
        _check_betas(place, name, given, options)
    if isinstance(options.get("ns_coefficients"), list):
        options["ns_coefficients"] = tuple(options["ns_coefficients"])
    if options.get("use_triton") and find_spec("triton") is None:
        # lion-pytorch would exit the process
        raise ConfigurationError("needs the package triton; pip install triton", place, use_triton=True)
    return options


def _accepted(name: str) -> dict[str, Any]:
    """The keywords of the optimizer with their defaults."""
    parameters = dict(inspect.signature(optimizer_class(name)).parameters)
    if name == "muon":
        adamw = inspect.signature(torch.optim.AdamW).parameters
        parameters.update({key: adamw[key] for key in _ADAMW_HALF})
    return {key: each.default for key, each in parameters.items() if key not in ("params", "lr", "weight_decay")}


def _check_values(place: str, name: str, options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key == "momentum" and name == "schedule_free_sgd":
            check_number(key, value, *_INSIDE, place)
        elif key in _NUMBERS:
            check_number(key, value, *_NUMBERS[key], place)
        elif (key in _SWITCHES or key in _OPEN_SWITCHES) and not (
            isinstance(value, bool) or (value is None and key in _OPEN_SWITCHES)
        ):
            raise ConfigurationError("needs to be True or False", place, **{key: value})


def _check_betas(place: str, name: str, given: Mapping[str, Any], options: dict[str, Any]) -> None:
    betas = options["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigurationError("needs two numbers", place, betas=betas)
    for index, beta in enumerate(betas):
        source = f"adam_beta{index + 1}" if f"adam_beta{index + 1}" in given else f"betas[{index}]"
        rule = _INSIDE if name == "schedule_free_adamw" and index == 0 else _BELOW_ONE
        check_number(source, beta, *rule, place)
    options["betas"] = tuple(betas)
