"""From a configuration file to a trainer: every part named, found, checked and made."""

from __future__ import annotations

import importlib
import inspect
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

import handlers as shipped_handlers
from engine import strategies as shipped_strategies
from engine.errors import ConfigurationError, PulsetrainError, RunFolderError, unknown_name
from pulsetrain.config import TrainingConfig
from pulsetrain.run_folder import describe_run
from pulsetrain.trainer import Trainer

__all__ = ["Assembly", "assemble", "build", "read_config"]

SECTIONS = ("run", "model", "data", "strategy", "metrics", "training", "handlers")
STANDARD_HANDLERS = ("Checkpointer", "EventRecorder", "CSVLogger", "LossCurve", "ProgressBar")


@dataclass(frozen=True)
class Assembly:
    """A run ready to be trained."""

    trainer: Trainer
    folder: Path
    source: Path


def read_config(path: Path, overrides: Mapping[str, str]) -> dict[str, Any]:
    """The file's settings with the overrides in them.

    Raises:
        ConfigurationError: no such file, no YAML, an unknown section, or one that is missing.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: needs the sections {', '.join(SECTIONS)}")
    for key, text in overrides.items():
        *parents, last = key.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigurationError(f"--{key}: {parent} is no section with settings")
        place[last] = yaml.safe_load(text)
    for section in config:
        if section not in SECTIONS:
            raise unknown_name(str(path), "section", section, SECTIONS)
    for section in ("model", "data"):
        if section not in config:
            raise ConfigurationError(
                f"{path}: the section {section!r} is missing; it names a class or function to call"
            )
    config.setdefault("run", f"runs/{path.stem}-{{n}}")
    config.setdefault("strategy", "supervised")
    config.setdefault("handlers", list(STANDARD_HANDLERS))
    config["source"] = str(path)
    return config


def assemble(config: Mapping[str, Any], base: Path, folder: Path, *, resuming: bool = False) -> Assembly:
    """Make every part, and the run folder last; where a part fails, no new folder is left behind.

    Args:
        config: what `read_config` gave.
        base: the configuration file's folder; class paths are looked up there first.
        folder: the run folder.
        resuming: the folder may hold the run that goes on.

    Raises:
        ConfigurationError: a part cannot be made; the message names it.
    """
    source = Path(config["source"])
    _look_in(base)
    training = build({"class_path": TrainingConfig, "init_args": config.get("training") or {}}, "training")
    model = build(config["model"], "model")
    train_loader, val_loader = _loaders(build(config["data"], "data"))
    strategy = config["strategy"]
    if not isinstance(strategy, str) or "." in strategy or strategy in shipped_strategies.__all__:
        strategy = build(strategy, "strategy", shipped_strategies)
    metrics = {name: build(spec, f"metrics.{name}") for name, spec in (config.get("metrics") or {}).items()}
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = [
            build(spec, f"handlers[{index}]", shipped_handlers, folder=folder)
            for index, spec in enumerate(config["handlers"] or ())
        ]
        trainer = Trainer(
            model, train_loader, val_loader, strategy=strategy, config=training, metrics=metrics, handlers=made
        )
        if not resuming or not (folder / "config.yaml").exists():
            described = {section: config[section] for section in SECTIONS if section in config}
            describe_run(folder, {**described, "run": str(folder)}, trainer)
    except BaseException as error:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, PulsetrainError):
            raise RunFolderError(f"run folder {folder}: {error}") from error
        raise
    return Assembly(trainer, folder, source)


def build(spec: Any, place: str, shipped: Any = None, **given: Any) -> Any:
    """Call what a `class_path` with `init_args` names, its arguments checked against their annotations.

    Args:
        spec: a class path, or a mapping with class_path and init_args.
        place: where in the configuration this stands, for messages.
        shipped: a module whose names need no path.
        given: arguments filled in where the callable takes them and the configuration does not.

    Raises:
        ConfigurationError: the name is not found, or an argument is unknown, missing or of the wrong type.
    """
    if isinstance(spec, str):
        spec = {"class_path": spec}
    if not isinstance(spec, Mapping) or "class_path" not in spec or spec.keys() - {"class_path", "init_args"}:
        raise ConfigurationError(f"{place}: needs class_path and, where it takes any, init_args; it is {spec!r}")
    made_by = _find(spec["class_path"], place, shipped)
    arguments = dict(spec.get("init_args") or {})
    accepted = inspect.signature(made_by).parameters
    for name in arguments:
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        if name not in accepted and not takes_any:
            raise unknown_name(f"{place}: {made_by.__name__}", "argument", name, accepted)
    for name, value in given.items():
        if name in accepted:
            arguments.setdefault(name, str(value))
    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False)
    try:
        if inspect.isclass(made_by):
            parser.add_class_arguments(made_by)
        else:
            parser.add_function_arguments(made_by)
        checked = parser.instantiate_classes(parser.parse_object(arguments))
    except (jsonargparse.ArgumentError, TypeError, ValueError, SystemExit) as error:
        raise ConfigurationError(f"{place}: {made_by.__name__}: {_first_line(error)}") from None
    return made_by(**checked.as_dict())


def _find(path: Any, place: str, shipped: Any) -> Any:
    if callable(path):
        return path
    module_name, _, name = str(path).rpartition(".")
    if not module_name:
        names = getattr(shipped, "__all__", [])
        if path not in names:
            raise unknown_name(place, "class_path", path, names)
        return getattr(shipped, path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigurationError(
                f"{place}(class_path={path!r}): there is no module {module_name!r}; "
                "it is looked for beside the configuration file, then among the installed packages"
            ) from None
        raise
    if not callable(getattr(module, name, None)):
        choices = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise unknown_name(f"{place}: {module_name}", "class_path", name, choices)
    return getattr(module, name)


def _loaders(data: Any) -> tuple[Any, Any]:
    if isinstance(data, tuple) and len(data) == 2:
        return data
    return data, None


_searched: set[Path] = set()  # folders of configurations, whose modules may share a name


def _look_in(base: Path) -> None:
    """Let class paths be found beside the configuration file, also after another configuration's folder."""
    folder = base.resolve()
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None)
        if where is not None and Path(where).parent in _searched - {folder}:
            del sys.modules[name]
    sys.path[:] = [str(folder), *(entry for entry in sys.path if Path(entry) not in _searched | {folder})]
    _searched.add(folder)


def _first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return " ".join(text.split())
