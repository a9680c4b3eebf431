"""Writes one crash bundle from a failed process: a part that cannot be read any more is listed as missing."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from numbers import Real
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pulsetrain.engine import AnomalyDetected, Engine, Event, is_training_run
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.loaders import can_be_keyed
from pulsetrain.engine.step.protocols import describe
from pulsetrain.engine.training_run import model_of, optimizer_of
from pulsetrain.handlers.crash.crash_files import BATCH, CONFIG, CRASHES, FACTS, TRACEBACK
from pulsetrain.handlers.crash.memory_snapshot import advice, held, is_out_of_memory, put_needs, write_allocator_report
from pulsetrain.handlers.metric_values.step_values import to_host
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.handlers.run_files.run_file import write_run_file
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["BundleWriter", "Failure", "plain_batch"]

# no other variable is written: they may hold keys and passwords
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR",
    "NCCL_DEBUG", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NODELIST", "PYTHONHASHSEED",
)  # fmt: skip
MOST_FRAMES, MOST_LOCALS, MOST_DEPTH = 40, 40, 8


@dataclass(frozen=True)
class Failure:
    """An exception or an anomaly of a run."""

    engine: Engine
    event: Event
    error: Exception | None  # None for an anomaly
    at: Engine  # that raised the error: `engine`, or one inside its run
    set_name: str | None  # of the validation set that it was validating
    capacity: int | None = None  # bytes that the run's tensors could take on their device when it started

    @property
    def anomaly(self) -> AnomalyDetected | None:
        """The anomaly, if it is one."""
        payload = self.event.payload
        return payload if isinstance(payload, AnomalyDetected) else None


class BundleWriter:
    """Writes the bundle of one failure.

    Args:
        run_folder: the bundle is a folder in its folder for crashes.
        failure: the bundle's subject.
        write_events: called with the bundle's folder and its facts; writes the last events.
    """

    def __init__(
        self, run_folder: Path, failure: Failure, write_events: Callable[[Path, dict[str, object]], None]
    ) -> None:
        self._run_folder, self._failure, self._write_events = run_folder, failure, write_events
        self._crashes = run_folder / CRASHES
        self._into = self._crashes / f".{uuid.uuid4().hex}.tmp"
        self._rows: list[int] | None = None
        self._facts = self._first_facts()

    def write(self) -> Path:
        """Write the bundle; returns its folder, which has its name only once it is complete.

        Raises:
            OSError: the folder cannot be written.
        """
        self._into.mkdir(parents=True)
        try:
            missing: dict[str, str] = {}
            for name, write_part in self._parts():
                try:
                    write_part()
                except Exception as failed:
                    missing[name] = redacted(f"{type(failed).__name__}: {failed}".splitlines()[0])
            self._facts["missing"] = missing
            replace_file(self._into / FACTS, json.dumps(self._facts, indent=2).encode())
            return _rename(self._into, self._crashes / f"iteration-{self._failure.engine.state.iteration:09d}")
        except BaseException:
            shutil.rmtree(self._into, ignore_errors=True)
            raise

    def _first_facts(self) -> dict[str, object]:
        failure, error, anomaly = self._failure, self._failure.error, self._failure.anomaly
        what = redacted(f"{type(error).__name__}: {error}") if error else ""
        if anomaly is not None:
            what = f"anomaly {anomaly.kind} ({anomaly.value})"
        facts: dict[str, object] = {
            "format": 1, "what": what, "event": failure.event.type, "engine": failure.at.name, "set": failure.set_name,
            "seq": failure.event.seq, "epoch": failure.at.state.epoch, "iteration": failure.at.state.iteration,
            "trained": failure.engine.state.iteration, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }  # fmt: skip
        if anomaly is not None and anomaly.at_iteration is not None:
            facts["at_iteration"] = anomaly.at_iteration
        return facts

    def _parts(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """The parts, each to be tried separately; those that read the device come last."""
        failure, engine = self._failure, self._failure.engine
        if failure.error is not None:
            yield "traceback", partial(self._write_traceback, failure.error)
        variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        yield "environment variables", lambda: self._facts.update(variables=variables)
        yield "rows", self._find_rows
        yield "config", self._copy_config
        yield "run", lambda: write_run_file(self._into, engine)
        out_of_memory = is_out_of_memory(failure.error)
        if out_of_memory:
            yield "memory", self._put_memory
        past = failure.anomaly is not None and _is_past(engine, failure.anomaly)
        if past or getattr(failure.at.state, "batch", None) is not None:
            yield "batch", partial(self._write_batch, past)
        yield "events", lambda: self._write_events(self._into, self._facts)
        for name in ("weights", "gradients", "optimizer"):
            yield name, partial(self._put_table, name)
        if out_of_memory:
            yield "memory summary", lambda: write_allocator_report(engine, self._into)
        if out_of_memory and failure.at is engine:
            yield "memory estimate", self._estimate_memory

    @property
    def advice(self) -> str | None:
        """Where the memory was not enough: the change with which it would be; None where it is not known."""
        return advice(self._facts)

    def _put_memory(self) -> None:
        assert self._failure.error is not None
        self._facts["memory"] = held(self._failure.engine, self._failure.error)

    def _estimate_memory(self) -> None:
        found = self._facts["memory"]
        assert isinstance(found, dict)
        assert self._failure.error is not None
        put_needs(found, self._failure.engine, self._failure.error, self._failure.capacity)

    def _write_traceback(self, error: Exception) -> None:
        text = redacted("".join(traceback.format_exception(error)))
        (self._into / TRACEBACK).write_text(text, encoding="utf-8")
        self._facts["frames"] = _frames(error)

    def _find_rows(self) -> None:
        self._facts["rows"] = self._rows = _rows(self._failure)

    def _copy_config(self) -> None:
        if (self._run_folder / CONFIG).exists():
            shutil.copyfile(self._run_folder / CONFIG, self._into / CONFIG)

    def _write_batch(self, past: bool) -> None:
        failure = self._failure
        iteration = failure.anomaly.at_iteration if failure.anomaly is not None else None
        batch = _read_batch_again(failure.engine, self._rows, iteration) if past else failure.at.state.batch
        self._facts["batch"] = describe(batch, ranges=True)
        torch.save(plain_batch(batch), self._into / BATCH)
        self._facts["fetched_again"] = past

    def _put_table(self, kind: str) -> None:
        model, optimizer = model_of(self._failure.engine), optimizer_of(self._failure.engine)
        named: list[tuple[str, object]] = []
        for name, weight in model.named_parameters() if model is not None else ():
            if kind == "weights":
                named.append((name, weight))
            elif kind == "gradients":
                named.append((name, weight.grad))
            elif optimizer is not None:
                named += [(f"{name}/{key}", value) for key, value in optimizer.state.get(weight, {}).items()]
        if kind == "weights" and model is not None:
            named += model.named_buffers()
        self._facts[kind] = _tensor_table(named)


def _rename(unnamed: Path, path: Path) -> Path:
    """Give the folder its name, or with a number after it where the name is taken: another process may fail there."""
    number, target = 2, path
    while True:
        try:
            os.rename(unnamed, target)
            return target
        except OSError:
            if not target.exists():
                raise
        number, target = number + 1, path.with_name(f"{path.name}-{number}")


def _rows(failure: Failure) -> list[int] | None:
    """The dataset's indices: those that an anomaly names, else those of the batch, or of the one being fetched."""
    engine = failure.engine
    named = failure.anomaly.batch_indices if failure.anomaly is not None else None
    if named is not None or not is_training_run(engine) or failure.at is not engine:
        return list(named) if named else None
    fetching = engine.state.batch is None
    if fetching and (failure.error is None or not _in_loader(failure.error)):
        return None
    rows = engine.data.rows(engine.state.iteration + fetching)
    return None if rows is None else [int(row) for row in rows]


