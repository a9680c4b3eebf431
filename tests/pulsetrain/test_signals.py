"""Signals: to a run of a script, to all its processes, and a second time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain import SignalWatch, Trainer
from pulsetrain.engine import Events, Every
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.handlers import Checkpointer
from tests.support.cases import slow_but
from tests.support.models import loader, trainer
from tests.support.programs import Program

NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")
IN_EVERY_RUN = [
    Events.STARTED, Events.EPOCH_STARTED, Events.GET_BATCH_STARTED, Events.ITERATION_STARTED,
    Events.OPTIMIZER_STEP_COMPLETED, Events.ITERATION_COMPLETED, Events.CHECKPOINT_SAVED, Events.EPOCH_COMPLETED,
    Events.VALIDATION_STARTED, Events.VALIDATION_COMPLETED, Events.COMPLETED,
]  # fmt: skip
SCRIPT = """
    import os, sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
    from pulsetrain.engine import Events, Every, SupervisedStrategy
    from pulsetrain.handlers import Checkpointer
    from pulsetrain import SignalWatch, Trainer, TrainingConfig

    class Rows(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(4), torch.ones(1)

    class Stuck(Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            if index >= 8:
                print("stuck", flush=True)
                time.sleep(600)
            return torch.ones(4), torch.ones(1)

    def pairs(**options):
        data = TensorDataset(torch.ones(400, 4), torch.ones(400, 1))
        return DataLoader(data, batch_size=4, **{"num_workers": 2, **options})

    if __name__ == "__main__":
        kind = sys.argv[1]
        train_loader = {
            "late-validation": lambda: [(torch.ones(4, 4), torch.ones(4, 1))] * 8,
            "late-stream": lambda: DataLoader(Rows(), batch_size=4, num_workers=2),
            "persistent": lambda: pairs(persistent_workers=True),
            "spawn": lambda: pairs(multiprocessing_context="spawn", num_workers=1),
            "stream": lambda: DataLoader(Rows(), batch_size=4, num_workers=2),
            "stuck": lambda: DataLoader(Stuck(), batch_size=4, num_workers=2),
        }.get(kind, pairs)()
        bound = {"max_epochs": 1} if kind == "short" else {"max_updates": 10**9}
        validates = {"validate_every": Every(updates=1)} if kind.endswith("validation") else {}
        trainer = Trainer(
            nn.Linear(4, 1),
            train_loader,
            pairs() if validates else None,
            strategy=SupervisedStrategy("mse"),
            config=TrainingConfig(**bound, **validates, optimizer="sgd", learning_rate=1e-3, seed=0),
            handlers=[Checkpointer("run")],
        )

        @(trainer.evaluator if validates else trainer).on(Events.ITERATION_COMPLETED)
        def announce_batch():
            print("batch", flush=True)

        if kind.startswith("late"):  # the signal finds workers that are not ready yet
            announce = lambda: print("forked", flush=True)
            os.register_at_fork(after_in_child=lambda: time.sleep(1), after_in_parent=announce)

        with SignalWatch(trainer) as watch:
            trainer.train(resume="latest")
        print("stopped:", trainer.state.stop_reason, flush=True)
        sys.exit(watch.status)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    """Starts the script as the leader of its own process group."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    begun: list[Program] = []

    def begin(kind: str) -> Program:
        paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]  # for workers that are started from nothing
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        begun.append(Program("script.py", kind, cwd=tmp_path, env=environment))
        return begun[-1]

    yield begin
    for process in begun:
        process.close()


def wait_for(process: Any, text: str) -> None:
    """Read until a line starts with this; the output ends when the process ends."""
    stream: Any = process.stderr if text.startswith("SIG") else process.stdout
    while not (line := stream.readline()).startswith(text):
        assert line, f"it ended before it said {text!r}: {process.communicate()}"


def send(name: str) -> None:
    signal.raise_signal(signal.Signals[name])


@pytest.mark.slow
class TestAScript:
    @pytest.mark.parametrize("name", NAMES)
    def test_a_script_ends_with_a_checkpoint_and_the_signals_status_and_resumes(self, name, start, tmp_path):
        process = start("plain")
        wait_for(process, "batch")
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.Signals[name], err
        assert f"stopped: {name} was received" in out
        saved = CheckpointManager(tmp_path / "run" / "checkpoints").get_latest()
        assert saved is not None
        trained = out.count("batch") + 1  # the one waited for
        assert int(saved.name.partition("-")[0]) == trained

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
    def test_a_signal_that_is_sent_again_and_again_changes_nothing(self, name, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        # from nothing: Python restores the default handlers before the process has ended
        command = [sys.executable, str(script), "plain"]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
        wait_for(process, "batch")
        end = time.monotonic() + 0.5
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.Signals[name])
            time.sleep(0.001)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.Signals[name], err
        assert f"stopped: {name} was received" in out

    def test_a_run_that_completes_exits_with_0(self, start):
        process = start("short")
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "stopped: None" in out


@pytest.mark.slow
class TestAllProcesses:
    """Sends the signal as systemd, scancel and a terminal do."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("SIGTERM", "plain"),
            ("SIGINT", "plain"),
            ("SIGUSR1", "plain"),
            ("SIGTERM", "persistent"),
            ("SIGTERM", "spawn"),
            ("SIGTERM", "stream"),
            ("SIGTERM", "validation"),
        ],
    )
    def test_a_run_with_workers_ends_with_a_checkpoint(self, name, kind, start, tmp_path):
        process = start(kind)
        wait_for(process, "batch")
        os.killpg(process.pid, signal.Signals[name])
        out, err = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.Signals[name], err
        assert f"stopped: {name} was received" in out
        assert "Traceback" not in err
        assert CheckpointManager(tmp_path / "run" / "checkpoints").get_latest() is not None

    @pytest.mark.parametrize("kind", ["late", "late-stream", "late-validation"])
    def test_a_signal_before_workers_are_ready_lets_them_work(self, kind, start, tmp_path):
        process = start(kind)
        wait_for(process, "forked")
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM, err
        assert CheckpointManager(tmp_path / "run" / "checkpoints").get_latest() is not None

    def test_workers_that_hang_end_with_a_run_that_is_ended_at_once(self, start):
        process = start("stuck")
        wait_for(process, "stuck")
        os.killpg(process.pid, signal.SIGTERM)
        wait_for(process, "SIGTERM: stopping")
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)  # the workers share the pipes: they have ended
        assert "\nKeyboardInterrupt" in err.rpartition("Traceback")[2], err  # where it was in a handler, a note follows
        # 1 if something evaluates a string at exit: Python 3.11 then loses the reason for the exit
        assert process.returncode in (-signal.SIGINT, 1)

    def test_workers_left_at_the_end_of_a_process_do_not_delay_its_exit(self, start):
        process = start("persistent")
        wait_for(process, "batch")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM


