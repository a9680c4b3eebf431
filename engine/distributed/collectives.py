"""Small collectives between the processes that train together, on the host and apart from the gradients."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from pulsetrain.engine.distributed.failures import FailureBoard, look_interval
from pulsetrain.engine.distributed.ranks import Ranks
from pulsetrain.engine.errors import PeerFailed

__all__ = ["PATIENCE", "ControlGroup"]

T = TypeVar("T")
_WIDTH = 63  # numbers that are summed at once
PATIENCE = 1800.0  # seconds that a rank may take to save
_POLL = 0.02  # seconds between two looks for what it posts
_BEAT, _SILENT_WORK = 0.5, 15.0  # seconds between signs of life, and without one of a rank at work
_SLICE = 5.0  # seconds between two looks at what the others do, while this one waits for them
_STILL_GOING = "Operation timed out"  # in torch's error for a collective that continues after a wait
_SILENT = 2.5  # seconds without a sign of a rank after which it is taken to have ended
_FEW = 64  # ranks, of which each may ask the store about each other one
_FINDING = 30.0  # seconds that one rank has to find out what has failed, where there are more


class ControlGroup:
    """How the ranks agree. All call the same methods in the same order; in a single process, each returns at once.

    >>> alone = ControlGroup(Ranks())
    >>> alone.sum([1.0, 2.0]), alone.gather("here"), alone.broadcast(3)
    ([1.0, 2.0], ['here'], 3)

    Args:
        ranks: this process and how many there are.
        group: for the collectives; None where there is one process.
        store: shared by all ranks.
        timeout: how many seconds a rank may be late.
        host: the rank whose process holds the store, which ends with it; None if the store outlives all ranks.
    """

    ranks: Ranks
    timeout: float
    board: FailureBoard | None

    def __init__(
        self,
        ranks: Ranks,
        group: torch.distributed.ProcessGroup | None = None,
        store: Store | None = None,
        timeout: float = 60.0,
        *,
        host: int | None = None,
    ) -> None:
        self.ranks, self.timeout = ranks, timeout
        self.calls: int = 0  # collectives so far
        self._group, self._store = group, store
        self._unfinished = 0  # collectives that have begun and not ended, or have failed
        self._waits = 0  # for the main process
        self._busy = 0  # blocks of `busy` that this rank is in
        others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
        readers = others if host == ranks.rank else ()
        self.board = None if store is None else FailureBoard(store, ranks.rank, readers, host, ranks.world_size)

    @property
    def is_shared(self) -> bool:
        """Whether there are several processes."""
        return self._group is not None

    def sum(self, values: Sequence[float], what: str = "a sum") -> list[float]:
        """The sums over all ranks, in float64: the same bits on every rank.

        Args:
            values: the same number of them on every rank.
            what: what they are for, in an error.
        """
        if self._group is None:
            return list(values)
        starts = range(0, max(len(values), 1), _WIDTH)
        return [sum for at in starts for sum in self.start_sum(values[at : at + _WIDTH], what)()]

    def start_sum(self, values: Sequence[float], what: str = "a sum") -> Callable[[], list[float]]:
        """Begin to add up, as `sum` does; calling the result waits for it and may be repeated.

        Until it has been called, no other collective may begin on this group.

        Args:
            values: the same number of them on every rank, 63 at most.
            what: what they are for, in an error.
        """
        if self._group is None:
            return lambda: list(values)
        # of one size, with what it is for: ranks that have come to different places get an error, not a crash
        vector = torch.zeros(1 + _WIDTH, dtype=torch.float64)
        vector[0] = tag = zlib.crc32(what.encode())
        vector[1 : 1 + len(values)] = torch.tensor(values, dtype=torch.float64)
        begun: list[torch.distributed.Work] = []
        start = partial(torch.distributed.all_reduce, vector, group=self._group, async_op=True)
        self._meet(what, lambda: begun.append(start()))
        self._unfinished += 1

        def wait() -> list[float]:
            if begun:
                self._explain(what, lambda: self._wait(begun[0]))
                begun.clear()
                self._unfinished -= 1
                if vector[0].item() != float(tag) * self.ranks.world_size:
                    raise self._found_by_one(lambda: self._elsewhere(what, self._places())) or self._elsewhere(what, {})
            return vector[1 : 1 + len(values)].tolist()

        return wait

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in their order; values have to be picklable."""
        if self._group is None:
            return [value]
        self.sum([], "gathering")  # waits as long as need be, with an error for ranks at different places
        found: list[T | None] = [None] * self.ranks.world_size
        self._meet("gathering", lambda: torch.distributed.all_gather_object(found, value, group=self._group))
        return found  # type: ignore[return-value]  # all were given

    def sum_by_name(self, pairs: Mapping[str, tuple[float, float]], what: str) -> dict[str, tuple[float, float]]:
        """The sums over all ranks of two numbers under each name, of which a rank may lack some.

        Args:
            pairs: this rank's.
            what: what they are for, in an error.

        Returns:
            The sums of every name of any rank: those of the first rank first, then further ones of the second, ...
        """
        names = list(dict.fromkeys(name for each in self.gather(list(pairs)) for name in each))
        sums = self.sum([each for name in names for each in pairs.get(name, (0.0, 0.0))], what)
        return dict(zip(names, zip(sums[::2], sums[1::2], strict=True), strict=True))

    def collect(self, value: T) -> list[T]:
        """The value of each rank, in their order, in the main one; empty in the others. Values have to be picklable."""
        if self._group is None:
            return [value]
        self.sum([], "collecting")
        found: list[T | None] | None = [None] * self.ranks.world_size if self.ranks.is_main else None
        self._meet("collecting", lambda: torch.distributed.gather_object(value, found, dst=0, group=self._group))
        return found or []  # type: ignore[return-value]  # all were given

    def broadcast(self, value: T) -> T:
        """The main rank's value, in every process."""
        if self._group is None:
            return value
        self.sum([], "a broadcast")
        values = [value]
        self._meet("a broadcast", lambda: torch.distributed.broadcast_object_list(values, src=0, group=self._group))
        return values[0]

    def main_decides(self, decide: Callable[[], T], *, patient: bool = False) -> T:
        """What the function returns in the main process, in every process.

        Args:
            decide: the function.
            patient: it may take longer than the timeout.

        Raises:
            Exception: it was raised there.
        """
        if self._group is None:
            return decide()
        decided: tuple[T | None, Exception | None] = (None, None)
        if self.ranks.is_main:
            try:
                decided = decide(), None
            except Exception as error:
                decided = None, error
        if patient:
            self.wait_for_main()
        value, refused = self.broadcast(decided)
        if refused is not None:
            raise refused
        return value  # type: ignore[return-value]  # decided

    def wait_for_main(self) -> None:
        """Return once the main process has come here, too: it may take longer than the timeout.

        Raises:
            PeerFailed: a rank has failed meanwhile.
        """
        if self._store is None:
            return
        self._waits += 1
        key = f"main-{self._waits}"
        if self.ranks.is_main:
            self.post(key, None)
        else:
            self.posted(key, 0, "it")

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A block of work on this rank alone that may take longer than the timeout: the others wait for it."""
        if self._store is None:
            yield
            return
        self._busy += 1
        if self._busy == 1:
            self._store.add("busy", 1)
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                with suppress(RuntimeError):  # the store has ended
                    self._store.add("busy", -1)

    def post(self, key: str, value: object) -> None:
        """Leave a value of JSON under a key of this rank; no collective, so any thread may do it."""
        if self._store is not None:
            self._store.set(f"post/{key}/{self.ranks.rank}", json.dumps(value))

    @contextmanager
    def alive(self, what: str) -> Iterator[None]:
        """A block of work for which another rank waits in `posted`: a thread gives signs of life meanwhile."""
        ended, interval = threading.Event(), look_interval(_BEAT, 1, self.ranks.world_size)

        def beat() -> None:
            while self._store is not None:
                with suppress(RuntimeError):  # the store has ended
                    self._store.add(f"alive/{what}/{self.ranks.rank}", 1)
                if ended.wait(interval):
                    return

        thread = threading.Thread(target=beat, name="pulsetrain-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def posted(self, key: str, rank: int, what: str, *, alive: str = "") -> Any:
        """The value that a rank leaves under a key; waits for it, longer than the timeout if need be.

        Args:
            key: of the value; one that was not used before.
            rank: that posts it.
            what: this one waits for, in an error.
            alive: the name of what that rank does meanwhile, inside of `alive`.

        Raises:
            PeerFailed: a rank has failed meanwhile, or has ended.
        """
        assert self._store is not None
        assert self.board is not None
        # the main process alone waits for all the others; of these, each looks for what the main one posts
        poll = _POLL if self.ranks.is_main else look_interval(_POLL, 3, self.ranks.world_size)
        signs, seen = 0, time.monotonic()
        at, until = f"post/{key}/{rank}", time.monotonic() + PATIENCE
        try:
            while not self._store.check([at]):
                failure = self.board.first_of_others()
                if failure is not None:
                    raise failure.as_error()
                now = time.monotonic()
                if alive and now - seen > 1.0 and (count := self._store.add(f"alive/{alive}/{rank}", 0)) != signs:
                    signs, seen = count, now
                if alive and now - seen > (_SILENT_WORK if signs else max(_SILENT_WORK, self.timeout)):
                    raise PeerFailed(
                        f"rank {rank} has given no sign of life for {now - seen:.0f} s, while this one waited for "
                        f"{what}: it has ended, perhaps since it was killed; see its own output and the system's log"
                    )
                if now > until:
                    raise PeerFailed(
                        f"rank {rank} has not come within {PATIENCE:g} s, while this one waited for {what}"
                    )
                time.sleep(poll)
            return json.loads(self._store.get(at))
        except PeerFailed:
            raise
        except RuntimeError as error:  # the store has ended
            raise self.explained(error, what) from error

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Give these tensors the values of the main rank, in place."""
        self.sum([], "a broadcast")
        for tensor in tensors if self.is_shared else ():
            value = tensor.detach().cpu().contiguous()
            self._meet("a broadcast", partial(torch.distributed.broadcast, value, 0, group=self._group))
            tensor.detach().copy_(value)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.sum([0.0])

    def explained(self, error: RuntimeError, what: str, waited: float | None = None) -> RuntimeError:
        """The error with its cause: that of another rank, or which rank is late; the error itself if neither is known.

        Args:
            error: of a collective, here or among the gradients.
            what: the collective.
            waited: seconds for it, if that is known.
        """
        assert self.board is not None
        failure = self.board.first_of_others(wait=2.0)  # a rank writes its error before its connections close
        if failure is not None:
            return failure.as_error()
        return self._found_by_one(lambda: self._cause(error, what, waited)) or error

    def _found_by_one(self, find: Callable[[], RuntimeError | None]) -> RuntimeError | None:
        """What the function returns; where there are many ranks, one of them calls it and posts the error for all."""
        assert self.board is not None
        if self.ranks.world_size <= _FEW:
            return find()
        if not self.board.is_finder():
            failure = self.board.first_of_others(wait=_FINDING)
            return None if failure is None else failure.as_error()
        found = find()
        if found is not None:
            self.board.post(found)
        return found

    def _cause(self, error: RuntimeError, what: str, waited: float | None) -> RuntimeError | None:
        """Why a collective has failed: which rank has ended, or is late; None if that is not known."""
        assert self.board is not None
        others = [rank for rank in range(self.ranks.world_size) if rank != self.ranks.rank]
        ended = self.board.ended(others, within=_SILENT)
        if ended and "timed out" not in str(error).lower():
            return PeerFailed(
                f"{_listed(ended)} ended without an error, while this one waited for {what}: perhaps it was killed, or "
                f"its memory was exhausted; see its own output and the system's log. Here the error was: {error}"
            )
        if (lost := self.board.lost()) is not None:
            return lost
        at = self._places()
        late = [rank for rank, (calls, _) in at.items() if calls < self.calls]
        if late:
            within = "" if waited is None else f", within {waited:.0f} s"
            return PeerFailed(
                f"{_listed(late)} not come to {what}, collective no. {self.calls} on this rank{within}: it has ended, "
                "hangs, or runs other code; see its own output and its event log"
            )
        return None

    def _elsewhere(self, what: str, at: Mapping[int, tuple[int, str]]) -> PeerFailed:
        """The error for ranks that have met, each for something else."""
        places = {rank: place for rank, (_, place) in at.items() if place != what}
        rank, place = next(iter(places.items()), ("another", "another place"))
        return PeerFailed(
            f"rank {rank} has come to {place} when this one came to {what}: they do not have the same number of "
            "batches, or a handler acts in one of them alone"
        )

    def close(self) -> None:
        """Let go of torch's group, whose threads end with it: no collective may follow.

        They release tensors after a collective has ended. While Python shuts down, that would abort the process. Where
        a collective has not ended, they would wait for its other ranks, so they are left alone.
        """
        if not self._unfinished:
            if self._group is not None and torch.distributed.is_initialized():  # else torch has let go of it before
                with suppress(ValueError):  # so it has, and a new default group was made since
                    torch.distributed.destroy_process_group(self._group)
            del self._group

    def _wait(self, work: torch.distributed.Work) -> None:
        """Wait until a collective has ended: as long as the timeout, and as long as another rank is busy."""
        slice = min(self.timeout, _SLICE)
        until = time.monotonic() + self.timeout
        while True:
            try:
                work.wait(timedelta(seconds=slice))
                return
            except RuntimeError as error:
                if _STILL_GOING not in str(error):
                    raise
                if self._others_are_busy():
                    until = time.monotonic() + self.timeout
                elif time.monotonic() >= until:
                    raise

    def _others_are_busy(self) -> bool:
        assert self._store is not None
        assert self.board is not None
        failure = self.board.first_of_others()
        if failure is not None:
            raise failure.as_error()
        return self._store.add("busy", 0) > (self._busy > 0)

    def _meet(self, what: str, run: Callable[[], object]) -> None:
        self.calls += 1
        self._unfinished += 1
        self._explain(what, lambda: self._note(what), run)
        self._unfinished -= 1

    def _note(self, what: str) -> None:
        """For the others: to which collective this rank has come."""
        assert self._store is not None
        self._store.set(_key(self.ranks.rank), f"{self.calls} {what}")

    def _explain(self, what: str, *steps: Callable[[], object]) -> None:
        """Do these steps; an error gets its cause."""
        begun = time.monotonic()
        try:
            for step in steps:
                step()
        except RuntimeError as error:
            explained = self.explained(error, what, time.monotonic() - begun)
            if explained is error:
                raise
            raise explained from error

    def _places(self) -> dict[int, tuple[int, str]]:
        """The last collective that each other rank has begun: its number, and what it was for."""
        assert self._store is not None
        found = {}
        for rank in range(self.ranks.world_size):
            if rank == self.ranks.rank:
                continue
            try:
                begun = self._store.get(_key(rank)).decode() if self._store.check([_key(rank)]) else "0 "
            except RuntimeError:  # the store was on a rank that has ended
                return {}
            number, _, place = begun.partition(" ")
            found[rank] = int(number), place
        return found


def _key(rank: int) -> str:
    return f"control/{rank}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
