"""YAML as the configuration reads and writes it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from pulsetrain.engine.errors import ConfigurationError, did_you_mean

__all__ = ["dump_yaml", "load_yaml", "one_line", "read_yaml", "yaml_word"]


class _Numbers:
    """The numbers of YAML 1.2 (3e-4 is one), and keys once: one that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1 and key != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
        found: dict[Hashable, object] = super().construct_mapping(node, deep)  # type: ignore[misc]  # of the loaders
        return found


class _Loader(_Numbers, yaml.SafeLoader):
    """In Python: its messages show the place in the text."""


class _FastLoader(_Numbers, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """In C, where PyYAML has it: ten times as fast."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        if all(map(_is_text, [key for key, _ in node.value])):  # as in most, and a text is its own value
            found: dict[Hashable, object] = {
                key.value: value.value if _is_text(value) else self.construct_object(value, deep)
                for key, value in node.value
            }
            if len(found) == len(node.value):
                return found
        return super().construct_mapping(node, deep)


def _is_text(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:str" and type(node) is yaml.ScalarNode


class _Dumper(yaml.SafeDumper):
    """Writes a text that the loaders would read as a number, such as 1e3, in quotes."""


_DEEPEST = 5_000
_LARGEST = 100_000  # values, where aliases repeat some
_NUMBER = r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)|[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)"
for _each in (_Loader, _FastLoader, _Dumper):
    _each.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^({_NUMBER})$"), list("-+0123456789."))


def load_yaml(text: str, *, fast: bool = False) -> Any:  # whatever the text holds
    """The value that YAML text holds; numbers may be written as 3e-4.

    Args:
        text: YAML.
        fast: for many texts whose errors nobody reads.

    Raises:
        yaml.YAMLError: the text is not YAML, gives a key twice, or has aliases that repeat very many values.
        RecursionError: it nests too deep.

    >>> load_yaml("{learning_rate: 3e-4, betas: [0.9, 0.99]}")
    {'learning_rate': 0.0003, 'betas': [0.9, 0.99]}
    """
    nests = sum(map(text.count, ("[", "{", "- ", "? ")))  # at most so deep: the one in C ends the process by far more
    found = yaml.load(text, _FastLoader if fast and nests < _DEEPEST else _Loader)
    if "*" in text and _size(found, {}) > _LARGEST:
        raise yaml.YAMLError(f"its aliases (*name) repeat values, more than {_LARGEST:,} in all; write it without them")
    return found


def dump_yaml(value: object, *, width: int = 80) -> str:
    """The YAML text from which `load_yaml` reads an equal value.

    Args:
        value: mappings, lists, numbers, texts, dates, true, false and null.
        width: of a line, after which long texts continue on the next one.

    >>> print(dump_yaml({"learning_rate": 3e-4, "commit": "1234e56"}), end="")
    learning_rate: 0.0003
    commit: '1234e56'
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def yaml_word(value: object) -> str:
    """The same as a word of the command line.

    >>> yaml_word({"rates": [3e-4, "3e-4"], "none": None})
    "{rates: [0.0003, '3e-4'], none: null}"
    """
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=True
    )
    return text.removesuffix("...\n").removesuffix("\n")  # the end of a document that is one number or text


def _size(value: object, known: dict[int, float]) -> float:
    """How many values there are in it; one that is shared counts each time, and one that holds itself without end."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # until it is known
        inside = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(each, known) for each in inside)
    return known[id(value)]


def read_yaml(path: os.PathLike[str]) -> Any:  # whatever the file holds
    """The value that a file holds.

    Raises:
        ConfigurationError: the file cannot be read, or is not YAML.
    """
    try:
        return load_yaml(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        folder = Path(path).parent
        others = [each.name for each in folder.glob("*.y*ml")] if folder.is_dir() else []
        hint = did_you_mean(Path(path).name, others) or "; `pulsetrain init` writes a project with one"
        raise ConfigurationError(f"{path}: there is no such file{hint}") from error
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not valid YAML: {one_line(error)}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path}: nests too deep; correct the file") from error


def one_line(error: Exception) -> str:
    """What a YAML error says, with the place in the text."""
    return " ".join(str(error).replace('in "<unicode string>"', "at").replace("at, ", "at ").split())
