"""A crash bundle at the debugger's prompt: the log before the crash, and commands that show the bundle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pulsetrain.debugger.command import Command, whole_number
from pulsetrain.debugger.recorded import Debugger
from pulsetrain.engine import ConfigurationError, Events, RecordingError
from pulsetrain.engine.memory.estimate import MemoryUse
from pulsetrain.engine.memory.report import kept_lines, size_text, use_table
from pulsetrain.handlers.crash.crash_files import CRASHES, FACTS, Bundle, read_bundle

__all__ = ["bundle_commands", "bundle_summary", "open_recorded"]

_RAISED = Events.EXCEPTION_RAISED.value
_ROWS = 20  # tensors to list
_VALUES = 8  # of a tensor, to list


def open_recorded(path: Path, engine: str | None = None, rank: int = 0) -> tuple[Debugger, Bundle | None]:
    """A debugger for a run, with the bundle of the crash that ended it, if any; or for a bundle and its run.

    A bundle inside a run folder is shown in the run's log, right before the crash. If the log no longer holds that
    event, or a resumed run has computed it again, the events in the bundle itself are shown.

    Args:
        path: the run, or the bundle.
        engine: as for `Debugger`.
        rank: the rank whose log to read; bundles are written by rank 0 alone.

    Raises:
        RecordingError: there is neither a log of that rank nor a bundle.
    """
    if rank:
        return Debugger(path, engine=engine, rank=rank), None
    if not (path / FACTS).exists():
        debugger = Debugger(path, engine=engine)
        return debugger, _of_last_crash(debugger)
    bundle = read_bundle(path)
    run = path.resolve().parent.parent
    if path.resolve().parent.name == CRASHES and (run / "events").is_dir():
        debugger = Debugger(run, engine=engine)
        log, seq = debugger.log, bundle.facts["seq"]
        reported = next(log.read(seq=(seq, seq), event=bundle.facts["event"]), None)
        if reported is not None and not log.is_superseded(seq):
            if _last_raised(debugger) != seq:
                debugger.goto(seq=seq)
                debugger.back()
            return debugger, bundle
    return Debugger(path, engine=engine), bundle


def bundle_commands(bundle: Bundle) -> dict[str, Command]:
    """The commands that show a bundle's content."""
    return {
        "traceback": Command("traceback", "show the traceback of the crash", lambda rest: _traceback(bundle)),
        "locals": Command("locals [N]", "show local variables of the N innermost frames: numbers, shapes, types",
                          lambda rest: _locals(bundle, rest)),
        "batch": Command("batch [ROW]", "show the current batch, or one row of it, and its indices into the dataset",
                         lambda rest: _batch(bundle, rest)),
        "norms": Command("norms [weights|gradients|optimizer]",
                         "show norm and NaN count of each tensor, those with NaN or infinite values first",
                         lambda rest: _norms(bundle, rest), lambda before: () if before else _KINDS),
        **({} if bundle.memory is None else {
            "memory": Command("memory", "show what was held, and what a step needs by phase and module",
                              lambda rest: _memory(bundle.memory or {}))}),
    }  # fmt: skip


_KINDS = ("weights", "gradients", "optimizer")


def bundle_summary(bundle: Bundle) -> Iterator[str]:
    """The first lines of the prompt."""
    yield f"crash bundle {bundle.folder}: {bundle.what}"
    for name, why in bundle.facts.get("missing", {}).items():
        yield f"  {name}: missing, {why}"
    if bundle.memory is not None and "remedy" in bundle.memory:
        yield f"  memory: {bundle.memory['remedy']}"
    yield f"  {', '.join(bundle_commands(bundle))} show its content"


def _of_last_crash(debugger: Debugger) -> Bundle | None:
    """The newest bundle of the exception that ended the run."""
    last = _last_raised(debugger)
    found: list[Bundle] = []
    for folder in sorted((debugger.folder / CRASHES).glob("*/")) if last is not None else ():
        try:
            found.append(read_bundle(folder))
        except RecordingError:  # a damaged one must not hide the others
            continue
    return next((bundle for bundle in reversed(found) if bundle.facts.get("seq") == last), None)


def _last_raised(debugger: Debugger) -> int | None:
    events = deque(debugger.log.read(engine=debugger.engine, event=_RAISED), maxlen=1)
    return events[0].seq if events else None


