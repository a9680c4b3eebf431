"""The short runs: each forked from the last common checkpoint of two runs, or started like them, in its own process."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pulsetrain.bisect.changes import Change, changes_between, settings_with
from pulsetrain.bisect.search import Verdict
from pulsetrain.configuration.yaml_text import read_yaml, yaml_word
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.errors import ConfigurationError, RunFolderError
from pulsetrain.engine.file_lock import lock
from pulsetrain.engine.metric_words import mode_of
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.diff.compare import diff
from pulsetrain.engine.recording.log.run_file import modes_of, newer_format, read_run_file
from pulsetrain.handlers.run_files.run_folder import replace_file, writing
from pulsetrain.reproduce.processes import processes_after
from pulsetrain.reproduce.rerun import checkpoint_before
from pulsetrain.runs.command_end import STOPPED, TRAINED, error_in
from pulsetrain.runs.summary import RunSummary, check_run, summarize

__all__ = ["Pair", "Trial", "Trials", "handlers_until", "read_pair"]

HANDLER = "pulsetrain.bisect.ending.EndAt"
_STATE = "bisect.json"
_LOCK = "bisect.lock"  # held by a search and by the runs that it has started


@dataclass(frozen=True)
class Pair:
    """Two runs, what differs between them, and where they begin to."""

    good: Path
    bad: Path
    changes: tuple[Change, ...]
    metric: str
    mode: str  # "min" or "max"
    start: int  # iteration of the last common checkpoint; 0: the beginning
    length: int  # iteration at which the shorter of the two has ended
    configs: tuple[dict[str, Any], dict[str, Any]]
    processes: tuple[int, int] = (1, 1)  # by which each was trained from there on
    recorded: tuple[float, float] | None = None  # values of the metric that short runs as long as both would repeat
    damage: tuple[str, ...] = ()  # of their logs, each with its run

    def check_recorded(self, until: int, noise: float) -> None:
        """Refuse exchanged runs without any training, where that would repeat what is recorded.

        Args:
            until: the iteration at which the short runs would end.
            noise: differences of the metric up to this do not count.

        Raises:
            ConfigurationError: the bad run is better.
        """
        if self.recorded is not None and until == self.length and self.worse_by(*self.recorded) < -noise:
            raise ConfigurationError(self._exchanged("as recorded", *self.recorded, until))

    def check_difference(self, good: float, bad: float, until: int, noise: float) -> None:
        """Refuse short runs of which that of the bad run is not worse.

        Raises:
            ConfigurationError: it is better, or no difference is to be seen.
        """
        worse = self.worse_by(good, bad)
        if worse < -noise:
            raise ConfigurationError(self._exchanged("in the short runs", good, bad, until))
        if not math.isnan(bad) and worse <= noise:
            raise ConfigurationError(
                f"the short runs show no difference: {self.metric} is {good:.6g} with the settings of {self.good} and "
                f"{bad:.6g} with those of {self.bad} after {until} iterations; let them be longer with --iterations"
                + (f", or choose a smaller --noise than {noise}" if noise else "")
            )

    def worse_by(self, good: float, bad: float) -> float:
        """How much worse the value of the bad run is; less than 0 if it is better."""
        return bad - good if self.mode == "min" else good - bad

    def _exchanged(self, where: str, good: float, bad: float, until: int) -> str:
        other, values = ("max", "higher") if self.mode == "min" else ("min", "lower")
        return (
            f"{self.bad} is better than {self.good} {where}: {self.metric} is {bad:.6g} and {good:.6g} after {until} "
            f"iterations; exchange GOOD and BAD, or add --metric {self.metric} --mode {other} if {values} values are "
            "better"
        )


@dataclass(frozen=True)
class Trial:
    """A short run that has ended."""

    name: str
    folder: Path
    what: str  # which settings it has, or which commit
    value: float | None
    verdict: Verdict
    error: str = ""
    iteration: int | None = None  # at which it was judged; None where it failed


def read_pair(good: Path, bad: Path, metric: str | None, mode: str | None = None) -> Pair:
    """Compare two runs.

    Args:
        good: a run folder.
        bad: that of a worse run.
        metric: None: the first that validations report and whose better values are known.
        mode: "min" or "max"; None: as the runs or the metric's name say.

    Raises:
        RunFolderError: one is not a run that was made from a configuration.
        ConfigurationError: the metric is not one of both, or its better values are not known.
    """
    for each in (good, bad):
        check_run(each)
        if not (each / "config.yaml").is_file():
            raise RunFolderError(f"{each}: has no config.yaml; bisect needs runs that `pulsetrain train` has made")
        if newer := newer_format(read_run_file(each)):
            raise RunFolderError(f"{each}: {newer}")
    configs = [_config_of(each) for each in (good, bad)]
    described = [read_run_file(each) for each in (good, bad)]
    training = [each.get("settings") for each in described]
    given = [each if isinstance(each, dict) else {} for each in training]
    changes = changes_between(configs[0], configs[1], given[0], given[1])
    runs = [summarize(each) for each in (good, bad)]
    chosen, known = _metric(runs, described, metric, mode)
    found = diff(EventLog(good), EventLog(bad))
    agreed = found.divergence.a.iteration if found.divergence is not None else runs[0].iteration
    checkpoint = checkpoint_before(good, agreed) if agreed > 0 else None
    start = step_of(checkpoint) if checkpoint is not None else 0
    length = min(each.iteration for each in runs)
    processes = (processes_after(good, start), processes_after(bad, start))
    repeated = processes[0] == processes[1] and runs[0].iteration == runs[1].iteration and not found.damage
    recorded = (runs[0].last[chosen], runs[1].last[chosen]) if repeated else None
    return Pair(
        good, bad, tuple(changes), chosen, known, start, length, (configs[0], configs[1]), processes, recorded,
        found.damage,
    )  # fmt: skip


def _config_of(run: Path) -> dict[str, Any]:
    found = read_yaml(run / "config.yaml")
    if not isinstance(found, dict):
        raise ConfigurationError(f"{run / 'config.yaml'}: is not a configuration; restore the file")
    return found


def _metric(
    runs: Sequence[RunSummary], described: Sequence[Mapping[str, Any]], metric: str | None, mode: str | None
) -> tuple[str, str]:
    both = [name for name in runs[0].last if name in runs[1].last]
    modes = {**modes_of(described[1]), **modes_of(described[0])}
    if metric is not None:
        name = next((each for each in both if each.replace("/", "_") == metric.replace("/", "_")), None)
        if name is None:
            raise ConfigurationError(
                f"--metric {metric}: is not a metric of both runs; these are: {', '.join(both) or 'none'}{_lost(runs)}"
            )
        found = mode or mode_of(name, modes)
        if found is None:
            raise ConfigurationError(
                f"--metric {metric}: whether it should fall or rise is not known; add --mode min or --mode max"
            )
        return name, found
    if mode is not None:
        raise ConfigurationError(f"--mode {mode}: needs --metric, the name of the metric that is worse")
    for name in both:
        if (known := mode_of(name, modes)) is not None and any(name in each.best for each in runs):
            return name, known
    raise ConfigurationError(
        f"no metric of {runs[0].folder} and {runs[1].folder} is known to improve; choose one with --metric: "
        f"{', '.join(both) or 'they have none in common'}{_lost(runs)}"
    )


def _lost(runs: Sequence[RunSummary]) -> str:
    """What may be why a metric is not known: the damage of the logs."""
    logs = [EventLog(each.folder) for each in runs]
    damage = [f"{run.folder}: {each}" for run, log in zip(runs, logs, strict=True) for each in log.verify()]
    if not damage:
        return ""
    return f"; it may be in damaged parts: {'; '.join(damage)}; `pulsetrain events RUN --check` lists what is lost"


@dataclass
class Trials:
    """The short runs of a pair, in a folder; those that have ended are not run again.

    One process at a time has them, while it is entered: another one waits for its end, and for that of a run which a
    process that was killed has started.

    Args:
        pair: the two runs.
        into: the folder.
        until: the iteration at which they end.
        noise: differences of the metric up to this do not count.
        ended: called with each run that has ended.
    """

    pair: Pair
    into: Path
    until: int
    noise: float = 0.0
    ended: Callable[[Trial], object] = lambda trial: None
    all: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = {
            "good": str(self.pair.good.resolve()), "bad": str(self.pair.bad.resolve()), "start": self.pair.start,
            "until": self.until, "changes": [str(each) for each in self.pair.changes],
        }  # fmt: skip
        state = self.into / _STATE
        found = [path for path in self.into.iterdir() if path.name != _LOCK] if self.into.is_dir() else []
        if found and not state.is_file():
            raise RunFolderError(f"--into {self.into}: is not empty; choose another folder")
        with writing("bisect", self.into):
            self.into.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.into / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if lock(self._lock) is False:
                    waits = f"pulsetrain: waiting for the end of a run in {self.into}, which another search has started"
                    print(waits, file=sys.stderr, flush=True)
                    lock(self._lock, wait=True)
                if state.is_file() and _read(state) != request:
                    raise RunFolderError(
                        f"--into {self.into}: holds the runs of another question; choose another folder"
                    )
                replace_file(state, json.dumps(request, indent=1).encode())
            except BaseException:
                os.close(self._lock)
                raise
        self._good: float | None = None
        self._bad: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)

    def controls(self) -> None:
        """Run both ends.

        Raises:
            ConfigurationError: one of them fails, or the short run of the bad one is not worse.
        """
        self.controls_of(self.check, ((), self.pair.changes))

    def controls_of(self, check: Callable[[Any], Verdict], ends: tuple[Any, Any]) -> None:
        """The same, of something else than settings: the good end and the bad one."""
        for each in ends:
            check(each)
        good, bad = self.all[0], self.all[1]
        for each in (good, bad):
            if each.error:
                raise ConfigurationError(f"{each.folder}: a control failed: {each.error}")
        assert good.value is not None
        assert bad.value is not None
        if not math.isfinite(good.value):
            raise ConfigurationError(
                f"{good.folder}: {self.pair.metric} is {good.value} with the settings of {self.pair.good}, and nothing "
                "can be worse; exchange GOOD and BAD, or choose another --metric"
            )
        if good.iteration != bad.iteration:
            print(
                f"pulsetrain: {good.folder} was judged at iteration {good.iteration:,}, {bad.folder} at "
                f"{bad.iteration:,}: their lengths differ; choose --iterations at which both validate",
                file=sys.stderr,
            )
        self.pair.check_difference(good.value, bad.value, self.until, self.noise)
        self._good, self._bad = good.value, bad.value

    def check(self, changes: Sequence[Change]) -> Verdict:
        """Run the good configuration with some of the changes, unless that has been done."""
        name = self._name_of(changes)
        what = {"good": "none", "bad": f"all {len(changes)}"}.get(name) or ", ".join(each.name for each in changes)
        return self.add(name, what, lambda folder: self._train(folder, changes))

    def trial_of(self, changes: Sequence[Change]) -> Trial:
        """The run with these changes, which has ended."""
        return next(each for each in self.all if each.name == self._name_of(changes))

    def _name_of(self, changes: Sequence[Change]) -> str:
        if not changes:
            return "good"
        if len(changes) == len(self.pair.changes):
            return "bad"
        return "-".join(["with", *(str(self.pair.changes.index(each) + 1) for each in changes)])

    def add(self, name: str, what: str, start: Callable[[Path], str]) -> Verdict:
        """Judge the run in the folder of this name, which is trained first unless it has ended."""
        known = next((each for each in self.all if each.name == name), None)
        if known is not None:
            return known.verdict
        folder = self.into / name
        mark = folder.with_name(f"{name}.ended")  # a run that was stopped by a signal has an end in its log, too
        error = ""
        if not mark.exists() and not (error := start(folder)):
            mark.touch()
        summary = None if error else summarize(folder)
        value = None if summary is None else summary.last.get(self.pair.metric)
        if not error and value is None:
            error = f"it has recorded no {self.pair.metric}"
        iteration = None if summary is None else summary.iteration
        trial = Trial(name, folder, what, value, self._verdict(value), error, iteration)
        self.all.append(trial)
        self.ended(trial)
        return trial.verdict

    def _verdict(self, value: float | None) -> Verdict:
        """Bad if it is nearer to the bad control than to the good one: by ratios where a value has grown."""
        if value is None:
            return Verdict.UNRESOLVED
        if self._good is None or self._bad is None:  # a control
            return Verdict.BAD if self.all else Verdict.GOOD
        sign = 1 if self.pair.mode == "min" else -1
        if math.isnan(value) or sign * value == math.inf:
            return Verdict.BAD
        good, bad = self._good, self._bad
        if not math.isfinite(bad):  # which the short run is not
            return Verdict.GOOD
        middle = math.sqrt(good * bad) if 0 < good < bad else (good + bad) / 2
        return Verdict.BAD if sign * (value - middle) >= 0 and sign * (value - good) > self.noise else Verdict.GOOD

    def _train(self, folder: Path, changes: Sequence[Change]) -> str:
        good, bad = self.pair.configs
        settings = settings_with(good, bad, changes)
        settings["handlers"] = handlers_until(self.until, settings.get("handlers", good.get("handlers") or ()))
        if "run_dir" in (good.get("training") or {}) or "training.run_dir" in settings:
            settings["training.run_dir"] = None
        words = [f"--{name}={yaml_word(value)}" for name, value in settings.items()]
        if not self.pair.start:
            return self.run(folder, ["train", str(self.pair.good / "config.yaml"), "--run", str(folder), *words])
        if "parent" not in read_run_file(folder):
            shutil.rmtree(folder, ignore_errors=True)  # what a killed process has left of the fork
            at = ["fork", str(self.pair.good), "--at", str(self.pair.start), "--into", str(folder)]
            if error := self.run(folder, [*at, *words]):
                shutil.rmtree(folder, ignore_errors=True)
                return error
        return self.run(folder, ["train", str(folder / "config.yaml"), "--run", str(folder)])

    def run(self, folder: Path, words: Sequence[str], *, cwd: Path | None = None, paths: Sequence[Path] = ()) -> str:
        """Run a command in a process of its own, on as many processes as the good run; returns the error, or "".

        Args:
            folder: the run folder; what the command prints is written beside it.
            words: after `pulsetrain`.
            cwd: the folder in which it runs.
            paths: where it looks for modules first.

        Raises:
            KeyboardInterrupt: the command was stopped, or this process was, which stops the command first.
        """
        count = self.pair.processes[0]
        options = ["--resume", "latest"] if words[0] == "train" else []
        options += [f"--launch.nproc={count}"] if count > 1 else []
        environment = dict(os.environ)
        if paths:
            known = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
            environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *known])
        output = folder.with_name(f"{folder.name}.txt")
        with output.open("ab") as out:
            before = out.tell()
            command = [sys.executable, "-m", "pulsetrain", *words, *options]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd, env=environment,
                pass_fds=(self._lock,),
            )  # fmt: skip
            try:
                status = process.wait()
            except BaseException:
                process.terminate()  # with a checkpoint; after a Ctrl-C it is stopping already
                process.wait()
                raise
        if status in TRAINED:
            return ""
        if status in STOPPED or -status in (signal.SIGINT, signal.SIGTERM):
            raise KeyboardInterrupt  # the same command continues
        if status < 0:
            return f"it was ended by signal {-status}{', perhaps for want of memory' * (status == -signal.SIGKILL)}"
        return error_in(output.read_bytes()[before:].decode(errors="replace"))


def handlers_until(iteration: int, handlers: Sequence[Any]) -> list[Any]:
    """The handlers of a short run: its end is added, and none has a folder other than the run folder.

    In a folder of the good run, the short run would resume from the good one's checkpoints, and write over them.
    """
    found = []
    for each in handlers:
        if isinstance(each, dict) and isinstance(arguments := each.get("init_args"), dict):
            each = {**each, "init_args": {name: value for name, value in arguments.items() if name != "folder"}}
        found.append(each)
    return [*found, {"class_path": HANDLER, "init_args": {"iteration": iteration}}]


def _read(state: Path) -> object:
    try:
        return json.loads(state.read_bytes())
    except ValueError:  # not written by this version
        return None