def _in_loader(error: BaseException) -> bool:
    """Whether the loader raised it when it was asked for a batch, and not a handler that ran between two batches."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "_epoch" not in names:
        return False
    inside = names[len(names) - names[::-1].index("_epoch") :]
    return inside[:1] not in (["deliver"], ["_call_hook"], ["_signal"])


def _frames(error: BaseException) -> list[dict[str, object]]:
    """The innermost frames of an exception, outermost first, with their local variables.

    Of these it gives numbers, and the shape, dtype and device of tensors; of all else only the type: a text may be a
    secret, and so may a number by its name; and a tensor's values may be on a device that failed.
    """
    walked = list(traceback.walk_tb(error.__traceback__))[-MOST_FRAMES:]
    lines = traceback.extract_tb(error.__traceback__)[-MOST_FRAMES:]
    return [
        {"file": line.filename, "line": line.lineno, "function": line.name, "code": redacted(line.line),
         "locals": {name: _shown(value, name) for name, value in list(frame.f_locals.items())[:MOST_LOCALS]}}
        for (frame, _), line in zip(walked, lines, strict=True)
    ]  # fmt: skip


def plain_batch(value: object, depth: int = 0) -> object:
    """The batch as torch.load(weights_only=True) reads it: tensors on the host, in dicts, lists and tuples.

    A dataclass or another object becomes a dict of its fields; an object without fields its type as text.
    """
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        # of a view, not of its whole storage; but no copy else, for there may be no memory for it
        return host if host.layout is torch.strided and host.untyped_storage().nbytes() == host.nbytes else host.clone()
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


def _is_past(engine: Engine, anomaly: AnomalyDetected) -> bool:
    """Whether an anomaly came from other rows than those of the present batch."""
    iteration = engine.state.iteration
    if anomaly.at_iteration not in (None, iteration):
        return True
    rows = engine.data.rows(iteration) if is_training_run(engine) else None
    return bool(anomaly.batch_indices) and rows is not None and list(anomaly.batch_indices) != list(rows)


def _read_batch_again(engine: object, rows: Sequence[int] | None, iteration: int | None) -> object:
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


def _tensor_table(named: Iterable[tuple[str, object]]) -> list[dict[str, object]]:
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


def _shown(value: object, name: str) -> object:
    try:
        if isinstance(value, Tensor):
            return f"{describe(value)} on {value.device}"
        if isinstance(value, bool) or (type(value) is int and abs(value) < 2**53):
            return redacted(value, name)
        if type(value) is float:
            return redacted(value, name) if math.isfinite(value) else str(value)
        if type(value) in (list, tuple, dict) and isinstance(value, Sized) and len(value) <= MOST_DEPTH:
            return describe(value)
        return type(value).__qualname__
    except Exception:  # an object may raise anything on access
        return "?"
