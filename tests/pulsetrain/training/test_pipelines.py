"""Models whose layers several processes have: they learn what one process learns, whatever the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import CheckpointError, Events, Every, SFTStrategy, SupervisedStrategy
from pulsetrain.engine.checkpoint import save_safetensors
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.handlers import Fingerprints, GradientMonitor, NaNGuard
from tests.support.ranks import Ended, in_processes
from tests.support.runs_of_pipelines import gpt, layers, pipelined, texts
from tests.support.runs_of_ranks import double, make_with
from tests.support.runs_of_shards import apart, trained

SCHEDULES = ["1f1b", "gpipe", "interleaved"]


def check(ended: list[Ended], one: dict[str, Any], bound: float = 1e-12) -> None:
    """The processes have all weights together, which are those of the one process."""
    names = set()
    for each in ended:
        assert not each.error, each.error
        assert each.value["sharded"]
        assert apart(each.value, one) < bound
        names |= each.value["weights"].keys()
    assert names == one["weights"].keys()
    assert all(len(each.value["weights"]) < len(names) for each in ended)


@pytest.mark.parametrize("schedule", ["1f1b", *(pytest.param(each, marks=pytest.mark.slow) for each in SCHEDULES[1:])])
def test_two_processes_learn_what_one_learns(schedule: str):
    """From the values of rank 0, with batches that do not divide, and with fewer rows than micro-batches."""

    def run(rank: int, backend: Any) -> list[dict[str, Any]]:
        found = []
        for rows, config in ((17, {"clip_grad_norm": 0.5, "accumulate": 2}), (15, {"clip_grad_value": 0.01})):
            loaders = DataLoader(double(rows), 6, shuffle=True), DataLoader(double(9), 2)
            found.append(trained(make_with(layers(rank), *loaders, backend=backend(), optimizer="adamw", **config)))
        return found

    one = run(0, lambda: None)
    ended = in_processes(lambda rank: run(rank, lambda: pipelined(schedule=schedule)))
    for at, expected in enumerate(one):
        check([Ended(each.status, each.value and each.value[at], each.error, "") for each in ended], expected)


@pytest.mark.slow
def test_copies_of_a_pipeline_on_four_processes():
    def run(rank: int, backend: Any, rows: int = 35, batch_size: int = 8) -> dict[str, Any]:
        loaders = DataLoader(double(rows), batch_size, shuffle=True), DataLoader(double(9), 2)
        return trained(make_with(layers(rank), *loaders, backend=backend, clip_grad_norm=0.5, accumulate=2))

    one = run(0, None)
    shards = {"shard": 2}, {"shard": 2, "schedule": "interleaved"}
    for topology in ({}, {"schedule": "interleaved"}, {"pipeline": 4, "microbatches": 5}, *shards):
        check(in_processes(lambda rank, made=topology: run(rank, pipelined(**made)), 4), one)
    # the last batch has micro-batches of two rows in one copy, and of one row in the other
    for topology in ({}, shards[0]):
        ended = in_processes(lambda rank, made=topology: run(rank, pipelined(**made), 41, 16), 4)
        check(ended, run(0, None, 41, 16))


class Counting(nn.Module):
    """Adds up what it sees in training."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(inputs.detach().sum())
        return inputs


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2])
def test_copies_are_validated_with_the_buffers_of_the_first_one(shard: int):
    def run(rank: int) -> Any:
        model = layers()
        model[1], model[5] = Counting(), Counting()
        loaders = DataLoader(double(32), 8), DataLoader(double(9), 2)
        made = make_with(model, *loaders, backend=pipelined(shard=shard), max_epochs=1)
        before: list[list[float]] = []
        made.on(Events.ITERATION_COMPLETED(once=4))(lambda: before.append(seen(made.model)))
        made.train()
        return before[0], seen(made.model)

    def seen(model: nn.Module) -> list[float]:
        return [float(each) for each in model.buffers() if not each.is_meta]

    ended = in_processes(run, 4)
    for each in ended:
        assert not each.error, each.error
    for first, other in ((0, 1), (2, 3)):  # the two copies of each part
        assert ended[first].value[0] != ended[other].value[0]
        assert ended[first].value[1] == ended[other].value[1] == ended[first].value[0]
    assert ended[0].value[1] != ended[2].value[1]


