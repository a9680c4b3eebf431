"""Writes metrics to a table in the run folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.payloads import ValidationCompleted
from pulsetrain.handlers.loggers.text_file import TextFileLogger, drop_unfinished_line, write_end
from pulsetrain.handlers.run_files.run_folder import make_folder, replace_file

__all__ = ["CSVLogger"]

_LEADING = ["iteration", "epoch"]
_Cells = dict[str, str]  # of a row, by column


class CSVLogger(TextFileLogger[_Cells]):
    """Keeps FOLDER/metrics.csv: a row for each iteration that logs metrics or a rollout, and for each validation.

    The columns are iteration, epoch, and one for each metric in the order in which they first appeared; floats are
    exact. What an engine logs at one iteration in several events is in one row, unless a value has changed. Each row is
    handed to the operating system before the run continues. An existing table is continued; a run that resumes from a
    checkpoint first removes what was written after it, and writes it again.

    Args:
        folder: the run folder.
        every: read `state.output` at this cadence instead of METRICS_LOGGED; each reading waits for the device.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "warn" continues when a row cannot be written, and writes it with the next one; up to 10,000 wait.
            "raise" ends the run.

    >>> import tempfile
    >>> from pulsetrain.engine import Every
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     engine = Engine(lambda engine, batch: 1 / batch)
    ...     logger = CSVLogger(folder, Every(iterations=2)).attach(engine)
    ...     state = engine.run([1, 2, 3, 4])
    ...     logger.path.read_text().split()
    ['iteration,epoch,train/loss', '2,1,0.5', '4,1,0.25']
    """

    file_name = "metrics.csv"

    _columns: Sequence[str] = ()
    _last: tuple[str, _Cells] | None = None  # the last row and its engine; None if the row may not grow
    _replaced: _Cells | None = None  # the table's last row, which the first waiting one will replace

    def prepare(self) -> None:
        make_folder("CSVLogger", self.folder)
        self._columns, self._written = self._open_table()
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        """How many rows the table has, including those that wait to be written.

        Also, if the last row may still grow after the checkpoint, its engine, iteration and the columns that it fills.
        It has no values: measured times would make the checkpoints of equal runs differ.
        """
        rows = self._rows_final + len(self._waiting.lines)
        if self._last is None:
            return {"rows": rows, "growing": None}
        engine, cells = self._last
        return {"rows": rows, "growing": [engine, int(cells["iteration"]), list(cells)]}

    def begin_again(self) -> None:
        self._waiting.cut(0)
        self._last = self._replaced = None
        if self._columns:
            self._write_table(self._columns, [])

    def log_metrics(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        new = self._cells(engine, metrics)
        name, last = self._last if self._last is not None else (None, {})
        if name == engine.name and all(last.get(column, value) == value for column, value in new.items()):
            new = {**last, **new}
            if self._waiting.lines:
                self._waiting.lines[-1] = new
            else:
                self._replaced = last
                self._waiting.put(new)
        else:
            self._put(new)
        self._last = engine.name, new
        self._write()

    def log_validation(self, engine: Engine, validation: ValidationCompleted) -> None:
        self._put(self._cells(engine, validation.metrics))
        self._last = None
        self._write()

    def _cells(self, engine: Engine, metrics: Mapping[str, float]) -> _Cells:
        place = {"iteration": str(engine.state.iteration), "epoch": str(engine.state.epoch)}
        return {**{name: str(value) for name, value in metrics.items()}, **place}

    def _put(self, row: _Cells) -> None:
        if self._waiting.put(row):
            self._replaced = None  # the row that would have replaced it is lost

    @property
    def _rows_final(self) -> int:
        """The table's rows, without a last one that the first waiting row will replace."""
        return self._written - (self._replaced is not None)

    def _write(self) -> None:
        while rows := self._waiting.first():
            new = dict.fromkeys(name for row in rows for name in row if name not in (*self._columns, *_LEADING))
            if new or not self._columns:
                self._widen([*(self._columns or _LEADING), *new])
            replaced = b"" if self._replaced is None else self._lines([self._replaced])
            was_replaced = write_end(self.path, self._lines(rows), replaced)
            self._written += len(rows) - was_replaced
            self._replaced = None
            self._waiting.drop_first(len(rows))

    def _lines(self, rows: Iterable[_Cells]) -> bytes:
        return _table([row.get(name, "") for name in self._columns] for row in rows)

    def _open_table(self) -> tuple[list[str], int]:
        """The columns and the number of rows of an existing table; empty and 0 without one."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return [], 0
        with self.path.open(newline="", encoding="utf-8") as file:
            try:
                columns = next(csv.reader(file), [])
            except (csv.Error, UnicodeDecodeError):
                columns = []
        if columns[: len(_LEADING)] != _LEADING or len(set(columns)) != len(columns):
            rule = (
                f"{self.path.name} there was not written by this "
                f"logger: its first columns are not {', '.join(_LEADING)}; move it or choose another folder"
            )
            raise RunFolderError(rule, "CSVLogger", folder=str(self.path.parent))
        drop_unfinished_line(self.path)
        return columns, len(self._read_rows())

    def _read_rows(self) -> list[list[str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))[1:]

    def cut(self, saved: Mapping[str, Any], iteration: int) -> None:
        written, kept = self._rows_final, int(saved["rows"])
        if kept > written + len(self._waiting.lines):
            return
        table = self._read_rows() if self._columns else []
        rows = [dict(zip(self._columns, row, strict=False)) for row in table[:written]] + list(self._waiting.lines)
        if not all(int(row["iteration"]) >= iteration for row in rows[kept:]):
            return  # another run's table
        last, shrunk = None, False
        if saved.get("growing") is not None and kept:
            name, last_iteration, columns = saved["growing"]
            if int(rows[kept - 1]["iteration"]) != last_iteration:
                return
            # without the cells that were added since
            cells = {column: rows[kept - 1][column] for column in columns if rows[kept - 1].get(column)}
            shrunk = any(value for column, value in rows[kept - 1].items() if column not in cells)
            rows[kept - 1], last = cells, (name, cells)
        self._last, self._replaced = last, None
        self._waiting.cut(max(kept - written, 0))
        if kept > written:
            self._waiting.lines[-1] = rows[kept - 1]
        if len(table) > min(kept, written) or (shrunk and kept <= written):
            of_table = rows[: min(kept, written)]
            self._write_table(self._columns, [[row.get(name, "") for name in self._columns] for row in of_table])

    def _widen(self, columns: list[str]) -> None:
        """Rewrite the table with more columns, which are empty in the existing rows."""
        rows = self._read_rows() if self._columns else []
        self._write_table(columns, [[*row, *[""] * (len(columns) - len(row))] for row in rows])

    def _write_table(self, columns: Sequence[str], rows: list[list[str]]) -> None:
        replace_file(self.path, _table([columns, *rows]))
        self._columns, self._written = columns, len(rows)


def _table(rows: Iterable[Iterable[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
