"""Facts about a run from its folder, besides its log: settings, environment, and the run that it was forked from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine.metric_words import Mode
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.engine.recording.log.run_file import modes_of, read_run_file

__all__ = ["ABSENT", "Facts", "Row", "compared", "flat", "read_facts", "settings_of"]

ABSENT = "-"
_ENVIRONMENT = ("environment", "git", "seed", "command")  # of run.json


@dataclass(frozen=True)
class Facts:
    """The facts about one run; values as text by their dotted keys."""

    config: Mapping[str, str] | None  # config.yaml; None if it is missing
    settings: Mapping[str, str]  # of the training only, from run.json
    environment: Mapping[str, str]
    id: str  # "" if it has none
    parent: Mapping[str, Json] | None  # "run", "id" and "iteration" of the run that it was forked from
    starts: int  # how often it was started or resumed
    modes: Mapping[str, Mode]  # of metrics, as the run has decided which values are better


@dataclass(frozen=True)
class Row:
    """The values of one key in all runs."""

    key: str
    values: tuple[str, ...]
    differs: bool


def read_facts(folder: Path) -> Facts:
    """Read config.yaml and run.json; empty if both are missing."""
    run = read_run_file(folder)
    settings = _mapping(run.get("settings"))
    facts = {name: run[name] for name in _ENVIRONMENT if run.get(name) is not None}
    facts.update(_mapping(facts.pop("environment", None)))
    if isinstance(facts.get("command"), list):
        facts["command"] = " ".join(map(str, facts["command"]))
    parent = run.get("parent")
    starts = run.get("starts")
    return Facts(
        _config(folder),
        _texts({"training": settings} if settings else {}),
        _texts(facts),
        str(run.get("id") or ""),
        parent if isinstance(parent, Mapping) and parent.get("run") else None,
        len(starts) if isinstance(starts, list) else 0,
        modes_of(run),
    )


def settings_of(runs: Sequence[Facts]) -> list[Mapping[str, str]]:
    """The runs' configurations, all from the same kind of file if possible.

    A setting of the training that the configuration of one run gives and that of another leaves out has the default
    that the other one was trained with.
    """
    if any(run.config is None for run in runs) and all(run.settings for run in runs):
        return [run.settings for run in runs]
    keys = dict.fromkeys(key for run in runs for key in run.config or ())
    return [run.settings if run.config is None else {**run.config, **_left_out(run, keys)} for run in runs]


def compared(runs: Sequence[Mapping[str, str]]) -> list[Row]:
    """A row for every key of any run: those that differ first, otherwise in the order of the runs.

    >>> [(row.key, row.values) for row in compared([{"seed": "1", "lr": "0.1"}, {"seed": "1"}])]
    [('lr', ('0.1', '-')), ('seed', ('1', '1'))]
    """
    keys = dict.fromkeys(key for run in runs for key in run)
    rows = []
    for key in keys:
        values = tuple(run.get(key, ABSENT) for run in runs)
        rows.append(Row(key, values, len(set(values)) > 1))
    return sorted(rows, key=lambda row: not row.differs)


def _left_out(run: Facts, keys: Iterable[str]) -> dict[str, str]:
    """Those of the keys that the run has from run.json alone, as `RunSummary.setting` has them."""
    given = {_name(key) for key in run.config or ()}
    return {key: run.settings[key] for key in keys if key in run.settings and _name(key) not in given}


def _name(key: str) -> str:
    """Of the key of a value within a setting of the training, that of the setting."""
    return ".".join(key.split(".")[:2])


def _config(folder: Path) -> dict[str, str] | None:
    """The values of config.yaml; None if it is missing."""
    try:
        found = load_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return {"config.yaml": f"cannot be read: {error}"}
    if isinstance(found, dict):
        found.pop("run", None)  # the run folder, or a pattern for it
    return _texts(found) if isinstance(found, dict) else {"config.yaml": _text(found)}


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def flat(value: Json, key: str = "") -> Iterator[tuple[str, Json]]:
    """The values in mappings, and in lists of mappings, by their dotted keys.

    >>> dict(flat({"training": {"seed": 0}, "handlers": [{"class_path": "EMA"}], "betas": [0.9, 0.99]}))
    {'training.seed': 0, 'handlers.0.class_path': 'EMA', 'betas': [0.9, 0.99]}
    """
    items: list[tuple[object, Json]] = []
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [*enumerate(value)]
    if not items and key:
        yield key, value
        return
    for name, item in items:
        yield from flat(item, f"{key}.{name}" if key else str(name))


def _texts(values: Mapping[str, Json]) -> dict[str, str]:
    return {name: _text(each) for name, each in flat(values)}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
