"""Exports a recorded run's scalars as an event file of TensorBoard."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from pulsetrain.engine.optional import load_optional
from pulsetrain.engine.recording import EventLog
from pulsetrain.export.scalars import FirstSources

__all__ = ["write_tensorboard"]

QUEUE = 10_000  # events that wait for TensorBoard's thread; with its default of 10 the two threads block each other


def write_tensorboard(log: EventLog, folder: Path) -> int:
    """Write every scalar under its name, at its iteration and with the wall time of its event.

    The iterations of other engines than the main one, such as an evaluator, start from 1 each time; here their steps
    keep increasing. METRICS_LOGGED repeats means over iterations, and EPOCH_COMPLETED the metrics of a validation: they
    are written only if the log does not hold the events that they repeat.

    Args:
        log: the log.
        folder: the folder for the event file.

    Returns:
        The number of scalars written.

    Raises:
        ConfigurationError: tensorboard is not installed.
        OSError: the file cannot be written.
    """
    writer_module, event_pb2, summary_pb2 = _modules()
    main = log.main_engine
    steps: dict[str, int] = {}  # the last step of each name
    sources = FirstSources()
    count = 0
    writer = writer_module.EventFileWriter(str(folder), max_queue_size=QUEUE)
    try:
        for event in log.read():
            by_step: dict[int, list[object]] = {}
            for name, value in sources.scalars(event, main).items():
                last = steps.get(name, -1)
                step = event.iteration if event.engine == main else max(event.iteration, last + 1)
                if step == last:
                    continue
                steps[name] = step
                by_step.setdefault(step, []).append(summary_pb2.Summary.Value(tag=name, simple_value=value))
            for step, values in by_step.items():
                count += len(values)
                summary = summary_pb2.Summary(value=values)
                writer.add_event(event_pb2.Event(wall_time=event.t / 1e9, step=step, summary=summary))
    finally:
        writer.close()
    return count


def _modules() -> list[ModuleType]:
    """TensorBoard's writer, and its two protobuf messages."""
    names = ("summary.writer.event_file_writer", "compat.proto.event_pb2", "compat.proto.summary_pb2")
    return [load_optional("export", f"tensorboard.{name}", "tensorboard") for name in names]
