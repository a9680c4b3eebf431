"""`pulsetrain verify`: trains a recorded run again and compares the two."""

from __future__ import annotations

import argparse

from pulsetrain.cli.reports import DAMAGED, FAILED, OK, until_closed
from pulsetrain.cli.results import logs_on_stderr, run_folder
from pulsetrain.configuration.rebuild import rebuild
from pulsetrain.verification import verify

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Train again, print the result, and return it as the exit status."""
    run = run_folder(arguments.folder)
    with logs_on_stderr():
        found = verify(run, lambda folder: rebuild(run, folder).trainer, arguments.first, arguments.last)
    with until_closed():
        print(found.report())
    if found.differs:
        return FAILED
    return OK if found else DAMAGED
