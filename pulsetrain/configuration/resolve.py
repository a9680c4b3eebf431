"""A configuration with every default filled in, and where each of its values comes from."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from pulsetrain.config import TrainingConfig
from pulsetrain.configuration.assemble import BACKENDS, HANDLERS, STRATEGIES, in_settings
from pulsetrain.configuration.instantiate import build, checked_arguments, find, look_in, spec_of
from pulsetrain.configuration.parse import SECTIONS, load_yaml, read_config
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError

__all__ = ["Resolved", "resolve"]

DEFAULT, COMMAND_LINE = "default", "command line"
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_RUN_FOLDER = "the run folder"
Place = tuple[str | int, ...]  # keys and indices from the top of the configuration


@dataclass
class Resolved:
    """What `pulsetrain train` takes, with comments."""

    config: dict[str, Any]
    base: Path  # where class paths are looked up first
    comments: dict[Place, str] = field(default_factory=dict)

    def as_yaml(self) -> str:
        """YAML, each value that is not the file's marked with where it is from."""
        text = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True, width=2**20)
        lines = text.splitlines()
        for place, line in _lines_of(yaml.compose(text, yaml.SafeLoader), ()):
            if place in self.comments:
                lines[line] += f"  # {self.comments[place]}"
        where = f"# class paths are looked up beside this file first: keep it in {self.base.resolve()}"
        return "\n".join([where, *lines, ""])


def resolve(path: Path, overrides: Mapping[str, str]) -> Resolved:
    """Fill in what `train` would take for whatever the file leaves out. No model is made and no data is read.

    Defaults that YAML cannot write, such as functions, are named in a comment and left out: they stay what they are.

    Args:
        path: the configuration file.
        overrides: values as YAML by their dotted keys, as for `read_config`.

    Raises:
        ConfigurationError: as reading and assembling it would, short of calling what its class paths name.
    """
    config, base = read_config(path, overrides), base_of(path.parent)
    written = load_yaml(path.read_text(encoding="utf-8"))
    look_in(base)
    resolved = Resolved({}, base)
    filling = _Filling(resolved.comments)
    config["training"] = filling.training(dict(config.get("training") or {}))
    for section, shipped in (("model", {}), ("data", {}), ("strategy", STRATEGIES), ("backend", BACKENDS)):
        config[section] = filling.spec(config[section], (section,), section, shipped)
    config["metrics"] = {
        name: filling.spec(spec, ("metrics", name), f"metrics.{name}", {})
        for name, spec in (config.get("metrics") or {}).items()
    }
    config["handlers"] = [
        filling.spec(spec, ("handlers", index), f"handlers[{index}]", HANDLERS, folder=_RUN_FOLDER)
        for index, spec in enumerate(config.get("handlers") or ())
    ]
    resolved.config = {section: config[section] for section in SECTIONS}
    for section in SECTIONS:
        if written.get(section) is None and not any(key.partition(".")[0] == section for key in overrides):
            for place in [place for place in resolved.comments if place[0] == section and len(place) == 2]:
                if section == "training":
                    del resolved.comments[place]  # said of the whole section
            resolved.comments.setdefault((section,), DEFAULT)
    for key in overrides:
        resolved.comments[tuple(key.split("."))] = COMMAND_LINE
    return resolved


