"""Exports a recorded run to other tools: Perfetto and chrome://tracing, TensorBoard, spreadsheets."""

from __future__ import annotations

from pulsetrain.export.perfetto import write_perfetto
from pulsetrain.export.scalars import scalars_of
from pulsetrain.export.table import write_csv
from pulsetrain.export.tensorboard import write_tensorboard

__all__ = ["scalars_of", "write_csv", "write_perfetto", "write_tensorboard"]
