"""Several processes that train one model together, each on its share of the global batches."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import torchmetrics
from ignite.metrics import EpochMetric, MeanAbsoluteError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from pulsetrain import Loop, SignalWatch, Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, Events, Every, SupervisedStrategy, TorchBackend
from pulsetrain.engine.distributed.failures import Warden
from pulsetrain.engine.distributed.ranks import check_shared, gives_all_ranks_the_same
from pulsetrain.engine.errors import PeerFailed
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.handlers import (
    Checkpointer,
    ConsoleLogger,
    CSVLogger,
    EarlyStopping,
    EventRecorder,
    JSONLinesLogger,
    LossSpikeGuard,
    LRFinder,
    NaNGuard,
    Plots,
    StepLimit,
)
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make

RANKS = 2
ROWS = (15, 16, 17, 19, 24, 34)


def shared_loader(rank: int, rows: int, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    data = pairs(rows)
    sampler: Any = DistributedSampler(data, RANKS, rank, **options)
    return DataLoader(data, batch_size, sampler=sampler)


def double(rows: int) -> TensorDataset:
    return TensorDataset(*(each.double() for each in pairs(rows).tensors))


def in_one_process(body: Any, *, forked: bool = False) -> Any:
    """What the body gives alone; in a process of its own if it ends that."""
    if not forked:
        return body(0)

    def alone(rank: int) -> Any:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        return body(rank)

    return in_processes(alone, 1)[0]


# ------------------------------------------------------------------------------------------ models that are refused


def sharded_by_modules(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model


def sharded_by_a_wrapper(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def sharded_by_tensors(model: nn.Module) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), ColwiseParallel())


def sharded_in_part(model: nn.Module) -> nn.Module:
    return nn.Sequential(DistributedDataParallel(model), sharded_by_modules(nn.Linear(1, 1)))


@pytest.mark.parametrize("shard", [sharded_by_modules, sharded_by_a_wrapper, sharded_by_tensors, sharded_in_part])
def test_a_model_of_which_a_rank_would_save_its_shard_alone_is_refused(shard: Any):
    def body(rank: int) -> list[str]:
        said = []
        for learns in (True, False):
            model = shard(linear()).requires_grad_(learns)
            wrapped = {"own": DistributedDataParallel(linear()), "sharded": model}
            for given in (wrapped,) if shard is sharded_by_modules else (model, wrapped):
                with pytest.raises(ConfigurationError) as refused:
                    make(given, shared_loader(rank, 8))
                said.append(str(refused.value))
        return said

    rule = r"one that is sharded, other than as a whole by fully_shard, is not supported: rank 0 of world_size=2 would"
    for ended in in_processes(body, own_group=True):
        assert ended.error == ""
        assert len(ended.value) >= 2
        assert all(re.search(rule, text) for text in ended.value), ended.value


def test_what_cannot_be_wrapped_here_has_to_be_wrapped_by_the_user():
    """Modules that a strategy calls by itself, a loop's body, and a backend that computes with values."""

    def body(rank: int) -> list[str]:
        said = []
        for attempt in (
            lambda: make({"a": linear(), "b": linear()}, shared_loader(rank, 8)),  # type: ignore[arg-type]
            lambda: Loop(linear(), shared_loader(rank, 8), optimizer="sgd"),
            lambda: Trainer(linear(), shared_loader(rank, 8), backend=TorchBackend("cpu", functional=True)),
        ):
            with pytest.raises(ConfigurationError) as refused:
                attempt()
            said.append(str(refused.value))
        return said

    for ended in in_processes(body, own_group=True):
        assert ended.error == ""
        assert all("of world_size=2 processes would train a model of its own; wrap" in text for text in ended.value)
        assert len(ended.value) == 3