class TestOnceMore:
    @pytest.mark.parametrize("first", NAMES)
    def test_an_interrupt_after_any_signal_ends_the_run_at_once(self, first):
        with SignalWatch(trainer({"max_epochs": 1})) as watch:
            send(first)
            with pytest.raises(KeyboardInterrupt):
                send("SIGINT")
        assert watch.status == 130

    def test_a_second_sigterm_does_too_unless_a_launcher_may_have_forwarded_it(self):
        now = [100.0]
        with SignalWatch(trainer({"max_epochs": 1}), clock=lambda: now[0]) as watch:
            send("SIGTERM")
            now[0] += 1.9
            send("SIGTERM")
            assert watch.status == 0
            now[0] += 0.1
            with pytest.raises(SystemExit) as ended:
                send("SIGTERM")
        assert ended.value.code == watch.status == 143

    def test_a_sigterm_some_time_after_an_interrupt_ends_the_run_at_once(self):
        now = [100.0]
        with SignalWatch(trainer({"max_epochs": 1}), clock=lambda: now[0]) as watch:
            send("SIGINT")
            now[0] += 1.9
            send("SIGTERM")  # of a launcher that was interrupted, too
            assert watch.status == 0
            now[0] += 0.1
            with pytest.raises(SystemExit):
                send("SIGTERM")
        assert watch.status == 143

    @pytest.mark.parametrize(
        ("first", "said"),
        [
            ("SIGINT", "another Ctrl-C stops at once, and so does SIGTERM after 2 s"),
            ("SIGTERM", "Ctrl-C stops at once, and so does SIGTERM after 2 s"),
            ("SIGUSR1", "Ctrl-C stops at once, and so does a second SIGTERM"),
        ],
    )
    def test_the_message_says_which_signals_do(self, first: str, said: str, capfd: pytest.CaptureFixture[str]):
        with SignalWatch(trainer({"max_epochs": 1})):
            send(first)
        assert f"{first}: stopping at the next safe point; {said}\n" in capfd.readouterr().err

    def test_a_sigterm_after_its_warning_signal_counts_as_the_first(self):
        now = [100.0]
        with SignalWatch(trainer({"max_epochs": 1}), clock=lambda: now[0]) as watch:
            send("SIGUSR1")
            now[0] += 60
            send("SIGTERM")
            send("SIGUSR1")
            assert watch.received == signal.SIGUSR1
            now[0] += 2
            with pytest.raises(SystemExit):
                send("SIGTERM")

    def test_in_the_middle_of_a_step_the_run_raises_it(self):
        now = [0.0]
        run = trainer({"max_epochs": 1})

        @run.on(Events.ITERATION_STARTED(once=3))
        def twice():
            send("SIGTERM")
            now[0] = 3.0
            send("SIGTERM")

        with SignalWatch(run, clock=lambda: now[0]) as watch, pytest.raises(SystemExit):
            run.train()
        assert watch.status == 143
        assert run.state.iteration == 3


