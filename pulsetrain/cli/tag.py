"""`pulsetrain tag`: changes and shows the tags of runs."""

from __future__ import annotations

import argparse

from pulsetrain.cli.reports import OK
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.runs.summary import is_run
from pulsetrain.runs.tags import change_tags

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Change the tags, and print those that each run has then; returns the exit status."""
    for folder in arguments.runs:
        if not is_run(folder):
            raise RunFolderError(f"{folder}: is not a run folder; `pulsetrain runs` lists those below a folder")
    for folder in arguments.runs:
        tags = change_tags(folder, arguments.add, arguments.remove)
        print(f"{folder}: {', '.join(tags) or 'no tags'}")
    return OK
