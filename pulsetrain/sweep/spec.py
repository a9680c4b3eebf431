"""SWEEP.yaml: what a sweep varies, how it draws the values, and what it judges them by."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pulsetrain.configuration.messages import unknown
from pulsetrain.configuration.parse import differences, read_config
from pulsetrain.configuration.yaml_text import dump_yaml, read_yaml
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.metrics import infer_mode
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = [
    "ENTRIES", "SAMPLERS", "Range", "Spec", "changed_entries", "described", "differing", "read_saved", "read_spec",
    "write_saved",
]  # fmt: skip

SAMPLERS = ("grid", "random", "tpe", "cmaes", "nsga2", "population")
PRUNERS = ("none", "median", "asha", "hyperband")
SAVED = "sweep.yaml"
CHANGEABLE = ("trials", "workers")  # of a sweep that has begun
MOST_WORKERS = 4  # for each processor
STORAGE = "PULSETRAIN_SWEEP_STORAGE"  # the environment variable with the URL of a storage that is not SQLite


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; whole numbers if both ends are.

    Args:
        low: the least value.
        high: the greatest value.
        log: whether values are drawn evenly in the logarithm.
        step: the distance between two values, counted from `low`.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def whole(self) -> bool:
        """Whether the values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int) and isinstance(self.step, int | None)


@dataclass(frozen=True)
class Spec:
    """A sweep, checked.

    Args:
        config: the configuration that each trial changes; found beside the sweep's file.
        folder: the sweep's folder; by default `sweeps/NAME`, after its file.
        space: setting -> its values: a list, or a range with low and high.
        metric: what the trials are judged by; a list for several.
        mode: "min" or "max", for each metric; by default as a handler of the configuration says, or the metric's name.
        sampler: grid, random, tpe, cmaes, nsga2 or population.
        sampler_options: keywords of Optuna's sampler.
        pruner: none, median, asha or hyperband.
        pruner_options: keywords of Optuna's pruner.
        trials: their number; a grid has by default all combinations, and other samplers need it.
        workers: trials that train at the same time.
        seed: of the sampler.
        value: the metric of a trial: that of its "best" validation, or of its "last".
        storage: URL of a PostgreSQL server; by default an SQLite file in the folder.
        study: name of the study in the storage; by default that of the folder.
        population: runs of a population.
        interval: iterations of one generation of a population, which needs it.
        generations: how often the runs of a population are trained and replaced.
        replay: runs whose logs answer instead of training, if only arguments of handlers that end a run vary; folders
            or archives.
        base: the configuration as it was when the sweep began.
    """

    config: str  # an absolute path
    folder: str
    space: Mapping[str, Range | tuple[Any, ...]]
    metric: tuple[str, ...]
    mode: tuple[str, ...]
    sampler: str = "tpe"
    sampler_options: Mapping[str, Any] | None = None
    pruner: str = "none"
    pruner_options: Mapping[str, Any] | None = None
    trials: int | None = None
    workers: int = 1
    seed: int = 0
    value: str = "best"
    storage: str | None = None
    study: str = "sweep"
    population: int = 8
    interval: int | None = None
    generations: int = 4
    replay: tuple[str, ...] = ()
    base: Mapping[str, Any] | None = None

    @property
    def directions(self) -> dict[str, str]:
        """Metric -> "min" or "max"."""
        return dict(zip(self.metric, self.mode, strict=True))

    @property
    def combinations(self) -> list[dict[str, Any]]:
        """Every combination of the values, the last setting varying fastest."""
        names, values = list(self.space), [values for values in self.space.values() if isinstance(values, tuple)]
        return [dict(zip(names, each, strict=True)) for each in itertools.product(*values)]

    @property
    def total(self) -> int:
        """The number of trials."""
        if self.sampler == "population":
            return self.population * self.generations
        if self.sampler == "grid":
            size = math.prod(len(values) for values in self.space.values() if isinstance(values, tuple))
            return size if self.trials is None else min(size, self.trials)
        assert self.trials is not None
        return self.trials


# what a SWEEP.yaml may hold; the options of sampler and pruner are in their own mappings there
ENTRIES = tuple(each.name for each in fields(Spec) if each.name not in ("base", "sampler_options", "pruner_options"))


