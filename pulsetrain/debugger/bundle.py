"""A crash bundle at the debugger's prompt: the log that led to it, and the commands that show what it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pulsetrain.debugger.commands import Command
from pulsetrain.debugger.recorded import Debugger
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.events.names import Events
from pulsetrain.handlers.crash.crash_files import CRASHES, FACTS, Bundle, read_bundle

__all__ = ["bundle_commands", "open_recorded", "told"]

_RAISED = Events.EXCEPTION_RAISED.value
_ROWS = 20  # tensors that are listed unasked
_VALUES = 8  # of a tensor, that are listed


def open_recorded(path: Path, engine: str | None = None) -> tuple[Debugger, Bundle | None]:
    """A run and the bundle of what it ended in, if there is one; or a bundle and its run.

    A bundle is shown in the log of the run that it lies in, right before the fault; where that has no such event any
    more, or has computed it again, in the events that the bundle itself holds.

    Raises:
        RecordingError: there is neither a log nor a bundle.
    """
    if not (path / FACTS).exists():
        debugger = Debugger(path, engine=engine)
        return debugger, _of_the_end(debugger)
    bundle = read_bundle(path)
    run = path.resolve().parent.parent
    if path.resolve().parent.name == CRASHES and (run / "events").is_dir():
        debugger = Debugger(run, engine=engine)
        log, seq = debugger.log, bundle.facts["seq"]
        told = next(log.read(seq=(seq, seq), event=bundle.facts["event"]), None)
        if told is not None and not log.is_superseded(seq):
            if _last_raised(debugger) != seq:
                debugger.goto(seq=seq)
                debugger.back()
            return debugger, bundle
    return Debugger(path, engine=engine), bundle


def bundle_commands(bundle: Bundle) -> dict[str, Command]:
    """What can be asked of a bundle."""
    return {
        "traceback": Command("traceback", "of the crash bundle: where it was raised", lambda rest: _traceback(bundle)),
        "locals": Command("locals [N]", "local variables of the N innermost frames: numbers, shapes, types",
                          lambda rest: _locals(bundle, rest)),
        "batch": Command("batch [ROW]", "the batch under way, or one row of it; its indices into the dataset",
                         lambda rest: _batch(bundle, rest)),
        "norms": Command("norms [weights|gradients|optimizer]", "norm and NaN count of each tensor, broken ones first",
                         lambda rest: _norms(bundle, rest), lambda before: () if before else _KINDS),
    }  # fmt: skip


_KINDS = ("weights", "gradients", "optimizer")


def told(bundle: Bundle) -> Iterator[str]:
    """What the prompt opens with."""
    yield f"crash bundle {bundle.folder}: {bundle.what}"
    for name, why in bundle.facts.get("missing", {}).items():
        yield f"  {name}: missing, {why}"
    yield f"  {', '.join(bundle_commands(bundle))} show what it holds"


def _of_the_end(debugger: Debugger) -> Bundle | None:
    """The newest bundle of what the run ended in."""
    last = _last_raised(debugger)
    found: list[Bundle] = []
    for folder in sorted((debugger.folder / CRASHES).glob("*/")) if last is not None else ():
        try:
            found.append(read_bundle(folder))
        except RecordingError:  # a damaged one must not cost the others
            continue
    return next((bundle for bundle in reversed(found) if bundle.facts.get("seq") == last), None)


def _last_raised(debugger: Debugger) -> int | None:
    events = deque(debugger.log.read(engine=debugger.engine, event=_RAISED), maxlen=1)
    return events[0].seq if events else None


def _traceback(bundle: Bundle) -> Iterable[str]:
    return (bundle.traceback or f"no traceback: {bundle.what}").splitlines()


def _locals(bundle: Bundle, rest: str) -> Iterator[str]:
    frames = bundle.facts.get("frames", [])
    count = _number("locals", rest, 3)
    for frame in frames[-count:]:
        yield f"{frame['file']}:{frame['line']}, in {frame['function']}: {frame['code']}"
        for name, value in frame["locals"].items():
            yield f"    {name} = {value}"


def _batch(bundle: Bundle, rest: str) -> Iterator[str]:
    row = None if not rest else _number("batch", rest, 0)
    facts, rows = bundle.facts, bundle.rows
    where = f"{facts['engine']}, epoch {facts['epoch']}, iteration {facts['iteration']}"
    yield where if facts.get("set") is None else f"{where}, validation set {facts['set']!r}"
    if rows is not None and row is None:
        yield f"rows of the dataset: {', '.join(map(str, rows))}"
    elif rows is not None and row is not None and row < len(rows):
        yield f"row {row} is the dataset's {rows[row]}"
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


def _tensors(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
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
    odd = {"NaN": values.isnan(), "infinite": values.isinf()}
    counts = [f"{int(where.sum())} {name}" for name, where in odd.items() if where.any()]
    if counts and tensor.dim():
        rows = (odd["NaN"] | odd["infinite"]).flatten(1).any(1) if tensor.dim() > 1 else odd["NaN"] | odd["infinite"]
        counts.append(f"in rows {', '.join(map(str, rows.nonzero().flatten().tolist()[:16]))}")
    return f"{text}{ranged}{', ' if counts else ''}{', '.join(counts)}"


def _norms(bundle: Bundle, rest: str) -> Iterator[str]:
    kind = rest or _KINDS[0]
    if kind not in _KINDS:
        raise ConfigurationError(f"norms {rest[:40]}: choose {', '.join(_KINDS)}")
    table = bundle.tensors(kind)
    if not table:
        yield bundle.facts.get("missing", {}).get(kind, f"there were no {kind}")
        return
    broken = [row for row in table if row["nan"] or row["infinite"]]
    yield f"{kind}: {len(table):,} tensors, {len(broken):,} of them with values that are no finite number"
    listed = [*broken, *(row for row in table if row not in broken)]
    width = max(len(row["name"]) for row in listed[:_ROWS])
    for row in listed[:_ROWS]:
        odd = f"  {row['nan']:,} NaN, {row['infinite']:,} infinite" if row in broken else ""
        yield f"  {row['name']:<{width}}  {tuple(row['shape'])}  norm {float(row['norm']):.6g}{odd}"
    if len(listed) > _ROWS:
        yield f"  and {len(listed) - _ROWS:,} more, in {bundle.folder / FACTS}"


def _number(command: str, text: str, default: int) -> int:
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise ConfigurationError(f"{command} {text[:40]}: needs a whole number")
    return int(text)
