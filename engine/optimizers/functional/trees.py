"""Flattens, compares and rebuilds pytrees of equal structure: parameters, gradients, an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

# the module that torch.func and torch.vmap use, so every container that they accept is accepted here
from torch.utils import _pytree as pytree

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["DecayMask", "OptimizerState", "PyTree", "Trees", "apply_updates", "new_state", "open_trees"]

PyTree: TypeAlias = Any
"""Nested containers (dicts, lists, tuples, registered classes) of tensors; no static type describes them."""

OptimizerState = dict[str, Any]
"""`learning_rate`, `step` (updates made) and the optimizer's averages, each a pytree like the parameters."""

DecayMask: TypeAlias = PyTree
"""A pytree of bools like the parameters, True where they decay; or a function from the parameters to one."""


class Trees(NamedTuple):
    """The trees of one update as lists of leaves, all in the order of the parameters."""

    params: list[Tensor]
    grads: list[Tensor]
    averages: dict[str, list[Tensor]]
    decays: list[bool]
    whole: Callable[[Sequence[Tensor]], PyTree]  # leaves to a pytree with the structure of the parameters


def new_state(
    place: str, params: PyTree, learning_rate: float | Tensor, averages: Sequence[str], mask: DecayMask
) -> OptimizerState:
    """The state before the first update.

    >>> new_state("SGD.init", {"w": torch.ones(2)}, 0.1, ["momentum_buffer"], None)
    {'learning_rate': 0.1, 'step': 0, 'momentum_buffer': {'w': tensor([0., 0.])}}

    Raises:
        TypeError: a leaf is not a tensor of floating-point numbers.
        ConfigurationError: there is no leaf, or the mask does not fit.
    """
    own = _Parameters(place, params)
    if not own.leaves:
        raise ConfigurationError("holds no tensor; pass the parameters to train", place, params=params)
    for index, leaf in enumerate(own.leaves):
        if not leaf.is_floating_point():
            raise TypeError(
                f"{place}(params{own.path(index)} of {leaf.dtype}): needs floating-point numbers; "
                "pass only the parameters, without the model's buffers"
            )
    own.decays(mask)
    trees = {name: own.structure.unflatten([torch.zeros_like(leaf) for leaf in own.leaves]) for name in averages}
    rate = learning_rate if isinstance(learning_rate, Tensor) else float(learning_rate)
    return {"learning_rate": rate, "step": 0, **trees}


def open_trees(
    place: str, grads: PyTree, opt_state: OptimizerState, params: PyTree, averages: Sequence[str], mask: DecayMask
) -> Trees:
    """The leaves of the arguments of an update.

    Raises:
        TypeError: a leaf is not a torch tensor.
        ConfigurationError: names, structure, shapes or dtypes differ.
    """
    needed = {"learning_rate", "step", *averages}
    if not isinstance(opt_state, dict) or opt_state.keys() != needed:
        given = f"={type(opt_state).__name__}" if not isinstance(opt_state, dict) else f" with {list(opt_state)}"
        raise ConfigurationError(f"{place}(opt_state{given}): needs {sorted(needed)}; create it with init(params)")
    own = _Parameters(place, params)
    found = {name: own.like(f"opt_state[{name!r}]", opt_state[name]) for name in averages}
    return Trees(own.leaves, own.like("grads", grads), found, own.decays(mask), own.structure.unflatten)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """New parameters, `params + updates`; the arguments do not change.

    >>> apply_updates({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, 0.0])})
    {'w': tensor([1.5000, 2.0000])}

    Raises:
        TypeError: a leaf is not a torch tensor.
        ConfigurationError: the updates belong to other parameters.
    """
    own = _Parameters("apply_updates", params)
    changes = own.like("updates", updates)
    return own.structure.unflatten([leaf + change for leaf, change in zip(own.leaves, changes, strict=True)])


class _Parameters:
    """The leaves of the parameters, all tensors, and those of trees of the same structure, in the same order."""

    def __init__(self, place: str, params: PyTree) -> None:
        self.place, self.params = place, params
        self.leaves, self.structure = pytree.tree_flatten(params)
        for index, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                raise _no_tensor(place, "params", self.path(index), leaf)

    def like(self, name: str, tree: PyTree) -> list[Tensor]:
        """The leaves of a tree of tensors with the shapes and dtypes of the parameters."""
        found: list[Tensor] = self._matched(name, tree)
        for index, (leaf, param) in enumerate(zip(found, self.leaves, strict=True)):
            if not isinstance(leaf, Tensor) and pytree.tree_structure(leaf).is_leaf():
                raise _no_tensor(self.place, name, self.path(index), leaf)
            if not isinstance(leaf, Tensor) or leaf.shape != param.shape or leaf.dtype != param.dtype:
                raise _difference(self.place, name, tree, self.params)
        return found

    def decays(self, mask: DecayMask) -> list[bool]:
        """Whether each parameter decays."""
        if mask is None:
            return [True] * len(self.leaves)
        flags: list[bool] = self._matched("decay_mask", mask(self.params) if callable(mask) else mask)
        for index, flag in enumerate(flags):
            if not isinstance(flag, bool):
                given = {f"decay_mask{self.path(index)}": flag}
                raise ConfigurationError("needs True if the parameter decays, else False", self.place, **given)
        return flags

    def path(self, index: int) -> str:
        return pytree.keystr(pytree.tree_leaves_with_path(self.params)[index][0])

    def _matched(self, name: str, tree: PyTree) -> list[Any]:
        found, structure = pytree.tree_flatten(tree)
        if structure == self.structure:
            return found
        try:  # the order of dicts does not matter, nor OrderedDict against dict
            return self.structure.flatten_up_to(tree)
        except ValueError:
            raise _difference(self.place, name, tree, self.params) from None


# ------------------------------------------------------------------------------------------------------ errors


def _no_tensor(place: str, name: str, path: str, leaf: object) -> TypeError:
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    remedy = "leave out what is not trained, and pass zeros as the gradient of parameters that the loss does not use"
    package = kind.partition(".")[0]
    if package in ("jax", "jaxlib"):
        remedy = "for jax arrays use JaxBackend, with the same optimizer from create_optax()"
    elif package == "numpy":
        remedy = "convert it with torch.from_numpy(), or use JaxBackend"
    return TypeError(f"{place}({name}{path} of type {kind}): needs a torch.Tensor; {remedy}")


def _difference(place: str, name: str, tree: PyTree, params: PyTree) -> ConfigurationError:
    """The error for the first leaf where a tree differs from the parameters."""
    mine = {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(tree)}
    theirs = {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(params)}
    remedy = "create a new state with init(params) when the parameters have changed"
    if name in ("grads", "updates"):
        remedy = "take them with respect to these parameters, and " + remedy
    elif name == "decay_mask":
        remedy = "create the mask from these parameters"
    for path in (*theirs, *mine):
        here = _form(mine[path]) if path in mine else "nothing"
        there = _form(theirs[path]) if path in theirs else "nothing"
        if here != there and not (name == "decay_mask" and path in mine and path in theirs):
            return ConfigurationError(f"{place}({name}{path}): is {here} where the parameters have {there}; {remedy}")
    return ConfigurationError(
        f"its containers are not those of the parameters "
        f"({pytree.tree_structure(tree)} and {pytree.tree_structure(params)}); {remedy}",
        place,
        **{name: type(tree)},
    )


def _form(leaf: object) -> str:
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
