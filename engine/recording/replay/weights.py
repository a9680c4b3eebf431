"""The weights that a recorded run had, from its checkpoints."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.errors import ConfigurationError, RecordingError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["NearestWeights"]

STANDARD = "pulsetrain.engine.checkpoint:load_checkpoint"  # by name: recording does not depend on checkpoints


class NearestWeights:
    """Reads the last checkpoint up to an iteration, or the first one if there is none.

    Args:
        run: the run folder.
        load: reads the folder of a checkpoint.
        model: gets the weights, which a checkpoint holds under "model".

    Raises:
        RecordingError: the run has no checkpoint.
    """

    def __init__(self, run: Path, load: Callable[[Path], Mapping[str, Any]], model: nn.Module | None = None) -> None:
        folders = [path.parent for path in (run / "checkpoints").glob("[0-9]*/manifest.json")]
        found = [(int(number), path) for path in folders if (number := path.name.partition("-")[0]).isdecimal()]
        if not found:
            raise RecordingError(f"Replay(checkpoints=...): {run / 'checkpoints'} holds no checkpoint; leave it out")
        self.model = model
        self._load = load
        self._found = sorted(found)
        self._at = -1  # index of the one that was read last
        self._state: Mapping[str, Any] = {}

    @classmethod
    def beside(
        cls, events: Path, load: Callable[[Path], Mapping[str, Any]] | bool | None, model: nn.Module | None
    ) -> NearestWeights | None:
        """The weights of the run whose events are in this folder; None if `load` asks for none."""
        if load is None or load is False:
            if model is not None:
                raise ConfigurationError(
                    "Replay(model=...): the weights come from checkpoints; pass checkpoints=True, too"
                )
            return None
        if load is True:
            load = resolve_name(STANDARD)
        if not callable(load):
            raise ConfigurationError(
                "needs True, or a function that reads the folder of a checkpoint", "Replay", checkpoints=load
            )
        return cls(events.parent if events.name == "events" else events, load, model)

    def follow(self, iteration: int) -> None:
        """Give the model, if there is one, the weights of this iteration."""
        if self.model is not None:
            self.nearest(iteration)

    def nearest(self, iteration: int) -> Mapping[str, Any]:
        """The checkpoint's state.

        Raises:
            CheckpointError: it is damaged.
        """
        index = max(bisect_right(self._found, iteration, key=lambda entry: entry[0]) - 1, 0)
        if index != self._at:
            self._state, self._at = self._load(self._found[index][1]), index
            if self.model is not None:
                self.model.load_state_dict(self._state["model"])
        return self._state
