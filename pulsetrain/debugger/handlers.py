"""The handlers of a recorded run: their names from run.json, and their states from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pulsetrain.engine.checkpoint import Location, find_checkpoints, load_checkpoint
from pulsetrain.engine.checkpoint.reader import size_of, step_of
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.recording.log.run_file import RUN_FILE, read_run_file
from pulsetrain.state.older_formats import upgrade

__all__ = ["RecordedHandlers", "recorded_handlers"]


@dataclass(frozen=True)
class RecordedHandlers:
    """The handlers of a run, and their states if a checkpoint holds them."""

    names: tuple[str, ...]  # from run.json
    checkpoint: Location | None = None  # that holds the states
    iteration: int | None = None  # of the checkpoint
    states: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)  # each handler's constructor call
    problem: str | None = None  # why there are no states

    def lines(self) -> Iterator[str]:
        """As text, line by line."""
        yield f"handlers: {', '.join(self.names) or f'{RUN_FILE} names none'}"
        if self.problem is not None:
            yield f"their states: {self.problem}"
            return
        name = self.checkpoint.name if self.checkpoint is not None else ""
        yield f"their states in the checkpoint {name}, after iteration {self.iteration}:"
        for name, state in self.states.items():
            yield f"  {self.settings.get(name, name)}"
            for key, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
                yield f"    {key} = {_shown(value)}"


def recorded_handlers(run: Path, iteration: int, max_bytes: int | None = None) -> RecordedHandlers:
    """The handlers of a run, from run.json and the last checkpoint before an iteration.

    Args:
        run: the run folder.
        iteration: the first iteration after the checkpoint, at the earliest.
        max_bytes: size of the largest checkpoint to read; None for any.
    """
    listed = read_run_file(run).get("handlers")
    names = tuple(map(str, listed)) if isinstance(listed, list) else ()
    before = [folder for folder in find_checkpoints(run / "checkpoints") if step_of(folder) < max(iteration, 1)]
    if not before:
        return RecordedHandlers(names, problem=f"there is no checkpoint before iteration {iteration}")
    checkpoint = before[-1]
    try:
        size = size_of(checkpoint)
        if max_bytes is not None and size > max_bytes:
            problem = f"`handlers` reads them from {checkpoint.name}, {size / 1e9:.1f} GB"
            return RecordedHandlers(names, checkpoint, step_of(checkpoint), problem=problem)
        saved = upgrade(load_checkpoint(checkpoint))["handlers"]
    except (CheckpointError, OSError) as error:
        return RecordedHandlers(names, checkpoint, step_of(checkpoint), problem=str(error))
    states = {name: each["state"] for name, each in saved.items()}
    settings = {name: each["settings"] for name, each in saved.items()}
    return RecordedHandlers(names, checkpoint, step_of(checkpoint), states, settings)


def _shown(value: object) -> str:
    """The value on one line; a tensor or array by its shape and dtype."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape and dtype is not None:
        return f"{type(value).__name__} {tuple(shape)}, {dtype}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."
