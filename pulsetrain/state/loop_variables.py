"""The objects with a state that a loop written by hand keeps in variables."""

from __future__ import annotations

from inspect import CO_GENERATOR
from itertools import islice
from types import FrameType

from pulsetrain.engine import Engine
from pulsetrain.state.held_values import names_in
from pulsetrain.state.object_graph import attributes_of, is_of_project, is_users, package_of
from pulsetrain.state.part import Stateful, keeps_state

__all__ = ["variables_with_state"]

# accelerate wraps what the loop has already, and metrics of torchmetrics are reset before they are used
_LEFT_OUT = ("accelerate", "torchmetrics")
_ITEMS = 100  # of a container


def variables_with_state(frame: FrameType | None) -> dict[str, Stateful]:
    """The objects with a state, such as a scheduler, in the variables of the code that asks for the batches.

    These are local and global variables of the innermost function of the user's, and of those that ask it for batches
    if it is a generator, with the items of containers and the attributes of objects in them. Reading local variables
    once is free of side effects; reading them again would keep those of the last iteration alive.

    Args:
        frame: that of the caller, which may be a library's, such as a progress bar's.
    """
    while frame is not None and not is_of_project(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
    if frame is None:
        return {}
    held = _variables_of(frame)
    while frame.f_code.co_flags & CO_GENERATOR and frame.f_back is not None:  # the user's own, which the loop asks
        frame = frame.f_back
        if is_of_project(str(frame.f_globals.get("__name__"))):
            held = _variables_of(frame) | held
    found: dict[str, Stateful] = {}
    for name, value in held.items():
        for path, each in {name: value, **_inside(name, value)}.items():
            if keeps_state(each) and not isinstance(each, (Engine, type)) and package_of(each) not in _LEFT_OUT:
                found[path] = each
    return found


def _variables_of(frame: FrameType) -> dict[str, object]:
    names, _ = names_in(frame.f_code)
    return {name: frame.f_globals[name] for name in sorted(names & frame.f_globals.keys())} | dict(frame.f_locals)


def _inside(name: str, value: object) -> dict[str, object]:
    """What a container, or an object of the user's without a state, holds."""
    if type(value) is dict:
        return {f"{name}[{key!r}]": each for key, each in islice(value.items(), _ITEMS)}
    if type(value) in (list, tuple):
        return {f"{name}[{number}]": each for number, each in enumerate(islice(value, _ITEMS))}  # type: ignore[call-overload]
    if is_users(value) and not keeps_state(value) and not isinstance(value, (Engine, type)):
        return {f"{name}.{attribute}": each for attribute, each in attributes_of(value).items()}
    return {}
