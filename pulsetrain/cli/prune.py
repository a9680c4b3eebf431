"""`pulsetrain prune`: deletes old checkpoints of runs that have ended."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pulsetrain.cli.reports import FAILED, OK, USAGE
from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError
from pulsetrain.engine.plain_text import format_count, plain
from pulsetrain.runs.index import RunIndex
from pulsetrain.runs.prune import Pruned, prune, superfluous
from pulsetrain.runs.summary import RunSummary
from pulsetrain.runs.where import select_runs

__all__ = ["run"]

_NAMED = 4  # checkpoints of a run


def run(arguments: argparse.Namespace) -> int:
    """Show what is deleted, and delete it if that was asked for; returns the exit status."""
    check_whole_number("pulsetrain prune", "keep_last", arguments.keep_last)
    if arguments.older_than is not None and not arguments.older_than >= 0:
        raise ConfigurationError(f"--older-than {arguments.older_than:g}: needs days, 0 or more")
    every = RunIndex(arguments.folder).summaries()
    found: list[Pruned] = []
    failed: list[Path] = []
    for summary in select_runs(every, arguments.where):
        with _reported(summary.folder, failed):
            found.append(_pruned(summary, every, arguments))
    found = [each for each in found if each.checkpoints]
    for each in found:
        names = [path.name for path in each.checkpoints]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        described = _described(len(names), each.size)
        print(plain(f"{each.run}: {described}: {', '.join(names[:_NAMED])}{more}"))
    total = _described(sum(len(each.checkpoints) for each in found), sum(each.size for each in found))
    if not arguments.yes:
        print(f"would delete {total}; nothing was deleted: add --yes" if found else "nothing to delete")
        return USAGE if failed else OK
    kept: list[Path] = []
    for each in found:
        there = each.checkpoints
        with _reported(each.run, failed):
            there = prune(each)
        kept += there
    print(f"deleted {total}" if not kept else f"{format_count(len(kept), 'checkpoint')} not deleted: {kept[0]} ...")
    return USAGE if failed else FAILED if kept else OK


@contextmanager
def _reported(run: Path, failed: list[Path]) -> Iterator[None]:
    """One run that cannot be read or changed is named, and the other runs are pruned."""
    try:
        yield
    except (PulsetrainError, OSError) as error:
        print(f"pulsetrain: error: {plain(f'{run}: {error}')}; its checkpoints are kept", file=sys.stderr)
        failed.append(run)


def _described(checkpoints: int, size: int) -> str:
    return f"{format_count(checkpoints, 'checkpoint')}, {size / 1e6:,.1f} MB"


def _pruned(summary: RunSummary, every: list[RunSummary], arguments: argparse.Namespace) -> Pruned:
    age = time.time() - (summary.updated or 0.0)
    if summary.status.is_going or (arguments.older_than is not None and age < arguments.older_than * 86400):
        return Pruned(summary.folder, [], 0)
    parents = [each.parent for each in every if each.parent is not None]
    names = {str(each.get("checkpoint")) for each in parents if _is_run(each, summary)}
    return superfluous(summary.folder, arguments.keep_last, names)


def _is_run(parent: Mapping[str, object], summary: RunSummary) -> bool:
    """Whether a fork was made from the run, which may have been moved since."""
    return (bool(summary.id) and parent.get("id") == summary.id) or (
        Path(str(parent["run"])) == summary.folder.resolve()
    )
