"""Several processes learn, count and measure what one process does with the same global batches."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from ignite.metrics import EpochMetric, MeanAbsoluteError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Accumulate, Events, SupervisedStrategy, TrainingBatch
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import RANKS, double, in_one_process, linear, make, weights_of

ROWS = (15, 16, 17, 19, 24, 34)


@pytest.mark.parametrize(
    "wrapped", ["plain", "a sampler by rank", pytest.param("wrapped by the user", marks=pytest.mark.slow)]
)
def test_two_ranks_learn_what_one_process_learns_from_the_whole_batches(wrapped: str):
    """Every sample counts once, for any number of them, also in validation, and with accumulation."""

    def train(rows: int, accumulate: int, rank: int | None) -> Any:
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
        return [train(*case, rank) for case in cases]

    cases = [(rows, accumulate) for accumulate in (1, 2) for rows in ROWS]
    first, second = in_processes(body, own_group=wrapped == "wrapped by the user")
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value, "the ranks have diverged"
    for case, (counted, history, weights, metrics) in zip(cases, first.value, strict=True):
        expected = train(*case, None)
        assert counted == expected[0], case
        assert history.keys() == expected[1].keys()
        for name, values in history.items():
            # the mean loss is one of float32 numbers
            precision = 1e-6 if name == "train/loss" else 1e-12
            assert values == pytest.approx(expected[1][name], rel=precision), (case, name)
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


class Lengthless:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Counting(SupervisedStrategy):
    """Counts the tokens that a row holds: those of even rows are more."""

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        rows, counts = batch
        prepared = super().prepare_batch((rows, torch.zeros(len(rows), 1)))
        return TrainingBatch(prepared.inputs, prepared.targets, samples=len(rows), tokens=int(counts.sum()))


@pytest.mark.parametrize("bounds", [{"max_tokens": 24 * 7}, {"max_iterations": 7, "accumulate": Accumulate(tokens=24)}])
def test_the_length_of_a_run_counts_the_tokens_of_all_ranks(bounds: dict[str, Any]):
    """Each rank has a loader of its own, whose batches hold 20 tokens on one rank, and 4 on the other."""

    def train(rank: int | None) -> Any:
        data = TensorDataset(torch.ones(40, 4), torch.tensor([10, 2] * 20))
        sampler: Any = None if rank is None else DistributedSampler(data, RANKS, rank, shuffle=False)
        config = TrainingConfig(**bounds, optimizer="sgd", learning_rate=0.1, schedule="cosine", seed=3)
        loader = DataLoader(data, 4 if rank is None else 2, sampler=sampler)
        made = Trainer(linear(), loader, strategy=Counting("mse"), config=config)
        made.train()
        return made.length.total_updates, made.state.iteration, made.state.update, made.learning_rates

    first, second = in_processes(train)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value == train(None)
    assert first.value[:3] == (7, 7, 7)


def test_a_rank_whose_loader_is_empty_is_refused_by_all():
    def body(rank: int) -> None:
        data = TensorDataset(torch.ones(40, 4), torch.ones(40))
        loader = Lengthless(list(DataLoader(data, 2)) if rank == 0 else [])
        Trainer(linear(), loader, strategy=Counting("mse"), config=TrainingConfig(max_tokens=8))

    for ended in in_processes(body):
        assert "gave no batch; it is empty" in ended.error


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


def test_metrics_are_those_of_one_process():
    class Own:
        def reset(self) -> None:
            self.rows = 0

        def update(self, y_pred: torch.Tensor, y: torch.Tensor) -> None:
            self.rows += len(y)

        def compute(self) -> float:
            return float(self.rows)

    class Count(torchmetrics.Metric):
        """Unlike a mean, it shows samples that count twice."""

        rows: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.add_state("rows", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
            self.rows += len(target)

        def compute(self) -> torch.Tensor:
            return self.rows

    def body(rank: int) -> Any:
        kinds: dict[str, dict[str, Any]] = {
            "counts": {"rows": Count()},
            "sums": {"mae": MeanAbsoluteError()},
            "torchmetrics": {"mse": torchmetrics.MeanSquaredError()},
            "gathers": {"all": EpochMetric(lambda preds, targets: float((preds - targets).abs().median()))},
            "own": {"rows": Own(), "mse": torchmetrics.MeanSquaredError()},
        }
        return {kind: values(metrics) for kind, metrics in kinds.items()}

    def values(metrics: dict[str, Any]) -> list[dict[str, float]]:
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
    for kind, expected in in_one_process(body).items():
        for mine, theirs in zip(first.value[kind], expected, strict=True):
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
