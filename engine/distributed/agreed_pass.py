"""A pass over a loader without a length, which ends on every rank after the same iteration and loses no batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import islice
from typing import NamedTuple

from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.errors import CheckpointError, ConfigurationError

__all__ = ["AgreedPass"]

_NONE = object()  # in place of a batch


class _Failed(NamedTuple):
    """In place of a batch: what the loader raised instead."""

    error: Exception


class AgreedPass:
    """Reads a rank's batches one ahead, so that the ranks know with each batch how many of them have another one.

    The pass ends when none has. Until then, a rank whose loader has ended gets a copy of its last batch again, which is
    to count nothing: the others would wait for ever for a rank that leaves a step out.

    Finding out how many have another batch needs no extra call if the caller adds up `has_next` over the ranks with
    each batch and calls `note`. Otherwise the ranks add it up when the next batch is asked for, as for the first one.

    >>> from pulsetrain.engine.distributed.ranks import Ranks
    >>> list(AgreedPass(ControlGroup(Ranks())).over(iter("abc")))
    ['a', 'b', 'c']

    Args:
        control: joins the ranks, which all read their pass at the same time.
        same_number: why all ranks have to get the same number of batches; empty if they need not, since a batch can be
            made to count nothing.
    """

    is_repeated: bool

    def __init__(self, control: ControlGroup, same_number: str = "") -> None:
        self._control, self._same_number = control, same_number
        self.is_repeated = False  # the batch that was given last: this rank has had it before
        self._next: object = _NONE  # read, and not given yet
        self._last: object = _NONE  # the last one of this rank, known when its loader has ended
        self._given = 0  # the same on every rank
        self._having: float | None = None  # ranks that have another batch, as far as it is known

    @property
    def has_next(self) -> bool:
        """Whether this rank has another batch; an error that its loader raised counts as one."""
        return self._next is not _NONE

    def note(self, ranks: float) -> None:
        """Note how many ranks have another batch: the sum of their `has_next` when the last batch was given."""
        self._having = ranks

    def unread(self) -> Sequence[object]:
        """The batch that was read and not given, if there is one."""
        return [self._next] if self.has_next and not isinstance(self._next, _Failed) else []

    def skip(self, batches: Iterator[object], count: int) -> None:
        """Leave out the first batches of the pass; all ranks call this, and then `over` with the rest.

        Raises:
            CheckpointError: no rank has as many.
            ConfigurationError: a rank has none.
        """
        if not count:
            return
        read = 0
        for batch in islice(batches, count):
            read, self._last = read + 1, batch
        having, reached = self._control.sum([read > 0, read == count], "the position in a pass")
        if not reached:
            raise CheckpointError(
                f"resuming after {count} batches of a pass, but the loaders of all ranks gave fewer; resume with the "
                "data that the run began with"
            )
        if having < self._control.ranks.world_size:
            raise self._unequal(read > 0)
        self._given = count

    def over(self, batches: Iterator[object]) -> Iterator[object]:
        """The batches, and repeated ones until no rank has a further one.

        Raises:
            ConfigurationError: a rank has none at all; or fewer than another one, if none can be repeated.
        """
        self._read(batches)
        while self._agree():
            yield self._give(batches)

    def _read(self, batches: Iterator[object]) -> None:
        try:
            self._next = next(batches, _NONE)
        except Exception as error:
            self._next = _Failed(error)  # raised when this batch is asked for, as if it was not read ahead

    def _agree(self) -> bool:
        """Whether any rank has a further batch; all ranks ask at the same time."""
        having, self._having = self._having, None
        if having is None:
            having = self._control.sum([self.has_next], f"batch {self._given + 1} of a pass")[0]
        if 0 < having < self._control.ranks.world_size and (self._same_number or not self._given):
            raise self._unequal(self.has_next)
        return having > 0

    def _give(self, batches: Iterator[object]) -> object:
        batch = self._next
        if isinstance(batch, _Failed):
            raise batch.error
        self._given += 1
        self.is_repeated = batch is _NONE
        if self.is_repeated:
            return deepcopy(self._last)  # a step may write into what it gets
        self._read(batches)
        if not self._same_number and not self.has_next:
            self._last = deepcopy(batch)
        return batch

    def _unequal(self, here: bool) -> ConfigurationError:
        """The error for ranks whose numbers of batches cannot be made equal."""
        ranks = [str(rank) for rank, has in enumerate(self._control.gather(here)) if not has]
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
        if self._given:
            return ConfigurationError(
                f"the loader of {which} has ended after {self._given} batches, and others have not; give every process "
                f"the same number of batches: {self._same_number}"
            )
        return ConfigurationError(
            f"the loader of {which} gave no batch in this pass, and others did; every process needs at least one: "
            "share the data out in smaller parts, or start fewer processes"
        )
