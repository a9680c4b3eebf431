"""`pulsetrain verify`: trains a recorded run again and compares the two."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pulsetrain.cli.launch import Launch, launch_once
from pulsetrain.cli.reports import DAMAGED, FAILED, OK, report, until_closed
from pulsetrain.cli.results import logs_on_stderr, run_folder
from pulsetrain.configuration.rebuild import rebuild
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.errors import ConfigurationError, PeerFailed, PulsetrainError
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.verification import check_request, verify

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Train again, print the result, and return it as the exit status; or start the processes that do."""
    given = arguments.folder
    run = run_folder(given) if isinstance(given, Path) else given
    how = Launch.of(arguments.settings)
    if how is not None:
        return _launch(how, run, arguments)
    here = ranks()
    try:
        with logs_on_stderr():
            found = verify(run, lambda folder: rebuild(run, folder).trainer, arguments.first, arguments.last)
    except Exception as error:
        wrong_input = isinstance(error, PulsetrainError) and not isinstance(error, PeerFailed)
        if here.world_size == 1 or wrong_input:
            raise
        error.add_note("the rerun failed in this process, so nothing is proven")
        return report(error, FAILED)
    if not here.is_main:
        return OK  # the main process says what was found, for all
    with until_closed():
        print(plain(found.report(), keep="\n"))
    if found.differs:
        return FAILED
    return OK if found else DAMAGED


def _launch(how: Launch, run: str | os.PathLike[str], arguments: argparse.Namespace) -> int:
    """Verify in several processes."""
    if "launch.min_nproc" in arguments.settings:
        raise ConfigurationError(
            "--launch.min_nproc: a run is repeated by as many processes as --launch.nproc says; leave it out"
        )
    check_request(run, arguments.first, arguments.last, how.nproc)
    words = ["verify", str(run)]  # each process unpacks an archive itself
    for name, value in (("from", arguments.first), ("to", arguments.last)):
        words += [f"--{name}", str(value)] if value is not None else []
    threads = (read_run_file(Path(run)).get("environment") or {}).get("threads")
    return launch_once(how.nproc, words, threads if isinstance(threads, int) else None)
