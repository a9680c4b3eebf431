"""Creates optimizers from a name, an instance or a factory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from inspect import Parameter, signature
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers.groups import (
    DecayRule,
    LayerRates,
    Named,
    build_groups,
    check_model,
    decay_rule,
    rate_rule,
    trainable_of,
)
from pulsetrain.engine.optimizers.kernels import fill_late_momentum, fused_pays
from pulsetrain.engine.optimizers.muon import MuonWithAdamW, split_for_muon
from pulsetrain.engine.optimizers.options import LEARNING_RATE, check_rates, checked_options
from pulsetrain.engine.optimizers.registry import NAMES, optimizer_class, refused
from pulsetrain.engine.optimizers.schedule_free import begin_training, is_schedule_free

__all__ = ["create_optimizer", "resolve_optimizer"]

_MUON_OPTIONS = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")


def create_optimizer(
    model: nn.Module,
    name: str,
    learning_rate: float,
    weight_decay: float = 0.0,
    *,
    no_decay: Literal["auto"] | DecayRule | None = None,
    layer_rates: LayerRates | None = None,
    **kwargs: object,
) -> Optimizer:
    """The optimizer with a name over the trainable parameters of the model; shared parameters count once.

    adamw, adam, sgd, rmsprop, adagrad, adadelta, nadam and radam are torch's, with fused kernels where these exist and
    are faster; `fused=False` gives torch's default, bit for bit. lion comes from lion-pytorch. schedule_free_adamw and
    schedule_free_sgd come from schedulefree, and are in train mode (see `averaged_weights`). muon is a `MuonWithAdamW`:
    torch's Muon for the hidden matrices and AdamW for the rest, or as `muon_rule=(name, parameter) -> bool` decides.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> optimizer = create_optimizer(model, "adamw", 1e-3, 0.1, no_decay="auto", layer_rates={"2": 1e-2})
    >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(1, 0.001, 0.1), (3, 0.001, 0.0), (1, 0.01, 0.1), (1, 0.01, 0.0)]

    Args:
        weight_decay: applies to every parameter that no_decay does not exempt.
        no_decay: "auto" exempts biases, parameters of normalisation layers and embeddings; a rule exempts the
            parameters for which it returns True. Either makes a second parameter group, without decay.
        layer_rates: learning rates for parts of the model, by module path or name prefix, matched at dots (the longest
            match wins; shared parameters use their first name), or by a rule that returns None for the default rate.
            Each makes a parameter group, whose ratio to learning_rate a schedule keeps.
        kwargs: keywords of the optimizer. `adam_beta1`, `adam_beta2` and `adam_epsilon` set parts of `betas` and
            `eps`; for muon they set the AdamW half, and `eps` is Muon's. SGD's momentum defaults to 0.9.

    Raises:
        TypeError: the model is not a module.
        ConfigurationError: a name or keyword is unknown, a value is out of range, a package is not installed, nothing
            is trainable, or a path in layer_rates matches nothing.
    """
    check_model("create_optimizer", model)
    options = checked_options(name, kwargs)
    check_rates(learning_rate, weight_decay)
    trainable = trainable_of(model)
    exempt, rate_of = decay_rule(model, no_decay), rate_rule(model, trainable, layer_rates)
    grouped = partial(build_groups, weight_decay=weight_decay, exempt=exempt, rate_of=rate_of)
    if name == "sgd":
        options.setdefault("momentum", 0.9)
    if name != "muon" and fused_pays(name, model, trainable, options):
        options["fused"] = True
    make: Callable[..., Optimizer]
    if name == "muon":
        matrices, others = split_for_muon(model, trainable, options.pop("muon_rule", None))
        make = partial(_muon, model, others, grouped(matrices), grouped(others))
    else:
        make = partial(optimizer_class(name), grouped(trainable))
    try:
        made = make(lr=learning_rate, weight_decay=weight_decay, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refused(str(error), **{"name": name, **options}) from error
    if name == "sgd" and options.get("fused"):
        made.register_step_pre_hook(fill_late_momentum)
    if is_schedule_free(made):
        begin_training(made)
    return made


def resolve_optimizer(
    optimizer: str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    model: nn.Module,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    **kwargs: Any,
) -> Optimizer:
    """An optimizer from a name, from an instance over the model's parameters, or from a factory.

    A factory, such as a class, is called with `model.parameters()`, and with `lr` (or `learning_rate`) and
    `weight_decay` if it accepts them and does not hold its own, as `functools.partial(torch.optim.SGD, lr=0.1)` does.
    An instance keeps its own values. A schedule-free optimizer is put into train mode.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> resolve_optimizer(torch.optim.SGD, model, learning_rate=0.1).param_groups[0]["lr"]
    0.1
    >>> resolve_optimizer(partial(torch.optim.SGD, lr=0.5), model, learning_rate=0.1).param_groups[0]["lr"]
    0.5

    Args:
        optimizer: the name, instance or factory.
        model: its parameters are optimised.
        learning_rate: None leaves it to the factory, and is 0.001 for a name, and for a factory that requires one.
        weight_decay: None leaves it to the factory, and is 0 for a name.
        kwargs: further keywords of the optimizer with that name.

    Raises:
        TypeError: the model is not a module.
        ConfigurationError: the argument is none of the three, keywords are given without a name, or the optimizer lacks
            trainable parameters of the model.
    """
    place = "resolve_optimizer"
    check_model(place, model)
    if isinstance(optimizer, str):
        rate = LEARNING_RATE if learning_rate is None else learning_rate
        return create_optimizer(model, optimizer, rate, 0.0 if weight_decay is None else weight_decay, **kwargs)
    if kwargs:
        raise ConfigurationError("only an optimizer given by name accepts keywords", place, **kwargs)
    made: object = optimizer
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        given = _accepted(optimizer, lr=learning_rate, weight_decay=weight_decay)
        _check_call(place, optimizer, given)
        made = optimizer(model.parameters(), **given)
        given_by, returned = optimizer, f"returned {type(made).__name__}; "
    else:
        given_by, returned = type(optimizer), ""
    if not isinstance(made, Optimizer):
        rule = (
            f"{returned}needs a name ({', '.join(sorted(NAMES))}), a torch.optim.Optimizer, "
            "or a function from parameters to one"
        )
        raise ConfigurationError(rule, place, optimizer=given_by)
    held = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    missing = [key for key, parameter in trainable_of(model) if id(parameter) not in held]
    if missing:
        rule = (
            f"lacks {len(missing)} trainable parameters of the model, {missing[0]!r} first; create it from "
            "model.parameters() of this model, and call requires_grad_(False) on parameters that should stay fixed"
        )
        raise ConfigurationError(rule, place, optimizer=given_by)
    if is_schedule_free(made):
        begin_training(made)
    return made


def _accepted(factory: Callable[..., object], **given: float | None) -> dict[str, float]:
    """The keywords to call a factory with: those with a value that it accepts and does not hold itself."""
    parameters = signature(factory).parameters
    held = factory.keywords if isinstance(factory, partial) else {}
    if "lr" not in parameters and "learning_rate" in parameters:
        given = {"learning_rate": given["lr"], "weight_decay": given["weight_decay"]}
    any_name = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    accepted = {name for name in given if (any_name or name in parameters) and name not in held}
    rate = next(iter(given))
    if given[rate] is None and rate in parameters and parameters[rate].default is Parameter.empty:
        given[rate] = LEARNING_RATE
    return {name: value for name, value in given.items() if value is not None and name in accepted}


def _check_call(place: str, factory: Callable[..., object], given: dict[str, float]) -> None:
    """Refuse a factory that cannot be called with these keywords."""
    try:
        signature(factory).bind([], **given)
    except TypeError as error:
        keywords = "".join(f", {name}=..." for name in given)
        rule = (
            f"cannot be called as optimizer(model.parameters(){keywords}): {error}; give the other parameters "
            "defaults, or hold them by functools.partial"
        )
        raise ConfigurationError(rule, place, optimizer=factory) from None


def _muon(
    model: nn.Module,
    others: Named,
    muon_groups: list[dict[str, object]],
    adamw_groups: list[dict[str, object]],
    *,
    lr: float,
    weight_decay: float,
    **options: object,
) -> MuonWithAdamW:
    """Gives each half its keywords."""
    muon = {key: options.pop(key) for key in _MUON_OPTIONS if key in options}
    if "adam_epsilon" in options:
        options["eps"] = options.pop("adam_epsilon")
    if fused_pays("adamw", model, others, options):
        options["fused"] = True
    return MuonWithAdamW(muon_groups, adamw_groups, lr=lr, weight_decay=weight_decay, muon=muon, adamw=options)
