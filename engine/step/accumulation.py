"""Several batches, one update: how many, and what part of the update's gradient each of them is."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["Accumulate", "Accumulation", "Size"]

Size = int | float | Tensor


@dataclass(frozen=True, kw_only=True)
class Accumulate:
    """When the gradients of several batches make one update; exactly one of the three is given.

    Args:
        batches: after so many batches.
        tokens: after the batch with which so many predicted tokens are together.
        schedule: batches an update by the number of updates made: {0: 1, 1000: 4} accumulates four batches from the
            1001st update on.

    Raises:
        ConfigurationError: none or several are given, or a number is out of range.
    """

    batches: int | None = None
    tokens: int | None = None
    schedule: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("batches", "tokens", "schedule") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigurationError(
                "needs exactly one of batches, tokens and schedule", "Accumulate", **dict.fromkeys(given, ...)
            )
        for name in ("batches", "tokens"):
            value = getattr(self, name)
            if value is not None and not _whole(value, 1):
                raise ConfigurationError("needs a whole number of at least 1", "Accumulate", **{name: value})
        if self.schedule is not None:
            self._check_schedule(self.schedule)

    def _check_schedule(self, schedule: object) -> None:
        if not isinstance(schedule, Mapping) or 0 not in schedule:
            raise ConfigurationError(
                "needs a mapping from update to batches that begins at update 0", "Accumulate", schedule=schedule
            )
        for update, batches in schedule.items():
            if not _whole(update, 0) or not _whole(batches, 1):
                raise ConfigurationError(
                    f"{update!r}: {batches!r} is no pair of an update (0 or more) and batches (1 or more)",
                    "Accumulate",
                    schedule=schedule,
                )
        object.__setattr__(self, "schedule", dict(sorted(schedule.items())))

    def batches_at(self, update: int, tokens_a_batch: float | None = None) -> int | None:
        """Batches for the update behind so many others; None where that hangs on tokens a batch, not known."""
        if self.batches is not None:
            return self.batches
        if self.tokens is not None:
            return math.ceil(self.tokens / tokens_a_batch) if tokens_a_batch else None
        assert self.schedule is not None
        starts = list(self.schedule)
        return self.schedule[starts[bisect_right(starts, update) - 1]]

    def updates_in(self, batches: int, tokens_a_batch: float | None = None) -> int | None:
        """Updates that so many batches make; batches left over make none."""
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
        """Batches that so many updates take."""
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
    the size weighs twice as much. What a window will hold is not known when its first batch is weighed, so each weighs
    `size / expected`, and the update corrects the sum by `expected / total`, which is 1 for batches of one size. Sizes
    may be tensors of shape () on a device, such as a count of targets that are not ignored: none is waited for.
    """

    def __init__(self, rule: Accumulate) -> None:
        self.rule = rule
        self._single = rule.batches == 1  # the usual case, and no arithmetic for it
        self.restart()

    def restart(self) -> None:
        """Nothing waits."""
        self.batches = 0  # waiting
        self._tokens = 0
        self._size: Size = 0
        self._expected: Size | None = None  # None where nothing need be weighed

    @property
    def nothing_waits(self) -> bool:
        """Whether the next batch makes an update by itself."""
        return self._single and not self.batches

    def weigh(self, size: Size, tokens: int, update: int) -> Size:
        """What the next batch's mean loss is to be multiplied by.

        Args:
            size: what the batch's loss is a mean over.
            tokens: its predicted tokens.
            update: updates made so far.

        Raises:
            ConfigurationError: tokens are to be accumulated and the batch counts none.
        """
        if self.rule.tokens is not None and not tokens:
            raise ConfigurationError(
                "the strategy counts no tokens; accumulate batches instead", "Accumulate", tokens=self.rule.tokens
            )
        if self.batches == 0:
            if self._single:
                return 1.0
            needed = self.rule.batches_at(update)
            if needed is None:  # by tokens
                self._expected = self.rule.tokens
            else:  # at least 1, should the first batch count nothing
                self._expected = (size.clamp_min(1) if isinstance(size, Tensor) else size) * needed
        assert self._expected is not None
        return size / self._expected

    def add(self, size: Size, tokens: int, update: int) -> bool:
        """Count the batch in, now that its gradients are there; returns whether it is time for the update."""
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
        """The update begins; returns what the gradients are to be multiplied by first, 1.0 for nothing to do."""
        expected, total = self._expected, self._size
        self.restart()
        if expected is None or (
            not isinstance(expected, Tensor) and not isinstance(total, Tensor) and expected == total
        ):
            return 1.0
        if isinstance(total, Tensor):  # nothing counted in any of the batches: their gradients are 0, and stay so
            total = total.clamp_min(1)
        return expected / total

    def state_dict(self) -> dict[str, Any]:
        """What waits; another rule may go on from it, since the correction knows what each batch has weighed."""
        return {"batches": self.batches, "size": self._size, "tokens": self._tokens, "expected": self._expected}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, self._tokens = state["batches"], state["tokens"]
        self._size, self._expected = state["size"], state["expected"]


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
