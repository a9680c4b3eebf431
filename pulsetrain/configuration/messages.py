"""Errors in the words of the configuration: settings in place of arguments, values as YAML writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass

from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, did_you_mean

__all__ = ["as_yaml", "entry", "in_settings", "unknown"]

MANY = 80  # names, of which a message would become unreadable

# By the class or function that rejects an argument: the setting that the argument came from; * is any other name.
_SETTINGS: dict[str, dict[str, str]] = {
    "": {"device": "training.device"},
    "Accumulate": {"*": "training.accumulate.*"},
    "ActivationCheckpointing": {"*": "training.activation_checkpointing.*"},
    "ActivationOffload": {"*": "training.activation_offload.*"},
    "OptimizerOffload": {"*": "training.optimizer_offload.*"},
    "Topology": {"*": "parallel.*"},
    "TrainingConfig": {"*": "training.*", "the run's total_steps": "the run's total_steps"},
    "Trainer": {
        **{name: name for name in ("strategy", "backend", "model", "metrics", "handlers")},
        "train_loader": "data: train_loader",
        "val_loader": "data: val_loader",
        "optimizer": "training.optimizer",
    },
    "Trainer.train": {"resume": "--resume"},
}


def in_settings(error: PulsetrainError) -> PulsetrainError:
    """The error with settings in place of arguments, where a part that the training section describes has raised it.

    >>> print(in_settings(ConfigurationError("needs to be above 0", "TrainingConfig", optimizer_options={"eps": None})))
    training.optimizer_options.eps=null: needs to be above 0
    """
    settings = _SETTINGS.get(error.place, {})
    if error.argument is None or not _setting(settings, error.argument):
        return error

    def rename(argument: str, value: object) -> tuple[str, object]:
        return entry(_setting(settings, argument) or argument, value)

    return error.reworded(rename, as_yaml)


def _setting(settings: Mapping[str, str], argument: str) -> str:
    name, bracket, index = argument.partition("[")  # betas[1]
    setting = settings.get(name, settings.get("*", ""))
    return setting and setting.replace("*", name) + bracket + index


def entry(setting: str, value: object) -> tuple[str, object]:
    """The setting and its value; the only entry of a mapping is a setting of its own.

    >>> entry("training.schedule_options", {"gamma": 2})
    ('training.schedule_options.gamma', 2)
    """
    entries = _fields_of(value) if is_dataclass(value) else value
    if isinstance(entries, Mapping) and len(entries) == 1:
        ((key, only),) = entries.items()
        return f"{setting}.{key}", only
    return setting, value


def _fields_of(value: object) -> Mapping[str, object]:
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    given = {each.name: getattr(value, each.name) for each in fields(value)}
    return {name: each for name, each in given.items() if each is not None}


def as_yaml(value: object) -> str:
    """A value in a message, as YAML writes it where YAML can; text stays in quotes.

    >>> as_yaml([1, None, {"fused": True}])
    '[1, null, {fused: true}]'
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_yaml, value))}]"
    entries = value if isinstance(value, Mapping) else _fields_of(value)
    if entries or isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_yaml(entry)}' for key, entry in entries.items())}}}"
    return repr(value)


def unknown(location: str, what: str, name: object, choices: Iterable[str]) -> ConfigurationError:
    """The error for a key or name that is not among the choices, with the nearest one as the remedy.

    >>> print(unknown("modle", "section", "modle", ["data", "model"]))
    modle: unknown section; choose one of data, model; did you mean 'model'?
    """
    choices = sorted(choices)
    listed = f"choose one of {', '.join(choices)}" if choices else "there is none to choose"
    if len(choices) > MANY:
        listed = f"there are {len(choices)} others"
    return ConfigurationError(f"{location}: unknown {what}; {listed}{did_you_mean(name, choices)}")