def test_a_model_output_without_rows_is_refused_where_outputs_are_put_together():
    class Extra(nn.Module):
        pipeline_plan = "blocks"

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = block(x)
            return x[:, :1], x.square().mean()

    class First(SupervisedStrategy):
        def compute_loss(self, outputs: Any, *more: Any, **named: Any) -> Any:
            return super().compute_loss(outputs[0], *more, **named)

    def run(rank: int) -> None:
        Trainer(
            Extra().double(), DataLoader(double(8), 4), DataLoader(double(8), 4), strategy=First("mse"),
            backend=pipelined(), config=TrainingConfig(max_epochs=1, device="cpu"),
        ).train()  # fmt: skip

    assert any("which has no rows" in each.error for each in in_processes(run))


def learn_texts(
    model: nn.Module, rows: list[dict[str, Tensor]], backend: Any, *handlers: Any, **config: Any
) -> dict[str, Any]:
    trainer = Trainer(
        model, DataLoader(rows, 8, shuffle=True), DataLoader(rows[:5], 2), strategy=SFTStrategy(), backend=backend,
        handlers=handlers,
        config=TrainingConfig(seed=0, optimizer="adamw", learning_rate=0.01, log_every_n_steps=1, **config),
    )  # fmt: skip
    found = trained(trainer)
    history = trainer.history.get_history()
    found["val"] = [value for name in ("train/loss", "val/loss", "val/token_accuracy") for value in history[name]]
    found["val"] += [trainer.state.samples, trainer.state.tokens]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_fifty_steps_of_a_language_model(schedule: str, dtype: torch.dtype, bound: float):
    """Each micro-batch weighs as many tokens as it trains; losses and metrics are those of one process."""

    def run(rank: int, backend: Any) -> dict[str, Any]:
        rows = texts(40, packed=schedule == "gpipe")
        recomputed = "blocks.*" if schedule == "interleaved" else None
        return learn_texts(
            gpt(dtype), rows, backend, max_iterations=50, clip_grad_norm=0.5, activation_checkpointing=recomputed
        )

    check(in_processes(lambda rank: run(rank, pipelined(schedule=schedule))), run(0, None), bound)


def test_micro_batches_weigh_as_many_tokens_as_they_train():
    def run(rank: int, backend: Any) -> dict[str, Any]:
        return learn_texts(gpt(), texts(19), backend, max_epochs=2)

    check(in_processes(lambda rank: run(rank, pipelined(microbatches=3))), run(0, None))


