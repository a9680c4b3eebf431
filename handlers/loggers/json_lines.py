"""Writes metrics and texts as JSON, an object a line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.payloads import MediaLogged, PolicyUpdated, RolloutCompleted, ValidationCompleted
from pulsetrain.engine.events.subscription import OnError
from pulsetrain.handlers.loggers.base import MetricLogger
from pulsetrain.handlers.loggers.text_file import Backlog, drop_unfinished_line, write_end
from pulsetrain.handlers.run_files.run_folder import make_folder, replace_file

__all__ = ["JSONLinesLogger", "finite"]


class JSONLinesLogger(MetricLogger):
    """Appends an object to FOLDER/metrics.jsonl for each event: metrics, validations, rollouts, texts.

    Each holds event, engine, epoch, iteration and time (seconds since 1970), then the metrics by their full names, or
    name and text. Floats are exact; NaN and infinities are the strings "NaN", "Infinity", "-Infinity". Each line is on
    its way to the disk before the run goes on. A file that is there already is continued; a run that goes on from a
    checkpoint first takes out the lines that were written behind it: they come again.

    Args:
        folder: the run folder.
        every: read `state.output` at this cadence in place of METRICS_LOGGED; each reading waits for the device.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "warn" goes on when a line cannot be written, and writes it with the next, of which up to 10,000 wait;
            "raise" ends the run.
    """

    def __init__(
        self,
        folder: str | Path,
        every: Every | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        super().__init__(every, clock=clock, on_error=on_error)
        self.folder = Path(folder)
        self.path = self.folder / "metrics.jsonl"
        self._lines = 0  # in the file
        self._waiting: Backlog[bytes] = Backlog("JSONLinesLogger")
        self._lines_at_checkpoint: int | None = None

    @property
    def destination(self) -> Path:
        return self.path.resolve()

    def prepare(self) -> None:
        make_folder("JSONLinesLogger", self.folder)
        self._lines = 0
        if self.path.exists():
            drop_unfinished_line(self.path)
            self._lines = len(self._read())

    def state_dict(self) -> dict[str, Any]:
        """How many lines the file has, or will have once those that wait are written."""
        return {"lines": self._lines + len(self._waiting.lines)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The file stays as it is until CHECKPOINT_LOADED says that the run goes on from there."""
        self._lines_at_checkpoint = state["lines"]

    def begin_again(self) -> None:
        self._waiting.cut(0)
        if self._lines:
            replace_file(self.path, b"")
            self._lines = 0

    def log_metrics(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self._append(engine, Events.METRICS_LOGGED.value, metrics)

    def log_validation(self, engine: Engine, validation: ValidationCompleted) -> None:
        self._append(engine, self.event.type, {**validation.metrics, "seconds": validation.seconds})

    def log_rollout(self, engine: Engine, rollout: RolloutCompleted | PolicyUpdated) -> None:
        seconds = {"seconds": rollout.seconds} if isinstance(rollout, RolloutCompleted) else {}
        self._append(engine, self.event.type, {**rollout.metrics, **seconds})

    def log_media(self, engine: Engine, media: MediaLogged) -> None:
        if media.kind == "text":
            self._append(engine, self.event.type, {"name": media.name, "text": media.value})

    def _subscribe(self, subscribe: Callable[..., None]) -> None:
        super()._subscribe(subscribe)
        subscribe(Events.CHECKPOINT_LOADED, self._drop_lines_to_come_again)

    def _append(self, engine: Engine, event: str, values: Mapping[str, Any]) -> None:
        state = engine.state
        entry: dict[str, Any] = {"event": event, "engine": engine.name, "epoch": state.epoch}
        entry |= {"iteration": state.iteration, "time": self.event.time_ns / 1e9}
        for name, value in values.items():
            entry[f"{name}_" if name in entry else name] = finite(value)
        # numbers of numpy are no numbers to json, unless they are float's own
        self._waiting.put(json.dumps(entry, ensure_ascii=False, allow_nan=False, default=float).encode() + b"\n")
        while lines := self._waiting.first():
            write_end(self.path, b"".join(lines))
            self._lines += len(lines)
            self._waiting.drop_first(len(lines))

    def _read(self) -> list[bytes]:
        lines = self.path.read_bytes().splitlines(keepends=True)
        try:
            known = not lines or {"event", "engine", "iteration"} <= json.loads(lines[0]).keys()
        except (ValueError, AttributeError):
            known = False
        if not known:
            raise RunFolderError(
                f"JSONLinesLogger(folder={str(self.folder)!r}): {self.path.name} there holds no lines of this logger: "
                "the first is no object with event, engine and iteration; move it away or choose another folder"
            )
        return lines

    def _drop_lines_to_come_again(self, engine: Engine) -> None:
        kept, self._lines_at_checkpoint = self._lines_at_checkpoint, None
        if kept is None or kept >= self._lines + len(self._waiting.lines):
            return
        lines = self._read() if self._lines else []
        behind = [*lines, *self._waiting.lines][kept:]
        if not all(json.loads(line)["iteration"] >= engine.state.iteration for line in behind):
            return  # it is another run's file
        self._waiting.cut(max(kept - self._lines, 0))
        if kept < self._lines:
            replace_file(self.path, b"".join(lines[:kept]))
            self._lines = kept


def finite(value: Any) -> Any:
    """JSON has no NaN: the strings that the event log uses, too."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
