"""`pulsetrain tag`: changes and shows the tags of runs."""

from __future__ import annotations

import argparse

from pulsetrain.cli.reports import OK
from pulsetrain.engine.plain_text import plain
from pulsetrain.runs.summary import check_run
from pulsetrain.runs.tags import change_tags

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Change the tags, and print those that each run has then; returns the exit status."""
    for folder in arguments.runs:
        check_run(folder)
    for folder in arguments.runs:
        tags = change_tags(folder, arguments.add, arguments.remove)
        print(f"{plain(str(folder))}: {', '.join(map(plain, tags)) or 'no tags'}")
    return OK
