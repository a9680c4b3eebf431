"""Exports a recorded run as one table: a row for each event with numbers, a column for each number."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

from pulsetrain.engine.recording import EventLog
from pulsetrain.export.scalars import scalars_of

__all__ = ["POSITION", "write_csv"]

POSITION = ("epoch", "iteration", "engine", "event", "time")


def write_csv(log: EventLog, path: Path) -> tuple[int, int]:
    """Write the table. The log is read twice, for the columns and for the rows: memory does not grow with the run.

    `time` is in UTC, as ISO 8601. Non-finite numbers are nan, inf and -inf. A cell is empty if its event has no value.

    >>> import tempfile
    >>> from pulsetrain.engine.recording import LoggedEvent, LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = LogWriter(Path(folder))
    ...     writer.add(LoggedEvent(0, "trainer", "iteration_completed", 1, 1, output={"loss": 0.5}, seq=0))
    ...     writer.close()
    ...     size = write_csv(EventLog(folder), Path(folder, "run.csv"))
    ...     print(Path(folder, "run.csv").read_text())
    epoch,iteration,engine,event,time,train/loss
    1,1,trainer,iteration_completed,1970-01-01T00:00:00.000000+00:00,0.5
    <BLANKLINE>

    Args:
        log: the log.
        path: the file, which is overwritten.

    Returns:
        The number of rows, and of columns.

    Raises:
        OSError: the file cannot be written.
    """
    main = log.main_engine
    names: dict[str, None] = {}
    for event in log.read():
        names.update(dict.fromkeys(scalars_of(event, main)))
    rows = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*POSITION, *names])
        for event in log.read():
            scalars = scalars_of(event, main)
            if scalars:
                time = datetime.fromtimestamp(event.t / 1e9, UTC).isoformat(timespec="microseconds")
                position = (event.epoch, event.iteration, event.engine, event.event, time)
                writer.writerow([*position, *[scalars.get(name, "") for name in names]])
                rows += 1
    return rows, len(POSITION) + len(names)