class TestWithoutAWatch:
    """Ctrl-C in a script that only calls `train()`."""

    @pytest.fixture(autouse=True)
    def in_the_foreground(self) -> Iterator[None]:
        """A shell starts what it runs in the background with SIGINT ignored, and Python leaves that as it is."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    def run(self, folder: Path, at: Events, count: int) -> Trainer:
        run = trainer({"max_epochs": 3}, handlers=[Checkpointer(folder, every=Every(epochs=10))])
        run.add_event_handler(at(once=count), lambda: send("SIGINT"))
        return run

    @pytest.mark.parametrize(
        ("at", "count", "left", "trained"),
        [
            (Events.ITERATION_COMPLETED, 14, 14, 14),
            (Events.ITERATION_STARTED, 14, 14, 13),
            (Events.EPOCH_STARTED, 2, 10, 10),
        ],
    )
    def test_it_leaves_the_last_checkpoint_and_raises(
        self, at: Events, count: int, left: int, trained: int, tmp_path: Path
    ):
        run = self.run(tmp_path, at, count)
        with pytest.raises(KeyboardInterrupt):
            run.train()
        assert (run.state.iteration, run.state.stop_reason) == (left, "SIGINT was received")
        assert [step_of(path) for path in CheckpointManager(tmp_path / "checkpoints").valid()] == [trained]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

        again = trainer({"max_epochs": 3}, handlers=[Checkpointer(tmp_path)])
        again.train(resume="latest")
        whole = trainer({"max_epochs": 3})
        whole.train()
        assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))

    def test_a_second_one_raises_at_once(self, tmp_path: Path):
        run = self.run(tmp_path, Events.ITERATION_STARTED, 14)
        run.add_event_handler(Events.ITERATION_STARTED(once=14), lambda: send("SIGINT"))
        with pytest.raises(KeyboardInterrupt):
            run.train()
        assert run.state.stop_reason != "SIGINT was received"
        assert list(CheckpointManager(tmp_path / "checkpoints").valid()) == []

    @pytest.mark.parametrize("times", [1, 2])
    @pytest.mark.parametrize(
        "at", slow_but((Events.ITERATION_COMPLETED, Events.COMPLETED), IN_EVERY_RUN), ids=lambda event: event.name
    )
    def test_whenever_it_comes_it_raises_and_leaves_the_next_run_alone(self, at: Events, times: int, tmp_path: Path):
        def make(*handlers: object) -> Trainer:
            return trainer({"max_epochs": 2}, val_loader=loader(8, shuffle=False), handlers=handlers)

        run, seen = make(Checkpointer(tmp_path, every=Every(iterations=1))), []

        def interrupt() -> None:
            seen.append(run.state.iteration)
            if len(seen) == most:
                for _ in range(times):
                    send("SIGINT")

        most = 1 if at in (Events.STARTED, Events.COMPLETED) else 2 if "EPOCH" in at.name or "VALID" in at.name else 3
        run.add_event_handler(at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.train()
        assert len(seen) >= most  # else the event was not fired, and nothing is tested
        history = run.train(resume="latest" if run.state.iteration else None)
        assert (run.state.iteration, run.state.stop_reason) == (20, None)
        assert history == make().train()

    def test_a_handler_of_the_program_stays_in_place(self, tmp_path: Path):
        found: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, frame: found.append(number))
        try:
            self.run(tmp_path, Events.ITERATION_STARTED, 14).train()
        finally:
            signal.signal(signal.SIGINT, before)
        assert found == [signal.SIGINT]
