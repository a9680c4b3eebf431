"""What losses over tokens and rollouts share: arrays of one shape, and the part of them that a mask leaves."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pulsetrain.engine.arrays import Array, at_least_float32, masked_mean, namespace, stop_gradient
from pulsetrain.engine.errors import unknown_name

__all__ = ["check_choice", "check_mask", "check_same_shapes", "constant", "kept", "mean_of"]


def check_same_shapes(place: str, **arrays: Array | None) -> None:
    """Refuses what would broadcast; those that are None are passed over.

    Raises:
        ValueError: the shape of one differs from that of the first.
    """
    (first, leading), *others = ((name, each) for name, each in arrays.items() if each is not None)
    for name, each in others:
        if each.shape != leading.shape:
            raise ValueError(
                f"{place}({first} of shape {tuple(leading.shape)}, {name} of shape {tuple(each.shape)}): "
                "needs equal shapes"
            )


def check_mask(place: str, name: str, values: Array, mask: Array | None) -> None:
    """Refuses a mask of another shape than the values, or of anything but true and false.

    Raises:
        ValueError: the shapes differ.
        TypeError: it is not boolean.
    """
    if mask is None:
        return
    check_same_shapes(place, **{name: values, "mask": mask})
    if mask.dtype != namespace(mask).bool:
        raise TypeError(
            f"{place}(mask of {str(mask.dtype).removeprefix('torch.')}): needs true and false; pass mask != 0"
        )


def check_choice(place: str, argument: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses a name that is not among the choices.

    Raises:
        ConfigurationError: it names them, and the nearest.
    """
    if not isinstance(value, str) or value not in choices:
        raise unknown_name(place, argument, value, choices)


def constant(array: Array) -> Array:
    """The array in float32 at least, and no gradient through it."""
    return stop_gradient(at_least_float32(array))


def kept(values: Array, mask: Array | None) -> Array:
    """The values where the mask is true, and 0 beside it.

    Before anything is computed of them: nan and infinity then come through neither to a sum nor to its gradient.
    """
    return values if mask is None else namespace(values, mask).where(mask, values, 0.0)


def mean_of(values: Array, mask: Array | None) -> Array:
    """Mean over all values, or over those where the mask is true, shape (); nan where it is nowhere."""
    if mask is not None:
        return masked_mean(values, mask)
    return values.mean() if isinstance(values, Tensor) else namespace(values).mean(values)
