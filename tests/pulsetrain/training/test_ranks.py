"""Several processes that train one model together, wrapped by torch's DistributedDataParallel."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, Events, Every, SupervisedStrategy
from pulsetrain.engine.data import rng
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import Checkpointer, ConsoleLogger, CSVLogger, EventRecorder, JSONLinesLogger, Plots
from tests.support.models import pairs

RANKS = 2


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """This process is rank 1 of 2; the collectives of the other one are faked."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield
    torch.distributed.destroy_process_group()


def shared_loader(rank: int, rows: int, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    data = pairs(rows)
    sampler: Any = DistributedSampler(data, RANKS, rank, **options)
    return DataLoader(data, batch_size, sampler=sampler)


def make(model: nn.Module, loader: Any, *handlers: Any, **config: Any) -> Trainer:
    settings = {"max_epochs": 2, "optimizer": "sgd", "learning_rate": 0.1, "seed": 3, "log_every_n_steps": 1, **config}
    strategy = SupervisedStrategy("mse")
    return Trainer(model, loader, strategy=strategy, config=TrainingConfig(**settings), handlers=list(handlers))


def alone_in_two() -> nn.Module:
    """A wrapped model whose gradients are not averaged, for collectives that are faked."""

    def keep(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and refuses strings
        kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        kept.set_result(bucket.buffer())
        return kept

    model = DistributedDataParallel(linear())
    model.register_comm_hook(None, keep)
    return model


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


# ---------------------------------------------------------------------------------------------- without processes


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_model_of_which_each_process_would_train_its_own_is_refused(rank: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"world_size=2 processes would train a model of its own; wrap"):
        make(linear(), shared_loader(int(rank), 8))
    monkeypatch.setenv("WORLD_SIZE", "1")
    make(linear(), shared_loader(0, 8))


def test_only_the_main_process_saves_logs_and_draws(second_of_two: None, tmp_path: Path, capsys: Any):
    handlers = [
        Checkpointer(tmp_path),
        EventRecorder(tmp_path),
        CSVLogger(tmp_path),
        JSONLinesLogger(tmp_path),
        Plots(tmp_path),
        ConsoleLogger(every=Every(iterations=1)),
        EventRecorder(tmp_path / "own", rank=1),
    ]
    run = make(alone_in_two(), shared_loader(1, 16), *handlers)
    run.train()
    run.save_checkpoint()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "own" not in path.parts] == []
    assert capsys.readouterr().out == ""
    assert EventLog(tmp_path / "own", rank=1).ended


def test_each_rank_draws_its_own_random_numbers(second_of_two: None):
    drawn = {}
    for rank in range(RANKS):
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        run = make(alone_in_two(), shared_loader(rank, 16))
        drawn[rank] = []
        run.add_event_handler(Events.ITERATION_STARTED, lambda rank=rank: drawn[rank].append(torch.rand(()).item()))
        run.train()
    assert len(drawn[0]) == len(drawn[1]) == 4
    assert not set(drawn[0]) & set(drawn[1])


# -------------------------------------------------------------------------------------------------- two processes


def in_two_processes(body: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
                body(rank)
                torch.distributed.destroy_process_group()
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("rows", [15, 16, 17, 19, 24, 34])
def test_two_ranks_learn_what_one_process_learns_from_the_whole_batches(rows: int, accumulate: int, tmp_path: Path):
    def body(rank: int) -> None:
        run = make(DistributedDataParallel(linear()), shared_loader(rank, rows), accumulate=accumulate)
        passes: list[int] = []
        run.add_event_handler(Events.EPOCH_COMPLETED, lambda: passes.append(run.data.passes))
        run.train()
        torch.save((passes, run.state.iteration, list(run.model.module.parameters())), tmp_path / str(rank))

    in_two_processes(body)
    # the same global batches, in one process
    orders = []
    for number in (1, 2):
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(rng.derive(3, number)))
        orders.append(list(order.split(4 * RANKS)))
    data, model = pairs(rows), linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    waiting: list[torch.Tensor] = []
    for batch in [each for order in orders for each in order]:
        waiting.append(batch)
        if len(waiting) == accumulate:
            inputs, targets = data[torch.cat(waiting)]
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            waiting.clear()
    for rank in range(RANKS):
        passes, iterations, weights = torch.load(tmp_path / str(rank), weights_only=False)
        assert passes == [1, 2]
        assert iterations == 2 * len(orders[0])
        for mine, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)


@pytest.mark.slow
def test_two_ranks_share_one_run_folder_and_one_seed(tmp_path: Path):
    def body(rank: int) -> None:
        handlers = [Checkpointer(tmp_path), EventRecorder(tmp_path), CSVLogger(tmp_path), JSONLinesLogger(tmp_path)]
        run = make(DistributedDataParallel(linear()), shared_loader(rank, 17), *handlers, seed=None)
        run.train()
        torch.save(run.seed, tmp_path / f"seed-{rank}")

    in_two_processes(body)
    assert torch.load(tmp_path / "seed-0") == torch.load(tmp_path / "seed-1")
    log = EventLog(tmp_path)
    assert not log.damage
    assert [event.iteration for event in log.read(event="iteration_completed")] == [1, 2, 3, 4, 5, 6]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 6
