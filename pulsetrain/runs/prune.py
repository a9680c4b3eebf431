"""Which checkpoints of a run are not needed any more, and deletes them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pulsetrain.engine.checkpoint import CheckpointManager, find_checkpoints
from pulsetrain.engine.checkpoint.reader import is_newer
from pulsetrain.engine.recording.log.run_file import newer_format, read_run_file
from pulsetrain.runs.summary import summarize

__all__ = ["Pruned", "prune", "superfluous"]


@dataclass(frozen=True)
class Pruned:
    """Checkpoints of a run to delete."""

    run: Path
    checkpoints: list[Path]
    size: int  # bytes
    keep_last: int = 1


def superfluous(run: Path, keep_last: int, needed: Collection[str] = ()) -> Pruned:
    """All checkpoints but the newest ones, the best one, those of a newer version, and those that are needed.

    Of a run of a newer version, none is.

    Args:
        run: the run folder, of a run that has ended.
        keep_last: how many of the newest, undamaged ones are kept.
        needed: names of checkpoints that are kept.

    Raises:
        PulsetrainError: the folder of the checkpoints cannot be used, or the file that names the best one is damaged.
    """
    if newer_format(read_run_file(run)):  # what its checkpoints are needed for is not known
        return Pruned(run, [], 0, keep_last)
    found = [each for each in find_checkpoints(run / "checkpoints") if isinstance(each, Path)]
    if not found:  # a CheckpointManager would make the folder
        return Pruned(run, [], 0, keep_last)
    manager = CheckpointManager(run / "checkpoints", keep_last_n=keep_last)
    newest = manager.valid()[-keep_last:]
    kept = {*(each.name for each in newest), *needed, *(each.name for each in found if is_newer(each))}
    best = manager.get_best()
    kept |= {best.name} if best is not None else set()
    doomed = [each for each in found if each.name not in kept] if newest else []
    size = sum(file.stat().st_size for each in doomed for file in each.rglob("*") if file.is_file())
    return Pruned(run, doomed, size, keep_last)


def prune(found: Pruned) -> list[Path]:
    """Delete the checkpoints, unless the run is going by now; returns those that are still there."""
    if summarize(found.run).status.is_going:  # it was resumed since it was looked at
        return found.checkpoints
    kept = [each for each in find_checkpoints(found.run / "checkpoints") if each not in found.checkpoints]
    CheckpointManager(found.run / "checkpoints", keep_last_n=found.keep_last).prune(kept)
    return [each for each in found.checkpoints if each.exists()]
