"""A hook of MkDocs: adds the pages that are made from the code, and those that lie beside this folder."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from configuration_reference import page as configuration  # this folder is on the path while mkdocs loads the hook
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
BESIDE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
EXAMPLES, CONFIGURATION, COMMANDS = "examples.md", "reference/configuration.md", "reference/commands.md"
PACKAGES = {  # each has one page
    "pulsetrain": "Trainer and configuration",
    "pulsetrain.testing": "Testing",
    "pulsetrain.engine.checkpoint": "Checkpoints",
    "pulsetrain.engine.schedules": "Schedules",
    "pulsetrain.engine.optimizers": "Optimizers",
    "pulsetrain.engine.losses": "Losses",
    "pulsetrain.engine.metrics": "Metrics",
    "pulsetrain.engine.recording": "Recording and replay",
}
SHARED_OUT = {"pulsetrain.engine": "Engine", "pulsetrain.handlers": "Handlers"}  # one page for each folder


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the generated pages to the navigation."""
    reference = [{title.partition(": `")[0]: path} for path, title, _ in _reference()]
    config.nav = [
        *(config.nav or ()),
        {"Examples": [EXAMPLES, *(f"notebooks/{path.stem}.md" for path in NOTEBOOKS)]},
        {"Reference": [{"Configuration": CONFIGURATION}, {"Command line": COMMANDS}, *reference]},
        {"About": ["changelog.md", "contributing.md"]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for page, source in BESIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text).replace("](CONTRIBUTING.md)", "](contributing.md)")
        files.append(File.generated(config, page, content=text))
    for notebook in NOTEBOOKS:
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=_cells(notebook)))
    files.append(File.generated(config, EXAMPLES, content=_examples()))
    files.append(File.generated(config, CONFIGURATION, content=configuration()))
    files.append(File.generated(config, COMMANDS, content=_commands()))
    for path, title, names in _reference():
        parts = "\n\n".join(f"::: {name}" for name in names)
        files.append(File.generated(config, path, content=f"# {title}\n\n{parts}\n"))
    return files


def _cells(notebook: Path) -> str:
    """A notebook as a page: what it says, and its code."""
    texts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        texts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(texts) + "\n"


def _reference() -> Iterator[tuple[str, str, list[str]]]:
    """The path and the title of each page about Python, and where the names on it are defined."""
    shown: set[str] = set()
    for package, title in PACKAGES.items():
        names = [name for name in _exported(package).values() if package != "pulsetrain" or _is_own(name)]
        shown |= {*names}
        yield f"reference/{package}.md", f"{title}: `{package}`", names
    for package, title in SHARED_OUT.items():
        folders: dict[str, list[str]] = {}
        for name in _exported(package).values():
            if name not in shown:
                folders.setdefault(name.removeprefix(f"{package}.").partition(".")[0], []).append(name)
        for folder, names in sorted(folders.items()):
            yield f"reference/{package}.{folder}.md", f"{title}, {folder.replace('_', ' ')}: `{package}`", names


def _exported(package: str) -> dict[str, str]:
    """The classes and functions that a package exports, and where each is defined."""
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in module.__all__ if not name.startswith("__")}
    return {
        name: f"{value.__module__}.{value.__qualname__}"
        for name, value in values.items()
        if isinstance(value, type | FunctionType) and value.__module__.startswith("pulsetrain.")
    }


def _is_own(name: str) -> bool:
    """Whether it is of the package itself, which also exports what the parts below it have."""
    return not name.startswith(tuple(f"{package}." for package in SHARED_OUT))


def _examples() -> str:
    """What `pulsetrain examples` prints, as a table."""
    from pulsetrain.cli.examples import described

    rows = [f"| `{name}` | {about} |" for name, about in described()]
    copy = "`pulsetrain examples NAME` copies one, with the others that it needs, and says how to run it."
    return "\n".join(["# All examples", "", copy, "", "| NAME | what it shows |", "|---|---|", *rows, ""])


def _commands() -> str:
    """What each command's --help prints."""
    from pulsetrain.cli.parser import make_parser

    parser = make_parser()
    commands: dict[str, argparse.ArgumentParser] = parser.parse_args(["completion", "bash"]).commands
    parts = [f"## {name}\n\n{_help(each)}" for name, each in commands.items()]
    return "\n\n".join(["# Command line", "What `--help` prints.", _help(parser), *parts]) + "\n"


def _help(parser: argparse.ArgumentParser) -> str:
    return f"```text\n{parser.format_help().strip()}\n```"