class _Filling:
    def __init__(self, comments: dict[Place, str]) -> None:
        self._comments = comments

    def training(self, given: dict[str, Any]) -> dict[str, Any]:
        try:
            build({"class_path": TrainingConfig, "init_args": _with_run_dir(given)}, "training", settings="training")
        except PulsetrainError as error:
            raise in_settings(error) from error
        filled = self._filled(TrainingConfig, "training", given, {}, ("training",))[0]
        order = [each.name for each in fields(TrainingConfig)]
        return {name: filled[name] for name in sorted(filled, key=order.index)}

    def spec(self, spec: Any, place: Place, where: str, shipped: Mapping[str, Any], **given: Any) -> Any:
        """A class path with all its arguments; itself alone where it takes none."""
        settings = f"{where}.init_args"
        class_path, init_args = spec_of(spec, where, settings)
        made_by = find(class_path, where, shipped)
        given = {name: value for name, value in given.items() if name not in init_args}
        filled, left_out = self._filled(made_by, settings, init_args, given, (*place, "init_args"))
        if left_out:
            self._comments[(*place, "class_path")] = f"not written: {', '.join(left_out)}"
        if not filled and not left_out:
            return class_path
        return {"class_path": class_path, **({"init_args": filled} if filled else {})}

    def _filled(
        self, made_by: Any, settings: str, init_args: Mapping[str, Any], given: Mapping[str, Any], place: Place
    ) -> tuple[dict[str, Any], list[str]]:
        """The arguments with the defaults that YAML gives back as they are, and what was left out."""
        name = getattr(made_by, "__name__", str(made_by))
        filled = {key: self._nested(value, (*place, key), f"{settings}.{key}") for key, value in init_args.items()}
        checked_arguments(made_by, name, settings, deepcopy(dict(init_args)), given)
        left_out: list[str] = []
        for key, default in _defaults(made_by):
            if key in init_args:
                continue
            if key in given:
                left_out.append(f"{key} ({given[key]})")
                continue
            written = _plain(default)
            if written is not _NONE and self._same(made_by, name, filled, given, key, written, default):
                filled[key] = written
                self._comments[(*place, key)] = DEFAULT
            else:
                left_out.append(f"{key} ({_named(default)})")
        left_out += [f"{key} ({given[key]})" for key in given if key in _required(made_by)]
        return filled, left_out

    def _same(
        self, made_by: Any, name: str, filled: Mapping[str, Any], given: Mapping[str, Any], key: str, written: Any,
        default: Any,
    ) -> bool:  # fmt: skip
        """Whether the value, read from YAML, becomes the default again."""
        needed = {each: value for each, value in filled.items() if each in _required(made_by)}
        try:
            arguments = {**deepcopy(needed), key: load_yaml(yaml.safe_dump(written))}
            became = checked_arguments(made_by, name, "", arguments, given)[key]
            if isinstance(default, (list, tuple)):  # YAML has one kind of both
                return list(became) == list(default)
            return bool(type(became) is type(default) and became == default)
        except Exception:
            return False

    def _nested(self, value: Any, place: Place, where: str) -> Any:
        """The value, with the defaults of a class path in it."""
        if isinstance(value, Mapping) and "class_path" in value and value.keys() <= {"class_path", "init_args"}:
            try:
                return self.spec(value, place, where, {})
            except ConfigurationError:  # a mapping that is none to whom it is given
                return value
        return value


def _defaults(made_by: Any) -> Iterator[tuple[str, Any]]:
    made = {each.name: each for each in fields(made_by)} if is_dataclass(made_by) else {}
    for key, each in inspect.signature(made_by).parameters.items():
        if each.kind in _VARIABLE or each.default is inspect.Parameter.empty:
            continue
        factory = made[key].default_factory if key in made else MISSING
        yield key, each.default if factory is MISSING else factory()


def _required(made_by: Any) -> list[str]:
    parameters = inspect.signature(made_by).parameters
    return [key for key, each in parameters.items() if each.default is inspect.Parameter.empty]


_NONE = object()  # no plain form


def _plain(value: Any) -> Any:
    """As YAML says it; `_NONE` where it cannot."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
        parts = {name: part for name, part in parts.items() if part != dict(_defaults(type(value))).get(name, _NONE)}
        return _NONE if any(part is _NONE for part in parts.values()) else parts
    if type(value) in (list, tuple):
        items = [_plain(item) for item in value]
        return _NONE if any(item is _NONE for item in items) else items
    if isinstance(value, Mapping):
        parts = {key: _plain(item) for key, item in value.items()}
        return _NONE if any(part is _NONE for part in parts.values()) else parts
    return _NONE


def _named(value: Any) -> str:
    """An object in a comment, which is one line."""
    name = getattr(value, "__name__", None)
    text = name if isinstance(name, str) else f"a {type(value).__qualname__}"
    return " ".join(text.split())


def _with_run_dir(given: Mapping[str, Any]) -> dict[str, Any]:
    needs = given.get("save_every_n_epochs") is not None and given.get("run_dir") is None
    return {**deepcopy(dict(given)), **({"run_dir": _RUN_FOLDER} if needs else {})}


def _lines_of(node: yaml.Node | None, place: Place) -> Iterator[tuple[Place, int]]:
    """Where each value begins, by its key's line; of what a comment cannot stand behind, nothing."""
    if isinstance(node, yaml.MappingNode):
        parts: Iterable[tuple[Any, yaml.Node, int]] = [
            (key.value, value, key.start_mark.line) for key, value in node.value if isinstance(key, yaml.ScalarNode)
        ]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(index, value, value.start_mark.line) for index, value in enumerate(node.value)]
    else:
        return
    for key, value, line in parts:
        if not (isinstance(value, yaml.ScalarNode) and value.end_mark.line != line):  # a text of several lines
            yield (*place, key), line
        yield from _lines_of(value, (*place, key))
