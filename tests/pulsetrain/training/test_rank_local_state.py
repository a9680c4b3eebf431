"""What each of several processes alone knows is in the checkpoint: its losses so far, and the state of its loader."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils.data import DataLoader, Subset

from pulsetrain import SignalWatch, Trainer
from pulsetrain.engine import ConfigurationError, Events, Every
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.support.cases import slow_but
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make
from tests.support.runs_of_shards import KINDS, saving

KILLED_AT = 11  # after the checkpoint of iteration 9, which lies between two log points and inside the second epoch


def reported(run: Path, rank: int, kind: str, resume: str | None = None, kill: bool = False) -> Any:
    """The losses at log points, and the means of the epochs."""
    made = saving(run, rank, kind, log_every_n_steps=7)
    if kill:
        made.on(Events.ITERATION_COMPLETED(once=KILLED_AT))(lambda: os.kill(os.getpid(), signal.SIGKILL))
    logged: list[float] = []
    made.on(Events.METRICS_LOGGED)(lambda engine, event: logged.append(event.payload.metrics["train/loss"]))
    history = made.train(resume=resume)
    (check,) = (each.resume_check for each in made.handlers if isinstance(each, EventRecorder))
    return logged, history["train/loss"], None if check is None else check.difference


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_run_that_resumes_between_two_log_points_reports_the_same_losses(kind: str, tmp_path: Path):
    in_processes(lambda rank: reported(tmp_path / "run", rank, kind, kill=True))
    resumed = in_processes(lambda rank: reported(tmp_path / "run", rank, kind, resume="latest"))
    whole = in_processes(lambda rank: reported(tmp_path / "whole", rank, kind))
    assert [each.error for each in (*resumed, *whole)] == [""] * 4
    for each, expected in zip(resumed, whole, strict=True):
        logged, means, difference = each.value
        assert (logged, means) == (expected.value[0][1:], expected.value[1]), "bit for bit"
        assert difference is None


@pytest.mark.parametrize(
    ("first", "then"), slow_but([("ddp", "one")], [("ddp", "one"), ("one", "ddp"), ("four", "fsdp")])
)
def test_another_number_of_processes_counts_the_losses_of_all(first: str, then: str, tmp_path: Path):
    in_processes(lambda rank: reported(tmp_path / "run", rank, first, kill=True), KINDS[first].processes)
    resumed = in_processes(lambda rank: reported(tmp_path / "run", rank, then, resume="latest"), KINDS[then].processes)
    whole = in_processes(lambda rank: reported(tmp_path / "whole", rank, then), KINDS[then].processes)
    assert {each.error for each in (*resumed, *whole)} == {""}
    for each, expected in zip(resumed, whole, strict=True):
        assert each.value[0] == pytest.approx(expected.value[0][1:], rel=1e-6), "a mean of float32 numbers"
        assert each.value[1] == pytest.approx(expected.value[1], rel=1e-6)
        assert each.value[2] is None, "losses of other shares are not compared"


class OwnOrder:
    """A loader of one rank, which keeps its order and its position itself; no two ranks have a row in common."""

    def __init__(self, rank: int, seen: list[int]) -> None:
        self.rows, self.seen = [2 * index + rank for index in range(12)], seen
        self.order: list[int] = []
        self.at = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        if not self.at:
            self.order = [self.rows[index] for index in torch.randperm(12).tolist()]
        inputs, targets = pairs(24).tensors
        while self.at < 12:
            rows = self.order[self.at : self.at + 2]
            self.at += 2
            self.seen.extend(rows)
            yield inputs[rows], targets[rows]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = list(state["order"]), state["at"]


def test_each_process_gets_the_state_of_its_own_loader_back(tmp_path: Path):
    def train(rank: int, run: str, resume: str | None = None, kill_at: int = 99) -> Any:
        seen: list[int] = []
        saver = Checkpointer(tmp_path / run, Every(iterations=2))
        made = make(linear(), OwnOrder(rank, seen), saver)
        made.on(Events.ITERATION_COMPLETED(once=kill_at))(lambda: os._exit(0))
        made.train(resume=resume)
        return seen, [each.tolist() for each in made.model.parameters()]

    in_processes(lambda rank: train(rank, "run", kill_at=9))
    resumed = in_processes(lambda rank: train(rank, "run", resume="latest"))
    whole = in_processes(lambda rank: train(rank, "whole"))
    assert [each.error for each in (*resumed, *whole)] == [""] * 4
    for each, expected in zip(resumed, whole, strict=True):
        assert each.value[0] == expected.value[0][16:], "from the checkpoint of iteration 8 on"
        assert each.value[1] == expected.value[1]


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("every", [Every(seconds=0.1, epochs=2), pytest.param("auto", marks=pytest.mark.slow)], ids=str)
def test_processes_whose_clocks_differ_save_together(kind: str, every: Any, tmp_path: Path):
    epochs = 30 if every == "auto" else 12

    def run(rank: int) -> Any:
        made = saving(tmp_path, rank, kind, {"every": every, "metric": None}, max_epochs=epochs, log_every_n_steps=7)
        made.on(Events.ITERATION_STARTED)(lambda: time.sleep(0.01 if rank else 0.012))
        made.train()
        return made.state.iteration

    ended = in_processes(run)
    assert [each.error for each in ended] == ["", ""]
    found = CheckpointManager(tmp_path / "checkpoints").valid()
    steps = {int(each.name[:9]) for each in found}
    assert len(steps) >= 2
    assert any(step % 10 for step in steps), "not at the end of an epoch"
    for each in found:
        assert len(load_checkpoint(each)["ranks"]) == 1
    saved = list(EventLog(tmp_path).read(event="checkpoint_saved"))
    timed = [each for each in saved if each.iteration % 10]
    assert timed
    assert all(each.ord < 0 for each in timed), "observed events, which a repeated run has elsewhere"


@pytest.mark.slow
def test_a_checkpointer_of_one_process_saves_and_the_losses_that_are_missing_are_named(tmp_path: Path):
    def run(rank: int, resume: str | None) -> Any:
        with capture_logs() as logs:
            savers = [Checkpointer(tmp_path, Every(iterations=3))] if rank == 0 or resume else []
            made: Trainer = make(
                linear(), list(zip(*(each.split(2) for each in pairs(24).tensors), strict=True)), *savers
            )
            made.train(resume=resume)
        return [each["event"] for each in logs if "other Checkpointers" in each["event"]]

    first = in_processes(lambda rank: run(rank, None))
    assert [each.error for each in first] == ["", ""]
    assert [len(each.value) for each in first] == [1, 0]
    assert "ranks" not in load_checkpoint(CheckpointManager(tmp_path / "checkpoints").valid()[-1])
    again = in_processes(lambda rank: run(rank, "latest"))
    assert [(each.error, each.value) for each in again] == [("", []), ("", [])]


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_checkpoint_where_a_signal_ends_a_run_has_the_losses_of_all(who: int, tmp_path: Path):
    def run(rank: int) -> Any:
        made = saving(tmp_path, rank, "ddp", {"metric": None}, max_epochs=400, log_every_n_steps=50)
        if rank == who:
            made.on(Events.ITERATION_COMPLETED(once=13))(lambda: os.kill(os.getpid(), signal.SIGTERM))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with SignalWatch(made):
            made.train()
        return made.state.iteration

    first, second = in_processes(run)
    assert (first.error, second.error) == ("", "")
    newest = CheckpointManager(tmp_path / "checkpoints").valid()[-1]
    assert int(newest.name[:9]) == first.value == second.value
    assert len(load_checkpoint(newest)["ranks"]) == 1
    names = [each.name for each in (tmp_path / "checkpoints").iterdir()]
    assert len([name for name in names if name.startswith(newest.name[:9])]) == 1, "one save, in the grace period"


@pytest.mark.slow
def test_each_process_gets_the_order_of_its_own_generator_back(tmp_path: Path):
    def train(rank: int, run: str, resume: str | None = None, kill_at: int = 99) -> Any:
        rows = Subset(pairs(24), list(range(rank, 24, 2)))
        loader = DataLoader(rows, 2, shuffle=True, generator=torch.Generator().manual_seed(100 + rank))
        made = make(linear(), loader, Checkpointer(tmp_path / run, Every(iterations=2)))
        made.on(Events.ITERATION_COMPLETED(once=kill_at))(lambda: os._exit(0))
        made.train(resume=resume)
        return [each.tolist() for each in made.model.parameters()]

    in_processes(lambda rank: train(rank, "run", kill_at=9))
    resumed = in_processes(lambda rank: train(rank, "run", resume="latest"))
    whole = in_processes(lambda rank: train(rank, "whole"))
    assert [each.error for each in (*resumed, *whole)] == [""] * 4
    assert [each.value for each in resumed] == [each.value for each in whole]


def test_a_state_is_what_the_process_gave_that_loads_it():
    def body(rank: int) -> Any:
        made = make(linear(), OwnOrder(rank, []), max_epochs=1, log_every_n_steps=50)
        made.on(Events.ITERATION_COMPLETED(once=4))(lambda: made.terminate(alike=True))
        made.train()
        sums = made.reporter.losses.sums("log")
        made.load_checkpoint_state(made.checkpoint_state())
        return sums, made.reporter.losses.sums("log")

    for each in in_processes(body):
        assert each.error == ""
        assert each.value[0] == each.value[1] != (0.0, 0.0)


@pytest.mark.slow
def test_a_checkpointer_may_be_detached_and_attached_again_in_all_processes(tmp_path: Path):
    def body(rank: int) -> Any:
        saver = Checkpointer(tmp_path, Every(iterations=3), keep_last=20, at_end=False)
        made = make(linear(), DataLoader(pairs(24), 4), saver, max_epochs=3)

        @made.on(Events.ITERATION_COMPLETED(once=4))
        def change() -> None:
            saver.detach()
            if rank == 0:
                saver.attach(made)

        made.train()

    assert [each.error for each in in_processes(body)] == ["", ""]
    found = CheckpointManager(tmp_path / "checkpoints").valid()
    assert [int(each.name[:9]) for each in found] == [3, 6, 9, 12, 15, 18]
    assert ["ranks" in load_checkpoint(each) for each in found] == [True, *[False] * 5]


def test_processes_that_would_save_their_shards_at_other_moments_are_refused(tmp_path: Path):
    def body(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            saving(tmp_path, rank, "fsdp", {"every": Every(iterations=3 + rank)})
        return str(refused.value)

    for each in in_processes(body):
        assert each.error == ""
        assert "rank 1 has other Checkpointers than rank 0" in each.value


def test_a_checkpointer_that_the_main_process_lacks_is_refused(tmp_path: Path):
    def body(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            make(linear(), DataLoader(pairs(24), 4), *([Checkpointer(tmp_path)] if rank else []))
        return str(refused.value)

    for each in in_processes(body):
        assert each.error == ""
        assert "rank 1 has a Checkpointer, and rank 0, which saves for all, has none" in each.value


@pytest.mark.slow
def test_a_save_of_shards_by_one_process_alone_says_that_all_have_to_make_it(tmp_path: Path):
    def body(rank: int) -> None:
        control = join()
        made = saving(tmp_path, rank, "fsdp", log_every_n_steps=50)
        made.on(Events.ITERATION_COMPLETED(once=1))(lambda: setattr(control, "timeout", 2.0))
        if rank == 0:
            made.on(Events.ITERATION_COMPLETED(once=2))(lambda: made.save_checkpoint())
        made.train()

    first, _ = in_processes(body)
    assert "to a save of a sharded model, which all processes have to make together" in first.error


class Failing(OwnOrder):
    def state_dict(self) -> dict[str, Any]:
        if self.at == 8:
            raise OSError("gone")
        return super().state_dict()


def test_a_loader_that_cannot_give_its_state_in_one_process_ends_all(tmp_path: Path):
    def body(rank: int) -> None:
        loader = (Failing if rank else OwnOrder)(rank, [])
        make(linear(), loader, Checkpointer(tmp_path, Every(iterations=2))).train()

    for each in in_processes(body):
        assert "rank 1 could not give its part of a checkpoint, such as its loader's state: OSError: gone" in each.error
