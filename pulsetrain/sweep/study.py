"""Optuna's part of a sweep: the study in its storage, samplers, pruners, and the values of a trial."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optional import load_optional
from pulsetrain.sweep.population import values_of
from pulsetrain.sweep.spec import Spec

__all__ = ["draw", "front_of", "open_study", "set_sampler"]


def open_study(spec: Spec, *, create: bool = True, read_only: bool = False) -> Any:
    """The sweep's study.

    Args:
        spec: the sweep.
        create: whether to make a study that does not exist.
        read_only: whether the folder's SQLite file is left as it is; nothing can be stored then.

    Raises:
        ConfigurationError: Optuna is not installed, an option does not exist, or the storage cannot be opened.
    """
    optuna = load_optional("sweep", "optuna", "sweep")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    file = Path(spec.folder).resolve() / "sweep.sqlite"
    url = f"sqlite:///{file}"
    if read_only:
        if spec.storage is None and not file.is_file():
            raise ConfigurationError(f"{spec.folder}: has no sweep.sqlite; it has not begun, or was not copied whole")
        url = f"sqlite:///file:{quote(str(file))}?mode=ro&uri=true"
    options: dict[str, Any] = {"connect_args": {"timeout": 60}}
    if spec.storage is not None:
        load_optional("sweep: a PostgreSQL storage", "psycopg", "postgresql")
        url = spec.storage.replace("postgresql://", "postgresql+psycopg://", 1)
        # a connection ends with its transaction: none is left open when the study is dropped
        options = {"poolclass": load_optional("sweep", "sqlalchemy.pool", "sweep").NullPool}
    sampler, pruner = _sampler(optuna, spec, 0), _pruner(optuna, spec)
    try:
        storage = optuna.storages.RDBStorage(url, engine_kwargs=options)
        if create:
            directions = ["minimize" if mode == "min" else "maximize" for mode in spec.mode]
            return optuna.create_study(
                study_name=spec.study, storage=storage, sampler=sampler, pruner=pruner, directions=directions,
                load_if_exists=True,
            )  # fmt: skip
        return optuna.load_study(study_name=spec.study, storage=storage, sampler=sampler, pruner=pruner)
    except KeyError as error:
        raise ConfigurationError(f"{spec.folder}: its storage has no study {spec.study!r}") from error
    except Exception as error:  # of the database driver, whose text may hold the URL
        where = "sweep.sqlite" if spec.storage is None else "the PostgreSQL server"
        raise ConfigurationError(
            f"{spec.folder}: {where} cannot be opened ({type(error).__name__}); check the storage and its user"
        ) from None


def front_of(study: Any) -> list[int]:
    """The numbers of the trials on the Pareto front, which no other one dominates."""
    return sorted(trial.number for trial in study.best_trials)


def set_sampler(study: Any, spec: Spec, number: int) -> None:
    """Prepare the study for drawing the values of a trial.

    The sampler's generator starts from the seed and the trial's number, so that a sweep which was killed and resumed
    draws what it would have drawn.
    """
    study.sampler = _sampler(load_optional("sweep", "optuna", "sweep"), spec, number)


def draw(spec: Spec, study: Any, trial: Any) -> dict[str, Any]:
    """The trial's values, drawn now or, where an earlier process has drawn them, as stored."""
    params = {}
    for name, values in spec.space.items():
        if isinstance(values, tuple):
            params[name] = trial.suggest_categorical(name, values)
        elif values.whole:
            params[name] = trial.suggest_int(name, values.low, values.high, log=values.log, step=int(values.step or 1))
        else:
            params[name] = trial.suggest_float(name, values.low, values.high, log=values.log, step=values.step)
    return params


def _sampler(optuna: Any, spec: Spec, number: int) -> Any:
    seed = random.Random(f"{spec.seed} {number}").randrange(2**32)
    if spec.sampler in ("grid", "population"):
        return _by_number(optuna, spec)
    classes = {"random": "RandomSampler", "tpe": "TPESampler", "cmaes": "CmaEsSampler", "nsga2": "NSGAIISampler"}
    if spec.sampler == "cmaes":
        load_optional("sweep: the sampler cmaes", "cmaes", "sweep")
    return _made(getattr(optuna.samplers, classes[spec.sampler]), "sampler", spec.sampler_options, seed=seed)


def _by_number(optuna: Any, spec: Spec) -> Any:
    """A sampler whose values follow from the trial's number alone.

    Optuna's GridSampler notes a trial's cell after it has made the trial: a process killed between the two leaves a
    trial without a cell.
    """
    grid = spec.combinations if spec.sampler == "grid" else []

    class ByNumber(optuna.samplers.BaseSampler):  # type: ignore[misc]  # the package may be absent
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: object) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, name: str, distribution: object) -> Any:
            if grid:
                return grid[trial.number][name]
            return values_of(spec, trial.number, study.get_trials(deepcopy=False))[name]

    return ByNumber()


def _pruner(optuna: Any, spec: Spec) -> Any:
    classes = {
        "none": "NopPruner",
        "median": "MedianPruner",
        "asha": "SuccessiveHalvingPruner",
        "hyperband": "HyperbandPruner",
    }
    return _made(getattr(optuna.pruners, classes[spec.pruner]), "pruner", spec.pruner_options)


def _made(kind: Any, entry: str, options: Mapping[str, Any] | None, **own: Any) -> Any:
    try:
        return kind(**{**own, **(options or {})})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{entry} {kind.__name__}: {error}; see Optuna's documentation of it") from error
