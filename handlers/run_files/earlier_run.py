"""Whether a folder holds what a run has recorded: a checkpoint, a log, metrics, weights, texts, traces or figures."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from pulsetrain.engine import RecordingError
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.files import log_files

__all__ = ["holds_run"]

_METRICS = ("metrics.csv", "metrics.jsonl")  # of the loggers
_OTHERS = (  # of other handlers
    "best_model.pt", "samples/iteration-*[1-9]*.txt", "profile/trace-*.json", "pretrained/*/export.json",
)  # fmt: skip
_FIGURES = ("loss", "metrics", "learning_rate", "grad_norm", "throughput", "*confusion_matrix")  # that `Plots` draws


def holds_run(folder: Path) -> bool:
    """Whether a run has recorded an iteration there."""
    if find_checkpoints(folder / "checkpoints") or any(_has_lines(folder / name) for name in _METRICS):
        return True
    if any(map(_has_steps, folder.glob("tensorboard/*tfevents*"))) or _has_figures(folder / "plots"):
        return True
    if any(file.is_file() for each in _OTHERS for file in folder.glob(each)):
        return True
    try:
        return any(True for _ in EventLog(folder).read(iteration=(1, None)))
    except RecordingError:  # no log, or one of a newer version, which cannot be read
        return any(file.exists() for file in log_files(folder / "events"))


def _has_lines(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return bool(opened.readline() and (file.suffix != ".csv" or opened.readline()))


def _has_figures(folder: Path) -> bool:
    """Whether `Plots` has drawn there, for one engine or, in folders of their own, for several."""
    return any(any(folder.glob(f"{where}{name}.[ps][nv]g")) for name in _FIGURES for where in ("", "*/"))


def _has_steps(file: Path) -> bool:
    """Whether a file of TensorBoard's events has one of an iteration; a run that failed before leaves step 0."""
    try:
        return any(_step_of(record) > 0 for record in _records(file))
    except OSError:
        return True  # nobody knows what is in it


def _records(file: Path) -> Iterator[bytes]:
    """The whole records of a TFRecord file: each is its length (8 bytes), a checksum (4), the data, a checksum (4)."""
    with file.open("rb") as opened:
        while len(head := opened.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            yield opened.read(min(length, 64))  # the step is at the beginning
            opened.seek(max(length - 64, 0) + 4, 1)


def _step_of(record: bytes) -> int:
    """The step of an Event in protocol buffers: field 1, the time, takes 9 bytes, and field 2 is the step."""
    if record[:1] == b"\x09":
        record = record[9:]
    if record[:1] != b"\x10":
        return 0
    step = 0
    for shift, byte in enumerate(record[1:11]):
        step |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            break
    return step
