"""The settings in which two configurations differ, each to be applied alone, and mixtures of the two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Change", "changes_between", "settings_with"]

_HANDLERS = "handlers"
_NOT_SETTINGS = ("run", "launch")
_ABSENT = "absent"
_PRESENT = "present"


class _Missing:
    """The value of an argument that is not given."""

    def __repr__(self) -> str:
        return "not given"


_MISSING = _Missing()


@dataclass(frozen=True)
class Change:
    """A setting that differs.

    >>> print(Change("training.learning_rate", 0.003, 3.0))
    training.learning_rate: 0.003 -> 3.0
    """

    name: str
    good: Any
    bad: Any

    def __str__(self) -> str:
        return f"{self.name}: {_text(self.good)} -> {_text(self.bad)}"


def changes_between(
    good: Mapping[str, Any], bad: Mapping[str, Any], good_training: Mapping[str, Any], bad_training: Mapping[str, Any]
) -> list[Change]:
    """What has to be applied to the good configuration to get the bad one, in parts as small as make sense alone.

    >>> good = {"training": {"learning_rate": 0.1, "max_epochs": 3}, "handlers": ["EMA"]}
    >>> bad = {"training": {"learning_rate": 3.0, "max_epochs": 3}, "handlers": ["EMA", "SWA"]}
    >>> for change in changes_between(good, bad, {}, {}):
    ...     print(change)
    training.learning_rate: 0.1 -> 3.0
    handlers.SWA: absent -> present

    Args:
        good: the content of its config.yaml.
        bad: likewise.
        good_training: all settings of its training, for those that its configuration leaves to their defaults.
        bad_training: likewise.
    """
    found: list[Change] = []
    for key in dict.fromkeys([*good, *bad]):
        one: Any = good.get(key)
        other: Any = bad.get(key)
        if one == other or key in _NOT_SETTINGS:
            continue
        if key == "training":
            one, other = one or {}, other or {}
            for name in dict.fromkeys([*one, *other]):
                values = one.get(name, good_training.get(name)), other.get(name, bad_training.get(name))
                found += [Change(f"training.{name}", *values)] if values[0] != values[1] else []
        elif key == _HANDLERS:
            found += _changed_handlers(one or [], other or [])
        elif (arguments := _arguments(one, other)) is not None:
            found += [Change(f"{key}.init_args.{name}", *values) for name, values in arguments.items()]
        else:
            found.append(Change(key, one, other))
    return found


def settings_with(good: Mapping[str, Any], bad: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    """The settings, by dotted names, that make the good configuration one with these changes."""
    settings: dict[str, Any] = {}
    handlers: set[str] = set()
    for each in changes:
        section, _, argument = each.name.partition(".init_args.")
        if each.name.startswith(f"{_HANDLERS}."):
            handlers.add(each.name)
        elif argument:  # a whole section, since one argument alone cannot be taken out
            settings[section] = _with(settings.get(section, good[section]), {argument: each.bad})
        else:
            settings[each.name] = each.bad
    if handlers:
        settings[_HANDLERS] = _mixed(good.get(_HANDLERS) or [], bad.get(_HANDLERS) or [], handlers)
    return settings


def _arguments(one: Any, other: Any) -> dict[str, tuple[Any, Any]] | None:
    """The arguments that differ between two parts of the same class; None if more than these differ."""
    if not all(isinstance(each, str | dict) for each in (one, other)):
        return None
    parts = [_part(each) for each in (one, other)]
    bare = [{name: value for name, value in each.items() if name != "init_args"} for each in parts]
    given = [each["init_args"] for each in parts]
    if bare[0] != bare[1] or "class_path" not in bare[0] or not all(isinstance(each, dict) for each in given):
        return None
    values = {name: tuple(each.get(name, _MISSING) for each in given) for name in dict.fromkeys([*given[0], *given[1]])}
    return {name: (before, now) for name, (before, now) in values.items() if before != now}


def _part(given: str | dict[str, Any]) -> dict[str, Any]:
    part = {"class_path": given} if isinstance(given, str) else given
    return {**part, "init_args": part.get("init_args") or {}}


def _with(given: str | dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The part with other values of some arguments."""
    part = _part(given)
    values = {**part["init_args"], **arguments}
    return {**part, "init_args": {name: value for name, value in values.items() if value is not _MISSING}}


def _changed_handlers(good: Sequence[Any], bad: Sequence[Any]) -> Iterator[Change]:
    ours, theirs = _by_name(good), _by_name(bad)
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if one == other:
            continue
        if one is None or other is None:
            yield Change(f"{_HANDLERS}.{name}", *(_ABSENT if each is None else _PRESENT for each in (one, other)))
        elif (arguments := _arguments(one, other)) is not None:
            for argument, values in arguments.items():
                yield Change(f"{_HANDLERS}.{name}.{argument}", *values)
        else:
            entry = "init_args" if one.get("class_path") == other.get("class_path") else "class_path"
            yield Change(f"{_HANDLERS}.{name}", one.get(entry), other.get(entry))


def _mixed(good: Sequence[Any], bad: Sequence[Any], names: set[str]) -> list[Any]:
    ours, theirs = _by_name(good), _by_name(bad)
    mixed: list[Any] = []
    for name, handler in ours.items():
        if f"{_HANDLERS}.{name}" in names:
            mixed += [theirs[name]] if name in theirs else []
            continue
        start = f"{_HANDLERS}.{name}."
        arguments = [each.removeprefix(start) for each in names if each.startswith(start)]
        if arguments:
            given = _part(theirs[name])["init_args"]
            handler = _with(handler, {argument: given.get(argument, _MISSING) for argument in arguments})
        mixed.append(handler)
    return [*mixed, *(theirs[name] for name in theirs if name not in ours and f"{_HANDLERS}.{name}" in names)]


def _by_name(handlers: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Handlers by their classes' names; the second of a class has a number."""
    found: dict[str, dict[str, Any]] = {}
    for each in handlers:
        handler = each if isinstance(each, dict) else {"class_path": each}
        base = str(handler.get("class_path")).rpartition(".")[2]
        name, number = base, 2
        while name in found:
            name, number = f"{base}#{number}", number + 1
        found[name] = handler
    return found


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | _Missing) else json.dumps(value, default=str)
