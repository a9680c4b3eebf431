"""The files of a crash bundle, and how to read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.log.run_file import read_run_file

__all__ = ["Bundle", "bundle_of", "forget_bundle", "read_bundle"]

CRASHES = "crash"  # the bundles' folder in a run folder
FACTS, BATCH, TRACEBACK, CONFIG, EVENTS = "bundle.json", "batch.pt", "traceback.txt", "config.yaml", "events"
NOTE = "crash bundle: "  # the start of the note that the exception gets


@dataclass(frozen=True)
class Bundle:
    """A bundle that a CrashBundle wrote; its files are read on access."""

    folder: Path
    facts: Mapping[str, Any]  # the values of bundle.json, as JSON gives them

    @property
    def what(self) -> str:
        """The exception or the anomaly."""
        return str(self.facts["what"])

    @property
    def traceback(self) -> str | None:
        """As Python prints it; None after an anomaly."""
        file = self.folder / TRACEBACK
        return file.read_text(encoding="utf-8") if file.exists() else None

    @property
    def batch(self) -> Any:
        """The failing batch, its tensors on the host; None where there was none, or it is missing.

        For an anomaly that was found after its iteration, these are its rows as read from the dataset again. A dataset
        that draws random numbers, for crops for example, gives different ones. Then `facts["fetched_again"]` is true.
        """
        file = self.folder / BATCH
        return torch.load(file, weights_only=True, map_location="cpu") if file.exists() else None

    @property
    def rows(self) -> list[int] | None:
        """The indices of `batch` in the dataset; None where they are not known."""
        rows = self.facts.get("rows")
        return list(rows) if rows else None

    @property
    def run(self) -> dict[str, Any]:
        """The run's versions, command, settings and handlers."""
        return read_run_file(self.folder)

    @property
    def memory(self) -> Mapping[str, Any] | None:
        """After a failed allocation: "requested", "available", "held", "estimated" and "remedy"; else None."""
        return self.facts.get("memory")

    def tensors(self, kind: str = "weights") -> list[dict[str, Any]]:
        """The norm, NaN count and infinity count of each tensor; `kind` is weights, gradients or optimizer."""
        return list(self.facts.get(kind) or ())


def read_bundle(folder: str | Path) -> Bundle:
    """Open a crash bundle.

    Raises:
        RecordingError: there is no bundle in this folder, or its facts are damaged.
    """
    try:
        facts = json.loads((Path(folder) / FACTS).read_bytes())
    except FileNotFoundError:
        raise RecordingError(
            f"{folder}: is not a crash bundle, for it has no {FACTS}; a CrashBundle writes them to RUN/{CRASHES}"
        ) from None
    except (OSError, ValueError) as error:
        raise RecordingError(f"{folder}: {FACTS} cannot be read: {error}") from error
    if not isinstance(facts, dict) or "what" not in facts:
        raise RecordingError(f"{folder}: {FACTS} is not what a CrashBundle writes")
    return Bundle(Path(folder), facts)


def bundle_of(error: BaseException) -> Path | None:
    """The folder of the exception's bundle; None where none was written."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(NOTE)]
    return Path(notes[-1].removeprefix(NOTE)) if notes else None


def forget_bundle(error: BaseException) -> None:
    """Remove the notes that name bundles, which were deleted."""
    notes: list[str] = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if not note.startswith(NOTE)]
