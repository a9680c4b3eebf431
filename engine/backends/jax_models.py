"""The models of a JaxBackend: flax modules, nnx or linen, and functions with their weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.backends.jax_mesh import leaf_paths
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.model_call import call
from pulsetrain.engine.step.protocols import Tree

__all__ = ["JaxModel", "read_model"]


@dataclass(frozen=True, slots=True)
class JaxModel:
    """A model as a pure function and its initial weights."""

    parameters: Tree  # a pytree of arrays that learn
    buffers: Tree  # arrays that a forward pass may change: running statistics, keys and counts of random draws
    apply: Callable[..., tuple[Tree, Tree]]  # (parameters, buffers, inputs, training, key) -> (outputs, buffers)
    publish: Callable[[Tree], None] | None = None  # puts weights into the user's own object, if it holds any
    annotated: Callable[[], Mapping[str, Sequence[object]]] = dict  # the axes of parameters, by path, in its metadata


def read_model(model: object) -> JaxModel:
    """The model as a function.

    Args:
        model: an instance of flax.nnx.Module; a pair (flax.linen.Module, variables) as its `init` gives them; or a pair
            (function, weights) where function(weights, *inputs) returns the outputs. A linen module or function
            is passed the mode if it takes `train`, `training` or `deterministic`; a function that takes `key` gets a
            new one in each step.

    Raises:
        TypeError: it is none of these.
    """
    nnx, linen = _flax()
    if nnx is not None and isinstance(model, nnx.Module):
        return _of_nnx(nnx, model)
    if isinstance(model, (tuple, list)) and len(model) == 2:
        code, weights = model
        if linen is not None and isinstance(code, linen.Module):
            return _of_linen(linen, code, weights)
        if callable(code) and not isinstance(code, type):
            return _of_function(code, weights)
    raise TypeError(
        f"JaxBackend: model={_shown(model)}: needs a flax nnx Module, a pair (linen module, variables), or a pair "
        "(function, weights) where function(weights, *inputs) gives the outputs"
    )


def _of_nnx(nnx: ModuleType, model: object) -> JaxModel:
    own = nnx.clone(model)  # its modes are changed here
    nnx.pop(own, nnx.Intermediate)  # intermediate values of a forward pass are not weights
    own.eval()
    graphs = {False: nnx.graphdef(own)}
    own.train()
    graphs[True], parameters, rest = nnx.split(own, nnx.Param, ...)

    def apply(parameters: Tree, buffers: Tree, inputs: Tree, training: bool, key: Array) -> tuple[Tree, Tree]:
        module = nnx.merge(graphs[training], parameters, buffers)
        outputs = call(module, inputs)
        nnx.pop(module, nnx.Intermediate)
        return outputs, nnx.to_pure_dict(nnx.split(module, nnx.Param, ...)[2])

    def publish(weights: Mapping[str, Tree]) -> None:
        nnx.update(model, weights["parameters"])
        nnx.update(model, weights["buffers"])

    def annotated() -> Mapping[str, Sequence[object]]:
        return _axes_of(nnx.to_pure_dict(nnx.get_partition_spec(parameters)))

    return JaxModel(nnx.to_pure_dict(parameters), nnx.to_pure_dict(rest), apply, publish, annotated)


def _of_linen(linen: ModuleType, module: Any, variables: Tree) -> JaxModel:
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise TypeError(
            f"JaxBackend: variables={_shown(variables)} of {type(module).__name__}: needs a mapping with 'params', as "
            "module.init(key, inputs) gives it"
        )
    boxed, variables = variables, linen.unbox(variables)  # `with_partitioning` puts each array into a box
    mode = _mode_of(type(module).__call__)
    rest = {name: collection for name, collection in variables.items() if name != "params"}

    def annotated() -> Mapping[str, Sequence[object]]:
        return _axes_of(linen.get_partition_spec(boxed["params"]))

    def apply(parameters: Tree, buffers: Tree, inputs: Tree, training: bool, key: Array) -> tuple[Tree, Tree]:
        forward = partial(module.apply, {"params": parameters, **buffers}, **mode(training))
        if not training:
            return call(forward, inputs), buffers
        outputs, changed = call(partial(forward, mutable=list(buffers), rngs={"dropout": key}), inputs)
        return outputs, {**buffers, **changed}

    return JaxModel(variables["params"], rest, apply, annotated=annotated)


def _of_function(function: Callable[..., Tree], weights: Tree) -> JaxModel:
    mode = _mode_of(function)
    draws = "key" in _parameters_of(function)

    def apply(parameters: Tree, buffers: Tree, inputs: Tree, training: bool, key: Array) -> tuple[Tree, Tree]:
        keywords = {**mode(training), **({"key": key} if draws else {})}
        return call(partial(function, parameters, **keywords), inputs), buffers

    return JaxModel(weights, {}, apply)


def _axes_of(specs: Tree) -> dict[str, tuple[object, ...]]:
    """The axes of each parameter's dimensions, by its path, from a tree of `jax.sharding.PartitionSpec`."""
    import jax

    kind = jax.sharding.PartitionSpec
    leaves = leaf_paths(jax, specs, is_leaf=lambda each: isinstance(each, kind))
    return {path: tuple(spec) for path, spec in leaves.items() if isinstance(spec, kind) and tuple(spec)}


def _mode_of(function: Callable[..., object]) -> Callable[[bool], dict[str, bool]]:
    """The keyword by which the function learns whether it trains; none if it has no such keyword."""
    known = _parameters_of(function)
    for name in ("train", "training", "is_training"):
        if name in known:
            return lambda training, name=name: {name: training}  # type: ignore[misc]
    if "deterministic" in known:
        return lambda training: {"deterministic": not training}
    return lambda training: {}


def _parameters_of(function: Callable[..., object]) -> Mapping[str, Tree]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # of a function in C
        raise ConfigurationError(f"JaxBackend: model={function!r}: its signature cannot be read: {error}") from error


def _flax() -> tuple[ModuleType | None, ModuleType | None]:
    try:
        from flax import linen, nnx
    except ImportError:  # functions need none
        return None, None
    return nnx, linen


def _shown(model: object) -> str:
    if isinstance(model, (tuple, list)):
        return f"({', '.join(type(each).__name__ for each in model)})"
    return repr(model) if isinstance(model, type) else type(model).__name__
