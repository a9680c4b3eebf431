"""What thousands of ranks ask of the store and of each other does not grow with the square of their number."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore

from pulsetrain.engine import ConfigurationError
from pulsetrain.engine.distributed import collectives, failures
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.failures import FailureBoard, Warden
from pulsetrain.engine.distributed.joining import _absent_after, check_alike
from pulsetrain.engine.distributed.pulse import Pulse
from pulsetrain.engine.distributed.ranks import Ranks
from pulsetrain.engine.errors import PeerFailed
from tests.support.ranks_in_threads import Counting, Meeting, in_threads


@pytest.mark.parametrize("world", [2, 60])
def test_a_rank_that_joins_makes_a_few_requests(world: int):
    shared = HashStore()
    stores = [Counting(shared) for _ in range(world)]

    def body(control: Meeting) -> Any:
        return _absent_after(stores[control.ranks.rank], control.ranks, 10.0)  # type: ignore[arg-type]

    assert in_threads(body, world)[0] == [[]] * world
    assert max(store.requests for store in stores) <= 5


def test_of_thousands_of_ranks_those_that_are_missing_are_named_after_a_few_requests():
    shared, missing = HashStore(), [0, 1234, 1235, 4999]
    for rank in range(5000):
        if rank not in missing and rank != 7:
            shared.set(f"here/{rank}", "")
    store = Counting(shared)
    assert _absent_after(store, Ranks(7, 5000), 0.01) == missing  # type: ignore[arg-type]
    assert store.requests < 120


def test_a_rank_that_joins_twice_counts_once():
    store = HashStore()
    assert _absent_after(store, Ranks(1, 3), 0.01) == [0, 2]
    assert _absent_after(store, Ranks(0, 3), 0.01) == [2]
    assert _absent_after(store, Ranks(1, 3), 0.01) == [2]


def test_ranks_that_are_alike_send_digests_alone():
    found, controls = in_threads(lambda control: check_alike(control, {"shapes": "x" * 10_000}), 4)
    assert (found, [control.gathered for control in controls]) == ([None] * 4, [[]] * 4)


def test_what_differs_at_the_start_is_sent_to_the_main_process_alone():
    def body(control: Meeting) -> None:
        check_alike(control, {"shapes": "x" * 10_000, "seed": control.ranks.rank // 3})

    found, controls = in_threads(body, 4)
    assert all(isinstance(each, ConfigurationError) for each in found)
    assert {str(each) for each in found} == {str(found[0])}
    assert "rank 3 has seed=1, rank 0 has 0" in str(found[0])
    assert "shapes" not in str(found[0])
    assert [len(repr(control.gathered)) > 10_000 for control in controls] == [True, False, False, False]


def test_whether_another_rank_is_busy_takes_as_many_requests_whatever_their_number():
    shared = HashStore()
    store = Counting(shared)
    here = ControlGroup(Ranks(0, 5000), None, store)  # type: ignore[arg-type]
    other = ControlGroup(Ranks(1, 5000), None, shared)
    store.requests = 0
    assert not here._others_are_busy()
    assert store.requests <= 2
    with here.busy():
        assert not here._others_are_busy()
        assert other._others_are_busy()
        with other.busy(), other.busy():
            assert here._others_are_busy()
        assert not here._others_are_busy()
    assert not other._others_are_busy()


@pytest.mark.parametrize(("rank", "seconds"), [(0, 0.02), (1, 3.0)])
def test_ranks_that_wait_for_the_main_one_look_less_often_the_more_they_are(
    rank: int, seconds: float, monkeypatch: pytest.MonkeyPatch
):
    store, slept = HashStore(), list[float]()
    others = ControlGroup(Ranks(1 - rank, 10_000), None, store)

    def sleep(duration: float) -> None:
        slept.append(duration)
        others.post("saved", "yes")

    monkeypatch.setattr(collectives.time, "sleep", sleep)
    waiting = ControlGroup(Ranks(rank, 10_000), None, store)
    assert (waiting.posted("saved", 1 - rank, "it"), slept) == ("yes", [seconds])


@pytest.mark.parametrize(("ranks", "interval", "silence"), [(2, 1.0, 12.0), (2_500, 1.0, 12.0), (20_000, 8.0, 24.0)])
def test_signs_of_life_are_looked_for_as_often_as_they_are_given(ranks: int, interval: float, silence: float):
    warden = Warden(FailureBoard(HashStore(), 0, ranks=ranks), 1)
    assert (warden._interval, warden._silence) == (interval, silence)


def test_a_rank_among_thousands_is_not_taken_to_have_ended_between_two_signs(monkeypatch: pytest.MonkeyPatch):
    board, slept = FailureBoard(HashStore(), 0, ranks=10_000), list[float]()
    monkeypatch.setattr(failures.time, "sleep", slept.append)
    board.ended([1], within=collectives._SILENT)
    assert slept[0] > 2 * Warden(board)._interval


def test_one_of_many_ranks_finds_out_for_all_which_one_has_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collectives, "_SILENT", 0.3)
    look = FailureBoard.first_of_others
    monkeypatch.setattr(FailureBoard, "first_of_others", lambda board, wait=0.0: look(board, wait / 10))
    world, dead = 80, 66
    shared, ended = HashStore(), threading.Event()
    boards = [FailureBoard(shared, rank, ranks=world) for rank in range(world) if rank != dead]

    def beat() -> None:
        while not ended.is_set():
            for board in boards:
                board.beat()
            time.sleep(0.02)

    beating = threading.Thread(target=beat)
    beating.start()
    stores = [Counting(shared) for _ in range(3)]
    controls = [ControlGroup(Ranks(rank, world), None, store) for rank, store in enumerate(stores)]  # type: ignore[arg-type]
    found: dict[int, str] = {}

    def explain(rank: int) -> None:
        error = controls[rank].explained(RuntimeError("Connection closed by peer"), "a sum")
        assert isinstance(error, PeerFailed)
        found[rank] = str(error)

    threads = [threading.Thread(target=partial(explain, rank)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    beating.join()
    said = f"rank {dead} has ended without an error, while this one waited for a sum"
    assert all(said in text for text in found.values())
    assert sorted(text.startswith("rank") and "has failed" in text for text in found.values()) == [False, True, True]
    assert sorted(store.requests > 2 * (world - 1) for store in stores) == [False, False, True]


@pytest.mark.parametrize(("ranks", "iterations"), [(2, 5), (2_500, 5), (10_000, 20)])
def test_pulses_of_more_ranks_are_further_apart(ranks: int, iterations: int, monkeypatch: pytest.MonkeyPatch):
    control = ControlGroup(Ranks(0, ranks))
    monkeypatch.setattr(control, "sum", lambda values, what: [0.0, 0.0, 1.0 * ranks, float(ranks)])  # a second each
    pulse = Pulse(control, every=1000)
    pulse.beat(1, fixed=False)
    assert pulse.next == 1 + iterations
