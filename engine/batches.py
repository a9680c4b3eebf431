"""The order of the data as a function of a seed, so that a run can be begun again in the middle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["key_order", "length_of", "skip"]


def key_order(loader: Any, seed: int) -> None:
    """Let the next pass over a DataLoader draw its order, and its workers' seeds, from `seed` alone.

    Without this both come from torch's global generator, which the model draws from too. Samplers with `set_epoch`
    or without a generator keep their own order.
    """
    if not isinstance(loader, torch.utils.data.DataLoader):
        return
    holders: list[Any] = [loader, loader.sampler, loader.batch_sampler]
    for holder in holders:
        if not hasattr(holder, "generator"):
            continue
        if holder.generator is None:
            holder.generator = torch.Generator()
        holder.generator.manual_seed(seed)


def length_of(loader: Any) -> int | None:
    """How many batches a pass has, or None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def skip(batches: Iterator[Any], count: int, source: Iterable[Any]) -> None:
    """Read and drop `count` batches: the way to a position in any loader that gives the same batches again.

    Raises:
        ValueError: the loader ends before the position; it is not the one that the checkpoint was made with.
    """
    for taken in range(count):
        try:
            next(batches)
        except StopIteration:
            raise ValueError(
                f"resuming after {count} batches of a pass, but {type(source).__name__} gave {taken}; "
                "resume with the data that the run began with"
            ) from None
