"""Changes that make a run fit into less memory, each with the peak that it would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory.activations import recompute_activations
from pulsetrain.engine.memory.estimate import MemoryUse, estimate
from pulsetrain.engine.memory.live_tensors import LOSS
from pulsetrain.engine.memory.setup import Setup, mode_of, without_values
from pulsetrain.engine.step.protocols import Tree

__all__ = ["Remedy", "first_rows", "peak_of", "remedies", "repeated_blocks", "rows_of", "sharded"]

MOST_PROCESSES = 1024
_SAME = 0.98  # of a peak: a smaller batch that needs more than that is of no use


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of a run.

    Args:
        what: the change in words.
        peak: of the changed run, in bytes.
        fits: whether as much is available.
        rows: of each batch, if the change makes it smaller.
        settings: of the configuration, by their dotted names.
    """

    what: str
    peak: int
    fits: bool
    rows: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def remedies(setup: Setup, use: MemoryUse, available: int, processes: int = 1) -> Iterator[Remedy]:
    """The changes that need less memory than `use`, the cheapest first; each is estimated when it is asked for.

    If no single one fits, they are tried together. Last comes another number of processes. A change that cannot be
    estimated is left out.

    Args:
        setup: if it has values, it is copied without them.
        use: its estimate, for one process.
        available: the bytes to fit into.
        processes: that share the model out already; peaks are those of each.
    """
    at_update = use.phases["update"]
    kept = sum(at_update[name] for name in ("parameters", "buffers", "optimizer", "gradients"))
    if kept // processes <= available:
        setup = without_values(setup) if mode_of(setup) is None else setup
        yield from _other_settings(setup, use, available, processes)
    more = _more_processes(setup, use, available, 2 * processes)
    if more is not None:
        yield more


def peak_of(setup: Setup, use: MemoryUse, processes: int) -> int:
    """The peak of each of so many processes that share the model out."""
    return use.peak if processes == 1 else sharded(setup.model, use, processes, rows_of(setup.batch))


def _more_processes(setup: Setup, use: MemoryUse, available: int, processes: int) -> Remedy | None:
    whole = {
        name: None
        for name in ("activation_offload", "optimizer_offload")
        if getattr(setup.backend.settings, name) is not None
    }
    if whole:  # a sharded model is refused with these
        try:
            use = estimate(setup.with_settings(**whole))
        except Exception:
            return None
    rows = rows_of(setup.batch)
    while (peak := sharded(setup.model, use, processes, rows)) > available and processes < MOST_PROCESSES:
        processes *= 2
    without = f", without {' and '.join(whole)}" if whole else ""
    return Remedy(
        what=f"split the model, and the rows of the batch, over {processes} processes{without}",
        peak=peak,
        fits=peak <= available,
        settings={"parallel.shard": processes, **{f"training.{name}": None for name in whole}},
    )


def _other_settings(setup: Setup, use: MemoryUse, available: int, processes: int) -> Iterator[Remedy]:
    found: list[Remedy] = []
    now = peak_of(setup, use, processes)
    pattern = repeated_blocks(setup.model, use) if setup.backend.settings.activation_checkpointing is None else None
    smaller = _smaller_batch(setup, now, available, processes)
    if smaller is not None:
        found.append(smaller)
        yield smaller
    if pattern is not None and (peak := _peak_with(setup, processes, pattern)) is not None:
        found.append(
            Remedy(
                what=f"compute the activations of {pattern} again in the backward pass",
                peak=peak,
                fits=peak <= available,
                settings={"training.activation_checkpointing": pattern},
            )
        )
        if peak < now:
            yield found[-1]
    else:
        pattern = None
    low = _in_bf16(setup)
    if low is not None and (peak := _peak_with(low, processes)) is not None:
        found.append(
            Remedy(what="compute in bf16", peak=peak, fits=peak <= available, settings={"training.precision": "bf16"})
        )
        if peak < now:
            yield found[-1]
    else:
        low = None
    if len(found) < 2 or any(each.fits for each in found):
        return
    all_of_them = low or setup
    with _recomputed(setup.model, pattern):
        least = _smaller_batch(all_of_them, now, available, processes)
        together = _peak_with(all_of_them, processes) if least is None else least.peak
    if together is None or together >= now:
        return
    parts = [least if each is smaller and least is not None else each for each in found]
    yield Remedy(
        what="all of these together: " + "; ".join(each.what for each in parts),
        peak=together,
        fits=together <= available,
        rows=None if least is None else least.rows,
        settings={name: value for each in parts for name, value in each.settings.items()},
    )


