"""Reads run.json, which describes the run that has recorded a log, from the log's run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pulsetrain.engine.metric_words import Mode
from pulsetrain.engine.recording.log.files import read_file
from pulsetrain.engine.recording.log.records import Json

__all__ = ["RUN_FILE", "RUN_FORMAT", "id_of_run", "modes_of", "newer_format", "read_run_file"]

RUN_FILE = "run.json"
RUN_FORMAT = 1


def read_run_file(folder: Path) -> dict[str, Json]:
    """The content of run.json; empty if the file is missing or is not a JSON object."""
    try:
        found = msgspec.json.decode(read_file(os.path.join(folder, RUN_FILE)))
    except (OSError, ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deep
        return {}
    return found if isinstance(found, dict) else {}


def newer_format(described: Mapping[str, Json]) -> str:
    """Why the content of run.json cannot be relied on: a newer version has written it; "" if none has.

    >>> newer_format({"format": 1}), newer_format({"format": 3})
    ('', 'run.json has format 3, and this version reads up to 1; read the run with a newer pulsetrain')
    """
    found = described.get("format")
    if not isinstance(found, int) or found <= RUN_FORMAT:
        return ""
    rule = f"has format {found}, and this version reads up to {RUN_FORMAT}"
    return f"{RUN_FILE} {rule}; read the run with a newer pulsetrain"


def id_of_run(folder: Path) -> str:
    """The run's id; empty if run.json is missing, or has none."""
    found = read_run_file(folder).get("id")
    return found if isinstance(found, str) else ""


def modes_of(described: Mapping[str, Json]) -> dict[str, Mode]:
    """Which values of its metrics are better, as the content of run.json says.

    >>> modes_of({"modes": {"val_top5": "max", "val_other": "unknown"}}), modes_of({})
    ({'val_top5': 'max'}, {})
    """
    modes = described.get("modes")
    return {name: mode for name, mode in modes.items() if mode in ("min", "max")} if isinstance(modes, dict) else {}
