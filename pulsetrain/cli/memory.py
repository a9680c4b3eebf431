"""`pulsetrain memory`: estimates the memory that a configuration needs, and measures it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pulsetrain.cli.reports import FAILED, OK, until_closed
from pulsetrain.cli.results import logs_on_stderr
from pulsetrain.configuration.memory_setup import setup_with_values, setup_without_values
from pulsetrain.configuration.messages import in_settings
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.engine.memory.available import available
from pulsetrain.engine.memory.estimate import MemoryUse, estimate, measure
from pulsetrain.engine.memory.remedies import Remedy, remedies, rows_of, sharded
from pulsetrain.engine.memory.report import kept_lines, size_text, use_as_dict, use_table
from pulsetrain.engine.memory.setup import Setup
from pulsetrain.engine.step.protocols import describe

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate; returns the exit status."""
    with logs_on_stderr():
        try:
            return _run(arguments)
        except Exception as error:
            if arguments.traceback:
                traceback.print_exc()
            if isinstance(error, PulsetrainError):
                raise in_settings(error) from error
            error.add_note("--traceback shows where in the code")
            raise


def _run(arguments: argparse.Namespace) -> int:
    config, base = read_config(arguments.config, arguments.settings), base_of(arguments.config.parent)
    setup, notes = setup_without_values(config, base)
    use, left = estimate(setup), available(setup.backend.device)
    if use.assumed:
        notes.append(
            f"the model reads the values of its tensors; {use.assumed} of them were assumed to be 0, 1 or false"
        )
    fits = left is None or use.peak <= left
    changes = [] if left is None or fits else list(remedies(setup, use, left))
    split = _processes(config)
    if split > 1:
        each = size_text(sharded(setup.model, use, split))
        notes.append(f"these are the sizes for one process; each of {split}, with shard: {split}, needs about {each}")
    measured = None
    if arguments.measure and fits:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write on standard error
        print("measuring ...", file=sys.stderr)
        measured = measure(setup_with_values(config, base))
    elif arguments.measure:
        notes.append("not measured, since it does not fit")
    with until_closed():
        if arguments.json:
            print(json.dumps(_as_dict(setup, use, measured, left, changes, notes)))
        else:
            print("\n".join(_lines(setup, use, measured, left, changes, notes, config)))
    return OK if fits else FAILED


def _processes(config: Mapping[str, Any]) -> int:
    given = config.get("parallel")
    shard = given.get("shard") if isinstance(given, Mapping) else None
    return shard if isinstance(shard, int) else 1


def _lines(
    setup: Setup,
    use: MemoryUse,
    measured: MemoryUse | None,
    left: int | None,
    changes: Sequence[Remedy],
    notes: Sequence[str],
    config: Mapping[str, Any],
) -> Iterator[str]:
    count = sum(each.numel() for each in setup.model.parameters())
    settings = setup.backend.settings
    yield f"{type(setup.model).__name__}, {count:,} parameters, {settings.precision} on {settings.device}"
    together = "" if setup.accumulate == 1 else f", {setup.accumulate} to an update"
    yield f"a batch of {describe(setup.batch)}{together}"
    yield ""
    yield from use_table("estimated", use)
    if measured is not None:
        yield ""
        yield from use_table("measured", measured)
    yield ""
    yield f"estimated peak  {size_text(use.peak)}, in the {use.peak_phase} phase"
    if measured is not None:
        difference = f"the estimate differs by {(use.peak / measured.peak - 1):+.1%}"
        yield f"measured peak   {size_text(measured.peak)} by the allocator's count; {difference}"
    if left is not None:
        verdict = "fits" if use.peak <= left else "does not fit"
        yield f"available       {size_text(left)} on {settings.device}: it {verdict}"
    yield ""
    yield from kept_lines(use)
    if changes:
        yield ""
        yield "what would change it:"
    for change in changes:
        yield f"  {size_text(change.peak):>10}, {'fits' if change.fits else 'too much'}: {change.what}"
        if options := _options(change, setup, config):
            yield f"{'':>14}{options}"
    for note in notes:
        yield f"note: {note}"


def _options(change: Remedy, setup: Setup, config: Mapping[str, Any]) -> str:
    """The options of the command line that make a change."""
    words = [f"--{name} {value!r}" for name, value in change.settings.items()]
    if change.rows is not None:
        data = config["data"].get("init_args") if isinstance(config["data"], Mapping) else None
        of = [name for name, value in (data or {}).items() if value == rows_of(setup.batch) and "size" in name]
        words += [f"--data.init_args.{name} {change.rows}" for name in of[:1]]
    return " ".join(words).replace('"', "'")


def _as_dict(
    setup: Setup,
    use: MemoryUse,
    measured: MemoryUse | None,
    left: int | None,
    changes: Sequence[Remedy],
    notes: Sequence[str],
) -> dict[str, object]:
    return {
        "model": type(setup.model).__name__,
        "device": str(setup.backend.settings.device),
        "precision": setup.backend.settings.precision,
        "estimated": use_as_dict(use),
        "measured": None if measured is None else use_as_dict(measured),
        "available": left,
        "fits": None if left is None else use.peak <= left,
        "changes": [
            {
                "what": each.what,
                "peak": each.peak,
                "fits": each.fits,
                "settings": dict(each.settings),
                "rows": each.rows,
            }
            for each in changes
        ],
        "notes": list(notes),
    }