def test_a_model_of_another_library_is_refused_without_the_advice_to_wrap_it():
    def body(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            check_shared("Trainer", (lambda weights, inputs: inputs, {"kernel": 1.0}))
        return str(refused.value)

    for ended in in_processes(body):
        assert ended.error == ""
        assert ended.value == (
            "Trainer(model=tuple): each of world_size=2 processes would train a copy of its own, since their gradients "
            "are averaged for torch modules only; start one process"
        )


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


@pytest.mark.parametrize("kind", SAME_ON_ALL)
def test_batches_that_are_the_same_in_every_process_are_global_ones(kind: str):
    assert gives_all_ranks_the_same(SAME_ON_ALL[kind](), RANKS)


@pytest.mark.parametrize("kind", PERHAPS_OWN)
def test_data_that_may_differ_by_rank_is_a_ranks_own(kind: str):
    assert not gives_all_ranks_the_same(PERHAPS_OWN[kind](), RANKS)


# ------------------------------------------------------------------------------------------ the same as one process


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("wrapped", ["plain", "a sampler by rank", "wrapped by the user"])
def test_two_ranks_learn_what_one_process_learns_from_the_whole_batches(wrapped: str, accumulate: int):
    """Every sample counts once, for any number of them, also in validation."""

    def train(rows: int, rank: int | None) -> Any:
        model, val = linear().double(), DataLoader(double(rows + 3), 4)
        if wrapped == "a sampler by rank" and rank is not None:
            sampler = DistributedSampler(double(rows), RANKS, rank)
            loader = DataLoader(double(rows), 4, sampler=sampler)
        else:
            loader = DataLoader(double(rows), 8, shuffle=True)
        given = DistributedDataParallel(model) if wrapped == "wrapped by the user" and rank is not None else model
        made = make(given, loader, val_loader=val, accumulate=accumulate, clip_grad_norm=1.0)
        history = made.train()
        del history["learning_rate"]
        counted = made.state.iteration, made.state.update, made.state.samples, made.data.passes
        return counted, history, [each.tolist() for each in model.parameters()], made.state.metrics

    def body(rank: int) -> Any:
        return [train(rows, rank) for rows in ROWS]

    first, second = in_processes(body, own_group=wrapped == "wrapped by the user")
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value, "the ranks have diverged"
    for rows, (counted, history, weights, metrics) in zip(ROWS, first.value, strict=True):
        expected = train(rows, None)
        assert counted == expected[0], rows
        assert history.keys() == expected[1].keys()
        for name, values in history.items():
            # the mean loss is one of float32 numbers
            precision = 1e-6 if name == "train/loss" else 1e-12
            assert values == pytest.approx(expected[1][name], rel=precision), (rows, name)
        for mine, theirs in zip(weights, expected[2], strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)
        assert metrics == pytest.approx(expected[3], rel=1e-12)


def test_losses_that_count_tokens_are_weighed_by_them():
    """Ranks with other numbers of labels in their shares, one of them none at all."""

    def train(_: int | None) -> Any:
        torch.manual_seed(0)
        inputs, labels = torch.randn(24, 4, dtype=torch.float64), torch.randint(0, 3, (24,))
        labels[torch.arange(24) % 5 < 2] = -100
        labels[[1, 3]] = -100  # the whole share of rank 1 in a batch of 4 in order
        model = nn.Linear(4, 3).double()
        loader = DataLoader(TensorDataset(inputs, labels), 4)
        strategy = SupervisedStrategy("cross_entropy", {"ignore_index": -100})
        config = TrainingConfig(max_epochs=2, optimizer="sgd", learning_rate=0.1, seed=3, log_every_n_steps=1)
        logged: list[float] = []
        made = Trainer(model, loader, strategy=strategy, config=config)
        made.on(Events.METRICS_LOGGED)(lambda engine, event: logged.append(event.payload.metrics["train/loss"]))
        made.train()
        return logged, [each.tolist() for each in model.parameters()]

    first, second = in_processes(train)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    logged, weights = train(None)
    assert first.value[0] == pytest.approx(logged, rel=1e-6), "a mean of float32 numbers"
    assert all(math.isfinite(loss) for loss in logged)
    for mine, theirs in zip(first.value[1], weights, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)


def test_parameters_that_a_handler_unfreezes_are_averaged_from_then_on():
    def body(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        made = make(model, DataLoader(double(16), 4))
        model[0].requires_grad_(False)
        made.on(Events.ITERATION_COMPLETED(once=3))(lambda: model[0].requires_grad_(True) and None)
        made.train()
        return [each.tolist() for each in model.parameters()]

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    for mine, theirs in zip(first.value, in_one_process(body), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (
            lambda: DataLoader(double(12), 3),
            r"DataLoader\(batch_size=3\): is the global batch, which world_size=2 .* mult",
        ),
        (lambda: DataLoader(double(12), batch_size=None), "the dataset makes the batches itself, so world_size=2"),
    ],
    ids=["odd", "without batches"],
)
def test_a_batch_that_cannot_be_shared_out_is_refused(loader: Any, said: str):
    def body(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            make(linear().double(), loader())
        return str(refused.value)

    for ended in in_processes(body):
        assert ended.error == ""
        assert re.search(said, ended.value), ended.value


# --------------------------------------------------------------------------------------------- stopping, and resuming


def dropping(folder: Path, *handlers: Any, **config: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1)).double()
    saving = Checkpointer(folder, Every(iterations=2), keep_last=20)
    recorder = EventRecorder(folder)
    return make(
        model, DataLoader(double(17), 4, shuffle=True), saving, recorder, *handlers, **{"max_epochs": 3, **config}
    )


def weights_of(made: Trainer) -> Any:
    return [each.tolist() for each in made.model.parameters()]


@pytest.mark.parametrize("at", [4, 5, 6, 8])
def test_a_killed_run_of_two_ranks_resumes_bit_for_bit_with_its_random_numbers(at: int, tmp_path: Path):
    def cut(rank: int) -> None:
        made = dropping(tmp_path / "run")
        made.on(Events.ITERATION_COMPLETED(once=at))(lambda: os._exit(0))
        made.train()

    def resumed(rank: int) -> Any:
        made = dropping(tmp_path / "run")
        with structlog.testing.capture_logs() as logs:
            made.train(resume="latest")
        return weights_of(made), [line["event"] for line in logs if line["log_level"] == "warning"]

    def whole(rank: int) -> Any:
        made = dropping(tmp_path / f"whole-{rank}")
        drawn: list[float] = []
        made.on(Events.ITERATION_COMPLETED)(lambda: drawn.append(torch.rand(()).item()))
        made.train()
        return weights_of(made), drawn

    in_processes(cut)
    first, second = in_processes(resumed)
    expected, other = in_processes(whole)
    assert [each.error for each in (first, second, expected, other)] == [""] * 4
    assert first.value == second.value == (expected.value[0], [])
    assert not set(expected.value[1]) & set(other.value[1]), "each rank draws its own numbers"
    assert not EventLog(tmp_path / "run").verify()


@pytest.mark.parametrize("before", [1, 2])
def test_a_run_resumes_on_another_number_of_processes_with_the_same_global_batches(before: int, tmp_path: Path):
    def plain(folder: Path) -> Trainer:
        saving = Checkpointer(folder, Every(iterations=2), keep_last=20)
        return make(linear().double(), DataLoader(double(19), 4, shuffle=True), saving, max_epochs=3)

    def cut(rank: int) -> None:
        made = plain(tmp_path / "run")
        made.on(Events.ITERATION_COMPLETED(once=7))(lambda: os._exit(0))
        made.train()

    def resumed(rank: int) -> Any:
        made = plain(tmp_path / "run")
        made.train(resume="latest")
        return weights_of(made), made.state.samples, made.state.iteration

    in_processes(cut, before) if before > 1 else in_one_process(cut, forked=True)
    after = in_processes(resumed) if before == 1 else [in_one_process(resumed, forked=True)]
    assert {each.error for each in after} == {""}
    whole = plain(tmp_path / "whole")
    whole.train()
    for each in after:
        weights, samples, iterations = each.value
        assert (samples, iterations) == (whole.state.samples, whole.state.iteration)
        for mine, theirs in zip(weights, weights_of(whole), strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("who", [0, 1])
def test_the_error_of_one_rank_is_what_the_other_one_raises(who: int, tmp_path: Path):
    def body(rank: int) -> None:
        made = dropping(tmp_path / "run")

        @made.on(Events.ITERATION_COMPLETED(once=5))
        def fail() -> None:
            if rank == who:
                raise ValueError(f"the disk of rank {rank} has gone")

        made.train()

    ended = in_processes(body, limit=20.0)
    assert f"ValueError: the disk of rank {who} has gone" in ended[who].error
    other = ended[1 - who].error
    assert f"PeerFailed: rank {who} has failed at epoch 1, iteration 5, so this one cannot continue:" in other
    assert f"ValueError: the disk of rank {who} has gone" in other


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path: Path):
    def body(rank: int) -> None:
        made = dropping(tmp_path / "run", max_epochs=1000)
        if rank == 1:
            made.on(Events.ITERATION_COMPLETED(once=300))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    ended = in_processes(body, limit=30.0)
    assert ended[1].status == -signal.SIGKILL
    assert "PeerFailed: rank 1 has ended without an error, while this one waited for" in ended[0].error
    assert EventLog(tmp_path / "run").verify() == []


def test_a_rank_whose_process_is_stopped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.training.agreement.Warden", partial(Warden, interval=0.1, grace=0.3, silence=1.0))

    def stop() -> None:
        if os.fork() == 0:  # kills the stopped process in the end
            time.sleep(4.0)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    def body(rank: int) -> None:
        made = dropping(tmp_path / "run", max_epochs=2000)
        if rank == 1:
            made.on(Events.ITERATION_COMPLETED(once=20))(stop)
        made.train()

    begun = time.monotonic()
    ended = in_processes(body, limit=30.0)
    assert ended[0].status == Warden.STATUS
    assert "rank 1 has given no sign of life for 1 s: its process is stopped" in ended[0].stderr
    assert time.monotonic() - begun < 20.0


def test_a_rank_that_leaves_a_run_early_is_not_taken_for_a_stopped_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.training.agreement.Warden", partial(Warden, interval=0.05, grace=0.1, silence=0.3))

    def body(rank: int) -> None:
        made = make(linear(), DataLoader(pairs(16), 4))
        made.on(Events.COMPLETED)(lambda: time.sleep(1.0 - rank))  # as a last save does
        made.train()
        time.sleep(0.8 * rank)  # before the next run
        made.train()

    assert [each.error for each in in_processes(body)] == ["", ""]


def test_ranks_with_other_settings_are_named_before_the_first_batch(tmp_path: Path):
    def body(rank: int) -> None:
        dropping(tmp_path / "run", learning_rate=0.1 * (1 + rank)).train()

    for ended in in_processes(body):
        assert "rank 1 has learning_rate=0.2, rank 0 has 0.1" in ended.error.splitlines()[-1]


def test_only_the_main_process_saves_logs_and_draws(tmp_path: Path):
    def body(rank: int) -> list[str]:
        folder = tmp_path / str(rank)
        handlers = [
            Checkpointer(folder),
            EventRecorder(folder),
            CSVLogger(folder),
            JSONLinesLogger(folder),
            Plots(folder),
            ConsoleLogger(every=Every(iterations=1)),
            EventRecorder(tmp_path / f"own-{rank}", rank=rank),
        ]
        run = make(linear(), DataLoader(pairs(16), 4), *handlers)
        run.train()
        run.save_checkpoint()
        return sorted(path.name for path in folder.rglob("*") if path.is_file())

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert {"metrics.csv", "metrics.jsonl", "loss.png", "manifest.json"} <= set(first.value)
    assert second.value == ["events.rank1.jsonl.zst", "tail.rank1.jsonl"]
    assert second.stderr == ""
    assert EventLog(tmp_path / "own-1", rank=1).ended


def test_one_run_folder_and_one_seed_for_all(tmp_path: Path):
    def body(rank: int) -> int:
        handlers = [Checkpointer(tmp_path), EventRecorder(tmp_path), CSVLogger(tmp_path), JSONLinesLogger(tmp_path)]
        torch.manual_seed(rank)
        run = make(linear(), DataLoader(pairs(17), 8, shuffle=True), *handlers, seed=None)
        run.train()
        return run.seed

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    log = EventLog(tmp_path)
    assert not log.damage
    assert [event.iteration for event in log.read(event="iteration_completed")] == [1, 2, 3, 4, 5, 6]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 6


def test_handlers_that_would_act_in_one_process_alone_are_refused():
    def body(rank: int) -> Any:
        said = []
        for handler in (LossSpikeGuard(policy="stop"), NaNGuard("rewind"), LRFinder()):
            with pytest.raises(ConfigurationError) as refused:
                make(linear(), DataLoader(pairs(16), 4), Checkpointer("unused"), handler)
            said.append(str(refused.value))
        return said

    for ended in in_processes(body):
        assert ended.error == ""
        named = [text.split(" cannot act like this where")[0].split()[-1] for text in ended.value]
        assert named == ["LossSpikeGuard", "NaNGuard", "LRFinder"]


def test_a_loss_that_jumps_in_the_share_of_one_process_is_seen_by_all():
    rows = pairs(160)
    rows.tensors[1][121] = 100.0  # of rank 1's share

    def body(rank: int) -> Any:
        made = make(
            linear(), DataLoader(rows, 4), LossSpikeGuard(window=20, every=Every(iterations=10)), learning_rate=0.01
        )
        found: list[int] = []
        made.on(Events.ANOMALY_DETECTED)(lambda engine, event: found.append(event.payload.at_iteration))
        made.train()
        return found

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    assert 31 in first.value


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


def test_a_batch_norm_of_each_process_is_warned_of_once():
    def body(rank: int) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with structlog.testing.capture_logs() as logs:
            made = make(model, DataLoader(pairs(16), 4), val_loader=DataLoader(pairs(9), 4))
        made.train()
        return [line["first"] for line in logs if "BatchNorm" in line["event"]], [made.state.metrics, *made.history]

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert (first.value[0], second.value[0]) == (["1"], [])
    assert first.value[1] == second.value[1]


class Listed(OwnLoader):
    """A loader of the user's, of which each process has its own."""


def test_processes_with_other_numbers_of_batches_are_named():
    def body(rank: int) -> None:
        make(linear(), Listed(TensorDataset(*DATA[: 12 + 4 * rank]), 4), log_every_n_steps=50, max_epochs=3).train()

    for each in in_processes(body, limit=30.0):
        assert "rank 1 has batches in a pass=4, rank 0 has 3" in each.error.splitlines()[-1]


def test_a_checkpoint_inside_an_accumulation_has_the_gradients_of_all_ranks(tmp_path: Path):
    def plain(folder: Path) -> Trainer:
        saving = Checkpointer(folder, Every(iterations=3), keep_last=20)
        return make(linear().double(), DataLoader(double(24), 4, shuffle=True), saving, accumulate=2)

    def cut(rank: int) -> None:
        made = plain(tmp_path / "run")
        made.on(Events.ITERATION_COMPLETED(once=4))(lambda: os._exit(0))
        made.train()

    def resumed(rank: int) -> Any:
        made = plain(tmp_path / "run")
        made.train(resume="latest")
        return weights_of(made)

    in_processes(cut)
    first, second = in_processes(resumed)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    whole = plain(tmp_path / "whole")
    whole.train()
    for mine, theirs in zip(first.value, weights_of(whole), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)


def test_a_failure_that_was_caught_does_not_end_the_next_run():
    def body(rank: int) -> Any:
        first = make(linear(), DataLoader(pairs(16), 4))

        @first.on(Events.ITERATION_COMPLETED(once=2))
        def fail() -> None:
            raise ValueError("planted")

        with pytest.raises((ValueError, PeerFailed)):
            first.train()
        second = make(linear(), DataLoader(pairs(16), 4), max_epochs=3)
        second.on(Events.ITERATION_COMPLETED(once=5))(lambda: time.sleep(2.5))  # longer than the warden's interval
        second.train()
        return second.state.iteration

    for ended in in_processes(body):
        assert (ended.error, ended.value) == ("", 12)


@pytest.mark.parametrize("kind", ["sums", "torchmetrics", "gathers", "own"])
def test_metrics_are_those_of_one_process(kind: str):
    class Own:
        def reset(self) -> None:
            self.rows = 0

        def update(self, y_pred: torch.Tensor, y: torch.Tensor) -> None:
            self.rows += len(y)

        def compute(self) -> float:
            return float(self.rows)

    def body(rank: int) -> Any:
        metrics: dict[str, Any] = {
            "sums": {"mae": MeanAbsoluteError()},
            "torchmetrics": {"mse": torchmetrics.MeanSquaredError()},
            "gathers": {"all": EpochMetric(lambda preds, targets: float((preds - targets).abs().median()))},
            "own": {"rows": Own(), "mse": torchmetrics.MeanSquaredError()},
        }[kind]
        found = []
        for loader in (
            DataLoader(pairs(13), 4),
            DataLoader(pairs(13), 4, shuffle=True),
            [pairs(13)[:7], pairs(13)[7:]],
        ):
            made = Trainer(
                linear(), DataLoader(pairs(16), 4), loader, strategy=SupervisedStrategy("mse"), metrics=metrics,
                config=TrainingConfig(max_epochs=1, optimizer="sgd", learning_rate=0.01, seed=1),
            )  # fmt: skip
            made.train()
            found.append(made.state.metrics)
        return found

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    for mine, theirs in zip(first.value, in_one_process(body), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5), kind


def test_data_that_a_user_shares_out_is_weighed_by_its_size():
    def train(parts: list[Any]) -> Any:
        model = linear().double()
        made = make(model, DataLoader(parts[int(os.environ.get("RANK", "0"))], 4), max_epochs=1)
        made.train()
        return weights_of(made), made.state.samples

    data = double(7)
    first, second = in_processes(lambda rank: train([Subset(data, range(each, 7, 2)) for each in (0, 1)]))
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    whole, samples = train_whole(data)
    assert first.value[1] == samples == 7
    for mine, theirs in zip(first.value[0], whole, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)


def train_whole(data: Any) -> Any:
    made = make(linear().double(), DataLoader(data, 7), max_epochs=1)
    made.train()
    return weights_of(made), made.state.samples


def test_parameters_that_a_handler_adds_are_averaged():
    def body(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1)).double()
        made = make(model, DataLoader(double(16), 4))

        @made.on(Events.ITERATION_COMPLETED(once=3))
        def add() -> None:
            torch.manual_seed(1)
            model[1] = nn.Linear(4, 4).double()
            made.optimizer.add_param_group({"params": list(model[1].parameters())})

        made.train()
        return [each.tolist() for each in model.parameters()]

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value


