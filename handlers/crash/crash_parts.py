"""What a failed process can still tell: its frames, its batch, its weights, its environment."""

from __future__ import annotations

import math
import os
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import can_be_keyed
from pulsetrain.engine.events.names import Event
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.step.protocols import describe
from pulsetrain.handlers.metric_values.event_values import EventValues
from pulsetrain.handlers.metric_values.step_values import to_host

__all__ = [
    "batch_again",
    "environment_variables",
    "frames",
    "is_past",
    "plain_batch",
    "recorded_tail",
    "tensor_table",
    "write_events",
]

# all that is told of the environment: others may hold keys and passwords
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR",
    "NCCL_DEBUG", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NODELIST", "PYTHONHASHSEED",
)  # fmt: skip
MOST_FRAMES, MOST_LOCALS, MOST_DEPTH = 40, 40, 8
Heard = tuple[Event, Mapping[str, Tensor | float] | None]  # an event, and the scalars of the step's output


def environment_variables() -> dict[str, str]:
    """Those that a failure may hang on, where they are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def frames(error: BaseException) -> list[dict[str, Any]]:
    """The innermost frames of an exception, outermost first, with what is known of their local variables.

    Numbers are told, and shapes, dtypes and devices of tensors; of all else the type alone: a text may be a secret, and
    a tensor's values may lie on a device that has failed.
    """
    walked = list(traceback.walk_tb(error.__traceback__))[-MOST_FRAMES:]
    lines = traceback.extract_tb(error.__traceback__)[-MOST_FRAMES:]
    return [
        {"file": line.filename, "line": line.lineno, "function": line.name, "code": line.line,
         "locals": {name: _told(value) for name, value in list(frame.f_locals.items())[:MOST_LOCALS]}}
        for (frame, _), line in zip(walked, lines, strict=True)
    ]  # fmt: skip


def plain_batch(value: Any, depth: int = 0) -> Any:
    """The batch as torch.load(weights_only=True) reads it: tensors on the host, in dicts, lists and tuples.

    Of a dataclass or another object it is a dict of its fields; of what has none, its type as text.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()  # of a view, not the whole that it is cut from
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value if type(value) in (bool, int, float, str, bytes, type(None)) else str(value)
    if isinstance(value, Real):  # numpy's
        return float(value)
    if depth < MOST_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): plain_batch(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [plain_batch(item, depth + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        parts = {each.name: getattr(value, each.name, None) for each in fields(value)} if is_dataclass(value) else None
        parts = parts or getattr(value, "__dict__", None)
        if parts and not isinstance(value, type):
            return {name: plain_batch(item, depth + 1) for name, item in parts.items()}
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def is_past(engine: Any, anomaly: Any) -> bool:
    """Whether an anomaly came of other rows than those of the batch under way."""
    iteration = engine.state.iteration
    if anomaly.at_iteration not in (None, iteration):
        return True
    position = getattr(engine, "position", None)
    rows = None if position is None else position.rows(iteration)
    return bool(anomaly.batch_indices) and rows is not None and list(anomaly.batch_indices) != list(rows)


def batch_again(engine: Any, rows: Sequence[int] | None, iteration: int | None) -> Any:
    """Those rows as the loader of the trainer collates them, read again; nothing that the run draws changes by it.

    Raises:
        LookupError: the rows are not known, or the loader is none that can be asked for them.
    """
    loader: Any = getattr(engine, "train_loader", None)
    if not rows or not can_be_keyed(loader) or loader.batch_sampler is None:
        why = f"{type(loader).__name__} cannot be asked for its rows" if rows else "its rows are not known"
        raise LookupError(f"the batch of iteration {iteration} is held no more, and {why}")
    dataset = loader.dataset
    with rng.preserve_rng():
        several = getattr(dataset, "__getitems__", None)
        return loader.collate_fn(several(list(rows)) if several else [dataset[row] for row in rows])


def tensor_table(named: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Each tensor's shape, dtype, device, L2 norm, and how many of its values are NaN or infinite.

    The numbers of all are brought to the host together. Of a sharded tensor they are those of this process's part.
    """
    rows, measured = list[dict[str, Any]](), list[Tensor]()
    for name, tensor in named:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # no collective: other ranks are elsewhere
        if not isinstance(local, Tensor) or local.is_meta or not local.is_floating_point():
            continue
        local = local.detach()
        rows.append(
            {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": str(local.device)}
        )
        for number in (torch.linalg.vector_norm(local, dtype=torch.float32), local.isnan().sum(), local.isinf().sum()):
            measured.append(number.float())
    numbers = to_host(measured) if measured else []
    for at, row in enumerate(rows):
        norm, nan, infinite = numbers[3 * at : 3 * at + 3]
        row |= {"norm": norm if math.isfinite(norm) else str(norm), "nan": int(nan), "infinite": int(infinite)}
    return rows


def recorded_tail(folder: Path, last: int, count: int) -> list[LoggedEvent]:
    """The last events of a log that is being written, or was; as many as asked for where that many are near its end.

    Args:
        folder: the log's.
        last: the bus's last number.
        count: of events.
    """
    span = 8 * count  # the bus numbers also what nobody recorded
    return list(deque(EventLog(folder).read(seq=(last - span, None)), maxlen=count))


def write_events(folder: Path, events: Sequence[Heard | LoggedEvent]) -> int:
    """Write a log of these events; returns how many there are."""
    if not events:
        return 0
    writer = LogWriter(folder)
    try:
        for ord, event in enumerate(_logged(events)):
            event.ord, event.open = ord, False
            writer.add(event)
        writer.end()
    finally:
        writer.close()
    return len(events)


def _logged(events: Sequence[Heard | LoggedEvent]) -> Iterator[LoggedEvent]:
    values = EventValues()
    made = list[LoggedEvent]()
    for each in events:
        if isinstance(each, LoggedEvent):
            made.append(each)
            continue
        event, output = each
        logged = LoggedEvent(-1, event.engine, event.type, event.epoch, event.iteration, seq=event.seq, t=event.time_ns)
        made.append(logged)
        if event.payload is not None:
            values.put_payload(logged, event.payload)
        if output:
            values.put(logged, "output", dict(output))
    values.settle()
    return iter(made)


def _told(value: Any) -> Any:
    try:
        if isinstance(value, Tensor):
            return f"{describe(value)} on {value.device}"
        if isinstance(value, bool) or (type(value) is int and abs(value) < 2**53):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else str(value)
        if type(value) in (list, tuple, dict) and len(value) <= MOST_DEPTH:
            return describe(value)
        return type(value).__qualname__
    except Exception:  # an object may fail in any way when it is looked at
        return "?"
