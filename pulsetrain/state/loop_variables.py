"""The objects with a state that a loop written by hand keeps in variables."""

from __future__ import annotations

from types import FrameType

from pulsetrain.engine import Engine
from pulsetrain.state.held_values import names_in
from pulsetrain.state.object_graph import attributes_of, is_of_project, is_users, package_of
from pulsetrain.state.part import Stateful, keeps_state

__all__ = ["variables_with_state"]

# accelerate wraps what the loop has already, and metrics of torchmetrics are reset before they are used
_LEFT_OUT = ("accelerate", "torchmetrics")


def variables_with_state(frame: FrameType | None) -> dict[str, Stateful]:
    """The objects with a state, such as a scheduler, in the variables of the code that asks for the batches.

    These are local and global variables of the innermost function of the user's, and attributes of the objects in
    them. Reading local variables once is free of side effects; reading them again would keep those of the last
    iteration alive.

    Args:
        frame: that of the caller, which may be a library's, such as a progress bar's.
    """
    while frame is not None and not is_of_project(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
    if frame is None:
        return {}
    names, _ = names_in(frame.f_code)
    held = {name: frame.f_globals[name] for name in sorted(names & frame.f_globals.keys())} | dict(frame.f_locals)
    found: dict[str, Stateful] = {}
    for name, value in held.items():
        inside = {name: value}
        if is_users(value) and not keeps_state(value) and not isinstance(value, (Engine, type)):
            inside = {f"{name}.{attribute}": each for attribute, each in attributes_of(value).items()}
        for path, each in inside.items():
            if keeps_state(each) and not isinstance(each, (Engine, type)) and package_of(each) not in _LEFT_OUT:
                found[path] = each
    return found
