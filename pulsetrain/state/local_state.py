"""What each of several processes alone knows of a run, in a checkpoint that one of them writes for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pulsetrain.engine.checkpoint.snapshot import Snapshot
from pulsetrain.engine.distributed.ranks import Ranks
from pulsetrain.state.part import Part, StateDict

__all__ = ["RANK", "RANKS", "local_entries", "state_of_rank"]

RANK = "rank"  # the entry that names the process whose state it is, where there are several
RANKS = "ranks"  # the entry with what the processes after the main one know, by rank
_LOCAL = {"reporter": ("losses", "named_losses", "logged"), "data": ("loader", "given", "parts", "order_seed")}


def local_entries(parts: Mapping[str, Part]) -> dict[str, dict[str, Any]]:
    """What this process alone knows, on the host: its losses that were not reported yet, and its loader's state."""
    found: dict[str, dict[str, Any]] = {}
    for name, local in _LOCAL.items():
        state = parts[name].state_dict()
        found[name] = Snapshot().copy({each: state[each] for each in local if each in state})
    return found


def state_of_rank(saved: StateDict, here: Ranks) -> StateDict:
    """The state as this process continues it.

    As many processes as before each continue what they knew. Of another number, the main process takes the losses of
    all, and each the loader's state of the main one. A state that was not saved together has that of its process alone.
    """
    others: Sequence[Mapping[str, Any]] = saved.get(RANKS, ())
    if not others and (here.world_size == 1 or here.rank == saved.get(RANK, 0)):
        return saved
    if len(others) + 1 == here.world_size:
        own = others[here.rank - 1] if here.rank else {}
        return {**saved, **{name: {**_without_local(name, saved[name]), **entries} for name, entries in own.items()}}
    if here.rank:
        return {**saved, "reporter": _without_local("reporter", saved["reporter"])}
    return {**saved, "reporter": {**saved["reporter"], "others": [each["reporter"] for each in others]}}


def _without_local(name: str, state: StateDict) -> StateDict:
    return {each: value for each, value in state.items() if each not in _LOCAL[name]}
