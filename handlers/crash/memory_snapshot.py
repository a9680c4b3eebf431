"""What a crash bundle says where the memory was not enough: what was held, what the run needs, and what would fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from pulsetrain.engine import Engine, TorchBackend, is_training_run
from pulsetrain.engine.backends.module_view import reading_once
from pulsetrain.engine.data import rng
from pulsetrain.engine.memory.available import available
from pulsetrain.engine.memory.estimate import MemoryUse, estimate
from pulsetrain.engine.memory.live_tensors import LiveTensors
from pulsetrain.engine.memory.remedies import Remedy, remedies
from pulsetrain.engine.memory.report import size_text, use_as_dict
from pulsetrain.engine.memory.setup import Setup, without_values
from pulsetrain.engine.training_run import model_of, optimizer_of
from pulsetrain.handlers.attachment.engine_queries import device_of

__all__ = ["advice", "capacity_of", "held", "is_out_of_memory", "put_needs", "requested_by", "write_allocator_report"]

_WANTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation has failed: on the device, on the host, or of Python itself.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("not enough memory"))
    (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "memory" in str(error) and _WANTED.search(str(error)) is not None


def held(engine: Engine, error: BaseException) -> dict[str, object]:
    """What was asked for, and the bytes that the run still holds, by component; the failed step has freed the rest."""
    device = _device_of(engine)
    return {
        "device": str(device),
        "requested": requested_by(error),
        "available": available(device),
        "held": {name: size for name, size in _live(engine).sizes.items() if size},
    }


def requested_by(error: BaseException) -> int | None:
    """The bytes that could not be allocated; None where the error does not say.

    >>> requested_by(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    2147483648
    """
    wanted = _WANTED.search(str(error))
    return None if wanted is None else int(float(wanted[1]) * _UNITS[wanted[2].lower()])


def _live(engine: Engine) -> LiveTensors:
    live = LiveTensors(_device_of(engine))
    model, optimizer = model_of(engine), optimizer_of(engine)
    live.mark(getattr(engine.state, "batch", None), "batch")
    if model is not None and optimizer is not None:
        with reading_once(model):
            live.mark_state(model, optimizer, getattr(engine, "strategy", None))
    return live


def capacity_of(engine: Engine) -> int | None:
    """The bytes that the run's tensors can take on their device: those that are left, and those that they take now."""
    left = available(_device_of(engine))
    return None if left is None else left + _live(engine).total


def put_needs(facts: dict[str, object], engine: Engine, error: BaseException, capacity: int | None) -> None:
    """Put the estimate of a training step into the facts, then the change with which it fits.

    Args:
        facts: keep the estimate if no change can be found.
        engine: trains.
        error: of the allocation.
        capacity: the bytes to fit into.

    Raises:
        LookupError: the engine does not train by a TorchBackend in place.
        Exception: the step cannot be estimated.
    """
    if not is_training_run(engine) or not isinstance(engine.backend, TorchBackend):
        raise LookupError("there is no TorchBackend that computes in place")
    setup = Setup(
        model=engine.model,
        optimizer=engine.optimizer,
        strategy=engine.strategy,
        backend=engine.backend,
        batch=engine.state.batch,
        accumulate=engine.config.accumulation.batches_at(engine.state.update) or 2,
    ).with_settings()  # a backend of its own: the run's may hold a gradient scale
    with rng.preserve_rng():
        setup = without_values(setup)
        use = estimate(setup)
        facts["estimated"] = use_as_dict(use)
        if capacity is not None:
            facts["capacity"] = capacity
            facts["remedy"] = _advice(setup, use, capacity, requested_by(error))


def _advice(setup: Setup, use: MemoryUse, capacity: int, requested: int | None) -> str:
    """The first change that fits, in words."""
    says = f"a step needs {size_text(use.peak)}, and there were {size_text(capacity)} for it"
    if use.peak <= capacity and requested is not None and requested > capacity:
        return f"{says}; one allocation, of {size_text(requested)}, was more than that: the traceback shows where"
    if use.peak <= capacity:
        return f"{says}: look for what else holds memory, in this process or others"
    best: Remedy | None = None
    for each in remedies(setup, use, capacity):
        if best is None or each.fits or each.peak < best.peak:
            best = each
        if each.fits:
            break
    if best is None:
        return f"{says}; no change with which it fits could be estimated"
    verdict = f"{size_text(best.peak)} with this change" if best.fits else f"and still {size_text(best.peak)} with it"
    settings = "".join(f", {name}={value!r}" for name, value in best.settings.items())
    return f"{says}; {verdict}: {best.what}{settings}"


def advice(facts: Mapping[str, object]) -> str | None:
    """What a bundle's facts say about a remedy."""
    memory = facts.get("memory")
    found = memory.get("remedy") if isinstance(memory, Mapping) else None
    return found if isinstance(found, str) else None


def write_allocator_report(engine: Engine, into: Path) -> None:
    """On CUDA, the allocator's own summary; if its history is recorded, also that, for pytorch.org/memory_viz."""
    device = _device_of(engine)
    if device.type != "cuda":
        return
    (into / "memory_summary.txt").write_text(torch.cuda.memory_summary(device), encoding="utf-8")
    if any(torch.cuda.memory._snapshot()["device_traces"]):
        torch.cuda.memory._dump_snapshot(str(into / "memory_snapshot.pickle"))


def _device_of(engine: Engine) -> torch.device:
    model, device = model_of(engine), device_of(engine)
    if device is None and model is not None:
        device = next((each.device for each in model.parameters()), None)
    return device or torch.device("cpu")