def read_spec(path: Path, overrides: Mapping[str, Any] | None = None) -> Spec:
    """Read and check a SWEEP.yaml. `config` is found beside it; `folder` and `replay` in the current folder.

    Args:
        path: the file.
        overrides: entries that replace the file's.

    Raises:
        ConfigurationError: the file cannot be read, or an entry cannot be used; the message names it.
    """
    given = {**_read(path), **(overrides or {})}
    for name in given:
        if name not in ENTRIES:
            raise unknown(f"{path}: {name}", "entry", name, ENTRIES)
    for name in ("config", "space", "metric"):
        if not given.get(name):
            lacks = f"is empty: {given[name]!r}" if name in given else "is missing"
            raise ConfigurationError(f"{path}: the entry {name!r} {lacks}; see docs/sweep.md")
    for name in ("config", "folder", "study", "storage"):
        if not isinstance(given.get(name), str | None):
            raise ConfigurationError(f"{path}: {name}={given[name]!r}: needs text")
    config = path.parent / str(given["config"])
    base = read_config(config, {})
    space = _space(path, given["space"])
    sampler, sampler_options = _chosen(path, "sampler", given.get("sampler", "tpe"), SAMPLERS)
    pruner, pruner_options = _chosen(path, "pruner", given.get("pruner") or "none", PRUNERS)
    metric, mode = _judged(path, given["metric"], given.get("mode"), base)
    numbers = {
        name: _count(path, name, given[name])
        for name in ("trials", "workers", "population", "interval", "generations")
        if given.get(name) is not None
    }
    seed = given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigurationError(f"{path}: seed={seed!r}: needs a whole number of at least 0")
    value = given.get("value", "last" if sampler == "population" else "best")  # a fork's log repeats its parent's last
    if value not in ("best", "last"):
        raise unknown(f"{path}: value", "choice", value, ("best", "last"))
    replay = given.get("replay") or []
    replay = [replay] if isinstance(replay, str) else replay
    if not isinstance(replay, list) or not all(isinstance(each, str) for each in replay):
        raise ConfigurationError(f"{path}: replay={replay!r}: needs a run folder or its archive, or a list of them")
    if sampler == "population":
        if "trials" in numbers:
            raise ConfigurationError(f"{path}: trials: a population trains population x generations runs; leave it out")
    elif own := [name for name in ("population", "interval", "generations") if name in numbers]:
        raise ConfigurationError(f"{path}: {own[0]}: is for the sampler population, not {sampler}; leave it out")
    spec = Spec(
        str(config.resolve()), str(given.get("folder") or f"sweeps/{path.stem}"), space, metric, mode, sampler,
        sampler_options, pruner, pruner_options, **numbers, seed=seed, value=value,
        storage=given.get("storage") or os.environ.get(STORAGE) or None,
        study=str(given.get("study") or Path(str(given.get("folder") or path.stem)).name),
        replay=tuple(replay), base=base,
    )  # fmt: skip
    _check_together(path, spec)
    return spec


def _check_together(path: Path, spec: Spec) -> None:
    if (name := next((each for each in spec.space if each.partition(".")[0] == "run"), None)) is not None:
        raise ConfigurationError(
            f"{path}: space.{name}: the sweep gives each trial its run folder; vary other settings"
        )
    ranges = [name for name, values in spec.space.items() if isinstance(values, Range)]
    if spec.sampler == "grid" and ranges:
        raise ConfigurationError(
            f"{path}: space.{ranges[0]}: a grid needs a list of values, not a range; list them, or choose the sampler "
            "random or tpe"
        )
    if spec.sampler == "cmaes" and len(ranges) < len(spec.space):
        name = next(name for name in spec.space if name not in ranges)
        raise ConfigurationError(f"{path}: space.{name}: cmaes needs ranges of numbers, not a list; choose tpe")
    if spec.sampler not in ("grid", "population") and spec.trials is None:
        raise ConfigurationError(
            f"{path}: trials: the sampler {spec.sampler} needs their number; only a grid has an end"
        )
    if len(spec.metric) > 1 and spec.sampler in ("cmaes", "population"):
        raise ConfigurationError(
            f"{path}: metric: {spec.sampler} takes one metric, not {len(spec.metric)}; choose nsga2"
        )
    if len(spec.metric) > 1 and spec.pruner != "none":
        raise ConfigurationError(f"{path}: pruner={spec.pruner!r}: pruners compare one metric; leave the pruner out")
    if spec.sampler == "population":
        if spec.interval is None:
            raise ConfigurationError(f"{path}: interval: a population needs it, the iterations of one generation")
        if spec.population < 4:
            raise ConfigurationError(f"{path}: population={spec.population}: needs at least 4, whose worst is replaced")
        if spec.pruner != "none":
            raise ConfigurationError(
                f"{path}: pruner={spec.pruner!r}: a population replaces its worst by itself; use none"
            )
        if not ranges or len(ranges) < len(spec.space):
            raise ConfigurationError(f"{path}: space: a population perturbs ranges of numbers; give low and high")
    most = MOST_WORKERS * (os.cpu_count() or 1)
    if spec.workers > most:
        raise ConfigurationError(
            f"{path}: workers={spec.workers}: this machine has {os.cpu_count()} processors; use at most {most}"
        )
    if spec.storage is not None and not str(spec.storage).startswith(("postgresql://", "postgresql+psycopg://")):
        kind = str(spec.storage).partition(":")[0]
        raise ConfigurationError(f"{path}: storage: {kind} is not supported; give a postgresql:// URL, or leave it out")


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigurationError(f"{path}: is a folder; give the sweep's YAML file, or --status to see its trials")
    given = read_yaml(path)
    if not isinstance(given, dict):
        raise ConfigurationError(f"{path}: needs the entries config, space and metric; see docs/sweep.md")
    return given


