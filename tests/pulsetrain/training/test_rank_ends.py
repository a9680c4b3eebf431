"""What one process asks for, a signal or a limit, ends all of them at the same iteration."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from pulsetrain import SignalWatch
from pulsetrain.engine import Events
from pulsetrain.engine.distributed.failures import Warden
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EarlyStopping, StepLimit
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import double, dropping, in_one_process, linear, make


def test_what_one_rank_asks_for_ends_all_at_the_same_log_point(tmp_path: Path):
    def body(rank: int) -> Any:
        found = []
        for who in (0, 1):
            made = dropping(tmp_path / f"run-{who}", log_every_n_steps=3)
            if rank == who:
                made.on(Events.ITERATION_COMPLETED(once=4))(lambda made=made: made.terminate(reason="enough"))
            made.train()
            found.append((made.state.iteration, made.state.stop_reason))
        return found

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    # the epoch of five iterations ends before the next log point
    assert first.value == [(5, "enough"), (5, "rank 1: enough")]
    assert second.value == [(5, "rank 0: enough"), (5, "enough")]


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_ends_all_with_its_status_and_a_checkpoint(who: int, tmp_path: Path):
    def body(rank: int) -> None:
        made = dropping(tmp_path / "run", max_epochs=400)
        if rank == who:
            made.on(Events.ITERATION_COMPLETED(once=7))(lambda: os.kill(os.getpid(), signal.SIGTERM))
        with SignalWatch(made) as watch:
            made.train()
        assert made.state.iteration < 100
        sys.exit(watch.status)

    ended = in_processes(body)
    assert [(each.status, each.error) for each in ended] == [(143, "")] * 2
    assert EventLog(tmp_path / "run").ended
    last = max(int(each.name[:9]) for each in (tmp_path / "run" / "checkpoints").iterdir() if each.name[:9].isdigit())
    assert last >= 7


def test_a_signal_does_not_wait_for_a_log_point():
    def body(rank: int) -> Any:
        made = make(linear(), DataLoader(pairs(16), 4), max_epochs=10_000, log_every_n_steps=100_000)
        made.on(Events.ITERATION_STARTED)(lambda: time.sleep(0.01))
        if rank == 1:
            made.on(Events.ITERATION_COMPLETED(once=2))(lambda: os.kill(os.getpid(), signal.SIGTERM))
        started = time.monotonic()
        with SignalWatch(made) as watch:
            made.train()
        return made.state.iteration, watch.status, time.monotonic() - started < 15

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    assert first.value[1:] == (143, True)


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ctrl_c_in_one_process_of_a_plain_script_is_one_in_all(who: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.training.agreement.Warden", partial(Warden, interval=0.05, grace=0.2))

    def body(rank: int) -> None:
        made = make(linear(), DataLoader(pairs(16), 4), max_epochs=1000)
        if rank == who:
            made.on(Events.ITERATION_COMPLETED(once=7))(lambda: os.kill(os.getpid(), signal.SIGINT))
        if rank == 0:
            made.on(Events.COMPLETED)(lambda: time.sleep(0.8))  # a long last save
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            made.train()
        time.sleep(0.4)

    assert [(each.status, each.error) for each in in_processes(body)] == [(0, "")] * 2


def test_limits_and_early_stopping_end_all_ranks_where_one_process_would_end(tmp_path: Path):
    def body(rank: int) -> Any:
        ended = []
        for handler in (StepLimit(7), EarlyStopping("val/loss", patience=1, mode="max")):
            folder = tmp_path / f"{type(handler).__name__} {os.environ.get('WORLD_SIZE')}"
            val = DataLoader(double(9), 4)
            made = dropping(folder, handler, val_loader=val, log_every_n_steps=50, max_epochs=9)
            made.train()
            ended.append((made.state.iteration, made.state.stop_reason))
        return ended

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value == in_one_process(body, forked=True).value
