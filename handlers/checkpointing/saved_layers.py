"""One state of the processes of a pipeline, of which each has the tensors of some layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.checkpoint.pieces import Piece
from pulsetrain.engine.distributed.collectives import ControlGroup

__all__ = ["of_all_layers"]

_PARTS = ("model", "modules", "optimizer", "stepper", "handlers")  # of a state, that differ by process
_PLAIN = (int, float, bool, str, type(None))
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class _Outline:
    """A tensor of which another process may have the values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: bool = True
    in_pieces: bool = False


def of_all_layers(control: ControlGroup, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with the tensors of all processes; all of them call this.

    A tensor that only some processes have becomes a piece: the whole of it in the first that has it, without items in
    the others. So the main process's state names all tensors, and each is saved once. A tensor of one number, such as
    an optimizer's count of steps, is in all of them.

    Args:
        control: joins the processes.
        state: of this process. Tensors on the meta device are those of other processes.
    """
    own = {name: state[name] for name in _PARTS if name in state}
    outlines = control.gather(_outline(own))
    return {**state, **_merged(own, outlines, control.ranks.rank)}


def _outline(value: Any) -> Any:
    """What a process says about its tensors; what holds none is left out, as _MISSING is."""
    if isinstance(value, Piece):
        return _Outline(value.shape, value.data.dtype, in_pieces=True)
    if isinstance(value, Tensor):
        if not value.ndim and not value.is_meta:
            return value.detach().cpu().clone()
        return _Outline(tuple(value.shape), value.dtype, not value.is_meta)
    if isinstance(value, Mapping):
        found = {key: _outline(each) for key, each in value.items()}
        if all(each is None for each in found.values()):
            return None
        return {
            key: value[key] if each is None else each
            for key, each in found.items()
            if each is not None or type(value[key]) in _PLAIN
        }
    if isinstance(value, (list, tuple)):
        parts = [_outline(each) for each in value]
        return None if all(each is None for each in parts) else parts
    return None


def _merged(own: Any, outlines: Sequence[Any], rank: int) -> Any:
    """This process's part of the value.

    Args:
        own: this process's value, or _MISSING.
        outlines: of all processes; _MISSING, or None, of those that have no such value, or no tensor in it.
        rank: of this process.
    """
    present = [each for each in outlines if each is not _MISSING and each is not None]
    if not present:
        return own
    first = present[0]
    if isinstance(first, dict):
        kind = own if isinstance(own, Mapping) else {}
        keys = dict.fromkeys(key for each in (kind, *present) for key in each)
        ordered = sorted(keys) if all(type(key) is int for key in keys) else keys
        found = {
            key: _merged(kind.get(key, _MISSING), [_item(each, key) for each in outlines], rank) for key in ordered
        }
        return _like(own, found)
    if isinstance(first, list):
        if not isinstance(own, (list, tuple)):
            return own
        parts = [_merged(each, [_item(outline, at) for outline in outlines], rank) for at, each in enumerate(own)]
        return type(own)(parts)
    if not isinstance(first, (_Outline, Tensor)):  # a number beside tensors
        return first if own is _MISSING else own
    return _tensor(own, outlines, rank)


def _tensor(own: Any, outlines: Sequence[Any], rank: int) -> Any:
    holders = [at for at, each in enumerate(outlines) if isinstance(each, Tensor) or getattr(each, "held", False)]
    if len(holders) == len(outlines) or not holders:
        return own
    first = outlines[holders[0]]
    if isinstance(first, Tensor):
        return first if own is _MISSING or own.is_meta else own
    if isinstance(own, Piece):
        return own
    start = (0,) * len(first.shape)
    data = own.detach() if rank == holders[0] and not first.in_pieces else torch.empty(start, dtype=first.dtype)
    return Piece(data, first.shape, start)


def _item(outline: Any, key: Any) -> Any:
    if isinstance(outline, dict):
        return outline.get(key, _MISSING)
    if isinstance(outline, list):
        return outline[key] if key < len(outline) else _MISSING
    return _MISSING


def _like(own: Any, found: dict[Any, Any]) -> Any:
    """The mapping, of the class of this process's, with its attributes."""
    if not isinstance(own, OrderedDict):
        return found
    made = OrderedDict(found)
    vars(made).update(vars(own))  # a module's state_dict() keeps its versions in an attribute
    return made