def _in_bf16(setup: Setup) -> Setup | None:
    """The same in bf16, where it is in fp32 and the device computes in bf16."""
    try:
        return setup.with_settings(precision="bf16") if setup.backend.settings.precision == "fp32" else None
    except ConfigurationError:
        return None


def _peak_with(setup: Setup, processes: int, pattern: str | None = None) -> int | None:
    """The peak of each process after a change; None if it cannot be estimated: a model may refuse anything."""
    try:
        with _recomputed(setup.model, pattern):
            return peak_of(setup, estimate(setup), processes)
    except Exception:
        setup.model.zero_grad()  # a backward pass may have been interrupted
        return None


@contextmanager
def _recomputed(model: nn.Module, pattern: str | None) -> Iterator[None]:
    """Activation checkpointing of a model that has none."""
    if pattern is None:
        yield
        return
    recompute_activations(model, pattern)
    try:
        yield
    finally:
        recompute_activations(model, None)


def _smaller_batch(setup: Setup, now: int, available: int, processes: int) -> Remedy | None:
    """A half of the batch, a quarter ...: the largest that fits, else the least that helps; None if none does."""
    rows, parts = rows_of(setup.batch), 1
    found: Remedy | None = None
    while rows // parts > 1:
        parts *= 2
        together = setup.accumulate * parts
        less = replace(setup, batch=first_rows(setup.batch, rows // parts), accumulate=together)
        peak = _peak_with(less, processes)
        # None: the model cannot compute so few rows, as BatchNorm one
        if peak is None or peak >= (now if found is None else _SAME * found.peak):
            break
        found = Remedy(
            what=f"batches of {rows // parts} rows in place of {rows}, {together} of them to an update",
            peak=peak,
            fits=peak <= available,
            rows=rows // parts,
            settings={"training.accumulate": together},
        )
        if found.fits:
            break
    return found


def sharded(model: nn.Module, use: MemoryUse, processes: int, rows: int) -> int:
    """About the peak of each of so many processes that share out the model and the batch (FSDP2), by arithmetic.

    Each holds its part of the weights, gradients and optimizer state, and of the batch at least a row. While it
    computes, the weights outside of the blocks are whole, and so are those of two blocks, with the gradients of one.
    """
    at = use.phases[use.peak_phase]
    of_model = at["parameters"] + at["gradients"] + at["optimizer"]
    of_batch = at["batch"] + at["activations"] + at["temporary"] + at["kernels"]
    lists = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    blocks = [_bytes_of(child) for each in lists for child in each]
    whole = _bytes_of(model)
    gathered = max(whole - sum(blocks), 0) + 3 * max(blocks, default=whole)
    parts = max(min(processes, rows), 1)
    return of_model // processes + of_batch // parts + at["buffers"] + min(gathered, 2 * whole)


def repeated_blocks(model: nn.Module, use: MemoryUse) -> str | None:
    """The pattern of the blocks that keep most of the activations, as "blocks.*"; None if there are no such blocks."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        start = f"{name}." if name else ""
        kept = sum(size for path, size in use.saved.items() if path.startswith(start) and path not in ("", LOSS))
        if kept and all(type(child).forward is not nn.Module.forward for child in module):
            found[f"{start}*"] = kept
    return max(found, key=lambda pattern: found[pattern]) if found else None


def rows_of(batch: Tree) -> int:
    """The rows of a loader's batch: the first dimension of its first tensor."""
    shapes = (each.shape for each in tree_leaves(batch) if isinstance(each, Tensor) and each.ndim)
    return next(shapes, (0,))[0]


def first_rows(batch: Tree, rows: int) -> Tree:
    """The first rows of every tensor of a batch, as tensors of that size, for an estimate; nothing is copied.

    >>> import torch
    >>> first_rows((torch.ones(8, 2), torch.ones(8)), 2)
    (tensor([[1., 1.],
            [1., 1.]]), tensor([1., 1.]))
    """
    of = rows_of(batch)

    def cut(each: object) -> object:
        is_of_rows = isinstance(each, Tensor) and each.ndim and each.shape[0] == of
        return _with_storage_of_its_size(each[:rows]) if is_of_rows else each  # type: ignore[index]

    return tree_map(cut, batch)


def _with_storage_of_its_size(part: Tensor) -> Tensor:
    """The same part of a tensor's memory, as a tensor that does not hold the rest."""
    if part.is_meta or type(part) is not Tensor:  # such as one without values
        return part.new_empty_strided(part.shape, part.stride())
    storage = part.untyped_storage()
    begin = part.data_ptr() - storage.data_ptr()
    count = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    memory = storage[begin : begin + count * part.element_size()] if part.numel() else storage[:0]
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(memory, 0, part.shape, part.stride())


def _bytes_of(module: nn.Module) -> int:
    return sum(each.nbytes for each in module.parameters())