def _traceback(bundle: Bundle) -> Iterable[str]:
    return (bundle.traceback or f"no traceback: {bundle.what}").splitlines()


def _locals(bundle: Bundle, rest: str) -> Iterator[str]:
    frames = bundle.facts.get("frames", [])
    count = whole_number("locals", rest) if rest else 3
    for frame in frames[-count:]:
        yield f"{frame['file']}:{frame['line']}, in {frame['function']}: {frame['code']}"
        for name, value in frame["locals"].items():
            yield f"    {name} = {value}"


def _batch(bundle: Bundle, rest: str) -> Iterator[str]:
    row = whole_number("batch", rest) if rest else None
    facts, rows = bundle.facts, bundle.rows
    where = f"{facts['engine']}, epoch {facts['epoch']}, iteration {facts['iteration']}"
    yield where if facts.get("set") is None else f"{where}, validation set {facts['set']!r}"
    if rows is not None and row is None:
        yield f"rows of the dataset: {', '.join(map(str, rows))}"
    elif rows is not None and row is not None and row < len(rows):
        yield f"row {row} is row {rows[row]} of the dataset"
    batch = bundle.batch
    if batch is None:
        yield facts.get("missing", {}).get("batch", "there was no batch")
        return
    for name, tensor in _tensors(batch):
        if row is None:
            yield f"  {name}: {_described(tensor)}"
        elif tensor.dim() == 0 or row >= len(tensor):
            raise ConfigurationError(f"batch {row}: {name} has no such row; its shape is {tuple(tensor.shape)}")
        else:
            values = tensor[row].flatten()
            more = f" ... {values.numel() - _VALUES} more" if values.numel() > _VALUES else ""
            yield f"  {name}[{row}]: {_described(tensor[row])}: {values[:_VALUES].tolist()}{more}"


def _tensors(value: object, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}[{index}]")


def _described(tensor: Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.is_complex() or tensor.numel() == 0:
        return text
    values = tensor.float()
    finite = values[torch.isfinite(values)]
    ranged = f" from {finite.min():.6g} to {finite.max():.6g}" if finite.numel() else ""
    counts = [
        f"{int(mask.sum())} {name}"
        for name, mask in (("NaN", values.isnan()), ("infinite", values.isinf()))
        if mask.any()
    ]
    if counts and tensor.dim():
        rows = (~torch.isfinite(values)).reshape(len(values), -1).any(1)
        counts.append(f"in rows {', '.join(map(str, rows.nonzero().flatten().tolist()[:16]))}")
    return f"{text}{ranged}{', ' if counts else ''}{', '.join(counts)}"


def _memory(memory: Mapping[str, Any]) -> Iterator[str]:
    for name in ("requested", "available"):
        if memory.get(name) is not None:
            yield f"{name:<14}{size_text(memory[name]):>12}, on {memory['device']}"
    for name, size in memory["held"].items():
        yield f"{name:<14}{size_text(size):>12} held after the step had failed"
    found = memory.get("estimated")
    if found is not None:
        use = MemoryUse(phases=found["phases"], saved=found["saved"])
        yield from use_table("estimated", use)
        yield from kept_lines(use)
    if "remedy" in memory:
        yield memory["remedy"]


def _norms(bundle: Bundle, rest: str) -> Iterator[str]:
    kind = rest or _KINDS[0]
    if kind not in _KINDS:
        raise ConfigurationError(f"norms {rest[:40]}: choose one of {', '.join(_KINDS)}")
    table = bundle.tensors(kind)
    if not table:
        yield bundle.facts.get("missing", {}).get(kind, f"there were no {kind}")
        return
    broken = [row for row in table if row["nan"] or row["infinite"]]
    yield f"{kind}: {len(table):,} tensors, {len(broken):,} of them with NaN or infinite values"
    listed = [*broken, *(row for row in table if row not in broken)]
    width = max(len(row["name"]) for row in listed[:_ROWS])
    for row in listed[:_ROWS]:
        odd = f"  {row['nan']:,} NaN, {row['infinite']:,} infinite" if row in broken else ""
        yield f"  {row['name']:<{width}}  {tuple(row['shape'])}  norm {float(row['norm']):.6g}{odd}"
    if len(listed) > _ROWS:
        yield f"  and {len(listed) - _ROWS:,} more, in {bundle.folder / FACTS}"
