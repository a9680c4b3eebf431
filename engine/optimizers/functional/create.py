"""Makes functional optimizers from their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.optimizers.functional.adam import Adam, AdamW
from pulsetrain.engine.optimizers.functional.rmsprop import RMSprop
from pulsetrain.engine.optimizers.functional.rules import check
from pulsetrain.engine.optimizers.functional.sgd import SGD
from pulsetrain.engine.optimizers.functional.trees import DecayMask
from pulsetrain.engine.optimizers.registry import NAMES

__all__ = ["FUNCTIONAL_NAMES", "create_functional"]

_KINDS: Mapping[str, type[SGD] | type[Adam] | type[AdamW] | type[RMSprop]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "rmsprop": RMSprop,
}

FUNCTIONAL_NAMES = tuple(_KINDS)


def create_functional(
    name: str, learning_rate: float, weight_decay: float = 0.0, *, decay_mask: DecayMask = None, **options: Any
) -> SGD | Adam | AdamW | RMSprop:
    """The functional optimizer of that name, with the numbers of torch's own.

    See `pulsetrain.engine.optimizers.functional`.

    Args:
        name: sgd, adam, adamw or rmsprop.
        decay_mask: a pytree of bools like the parameters, or a function from them to one; None lets all decay.
        options: those of `create_optimizer`; SGD's momentum is 0.9 unless given.

    Raises:
        ConfigurationError: an unknown name or keyword, a value out of range, or an option of optimizers in place alone.
    """
    place = "create_functional"
    if name not in _KINDS:
        others = ", ".join(sorted(set(NAMES) - set(_KINDS)))
        raise ConfigurationError(
            f"{unknown_name(place, 'name', name, _KINDS)}; {others} are there in place: TorchBackend() without "
            "functional=True"
        )
    kind = _KINDS[name]
    checked = check(place, name, learning_rate, weight_decay, decay_mask, options)
    known = {field.name for field in fields(kind)}
    for key in [key for key in checked if key not in known]:
        value = checked.pop(key)
        # functional ones can be differentiated through in any case, and have no kernels to choose from
        if value and key != "differentiable":
            raise ConfigurationError(
                f"{place}({key}={value!r}): {name!r} knows it in place alone; leave it out, or take TorchBackend() "
                "without functional=True"
            )
    if name == "sgd":
        checked.setdefault("momentum", 0.9)
    return kind(learning_rate, weight_decay=weight_decay, decay_mask=decay_mask, **checked)
