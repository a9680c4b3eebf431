"""A run that goes on over other data than its checkpoint was made with: what is told, what is refused, what follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from pulsetrain.engine.data.keyed_loader import KeyedOrder, can_be_keyed, length_of
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger

__all__ = ["describe_data", "follow_data"]


def describe_data(loader: Any) -> dict[str, Any]:
    """What is known of a loader without reading it, as plain values.

    `batches` of a pass and `samples` of it, those of all ranks; `batch_size`, samples of a batch, all ranks' as well;
    `rows` of the dataset; None where it is not known.
    """
    keyed = KeyedOrder(loader, 0) if can_be_keyed(loader) else None
    size = keyed.step if keyed is not None and keyed.samples is not None else _batch_size(loader)
    return {
        "loader": type(loader).__name__,
        "batches": length_of(loader),
        "batch_size": size,
        "samples": None if keyed is None else keyed.samples,
        "rows": length_of(loader.dataset) if isinstance(loader, DataLoader) else None,
    }


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def follow_data(saved: Mapping[str, Any], loader: Any) -> Mapping[str, Any]:
    """A checkpoint's state as it is over this data: itself, or a copy where it was made with other data, which is told.

    Between two epochs the next begins a pass over the new data. Inside an epoch the position counts samples where the
    loader is asked for a position, so that batches may be of another size; else it counts batches.

    Raises:
        CheckpointError: the position is none in this data.
    """
    before, now = saved["data"], describe_data(loader)
    differences = [f"{name}: {before[name]} -> {now[name]}" for name in now if _differs(name, before, now)]
    if not differences:
        return saved
    counters, position = dict(saved["counters"]), dict(saved["position"])
    length = counters["epoch_length"]
    if now["batches"] is not None and length in (None, before.get("batches")):  # else somebody has set it
        counters["epoch_length"] = now["batches"]
    done = position["trained"] - position["epoch_start"]
    if position["epoch_done"] or done == length:
        how = "with a new pass"
        position["pass_over"] = True
        done = counters["epoch_length"] or 0
    elif can_be_keyed(loader):
        how = "behind the samples that the pass has given"
        done = now["batches"] - _batches_left(loader, position, before, now, differences)
    else:
        how = "behind as many batches"
        if now["batches"] is not None and done > now["batches"]:
            raise _refusal(differences, f"the checkpoint is {done} batches inside an epoch, which has fewer now")
    if not position["epoch_done"] and done != position["trained"] - position["epoch_start"]:
        position["epoch_start"] = position["pass_start"] = position["trained"] - done
    get_logger("pulsetrain").warning(
        f"the training data is not what the checkpoint was made with: the run goes on {how}", differences=differences
    )
    return {**saved, "counters": counters, "position": position}


def _differs(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if name not in before or before[name] == now[name]:
        return False
    return name != "batches" or None not in (before[name], now[name])


def _batches_left(
    loader: Any, position: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], differences: list[str]
) -> int:
    """How many batches the samples make that the pass has not given yet."""
    order = KeyedOrder(loader, 0)
    others = [name for name in ("loader", "rows", "samples") if _differs(name, before, now)]
    if others or order.samples is None or "samples" not in before or "offset" not in position:
        raise _refusal(differences, "the checkpoint was made inside a pass, and its position is none in this data")
    return order.batches(order.samples - position["offset"])


def _refusal(differences: list[str], why: str) -> CheckpointError:
    return CheckpointError(
        f"the training data is not what the checkpoint was made with ({', '.join(differences)}): {why}; resume with "
        "the data that the run began with, or from a checkpoint of an epoch's end, or begin a new run from its weights"
    )
