"""Makes optimizers, from a name or from what a user brings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
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
from pulsetrain.engine.optimizers.kernels import fused_pays
from pulsetrain.engine.optimizers.muon import MuonWithAdamW, part_for_muon
from pulsetrain.engine.optimizers.options import check_number, checked_options
from pulsetrain.engine.optimizers.registry import NAMES, optimizer_class
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
    **kwargs: Any,
) -> Optimizer:
    """The optimizer of that name over the trainable parameters of the model; shared ones count once.

    adamw, adam, sgd, rmsprop, adagrad, adadelta, nadam and radam are torch's; fused kernels are taken where they exist
    and pay; `fused=False` gives torch's default, bit for bit. lion is lion-pytorch's; schedule_free_adamw and
    schedule_free_sgd are schedulefree's, in train mode (see `averaged_weights`). muon is a `MuonWithAdamW`: torch's
    Muon for the hidden matrices, AdamW for the rest; `muon_rule=(name, parameter) -> bool` decides otherwise.

    Args:
        weight_decay: of every parameter, unless no_decay spares some.
        no_decay: "auto" spares biases, the parameters of normalisation layers and embeddings; a rule spares those that
            it answers True for. Either makes a second parameter group, without decay.
        layer_rates: learning rates of parts of the model, by module path or by the prefix of a parameter's name,
            matched at dots (the longest match wins; shared parameters go by their first name), or by a rule that
            answers None for the default rate. Each makes a parameter group, whose ratio to learning_rate a schedule
            keeps.
        kwargs: what the optimizer itself takes; `adam_beta1`, `adam_beta2` and `adam_epsilon` are understood as
            parts of `betas` and `eps`, and are for the AdamW half of muon, whose `eps` is Muon's. SGD's momentum is
            0.9 unless given.

    Raises:
        TypeError: the model is no module.
        ConfigurationError: an unknown name or keyword, a value out of range, a package that is not installed, no
            trainable parameter, or a part of the model that is not there.
    """
    check_model("create_optimizer", model)
    options = checked_options(name, kwargs)
    check_number("learning_rate", learning_rate, lambda rate: 0 < rate < math.inf, "a positive number")
    check_number("weight_decay", weight_decay, lambda decay: 0 <= decay < math.inf, "a number that is not negative")
    trainable = trainable_of(model)
    spares, rate_of = decay_rule(model, no_decay), rate_rule(model, trainable, layer_rates)
    grouped = partial(build_groups, weight_decay=weight_decay, spares=spares, rate_of=rate_of)
    if name == "sgd":
        options.setdefault("momentum", 0.9)
    if name != "muon" and fused_pays(name, model, trainable, options):
        options["fused"] = True
    make: Callable[..., Optimizer]
    if name == "muon":
        matrices, others = part_for_muon(model, trainable, options.pop("muon_rule", None))
        make = partial(_muon, model, others, grouped(matrices), grouped(others))
    else:
        make = partial(optimizer_class(name), grouped(trainable))
    try:
        made = make(lr=learning_rate, weight_decay=weight_decay, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(str(error), "create_optimizer", **{"name": name, **options}) from error
    if is_schedule_free(made):
        begin_training(made)
    return made


def resolve_optimizer(
    optimizer: str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.0,
    **kwargs: Any,
) -> Optimizer:
    """An optimizer from its name, from an instance over the model's parameters, or from a factory.

    learning_rate and weight_decay are for a name alone: an instance keeps its own, and a factory, which is called with
    `model.parameters()`, brings its own (`functools.partial(torch.optim.SGD, lr=0.1)`). A schedule-free optimizer is
    put into train mode.

    Raises:
        TypeError: the model is no module.
        ConfigurationError: nothing of the three, further keywords without a name, or an optimizer that misses trainable
            parameters of the model.
    """
    place = "resolve_optimizer"
    check_model(place, model)
    if isinstance(optimizer, str):
        return create_optimizer(model, optimizer, learning_rate, weight_decay, **kwargs)
    if kwargs:
        raise ConfigurationError("only an optimizer given by its name takes keywords", place, **kwargs)
    made: object = optimizer
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        made = optimizer(model.parameters())
        place = f"{place}(optimizer={optimizer!r}) returned {type(made).__name__}"
    else:
        place = f"{place}(optimizer={type(optimizer).__name__})"
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"{place}: needs a name ({', '.join(sorted(NAMES))}), a torch.optim.Optimizer, "
            "or a function from parameters to one"
        )
    held = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    missing = [key for key, parameter in trainable_of(model) if id(parameter) not in held]
    if missing:
        raise ConfigurationError(
            f"{place}: misses {len(missing)} trainable parameters of the model, {missing[0]!r} first; make it from "
            "model.parameters() of this model, and call requires_grad_(False) on those that are not to be trained"
        )
    if is_schedule_free(made):
        begin_training(made)
    return made


def _muon(
    model: nn.Module,
    others: Named,
    muon_groups: list[dict[str, Any]],
    adamw_groups: list[dict[str, Any]],
    *,
    lr: float,
    weight_decay: float,
    **options: Any,
) -> MuonWithAdamW:
    """Hands each half its keywords."""
    muon = {key: options.pop(key) for key in _MUON_OPTIONS if key in options}
    if "adam_epsilon" in options:
        options["eps"] = options.pop("adam_epsilon")
    if fused_pays("adamw", model, others, options):
        options["fused"] = True
    return MuonWithAdamW(muon_groups, adamw_groups, lr=lr, weight_decay=weight_decay, muon=muon, adamw=options)
