"""Makes the page about the configuration: its sections, and each field of the classes that read them.

What a field means is in the docstring of its class, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

import docstring_parser

from pulsetrain.cli.launch import Launch
from pulsetrain.config import TrainingConfig
from pulsetrain.configuration.assemble import BACKENDS, STRATEGIES
from pulsetrain.configuration.messages import as_yaml
from pulsetrain.configuration.parse import STANDARD_HANDLERS
from pulsetrain.configuration.sections import SECTIONS
from pulsetrain.configuration.shipped_handlers import HANDLERS
from pulsetrain.engine import Topology
from pulsetrain.sweep.spec import ENTRIES, Range, Spec

INTRODUCTION = """\
# Configuration

What `pulsetrain train` reads: a YAML file of sections. `pulsetrain config CONFIG` prints a file with every default
filled in. On the command line, a setting has its dotted name, as in `--training.learning_rate 3e-4`.

Classes and functions are named by their import path. Modules are looked up beside the file first. Arguments follow in
`init_args`:

```yaml
run: runs/digits-{n}
model: {class_path: model.Classifier, init_args: {hidden: 128}}
data: data.loaders
metrics: {accuracy: pulsetrain.engine.metrics.Accuracy}
training: {max_epochs: 20, learning_rate: 3e-3, validate_every: {epochs: 1}}
handlers: [Checkpointer, EventRecorder]
```
"""


def page() -> str:
    """The page, as Markdown."""
    return "\n\n".join(part.strip() for part in _parts()) + "\n"


def fields_of(kind: type, names: Iterable[str] | None = None) -> str:
    """A table of the fields of a dataclass.

    Args:
        kind: the dataclass.
        names: the fields to show; by default all.

    Raises:
        ValueError: a field has no description in the docstring of its class.
    """
    meanings = {each.arg_name: each.description or "" for each in docstring_parser.parse(kind.__doc__ or "").params}
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        if names is not None and field.name not in names:
            continue
        meaning = " ".join(meanings.get(field.name, "").split()).rstrip(".")
        meaning = re.sub(r"\s*\[[^\[\]]*\]$", "", meaning)  # without the default, which is in its own column
        if not meaning:
            raise ValueError(f"{kind.__name__}.{field.name}: has no description; add it to the docstring of the class")
        rows.append(f"| `{field.name}` | `{field.type}` | {_default(field)} | {_text(meaning)} |")
    return "\n".join(rows)


def nested(kind: type) -> list[type]:
    """The dataclasses that the types of the fields name, in order."""
    found: dict[type, None] = {}
    for hint in get_type_hints(kind).values():
        found |= {each: None for each in get_args(hint) if isinstance(each, type) and dataclasses.is_dataclass(each)}
    return list(found)


def _parts() -> Iterator[str]:
    yield INTRODUCTION
    yield "## Sections"
    defaults = {"run": "`runs/NAME-{n}`, after the file", "strategy": "`supervised`", "backend": "`torch`"}
    defaults["handlers"] = ", ".join(f"`{name}`" for name in STANDARD_HANDLERS)
    rows = [f"| `{name}` | {_text(text)} | {defaults.get(name, '')} |" for name, text in SECTIONS.items()]
    yield "\n".join(["| section | meaning | default |", "|---|---|---|", *rows])
    yield "## training"
    yield "The fields of `TrainingConfig`. Where a type names another class, write a mapping of its fields."
    yield fields_of(TrainingConfig)
    for kind in nested(TrainingConfig):
        yield f"### {kind.__name__}"
        yield _text(_summary(kind))
        yield fields_of(kind)
    yield "## parallel"
    yield f"{_text(_summary(Topology))} See [Several processes](../distributed.md)."
    yield fields_of(Topology)
    for section, known in (("strategy", STRATEGIES), ("backend", BACKENDS), ("handlers", HANDLERS)):
        yield f"## {section}"
        yield "Names that need no import path. Their arguments are on the page of each class."
        yield _names(known)
    yield "## Processes"
    yield "On the command line only, as in `--launch.nproc 2`."
    yield fields_of(Launch)
    yield "## A sweep"
    yield "What `pulsetrain sweep` reads: another YAML file, see [Sweeps](../sweep.md)."
    yield fields_of(Spec, ENTRIES)
    yield "A range of values in `space`:"
    yield fields_of(Range)


def _names(known: Mapping[str, Any]) -> str:
    names: dict[Any, list[str]] = {}
    for name in known:
        names.setdefault(known[name], []).append(name)
    rows = ["| name | what it is |", "|---|---|"]
    for kind, called in names.items():
        links = ", ".join(f"[`{name}`][{kind.__module__}.{kind.__qualname__}]" for name in called)
        rows.append(f"| {links} | {_text(_summary(kind))} |")
    return "\n".join(rows)


def _summary(kind: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{as_yaml(field.default_factory())}`"
    return "" if field.default is dataclasses.MISSING else f"`{as_yaml(field.default)}`"


def _text(text: str) -> str:
    """Plain text as Markdown in a table; what is between backticks stays as it is."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*<|\[\]])", r"\\\1", each) for each in parts[::2]]
    return "`".join(parts)
