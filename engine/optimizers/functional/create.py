"""Creates functional optimizers from their names."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.optimizers.functional.adam import Adam, AdamW
from pulsetrain.engine.optimizers.functional.rmsprop import RMSprop
from pulsetrain.engine.optimizers.functional.rules import check
from pulsetrain.engine.optimizers.functional.sgd import SGD
from pulsetrain.engine.optimizers.functional.trees import DecayMask
from pulsetrain.engine.optimizers.registry import NAMES

__all__ = ["FUNCTIONAL_NAMES", "create_functional"]

_KINDS = {kind.__name__.lower(): kind for kind in (SGD, Adam, AdamW, RMSprop)}

FUNCTIONAL_NAMES = tuple(_KINDS)


def create_functional(
    name: str,
    learning_rate: float | Tensor,
    weight_decay: float = 0.0,
    *,
    decay_mask: DecayMask = None,
    **options: object,
) -> SGD | Adam | AdamW | RMSprop:
    """The functional optimizer with a name; its numbers equal those of torch's.

    See `pulsetrain.engine.optimizers.functional`.

    >>> create_functional("adamw", 1e-3, 0.1, adam_beta2=0.95)
    AdamW(learning_rate=0.001, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1, decay_mask=None)

    Args:
        name: sgd, adam, adamw or rmsprop.
        learning_rate: a number, or a tensor of shape (), which gets a gradient through the updates.
        decay_mask: a pytree of bools like the parameters, or a function from them to one; None decays all.
        options: those of `create_optimizer`; SGD's momentum defaults to 0.9.

    Raises:
        ConfigurationError: a name or keyword is unknown, a value is out of range, or an option exists only for
            optimizers that update in place.
    """
    place = "create_functional"
    if name not in _KINDS:
        others = ", ".join(sorted(set(NAMES) - set(_KINDS)))
        rule = (
            f"{unknown_name(place, 'name', name, _KINDS).rule}; {others} only update in place: use TorchBackend() "
            "without functional=True"
        )
        raise ConfigurationError(rule, place, name=name)
    kind = _KINDS[name]
    checked = check(place, name, learning_rate, weight_decay, decay_mask, options)
    known = {field.name for field in fields(kind)}
    for key in [key for key in checked if key not in known]:
        value = checked.pop(key)
        # functional optimizers are always differentiable, and have no kernels to choose from
        if value and key != "differentiable":
            raise ConfigurationError(
                f"{name!r} only has it in place; leave it out, or use TorchBackend() without functional=True",
                place,
                **{key: value},
            )
    if name == "sgd":
        checked.setdefault("momentum", 0.9)
    return kind(learning_rate, weight_decay=weight_decay, decay_mask=decay_mask, **checked)
