"""Writes metrics to a table in the run folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pulsetrain.engine import Engine, ValidationCompleted
from pulsetrain.engine.recording.log.records import MEASURED
from pulsetrain.handlers.loggers.text_file import TextFileLogger
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["CSVLogger"]

_LEADING = ["iteration", "epoch"]
_Cells = dict[str, str]  # of a row, by column


class CSVLogger(TextFileLogger[_Cells]):
    """Keeps FOLDER/metrics.csv: a row for each iteration that logs metrics or a rollout, and for each validation.

    The columns are iteration, epoch, and one for each metric in the order in which they first appeared, of a bus with
    the name of its engine, such as trainer/train/loss; floats are exact. Values that an engine logs at one iteration in
    several events are in one row, unless one of them (other than a time or a throughput) has changed.
    Each row is handed to the operating system before the run continues. A run that resumes continues the table: rows
    that were written after its checkpoint are removed first, and written again.

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
    unit = "rows"

    _columns: Sequence[str] = ()
    _last: tuple[str, _Cells] | None = None  # the last row and its engine; None if the row may not grow

    def prepare(self) -> None:
        self._columns, self._last = (), None
        super().prepare()

    def state_dict(self) -> dict[str, Any]:
        """How many rows the table has, including those that wait to be written.

        Also, if the last row may still grow after the checkpoint, its engine, iteration and the columns that it fills.
        It has no values, and no columns of times and throughput: they would make the checkpoints of equal runs differ.
        """
        growing = None
        if self._last is not None:
            engine, cells = self._last
            growing = [engine, self.iteration_of(cells), [name for name in cells if not _is_measured(name)]]
        return {**super().state_dict(), "growing": growing}

    def log_metrics(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        new = self._cells(engine, metrics)
        name, last = self._last if self._last is not None else (None, {})
        changed = {column for column, value in new.items() if last.get(column, value) != value}
        if name == engine.name and all(_is_measured(column) for column in changed):  # they differ when logged again
            new = {**last, **new, **{column: last[column] for column in changed}}
            if self._waiting:
                self._waiting[-1] = new
            else:
                self._replaced = last
                self.put(new)
        else:
            self.put(new)
        self._last = engine.name, new
        self.write()

    def put(self, line: _Cells) -> None:
        self._last = None  # only the last row may grow
        super().put(line)

    def log_validation(self, engine: Engine, validation: ValidationCompleted) -> None:
        self.put(self._cells(engine, validation.metrics))
        self.write()

    def _cells(self, engine: Engine, metrics: Mapping[str, float]) -> _Cells:
        counters = {"iteration": str(engine.state.iteration), "epoch": str(engine.state.epoch)}
        return {**{self.full_name(engine, name): str(value) for name, value in metrics.items()}, **counters}

    def check_file(self) -> None:
        with self.path.open(newline="", encoding="utf-8") as file:
            try:
                columns = next(csv.reader(file), [])
            except (csv.Error, UnicodeDecodeError):
                columns = []
        if columns[: len(_LEADING)] != _LEADING or len(set(columns)) != len(columns):
            raise self.foreign(f"its first columns are not {', '.join(_LEADING)}")
        self._columns = columns

    def read_lines(self) -> list[_Cells]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return [dict(zip(self._columns, row, strict=False)) for row in list(csv.reader(file))[1:]]

    def iteration_of(self, line: _Cells) -> int:
        return int(line["iteration"])

    def is_of(self, line: _Cells, engine: str) -> bool:
        return any(value and name.startswith(f"{engine}/") for name, value in line.items())

    def encoded(self, lines: Sequence[_Cells]) -> bytes:
        """The rows as text; a table without one of their columns is rewritten with it."""
        new = dict.fromkeys(name for row in lines for name in row if name not in (*self._columns, *_LEADING))
        if new or not self._columns:
            self.rewrite(self.read_lines() if self._columns else (), [*(self._columns or _LEADING), *new])
        return _table(lines, self._columns)

    def forget_file(self) -> None:
        super().forget_file()
        self._columns, self._last = (), None

    def rewrite(self, lines: Sequence[_Cells], columns: Sequence[str] = ()) -> None:
        columns = columns or self._columns
        replace_file(self.path, _table([{name: name for name in columns}, *lines], columns))
        self._columns, self._written = columns, len(lines)

    def agrees(self, lines: Sequence[_Cells], saved: Mapping[str, Any]) -> bool:
        growing = saved.get("growing")
        return growing is None or not lines or self.iteration_of(lines[-1]) == growing[1]

    def cut(self, lines: Sequence[_Cells], saved: Mapping[str, Any]) -> None:
        last, changed = None, False
        if saved.get("growing") is not None and lines:
            name, _, columns = saved["growing"]
            *before, there = lines
            # without the cells that were added since; those of times and throughput may have been there
            kept = [*columns, *(column for column in there if column not in columns and _is_measured(column))]
            cells = {column: there[column] for column in kept if there.get(column)}
            changed = any(value for column, value in there.items() if column not in cells)
            lines, last = [*before, cells], (name, cells)
        self._last = last
        self.keep(lines, changed)


def _is_measured(column: str) -> bool:
    return column.rpartition("/")[2] in MEASURED


def _table(rows: Iterable[_Cells], columns: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns).writerows(rows)
    return text.getvalue().encode()
