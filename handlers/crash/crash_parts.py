"""What can be read of a failed process: its frames, batch, tensors, environment and last events."""

from __future__ import annotations

import math
import os
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from numbers import Real
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import can_be_keyed
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event
from pulsetrain.engine.events.payloads import AnomalyDetected
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.step.protocols import describe
from pulsetrain.engine.training_run import is_training_run
from pulsetrain.handlers.metric_values.event_values import EventValues
from pulsetrain.handlers.metric_values.step_values import to_host

__all__ = [
    "KeptEvent",
    "environment_variables",
    "frames",
    "is_past",
    "plain_batch",
    "read_batch_again",
    "recorded_tail",
    "tensor_table",
    "write_events",
]

# no other variable is written: they may hold keys and passwords
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR",
    "NCCL_DEBUG", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NODELIST", "PYTHONHASHSEED",
)  # fmt: skip
MOST_FRAMES, MOST_LOCALS, MOST_DEPTH = 40, 40, 8
KeptEvent = tuple[Event, Mapping[str, Tensor | float] | None]  # an event, and the scalars of the step's output


def environment_variables() -> dict[str, str]:
    """Those that a failure may depend on, where they are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def frames(error: BaseException) -> list[dict[str, object]]:
    """The innermost frames of an exception, outermost first, with their local variables.

    Of these it gives numbers, and the shape, dtype and device of tensors; of all else only the type: a text may be a
    secret, and a tensor's values may be on a device that failed.
    """
    walked = list(traceback.walk_tb(error.__traceback__))[-MOST_FRAMES:]
    lines = traceback.extract_tb(error.__traceback__)[-MOST_FRAMES:]
    return [
        {"file": line.filename, "line": line.lineno, "function": line.name, "code": line.line,
         "locals": {name: _shown(value) for name, value in list(frame.f_locals.items())[:MOST_LOCALS]}}
        for (frame, _), line in zip(walked, lines, strict=True)
    ]  # fmt: skip


def plain_batch(value: object, depth: int = 0) -> object:
    """The batch as torch.load(weights_only=True) reads it: tensors on the host, in dicts, lists and tuples.

    A dataclass or another object becomes a dict of its fields; an object without fields its type as text.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()  # of a view, not of its whole storage
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


def is_past(engine: Engine, anomaly: AnomalyDetected) -> bool:
    """Whether an anomaly came from other rows than those of the present batch."""
    iteration = engine.state.iteration
    if anomaly.at_iteration not in (None, iteration):
        return True
    rows = engine.data.rows(iteration) if is_training_run(engine) else None
    return bool(anomaly.batch_indices) and rows is not None and list(anomaly.batch_indices) != list(rows)


def read_batch_again(engine: object, rows: Sequence[int] | None, iteration: int | None) -> object:
    """Read the rows again and collate them as the trainer's loader does; the run's random numbers stay as they are.

    Raises:
        LookupError: the rows are not known, or the loader cannot give them.
    """
    loader = engine.train_loader if is_training_run(engine) else None
    if not rows or not isinstance(loader, DataLoader) or not can_be_keyed(loader) or loader.batch_sampler is None:
        why = f"{type(loader).__name__} cannot give single rows" if rows else "its rows are not known"
        raise LookupError(f"the batch of iteration {iteration} is not in memory any more, and {why}")
    dataset = loader.dataset
    with rng.preserve_rng():
        several = getattr(dataset, "__getitems__", None)
        return loader.collate_fn(several(list(rows)) if several else [dataset[row] for row in rows])


def tensor_table(named: Iterable[tuple[str, object]]) -> list[dict[str, object]]:
    """Each tensor's shape, dtype, device, L2 norm, and how many of its values are NaN or infinite.

    All numbers are copied to the host together. For a sharded tensor they are those of this process's part.
    """
    rows, measured = list[dict[str, object]](), list[Tensor]()
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            continue
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # no collective: other ranks do not join
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
    """The last events of a log, which may still be written; fewer than `count` if the end of the log has fewer.

    Args:
        folder: the log's.
        last: the bus's last sequence number.
        count: number of events.
    """
    span = 8 * count  # the bus numbers events that are not recorded as well
    return list(deque(EventLog(folder).read(seq=(last - span, None)), maxlen=count))


def write_events(folder: Path, events: Sequence[KeptEvent | LoggedEvent]) -> int:
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


def _logged(events: Sequence[KeptEvent | LoggedEvent]) -> Iterator[LoggedEvent]:
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


def _shown(value: object) -> object:
    try:
        if isinstance(value, Tensor):
            return f"{describe(value)} on {value.device}"
        if isinstance(value, bool) or (type(value) is int and abs(value) < 2**53):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else str(value)
        if type(value) in (list, tuple, dict) and isinstance(value, Sized) and len(value) <= MOST_DEPTH:
            return describe(value)
        return type(value).__qualname__
    except Exception:  # an object may raise anything on access
        return "?"
