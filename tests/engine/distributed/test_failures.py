"""What is known of processes that fail, once the store where they meet has ended."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed import HashStore

from pulsetrain.engine.distributed.failures import FailureBoard, Warden
from pulsetrain.engine.errors import PeerFailed


class Ending(HashStore):  # type: ignore[misc]
    """A store of a process that ends."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = False
        self.calls = 0

    def add(self, key: str, amount: int) -> Any:
        self.calls += 1
        if self.has_ended:
            raise RuntimeError("Broken pipe")
        return super().add(key, amount)


def test_a_store_that_has_ended_is_asked_once_and_names_the_launcher():
    store = Ending()
    board = FailureBoard(store, rank=0)
    assert board.lost() is None
    store.has_ended = True
    asked = store.calls
    for _ in range(3):
        assert "the launcher, where the processes of the run meet, has ended" in str(board.lost())
    assert store.calls == asked + 1, "each further call would print torch's stack"
    assert board.beats_of(1) is None
    assert board.first() is None


@pytest.mark.parametrize("host", [0, 1])
def test_a_store_of_a_rank_may_end_before_the_other_ranks_runs(host: int):
    store = Ending()
    board = FailureBoard(store, rank=0, host=host)
    store.has_ended = True
    assert board.lost() is None


def test_a_process_that_has_lost_the_launcher_is_ended():
    store, left = Ending(), threading.Event()
    found: list[PeerFailed] = []

    def leave(error: PeerFailed) -> None:
        found.append(error)
        left.set()

    warden = Warden(FailureBoard(store, rank=0), 1, interval=0.02, grace=0.05, leave=leave)
    warden.start()
    assert not left.wait(0.3)
    store.has_ended = True
    assert left.wait(10.0)
    assert "the launcher" in str(found[0])
    warden.stop()


def test_no_thread_asks_the_store_while_python_shuts_down():
    asked, answer = threading.Event(), threading.Event()

    class Slow(Ending):
        def add(self, key: str, amount: int) -> Any:
            asked.set()
            answer.wait(0.3)
            return super().add(key, amount)

    warden = Warden(FailureBoard(Slow(), rank=0), 1, interval=0.01)
    warden.start()
    assert asked.wait(10.0)
    warden.stop()
    assert "pulsetrain-warden" not in [each.name for each in threading.enumerate()]
