"""What a run folder tells of the run's handlers: which there were, and their state in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pulsetrain.engine.checkpoint import Location, find_checkpoints, load_checkpoint
from pulsetrain.engine.checkpoint.reader import size_of, step_of
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.handlers.run_files.run_file import RUN_FILE, read_run_file

__all__ = ["RecordedHandlers", "recorded_handlers"]


@dataclass(frozen=True)
class RecordedHandlers:
    """The handlers of a run; as text, a line each."""

    names: tuple[str, ...]  # those in run.json
    checkpoint: Location | None = None  # the last one before
    iteration: int | None = None  # of the checkpoint
    states: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)  # what each that has a state was made with
    problem: str | None = None  # why there is no state

    def lines(self) -> Iterator[str]:
        """What is known of them."""
        yield f"handlers: {', '.join(self.names) or f'{RUN_FILE} names none'}"
        if self.problem is not None:
            yield f"their state: {self.problem}"
            return
        name = self.checkpoint.name if self.checkpoint is not None else ""
        yield f"their state in the checkpoint {name}, behind iteration {self.iteration}:"
        for name, state in self.states.items():
            yield f"  {self.settings.get(name, name)}"
            for key, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
                yield f"    {key} = {_shown(value)}"


def recorded_handlers(run: Path, iteration: int, at_most: int | None = None) -> RecordedHandlers:
    """Of a run, from run.json and the last checkpoint that was made before an iteration.

    Args:
        run: the run folder.
        iteration: the one that the checkpoint comes before.
        at_most: bytes of the checkpoint; a larger one is not read. None reads any.
    """
    listed = read_run_file(run).get("handlers")
    names = tuple(map(str, listed)) if isinstance(listed, list) else ()
    before = [place for place in find_checkpoints(run / "checkpoints") if step_of(place) < max(iteration, 1)]
    if not before:
        return RecordedHandlers(names, problem=f"there is no checkpoint before iteration {iteration}")
    checkpoint = before[-1]
    try:
        size = size_of(checkpoint)
        if at_most is not None and size > at_most:
            problem = f"`handlers` reads it from {checkpoint.name}, {size / 1e9:.1f} GB"
            return RecordedHandlers(names, checkpoint, step_of(checkpoint), problem=problem)
        state = load_checkpoint(checkpoint)
    except (CheckpointError, OSError) as error:
        return RecordedHandlers(names, checkpoint, step_of(checkpoint), problem=str(error))
    states, settings = state.get("handlers"), state.get("handler_settings")
    return RecordedHandlers(
        names,
        checkpoint,
        step_of(checkpoint),
        states if isinstance(states, Mapping) else {},
        settings if isinstance(settings, Mapping) else {},
    )


def _shown(value: Any) -> str:
    """The value on one line; of a tensor its shape and type."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape:
        return f"{type(value).__name__} {tuple(value.shape)}, {value.dtype}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."
