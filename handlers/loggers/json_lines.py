"""Writes metrics and texts as JSON, one object per line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pulsetrain.engine import Engine, Events, MediaLogged, PolicyUpdated, RolloutCompleted, ValidationCompleted
from pulsetrain.engine.recording.log.non_finite import finite_or_text
from pulsetrain.handlers.loggers.text_file import TextFileLogger

__all__ = ["JSONLinesLogger"]


class JSONLinesLogger(TextFileLogger[bytes]):
    """Appends an object to FOLDER/metrics.jsonl for each event: metrics, validations, rollouts, texts.

    Each object has event, engine, epoch, iteration and time (seconds since 1970), then the metrics by their full names,
    or name and text. Floats are exact; NaN and infinities are the strings "NaN", "Infinity", "-Infinity". Each line is
    handed to the operating system before the run continues. A run that resumes continues the file: the lines
    that were written after its checkpoint are removed first, and written again.

    Args:
        folder: the run folder.
        every: read `state.output` at this cadence instead of METRICS_LOGGED; each reading waits for the device.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "warn" continues when a line cannot be written, and writes it with the next one; up to 10,000 wait.
            "raise" ends the run.

    >>> import tempfile
    >>> from pulsetrain.engine import Every
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     engine = Engine(lambda engine, batch: 1 / batch)
    ...     logger = JSONLinesLogger(folder, Every(iterations=2)).attach(engine)
    ...     state = engine.run([1, 2, 3, 4])
    ...     [json.loads(line)["train/loss"] for line in logger.path.read_text().splitlines()]
    [0.5, 0.25]
    """

    file_name = "metrics.jsonl"
    unit = "lines"

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

    def _append(self, engine: Engine, event: str, values: Mapping[str, object]) -> None:
        state = engine.state
        entry: dict[str, object] = {"event": event, "engine": engine.name, "epoch": state.epoch}
        entry |= {"iteration": state.iteration, "time": self.event.time_ns / 1e9}
        for name, value in values.items():
            entry[f"{name}_" if name in entry else name] = finite_or_text(value) if isinstance(value, float) else value
        # json does not know numpy's numbers, except those that are floats
        self.put(json.dumps(entry, ensure_ascii=False, allow_nan=False, default=float).encode() + b"\n")
        self.write()

    def check_file(self) -> None:
        first, end, _ = self.path.read_bytes().partition(b"\n")
        try:
            known = not end or {"event", "engine", "iteration"} <= json.loads(first).keys()
        except (ValueError, AttributeError):
            known = False
        if not known:
            raise self.foreign("its first line is not an object with event, engine and iteration")

    def read_lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True)

    def iteration_of(self, line: bytes) -> int:
        return int(json.loads(line)["iteration"])

    def is_of(self, line: bytes, engine: str) -> bool:
        return bool(json.loads(line)["engine"] == engine)

    def encoded(self, lines: Sequence[bytes]) -> bytes:
        return b"".join(lines)
