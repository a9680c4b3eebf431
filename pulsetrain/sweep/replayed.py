"""Trials answered from the logs of recorded runs: only arguments of handlers that end a run vary."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from pulsetrain.config import TrainingConfig
from pulsetrain.configuration.assemble import BACKENDS, STRATEGIES
from pulsetrain.configuration.names_0_1 import current_path
from pulsetrain.configuration.parse import differences
from pulsetrain.configuration.sections import NAMED
from pulsetrain.configuration.shipped_handlers import HANDLERS
from pulsetrain.configuration.yaml_text import read_yaml
from pulsetrain.engine import Events, Every
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.reproduce.what_if import check_apart, make_handler, replay_to
from pulsetrain.runs.index import RunIndex
from pulsetrain.runs.summary import Status, check_run, summarize
from pulsetrain.sweep.spec import Range, Spec
from pulsetrain.sweep.trials import Outcome, handlers_of, name_of, outcome_of, replayed_run

__all__ = ["check_replay", "notable_differences", "recorded_runs", "replayed_outcome"]

REPLAYABLE = ("EarlyStopping", "LossSpikeGuard", "NaNGuard", "StepLimit", "TimeLimit")
"""Shipped handlers that only observe a run until they end it."""

_NOTED = ("handlers", "metrics", *(f"training.{name}" for name in (
    "activation_checkpointing", "activation_offload", "compile", "device", "early_stopping_patience",
    "log_every_n_steps", "log_strategy_metrics", "optimizer_offload", "progress", "run_dir", "save_every_n_epochs",
    "seed",
)))  # fmt: skip
"""Settings in which a replayed run may differ from the configuration, with a note; others change what is trained."""


_LENGTHS = ("max_epochs", "max_iterations")
"""Bounds that a replayed run may exceed: where the configuration's run would have ended is in the log."""


def _as_written(default: object) -> object:
    """A default of a setting as a configuration would give it."""
    if isinstance(default, Every):
        return {name: value for name, value in asdict(default).items() if value is not None}
    return list(default) if isinstance(default, tuple) else default


_SHORT_NAMES = {name: getattr(made, "__name__", name) for name, made in {**STRATEGIES, **BACKENDS}.items()}
"""The names of the shipped strategies' and backends' classes, by the names that a configuration may use."""

_DEFAULTS = {each.name: _as_written(each.default) for each in fields(TrainingConfig) if each.default is not MISSING}


def check_replay(spec: Spec) -> None:
    """Check that recorded runs can answer.

    Raises:
        ConfigurationError: a setting varies that changes what is trained, an entry needs runs that are trained, or a
            run was trained with other settings than the configuration has.
        RunFolderError: a run to be replayed is not there, or its archive cannot be read.
        RecordingError: it has no log.
    """
    for setting, handler in _varied(spec).items():
        if handler not in REPLAYABLE and (not handler or handler in HANDLERS):
            raise ConfigurationError(
                f"replay: {setting} changes what is trained, and recorded runs cannot answer that; only arguments of "
                f"{', '.join(REPLAYABLE)} and of your own handlers may vary, such as handlers.EarlyStopping.patience; "
                "leave replay out, or add --train"
            )
    if spec.sampler == "population" or spec.pruner != "none":
        chosen = "pruner" if spec.pruner != "none" else "sampler"
        raise ConfigurationError(
            f"replay: {chosen}={getattr(spec, chosen)!r} acts on runs that train, and recorded runs are not trained; "
            f"leave out replay or {chosen}, or add --train"
        )
    for run in map(replayed_run, spec.replay):
        check_run(Path(run))
        EventLog(run)
        if other := _differences(spec, run)[0]:
            raise ConfigurationError(
                f"replay: {run} was not trained as {spec.config} says, and cannot answer for it: {'; '.join(other)} "
                "(configuration -> run); set the configuration to what the run has, replay other runs, or add --train"
            )
    first = {name: each.low if isinstance(each, Range) else each[0] for name, each in spec.space.items()}
    for entry in _handlers(spec, first):  # an argument may have no default
        check_apart(entry, _location(entry), partial(make_handler, entry, _location(entry)))


def notable_differences(spec: Spec) -> Iterator[str]:
    """How each replayed run differs from the configuration, in settings for which `check_replay` does not refuse it."""
    for run in map(replayed_run, spec.replay):
        if not _config_of(run):
            yield f"{run} has no readable config.yaml: whether it was trained as {spec.config} says is not known"
        elif noted := _differences(spec, run)[1]:
            yield f"{run} differs from {spec.config} in {'; '.join(noted)} (configuration -> run)"


def _differences(spec: Spec, run: os.PathLike[str]) -> tuple[list[str], list[str]]:
    """The settings in which a run was trained otherwise than the configuration says, and those that are only noted.

    A longer run is noted: up to the configuration's length it is the same, unless a schedule depends on the length. A
    shorter one does not know what would have followed.
    """
    base, config, varied = dict(spec.base or {}), _config_of(run), set(_varied(spec).values())
    if not config:
        return [], []
    here, there = (_compared({"backend": "torch", **each}, base, varied) for each in (base, config))
    longer = {f"training.{name}" for name in _LENGTHS if _is_longer(here["training"], there["training"], name)}
    other, noted = list[str](), list[str]()
    for text in differences(_by_name(here), _by_name(there)):
        setting = text.partition(":")[0]
        is_noted = setting in longer or any(f"{setting}.".startswith(f"{each}.") for each in _NOTED)
        (noted if is_noted else other).append(text)
    return other, noted


def _is_longer(here: dict[str, Any], there: dict[str, Any], bound: str) -> bool:
    before, now = here.get(bound), there.get(bound)
    return isinstance(before, int | float) and isinstance(now, int | float) and now > before


