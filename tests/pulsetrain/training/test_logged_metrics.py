"""What training reports of its strategy at log points: metrics of the outputs at hand, and the parts of the loss."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pulsetrain import Trainer, TrainingConfig, diff, verify
from pulsetrain.engine import (
    ConfigurationError,
    Events,
    Every,
    JaxBackend,
    SFTStrategy,
    SupervisedStrategy,
    Topology,
    TorchBackend,
    TrainingBatch,
)
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import Checkpointer, ConsoleLogger, EventRecorder, GradientMonitor
from tests.support.models import Tokens
from tests.support.ranks import in_processes
from tests.support.runs_backends import needs_jax

VOCABULARY, ROWS, LENGTH = 7, 3, 6

BACKENDS: dict[str, Callable[[], Any]] = {
    "torch": TorchBackend,
    "functional": lambda: TorchBackend(functional=True),
    "jax": JaxBackend,
}
ON = pytest.mark.parametrize("on", ["torch", "functional", pytest.param("jax", marks=needs_jax)])


def texts(count: int = 12, rows: int = ROWS) -> list[dict[str, Tensor]]:
    """Batches whose rows have one trained token to five."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=draw)
        trained = torch.arange(LENGTH) >= 1 + (torch.arange(rows)[:, None] + number) % 5
        found.append({"input_ids": tokens, "labels": torch.where(trained, tokens, IGNORED)})
    return found


@cache
def table() -> Tensor:
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4))


def language_model(on: str) -> Any:
    """Logits of the next token from the present one, by one table."""
    if on == "jax":
        return (lambda weights, tokens: weights["table"][tokens]), {"table": table().numpy().copy()}
    model = Tokens(VOCABULARY)
    model.table.weight.data.copy_(table())
    return model


def trainer(
    on: str = "torch", handlers: Any = (), data: Any = None, strategy: Any = None, model: Any = None, val: Any = None,
    **settings: Any,
) -> Trainer:  # fmt: skip
    plain = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.0}, "learning_rate": 0.5}
    defaults = {"max_epochs": 1, **plain, "log_every_n_steps": 4, "seed": 0}
    config = TrainingConfig(**{**defaults, "device": "cpu", "progress": False, **settings})
    return Trainer(
        language_model(on) if model is None else model,
        texts() if data is None else data,
        val,
        strategy=SFTStrategy() if strategy is None else strategy,
        backend=BACKENDS[on](),
        config=config,
        handlers=list(handlers),
    )


def logged(run: Trainer) -> list[tuple[int, dict[str, float]]]:
    """The metrics that the run logs, with their iterations, once it is trained."""
    found: list[tuple[int, dict[str, float]]] = []
    run.on(Events.METRICS_LOGGED)(
        lambda engine, event: found.append((engine.state.iteration, dict(event.payload.metrics)))
    )
    run.train()
    return found


def by_hand(updates_after: Callable[[int], bool] = lambda iteration: True) -> dict[int, dict[str, float]]:
    """Token accuracy and entropy of each batch before its update, in float64 NumPy; one token at a time."""
    weights = table().double().numpy().copy()
    found, waiting = {}, []
    for iteration, batch in enumerate(texts(), 1):
        right, spread, gradient, count = 0, 0.0, np.zeros_like(weights), 0
        for row, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            for token, label in zip(row[:-1], labels[1:], strict=True):
                if label == IGNORED:
                    continue
                probabilities = np.exp(weights[token]) / np.exp(weights[token]).sum()
                right += int(np.argmax(weights[token]) == label)
                spread -= float((probabilities * np.log(probabilities)).sum())
                gradient[token] += probabilities
                gradient[token, label] -= 1.0
                count += 1
        found[iteration] = {"train/token_accuracy": right / count, "train/entropy": spread / count}
        waiting.append((gradient, count))
        if updates_after(iteration):
            weights -= 0.5 * sum(each for each, _ in waiting) / sum(size for _, size in waiting)
            waiting = []
    return found


# -------------------------------------------------------------------------------------------------- which, and when


