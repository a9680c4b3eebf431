"""Reads run.json, which describes the run that has recorded a log, from the log's run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pulsetrain.engine.recording.log.records import Json

__all__ = ["RUN_FILE", "id_of_run", "read_run_file"]

RUN_FILE = "run.json"


def read_run_file(folder: Path) -> dict[str, Json]:
    """The content of run.json; empty if the file is missing or is not a JSON object."""
    try:
        found = msgspec.json.decode((folder / RUN_FILE).read_bytes())
    except (OSError, ValueError):  # not JSON, or not UTF-8
        return {}
    return found if isinstance(found, dict) else {}


def id_of_run(folder: Path) -> str:
    """The run's id; empty if run.json is missing, or has none."""
    found = read_run_file(folder).get("id")
    return found if isinstance(found, str) else ""