def _by_name(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "handlers": {name_of(each): each for each in config["handlers"]}}


def replayed_outcome(spec: Spec, params: dict[str, Any]) -> Outcome:
    """What the recorded runs say about the values of a trial: the means of the metrics, and the iterations of all.

    Raises:
        PulsetrainError: a run has no such metric, or ended before these values would have ended it.
    """
    handlers = _handlers(spec, params)
    found = [_outcome(spec, replayed_run(run), handlers) for run in spec.replay]
    values = tuple(math.fsum(each) / len(found) for each in zip(*(one.values for one in found), strict=True))
    return Outcome(values, "", sum(one.iteration for one in found))


def recorded_runs(spec: Spec) -> list[str] | None:
    """The completed runs of the same configuration, from which the sweep could be answered by replay.

    They are searched where `pulsetrain train` puts them. The varied handlers, and a seed that the configuration leaves
    open, may differ. None if the sweep has to train.
    """
    varied = set(_varied(spec).values())
    if not varied <= set(REPLAYABLE) or spec.sampler == "population":
        return None
    base = dict(spec.base or {})
    folder = Path(str(base["run"])).parent
    if not folder.is_dir():
        return []
    wanted = _compared(base, base, varied)
    found = [run.folder for run in RunIndex(folder).summaries() if run.status is Status.COMPLETED]
    alike = [run for run in found if _compared(_config_of(run), base, varied) == wanted]
    return [str(run) for run in alike]


def _compared(config: dict[str, Any], base: dict[str, Any], without: set[str]) -> dict[str, Any]:
    """What has to be the same in the sweep's configuration and in that of a recorded run."""
    training = {**_DEFAULTS, **(config.get("training") or {})}
    if (base.get("training") or {}).get("seed") is None:
        training.pop("seed", None)
    handlers = [_named(each) for each in config.get("handlers") or () if name_of(each) not in without]
    named = {section: _named(config[section]) for section in NAMED if section in config}
    compared: dict[str, Any] = redacted({**config, **named, "run": "", "training": training, "handlers": handlers})
    return compared


def _named(part: Any) -> Any:
    """A part that names a class, in the one of its forms that every other one is brought to.

    >>> _named("supervised") == _named({"class_path": "pulsetrain.SupervisedStrategy", "init_args": {}})
    True
    """
    if not isinstance(part, str) and not (isinstance(part, dict) and "class_path" in part):
        return part
    given = _with_arguments(part)
    path = current_path(str(given["class_path"]))
    module, _, name = path.rpartition(".")
    if module.partition(".")[0] in ("", "pulsetrain") and (name in _SHORT_NAMES or name in HANDLERS):
        path = _SHORT_NAMES.get(name, name)
    return {**given, "class_path": path, "init_args": given["init_args"] or {}}


def _config_of(run: os.PathLike[str]) -> dict[str, Any]:
    try:
        found = read_yaml(Path(run) / "config.yaml")
    except ConfigurationError:  # made without a configuration, or damaged
        return {}
    return found if isinstance(found, dict) else {}


def _varied(spec: Spec) -> dict[str, str]:
    """Setting -> the name of the handler whose argument it is; "" for another setting."""
    parts = {setting: setting.split(".") for setting in spec.space}
    return {name: part[1] if part[0] == "handlers" and len(part) > 2 else "" for name, part in parts.items()}


def _handlers(spec: Spec, params: dict[str, Any]) -> list[dict[str, Any]]:
    """The varied handlers of the configuration, each with class_path and init_args."""
    varied = set(_varied(spec).values())
    found = [each for each in handlers_of(spec, params) if name_of(each) in varied]
    return list(map(_with_arguments, found))


def _with_arguments(handler: Any) -> dict[str, Any]:
    return {"init_args": {}, **({"class_path": handler} if isinstance(handler, str) else handler)}


def _location(handler: dict[str, Any]) -> str:
    return f"handlers.{name_of(handler)}"


def _outcome(spec: Spec, run: os.PathLike[str], handlers: list[dict[str, Any]]) -> Outcome:
    log = EventLog(run)
    replay = Replay(log, obey_terminate=True)
    stop = replay_to(replay, [make_handler(each, _location(each)) for each in handlers])
    ended = summarize(Path(run))
    end = _end_of(spec, log)
    if end is not None and end < (ended.iteration if stop is None else stop.iteration):
        if any(_validations(log)) and not any(_validations(log, end)):
            raise RecordingError(
                f"{run}: was not validated at iteration {end}, where a run of {spec.config} ends, and these values "
                "would not have ended it until then; replay a run of that length, or add --train"
            )
        return outcome_of(spec, run, upto=end)
    if stop is None and ended.status is not Status.COMPLETED:
        why = f" ({ended.reason})" if ended.reason else ""
        raise RecordingError(
            f"{run}: is {ended.status.value} at iteration {ended.iteration}{why}, and these values would not have "
            "ended it until then; replay a run that was not ended early, or add --train"
        )
    return outcome_of(spec, run, stop)


def _validations(log: EventLog, at: int | None = None) -> Iterator[LoggedEvent]:
    """Those of the run, or of an iteration; a run by rollouts may have none."""
    return log.read(event=Events.VALIDATION_COMPLETED.value, iteration=(at, at))


def _end_of(spec: Spec, log: EventLog) -> int | None:
    """The iteration at which a run of the configuration ends; None if the log of a replayed one does not say it."""
    epochs, iterations = (({**_DEFAULTS, **((spec.base or {}).get("training") or {})}).get(name) for name in _LENGTHS)
    if iterations is not None:
        return int(iterations)
    found = log.read(engine=log.main_engine, event=Events.EPOCH_COMPLETED.value, epoch=(epochs, epochs))
    last = None if epochs is None else next(found, None)
    return None if last is None else last.iteration
