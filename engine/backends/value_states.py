"""States that are values: the number of their update, its learning rate, the state that follows, and their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils import _pytree as pytree

from pulsetrain.engine.arrays import is_array
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import GradientInfo, ModelState, TrainingResult, Tree

__all__ = ["next_state", "rate_of", "step_of", "with_buffers"]

_Rate: TypeAlias = float | Tensor | None


def step_of(state: ModelState) -> int:
    """Updates made."""
    return int(state.metadata.get("step", 0))


def rate_of(state: ModelState) -> _Rate:
    """The rate of the next update: the schedule's, else the one that was set; None keeps the optimizer's own.

    A tensor in the optimizer's state is kept: it may need a gradient.

    >>> rate_of(ModelState({}, {}, {"step": 3, "learning_rate": 0.1}))
    0.1

    Raises:
        ConfigurationError: it is a tensor there, and a schedule or another tensor would replace it.
    """
    schedule, given = state.metadata.get("schedule"), state.metadata.get("learning_rate")
    own = state.optimizer.get("learning_rate") if isinstance(state.optimizer, Mapping) else None
    if isinstance(own, Tensor):
        if schedule is not None or isinstance(given, Tensor):
            name = "learning_rate" if schedule is None else "schedule"
            raise ConfigurationError(
                f"ModelState: the optimizer's state has a tensor as learning rate, and metadata[{name!r}] would "
                "replace it; set one of the two to None, or to a number"
            )
        return None
    return given if schedule is None else schedule.get_lr(step_of(state))


def with_buffers(state: ModelState, gradients: GradientInfo) -> ModelState:
    """The state with the buffers as the forward pass has left them."""
    return replace(state, weights={**state.weights, "buffers": gradients.buffers})


def next_state(state: ModelState, weights: Mapping[str, Tree], optimizer: Tree, rate: _Rate) -> ModelState:
    """The state after an update that was made at this rate.

    >>> start = ModelState({}, {}, {"step": 3, "learning_rate": 0.1})
    >>> next_state(start, {}, {}, 0.05).metadata
    {'step': 4, 'learning_rate': 0.05}
    """
    return ModelState(weights, optimizer, {**state.metadata, "step": step_of(state) + 1, "learning_rate": rate})


# ---------------------------------------------------------------------------------------- states as pytrees of torch

# What the members of an ensemble share, such as the number of the update, is not a leaf: their states are stacked by
# torch.stack, and in torch.vmap these values stay numbers, which schedules and optimizers compute with.

_Context: TypeAlias = tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]  # the shared values, and the order of all


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A number in the place of a tensor, as torch.vmap puts the dimension there: it stays a leaf."""

    value: object


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _is_plain(value: object) -> bool:
    return not is_array(value) and not isinstance(value, _Leaf)


def _apart(values: Mapping[str, Any], is_shared: Callable[[object], bool]) -> tuple[dict[str, Any], _Context]:
    """The values that have leaves, and the others as context."""
    shared = {name: value for name, value in values.items() if is_shared(value)}
    own = {name: value for name, value in values.items() if name not in shared}
    own = {name: value.value if isinstance(value, _Leaf) else value for name, value in own.items()}
    return own, (tuple(shared.items()), tuple(values))


def _together(own: Mapping[str, Any], context: _Context, is_shared: Callable[[object], bool]) -> dict[str, Any]:
    """The inverse of `_apart`."""
    shared, order = dict(context[0]), context[1]
    values = {name: _Leaf(value) if is_shared(value) else value for name, value in own.items()}
    return {name: shared[name] if name in shared else values[name] for name in order}


def _flat_state(state: ModelState) -> tuple[list[Any], Any]:
    metadata, of_metadata = _apart(state.metadata, _is_plain)
    if type(state.optimizer) is not dict:
        return [state.weights, state.optimizer, metadata], (None, of_metadata)
    optimizer, of_optimizer = _apart(state.optimizer, _is_number)
    return [state.weights, optimizer, metadata], (of_optimizer, of_metadata)


def _state_of(parts: Iterable[Any], context: Any) -> ModelState:
    weights, optimizer, metadata = parts
    of_optimizer, of_metadata = context
    if of_optimizer is not None:
        optimizer = _together(optimizer, of_optimizer, _is_number)
    return ModelState(weights, optimizer, _together(metadata, of_metadata, _is_plain))


def _flat_result(result: TrainingResult) -> tuple[list[Any], Any]:
    metrics, context = _apart(result.metrics, _is_plain)
    state = [] if result.state is None else [result.state]
    return [metrics, *state], (context, result.diagnostics)


def _result_of(parts: Iterable[Any], context: Any) -> TrainingResult:
    metrics, *state = parts
    return TrainingResult(_together(metrics, context[0], _is_plain), state[0] if state else None, context[1])


def _register(kind: type, names: tuple[str, ...], flat: Any, whole: Any) -> None:
    def with_keys(value: Any) -> Any:
        parts, context = flat(value)
        return [(pytree.GetAttrKey(name), part) for name, part in zip(names, parts, strict=False)], context

    name = f"pulsetrain.{kind.__name__}"
    pytree.register_pytree_node(kind, flat, whole, serialized_type_name=name, flatten_with_keys_fn=with_keys)


_register(ModelState, ("weights", "optimizer", "metadata"), _flat_state, _state_of)
_register(TrainingResult, ("metrics", "state"), _flat_result, _result_of)
