"""What a SignalWatch does in a run, and what signals do to a loader's workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

from pulsetrain import SignalWatch
from pulsetrain.engine import Events
from pulsetrain.engine.data.workers import workers_outlive_signals
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.payloads import Preempted
from tests.support.models import loader, trainer

NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")


def send(name: str) -> None:
    signal.raise_signal(signal.Signals[name])


class TestSignalWatch:
    def test_it_restores_the_signal_handlers(self):
        before = [signal.getsignal(signal.Signals[name]) for name in NAMES]
        run = trainer({"max_epochs": 1})
        with SignalWatch(run) as watch:
            assert before[1] != signal.getsignal(signal.SIGTERM)
        assert [signal.getsignal(signal.Signals[name]) for name in NAMES] == before
        assert not run.has_event_handler(watch._obey)

    def test_a_signal_long_after_it_was_left_has_its_usual_effect(self):
        fork = multiprocessing.get_context("fork")

        def work() -> None:
            now = [100.0]
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with SignalWatch(trainer({"max_epochs": 1}), clock=lambda: now[0]):
                send("SIGTERM")
            now[0] += 1.9
            send("SIGTERM")
            now[0] += 0.1
            send("SIGTERM")
            raise AssertionError("still here")

        child = fork.Process(target=work)
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM

    def test_it_can_only_be_entered_in_the_main_thread(self):
        raised: list[BaseException] = []

        def enter() -> None:
            try:
                SignalWatch(trainer({"max_epochs": 1})).__enter__()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=enter, name="mine")
        thread.start()
        thread.join()
        assert isinstance(raised[0], ConfigurationError)
        assert "the thread 'mine'" in str(raised[0])

    def test_a_signal_between_two_runs_ends_the_next(self):
        run = trainer({"max_epochs": 1})
        with SignalWatch(run) as watch:
            send("SIGUSR1")
            run.train()
        assert (watch.status, run.state.stop_reason, run.state.iteration) == (138, "SIGUSR1 was received", 0)

    def test_a_preemption_that_no_signal_made_has_no_status(self):
        run = trainer({"max_epochs": 1})
        run.post(Events.PREEMPTED, Preempted(signal="SIGTERM"))
        with SignalWatch(run) as watch:
            run.train()
        assert (watch.status, run.state.stop_reason) == (0, "SIGTERM was received")

    def test_a_forked_child_is_ended_by_sigterm_as_usual(self):
        fork = multiprocessing.get_context("fork")
        begun = fork.Event()

        def hang() -> None:
            begun.set()
            time.sleep(600)

        with SignalWatch(trainer({"max_epochs": 1})):
            child = fork.Process(target=hang, daemon=True)
            child.start()
            assert begun.wait(60)
            child.terminate()
            child.join(60)
        assert child.exitcode == -signal.SIGTERM


class TestWorkers:
    def test_workers_are_left_alone_where_the_process_handles_no_signal(self):
        before = [signal.signal(signal.Signals[name], signal.SIG_DFL) for name in NAMES]
        try:
            data = loader(num_workers=1)
            with workers_outlive_signals(data) as numbers:
                assert data.worker_init_fn is None
            assert numbers == ()
        finally:
            for name, handler in zip(NAMES, before, strict=True):
                signal.signal(signal.Signals[name], handler)

    def test_a_loader_is_restored_afterwards(self):
        own: list[int] = []
        data = loader(num_workers=1, worker_init_fn=own.append)
        with SignalWatch(), workers_outlive_signals(data) as numbers:
            assert set(numbers) == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
            assert data.worker_init_fn != own.append
            with workers_outlive_signals(data):
                again = data.worker_init_fn
            assert again.inner == own.append
        assert data.worker_init_fn == own.append

    def test_workers_outlive_what_slurm_sends_to_all_processes_of_a_step(self, monkeypatch):
        monkeypatch.setenv("SLURM_JOB_ID", "4711")
        with SignalWatch(), workers_outlive_signals(loader(num_workers=1)) as numbers:
            assert set(numbers) == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}

    def test_the_users_own_function_is_called_in_each_worker(self, tmp_path):
        data = loader(num_workers=2, worker_init_fn=lambda worker: (tmp_path / str(worker)).touch())
        with SignalWatch() as watch:
            run = trainer({"max_epochs": 1}, train_loader=data)
            watch.follow(run)
            run.train()
        assert sorted(os.listdir(tmp_path)) == ["0", "1"]
