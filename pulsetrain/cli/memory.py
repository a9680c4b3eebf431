"""`pulsetrain memory`: estimates the memory that a configuration needs, and measures it."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections import defaultdict
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
from pulsetrain.engine.memory.live_tensors import COMPONENTS
from pulsetrain.engine.memory.remedies import Remedy, remedies, rows_of, sharded
from pulsetrain.engine.memory.setup import Setup
from pulsetrain.engine.step.protocols import describe

__all__ = ["by_block", "run", "size_text"]

ROWS = 12  # of the modules


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
    yield from _table("estimated", use)
    if measured is not None:
        yield ""
        yield from _table("measured", measured)
    yield ""
    yield f"estimated peak  {size_text(use.peak)}, in the {use.peak_phase} phase"
    if measured is not None:
        difference = f"the estimate differs by {(use.peak / measured.peak - 1):+.1%}"
        yield f"measured peak   {size_text(measured.peak)} by the allocator's count; {difference}"
    if left is not None:
        verdict = "fits" if use.peak <= left else "does not fit"
        yield f"available       {size_text(left)} on {settings.device}: it {verdict}"
    yield ""
    yield f"kept from the forward pass: {size_text(sum(use.saved.values()))} of activations"
    groups = by_block(use.saved)
    for name, (blocks, size) in list(groups.items())[:ROWS]:
        each = f", {size_text(size // blocks)} in each of {blocks}" if blocks > 1 else ""
        yield f"  {name:<32}{size_text(size):>10}{each}"
    if len(groups) > ROWS:
        rest = sum(size for _, size in list(groups.values())[ROWS:])
        yield f"  {f'{len(groups) - ROWS} others':<32}{size_text(rest):>10}"
    if changes:
        yield ""
        yield "what would change it:"
    for change in changes:
        yield f"  {size_text(change.peak):>10}, {'fits' if change.fits else 'too much'}: {change.what}"
        if options := _options(change, setup, config):
            yield f"{'':>14}{options}"
    for note in notes:
        yield f"note: {note}"


def _table(name: str, use: MemoryUse) -> Iterator[str]:
    yield f"{name:<14}" + "".join(f"{phase:>12}" for phase in use.phases)
    for component in COMPONENTS:
        sizes = [at[component] for at in use.phases.values()]
        if any(sizes):
            yield f"{component:<14}" + "".join(f"{size_text(size):>12}" for size in sizes)
    yield f"{'together':<14}" + "".join(f"{size_text(sum(at.values())):>12}" for at in use.phases.values())


def by_block(saved: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Modules grouped by the blocks that they are in, the largest first: how many blocks, and their bytes.

    >>> by_block({"blocks.0.norm": 1, "blocks.1.norm": 2, "blocks.1.mix": 3, "head": 5})
    {'blocks.*': (2, 6), 'head': (1, 5)}
    """
    sizes: dict[str, int] = defaultdict(int)
    blocks: dict[str, set[str]] = defaultdict(set)
    for path, size in saved.items():
        found = re.match(r"((?:\D*\.)?)(\d+)(?:\.|$)", path)
        name = f"{found[1]}*" if found else path or "(the model itself)"
        sizes[name] += size
        blocks[name].add(found[2] if found else "")
    return {name: (len(blocks[name]), sizes[name]) for name in sorted(sizes, key=lambda name: -sizes[name])}


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


def use_as_dict(use: MemoryUse) -> dict[str, object]:
    """An estimate or a measurement as plain values."""
    return {
        "peak": use.peak,
        "peak_phase": use.peak_phase,
        "components": use.components,
        "phases": {phase: dict(at) for phase, at in use.phases.items()},
        "saved": dict(use.saved),
        "allocated": use.allocated,
    }


def size_text(size: int) -> str:
    """A size in words.

    >>> size_text(1_500), size_text(58_519_832), size_text(1_342_252_977_508)
    ('1.50 kB', '58.5 MB', '1,342 GB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            value = size / factor
            return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
    return f"{size} B"