@ON
@pytest.mark.parametrize("parts", ["whole step", "with a norm", "accumulated"])
def test_metrics_of_the_batch_at_a_log_point_are_those_before_its_update(on: str, parts: str):
    accumulate = 3 if parts == "accumulated" else 1

    def make(**settings: Any) -> Trainer:
        handlers = [GradientMonitor()] if parts == "with a norm" else []
        return trainer(on, handlers=handlers, accumulate=accumulate, **settings)

    run = make()
    expected = by_hand(lambda iteration: iteration % accumulate == 0)
    found = [(iteration, each) for iteration, each in logged(run) if "train/loss" in each]
    assert [iteration for iteration, _ in found] == [4, 8, 12]
    for iteration, metrics in found:
        assert {name: metrics[name] for name in expected[iteration]} == pytest.approx(expected[iteration], abs=1e-5)
    if on == "jax":
        plain = make(log_strategy_metrics=False)
        plain.train()
        assert run.backend.compiled == plain.backend.compiled, "a log point is the same program"


class Counting(SFTStrategy):
    """Counts how often its metrics are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> dict[str, Any]:
        assert not torch.is_grad_enabled()
        self.at.append(len(self.at))
        return super().compute_metrics(outputs, batch)


class Called(Tokens):
    """Counts its calls, and whether the outputs of earlier ones are still there."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.calls, self.kept = 0, 0
        self.last: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        gc.collect()
        self.kept += self.last is not None and self.last() is not None
        logits = super().forward(tokens)
        self.last = weakref.ref(logits)
        return logits


def test_they_cost_no_forward_pass_and_keep_no_outputs():
    strategy, model = Counting(), Called()
    logged(trainer(strategy=strategy, model=model))
    assert (len(strategy.at), model.calls, model.kept) == (3, 12, 0)


def test_where_nobody_reads_them_none_are_computed():
    strategy = Counting()
    trainer(strategy=strategy).train()
    assert strategy.at == []


def test_they_can_be_switched_off():
    strategy = Counting()
    found = logged(trainer(strategy=strategy, log_strategy_metrics=False))
    assert strategy.at == []
    assert [set(metrics) & {"train/token_accuracy", "train/perplexity"} for _, metrics in found] == [
        {"train/perplexity"}
    ] * 3
    with pytest.raises(ConfigurationError, match=r"log_strategy_metrics='no'\): needs True or False"):
        TrainingConfig(log_strategy_metrics="no")  # type: ignore[arg-type]


def test_the_last_iteration_of_a_run_is_a_log_point_if_it_is_known_before():
    def at(run: Trainer) -> list[tuple[int, bool]]:
        return [(iteration, "train/token_accuracy" in metrics) for iteration, metrics in logged(run)]

    assert at(trainer(max_epochs=None, max_iterations=6)) == [(4, True), (6, True)]
    assert at(trainer(max_epochs=None, max_iterations=1)) == [(1, True)]
    assert at(trainer(max_epochs=None, max_updates=3, accumulate=2)) == [(4, True), (6, True)]
    ended = trainer()
    ended.add_event_handler(Events.ITERATION_COMPLETED(once=6), ended.terminate)
    assert at(ended) == [(4, True), (6, False)]


class Dropping(nn.Module):
    """Draws in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.dropout = nn.Embedding(VOCABULARY, VOCABULARY), nn.Dropout(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.dropout(self.table(tokens))
        return logits


class Drawing(SFTStrategy):
    """Its metric is drawn."""

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> dict[str, Any]:
        return {**super().compute_metrics(outputs, batch), "drawn": torch.rand(())}


@pytest.mark.parametrize("on", ["torch", "functional"])
def test_the_weights_are_the_same_bits_with_and_without_them(on: str):
    runs = [
        trainer(on, strategy=Drawing(), model=Dropping(), log_strategy_metrics=reports) for reports in (True, False)
    ]
    for run in runs:
        logged(run)
    assert torch.equal(*(run.model.table.weight for run in runs))


@needs_jax
def test_the_weights_are_the_same_bits_in_jax_however_often_they_are_reported():
    runs = [trainer("jax", log_every_n_steps=every) for every in (1, 5, 50)]
    for run in runs[:2]:
        logged(run)
    runs[2].train()
    tables = [next(iter(run.model.state_dict().values())) for run in runs]
    assert all(torch.equal(tables[0], each) for each in tables)


# ----------------------------------------------------------------------------------------------- the parts of a loss


class Autoencoder(nn.Module):
    """Encodes to a mean and a logarithm of a variance, of which it decodes the mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(inputs).chunk(2, -1)
        return self.decode(mean), mean, log_variance


