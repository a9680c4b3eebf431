"""Virtual ranks: weights, optimizer states and losses have the same bits on 1, 2 and 4 processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from pulsetrain import Loop, TrainingConfig
from pulsetrain.engine import Accumulate, Events, Every, TorchBackend
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.distributed.ranks import VirtualRanks
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.handlers import EMA, SWA, EventRecorder
from pulsetrain.state.data_cursor import DataCursor
from tests.support.models import pairs, regression_model
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make_with
from tests.support.runs_of_virtual_ranks import bits_of, losses_in, net, run_on, tree, virtual

FOUR = pytest.param(4, marks=pytest.mark.slow)


def trained(run: Path | None = None, *handlers: Any, stop: int | None = None, **options: Any) -> Any:
    """What a run gives, which continues from its newest checkpoint and may stop in the middle of an epoch."""
    made = virtual(run, *handlers, **options)
    if stop is not None:
        made.on(Events.ITERATION_COMPLETED(once=stop))(lambda: made.terminate(reason="stop", alike=True))
    losses: list[float] = []
    made.on(Events.ITERATION_COMPLETED)(lambda: losses.append(made.state.output["loss"].item()))
    history = made.train(resume=None if run is None else "latest")
    return bits_of(made), losses, history, made.state.samples, made.stepper.accumulated


@pytest.mark.parametrize("processes", [2, FOUR])
def test_weights_losses_and_optimizer_states_have_the_bits_of_one_process(processes: int, tmp_path: Path):
    (one,) = run_on(1, lambda rank: trained(tmp_path / "one"))
    several = run_on(processes, lambda rank: trained(tmp_path / "several"), 120)
    assert several == [one] * processes
    assert losses_in(tmp_path / "several") == losses_in(tmp_path / "one")
    assert len(losses_in(tmp_path / "one")["metrics_logged"]) == 4
    assert one[3:] == (3 * 17, 1)


class Convolving(nn.Module):
    """Convolutions, whose weights and gradients have the memory format of images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 2), nn.GroupNorm(2, 8), nn.Dropout2d(0.2), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 1)
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs.reshape(-1, 1, 2, 2).to(memory_format=torch.channels_last))
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"}, {"precision": "fp16"}, {"activation_checkpointing": "*"}, {"optimizer": "muon"},
        {"clip_grad_value": 0.1, "clip_grad_norm": None}, {"model": Convolving()}, {"accumulate": 1, "count": 2},
    ],
    ids=["bf16", "fp16", "activation checkpointing", "muon", "clipped values", "convolutions", "no accumulation"],
)  # fmt: skip
def test_other_settings_have_the_bits_of_one_process_too(options: dict[str, Any]):
    (one,) = run_on(1, lambda rank: trained(**options))
    assert run_on(2, lambda rank: trained(**options)) == [one] * 2


def test_the_number_of_virtual_ranks_shows_in_the_bits():
    """So dropout and augmentation are drawn by virtual rank."""
    found = run_on(1, lambda rank: [trained(count=count)[0] for count in (1, 2, 4)])[0]
    assert found[0] != found[1] != found[2] != found[0]


def chain(run: Path, numbers: list[tuple[int, int | None]]) -> list[Any]:
    """The results of runs on these numbers of processes to these iterations, each from where the last one ended."""
    return [run_on(processes, lambda rank, stop=stop: trained(run, stop=stop), 120)[0] for processes, stop in numbers]