def _space(path: Path, given: object) -> dict[str, Range | tuple[Any, ...]]:
    if not isinstance(given, dict):
        raise ConfigurationError(f"{path}: space={given!r}: needs a mapping of setting: values")
    return {str(name): _values(f"{path}: space.{name}", values) for name, values in given.items()}


def _values(place: str, given: object) -> Range | tuple[Any, ...]:
    if isinstance(given, list):
        if not all(isinstance(each, str | int | float | bool | None) for each in given):
            raise ConfigurationError(f"{place}={given!r}: the values have to be numbers, texts, true, false or null")
        if not given or len(set(given)) < len(given):  # equal are also 1 and 1.0, and 1 and true
            raise ConfigurationError(f"{place}={given!r}: needs at least one value, each once")
        return tuple(given)
    if not isinstance(given, dict) or not {"low", "high"} <= given.keys():
        raise ConfigurationError(f"{place}={given!r}: needs a list of values, or low and high: {{low: 1e-4, high: 1}}")
    for name in given:
        if name not in ("low", "high", "log", "step"):
            raise unknown(f"{place}.{name}", "entry", name, ("low", "high", "log", "step"))
    low, high, log, step = given["low"], given["high"], given.get("log", False), given.get("step")
    for name, value in (("low", low), ("high", high), *([("step", step)] if step is not None else [])):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigurationError(f"{place}.{name}={value!r}: needs a finite number")
    if not isinstance(log, bool):
        raise ConfigurationError(f"{place}.log={log!r}: needs true or false")
    if low >= high:
        raise ConfigurationError(f"{place}: low={low}, high={high}: low has to be below high")
    if log and low <= 0:
        raise ConfigurationError(
            f"{place}.low={low}: a logarithmic range has to begin above 0; leave log out or raise low"
        )
    if step is not None and (log or not 0 < step <= high - low):
        raise ConfigurationError(f"{place}.step={step}: has to be above 0, within the range, and without log")
    return Range(low, high, log, step)


