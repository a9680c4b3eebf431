"""A process that fails, is killed or stops is named by the others, which end."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from pulsetrain.engine import Events
from pulsetrain.engine.distributed.failures import Warden
from pulsetrain.engine.errors import PeerFailed
from pulsetrain.engine.recording import EventLog
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import dropping, linear, make


@pytest.mark.parametrize("who", [0, 1])
def test_the_error_of_one_rank_is_what_the_other_one_raises(who: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # the main process, with which the store ends, does not wait for one that has failed itself
    monkeypatch.setattr("pulsetrain.engine.distributed.failures._READING", 60.0)

    def body(rank: int) -> None:
        made = dropping(tmp_path / "run")

        @made.on(Events.ITERATION_COMPLETED(once=5))
        def fail() -> None:
            if rank == who:
                raise ValueError(f"the disk of rank {rank} has gone")

        made.train()

    ended = in_processes(body)
    assert f"ValueError: the disk of rank {who} has gone" in ended[who].error
    other = ended[1 - who].error
    assert f"PeerFailed: rank {who} has failed at epoch 1, iteration 5, so this one cannot continue:" in other
    assert f"ValueError: the disk of rank {who} has gone" in other


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path: Path):
    def body(rank: int) -> None:
        made = dropping(tmp_path / "run", max_epochs=200)
        if rank == 1:
            made.on(Events.ITERATION_COMPLETED(once=60))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    ended = in_processes(body)
    assert ended[1].status == -signal.SIGKILL
    assert "PeerFailed: rank 1 has ended without an error, while this one waited for" in ended[0].error
    assert EventLog(tmp_path / "run").verify() == []


@pytest.mark.slow
def test_a_rank_whose_process_is_stopped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.training.agreement.Warden", partial(Warden, interval=0.1, grace=0.3, silence=3.0))

    def stop() -> None:
        if os.fork() == 0:  # kills the stopped process in the end
            other, until = int((tmp_path / "pid-0").read_text()), time.monotonic() + 60.0
            while Path(f"/proc/{other}").exists() and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    def body(rank: int) -> None:
        (tmp_path / f"pid-{rank}").write_text(str(os.getpid()))
        made = dropping(tmp_path / "run", max_epochs=2000)
        if rank == 1:
            made.on(Events.ITERATION_COMPLETED(once=20))(stop)
        made.train()

    ended = in_processes(body)
    assert ended[0].status == Warden.STATUS
    assert "rank 1 has given no sign of life for 3 s: its process is stopped" in ended[0].stderr


def test_a_rank_that_leaves_a_run_early_is_not_taken_for_a_stopped_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.training.agreement.Warden", partial(Warden, interval=0.05, grace=0.1, silence=0.3))

    def body(rank: int) -> None:
        made = make(linear(), DataLoader(pairs(16), 4))
        made.on(Events.COMPLETED)(lambda: time.sleep(1.0 - rank))  # as a last save does
        made.train()
        time.sleep(0.8 * rank)  # before the next run
        made.train()

    assert [each.error for each in in_processes(body)] == ["", ""]


def test_a_failure_that_was_caught_does_not_end_the_next_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.training.agreement.Warden", partial(Warden, interval=0.05, grace=0.1))

    def body(rank: int) -> Any:
        first = make(linear(), DataLoader(pairs(16), 4))

        @first.on(Events.ITERATION_COMPLETED(once=2))
        def fail() -> None:
            raise ValueError("planted")

        with pytest.raises((ValueError, PeerFailed)):
            first.train()
        second = make(linear(), DataLoader(pairs(16), 4), max_epochs=3)
        second.on(Events.ITERATION_COMPLETED(once=5))(lambda: time.sleep(0.8))  # longer than it waits
        second.train()
        return second.state.iteration

    for ended in in_processes(body):
        assert (ended.error, ended.value) == ("", 12)
