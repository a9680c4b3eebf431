"""Where a run is in its data: which pass over the loader, and how far into it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from torch.utils.data import DataLoader

from pulsetrain.engine.checkpoint.plain import plain
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import KeyedLoader
from pulsetrain.engine.data.loaders import (
    begin_stream,
    can_be_keyed,
    can_be_read_once,
    draws_in_workers,
    key_order,
    length_of,
    order_seed,
)
from pulsetrain.engine.data.virtual_loader import VirtualLoader
from pulsetrain.engine.data.workers import workers_begin
from pulsetrain.engine.distributed.agreed_pass import AgreedPass
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import DataRank, VirtualRanks, check_virtual, gives_all_ranks_the_same, ranks
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger
from pulsetrain.state.loader_parts import LoaderParts
from pulsetrain.state.loader_position import LoaderPosition, LoaderState
from pulsetrain.state.part import StateDict, Stateful, keeps_state, require
from pulsetrain.state.worker_watch import WorkerWatch

__all__ = ["DataCursor"]

_FIELDS = ("seed", "passes", "pass_start", "epoch", "epoch_start", "epoch_done", "trained")  # of every state


class DataCursor:
    """Begins passes over a loader, each keyed by (seed, pass), and returns into one.

    The seed is that of the loader's own generator if it has one (`order_seed`), else the run's.

    A loader that `can_be_keyed` accepts is asked for the batches from a position on. One that has `state_dict` and
    `load_state_dict` keeps its position itself, and what it draws is seeded for each batch. Any other is read again up
    to the position; what it draws while it is read comes from a stream of its own, so that the batches are the same
    whatever the model has drawn meanwhile.

    Of several processes, each may get another number of batches from a loader without a length: see `AgreedPass`.

    >>> cursor = DataCursor(seed=0)
    >>> list(cursor.begin([10, 20, 30], iteration=0))
    [10, 20, 30]
    >>> cursor.commit(1)
    >>> resumed = DataCursor(seed=0)
    >>> resumed.load_state_dict(cursor.state_dict())
    >>> list(resumed.resume([10, 20, 30], iteration=1))
    [20, 30]

    Args:
        seed: the run's.
        left_out: first and last of the batches to leave out, numbered as if no batch was left out.
        chosen: whether the user chose the seed, see `order_seed`.
        control: joins several processes; all of them begin and resume their passes at the same time.
        same_number: see `AgreedPass`.
        rank: of several processes, which share of each batch is this one's.
        virtual: the virtual ranks whose shares of each batch this process computes.
    """

    passes: int
    """How many passes have begun."""
    pass_start: int
    """The iteration before the first batch of the current pass."""
    epoch: int
    """The epoch that began last."""
    epoch_start: int
    """The iteration before its first batch."""
    epoch_done: bool
    """Whether the run is between two epochs."""
    trained: int
    """The last iteration whose step was made; `state.iteration` grows before its step."""
    ends_epoch: bool | str
    """Whether the epoch that was loaded has to end before its next batch, as `Engine.should_terminate_single_epoch`."""
    asked_to_end: Callable[[], bool | str]
    """The same of the epoch that runs."""
    skipped: int
    """How many batches were left out."""
    left_out_since: list[tuple[int, int]]
    """The batches to leave out since a rewind, as `left_out`."""
    rewinds: int
    """How often the run has returned to an earlier checkpoint."""
    rank: DataRank
    seed: int

    def __init__(
        self,
        seed: int,
        left_out: Sequence[tuple[int, int]] = (),
        *,
        chosen: bool = True,
        control: ControlGroup | None = None,
        same_number: str = "",
        rank: DataRank | None = None,
        virtual: VirtualRanks | None = None,
    ) -> None:
        self.rank, self._virtual = rank or DataRank(*ranks()), virtual
        self.seed, self._chosen = seed, chosen
        self._control, self._same_number = control, same_number
        self.agreed: AgreedPass | None = None  # the current pass, where the ranks have to agree on its end
        self._agreed_over: object = None  # its loader
        self._configured = seed if chosen else None
        self.left_out: tuple[tuple[int, int], ...] = tuple(left_out)
        self.asked_to_end = lambda: False
        self.refuses_unsavable = False  # whether to refuse, when a pass begins, a loader state that cannot be saved
        self._keyed: tuple[object, KeyedLoader] | None = None  # the loader, and ours that reads it
        self._watch = WorkerWatch(0)
        self._parts = LoaderParts()
        self.reset()

    def reset(self) -> None:
        """Return to before the first pass."""
        self.passes = self.pass_start = self.epoch = self.epoch_start = self.trained = 0
        self.epoch_done, self.ends_epoch = True, False
        self.skipped = self.rewinds = 0
        self.left_out_since = []
        self._skips: list[tuple[int, int]] = []  # iterations before which batches were left out, and the total then
        self._pass_over = False  # the loaded pass has ended, or was over other data: the next batch is of a new one
        self._order_seed: int | None = None  # of the loader below, or of the first one after a load
        self._ordered: object = None
        self._loader: Any = None  # of the current pass; None before it begins, or before a loaded one is resumed
        self._offset = self._offset_at = 0  # in the keyed order: after that iteration
        self._position = LoaderPosition()  # of a loader with a state of its own
        self._saved_loader: LoaderState | None = None  # of the checkpoint that was loaded
        self._saved_parts: StateDict = {}  # likewise

    def begin_epoch(self, epoch: int, start: int) -> None:
        """An epoch's batches begin, or continue, whose first is that of the iteration after `start`."""
        self.epoch, self.epoch_start, self.epoch_done = epoch, start, False

    def end_epoch(self) -> None:
        """The epoch's batches have ended."""
        self.epoch_done = True

    def begin(self, data: Iterable[object], iteration: int) -> Iterator[object]:
        """An iterator over a new pass."""
        with workers_begin(data):
            return self._without_left_out(self._begin_pass(data, iteration), iteration)

    def resume(self, data: Iterable[object], iteration: int) -> Iterator[object]:
        """An iterator over the pass whose state was loaded, from its position on.

        Raises:
            CheckpointError: the loader ends before the position, so it is not the one of the checkpoint.
        """
        at_position = self._parts.resume(data, self._saved_parts)
        if self._pass_over:
            at_position()
            return iter(())
        keyed, agreed = self._keyed_loader(data), self._agree(data)
        if keyed is not None and agreed is None:
            return self._without_left_out(self._iterate(data, at_position), iteration)
        count, saved = iteration - self.pass_start, self._saved_loader
        if keyed is not None:  # a rank whose batches have ended repeats its last one, which is before the position
            self._loader, batches = data, keyed.begin(self.passes)
            count = self._offset // keyed.order.step
        elif saved is not None and keeps_state(data):
            batches = self._iterate_stateful(data, saved)
            count -= saved.given
        else:
            batches = self._iterate(data)
        if count and type(data) not in (list, tuple):
            get_logger("pulsetrain").warning(
                "the loader cannot start at a position: it is read again up to where the run was",
                loader=type(data).__name__,
                batches=count,
                **_remedy(data),
            )
        if agreed is not None:
            agreed.skip(batches, count)
            batches = agreed.over(batches)
        elif sum(1 for _ in islice(batches, count)) < count:
            raise CheckpointError(
                f"resuming after {count} batches of a pass, but {type(data).__name__} gave fewer; "
                "resume with the data that the run began with"
            )
        at_position()
        return self._without_left_out(batches, iteration)

    def number(self, iteration: int) -> int:
        """The number of the batch of an iteration, as if no batch was left out."""
        before = bisect_right(self._skips, iteration, key=itemgetter(0))
        return iteration + (self._skips[before - 1][1] if before else 0)

    def commit(self, iteration: int) -> None:
        """The batch of this iteration was trained on."""
        self.trained = iteration

    def keep_rewinds(self, rewinds: int, left_out: Sequence[tuple[int, int]]) -> None:
        """Count the rewinds and leave out their batches, from the next pass or the one that is resumed on."""
        self.rewinds = rewinds
        self.left_out_since = list(dict.fromkeys((*self.left_out_since, *left_out)))

    def _without_left_out(self, batches: Iterator[object], iteration: int) -> Iterator[object]:
        return self._leave_out(batches, iteration) if self.left_out or self.left_out_since else batches

    def _leave_out(self, batches: Iterator[object], iteration: int) -> Iterator[object]:
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
                        self.pass_start -= 1  # the pass has given that batch
                    continue
                iteration += 1
                given = True
                if self.skipped and (not self._skips or self._skips[-1][1] != self.skipped):
                    self._skips.append((iteration, self.skipped))
                yield batch
            if self.skipped == before:
                return  # the data has no batch
            if not given:  # all the rest of the pass was left out: the next one begins
                batches = self._begin_pass(self._loader, iteration)

    def _begin_pass(self, loader: Iterable[object], iteration: int) -> Iterator[object]:
        self.passes, self.pass_start, self._pass_over = self.passes + 1, iteration, False
        self._offset, self._offset_at = 0, iteration
        self._parts.begin(loader)
        if self.refuses_unsavable:
            plain({"data": {"parts": self._parts.state_dict(loader, ahead=False)}})
        unread = self.agreed.unread() if self.agreed is not None and self._agreed_over is loader else ()
        batches, agreed = self._iterate(loader), self._agree(loader)
        if agreed is None:
            return batches
        # an iterator does not give again what an earlier pass has read ahead
        return agreed.over(chain(unread, batches) if can_be_read_once(loader) else batches)

    def _agree(self, loader: object) -> AgreedPass | None:
        """What the ranks know of a pass that begins or continues, if they may get other numbers of batches."""
        self.agreed, self._agreed_over = None, loader
        if self._control is not None and self._control.is_shared and length_of(loader) is None:
            hold_parts = self.rank.count < ranks().world_size
            alike = "those that hold one copy of the model have to get the same batches" if hold_parts else ""
            self.agreed = AgreedPass(self._control, self._same_number or alike)
        return self.agreed

    def _iterate(self, loader: Iterable[object], at_position: Callable[[], None] | None = None) -> Iterator[object]:
        self._loader = loader
        keyed = self._keyed_loader(loader)
        if keyed is not None:
            return keyed.begin(self.passes, self._offset, at_position)
        if type(loader) in (list, tuple):
            return iter(loader)
        if keeps_state(loader):
            return self._iterate_stateful(loader)
        self._key_pass(loader)
        return rng.Draws(rng.derive(self._seed_of(loader), self.passes)).around(loader)

    def _iterate_stateful(self, loader: Stateful, saved: LoaderState | None = None) -> Iterator[object]:
        """A loader's batches from the pass's first on, or from a saved state on."""
        self._loader = loader
        self._key_pass(loader)
        batches = self._position.begin(loader, self._seed_of(loader), self.passes, saved)
        if self.refuses_unsavable:
            plain({"data": {"loader": self._position.anchor.state}})
        return batches

    def _key_pass(self, loader: object) -> None:
        begin_stream(loader, self.passes)
        key_order(loader, rng.derive(self._seed_of(loader), self.passes))
        if isinstance(loader, DataLoader) and loader.persistent_workers:
            # torch seeds workers when they start: kept ones would continue drawing where the last pass ended, which no
            # resume can know; the price is that they start again with each pass
            loader._iterator = None

    def _keyed_loader(self, loader: object) -> KeyedLoader | None:
        if self._virtual is not None:
            check_virtual(loader, self._virtual.total)
        if not can_be_keyed(loader):
            return None
        seed = self._seed_of(loader)
        if self._keyed is None or self._keyed[0] is not loader or self._keyed[1].order.seed != seed:
            if loader.num_workers:
                self._watch = WorkerWatch(loader.num_workers)
            here = self.rank
            shared = here.count > 1 and gives_all_ranks_the_same(loader, here.count)
            look = self._watch.look if loader.num_workers else None
            if self._virtual is not None:
                self._keyed = loader, VirtualLoader(loader, seed, look, *self._virtual, self.seed)
            else:
                self._keyed = loader, KeyedLoader(loader, seed, look, (here.rank, here.count) if shared else None)
        made = self._keyed[1]
        if isinstance(made, VirtualLoader):
            made.run_seed = self.seed
        return made

    def changed_in_workers(self) -> set[str]:
        """The attributes of the dataset and the `collate_fn` that have changed in a worker, unsaved."""
        return self._watch.changed()

    def _seed_of(self, loader: object) -> int:
        """The seed of its order; after a load, the checkpoint's."""
        if self._order_seed is None or (self._ordered is not None and self._ordered is not loader):
            self._order_seed = order_seed(loader, self.seed, chosen=self._chosen)
        self._ordered = loader
        return self._order_seed

    def locate(self, iteration: int) -> tuple[int, int] | None:
        """Where a batch of the current pass is in the data order, for `rows_at`; None if the loader decides itself."""
        if self._keyed is None or self._keyed[0] is not self._loader:
            return None
        return self.passes, self._offset + (iteration - 1 - self._offset_at) * self._keyed[1].order.step

    def share(self, iteration: int) -> tuple[int, float] | None:
        """How many samples of a batch of the current pass are this rank's, and how many an even share would be.

        None if the loader decides itself which samples a rank gets.
        """
        location = self.locate(iteration)
        if location is None or self._keyed is None:
            return None
        order = self._keyed[1].order
        return order.share(location[1]) if order.ranks == self.rank.count and order.samples is not None else None

    def rows_at(self, location: tuple[int, int]) -> list[Any]:
        """The data set's indices of the batch at that location, of this rank."""
        assert self._keyed is not None
        return self._keyed[1].order.rows(*location)

    def rows(self, iteration: int) -> list[Any] | None:
        """The data set's indices of a batch of the current pass, of this rank; None if the loader decides itself."""
        location = self.locate(iteration)
        return None if location is None else self.rows_at(location)

    def state_dict(self) -> StateDict:
        """The position after the last iteration whose step was made."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        optional = {
            "skipped": self.skipped,
            "left_out": [list(each) for each in self.left_out_since],
            "rewinds": self.rewinds,
            "skips": [list(each) for each in self._skips if each[0] <= self.trained],
            "virtual": self._virtual and self._virtual.total,
            "ends_epoch": self.ends_epoch or (not self.epoch_done and self.asked_to_end()),
        }
        state.update({name: value for name, value in optional.items() if value})
        if self._order_seed not in (None, self.seed):
            state["order_seed"] = self._order_seed
        if self._loader is None:  # as it was loaded, if it was
            state["offset"] = self._offset
            if self._pass_over:
                state["pass_over"] = True
            if self._saved_loader is not None:
                state["loader"], state["given"] = self._saved_loader
            if self._saved_parts:
                state["parts"] = self._saved_parts
            return state
        if self._keyed is not None and self._keyed[0] is self._loader:
            state["offset"] = self._offset + (self.trained - self._offset_at) * self._keyed[1].order.step
        if keeps_state(self._loader):
            reads_ahead = self.agreed is not None
            position = self._position.state(self._loader, self.trained - self.pass_start, reads_ahead=reads_ahead)
            state["loader"], state["given"] = position
        parts = self._parts.state_dict(self._loader, ahead=self._draws_ahead())
        return {**state, "parts": parts} if parts else state

    def _draws_ahead(self) -> bool:
        """Whether batches of the pass may have been drawn, or given to workers, that were not trained yet."""
        length = length_of(self._loader)
        ended = length is not None and self.trained - self.pass_start >= length
        return (getattr(self._loader, "num_workers", 0) > 0 or self.agreed is not None) and not ended

    def check_state_dict(self, state: StateDict) -> None:
        """Refuse an incomplete state, or one whose batches were divided otherwise.

        Raises:
            CheckpointError: it lacks a field, or was made with another number of virtual ranks.
        """
        require("data", state, _FIELDS)
        saved, here = state.get("virtual"), self._virtual and self._virtual.total
        if saved != here:
            raise CheckpointError(
                f"the run began with {_virtual_ranks(saved)}, and this trainer has {_virtual_ranks(here)}; the number "
                "decides what dropout and augmentations draw; resume with that of the checkpoint, by "
                + ("a topology without them" if saved is None else f"Topology(virtual={saved}, reduction='tree')")
            )

    def load_state_dict(self, state: StateDict) -> None:
        """Return to where a checkpoint was made; seed and data order are the checkpoint's, whatever was chosen."""
        self.reset()
        if self._configured not in (None, state["seed"]):
            get_logger("pulsetrain").warning(
                "the run continues with the seed of its checkpoint, not with the configured one; start a new run for "
                "another seed",
                checkpoint=state["seed"],
                configured=self._configured,
            )
        for name in _FIELDS:
            setattr(self, name, state[name])
        if self.passes:
            self._order_seed = state.get("order_seed", self.seed)
        self._offset, self._offset_at = state.get("offset", 0), self.trained
        self.ends_epoch, self.skipped = state.get("ends_epoch", False), state.get("skipped", 0)
        self.left_out_since = [(first, last) for first, last in state.get("left_out", ())]
        self.rewinds = state.get("rewinds", 0)
        self._skips = [(at, skipped) for at, skipped in state.get("skips", ())]
        if "loader" in state:
            self._saved_loader = LoaderState(state["loader"], state.get("given", self.trained - self.pass_start))
        self._saved_parts = state.get("parts", {})
        self._pass_over = state.get("pass_over", False)


def _remedy(loader: object) -> dict[str, str]:
    if not keeps_state(loader) or not draws_in_workers(loader):
        return {}
    remedy = (
        "its state lacks the random generators of its workers; use a DataLoader, which starts at any position, or set "
        "draws_nothing = True on a dataset that draws no random numbers, without a collate_fn"
    )
    return {"remedy": remedy}


def _virtual_ranks(count: int | None) -> str:
    return "no virtual ranks" if count is None else f"{count} virtual rank{'' if count == 1 else 's'}"
