"""Accumulates the gradients of several batches for one update, weighted by the sizes of the batches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_whole_number, is_whole
from pulsetrain.engine.errors import refused

__all__ = ["Accumulate", "Accumulation", "Size"]

Size = int | float | Tensor


@dataclass(frozen=True, kw_only=True)
class Accumulate:
    """When the gradients of several batches make one update; exactly one of the arguments is given.

    Args:
        batches: after this many batches.
        tokens: after the batch that completes this many predicted tokens.
        schedule: batches per update by the number of updates made: {0: 1, 1000: 4} accumulates four batches from the
            1001st update on.

    Raises:
        ConfigurationError: none or several are given, or a number is out of range.

    >>> Accumulate(schedule={0: 1, 10: 4}).updates_in(30)
    15
    """

    batches: int | None = None
    tokens: int | None = None
    schedule: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("batches", "tokens", "schedule") if getattr(self, name) is not None]
        if len(given) != 1:
            raise refused(self, "needs exactly one of batches, tokens and schedule", *given)
        for name in ("batches", "tokens"):
            check_whole_number("Accumulate", name, getattr(self, name), or_none=True)
        if self.schedule is not None:
            self._check_schedule(self.schedule)

    def _check_schedule(self, schedule: object) -> None:
        if not isinstance(schedule, Mapping) or 0 not in schedule:
            raise refused(self, "needs a mapping from update to batches that begins at update 0", "schedule")
        for update, batches in schedule.items():
            if not (is_whole(update) and update >= 0 and is_whole(batches) and batches >= 1):
                rule = f"{update!r}: {batches!r} is not a pair of an update (0 or more) and batches (1 or more)"
                raise refused(self, rule, "schedule")
        object.__setattr__(self, "schedule", dict(sorted(schedule.items())))

    def batches_at(self, update: int, tokens_a_batch: float | None = None) -> int | None:
        """Batches for the update after this many others; None if an unknown number of tokens a batch decides."""
        if self.batches is not None:
            return self.batches
        if self.tokens is not None:
            return math.ceil(self.tokens / tokens_a_batch) if tokens_a_batch else None
        assert self.schedule is not None
        starts = list(self.schedule)
        return self.schedule[starts[bisect_right(starts, update) - 1]]

    def updates_in(self, batches: int, tokens_a_batch: float | None = None) -> int | None:
        """Updates that this many batches make; batches left over make none."""
        update = 0
        starts = list(self.schedule or {})[1:]
        for start in [*starts, None]:
            each = self.batches_at(update, tokens_a_batch)
            if each is None:
                return None
            possible = batches // each
            if start is None or possible < start - update:
                return update + possible
            batches -= (start - update) * each
            update = start
        raise AssertionError("the last piece has no end")

    def batches_in(self, updates: int, tokens_a_batch: float | None = None) -> int | None:
        """Batches that this many updates take."""
        batches, update = 0, 0
        starts = [start for start in list(self.schedule or {})[1:] if start < updates]
        for start in [*starts, updates]:
            each = self.batches_at(update, tokens_a_batch)
            if each is None:
                return None
            batches += (start - update) * each
            update = start
        return batches


class Accumulation:
    """The batches whose gradients wait for the next update.

    An update's gradient is that of the mean over everything in its batches, as if they were one: a batch of twice
    the size weighs twice as much. The total is not known when the first batch is weighed, so each batch weighs
    `size / expected`, and the update corrects the sum by `expected / total`, which is 1 for batches of equal size.
    Sizes may be tensors of shape () on a device, such as a count of targets that are not ignored: nothing waits for
    them.

    Args:
        rule: how many batches make an update.
        weighs_each: also if it is one: a batch is weighed before its size is known exactly.

    >>> accumulation = Accumulation(Accumulate(batches=2))
    >>> weights = []
    >>> for size in (3, 5):
    ...     weights.append(accumulation.weigh(size, tokens=0, update=0))
    ...     complete = accumulation.add(size, tokens=0, update=0)
    >>> correction = accumulation.close()
    >>> complete, [weight * correction for weight in weights]
    (True, [0.375, 0.625])
    """

    batches: int

    def __init__(self, rule: Accumulate, *, weighs_each: bool = False) -> None:
        self.rule = rule
        self._single = rule.batches == 1 and not weighs_each  # the usual case, and no arithmetic for it
        self.reset()

    def reset(self) -> None:
        """Forget the batches that wait."""
        self.batches = 0  # waiting
        self._tokens = 0
        self._size: Size = 0
        self._expected: Size | None = None  # None if nothing needs to be weighed

    @property
    def nothing_waits(self) -> bool:
        """Whether the next batch makes an update by itself."""
        return self.rule.batches == 1 and not self.batches

    def weigh(self, size: Size, tokens: int, update: int) -> Size:
        """The factor for the next batch's mean loss.

        Args:
            size: the number that the batch's loss is a mean over.
            tokens: its predicted tokens.
            update: updates made so far.

        Raises:
            ConfigurationError: tokens are to be accumulated and the batch counts none.
        """
        if self.rule.tokens is not None and not tokens:
            raise refused(self.rule, "the strategy counts no tokens; accumulate batches instead", "tokens")
        if self.batches == 0:
            if self._single:
                return 1.0
            needed = self.rule.batches_at(update)
            if needed is None:  # by tokens
                self._expected = self.rule.tokens
            else:  # at least 1, should the first batch count nothing, or next to nothing: the others would weigh 1e9
                self._expected = (size.clamp(min=1) if isinstance(size, Tensor) else max(size, 1)) * needed
        assert self._expected is not None
        return _exact(size) / self._expected

    def add(self, size: Size, tokens: int, update: int) -> bool:
        """Count a batch whose gradients have been added; returns whether it is time for the update."""
        self.batches += 1
        if self._expected is None:
            return True
        self._size = self._size + size
        self._tokens += tokens
        if self.rule.tokens is not None:
            return self._tokens >= self.rule.tokens
        needed = self.rule.batches_at(update)
        assert needed is not None
        return self.batches >= needed

    def close(self) -> Size:
        """Begin the update; returns the factor for the gradients, 1.0 if there is nothing to do."""
        expected, total = self._expected, self._size
        self.reset()
        if expected is None or (
            not isinstance(expected, Tensor) and not isinstance(total, Tensor) and expected == total
        ):
            return 1.0
        if isinstance(total, Tensor):  # no batch counted anything: their gradients are 0, and stay 0
            total = _exact(torch.where(total > 0, total, torch.ones_like(total)))
        return expected / total

    def state_dict(self) -> dict[str, Size | None]:
        """What waits; a different rule may continue from it, since it holds what each batch has weighed."""
        return {"batches": self.batches, "size": self._size, "tokens": self._tokens, "expected": self._expected}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, self._tokens = state["batches"], state["tokens"]
        self._size, self._expected = state["size"], state["expected"]


def _exact(size: Size) -> Size:
    """A tensor in float64, if its device has that: torch would round the quotient of two counts to float32."""
    return size.double() if isinstance(size, Tensor) and size.device.type != "mps" else size
