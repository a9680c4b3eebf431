"""A configuration with every default filled in, and the origin of each value.

jsonargparse's --print_config writes values without their origin, and an error text in the place of a value that YAML
cannot write (tests/pulsetrain/configuration/test_why_own_parsing.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from pulsetrain.config import TrainingConfig
from pulsetrain.configuration.assemble import BACKENDS, STRATEGIES, with_run_folder
from pulsetrain.configuration.class_paths import Factory, find, look_in
from pulsetrain.configuration.instantiate import (
    checked_arguments,
    instantiate,
    named_parameters,
    signature_parser,
    spec_of,
)
from pulsetrain.configuration.names_0_1 import current_path
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.configuration.sections import SECTIONS
from pulsetrain.configuration.shipped_handlers import HANDLERS
from pulsetrain.configuration.yaml_text import dump_yaml, load_yaml
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["Resolved", "resolve"]

DEFAULT, COMMAND_LINE = "default", "command line"
_RUN_FOLDER = "the run folder"
Location = tuple[str | int, ...]  # keys and indices from the top of the configuration


@dataclass
class Resolved:
    """A configuration that `pulsetrain train` takes, with comments."""

    config: dict[str, Any]
    base: Path  # the folder in which class paths are looked up first
    comments: dict[Location, str] = field(default_factory=dict)

    def as_yaml(self) -> str:
        """The YAML text; a comment marks each value that is not from the file."""
        text = dump_yaml(self.config, width=2**20)
        lines = text.splitlines()
        for location, line in _lines_of(yaml.compose(text, yaml.SafeLoader), ()):
            if location in self.comments:
                lines[line] += f"  # {self.comments[location]}"
        where = f"# class paths are looked up beside this file first: keep it in {self.base.resolve()}"
        return "\n".join([where, *lines, ""])


def resolve(path: Path, overrides: Mapping[str, str]) -> Resolved:
    """Fill in the defaults of everything that the file leaves out. No model is made and no data is read.

    Defaults that YAML cannot write, such as lambdas, are left out and named in a comment; the run still uses them.

    Args:
        path: the configuration file.
        overrides: values as YAML text, by dotted key, as for `read_config`.

    Raises:
        ConfigurationError: the errors of reading and assembling the configuration, except those of the calls.
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
    resolved.config = {section: config[section] for section in SECTIONS if section in config}
    for section in resolved.config:
        if written.get(section) is None and not any(key.partition(".")[0] == section for key in overrides):
            if section == "training":  # one comment for the whole section
                for location in [each for each in resolved.comments if each[0] == section and len(each) == 2]:
                    del resolved.comments[location]
            resolved.comments.setdefault((section,), DEFAULT)
    for key in overrides:
        resolved.comments[tuple(key.split("."))] = COMMAND_LINE
    return resolved


class _Filling:
    def __init__(self, comments: dict[Location, str]) -> None:
        self._comments = comments

    def training(self, given: dict[str, object]) -> dict[str, object]:
        section = {"class_path": TrainingConfig, "init_args": with_run_folder(given, _RUN_FOLDER)}
        instantiate(section, "training", settings="training")
        filled = self._filled(TrainingConfig, "training", given, {}, ("training",))[0]
        return {each.name: filled[each.name] for each in fields(TrainingConfig)}

    def spec(
        self, spec: object, location: Location, where: str, shipped: Mapping[str, Factory], **given: object
    ) -> object:
        """A class path with all its arguments; the path alone where it takes none."""
        settings = f"{where}.init_args"
        class_path, init_args = spec_of(spec, where, settings)
        factory = find(class_path, where, shipped)
        class_path = current_path(class_path) if isinstance(class_path, str) else class_path
        given = {name: value for name, value in given.items() if name not in init_args}
        filled, left_out = self._filled(factory, settings, init_args, given, (*location, "init_args"))
        if left_out:
            self._comments[(*location, "class_path")] = f"not written: {', '.join(left_out)}"
        if not filled and not left_out:
            return class_path
        return {"class_path": class_path, **({"init_args": filled} if filled else {})}

    def _filled(
        self,
        factory: Factory,
        settings: str,
        init_args: Mapping[str, object],
        given: Mapping[str, object],
        location: Location,
    ) -> tuple[dict[str, object], list[str]]:
        """The arguments with the defaults that YAML can write, and those that are left out."""
        name = getattr(factory, "__name__", str(factory))
        filled = {key: self._nested(value, (*location, key), f"{settings}.{key}") for key, value in init_args.items()}
        checked_arguments(factory, name, settings, deepcopy(dict(init_args)), given)
        left_out = []
        for key, (default, written) in _defaults(factory).items():
            if key in init_args:
                continue
            if key in given or written is _NOT_WRITTEN:
                left_out.append(f"{key} ({given[key] if key in given else _named(default)})")
            else:
                filled[key] = written
                self._comments[(*location, key)] = DEFAULT
        return filled, left_out

    def _nested(self, value: object, location: Location, where: str) -> object:
        """The value, with the defaults of a class path in it."""
        if isinstance(value, Mapping) and "class_path" in value and value.keys() <= {"class_path", "init_args"}:
            try:
                return self.spec(value, location, where, {})
            except ConfigurationError:  # the callee takes a mapping that only looks like a class path
                return value
        return value


_NOT_WRITTEN = object()


def _defaults(factory: Factory) -> dict[str, tuple[object, object]]:
    """Each parameter's default, and the value that YAML has for it; `_NOT_WRITTEN` where there is none."""
    named = named_parameters(factory)
    required = {key for key, each in named.items() if each.default is each.empty}
    parser = signature_parser(factory, required)
    values = parser.get_defaults()
    return {
        key: (each.default, _NOT_WRITTEN if key in required else _written(parser, key, values[key]))
        for key, each in named.items()
    }


def _written(parser: ArgumentParser, key: str, value: object) -> object:
    """The value as jsonargparse writes it, where it reads the same value back."""
    if value is None:  # also against its annotation, as `rate: float = None`
        return None
    try:
        one = Namespace(**{key: value})  # type: ignore[no-untyped-call]
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a value that has no text
            written = load_yaml(parser.dump(one, skip_unset=False, skip_validation=True))[key]
        if isinstance(value, Namespace):  # of a dataclass
            return {name: each for name, each in written.items() if each is not None}
        found = parser.parse_object({key: written}, defaults=False)[key]
    except Exception:  # of whatever the value or its type is
        return _NOT_WRITTEN
    if isinstance(value, (list, tuple)):  # YAML has one kind of sequence
        return written if list(found) == list(value) else _NOT_WRITTEN
    return written if type(found) is type(value) and found == value else _NOT_WRITTEN


def _named(value: object) -> str:
    """A name for an object, on one line, for a comment."""
    name = getattr(value, "__name__", None)
    text = name if isinstance(name, str) else f"{type(value).__qualname__} object"
    return " ".join(text.split())


def _lines_of(node: yaml.Node | None, location: Location) -> Iterator[tuple[Location, int]]:
    """The line of each key, except those whose value is a text of several lines, which a comment would end up in."""
    if isinstance(node, yaml.MappingNode):
        parts: Iterable[tuple[str | int, yaml.Node, int]] = [
            (key.value, value, key.start_mark.line) for key, value in node.value if isinstance(key, yaml.ScalarNode)
        ]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(index, value, value.start_mark.line) for index, value in enumerate(node.value)]
    else:
        return
    for key, value, line in parts:
        if not (isinstance(value, yaml.ScalarNode) and value.end_mark.line != line):
            yield (*location, key), line
        yield from _lines_of(value, (*location, key))
