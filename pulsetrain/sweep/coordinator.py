"""Runs the trials of a sweep, each in a process of its own, until all have ended.

Its whole state is the study in the storage and the run folders: killed at any moment and started again, it continues
the trials that were running from their newest checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pulsetrain.configuration.parse import read_config, redacted_options
from pulsetrain.engine.checkpoint.reader import find_checkpoints, step_of
from pulsetrain.engine.errors import (
    CheckpointError,
    ConfigurationError,
    MetricNotFoundError,
    PulsetrainError,
    RunFolderError,
)
from pulsetrain.engine.file_lock import lock
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.runs.command_end import STOPPED, TRAINED
from pulsetrain.sweep.population import has_completed, parent_of, place_of
from pulsetrain.sweep.replayed import check_replay, replayed_outcome
from pulsetrain.sweep.reporting import PRUNED
from pulsetrain.sweep.results import SweepResults, Trial, read_results, results_of
from pulsetrain.sweep.spec import STORAGE, Spec, differing, read_saved, write_saved
from pulsetrain.sweep.study import adopted, draw, drawing_alone, open_study, set_sampler, storage_errors
from pulsetrain.sweep.trials import (
    Job,
    Outcome,
    check_metrics,
    check_settings,
    error_of,
    outcome_of,
    run_job,
    settings_of,
    trial_folder,
)
from pulsetrain.sweep.workers import ID, has_left, owned_by, owner_of

__all__ = ["check_sweep", "run_sweep"]

SUBMISSIONS = "submit"  # the folder that `pulsetrain submit` makes in the sweep's before it starts
METRICS_CHECKED = 1.0  # seconds between two looks at what the first trials report
MOST_DEATHS = 5  # of one trial while the sweep runs, before it counts as failed
UNKNOWN = 255  # of a process whose status was lost together with the process that forked it


@dataclass
class _Active:
    trial: Any  # Optuna's
    process: BaseProcess
    deaths: int = 0


def check_sweep(spec: Spec) -> None:
    """Check what can be known before a trial starts, on the machine that trains.

    Raises:
        ConfigurationError: a setting cannot be used, the trials could not resume, or recorded runs cannot answer.
        RunFolderError: a run to be replayed is not there.
        RecordingError: it has no log.
    """
    check_settings(spec)
    if spec.replay:
        check_replay(spec)


def run_sweep(
    spec: Spec,
    main: Callable[[Sequence[str]], int],
    ended: Callable[[Trial], object] = lambda trial: None,
    worker: str | None = None,
) -> SweepResults:
    """Run every trial that has not ended yet; as a worker, those that no other worker runs.

    Args:
        spec: the sweep, which `check_sweep` accepts.
        main: the command line, called in the trials' processes; it must be importable by its name.
        ended: called with each trial that has ended.
        worker: the name of this process among several that share out the trials; None if it is the only one.

    Raises:
        ConfigurationError: the folder belongs to a sweep with other entries.
        RunFolderError: the folder holds other files, or another process runs this sweep.
        MetricNotFoundError: the runs have no such metric; the message lists those that they have.
    """
    folder = Path(spec.folder)
    with _owned(folder, worker), storage_errors(spec):
        spec = _claim(spec, folder, is_alone=worker is None)
        return _Coordinator(spec, main, ended, worker).run()


@contextmanager
def _owned(folder: Path, worker: str | None) -> Iterator[None]:
    """The folder, for this process alone or, as a worker, for all workers."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder}: is not a folder; choose another one in the entry folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {each.name for each in folder.iterdir()}
        if names - {SUBMISSIONS} and not names & {"sweep.yaml", "sweep.lock"}:
            raise RunFolderError(f"{folder}: holds other files and no sweep; choose another folder")
        descriptor = os.open(folder / "sweep.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PulsetrainError:
        raise
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be written: {error.strerror}; choose another folder") from error
    try:
        if lock(descriptor, shared=worker is not None) is False:
            raise RunFolderError(
                f"{folder}: another process runs this sweep; wait for its end, or choose another folder"
            )
        with contextlib.nullcontext() if worker is None else owned_by(folder, worker):
            yield
    finally:
        os.close(descriptor)


def _claim(spec: Spec, folder: Path, *, is_alone: bool) -> Spec:
    if (folder / "sweep.yaml").exists() and (_has_begun(folder) or not is_alone):
        if spec.storage is not None:
            os.environ[STORAGE] = spec.storage
        saved = read_saved(folder)
        changed = differing(saved, spec)
        if changed:
            raise ConfigurationError(
                f"{folder}: holds a sweep with other values of {', '.join(changed)}; of a sweep that has begun, only "
                f"trials and workers may change; choose another folder{_or_delete(saved, folder)}"
            )
        spec = replace(spec, study=saved.study)
    write_saved(spec)
    return spec


def _has_begun(folder: Path) -> bool:
    """Whether the study was made, which fails for a wrong option of the sampler or a server that does not answer."""
    return _has_study(folder) or any((folder / name).exists() for name in (ID, "trials"))


def _has_study(folder: Path) -> bool:
    file = folder / "sweep.sqlite"
    return file.is_file() and file.stat().st_size > 0  # 0: its process has died before it made the tables


def _or_delete(saved: Spec, folder: Path) -> str:
    """The other remedy for a sweep that has no results yet, as where its metric was wrong; a server keeps its study."""
    has_study = _has_study(folder)
    if saved.storage is not None or (not has_study and _has_begun(folder)):
        return ""
    if has_study and any(each.state in ("completed", "pruned") for each in read_results(folder).trials):
        return ""
    return ", or delete this one, in which no trial has completed, once no worker runs there"


def _started(make: Callable[[], BaseProcess]) -> BaseProcess:
    """Start a process, again if the one that forks it is killed meanwhile; the trial has a lock for one at a time."""
    for _ in range(MOST_DEATHS - 1):
        process = make()
        with contextlib.suppress(EOFError, ConnectionError):
            process.start()
            return process
    process = make()
    process.start()
    return process


def _check_checkpoint(parent: Path, at: int) -> None:
    """Refuse a parent without a checkpoint of its end: a fork would train the iterations since then again."""
    steps = [step_of(each) for each in find_checkpoints(parent / "checkpoints")]
    if at not in steps:
        there = f"its last one is of iteration {max(steps)}" if steps else "it has none"
        raise CheckpointError(
            f"{parent}: has no checkpoint of iteration {at}, where it ended, from which this member would continue; "
            f"{there}; leave at_end of Checkpointer true, or see in {parent.with_suffix('.txt')} why it was not saved"
        )


def _credentials(spec: Spec) -> list[str]:
    """The words that give a fork the credentials of the configuration, which its parent's does not keep."""
    words = []
    for name in redacted_options(redacted(spec.base)):
        if name != "handlers":  # which every fork is given
            value = reduce(lambda inner, key: inner[key], name.split("."), dict(spec.base or {}))
            words.append(f"--{name}={json.dumps(value)}")
    return words


class _Coordinator:
    def __init__(
        self, spec: Spec, main: Callable[[Sequence[str]], int], ended: Callable[[Trial], object], worker: str | None
    ) -> None:
        self.spec, self._main, self._ended, self._worker = spec, main, ended, worker
        self._active: dict[int, _Active] = {}  # by sentinel
        if spec.storage is not None:
            os.environ[STORAGE] = spec.storage  # for the trials' processes
        # before torch is imported there: several processes share the processors
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // spec.workers)))
        # forked from a process that has imported torch, and nothing else: no threads, no connections
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pulsetrain.cli.train"])
        with self._alone():  # several workers would make its tables at once
            self.study = open_study(spec)
            self._owner = owner_of(Path(spec.folder), worker)
        # whether a trial is known to report what the sweep judges by
        self._has_metrics = any(map(has_completed, self._trials()))

    def run(self) -> SweepResults:
        try:
            waiting = self._left()
            while True:
                while len(self._active) < self.spec.workers and (waiting or self._start_new()):
                    if waiting:
                        self._start(waiting.pop(0).number)
                if not self._active:
                    waiting = self._left()  # of workers that have ended meanwhile
                    if not waiting:
                        break
                    continue
                ready = connection.wait(list(self._active), None if self._has_metrics else METRICS_CHECKED)
                if not self._has_metrics:
                    self._check_metrics()
                for sentinel in [each for each in self._active if each in ready]:
                    self._finish(self._active.pop(sentinel))
        finally:
            self._stop()
        return results_of(Path(self.spec.folder), self.spec.directions, self._trials())

    def _check_metrics(self) -> None:
        """Find a metric that no trial reports before the first of them has ended."""
        for each in self._active.values():
            try:
                self._has_metrics |= check_metrics(self.spec, trial_folder(self.spec, each.trial.number))
            except MetricNotFoundError as missing:
                self._tell(each.trial, (), str(missing))
                raise

    def _trials(self) -> list[Any]:
        found: list[Any] = self.study.get_trials(deepcopy=False)
        return found

    def _left(self) -> list[Any]:
        """The trials that a killed process has left for this one to continue."""
        with self._alone():
            found = [each for each in self._trials() if each.state.name == "RUNNING" and self._is_own(each)]
            if self._shares:
                for each in found:
                    adopted(self.study, each.number).set_user_attr("owner", self._owner)
        return found

    def _is_own(self, trial: Any) -> bool:
        owner = trial.user_attrs.get("owner")
        # without an owner: its process was killed while it drew the trial
        return owner is None or not self._shares or has_left(Path(self.spec.folder), owner, self._owner)

    @property
    def _shares(self) -> bool:
        """Whether other processes may train trials of the study now."""
        return self.spec.storage is not None or self._worker is not None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process draws a trial."""
        if self.spec.storage is not None:
            with drawing_alone(self.spec):
                yield
            return
        if self._worker is None:
            yield
            return
        descriptor = os.open(Path(self.spec.folder) / "draw.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)

    def _start_new(self) -> bool:
        """Draw a trial and start its process, if another one may be drawn now."""
        with self._alone():
            if not self._may_ask():
                return False
            self._start(None)
        return True

    def _may_ask(self) -> bool:
        trials = self._trials()
        if len(trials) >= self.spec.total:
            return False
        if self.spec.sampler != "population":
            return True
        first = place_of(self.spec, len(trials))[0] * self.spec.population
        before = [each for each in trials if first - self.spec.population <= each.number < first]
        # the generation before has to end, with a member to fork
        return all(each.state.is_finished() for each in before) and (not before or any(map(has_completed, before)))

    def _start(self, number: int | None, deaths: int = 0) -> None:
        """Start the process of a new trial, or of one that a killed process has left."""
        trial = self.study.ask() if number is None else adopted(self.study, number)
        set_sampler(self.study, self.spec, trial.number)  # before values are drawn
        if self._shares:
            trial.set_user_attr("owner", self._owner)
        params = draw(self.spec, self.study, trial)
        if self.spec.replay:
            self._record(trial, partial(replayed_outcome, self.spec, params))
            return
        try:
            job = self._job(trial.number, params)
        except CheckpointError as error:  # of the parent
            self._tell(trial, (), str(error))
            return
        process = _started(lambda: self._context.Process(target=run_job, args=(job, self._main)))
        self._active[process.sentinel] = _Active(trial, process, deaths)

    def _job(self, number: int, params: dict[str, Any]) -> Job:
        spec, folder = self.spec, trial_folder(self.spec, number)
        if read_config(Path(spec.config), {}) != spec.base:
            raise ConfigurationError(
                f"{spec.config}: has changed since the sweep began; put it back, or choose another folder"
            )
        until, fork, config = None, [], spec.config
        if spec.sampler == "population":
            until = (place_of(spec, number)[0] + 1) * int(spec.interval or 1)
        settings = settings_of(spec, params, number, until)
        words = [f"--{name}={text}" for name, text in settings.items()]
        trials = self._trials()
        parent = parent_of(spec, number, trials) if spec.sampler == "population" else None
        if parent is not None:
            source = trial_folder(spec, parent)
            at = outcome_of(spec, source).iteration
            if "parent" not in read_run_file(folder):
                _check_checkpoint(source, at)
            # a setting that is given replaces what the parent's handlers have made of it, such as the learning rate
            kept = settings_of(spec, next(each for each in trials if each.number == parent).params)
            kept["training.seed"] = settings.get("training.seed", "")
            words = [f"--{name}={text}" for name, text in settings.items() if text != kept.get(name)]
            words += _credentials(spec)
            fork = ["fork", str(source), "--at", str(at), "--into", str(folder), *words]
            # the words again: config.yaml has no credentials, and the sweep's folder as it was named then
            config = str(folder / "config.yaml")
        return Job(folder, tuple(fork), ("train", config, "--run", str(folder), "--resume", "latest", "--wait", *words))

    def _finish(self, ended: _Active) -> None:
        """Record how a trial has ended, or start its process again where something has killed it."""
        ended.process.join()
        code, trial = ended.process.exitcode or 0, ended.trial
        folder = trial_folder(self.spec, trial.number)
        was_killed = code < 0 or code in STOPPED or code == UNKNOWN
        if was_killed and ended.deaths + 1 < MOST_DEATHS:
            self._start(trial.number, ended.deaths + 1)
            return
        if was_killed:
            self._tell(trial, (), f"its process was killed {MOST_DEATHS} times, at last with status {code}")
        elif code in TRAINED:
            self._record(trial, partial(outcome_of, self.spec, folder))
        else:
            self._tell(trial, (), error_of(folder))

    def _record(self, trial: Any, read: Callable[[], Outcome]) -> None:
        """Record the values of a trial whose run has ended, or was replayed."""
        try:
            outcome = read()
        except PulsetrainError as unread:
            self._tell(trial, (), str(unread))
            if isinstance(unread, MetricNotFoundError) and not self._has_metrics:
                raise
            return
        error = f"{' or '.join(self.spec.metric)} is NaN" if any(map(math.isnan, outcome.values)) else ""
        self._has_metrics = True
        if self.spec.replay:
            trial.set_user_attr("iterations", outcome.iteration)
        self._tell(trial, outcome.values, error, outcome.reason.startswith(PRUNED))

    def _tell(self, trial: Any, values: tuple[float, ...], error: str, pruned: bool = False) -> None:
        from optuna.trial import TrialState

        set_sampler(self.study, self.spec, trial.number)
        if error:
            trial.set_user_attr("error", error)
            self.study.tell(trial, state=TrialState.FAIL)
        elif pruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, list(values))
        frozen = next(each for each in self._trials() if each.number == trial.number)
        self._ended(results_of(Path(self.spec.folder), self.spec.directions, [frozen]).trials[0])

    def _stop(self) -> None:
        """Stop what still runs, where this process is interrupted: each run saves a checkpoint."""
        for each in self._active.values():
            each.process.terminate()
        for each in self._active.values():
            each.process.join()
