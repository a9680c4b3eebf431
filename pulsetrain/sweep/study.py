"""Optuna's part of a sweep: the study in its storage, samplers, pruners, and the values of a trial."""

from __future__ import annotations

import inspect
import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optional import load_optional
from pulsetrain.handlers.run_files.redaction import REDACTED, redacted
from pulsetrain.sweep.population import values_of
from pulsetrain.sweep.spec import Spec, changed_entries, described

__all__ = ["adopted", "draw", "drawing_alone", "front_of", "open_study", "set_sampler", "storage_errors"]

_FITTING = {bool: (bool,), int: (int,), float: (int, float)}  # by the type of an option's default
_SWEEP = "sweep"  # what a study on a server notes: the entries that its trials depend on


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
    has_begun = read_only or (Path(spec.folder) / "trials").exists()
    if spec.storage is None and has_begun and not file.is_file():
        raise ConfigurationError(f"{spec.folder}: has no sweep.sqlite; the sweep has not begun, or the file was lost")
    path = quote(quote(str(file)))  # SQLAlchemy decodes it once, and SQLite again
    url = f"sqlite:///file:{path}?mode={'ro' if read_only else 'rwc'}&uri=true"
    # a connection ends with its transaction: none is left open when the study is dropped
    options: dict[str, Any] = {"poolclass": load_optional("sweep", "sqlalchemy.pool", "sweep").NullPool}
    if spec.storage is None:
        options["connect_args"] = {"timeout": 60}
    else:
        load_optional("sweep: a PostgreSQL storage", "psycopg", "postgresql")
        url = spec.storage.replace("postgresql://", "postgresql+psycopg://", 1)
    sampler, pruner = (None, None) if read_only else (_sampler(optuna, spec, 0), _pruner(optuna, spec))
    with storage_errors(spec):
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=options)
        except RuntimeError as error:  # made by another version of Optuna, or of its tables
            raise ConfigurationError(f"{spec.folder}: the storage does not fit the installed Optuna: {error}") from None
        if not create:
            try:
                return optuna.load_study(study_name=spec.study, storage=storage, sampler=sampler, pruner=pruner)
            except KeyError as error:
                raise ConfigurationError(f"{spec.folder}: its storage has no study {spec.study!r}") from error
        directions = ["minimize" if mode == "min" else "maximize" for mode in spec.mode]
        study = optuna.create_study(
            study_name=spec.study, storage=storage, sampler=sampler, pruner=pruner, directions=directions,
            load_if_exists=True,
        )  # fmt: skip
        if spec.storage is not None:
            _check_sweep(study, spec)
        return study


def _check_sweep(study: Any, spec: Spec) -> None:
    """Refuse a study of another sweep, which had the same name; a population's members are all in one folder."""
    now = json.loads(json.dumps(described(spec), default=str))  # as the server keeps it
    del now["config"]
    if spec.sampler == "population":
        now["folder"] = str(Path(spec.folder).resolve())
    noted = study.user_attrs.get(_SWEEP)
    if noted is None:
        study.set_user_attr(_SWEEP, now)
    elif changed := changed_entries(noted, now):
        raise ConfigurationError(
            f"study: the server has the study {spec.study!r} of a sweep with other values of {', '.join(changed)}; "
            "choose another name in the entry study"
        )


@contextmanager
def storage_errors(spec: Spec) -> Iterator[None]:
    """Turn the errors of the storage into one that says which storage it is.

    Raises:
        ConfigurationError: the storage cannot be read or written.
    """
    try:
        yield
    except Exception as error:
        by = type(error).__module__.partition(".")[0]
        if by not in ("sqlalchemy", "psycopg") and type(error).__name__ != "StorageInternalError":
            raise
        cause = error.__cause__ or error
        where, text = "sweep.sqlite", str(getattr(cause, "orig", cause)).partition("\n")[0]
        is_damaged = spec.storage is None and any(each in text for each in ("not a database", "malformed"))
        remedy = "restore it, or delete the folder to begin again" if is_damaged else "put that right"
        if spec.storage is not None:
            where, text = "the PostgreSQL server", _without_password(text, spec.storage) or type(error).__name__
        raise ConfigurationError(
            f"{spec.folder}: {where} cannot be read or written: {text}; {remedy}, and give the same command again"
        ) from None


def _without_password(text: str, url: str) -> str:
    """The driver's text without the URL's password, nor the parts in which the driver reads one that is not quoted.

    >>> _without_password("failed to resolve host 'x7@db'", "postgresql://me:pw@x7@db/sweeps")
    "failed to resolve host '[redacted]@db'"
    """
    found = re.match(r"[^:]+://[^:/@]*:(.*)@", url, re.DOTALL)
    passwords = [found[1]] if found else []
    passwords += re.findall(r"[?&]\w*pass\w*=([^&]*)", url)
    parts = {part for each in passwords for part in (each, unquote(each), *re.split(r"[@:/?#]", each)) if part}
    for part in sorted(parts, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", REDACTED, text)
    return redacted(text)


@contextmanager
def drawing_alone(spec: Spec) -> Iterator[None]:
    """While no other process draws a trial of the study on the server."""
    psycopg = load_optional("sweep: a PostgreSQL storage", "psycopg", "postgresql")
    url = str(spec.storage).replace("postgresql+psycopg://", "postgresql://", 1)
    with psycopg.connect(url, autocommit=True) as connection:  # the lock ends with the connection
        connection.execute("SELECT pg_advisory_lock(%s)", (zlib.crc32(spec.study.encode()),))
        yield


def adopted(study: Any, number: int) -> Any:
    """A trial that the storage has, to be continued or reported to."""
    optuna = load_optional("sweep", "optuna", "sweep")
    found = next(each for each in study.get_trials(deepcopy=False) if each.number == number)
    return optuna.trial.Trial(study, found._trial_id)  # noqa: SLF001  # there is no public way


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
    chosen, parameters = {**own, **(options or {})}, inspect.signature(kind).parameters
    for name, value in chosen.items():  # Optuna looks at some of them only when a trial begins
        default = parameters[name].default if name in parameters else None
        if type(default) is int and isinstance(value, float) and value.is_integer():  # 1e3 in YAML
            chosen[name] = int(value)
        elif type(default) in _FITTING and not isinstance(value, _FITTING[type(default)]):
            raise ConfigurationError(f"{entry} {kind.__name__}: {name}={value!r}: needs a value such as {default}")
    try:
        return kind(**chosen)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{entry} {kind.__name__}: {error}; see Optuna's documentation of it") from error