class Weighed(SupervisedStrategy):
    """A mean over rows that weigh as much as their last input says: less than 1 together, and some nothing."""

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        inputs, targets = batch
        return TrainingBatch(inputs, (targets, inputs[:, 3]), len(inputs), weight=inputs[:, 3].sum())

    def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Tensor:
        targets, weights = batch.targets
        loss: Tensor = (weights[:, None] * (outputs - targets).square()).sum() / weights.sum()
        return loss


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_micro_batches_may_weigh_nothing_and_all_together_less_than_one(schedule: str):
    inputs, targets = double(12).tensors
    inputs[:, 3] = torch.tensor([0.0, 0.0, 0.1, 0.2, 0.3, 0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.3])
    weights = inputs[:, 3].reshape(2, 6)
    assert weights.reshape(2, 3, 2).sum(2).tolist()[1][0] == 0 == weights[0, :2].sum(), "micro-batches of nothing"
    assert max(weights.sum(1)) < 1

    def run(rank: int, backend: Any) -> dict[str, Any]:
        data = TensorDataset(inputs, targets)
        made = Trainer(
            layers(), DataLoader(data, 6), DataLoader(data, 6), strategy=Weighed("mse"), backend=backend,
            config=TrainingConfig(max_epochs=3, optimizer="adamw", learning_rate=0.01, seed=0, log_every_n_steps=1),
        )  # fmt: skip
        found = trained(made)
        found["val"] = [*found["val"], *made.history.get_history()["train/loss"]]
        return found

    parts = {"1f1b": 3, "interleaved": 6}[schedule]
    one = run(0, None)
    assert torch.tensor(one["val"]).isfinite().all()
    check(in_processes(lambda rank: run(rank, pipelined(microbatches=parts, schedule=schedule))), one)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_models_of_transformers_bring_their_plan(family: str):
    transformers = pytest.importorskip("transformers")

    def run(rank: int, backend: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
        config = kinds[family](
            hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=32,
            num_key_value_heads=1, max_position_embeddings=16,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
        return learn_texts(model, texts(19, packed=True), backend, max_epochs=2)

    one = run(0, None)
    for schedule in ("1f1b", "interleaved"):
        check(in_processes(lambda rank, made=schedule: run(rank, pipelined(schedule=made))), one, 1e-4)


def test_an_optimizer_that_was_made_over_the_whole_model_is_kept_with_its_groups():
    def run(rank: int, backend: Any) -> dict[str, Any]:
        model = layers()
        optimizer = torch.optim.AdamW(
            [{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 0.05}], lr=0.01
        )
        loaders = DataLoader(double(17), 4), DataLoader(double(9), 2)
        return trained(make_with(model, *loaders, backend=backend, optimizer=optimizer))

    check(in_processes(lambda rank: run(rank, pipelined())), run(0, None))


def test_a_guard_skips_an_update_in_all_processes_of_which_one_is_frozen():
    def run(rank: int, backend: Any) -> dict[str, Any]:
        rows = double(16)
        rows.tensors[0][5] = float("nan")
        model = layers()
        for name, each in model.named_parameters():
            each.requires_grad_(int(name[0]) > 3)  # all that one of the processes has is frozen
        loaders = DataLoader(rows, 4), DataLoader(double(9), 2)
        return trained(make_with(model, *loaders, NaNGuard(), backend=backend, optimizer="adamw"))

    check(in_processes(lambda rank: run(rank, pipelined())), run(0, None))


def test_norms_of_the_gradients_of_all_layers_are_reported_in_all_processes():
    def run(rank: int, backend: Any) -> Any:
        found: dict[str, list[float]] = {}
        made = make_with(
            layers(), DataLoader(double(16), 4), None, GradientMonitor(Every(updates=2), updates=True), backend=backend
        )

        @made.on(Events.METRICS_LOGGED)
        def note(engine: Any, event: Any) -> None:
            for name, value in event.payload.metrics.items():
                if name.startswith(("grad_norm/", "update_ratio/")):
                    found.setdefault(name, []).append(value)

        made.train()
        return found

    one = run(0, None)
    assert "grad_norm/0.weight" in one
    assert "update_ratio/7.bias" in one
    for each in in_processes(lambda rank: run(rank, pipelined())):
        assert not each.error, each.error
        assert each.value.keys() == one.keys()
        for name, values in one.items():
            assert each.value[name] == pytest.approx(values, abs=1e-12)


def test_a_state_is_restored_and_the_model_can_be_called_as_a_whole(tmp_path: Path):
    def run(rank: int) -> Any:
        made = make_with(
            layers(), DataLoader(double(16), 4), None, Fingerprints(Every(iterations=2)), backend=pipelined()
        )
        made.train()
        state, inputs = made.model_state, double(5).tensors[0]
        with torch.no_grad():
            before = made.model(inputs)
        made.train_epoch()
        with torch.no_grad():
            assert not torch.equal(made.model(inputs), before)
        made.model_store.restore(state)
        with pytest.raises(CheckpointError, match="this process has a part of its weights"):
            save_safetensors(made.model, tmp_path / "model.safetensors")
        with pytest.raises(RuntimeError, match="call it under"):
            made.model(inputs)
        with torch.no_grad():
            return before.tolist(), made.model(inputs).tolist()

    first, second = in_processes(run)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    assert first.value[0] == first.value[1]
    assert len(first.value[0]) == 5


def test_layers_of_two_processes_draw_different_numbers():
    def run(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(64, 1)).double()
        kept: list[list[bool]] = []
        model[1 + rank].register_forward_hook(lambda module, inputs, output: kept.append((output[0] != 0).tolist()))
        made = make_with(model, DataLoader(double(8), 8), None, backend=pipelined(), max_epochs=1)
        made.train()
        return kept[-1]

    first, second = in_processes(run)
    assert (first.error, second.error) == ("", "")
    # a value that both keep, of those that the first one keeps: half of them, and all if the draws were the same
    both = [b for a, b in zip(first.value, second.value, strict=True) if a]
    assert 0.1 < sum(both) / len(both) < 0.9


def test_an_error_of_the_last_layers_ends_all_processes_with_its_text():
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("the layer cannot do this")

    def run(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1), Failing()).double()
        make_with(model, DataLoader(double(8), 4), None, backend=pipelined()).train()

    for each in in_processes(run):
        assert "the layer cannot do this" in each.error.splitlines()[-1] or "the layer cannot do this" in each.error
