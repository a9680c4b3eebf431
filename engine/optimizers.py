"""Optimizers by name: torch's own, with validated arguments, decay groups, and fused kernels where they pay."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from engine.errors import ConfigurationError, unknown_name

__all__ = ["DecayRule", "create_optimizer", "resolve_optimizer"]

DecayRule = Callable[[str, nn.Parameter], bool]
"""`rule(name, parameter)`: whether weight decay spares the parameter."""

_NAMED: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
}

# Where torch has a fused kernel that pays. One step in microseconds on 2 CPU cores with torch 2.13, default / fused:
#                     adamw        sgd, momentum 0.9   sgd, momentum 0   adagrad
#   4 tensors, 210     113 / 40         39 / 25             18 / 22        66 / 35
#   14 tensors, 1M    1885 / 493       438 / 330           230 / 226      711 / 379
#   60 tensors, 1M    3304 / 715       917 / 470           426 / 336     1850 / 568
# foreach=True lost to the default on the larger models. Fused kernels round differently in the last bit.
_FUSED = {"cpu": ("adamw", "adam", "sgd", "adagrad"), "cuda": ("adamw", "adam", "sgd")}

_NORM_CLASS = re.compile(r"Norm(alization)?(?![a-z])")  # LayerNorm, BatchNorm2d, LlamaRMSNorm; not Normalizer


def create_optimizer(
    model: nn.Module,
    name: str,
    learning_rate: float,
    weight_decay: float = 0.0,
    *,
    no_decay: Literal["auto"] | DecayRule | None = None,
    **kwargs: Any,
) -> Optimizer:
    """The torch optimizer of that name over the trainable parameters of the model; shared ones count once.

    Fused kernels are taken where they exist and pay; `fused=False` gives torch's default, bit for bit.

    Args:
        weight_decay: of every parameter, unless no_decay spares some.
        no_decay: "auto" spares biases, the parameters of normalisation layers and embeddings; a rule spares those that
            it answers True for. Either makes a second parameter group, without decay.
        kwargs: what the optimizer of torch takes; `adam_beta1`, `adam_beta2` and `adam_epsilon` are understood as
            parts of `betas` and `eps`. SGD's momentum is 0.9 unless given.

    Raises:
        ConfigurationError: an unknown name or keyword, a value out of range, or no trainable parameter.
    """
    if name not in _NAMED:
        raise unknown_name("create_optimizer", "name", name, _NAMED)
    _check_number("learning_rate", learning_rate, lambda rate: 0 < rate < math.inf, "a positive number")
    _check_number("weight_decay", weight_decay, lambda decay: 0 <= decay < math.inf, "a number that is not negative")
    options = _options(name, kwargs)
    trainable = _trainable(model)
    if name == "sgd":
        options.setdefault("momentum", 0.9)
    if not {"fused", "foreach", "differentiable"} & options.keys() and _fused_pays(name, model, trainable, options):
        options["fused"] = True
    try:
        return _NAMED[name](
            _groups(model, trainable, weight_decay, no_decay), lr=learning_rate, weight_decay=weight_decay, **options
        )
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigurationError(f"create_optimizer(name={name!r}, {given}): {error}") from error


def resolve_optimizer(
    optimizer: str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.0,
    **kwargs: Any,
) -> Optimizer:
    """An optimizer from its name, from an instance over the model's parameters, or from a factory.

    learning_rate and weight_decay are for a name alone: an instance keeps its own, and a factory, which is called with
    `model.parameters()`, brings its own (`functools.partial(torch.optim.SGD, lr=0.1)`).

    Raises:
        ConfigurationError: nothing of the three, further keywords without a name, or an optimizer that misses trainable
            parameters of the model.
    """
    place = "resolve_optimizer"
    if isinstance(optimizer, str):
        return create_optimizer(model, optimizer, learning_rate, weight_decay, **kwargs)
    if kwargs:
        given = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
        raise ConfigurationError(f"{place}({given}): only an optimizer given by its name takes keywords")
    made: object = optimizer
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        made = optimizer(model.parameters())
        place = f"{place}(optimizer={optimizer!r}) returned {type(made).__name__}"
    else:
        place = f"{place}(optimizer={type(optimizer).__name__})"
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"{place}: needs a name ({', '.join(sorted(_NAMED))}), a torch.optim.Optimizer, "
            "or a function from parameters to one"
        )
    held = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    missing = [key for key, parameter in _trainable(model) if id(parameter) not in held]
    if missing:
        raise ConfigurationError(
            f"{place}: misses {len(missing)} trainable parameters of the model, {missing[0]!r} first; make it from "
            "model.parameters() of this model, and call requires_grad_(False) on those that are not to be trained"
        )
    return made


def _check_number(argument: str, value: object, rule: Callable[[float], bool], needs: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not rule(value):
        raise ConfigurationError(f"create_optimizer({argument}={value!r}): needs {needs}")


def _options(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords under torch's names, checked against what the optimizer takes."""
    taken = inspect.signature(_NAMED[name]).parameters
    choices = [key for key in taken if key not in ("params", "lr", "weight_decay")]
    if "betas" in taken:
        choices += ["adam_beta1", "adam_beta2", "adam_epsilon"]
    for key, value in kwargs.items():
        if key not in choices:
            raise ConfigurationError(
                f"create_optimizer({key}={value!r}): unknown to {name!r}; it takes {', '.join(sorted(choices))}"
            )
    options = dict(kwargs)
    for new, old in (("betas", "adam_beta1"), ("betas", "adam_beta2"), ("eps", "adam_epsilon")):
        if old in kwargs and new in kwargs:
            raise ConfigurationError(
                f"create_optimizer({old}={kwargs[old]!r}, {new}={kwargs[new]!r}): pass one of both"
            )
    if "adam_epsilon" in options:
        options["eps"] = options.pop("adam_epsilon")
    if "adam_beta1" in options or "adam_beta2" in options:
        default = taken["betas"].default
        options["betas"] = (options.pop("adam_beta1", default[0]), options.pop("adam_beta2", default[1]))
    if "betas" in options:
        betas = options["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ConfigurationError(f"create_optimizer(betas={betas!r}): needs two numbers")
        for index, beta in enumerate(betas):
            source = f"adam_beta{index + 1}" if f"adam_beta{index + 1}" in kwargs else f"betas[{index}]"
            _check_number(source, beta, lambda value: 0 <= value < 1, "a number from 0 up to, but not including, 1")
        options["betas"] = tuple(betas)
    if "eps" in options:
        source = "adam_epsilon" if "adam_epsilon" in kwargs else "eps"
        _check_number(source, options["eps"], lambda value: 0 <= value < math.inf, "a number that is not negative")
    return options


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that take gradients, each parameter once, under its first name."""
    trainable = [(key, parameter) for key, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        frozen = sum(1 for _ in model.parameters())
        raise ConfigurationError(
            f"create_optimizer(model={type(model).__name__}): no trainable parameter ({frozen} frozen ones); "
            "call requires_grad_(True) on what is to be trained"
        )
    for key, parameter in trainable:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"create_optimizer(model={type(model).__name__}): {key!r} has no shape yet; "
                "run the model on one batch first"
            )
    return trainable


def _groups(
    model: nn.Module,
    trainable: list[tuple[str, nn.Parameter]],
    weight_decay: float,
    no_decay: Literal["auto"] | DecayRule | None,
) -> list[dict[str, Any]]:
    """One parameter group, or two where parameters are spared; the rule alone decides, so that states fit again."""
    if no_decay is None:
        return [{"params": [parameter for _, parameter in trainable], "weight_decay": weight_decay}]
    if no_decay == "auto":
        spares = _spared_by_kind(model)
    elif callable(no_decay):
        spares = no_decay
    else:
        raise ConfigurationError(
            f'create_optimizer(no_decay={no_decay!r}): needs "auto", None, or a rule (name, parameter) -> bool'
        )
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for key, parameter in trainable:
        (spared if spares(key, parameter) else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _spared_by_kind(model: nn.Module) -> DecayRule:
    """The rule for biases, norms and embeddings; an embedding that is shared with another layer stays an embedding."""
    spared = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or _NORM_CLASS.search(type(module).__name__)
        for parameter in module.parameters(recurse=False)
    }
    # "bias_hh_l0" of recurrent layers and "in_proj_bias" of attention are biases too
    return lambda key, parameter: id(parameter) in spared or "bias" in key.rsplit(".", 1)[-1].split("_")


def _fused_pays(
    name: str, model: nn.Module, trainable: list[tuple[str, nn.Parameter]], options: dict[str, Any]
) -> bool:
    devices = {parameter.device.type for _, parameter in trainable}
    if not all(name in _FUSED.get(device, ()) for device in devices):
        return False
    if not all(parameter.is_floating_point() for _, parameter in trainable):
        return False
    if devices == {"cpu"} and name == "sgd" and not options["momentum"]:
        return False  # a small model would pay 3 us for it, see the figures above
    # nn.Embedding(sparse=True) makes sparse gradients, which no fused kernel takes
    return not any(getattr(module, "sparse", False) is True for module in model.modules())
