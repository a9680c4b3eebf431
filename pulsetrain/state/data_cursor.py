"""Where a run stands in its data: which pass over the loader, and how far into it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import islice
from operator import itemgetter
from typing import Any

from torch.utils.data import DataLoader

from pulsetrain.engine.checkpoint.plain import plain
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import KeyedLoader, can_be_keyed, key_order
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger

__all__ = ["STATE", "DataPosition"]

STATE = ("seed", "passes", "pass_start", "epoch", "epoch_start", "epoch_done", "trained")  # of every position
_WATCHED = 8  # batches of a loader of an unknown kind that are watched for draws


class DataPosition:
    """Begins passes over a loader, each keyed by (seed, pass), and finds back into one.

    A loader that `can_be_keyed` accepts is asked for the batches from a position on. One that has `state_dict` and
    `load_state_dict` keeps its position itself, and what it draws is seeded for each batch. Any other is read again up
    to the position; what it draws while it is read comes from a stream of its own, so that the same batches come
    again whatever the model has drawn meanwhile.

    Args:
        seed: of the data order.
        left_out: first and last of the batches that are passed over, numbered as iterations would be that trained all.
    """

    def __init__(self, seed: int, left_out: Sequence[tuple[int, int]] = ()) -> None:
        self.seed = seed
        self.left_out = tuple(left_out)
        self.left_out_since: list[tuple[int, int]]  # further ones, since a rewind
        self._skips: list[
            tuple[int, int]
        ]  # iterations, and how many batches were left out before each, where that rises
        self._keyed: tuple[Any, KeyedLoader] | None = None  # the loader, and ours that has taken it over
        self.refuses_unsavable = False  # a loader's state that no checkpoint can hold, when a pass begins
        self.restart()

    def restart(self) -> None:
        """Stand at the very beginning."""
        self.passes = 0  # begun
        self.pass_start = 0  # iteration before this pass's first batch
        self.epoch = 0  # the one last begun
        self.epoch_start = 0  # iteration before its first batch
        self.epoch_done = True  # between two epochs
        self.skipped = 0  # batches that were left out
        self.left_out_since = []
        self._skips = []
        self.rewinds = 0  # how often the run has gone back
        self.trained = 0  # the last iteration whose step was made: state.iteration grows before its step
        self.resuming = False  # a checkpoint was loaded whose pass has not been found back to
        self.inside = False  # it was made inside an epoch, which has not gone on yet
        self._pass_over = False  # its pass had ended, or was over other data: what comes next is a new one
        self._loader: Any = None  # the one that the pass under way is over; None before it has begun or been found back
        self._offset = 0  # of the keyed order, at the iteration that follows
        self._offset_at = 0
        # of a loader that keeps its state: batches of the pass that it has given; a state to go back to, and their
        # number then; the same two of the checkpoint that was loaded
        self._given = 0
        self._anchor: tuple[Any, int] = (None, 0)
        self._saved_loader: tuple[Any, int] | None = None

    def begin_epoch(self, epoch: int, iteration: int) -> bool:
        """An epoch's batches begin; false where they go on behind a checkpoint that was made inside the epoch."""
        inside, self.inside = self.inside, False
        if not inside:
            self.epoch_start = iteration
        self.epoch, self.epoch_done = epoch, False
        return not inside

    def begin_pass(self, loader: Any, iteration: int) -> Iterator[Any]:
        """An iterator over a new pass."""
        self.passes += 1
        self.pass_start = iteration
        self.resuming = self._pass_over = False
        self._offset, self._offset_at = 0, iteration
        return self._without_those_left_out(self._iterate(loader), iteration)

    def find_back(self, loader: Any, iteration: int) -> Iterator[Any]:
        """An iterator over the pass that a checkpoint was made in, at its position.

        Raises:
            CheckpointError: the loader ends before the position: it is not the one that the checkpoint was made with.
        """
        self.resuming = False
        if self._pass_over:
            return iter(())
        if self._take_over(loader) is not None:
            return self._without_those_left_out(self._iterate(loader), iteration)
        count, saved = iteration - self.pass_start, self._saved_loader
        if saved is not None and _keeps_state(loader):
            batches = self._iterate_stateful(loader, saved)
            count -= saved[1]
        else:
            batches = self._iterate(loader)
        if count and type(loader) not in (list, tuple):
            get_logger("pulsetrain").warning(
                "the loader cannot be asked for a position: it is read again up to where the run was",
                loader=type(loader).__name__,
                batches=count,
            )
        if sum(1 for _ in islice(batches, count)) < count:
            raise CheckpointError(
                f"resuming behind {count} batches of a pass, but {type(loader).__name__} gave fewer; "
                "resume with the data that the run began with"
            )
        return self._without_those_left_out(batches, iteration)

    def number(self, iteration: int) -> int:
        """That of the batch of an iteration, as iterations would be that trained all."""
        before = bisect_right(self._skips, iteration, key=itemgetter(0))
        return iteration + (self._skips[before - 1][1] if before else 0)

    def leave_out(self, first: int, last: int) -> None:
        """Further batches that the next pass, or the one that is found back to, passes over."""
        if (first, last) not in self.left_out_since:
            self.left_out_since.append((first, last))

    def _without_those_left_out(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        return self._leave_out(batches, iteration) if self.left_out or self.left_out_since else batches

    def _leave_out(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        given = False
        while not given:
            before = self.skipped
            for batch in batches:
                number = iteration + 1 + self.skipped
                if any(first <= number <= last for first, last in (*self.left_out, *self.left_out_since)):
                    self.skipped += 1
                    if self._keyed is not None and self._keyed[0] is self._loader:
                        self._offset += self._keyed[1].order.step
                    else:
                        self.pass_start -= 1  # as far as the pass goes, that batch was had
                    continue
                iteration += 1
                given = True
                if self.skipped and (not self._skips or self._skips[-1][1] != self.skipped):
                    self._skips.append((iteration, self.skipped))
                yield batch
            if self.skipped == before:
                return  # the data has no batch
            if not given:  # all that was left of the pass: the next one begins
                self.passes, self.pass_start = self.passes + 1, iteration
                self._offset, self._offset_at = 0, iteration
                batches = self._iterate(self._loader)

    def _iterate(self, loader: Any) -> Iterator[Any]:
        self._loader = loader
        keyed = self._take_over(loader)
        if keyed is not None:
            return keyed.begin(self.passes, self._offset)
        if type(loader) in (list, tuple):
            return iter(loader)
        if _keeps_state(loader):
            return self._iterate_stateful(loader)
        self._key_pass(loader)
        # workers are seeded by the line above, and a sampler that draws here does so at once
        known_to_draw_here = isinstance(loader, DataLoader) and loader.num_workers == 0
        return rng.Draws(rng.derive(self.seed, self.passes)).around(loader, None if known_to_draw_here else _WATCHED)

    def _iterate_stateful(self, loader: Any, saved: tuple[Any, int] | None = None) -> Iterator[Any]:
        """A loader's batches from the pass's first on, or from a saved state on."""
        self._loader = loader
        self._key_pass(loader)
        with rng.seeded(rng.derive(self.seed, self.passes)):
            if saved is not None:
                loader.load_state_dict(saved[0])
            batches = iter(loader)
            self._anchor = saved or (deepcopy(loader.state_dict()), 0)
            if self.refuses_unsavable:
                plain({"position": {"loader": self._anchor[0]}})
        self._given = self._anchor[1]
        return self._give(batches)

    def _give(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Each made under a seed of its own, so that a resume need not know what those before it have drawn."""
        while True:
            with rng.seeded(rng.derive(self.seed, self.passes, self._given)):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            self._given += 1
            yield batch

    def _key_pass(self, loader: Any) -> None:
        key_order(loader, rng.derive(self.seed, self.passes))
        if isinstance(loader, DataLoader) and loader.persistent_workers:
            # torch seeds workers when they begin: kept ones would draw on where the last pass ended, which no resume
            # can know; the price is that they begin anew each pass
            loader._iterator = None

    def _take_over(self, loader: Any) -> KeyedLoader | None:
        if not can_be_keyed(loader):
            return None
        if self._keyed is None or self._keyed[0] is not loader:
            self._keyed = loader, KeyedLoader(loader, self.seed)
        return self._keyed[1]

    def locate(self, iteration: int) -> tuple[int, int] | None:
        """Where a batch of the pass under way lies, for `rows_at`; None where the loader's order is its own."""
        if self._keyed is None or self._keyed[0] is not self._loader:
            return None
        return self.passes, self._offset + (iteration - 1 - self._offset_at) * self._keyed[1].order.step

    def rows_at(self, location: tuple[int, int]) -> list[Any]:
        """The indices of the batch at that location, of this rank."""
        assert self._keyed is not None
        return self._keyed[1].order.rows(*location)

    def rows(self, iteration: int) -> list[Any] | None:
        """The indices of a batch of the pass under way, of this rank; None where the loader's order is its own."""
        location = self.locate(iteration)
        return None if location is None else self.rows_at(location)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last iteration whose step was made."""
        state = {name: getattr(self, name) for name in STATE}
        if self.skipped:
            state["skipped"] = self.skipped
        if self.left_out_since:
            state["left_out"] = [list(each) for each in self.left_out_since]
        if self.rewinds:
            state["rewinds"] = self.rewinds
        if self._skips:
            state["skips"] = [list(each) for each in self._skips if each[0] <= self.trained]
        if self._loader is None:  # as it was loaded, if it was
            state["offset"] = self._offset
            if self._pass_over:
                state["pass_over"] = True
            if self._saved_loader is not None:
                state["loader"], state["given"] = self._saved_loader
            return state
        if self._keyed is not None and self._keyed[0] is self._loader:
            state["offset"] = self._offset + (self.trained - self._offset_at) * self._keyed[1].order.step
        if _keeps_state(self._loader):
            # a batch that was given and not trained on (the run was stopped in between) must come again
            ahead = self._given - (self.trained - self.pass_start)
            state["loader"], state["given"] = self._state_before(ahead) if ahead else self._state_now()
        return state

    def _state_now(self) -> tuple[Any, int]:
        return self._loader.state_dict(), self._given

    def _state_before(self, ahead: int) -> tuple[Any, int]:
        """A state of the loader to go on from behind the batches that were trained on, or from further back."""
        before = getattr(self._loader, "state_before", None)  # of one whose batches cannot be made a second time
        return self._anchor if before is None else (before(ahead), self._given - ahead)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where a checkpoint was made; the seed of the data order is the checkpoint's."""
        if state["seed"] != self.seed:
            self._keyed = None
        for name in STATE:
            setattr(self, name, state[name])
        self._offset, self._offset_at = state.get("offset", 0), self.trained
        self.skipped = state.get("skipped", 0)
        self.left_out_since = [(first, last) for first, last in state.get("left_out", ())]
        self.rewinds = state.get("rewinds", 0)
        self._skips = [(at, skipped) for at, skipped in state.get("skips", ())]
        given = state.get("given", self.trained - self.pass_start)
        self._saved_loader = (state["loader"], given) if "loader" in state else None
        self._loader = None
        self.resuming = self.passes > 0
        self._pass_over = state.get("pass_over", False)
        self.inside = not self.epoch_done


def _keeps_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
