"""Several processes that train one model together, wrapped by torch's DistributedDataParallel."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    random_split,
)

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


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """This process is rank 0 of 2; the collectives of the other one are faked."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
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


def sharded_by_modules(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model


def sharded_by_a_wrapper(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def sharded_by_tensors(model: nn.Module) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), ColwiseParallel())


def sharded_in_part(model: nn.Module) -> nn.Module:
    return nn.Sequential(DistributedDataParallel(model), sharded_by_modules(nn.Linear(1, 1)))


@pytest.mark.filterwarnings("ignore")  # torch's, of FSDP on a CPU
@pytest.mark.parametrize("learns", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("shard", [sharded_by_modules, sharded_by_a_wrapper, sharded_by_tensors, sharded_in_part])
def test_a_model_of_which_a_rank_would_save_its_shard_alone_is_refused(shard: Any, learns: bool, first_of_two: None):
    model = shard(linear()).requires_grad_(learns)
    rule = r"sharded models are not supported yet: rank 0 of world_size=2 .*; wrap the model in torch.*Parallel, or"
    with pytest.raises(ConfigurationError, match=rule):
        make(model, shared_loader(0, 8))
    with pytest.raises(ConfigurationError, match=rule):
        make({"own": DistributedDataParallel(linear()), "sharded": model}, shared_loader(0, 8))  # type: ignore[arg-type]


class OwnSampler(Sampler[int]):
    """A user's sampler, or batch sampler, which may share the samples out."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)


class OwnLoader(DataLoader[Any]):
    """A user's loader, which may share the samples out."""


class Stream(IterableDataset[Any]):
    """A user's stream, which may read its rank's files alone."""

    def __iter__(self) -> Iterator[Any]:
        return iter(pairs(8))


DATA = pairs(16)
SAME_ON_ALL = {
    "in_order": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "shuffled_by_a_generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator()),
    "drawn_with_replacement": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 16, 16)),
    "batch_sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
    "without_batches": lambda: DataLoader(DATA, batch_size=None),
    "training_split": lambda: DataLoader(random_split(DATA, [12, 4])[0], 4, shuffle=True),
}
PERHAPS_OWN = {
    "distributed_sampler": lambda: shared_loader(0, 16),
    "batches_of_a_distributed_sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, RANKS, 0), 4, False)
    ),
    "own_sampler": lambda: DataLoader(DATA, 4, sampler=OwnSampler(0, 2, 4, 6)),
    "own_batch_sampler": lambda: DataLoader(DATA, batch_sampler=OwnSampler([0, 2], [4, 6])),
    "draws_of_its_own": lambda: DataLoader(
        DATA, 4, sampler=RandomSampler(DATA, replacement=True, generator=torch.Generator().manual_seed(0))
    ),
    "own_loader": lambda: OwnLoader(DATA, 4),
    "stream": lambda: DataLoader(Stream(), 4),
    "part_of_the_rank": lambda: DataLoader(Subset(DATA, range(0, 16, RANKS)), 4, shuffle=True),
    "part_of_a_split": lambda: DataLoader(Subset(random_split(DATA, [13, 3])[0], range(0, 13, RANKS)), 4),
    "list": lambda: [DATA[:4], DATA[4:8]],
}


def warnings_of_data(loader: Any) -> list[Any]:
    with structlog.testing.capture_logs() as logs:
        make(alone_in_two(), loader).train()
    return [line for line in logs if "same batches" in line["event"]]


@pytest.mark.parametrize("kind", SAME_ON_ALL)
def test_ranks_that_train_on_the_same_batches_are_warned_of_once(kind: str, first_of_two: None):
    loader = SAME_ON_ALL[kind]()
    (line,) = warnings_of_data(loader)
    assert "sampler=torch.utils.data.DistributedSampler(" in line["event"]
    assert (line["log_level"], line["loader"], line["processes"]) == ("warning", "DataLoader", RANKS)


@pytest.mark.parametrize("kind", PERHAPS_OWN)
def test_data_that_may_differ_by_rank_is_not_warned_of(kind: str, first_of_two: None):
    assert warnings_of_data(PERHAPS_OWN[kind]()) == []


@pytest.mark.parametrize("kind", SAME_ON_ALL)
def test_the_same_batches_are_not_warned_of_on_other_ranks_or_in_one_process(kind: str, second_of_two: None):
    assert warnings_of_data(SAME_ON_ALL[kind]()) == []
    torch.distributed.destroy_process_group()
    with structlog.testing.capture_logs() as logs:
        make(linear(), SAME_ON_ALL[kind]()).train()
    assert logs == []
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)  # for the fixture


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


@pytest.mark.parametrize("epochs", [1, 2], ids=["at_its_end", "with_batches_left"])
def test_a_rank_whose_generators_no_checkpoint_holds_says_so_and_draws_its_own_numbers(epochs: int, tmp_path: Path):
    drawn: dict[int, list[float]] = {}
    for rank in range(RANKS):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        if rank == 0:
            make(alone_in_two(), shared_loader(0, 16), Checkpointer(tmp_path), max_epochs=1).train()
        run = make(alone_in_two(), shared_loader(rank, 16), max_epochs=epochs)
        drawn[rank] = []
        ends = Events.ITERATION_COMPLETED | Events.COMPLETED
        run.add_event_handler(ends, lambda rank=rank: drawn[rank].append(torch.rand(()).item()))
        with structlog.testing.capture_logs() as logs:
            run.train(resume=tmp_path)
        torch.distributed.destroy_process_group()
        said = [line for line in logs if "random generators of rank 0 alone" in line["event"]]
        assert [(line["log_level"], line["rank"]) for line in said] == ([("warning", rank)] if rank else [])
    assert len(drawn[0]) == len(drawn[1]) == 1 + 2 * (epochs - 1)
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