def autoencoder(on: str) -> Any:
    model = Autoencoder()
    if on != "jax":
        return model
    weights = {name: each.detach().numpy().copy() for name, each in model.state_dict().items()}

    def net(weights: Any, inputs: Any) -> Any:
        hidden = inputs @ weights["encode.weight"].T + weights["encode.bias"]
        mean, log_variance = hidden[:, :2], hidden[:, 2:]
        return mean @ weights["decode.weight"].T + weights["decode.bias"], mean, log_variance

    return net, weights


class Variational:
    """The loss of a VAE, and its parts by name."""

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        return TrainingBatch(batch, batch, len(batch))

    def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Any:
        decoded, mean, log_variance = outputs
        reconstruction = ((decoded - batch.targets) ** 2).mean()
        exp = log_variance.exp() if isinstance(log_variance, Tensor) else np.e**log_variance
        kl = 0.5 * (mean**2 + exp - 1 - log_variance).mean()
        return reconstruction + 0.1 * kl, {"reconstruction": reconstruction, "kl": kl}

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> dict[str, Any]:
        return {}


@ON
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"clip_grad_norm": 1.0}], ids=str)
def test_the_parts_of_a_loss_are_reported_by_name_in_training_and_validation(on: str, settings: dict[str, Any]):
    data = list(torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(5)))
    options = {"strategy": Variational(), "model": autoencoder(on), "log_every_n_steps": 1, **settings}
    run = trainer(on, data=data, val=data[:2], **options)
    for iteration, metrics in logged(run):
        total = metrics["train/reconstruction"] + 0.1 * metrics["train/kl"]
        assert metrics["train/loss"] == pytest.approx(total, rel=1e-5), iteration
    last = run.history.get_latest()
    assert last["val/loss"] == pytest.approx(last["val/reconstruction"] + 0.1 * last["val/kl"], rel=1e-5)
    assert last["val/kl"] > 0


@ON
def test_where_nobody_reads_them_the_loss_alone_is_trained(on: str):
    data = list(torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(5)))
    history = trainer(on, data=data, strategy=Variational(), model=autoencoder(on), max_epochs=4).train()
    assert history["train/loss"][-1] < history["train/loss"][0]


@ON
def test_a_loss_that_is_a_mapping_is_refused(on: str):
    class Mapped(Variational):
        def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Any:
            return super().compute_loss(outputs, batch)[1]

    data = [torch.ones(5, 4)]
    with pytest.raises(TypeError, match=r"Mapped.compute_loss: returned \{reconstruction"):
        trainer(on, data=data, strategy=Mapped(), model=autoencoder(on)).train()


# -------------------------------------------------------------------------------------- logs, resumes and processes


def recorded(folder: Path, every: Every | None = None, **settings: Any) -> Trainer:
    handlers = [EventRecorder(folder), Checkpointer(folder, every=every or Every(iterations=3))]
    run = trainer(handlers=handlers, **settings)
    run.add_event_handler(Events.METRICS_LOGGED, lambda: None)
    return run


def test_they_are_recorded_verified_and_the_same_after_a_resume(tmp_path: Path):
    recorded(tmp_path / "whole").train()
    events = list(EventLog(tmp_path / "whole").read(event="metrics_logged"))
    assert [event.iteration for event in events] == [4, 8, 12]
    expected = by_hand()
    for event in events:
        found = {name: event.payload["metrics"][name] for name in expected[event.iteration]}
        assert found == pytest.approx(expected[event.iteration], abs=1e-5)
    assert verify(tmp_path / "whole", recorded)
    stopped = recorded(tmp_path / "stopped")
    stopped.add_event_handler(Events.ITERATION_COMPLETED(once=7), stopped.terminate)
    stopped.train()
    for handler in stopped.handlers:
        if isinstance(handler, EventRecorder):
            handler.detach()
    resumed = recorded(tmp_path / "stopped")
    resumed.train(resume="latest")
    assert not diff(tmp_path / "whole", tmp_path / "stopped")


