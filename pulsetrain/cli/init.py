"""`pulsetrain init`: writes a small project to start from."""

from __future__ import annotations

import argparse
import shlex
from importlib.util import find_spec

from pulsetrain.cli.examples import copy_example, project
from pulsetrain.cli.reports import OK
from pulsetrain.configuration.class_paths import distribution

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Copy the project, and print what it holds and what to do next; returns the exit status."""
    target = copy_example(project(), arguments.folder, "choose another NAME")
    place = shlex.quote(str(target))
    print(f"{target}: {', '.join(sorted(each.name for each in target.iterdir()))}")
    print(f"train:   cd {place} && {_needs('sklearn')}pulsetrain train config.yaml")
    print(f"resume:  cd {place} && pulsetrain train config.yaml --resume latest")
    print(f"test:    cd {place} && {_needs('pytest')}pytest")
    return OK


def _needs(module: str) -> str:
    return "" if find_spec(module) is not None else f"pip install {distribution(module)} && "