def test_what_prepare_batch_draws_is_repeated_after_a_kill(tmp_path: Path):
    class Noisy(SupervisedStrategy):
        def prepare_batch(self, batch: object) -> Any:
            prepared = super().prepare_batch(batch)
            return replace_inputs(prepared, prepared.inputs + torch.randn_like(prepared.inputs))

    def noisy(folder: Path) -> Trainer:
        config = TrainingConfig(max_epochs=3, optimizer="sgd", learning_rate=0.01, seed=3)
        saving = Checkpointer(folder, Every(iterations=2), keep_last=20)
        return Trainer(linear(), DataLoader(pairs(16), 4), strategy=Noisy("mse"), config=config, handlers=[saving])

    def cut(rank: int) -> None:
        made = noisy(tmp_path / "run")
        made.on(Events.ITERATION_COMPLETED(once=5))(lambda: os._exit(0))
        made.train()

    def ended(folder: str, resume: Any) -> Any:
        def body(rank: int) -> Any:
            made = noisy(tmp_path / folder)
            made.train(resume=resume)
            return weights_of(made)

        return in_processes(body)

    in_processes(cut)
    resumed, whole = ended("run", "latest"), ended("whole", None)
    assert [each.error for each in (*resumed, *whole)] == [""] * 4
    assert resumed[0].value == resumed[1].value == whole[0].value


def replace_inputs(batch: TrainingBatch, inputs: Any) -> TrainingBatch:
    return TrainingBatch(inputs, batch.targets, batch.samples, batch.tokens, batch.weight)


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


@pytest.mark.parametrize("who", [0, 1])
def test_ctrl_c_in_one_process_of_a_plain_script_is_one_in_all(who: int):
    def body(rank: int) -> None:
        made = make(linear(), DataLoader(pairs(16), 4), max_epochs=1000)
        if rank == who:
            made.on(Events.ITERATION_COMPLETED(once=7))(lambda: os.kill(os.getpid(), signal.SIGINT))
        if rank == 0:
            made.on(Events.COMPLETED)(lambda: time.sleep(3.0))  # a long last save
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            made.train()
        time.sleep(2.0)

    assert [(each.status, each.error) for each in in_processes(body)] == [(0, "")] * 2