def _chosen(path: Path, entry: str, given: object, choices: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {}
    if isinstance(given, dict):
        options = {str(name): value for name, value in given.items() if name != "name"}
        given = given.get("name")
    if given not in choices:
        raise unknown(f"{path}: {entry}={given!r}", entry, given, choices)
    return str(given), options


def _judged(
    path: Path, given: object, mode: object, base: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The metrics, and whether smaller or larger values of each are better.

    As given; else as a handler of the configuration that judges the same metric says; else as the name says.
    """
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(each, str) and each for each in names):
        raise ConfigurationError(
            f"{path}: metric={given!r}: needs a metric's name, such as val/loss, or a list of them"
        )
    if len(set(names)) < len(names):
        raise ConfigurationError(f"{path}: metric={given!r}: names a metric twice")
    modes = mode if isinstance(mode, list) else [mode] * len(names)
    if len(modes) != len(names):
        raise ConfigurationError(f"{path}: mode={mode!r}: needs one for each of the {len(names)} metrics")
    found = []
    for name, each in zip(names, modes, strict=True):
        each = (_mode_of_handlers(path, name, base) or infer_mode(name)) if each is None else each
        if each is None:
            raise ConfigurationError(f"{path}: mode: whether smaller or larger values of {name} are better does not "
                                     "follow from its name; give min or max")  # fmt: skip
        if each not in ("min", "max"):
            raise unknown(f"{path}: mode={each!r}", "mode", each, ("min", "max"))
        found.append(str(each))
    return tuple(names), tuple(found)


def _mode_of_handlers(path: Path, metric: str, base: Mapping[str, Any]) -> str | None:
    """What the arguments of the configuration's handlers, such as EarlyStopping, say about the metric."""
    modes: dict[str, str] = {}  # mode -> the handler that says so
    for each in base.get("handlers") or ():
        arguments = each.get("init_args") if isinstance(each, dict) else None
        if isinstance(arguments, dict) and arguments.get("metric") == metric and arguments.get("mode") is not None:
            modes[str(arguments["mode"])] = str(each.get("class_path"))
    if len(modes) > 1:
        said = " and ".join(f"{handler} {mode}" for mode, handler in modes.items())
        raise ConfigurationError(f"{path}: mode: the handlers disagree about {metric}: {said}; give min or max")
    return next(iter(modes), None)


def _count(path: Path, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{path}: {name}={value!r}: needs a whole number of at least 1")
    return value


def write_saved(spec: Spec) -> None:
    """Write the checked sweep into its folder; the storage's URL, which may hold a password, stays out."""
    values = redacted(asdict(spec))
    values["storage"] = None if spec.storage is None else "postgresql"
    text = dump_yaml(values)
    replace_file(Path(spec.folder) / SAVED, text.encode())


def read_saved(folder: Path) -> Spec:
    """The sweep that `write_saved` has written; a storage other than SQLite comes from the environment.

    Raises:
        ConfigurationError: the file cannot be read, or the environment lacks the storage's URL.
    """
    given = _read(folder / SAVED)
    if "space" in given and not {"mode", "replay"} & given.keys():  # which each one that was written has
        own = f", which is {folder / str(given['folder'])}" if given.get("folder") else ""
        raise ConfigurationError(f"{folder / SAVED}: starts a sweep; give the folder that the sweep writes{own}")
    try:
        for name in ("metric", "mode", "replay"):
            given[name] = tuple(given[name])
        given["space"] = {
            name: Range(**values) if isinstance(values, dict) else tuple(values)
            for name, values in given["space"].items()
        }
        if not given["metric"] or len(given["metric"]) != len(given["mode"]):
            raise ValueError("it has no metric, or not as many modes as metrics")
        spec = Spec(**given)
        chosen: list[tuple[str, str, tuple[str, ...]]] = [
            ("sampler", spec.sampler, SAMPLERS),
            ("pruner", spec.pruner, PRUNERS),
        ]
        chosen += [("mode", each, ("min", "max")) for each in spec.mode]
        for name, value, choices in chosen:
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{folder / SAVED}: was not written by `pulsetrain sweep` of this version: {error}; restore the file, or "
            "use the version that has written it"
        ) from error
    if spec.storage is None:
        return spec
    if not os.environ.get(STORAGE):
        raise ConfigurationError(f"{folder}: its storage is a PostgreSQL server; set {STORAGE} to its URL")
    return Spec(**{**given, "storage": os.environ[STORAGE]})


def described(spec: Spec) -> dict[str, Any]:
    """The entries that may not change once a sweep has begun, without credentials."""
    return {
        name: value for name, value in redacted(asdict(spec)).items() if name not in (*CHANGEABLE, "folder", "storage")
    }


def changed_entries(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of the entries that differ, and the settings in which the configuration does.

    Args:
        before: as `described` returns it.
        now: likewise; what it lacks is not compared.
    """
    changed = [name for name in now if before.get(name) != now[name]]
    settings = "; ".join(differences(before.get("base"), now.get("base")))
    return [f"the configuration ({settings})" if name == "base" else name for name in changed]


def differing(saved: Spec, now: Spec) -> list[str]:
    """The entries in which a sweep that has begun differs from its file, except those that may change.

    A study in the folder's own SQLite file keeps its name when the folder is renamed.
    """
    if saved.storage is None and now.storage is None:
        now = replace(now, study=saved.study)
    changed = changed_entries(described(saved), described(now))
    return [*changed, "storage"] if (saved.storage is None) != (now.storage is None) else changed
