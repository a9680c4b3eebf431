"""Which events of a log have receivers in a replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pulsetrain.engine.events.compiled import Dispatch
from pulsetrain.engine.recording.replay.delivery import STRUCTURE, is_custom, is_host, may_be_nested
from pulsetrain.engine.recording.replay.engine import ReplayedEngine

__all__ = ["Receivers"]


class Receivers:
    """The dispatches of replayed engines that reach somebody, as they are now.

    Args:
        engines: all of the replay.
    """

    def __init__(self, engines: Iterable[ReplayedEngine]) -> None:
        engines = list(engines)
        # by engine and event; an event without an engine has none
        self.table: dict[str, dict[str, tuple[ReplayedEngine, Dispatch]]] = defaultdict(dict)
        for engine in engines:
            self.table[engine.name] = {value: (engine, dispatch) for value, dispatch in engine.dispatches().items()}
        events = [value for dispatches in self.table.values() for value in dispatches]
        several = sum(1 for dispatches in self.table.values() if dispatches) > 1
        self.are_recalled: bool = len(events) > 1 and any(map(is_custom, events))  # custom events may be fired again
        self.are_nested: bool = self.are_recalled or (
            any(map(is_host, events)) and (several or any(map(may_be_nested, events)))
        )
        extra: frozenset[str] = STRUCTURE if self.are_nested else frozenset()
        self.wanted: dict[str, frozenset[str]] = {  # to be read
            engine.name: extra.union(self.table[engine.name]) for engine in engines
        }
