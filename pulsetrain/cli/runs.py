"""`pulsetrain runs`: lists the runs below a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pulsetrain.cli.reports import OK, until_closed
from pulsetrain.engine.argument_checks import check_choice, check_whole_number
from pulsetrain.engine.lazy_names import no_garbage_collection
from pulsetrain.engine.plain_text import plain
from pulsetrain.runs.index import RunIndex
from pulsetrain.runs.listing import FORMATS, check_columns, columns_of, sorted_by
from pulsetrain.runs.summary import Status
from pulsetrain.runs.where import select_runs

__all__ = ["run"]


@no_garbage_collection()  # each one would walk all the runs found so far
def run(arguments: argparse.Namespace) -> int:
    """Print the runs; returns the exit status."""
    root = arguments.folder or (Path("runs") if Path("runs").is_dir() else Path())
    for status in arguments.status:
        check_choice("pulsetrain runs", "status", status, [each.value for each in Status])
    if arguments.limit is not None:
        check_whole_number("pulsetrain runs", "limit", arguments.limit)
    index = RunIndex(root, cache=not arguments.no_index)
    found = index.summaries(archives=True)
    for folder in index.unreadable:
        print(f"pulsetrain: {plain(folder)}: cannot be read: permission denied", file=sys.stderr)
    if not found:
        print(f"pulsetrain: {plain(str(root))}: holds no runs; name a folder that does", file=sys.stderr)
        return OK
    chosen = select_runs(found, arguments.where)
    if arguments.status:
        chosen = [each for each in chosen if each.status.value in arguments.status]
    chosen = [each for each in chosen if set(arguments.tag) <= set(each.tags)]
    columns = arguments.columns or columns_of(chosen)
    check_columns("sort", [arguments.sort], found)
    check_columns("columns", columns, found)
    chosen = sorted_by(chosen, arguments.sort, root, reverse=arguments.reverse)[: arguments.limit]
    with until_closed():
        if not chosen:
            print(f"pulsetrain: none of the {len(found):,} runs matches", file=sys.stderr)
        else:
            print("\n".join(FORMATS[arguments.format](chosen, columns, root)))
    return OK
