"""Parameter groups: which parameters are trained, which decay, and which have their own learning rate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from pulsetrain.engine.errors import ArgumentTypeError, nearest
from pulsetrain.engine.optimizers.options import POSITIVE, check_number
from pulsetrain.engine.optimizers.registry import refused

__all__ = [
    "DecayRule",
    "LayerRates",
    "build_groups",
    "check_model",
    "decay_rule",
    "rate_rule",
    "exempt_by_kind",
    "trainable_of",
]

DecayRule = Callable[[str, nn.Parameter], bool]
"""`rule(name, parameter)`: whether the parameter is exempt from weight decay."""

LayerRates = Mapping[str, float] | Callable[[str, nn.Parameter], float | None]
"""Learning rates by module path or name prefix, or `rule(name, parameter)`, which returns a rate or None (default)."""

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their names."""

_RateRule = Callable[[str, nn.Parameter], tuple[str | float, float] | None]
"""The key of the parameter's group, and its rate; None for the default rate."""

_NORM_CLASS = re.compile(r"Norm(alization)?(?![a-z])")  # LayerNorm, BatchNorm2d, LlamaRMSNorm; not Normalizer


def check_model(place: str, model: object) -> None:
    """Raises TypeError unless the model is a torch module."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            "needs a torch.nn.Module, since parameter groups use its names and modules; for bare parameters use "
            "torch.optim directly",
            place,
            model=None if model is None else type(model),
        )


def trainable_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that require gradients with their names, each parameter once, under its first name.

    >>> [name for name, _ in trainable_of(nn.Linear(2, 2))]
    ['weight', 'bias']

    Raises:
        ConfigurationError: there are none, or one is uninitialised.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        frozen = sum(1 for _ in model.parameters())
        rule = f"no trainable parameter ({frozen} frozen ones); call requires_grad_(True) on those to train"
        raise refused(rule if frozen else "has no parameters, so there is nothing to train", model=type(model))
    for name, parameter in trainable:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise refused(f"{name!r} has no shape yet; run the model on one batch first", model=type(model))
    return trainable


def build_groups(
    trainable: Named, weight_decay: float, exempt: DecayRule | None, rate_of: _RateRule
) -> list[dict[str, Any]]:
    """Groups by learning rate, each split into decayed and exempt parameters; none is empty.

    The groups with the default rate come first, then the others in the order of the model. The split depends on the
    rules, not on the values of named rates or of the decay, so a saved state still fits after those change. Loading it
    overwrites the rates and the decay with the saved ones.
    """
    rates: dict[str | float | None, float | None] = {None: None}
    members: dict[tuple[str | float | None, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable:
        own = rate_of(name, parameter)
        key = None if own is None else own[0]
        rates.setdefault(key, None if own is None else own[1])
        members.setdefault((key, exempt is not None and exempt(name, parameter)), []).append(parameter)
    groups = []
    for key, rate in rates.items():
        for is_exempt in (False, True):
            if (key, is_exempt) in members:
                group = {"params": members[key, is_exempt], "weight_decay": 0.0 if is_exempt else weight_decay}
                groups.append(group if rate is None else {**group, "lr": rate})
    return groups


# ------------------------------------------------------------------------------------------------ weight decay


def decay_rule(model: nn.Module, no_decay: Literal["auto"] | DecayRule | None) -> DecayRule | None:
    """The rule that no_decay means; None if every parameter decays."""
    if no_decay is None:
        return None
    if no_decay == "auto":
        return exempt_by_kind(model)
    if callable(no_decay):
        return no_decay
    raise refused('needs "auto", None, or a rule (name, parameter) -> bool', no_decay=no_decay)


def exempt_by_kind(model: nn.Module) -> DecayRule:
    """The rule that exempts biases, norms and embeddings, also embeddings that share their weight with another layer.

    >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    >>> rule = exempt_by_kind(model)
    >>> {name: rule(name, parameter) for name, parameter in model.named_parameters()}
    {'0.weight': True, '1.weight': False, '1.bias': True}
    """
    exempt = {
        id(parameter)
        for module in model.modules()
        if _is_embedding(module) or _NORM_CLASS.search(type(module).__name__)
        for parameter in module.parameters(recurse=False)
    }
    # "bias_hh_l0" of recurrent layers and "in_proj_bias" of attention are biases too
    return lambda name, parameter: id(parameter) in exempt or "bias" in name.rsplit(".", 1)[-1].split("_")


def _is_embedding(module: nn.Module) -> bool:
    """Whether it is one of torch, or has the same attributes, as the embeddings of other libraries do."""
    return hasattr(module, "num_embeddings") and hasattr(module, "embedding_dim")


# ---------------------------------------------------------------------------------------------- learning rates


def rate_rule(model: nn.Module, trainable: Named, layer_rates: LayerRates | None) -> _RateRule:
    """The rule that layer_rates means.

    Raises:
        ConfigurationError: it is neither a mapping nor a rule, a rate is out of range, or a prefix matches no trainable
            parameter.
    """
    if layer_rates is None:
        return lambda name, parameter: None
    if callable(layer_rates):
        return _checked_rule(layer_rates)
    if not isinstance(layer_rates, Mapping):
        raise refused(
            "needs a mapping from a module path or the prefix of a "
            "parameter's name to a learning rate, or a rule (name, parameter) -> rate or None",
            layer_rates=layer_rates,
        )
    for prefix, rate in layer_rates.items():
        if not isinstance(prefix, str):  # YAML parses the name of a layer in a Sequential as a number
            raise refused(
                f"needs the path as text; write {str(prefix)!r}",
                **{f"layer_rates[{prefix!r}]": rate},
            )
        check_number(f"layer_rates[{prefix!r}]", rate, *POSITIVE)
        if not any(_covers(prefix, name) for name, _ in trainable):
            raise refused(_why_without(prefix, model, trainable), **{f"layer_rates[{prefix!r}]": rate})
    rates = dict(layer_rates)
    return lambda name, parameter: _longest(name, rates)


def _checked_rule(rule: Callable[[str, nn.Parameter], float | None]) -> _RateRule:
    def rate_of(name: str, parameter: nn.Parameter) -> tuple[float, float] | None:
        rate = rule(name, parameter)
        if rate is None:
            return None
        check_number(f"layer_rates({name!r}, ...)", rate, *POSITIVE)
        return rate, rate

    return rate_of


def _longest(name: str, rates: Mapping[str, float]) -> tuple[str, float] | None:
    prefix = max((prefix for prefix in rates if _covers(prefix, name)), key=len, default=None)
    return None if prefix is None else (prefix, rates[prefix])


def _covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _why_without(prefix: str, model: nn.Module, trainable: Named) -> str:
    first_names = {id(parameter): name for name, parameter in trainable}
    covered = [p for name, p in model.named_parameters(remove_duplicate=False) if _covers(prefix, name)]
    shared = [first_names[id(parameter)] for parameter in covered if id(parameter) in first_names]
    if shared:
        return f"its parameters are shared; use their first name in the model, {shared[0]!r}"
    if covered:
        return "all its parameters are frozen; call requires_grad_(True) on them, or leave it out"
    parts = [name.split(".") for name, _ in trainable]
    paths = dict.fromkeys(".".join(part[: depth + 1]) for part in parts for depth in range(len(part)))
    near = nearest(prefix, paths, 3)
    listed = near or list(dict.fromkeys(part[0] for part in parts))[:12]
    return f"matches no parameter; {'similar names are' if near else 'the model has'} {', '.join(map(repr, listed))}"
