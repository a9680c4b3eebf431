"""A run that is watched, and what is wrong with it if it cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording.log.run_file import newer_format, read_run_file
from pulsetrain.report.run_curves import RATES
from pulsetrain.runs.live import LiveRun, Where

__all__ = ["Watched", "curve_names", "watch_runs"]

_LAST = (*RATES, "throughput/", "memory/", "learning_rate", "grad_norm")  # of the curves, by the beginnings of names


class Watched:
    """A run under a short name.

    Args:
        run: the run.
        name: what it is called on the screen.
    """

    run: LiveRun
    name: str
    error: str

    def __init__(self, run: LiveRun, name: str) -> None:
        self.run, self.name = run, plain(name)
        self.error = ""  # why it cannot be read any more

    def update(self, seconds: float | None = None) -> bool:
        """Read what is new; returns whether anything has changed. A log that cannot be read is named in `error`."""
        before, changed = self.error, False
        try:
            changed = self.run.update(seconds)
            self.error = ""
        except (PulsetrainError, OSError) as error:
            self.error = plain(str(error))
        return changed or self.error != before

    @property
    def is_running(self) -> bool:
        """Whether it may change without an event, for time passes."""
        return self.run.status is not None and self.run.status.is_going

    @property
    def problems(self) -> list[str]:
        """What a user has to know before believing the rest."""
        run, found = self.run, [self.error] if self.error else []
        if not os.path.exists(run.folder):
            has_events = run.updated is not None
            found.append(f"{run.label}: " + ("has disappeared" if has_events else "is not there yet; waiting for it"))
        elif not run.is_there:
            found.append(f"{run.label}: the run has no event log yet; waiting for it")
        elif run.updated is None and not self.error:
            what = (
                "none of its events can be read" if run.damage else "the run has not begun; waiting for its first event"
            )
            found.append(f"{run.label}: {what}")
        if newer := newer_format(read_run_file(run.folder)):
            found.append(f"{run.label}: {newer}")
        if run.share_read < 1.0:
            found.append(f"reading the log: {run.share_read:.0%}")
        found += [f"damaged log: {each}" for each in run.damage]
        return [plain(each) for each in found]


def curve_names(runs: Iterable[Watched]) -> list[str]:
    """The names of all curves: losses first, then other metrics, then speeds and what the optimizer does."""
    runs = list(runs)
    mains = [each.run.main for each in runs]
    judged = {name for main in mains if main is not None for name in (*main.curves.validated, *main.curves.rolled_out)}

    def key(name: str) -> tuple[int, int, int]:
        last = next((number + 1 for number, each in enumerate(_LAST) if name.startswith(each)), 0)
        return last, 0 if "loss" in name else 1, 0 if name in judged else 1

    return sorted(dict.fromkeys(name for each in runs for name in each.run.curves), key=key)


def watch_runs(folders: Sequence[os.PathLike[str]], where: Where | None = None) -> list[Watched]:
    """Watch the runs in these folders, each under a name of its own, as short as possible.

    Raises:
        RunFolderError: a folder is not a run's.
    """
    runs = [LiveRun(folder, where) for folder in folders]
    names = [run.name for run in runs]
    shown = [name if names.count(name) == 1 else str(run.label) for name, run in zip(names, runs, strict=True)]
    return [Watched(run, name) for name, run in zip(shown, runs, strict=True)]
