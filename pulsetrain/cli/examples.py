"""`pulsetrain examples`: lists the examples that are installed, and copies one."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path

from pulsetrain.cli.reports import OK, until_closed
from pulsetrain.engine.errors import RunFolderError, unknown_name

__all__ = ["copy_example", "described", "project", "run"]

_PROJECT = "project"  # what `pulsetrain init` copies
_CONFIG = "config.yaml"
_NOTEBOOK = ".ipynb"


def run(arguments: argparse.Namespace) -> int:
    """List the examples, or copy the one that is named; returns the exit status."""
    if arguments.name is None:
        with until_closed():
            print("\n".join(_lines()))
        return OK
    found = {name: each for name, each in _examples() if name != _PROJECT}
    name = arguments.name.removesuffix(".py")
    if name not in found:
        raise unknown_name("pulsetrain examples", "NAME", arguments.name, found)
    needed = _needed(found[name])
    into = arguments.into / "examples" if needed else arguments.into  # they import each other as examples.NAME
    target = copy_example(found[name], into / found[name].name)
    print(target)
    for each in needed:
        if not (into / each.name).exists():
            print(copy_example(each, into / each.name))
    print(_how_to_run_among(target, arguments.into) if needed else f"run it: {_how_to_run(target)}")
    return OK


def copy_example(example: Traversable, target: Path, remedy: str = "choose another place with --into") -> Path:
    """Copy an example; nothing is overwritten.

    Args:
        example: its file or folder.
        target: the copy.
        remedy: what to do if the target exists.

    Raises:
        RunFolderError: the target exists, or cannot be written.
    """
    if target.exists():
        raise RunFolderError(f"{target}: exists already, and nothing is overwritten; {remedy}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with as_file(example) as source:
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, target)
    except OSError as error:
        raise RunFolderError(f"{target}: cannot be written: {error.strerror or error}") from error
    return target


def project() -> Traversable:
    """The example that `pulsetrain init` copies."""
    return _folder() / _PROJECT


def _folder() -> Traversable:
    folder = files("pulsetrain") / "_examples"
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: is missing; this installation is not complete, so install pulsetrain again")
    return folder


def _examples() -> Iterator[tuple[str, Traversable]]:
    """The examples by name, in alphabetical order."""
    for each in sorted(_folder().iterdir(), key=lambda each: each.name):
        if each.name.endswith(".py"):
            yield each.name.removesuffix(".py"), each
        elif each.is_dir() and any(part.name.endswith((".py", ".yaml", _NOTEBOOK)) for part in each.iterdir()):
            yield each.name, each


def _needed(example: Traversable) -> list[Traversable]:
    """The other examples that an example imports or names, and those that they need."""
    there = {each.name.removesuffix(".py"): each for each in _folder().iterdir()}
    found: dict[str, Traversable] = {}
    waiting = [example]
    while waiting:
        each = waiting.pop()
        named = {name for text in _texts(each) for name in re.findall(r"\bexamples[./](\w+(?:\.yaml)?)", text)}
        named.add(f"{each.name.partition('.')[0]}.yaml")  # a script's configuration
        for name in sorted(named & there.keys() - found.keys()):
            if there[name].name != example.name:
                found[name] = there[name]
                waiting.append(there[name])
    return list(found.values())


def _texts(example: Traversable) -> Iterator[str]:
    for each in [example] if example.is_file() else example.iterdir():
        if each.name.endswith((".py", ".yaml")):
            yield each.read_text(encoding="utf-8")


def described() -> list[tuple[str, str]]:
    """The name of each example that can be copied, and what it shows."""
    return [(name, _about(each)) for name, each in _examples() if name != _PROJECT]


def _lines() -> Iterator[str]:
    found = described()
    width = max(len(name) for name, _ in found)
    for name, about in found:
        yield f"{name:{width}}  {about}"
    yield "\ncopy one: pulsetrain examples NAME; start a project of your own: pulsetrain init NAME"


def _about(example: Traversable) -> str:
    """The first line of its description."""
    if example.is_file():
        return _first_line(example)
    if (example / _CONFIG).is_file():
        return (example / _CONFIG).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    if notebooks := _notebooks(example):
        return f"Notebooks: {'; '.join(map(_title, notebooks))}."
    scripts = sorted((each for each in example.iterdir() if each.name.endswith(".py")), key=lambda each: each.name)
    return next(filter(None, map(_first_line, scripts)), "")


def _first_line(script: Traversable) -> str:
    return _description(script).partition("\n")[0]


def _description(script: Traversable) -> str:
    return ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""


def _notebooks(folder: Traversable) -> list[Traversable]:
    return sorted((each for each in folder.iterdir() if each.name.endswith(_NOTEBOOK)), key=lambda each: each.name)


def _title(notebook: Traversable) -> str:
    """The heading of its first cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return str(cells[0]["source"][0]).lstrip("# ").rstrip()


def _how_to_run(target: Path) -> str:
    if target.is_file():
        return f"python {shlex.quote(str(target))}"
    if (target / _CONFIG).is_file():
        return f"pulsetrain train {shlex.quote(str(target / _CONFIG))}"
    if _notebooks(target):
        return f"jupyter lab {shlex.quote(str(target))}"
    return f"see the first lines of the files in {shlex.quote(str(target))}"


def _how_to_run_among(target: Path, folder: Path) -> str:
    """The commands in the first lines of an example that needs others; they are written for the folder above."""
    scripts = [target] if target.is_file() else sorted(target.glob("*.py"))
    lines = [line.strip() for each in scripts if each.name != "__init__.py" for line in _description(each).splitlines()]
    commands = [re.split(r"\s{2,}| \[", line)[0] for line in lines if line.startswith(("python ", "pulsetrain "))]
    there = "" if folder == Path() else f" in {shlex.quote(str(folder))}"
    return "\n  ".join(
        [f"run{there}:" if len(commands) == 1 else f"run one of these{there}:", *dict.fromkeys(commands)]
    )
