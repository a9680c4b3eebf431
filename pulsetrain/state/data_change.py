"""Resuming on changed data: what is warned about, rejected, or adapted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch.utils.data import DataLoader, IterableDataset

from pulsetrain.engine.data.keyed_loader import KeyedOrder
from pulsetrain.engine.data.loaders import can_be_keyed, length_of
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger

__all__ = ["adapt_to_data", "describe_data"]


def describe_data(loader: object) -> dict[str, Any]:
    """What is known of a loader without reading it, as plain values.

    `batches` of a pass and its `samples`, those of all ranks; `batch_size`, samples of a batch, of all ranks as well;
    `rows` of the dataset; `workers`, where the order depends on their number, as with an IterableDataset; None where it
    is not known.

    >>> describe_data([1, 2, 3])
    {'loader': 'list', 'batches': 3, 'batch_size': None, 'samples': None, 'rows': None, 'workers': None}
    """
    keyed = KeyedOrder(loader, 0) if can_be_keyed(loader) else None
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if keyed is not None and keyed.samples is not None:
        size = keyed.step
    return {
        "loader": type(loader).__name__,
        "batches": length_of(loader),
        "batch_size": size if isinstance(size, int) else None,
        "samples": None if keyed is None else keyed.samples,
        "rows": length_of(loader.dataset) if isinstance(loader, DataLoader) else None,
        "workers": loader.num_workers if _is_shared_out_by_workers(loader) else None,
    }


def _is_shared_out_by_workers(loader: object) -> TypeGuard[DataLoader[Any]]:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def adapt_to_data(saved: Mapping[str, Any], loader: Any) -> Mapping[str, Any]:
    """The state of a run, with its position adapted to this data; itself if it was made with the same data.

    A difference is warned about. Between two epochs, the next one begins a pass over the new data. Inside an epoch, the
    position counts samples if the loader can start at a position, so that batches may be of another size; else it
    counts batches.

    Raises:
        CheckpointError: this data does not have the position.
    """
    before, now = saved["made_with"]["data"], describe_data(loader)
    differences = [f"{name}: {before[name]} -> {now[name]}" for name in now if _differs(name, before, now)]
    if not differences:
        return saved
    counters, cursor = dict(saved["counters"]), dict(saved["data"])
    length = counters["epoch_length"]
    if now["batches"] is not None and length in (None, before.get("batches")):  # else somebody has set it
        counters["epoch_length"] = now["batches"]
    done = cursor["trained"] - cursor["epoch_start"]
    if cursor["epoch_done"] or done == length:
        how = "with a new pass"
        cursor["pass_over"] = True
        done = counters["epoch_length"] or 0
    elif None not in (before.get("workers"), now["workers"]) and before["workers"] != now["workers"]:
        raise CheckpointError(
            "the checkpoint was made inside a pass over an IterableDataset, whose order depends on the number of "
            f"workers; resume with {before['workers']} workers, as then, or from a checkpoint of an epoch's end",
            "DataLoader",
            num_workers=now["workers"],
        )
    elif can_be_keyed(loader):
        how = "after the samples that the pass has given"
        done = now["batches"] - _batches_left(loader, cursor, before, now, differences)
    else:
        how = "after as many batches"
        if now["batches"] is not None and done > now["batches"]:
            raise _refusal(differences, f"the checkpoint is {done} batches inside an epoch, which has fewer now")
    if not cursor["epoch_done"] and done != cursor["trained"] - cursor["epoch_start"]:
        cursor["epoch_start"] = cursor["pass_start"] = cursor["trained"] - done
    get_logger("pulsetrain").warning(
        f"the training data differs from the checkpoint's: the run resumes {how}", differences=differences
    )
    return {**saved, "counters": counters, "data": cursor}


def _differs(name: str, before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    if name not in before or before[name] == now[name]:
        return False
    return name != "batches" or None not in (before[name], now[name])


def _batches_left(
    loader: Any, cursor: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], differences: list[str]
) -> int:
    """How many batches the remaining samples of the pass make."""
    order = KeyedOrder(loader, 0)
    others = [name for name in ("loader", "rows", "samples") if _differs(name, before, now)]
    if others or order.samples is None or "samples" not in before or "offset" not in cursor:
        raise _refusal(differences, "the checkpoint was made inside a pass, and this data does not have its position")
    return order.batches(order.samples - cursor["offset"])


def _refusal(differences: list[str], why: str) -> CheckpointError:
    return CheckpointError(
        f"the training data differs from the checkpoint's ({', '.join(differences)}): {why}; resume with the data that "
        "the run began with, or from a checkpoint of an epoch's end, or begin a new run from its weights"
    )
