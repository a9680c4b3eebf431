"""The results of a sweep, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pulsetrain.engine.errors import RunFolderError
from pulsetrain.runs.summary import Status
from pulsetrain.sweep.workers import folder_of

__all__ = ["SweepResults", "Trial", "read_results", "results_of", "text_of"]

_STATES = {
    "RUNNING": "running",
    "WAITING": "waiting",
    "COMPLETE": "completed",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a sweep."""

    number: int
    state: str  # "running", "waiting", "completed", "pruned" or "failed"
    params: Mapping[str, Any]  # setting -> value
    values: Mapping[str, float]  # metric -> value; empty until the trial has ended
    folder: Path  # the run folder, which may not exist yet
    error: str  # why it failed; else ""
    iterations: int | None = None  # of all replayed runs, until this trial would have ended them; None if it trained

    @property
    def values_text(self) -> str:
        """Its metrics in one line."""
        texts = [f"{name} {text_of(value)}" for name, value in self.values.items()]
        return ", ".join([*texts, *([f"{self.iterations:,} iterations"] if self.iterations is not None else [])])

    def state_with(self, status: Status | None) -> str:
        """Its state, where its run has this status: "interrupted" after an end that the storage did not notice."""
        was_left = self.state == "running" and status in (Status.KILLED, Status.STOPPED)
        return "interrupted" if was_left else self.state


@dataclass(frozen=True, slots=True)
class SweepResults:
    """The trials of a sweep, by number."""

    folder: Path
    trials: tuple[Trial, ...]
    directions: Mapping[str, str]  # metric -> "min" or "max"

    @property
    def is_replayed(self) -> bool:
        """Whether recorded runs have answered."""
        return any(each.iterations is not None for each in self.trials)

    @property
    def ordered(self) -> list[Trial]:
        """The trials, the best first by the first metric; then those without values, by number."""
        return sorted(self.trials, key=self._rank)

    @property
    def best(self) -> Trial | None:
        """The completed trial with the best value of the first metric; None without one.

        Of equal ones it is the one with the fewest iterations, where runs were replayed, and then the first.
        """
        ended = [each for each in self.trials if each.state == "completed" and each.values]
        return min(ended, key=self._rank, default=None)

    def _rank(self, trial: Trial) -> tuple[bool, float, int, int]:
        metric, mode = next(iter(self.directions.items()))
        sign = 1 if mode == "min" else -1
        return not trial.values, sign * trial.values.get(metric, 0.0), trial.iterations or 0, trial.number


def text_of(value: object) -> str:
    """A setting or a metric for people.

    >>> text_of(0.30000000000000004), text_of(None)
    ('0.3', 'None')
    """
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_results(folder: Path) -> SweepResults:
    """Read a sweep's trials, also while it runs.

    Where the storage is not the folder's own SQLite file, its URL is taken from PULSETRAIN_SWEEP_STORAGE.

    Raises:
        RunFolderError: the folder is not a sweep.
        ConfigurationError: Optuna is not installed, or the storage cannot be read.
    """
    from pulsetrain.sweep.spec import read_saved
    from pulsetrain.sweep.study import open_study

    if not (folder / "sweep.yaml").is_file():
        raise RunFolderError(f"{folder}: is not a sweep: it has no sweep.yaml; give the folder of a sweep")
    spec = replace(read_saved(folder), folder=str(folder))  # it may have been moved, or copied
    study = open_study(spec, create=False, read_only=True)
    return results_of(folder, spec.directions, study.get_trials(deepcopy=False))


def results_of(folder: Path, directions: Mapping[str, str], trials: list[Any]) -> SweepResults:
    """The results in the form of this module.

    Args:
        folder: of the sweep.
        directions: metric -> "min" or "max".
        trials: Optuna's.
    """
    found = [
        Trial(
            each.number,
            _STATES[each.state.name],
            dict(each.params),
            dict(zip(directions, each.values, strict=True)) if each.state.name == "COMPLETE" else {},
            _folder_of(each, folder),
            # the error is stored first: a trial killed between the two is continued, and may complete
            str(each.user_attrs.get("error", "")) if each.state.name == "FAIL" else "",
            each.user_attrs.get("iterations"),
        )
        for each in trials
    ]
    return SweepResults(folder, tuple(sorted(found, key=lambda each: each.number)), dict(directions))


def _folder_of(trial: Any, folder: Path) -> Path:
    """Where a trial runs: in the sweep's folder, or in that of another sweep with the same study on a server."""
    name = f"{trial.number:04d}"
    other = folder_of(trial.user_attrs.get("owner"))
    own = folder / "trials" / name
    return own if other is None or own.exists() else other / "trials" / name
