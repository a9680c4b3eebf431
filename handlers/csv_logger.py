"""Writes metrics to a table in the run folder."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from engine.bus import EventBus
from engine.cadence import Every
from engine.errors import RunFolderError
from engine.events import Event, Events
from engine.logs import get_logger
from engine.loop import Engine
from engine.subscription import OnError
from handlers.attachment import Attachment
from handlers.readings import reading_events, step_metrics
from handlers.run_folder import make_folder, replace_file

__all__ = ["CSVLogger"]

_LEADING = ["iteration", "epoch"]


class CSVLogger:
    """Appends a row to FOLDER/metrics.csv for each METRICS_LOGGED and VALIDATION_COMPLETED.

    The columns are iteration, epoch, and one for each metric in the order in which they were first met; floats are
    exact. Each row is on its way to the disk before the run goes on. A table that is there already is continued;
    a run that goes on from a checkpoint first takes the rows out that were written behind it: they come again.

    Args:
        folder: the run folder.
        every: read `state.output` at this cadence in place of METRICS_LOGGED; each reading waits for the device.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "warn" goes on when a row cannot be written, and writes it with the next; "raise" ends the run.
    """

    def __init__(
        self,
        folder: str | Path,
        every: Every | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        if every is not None and not isinstance(every, Every):
            raise TypeError(f"CSVLogger(every={every!r}): needs an Every, such as Every(iterations=50)")
        self.path = Path(folder) / "metrics.csv"
        self.every = every
        self._clock = clock
        self._on_error = on_error
        self._columns: list[str] = []
        self._rows = 0  # in the table
        self._waiting: list[dict[str, Any]] = []  # rows that could not be written yet
        self._rows_at_checkpoint: int | None = None
        self._last_read: tuple[str, int] | None = None
        self._attachment = Attachment("CSVLogger")

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Follow the metrics of one engine, or of all of a bus.

        Raises:
            RunFolderError: the folder cannot be written, or holds a metrics.csv of something else.
        """
        with self._attachment.to(engine_or_bus) as hear:
            make_folder("CSVLogger", self.path.parent)
            self._columns, self._rows = self._open_table()
            self._last_read = None
            if self.every is None:
                hear(Events.METRICS_LOGGED, self._on_metrics, on_error=self._on_error)
            else:
                hear(reading_events(self.every, self._clock), self._on_reading, on_error=self._on_error)
            hear(Events.VALIDATION_COMPLETED, self._on_metrics, on_error=self._on_error)
            hear(Events.CHECKPOINT_LOADED, self._drop_rows_to_come_again, on_error=self._on_error)
        return self

    def detach(self) -> None:
        self._attachment.cancel()

    def state_dict(self) -> dict[str, Any]:
        """How many rows the table has."""
        return {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The table stays as it is until CHECKPOINT_LOADED says that the run goes on from there."""
        self._rows_at_checkpoint = state["rows"]

    def begin_again(self) -> None:
        """A run begins anew that was killed before its first checkpoint: its rows come again."""
        if self._columns:
            self._write_table(self._columns, [])

    def _open_table(self) -> tuple[list[str], int]:
        """The columns of the table that is there, and how many rows it has; nothing where there is none yet."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return [], 0
        with self.path.open(newline="", encoding="utf-8") as file:
            try:
                columns = next(csv.reader(file), [])
            except (csv.Error, UnicodeDecodeError):
                columns = []
        if columns[: len(_LEADING)] != _LEADING or len(set(columns)) != len(columns):
            raise RunFolderError(
                f"CSVLogger(folder={str(self.path.parent)!r}): {self.path.name} there is no table of this logger: it "
                f"does not begin with the columns {', '.join(_LEADING)}; move it away or choose another folder"
            )
        self._drop_cut_row()
        return columns, len(self._read_rows())

    def _read_rows(self) -> list[list[str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))[1:]

    def _drop_rows_to_come_again(self, engine: Engine) -> None:
        kept, self._rows_at_checkpoint = self._rows_at_checkpoint, None
        if kept is None or kept >= self._rows:
            return
        rows = self._read_rows()
        if all(int(row[0]) >= engine.state.iteration for row in rows[kept:]):  # else it is another run's table
            self._write_table(self._columns, rows[:kept])

    def _drop_cut_row(self) -> None:
        """A process that was killed in mid-write leaves a row without an end: its last number may be cut short."""
        content = self.path.read_bytes()
        if content.endswith(b"\n"):
            return
        kept = content[: content.rfind(b"\n") + 1]
        get_logger("handlers").warning(
            "metrics.csv ended in an unfinished row; it was dropped",
            path=str(self.path),
            dropped=content[len(kept) :].decode(errors="replace"),
        )
        replace_file(self.path, kept)

    def _on_metrics(self, engine: Engine, event: Event) -> None:
        self._append(engine, event.payload.metrics)

    def _on_reading(self, engine: Engine) -> None:
        reading = (engine.name, engine.state.iteration)
        if self._last_read == reading:
            return
        self._last_read = reading
        metrics = step_metrics(engine)
        if metrics:
            self._append(engine, metrics)

    def _append(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self._waiting.append({**metrics, "iteration": engine.state.iteration, "epoch": engine.state.epoch})
        new = dict.fromkeys(name for row in self._waiting for name in row if name not in (*self._columns, *_LEADING))
        if new or not self._columns:
            self._widen([*(self._columns or _LEADING), *new])
        # opened each time: rows are rare, and nothing is left to close when a run ends badly
        with self.path.open("a", newline="", encoding="utf-8") as file:
            before = file.tell()
            try:
                csv.writer(file).writerows([[row.get(name, "") for name in self._columns] for row in self._waiting])
                file.flush()
            except OSError:
                os.truncate(self.path, before)  # no part of a row stays on a full disk
                raise
        self._rows += len(self._waiting)
        self._waiting.clear()

    def _widen(self, columns: list[str]) -> None:
        """Write the table anew with more columns; the rows that are there have nothing in them."""
        rows = self._read_rows() if self._columns else []
        self._write_table(columns, [[*row, *[""] * (len(columns) - len(row))] for row in rows])

    def _write_table(self, columns: list[str], rows: list[list[str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(rows)
        replace_file(self.path, text.getvalue().encode())
        self._columns, self._rows = columns, len(rows)
