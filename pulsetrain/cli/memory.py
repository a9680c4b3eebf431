"""`pulsetrain memory`: estimates the memory that a configuration needs, and measures it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from pulsetrain.engine.memory.remedies import Remedy, peak_of, remedies, rows_of
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
    use, left = _estimate(setup, notes, or_measure=arguments.measure), available(setup.backend.device)
    found = _Found(setup, use, left, notes, _processes(config, notes))
    if use is not None:
        _explain(found, use)
        if not found.fits and left is not None:
            found.changes = list(remedies(setup, use, left, found.processes))
    if arguments.measure and (use is None or left is None or use.peak <= left):
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write on standard error
        print("measuring ...", file=sys.stderr)
        found.measured = measure(setup_with_values(config, base))
    elif arguments.measure:
        notes.append(f"not measured, since it does not fit{' into one process' if found.processes > 1 else ''}")
    with until_closed():
        print(json.dumps(_as_dict(found)) if arguments.json else "\n".join(_lines(found, config)))
    return OK if found.fits else FAILED


@dataclass
class _Found:
    """What is printed."""

    setup: Setup
    use: MemoryUse | None  # None if it could not be estimated
    left: int | None
    notes: list[str]
    processes: int  # that share the model out
    measured: MemoryUse | None = None
    changes: Sequence[Remedy] = ()

    @property
    def needed(self) -> int | None:
        """The bytes that each process needs at its peak, if that is known."""
        return None if self.use is None else peak_of(self.setup, self.use, self.processes)

    @property
    def fits(self) -> bool:
        """Whether it is not known to be too much for a process."""
        return self.needed is None or self.left is None or self.needed <= self.left


def _estimate(setup: Setup, notes: list[str], *, or_measure: bool) -> MemoryUse | None:
    try:
        return estimate(setup)
    except Exception as error:
        if not or_measure:
            error.add_note("--measure shows what it needs with values")
            raise
        notes.append(f"not estimated: {str(error).splitlines()[0]}")
        return None


def _explain(found: _Found, use: MemoryUse) -> None:
    notes = found.notes
    if use.assumed:
        notes.append(f"the model reads values of its tensors; {use.assumed} times, 0, 1 or false was assumed")
    if use.unknown:
        notes.append(f"{', '.join(use.unknown)} may keep more than is known without values; --measure shows it")
    if found.processes > 1 and found.needed is not None:
        notes.append(
            f"the table is of one process; each of {found.processes}, with shard: {found.processes}, needs about "
            f"{size_text(found.needed)}, which is compared with what is available here for one of them"
        )


def _processes(config: Mapping[str, Any], notes: list[str]) -> int:
    """How many processes share the model out, and notes on what else they would share."""
    given = config.get("parallel")
    given = given if isinstance(given, Mapping) else {}
    shard = given.get("shard", 1)
    other = [name for name in ("tensor", "pipeline") if given.get(name, 1) != 1]
    if shard == -1:
        other.append("shard")
    if other:
        notes.append(f"what {' and '.join(f'parallel.{name}' for name in other)} saves is not counted")
    return shard if isinstance(shard, int) and shard > 1 else 1


def _lines(found: _Found, config: Mapping[str, Any]) -> Iterator[str]:
    setup, use, measured = found.setup, found.use, found.measured
    count = sum(each.numel() for each in setup.model.parameters())
    settings = setup.backend.settings
    yield f"{type(setup.model).__name__}, {count:,} parameters, {settings.precision} on {settings.device}"
    together = "" if setup.accumulate == 1 else f", {setup.accumulate} to an update"
    yield f"a batch of {describe(setup.batch)}{together}"
    for name, each in (("estimated", use), ("measured", measured)):
        if each is not None:
            yield ""
            yield from use_table(name, each)
    yield ""
    if use is not None:
        yield f"estimated peak  {size_text(use.peak)}, in the {use.peak_phase} phase"
    if found.processes > 1 and found.needed is not None:
        yield f"each process    {size_text(found.needed)}, of {found.processes}"
    if measured is not None:
        difference = "" if use is None else f"; the estimate differs by {(use.peak / measured.peak - 1):+.1%}"
        yield f"measured peak   {size_text(measured.peak)} by the allocator's count{difference}"
    if found.left is not None:
        verdict = "" if use is None else f": it {'fits' if found.fits else 'does not fit'}"
        yield f"available       {size_text(found.left)} on {settings.device}{verdict}"
    if (shown := use or measured) is not None:
        yield ""
        yield from kept_lines(shown)
    if found.changes:
        yield ""
        yield "what would change it:"
    for change in found.changes:
        yield f"  {size_text(change.peak):>10}, {'fits' if change.fits else 'too much'}: {change.what}"
        if options := _options(change, setup, config):
            yield f"{'':>14}{options}"
    for note in found.notes:
        yield f"note: {note}"


def _options(change: Remedy, setup: Setup, config: Mapping[str, Any]) -> str:
    """The options of the command line that make a change."""
    words = [f"--{name} {'null' if value is None else repr(value)}" for name, value in change.settings.items()]
    if change.rows is not None:
        data = config["data"].get("init_args") if isinstance(config["data"], Mapping) else None
        of = [name for name, value in (data or {}).items() if value == rows_of(setup.batch) and "size" in name]
        words += [f"--data.init_args.{name} {change.rows}" for name in of[:1]]
    return " ".join(words).replace('"', "'")


def _as_dict(found: _Found) -> dict[str, object]:
    setup = found.setup
    return {
        "model": type(setup.model).__name__,
        "device": str(setup.backend.settings.device),
        "precision": setup.backend.settings.precision,
        "estimated": None if found.use is None else use_as_dict(found.use),
        "measured": None if found.measured is None else use_as_dict(found.measured),
        "available": found.left,
        "processes": found.processes,
        "needed_by_each": found.needed,
        "fits": None if found.left is None or found.use is None else found.fits,
        "changes": [
            {
                "what": each.what,
                "peak": each.peak,
                "fits": each.fits,
                "settings": dict(each.settings),
                "rows": each.rows,
            }
            for each in found.changes
        ],
        "notes": found.notes,
    }
