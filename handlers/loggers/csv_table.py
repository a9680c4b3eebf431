"""Writes metrics to a table in the run folder."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.cadence import Every
from engine.errors import RunFolderError
from engine.events import Events
from engine.loop import Engine
from engine.payloads import ValidationCompleted
from engine.subscription import OnError
from handlers.loggers.base import MetricLogger
from handlers.loggers.text_file import drop_unfinished_line, write_end
from handlers.run_folder import make_folder, replace_file

__all__ = ["CSVLogger"]

_LEADING = ["iteration", "epoch"]
_Cells = dict[str, str]  # of a row, by column


class CSVLogger(MetricLogger):
    """Keeps FOLDER/metrics.csv: a row for each iteration that logs metrics, and one for each validation.

    The columns are iteration, epoch, and one for each metric in the order in which they were first met; floats are
    exact. What an engine logs at one iteration in several events stands in one row, unless a value has changed. Each
    row is on its way to the disk before the run goes on. A table that is there already is continued; a run that goes
    on from a checkpoint first takes out what was written behind it: it comes again.

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
        super().__init__(every, clock=clock, on_error=on_error)
        self.folder = Path(folder)
        self.path = self.folder / "metrics.csv"
        self._columns: list[str] = []
        self._rows = 0  # in the table
        self._last: tuple[str, _Cells] | None = None  # the last row, and its engine; None where it may not grow
        self._waiting: list[_Cells] = []  # rows that are not written yet
        self._replaced: _Cells | None = None  # the table's last row as it is; the first that waits takes its place
        self._at_checkpoint: Mapping[str, Any] | None = None

    @property
    def destination(self) -> Path:
        return self.path.resolve()

    def prepare(self) -> None:
        make_folder("CSVLogger", self.folder)
        self._columns, self._rows = self._open_table()
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        """How many rows the table has, and the last one as it is, which may grow behind the checkpoint."""
        engine, cells = self._last if self._last is not None and not self._waiting else (None, {})
        return {"rows": self._rows, "engine": engine, "last": dict(cells)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The table stays as it is until CHECKPOINT_LOADED says that the run goes on from there."""
        self._at_checkpoint = state

    def begin_again(self) -> None:
        if self._columns:
            self._write_table(self._columns, [])

    def log_metrics(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        new = self._cells(engine, metrics)
        name, last = self._last if self._last is not None else (None, {})
        if name == engine.name and all(last.get(column, value) == value for column, value in new.items()):
            new = {**last, **new}
            if self._waiting:
                self._waiting[-1] = new
            else:
                self._replaced, self._waiting = last, [new]
        else:
            self._waiting.append(new)
        self._last = engine.name, new
        self._write()

    def log_validation(self, engine: Engine, validation: ValidationCompleted) -> None:
        self._waiting.append(self._cells(engine, validation.metrics))
        self._last = None
        self._write()

    def _subscribe(self, hear: Callable[..., None]) -> None:
        super()._subscribe(hear)
        hear(Events.CHECKPOINT_LOADED, self._drop_rows_to_come_again)

    def _cells(self, engine: Engine, metrics: Mapping[str, float]) -> _Cells:
        place = {"iteration": str(engine.state.iteration), "epoch": str(engine.state.epoch)}
        return {**{name: str(value) for name, value in metrics.items()}, **place}

    def _write(self) -> None:
        new = dict.fromkeys(name for row in self._waiting for name in row if name not in (*self._columns, *_LEADING))
        if new or not self._columns:
            self._widen([*(self._columns or _LEADING), *new])
        replaced = b"" if self._replaced is None else self._lines([self._replaced])
        was_replaced = write_end(self.path, self._lines(self._waiting), replaced)
        self._rows += len(self._waiting) - was_replaced
        self._waiting, self._replaced = [], None

    def _lines(self, rows: Iterable[_Cells]) -> bytes:
        return _table([row.get(name, "") for name in self._columns] for row in rows)

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
        drop_unfinished_line(self.path)
        return columns, len(self._read_rows())

    def _read_rows(self) -> list[list[str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))[1:]

    def _drop_rows_to_come_again(self, engine: Engine) -> None:
        saved, self._at_checkpoint = self._at_checkpoint, None
        kept = saved["rows"] if saved is not None else self._rows
        if saved is None or kept > self._rows:
            return
        rows = self._read_rows()
        if not all(int(row[0]) >= engine.state.iteration for row in rows[kept:]):
            return  # it is another run's table
        cells, rows = dict(saved.get("last", {})), rows[:kept]
        if cells and rows:
            if rows[-1][0] != cells["iteration"]:
                return
            rows[-1] = [cells.get(name, "") for name in self._columns]  # without what it has grown by since
            self._last = saved["engine"], cells
        if kept < self._rows or cells:
            self._write_table(self._columns, rows)

    def _widen(self, columns: list[str]) -> None:
        """Write the table anew with more columns; the rows that are there have nothing in them."""
        rows = self._read_rows() if self._columns else []
        self._write_table(columns, [[*row, *[""] * (len(columns) - len(row))] for row in rows])

    def _write_table(self, columns: list[str], rows: list[list[str]]) -> None:
        replace_file(self.path, _table([columns, *rows]))
        self._columns, self._rows = columns, len(rows)


def _table(rows: Iterable[Iterable[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
