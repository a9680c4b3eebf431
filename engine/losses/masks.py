"""Checks and means shared by the losses over tokens and rollouts: equal shapes, and values under a mask."""

from __future__ import annotations

from torch import Tensor

from pulsetrain.engine.arrays import Array, at_least_float32, masked_mean, misshapen, namespace, stop_gradient

__all__ = ["check_mask", "check_same_shapes", "constant", "mean_of", "zero_outside"]


def check_same_shapes(place: str, **arrays: Array | None) -> None:
    """Rejects arrays that would broadcast; arguments that are None are skipped.

    Raises:
        ValueError: the shape of one differs from that of the first.
    """
    (first, leading), *others = ((name, each) for name, each in arrays.items() if each is not None)
    for name, each in others:
        if each.shape != leading.shape:
            raise misshapen(place, "needs equal shapes", **{first: leading, name: each})


def check_mask(place: str, name: str, values: Array, mask: Array | None) -> None:
    """Rejects a mask that is not boolean or that differs in shape from the values.

    Raises:
        ValueError: the shapes differ.
        TypeError: it is not boolean.
    """
    if mask is None:
        return
    check_same_shapes(place, **{name: values, "mask": mask})
    if mask.dtype != namespace(mask).bool:
        raise TypeError(f"{place}(mask of {str(mask.dtype).removeprefix('torch.')}): needs booleans; pass mask != 0")


def constant(array: Array) -> Array:
    """The array in float32 at least, without a gradient."""
    return stop_gradient(at_least_float32(array))


def zero_outside(values: Array, mask: Array | None) -> Array:
    """The values where the mask is true, and 0 elsewhere.

    Apply it before computing with the values: nan and infinity outside the mask then reach neither a sum nor its
    gradient.

    >>> import torch
    >>> zero_outside(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return values if mask is None else namespace(values, mask).where(mask, values, 0.0)


def mean_of(values: Array, mask: Array | None) -> Array:
    """The mean over all values, or over those where the mask is true, shape (); nan if the mask is nowhere true.

    >>> import torch
    >>> mean_of(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    if mask is not None:
        return masked_mean(values, mask)
    return values.mean() if isinstance(values, Tensor) else namespace(values).mean(values)