def test_a_resume_that_reports_others_leaves_them_out_of_its_comparison(tmp_path: Path):
    run = recorded(tmp_path)
    run.train()
    for handler in run.handlers:
        if isinstance(handler, EventRecorder):
            handler.detach()
    resumed = recorded(tmp_path, log_strategy_metrics=False)
    (recorder,) = (each for each in resumed.handlers if isinstance(each, EventRecorder))
    resumed.train(resume=str(sorted((tmp_path / "checkpoints").glob("*-*"))[0]))
    assert recorder.resume_check is None or recorder.resume_check.difference is None


def test_the_console_shows_each_metric_of_training():
    class Many(SFTStrategy):
        def compute_metrics(self, outputs: object, batch: TrainingBatch) -> dict[str, Any]:
            return {f"metric{number}": torch.tensor(float(number)) for number in range(12)}

    stream = io.StringIO()
    trainer(strategy=Many(), handlers=[ConsoleLogger(stream=stream)]).train()
    line = next(line for line in stream.getvalue().splitlines() if "metrics" in line)
    assert all(f"train/metric{number}={number}" in line for number in range(12))
    assert "train/loss=" in line


def test_of_two_processes_each_counts_by_its_trained_tokens():
    def body(rank: int) -> list[tuple[int, dict[str, float]]]:
        data = torch.utils.data.DataLoader(_rows(), batch_size=4)
        return logged(trainer(data=data, log_every_n_steps=2))

    data = torch.utils.data.DataLoader(_rows(), batch_size=4)
    alone = logged(trainer(data=data, log_every_n_steps=2))
    assert len(alone) == 3
    for ended in in_processes(body):
        assert not ended.error, ended.error
        for (iteration, metrics), (same, expected) in zip(ended.value, alone, strict=True):
            assert iteration == same
            for name in ("train/loss", "train/token_accuracy", "train/entropy"):
                assert metrics[name] == pytest.approx(expected[name], abs=1e-6), name


def _rows() -> list[dict[str, Tensor]]:
    """The examples of all batches one by one; their numbers of trained tokens differ."""
    return [{name: each[row] for name, each in batch.items()} for batch in texts(6, rows=4) for row in range(4)]


class OfSomeBatches(SFTStrategy):
    """No metric of a batch whose rows have fewer than four trained tokens, and another name for more."""

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> dict[str, Any]:
        longest = (batch.targets != IGNORED).sum(-1).max()
        return {} if longest < 4 else {"long" if longest == 5 else "middle": longest}


def test_metrics_of_some_batches_are_means_over_the_processes_that_have_them():
    rows = {number: [row for row in _rows() if (row["labels"] != IGNORED).sum() == number] for number in (1, 4, 5)}
    batches = {number: torch.utils.data.default_collate(found[:2]) for number, found in rows.items()}

    def body(rank: int) -> Any:
        data = [batches[pair[rank]] for pair in ((1, 1), (5, 1), (1, 4), (5, 5))]
        run = trainer(data=data, val=data, strategy=OfSomeBatches(), log_every_n_steps=1)
        points = [metrics for _, metrics in logged(run)]
        found = [{name: each[name] for name in ("train/long", "train/middle") if name in each} for each in points]
        return found, {name: run.state.metrics[name] for name in ("val/long", "val/middle")}

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    points, metrics = first.value
    assert points == [{}, {"train/long": 5.0}, {"train/middle": 4.0}, {"train/long": 5.0}]
    assert metrics == {"val/long": 5.0, "val/middle": 4.0}


def test_virtual_ranks_report_none():
    backend = TorchBackend(topology=Topology(virtual=2, reduction="tree"))
    run = Trainer(
        copy.deepcopy(language_model("torch")),
        torch.utils.data.DataLoader(_rows(), batch_size=4),
        strategy=SFTStrategy(),
        backend=backend,
        config=TrainingConfig(
            max_epochs=1, optimizer="sgd", learning_rate=0.5, log_every_n_steps=2, seed=0, progress=False, device="cpu"
        ),
    )
    assert all("train/token_accuracy" not in metrics for _, metrics in logged(run))


def test_a_strategy_without_metrics_reports_none():
    data = [(torch.ones(2, 4), torch.zeros(2, 1))] * 4
    found = logged(trainer(data=data, strategy=SupervisedStrategy("mse"), model=nn.Linear(4, 1)))
    assert {name for _, metrics in found for name in metrics if name.startswith("train/")} == {"train/loss"}
