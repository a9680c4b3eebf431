"""Torch's operators by name, if activation checkpointing can keep what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch._ops import OpOverload

from pulsetrain.engine.errors import ConfigurationError, nearest

__all__ = ["changes_arguments", "draws", "operators_of"]

_SEVERAL = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm"),
    "sdpa": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
}
_SYNONYMS = {"linear": ("matmul",), "scaled_dot_product_attention": ("sdpa",)}
_CHANCES = ("dropout_p", "p")  # the arguments with the rate of a dropout: with 0, nothing is drawn


@cache
def operators_of(names: tuple[str, ...]) -> frozenset[OpOverload]:
    """The operators with these names, in all their overloads that leave their arguments unchanged.

    Args:
        names: "mm", "aten.mm" or "aten.mm.default"; another library's with its namespace. "matmul" means those of
            matrix products, "sdpa" those of scaled dot-product attention.

    Raises:
        ConfigurationError: there is no such operator; the message has the nearest names.

    >>> "aten.mm.default" in map(str, operators_of(("matmul",)))
    True
    """
    found: set[OpOverload] = set()
    for name in names:
        for each in _SEVERAL.get(name, (name,)):
            parts = each.removeprefix("torch.ops.").split(".")
            namespace, operator, *overload = parts if len(parts) > 1 else ["aten", *parts]
            overloads, rule = _keepable(namespace, operator, overload)
            if not overloads:
                raise ConfigurationError(f"{rule}{_near(namespace, operator)}", "ActivationCheckpointing", keep=name)
            found.update(overloads)
    return frozenset(found)


def _keepable(namespace: str, operator: str, overload: Sequence[str] = ()) -> tuple[list[OpOverload], str]:
    """The overloads whose results can be kept, and what is wrong with the name if there are none."""
    packet = getattr(getattr(torch.ops, namespace), operator, None) if len(overload) < 2 else None
    names: list[str] = getattr(packet, "overloads", list)()
    found = [getattr(packet, each) for each in names if not overload or each == overload[0]]
    found = [each for each in found if each.name() in _dispatched()]  # others are TorchScript's alone
    rule = "there is no such operator"
    if found:
        rule = "changes its arguments, so it has to be computed again"
        found = [each for each in found if not changes_arguments(each)]
    if found:
        rule = "is made of other operators, whose results are what can be kept"
        found = [each for each in found if not _is_composite(each)]
    return found, rule


def _near(namespace: str, operator: str) -> str:
    """The end of a message that has the nearest names."""
    names = {each.partition("::")[2].partition(".")[0] for each in _dispatched() if each.startswith(f"{namespace}::")}
    close = nearest(operator, sorted(names), 12)
    close = [*_SYNONYMS.get(operator, ()), *(each for each in close if _keepable(namespace, each)[0])]
    return f"; near it are {', '.join(map(repr, close[:3]))}" if close else ""


def draws(operator: OpOverload, arguments: Sequence[object], named: Mapping[str, object]) -> bool:
    """Whether a call of the operator draws random numbers.

    >>> draws(torch.ops.aten.native_dropout.default, (torch.ones(2), 0.5, True), {})
    True
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    for index, each in enumerate(operator._schema.arguments):
        if each.name in _CHANCES:
            given = arguments[index] if index < len(arguments) else named.get(each.name, each.default_value)
            return given != 0.0
    return True


def changes_arguments(operator: OpOverload) -> bool:
    """Whether the operator writes into its arguments.

    >>> changes_arguments(torch.ops.aten.add_.Tensor)
    True
    """
    return bool(operator._schema.is_mutable)


def _is_composite(operator: OpOverload) -> bool:
    """Whether the operator calls others before gradients are recorded: nothing sees a call of it, then."""
    return bool(operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


@cache
def _dispatched() -> frozenset[str]:
    """The full names of all operators, as aten::mm.out."""
    return frozenset(torch._C._dispatch_get_all_op_names())