@pytest.mark.parametrize(
    "numbers",
    [
        [(2, 3), (1, 7), (2, None)],
        pytest.param([(4, 3), (1, 6), (2, 11), (4, None)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_continues_on_other_numbers_of_processes_with_the_same_bits(
    numbers: list[tuple[int, int | None]], tmp_path: Path
):
    """Stops in the middle of an epoch, of an accumulation, and between two log points."""
    whole = chain(tmp_path / "one", [(1, None)])[0]
    parts = chain(tmp_path / "several", numbers)
    assert parts[0][4] == 1  # gradients wait
    assert parts[-1][0] == whole[0]
    assert [loss for part in parts for loss in part[1]] == whole[1]
    assert parts[-1][2]["train/loss"] == whole[2]["train/loss"]
    assert parts[-1][2]["val/loss"] == whole[2]["val/loss"]
    assert losses_in(tmp_path / "several") == losses_in(tmp_path / "one")


def test_what_is_computed_again_on_another_number_is_compared_with_the_log(tmp_path: Path):
    def again(rank: int) -> Any:
        made = virtual(tmp_path, max_epochs=1)
        made.load_checkpoint(next(each for each in find_checkpoints(tmp_path / "checkpoints") if step_of(each) == 3))
        (recorder,) = (each for each in made.handlers if isinstance(each, EventRecorder))
        check = recorder.resume_check
        made.train()
        assert check is not None
        return check.divergence, check.waiting, check.after_update, check.left_out

    run_on(2, lambda rank: trained(tmp_path, max_epochs=1))
    difference, waiting, compared, left_out = run_on(1, again)[0]
    assert (difference, waiting, left_out) == (None, False, ["batch_fingerprinted"])
    assert compared > 0


class Counting:
    """A mean over the targets above 0, of which a share may have none; its size is on the device."""

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        inputs, targets = batch
        return TrainingBatch(inputs, targets, len(targets), tokens=4 * len(targets), weight=(targets > 0).sum())

    def compute_loss(self, outputs: Tensor, batch: TrainingBatch) -> Tensor:
        counted = batch.targets > 0
        return (outputs - batch.targets)[counted].square().mean()  # nan, if there is none

    def compute_metrics(self, outputs: Tensor, batch: TrainingBatch) -> dict[str, Tensor]:
        return {}


def test_losses_over_targets_are_weighted_by_their_numbers_and_tokens_are_counted():
    def body(rank: int) -> Any:
        made = virtual(None, accumulate=1)
        counting = type(made)(
            net(), made.train_loader, strategy=Counting(), backend=tree(4),
            config=TrainingConfig(
                max_epochs=2, seed=3, optimizer="sgd", learning_rate=0.1, accumulate=Accumulate(tokens=20),
            ),
        )  # fmt: skip
        counting.train()
        return bits_of(counting), counting.state.tokens, counting.state.update

    (one,) = run_on(1, body)
    assert run_on(2, body) == [one] * 2
    assert one[1] == 2 * 17 * 4
    assert all(torch.frombuffer(bytearray(each), dtype=torch.float32).isfinite().all() for each in one[0].values())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_is_that_of_a_run_without_virtual_ranks(accumulate: int):
    def body(rank: int) -> list[float]:
        data = DataLoader(pairs(10), 4, shuffle=True)
        made = [
            make_with(linear().double(), data_of(data), None, backend=each, accumulate=accumulate, clip_grad_norm=0.5)
            for each in (tree(2), None)
        ]
        for each in made:
            each.train()
        first, second = (torch.cat([each.detach().flatten() for each in one.model.parameters()]) for one in made)
        return [float((first - second).abs().max()), float(first.abs().max())]

    def data_of(loader: DataLoader[Any]) -> DataLoader[Any]:
        rows = [(inputs.double(), targets.double()) for inputs, targets in loader.dataset]  # type: ignore[attr-defined]
        return DataLoader(rows, 4, shuffle=True)  # type: ignore[arg-type]

    ((apart, size),) = run_on(1, body)
    assert apart < 1e-14 < size


class Sometimes(nn.Module):
    """A part of it computes for some inputs alone, and one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.always(inputs)
        return found + self.sometimes(inputs) if inputs[0, 0] > 0.5 else found


def test_parameters_that_only_some_shares_use_are_averaged_and_unused_ones_left_alone():
    def body(rank: int) -> Any:
        made = virtual(None, model=Sometimes(), weight_decay=0.1)
        before = {name: each.clone() for name, each in made.model.named_parameters()}
        made.train()
        changed = [name for name, each in made.model.named_parameters() if not torch.equal(each, before[name])]
        return bits_of(made), changed

    (one,) = run_on(1, body)
    assert run_on(2, body) == [one] * 2
    assert one[1] == ["always.weight", "always.bias", "sometimes.weight", "sometimes.bias"]


@pytest.mark.parametrize(
    "kind", [lambda: EMA(0.9), lambda: SWA(after_update=2, every=Every(updates=1))], ids=["EMA", "SWA"]
)
def test_averages_and_random_numbers_of_handlers_are_the_same_too(kind: Callable[[], Any]):
    def body(rank: int) -> Any:
        average = kind()
        made = virtual(None, average)
        drawn: list[float] = []
        made.on(Events.ITERATION_STARTED)(lambda: drawn.append(torch.rand(()).item()))
        made.train()
        return repr(average.state_dict()), drawn

    (one,) = run_on(1, body)
    assert run_on(2, body) == [one] * 2
    assert len(set(one[1])) == 15


def test_another_seed_of_the_run_changes_what_steps_draw_and_not_the_order_of_a_seeded_loader():
    def passed(cursor: DataCursor) -> list[tuple[list[list[float]], int]]:
        shares = list(cursor.begin(loader, 0))
        return [([each.tolist() for each, _ in one.batches], one.seed) for one in shares]

    loader = DataLoader(pairs(16), 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    rank = VirtualRanks(range(2), 2)
    cursor = DataCursor(1, virtual=rank)
    first, fresh = passed(cursor), passed(DataCursor(2, virtual=rank))
    cursor.reset()
    cursor.seed = 2
    assert passed(cursor) == fresh
    assert [rows for rows, _ in first] == [rows for rows, _ in fresh]
    assert not {seed for _, seed in first} & {seed for _, seed in fresh}


class Remembering(nn.Module):
    """A forward pass writes into a buffer, as a running mean does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        found: Tensor = self.inner(inputs)
        return found


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(pairs(8))


def data(batch_size: int | None = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(pairs(16), batch_size, **options)


@pytest.mark.parametrize(
    ("model", "loader", "said"),
    [
        (regression_model, data, r"a running mean of '1' would depend on which shares.*LayerNorm or GroupNorm"),
        (linear, lambda: data(6), r"DataLoader\(batch_size=6.*4 virtual ranks share; choose a multiple"),
        (linear, lambda: data(None), r"batch_size=None"),
        (linear, lambda: DataLoader(Stream(), 4), r"train_loader=DataLoader.*dataset with a length"),
        (linear, lambda: data(sampler=DistributedSampler(pairs(16), 1, 0)), "torch's own order"),
        (linear, lambda: [(torch.ones(4, 4), torch.ones(4, 1))], r"train_loader=list"),
        (lambda: nn.Embedding(4, 1, sparse=True), data, r"has sparse gradients"),
    ],
    ids=["BatchNorm", "batch size", "no batch size", "stream", "DistributedSampler", "list", "sparse"],
)  # fmt: skip
def test_what_has_no_same_bits_is_refused_before_training(model: Any, loader: Any, said: str):
    with pytest.raises(ConfigurationError, match=said):
        make_with(model(), loader(), None, backend=tree(4))


def test_norms_without_running_statistics_are_trained():
    assert make_with(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1)), data(8), None,
                     backend=tree(2)).train()  # fmt: skip


def test_a_buffer_that_a_forward_pass_writes_into_ends_the_run_before_its_first_update():
    made = make_with(Remembering(), data(), None, backend=tree(2))
    with pytest.raises(ConfigurationError, match="buffer 'seen' would depend on which shares a process computes"):
        made.train()
    assert made.state.update == 0


def test_a_number_of_processes_that_does_not_divide_the_virtual_ranks_is_refused():
    def body(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            make_with(linear(), data(), None, backend=tree(1))
        return str(refused.value)

    said = "Topology(virtual=1): cannot be shared out evenly to 2 processes: start one of 1"
    assert [each.value for each in in_processes(body)] == [said] * 2


def test_a_loop_a_compiled_model_and_a_functional_backend_are_refused():
    topology = Topology(virtual=2, reduction="tree")
    config = TrainingConfig(max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"Loop\(virtual=2\): adds up the gradients of the Trainer's steps"):
        Loop(linear(), data(), backend=tree(2), config=config)
    with pytest.raises(ConfigurationError, match=r"TorchBackend\(compile=True\): does not go with virtual ranks"):
        make_with(linear(), data(), None, backend=TorchBackend("cpu", compile=True, topology=topology))
    with pytest.raises(ConfigurationError, match=r"topology=.*functional=True"):
        TorchBackend("cpu", functional=True, topology=topology)


def test_a_run_keeps_its_number_of_virtual_ranks(tmp_path: Path):
    virtual(tmp_path, count=2, max_epochs=1).train()
    saved = max((tmp_path / "checkpoints").iterdir())
    said = r"began with 2 virtual ranks, and this trainer has {}; .*resume with that of the checkpoint, by Topology\(vi"
    with pytest.raises(CheckpointError, match=said.format("4 virtual ranks")):
        virtual(None, count=4).load_checkpoint(saved)
    plain = make_with(net(), data(), None, optimizer="adamw")
    with pytest.raises(CheckpointError, match=said.format("no virtual ranks")):
        plain.load_checkpoint(saved)


def test_processes_with_other_subsets_of_the_data_are_refused():
    def body(rank: int) -> str:
        rows = torch.utils.data.Subset(pairs(16), list(range(rank, 16, 2)))
        with pytest.raises(ConfigurationError) as refused:
            make_with(linear(), DataLoader(rows, 4), None, backend=tree(2))
        return str(refused.value)

    for each in in_processes(body):
        assert "indices of the subset" in each.value, each.error


def test_a_batch_is_a_list_of_shares_for_handlers():
    made = make_with(linear(), data(), None, backend=tree(2), max_epochs=1)
    seen: list[Any] = []
    made.on(Events.ITERATION_STARTED)(lambda: seen.append([len(each[0]) for each in made.state.batch.batches]))
    made.train()
    assert seen == [[2, 2]] * 4
