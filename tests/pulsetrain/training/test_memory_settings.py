"""Settings of memory in whole runs: the same weights bit for bit, exact resume, and refusals before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain import Loop, Trainer, TrainingConfig, verify
from pulsetrain.engine import (
    ActivationCheckpointing,
    ActivationOffload,
    ConfigurationError,
    Every,
    OptimizerOffload,
    SupervisedStrategy,
    TorchBackend,
)
from pulsetrain.engine.memory.activation_offload import HostMemory
from pulsetrain.handlers import EMA, Checkpointer, EventRecorder, Fingerprints, LRFinder, LRScheduler, NaNGuard
from tests.support.largest_file import largest_file
from tests.support.models import loader, regression_model, trainer
from tests.support.ranks import in_processes
from tests.support.runs import cut_after, guarded_data
from tests.support.runs_of_ranks import double, linear, make_with, weights_of


def offload(to: str, folder: Path) -> OptimizerOffload:
    return (
        OptimizerOffload(to="disk", folder=str(folder), part_bytes=64) if to == "disk" else OptimizerOffload(to="host")
    )


def state_of(run: Trainer) -> list[Tensor]:
    """The weights, and the optimizer's state."""
    values = [each for state in run.optimizer.state_dict()["state"].values() for each in state.values()]
    return [each.clone() for each in (*run.model.state_dict().values(), *values)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": "adamw"},
    "clipped": {"optimizer": "adamw", "clip_grad_norm": 0.1, "schedule": "cosine", "warmup_steps": 3},
    "accumulated": {"optimizer": "sgd", "accumulate": 3, "clip_grad_value": 0.01},
    "not fused": {"optimizer": "adam", "optimizer_options": {"fused": False}, "schedule": "linear"},
    "bf16": {"optimizer": "adamw", "precision": "bf16", "no_decay": "auto", "weight_decay": 0.1},
    "fp16": {"optimizer": "sgd", "precision": "fp16"},
    "rmsprop": {"optimizer": "rmsprop", "accumulate": 2},
}


def run_of(settings: dict[str, Any], *handlers: Any, rows: tuple[int, ...] = (9, 33), **memory: Any) -> Trainer:
    """A run of 30 batches; two of them have gradients that are not finite, whose updates are skipped."""
    data = DataLoader(guarded_data(rows, scale=float("inf")), 4, shuffle=True)
    return trainer(
        {"max_iterations": 30, **settings, **memory},
        model=regression_model(dropout=0.3),
        train_loader=data,
        handlers=[NaNGuard(), *handlers],
    )


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("to", ["disk", "host"])
def test_optimizer_state_elsewhere_changes_no_bit(name: str, to: str, tmp_path: Path):
    wanted, found = run_of(SETTINGS[name]), run_of(SETTINGS[name], optimizer_offload=offload(to, tmp_path))
    for run in (wanted, found):
        run.train()
    assert same(state_of(found), state_of(wanted))
    assert found.history.get_history() == wanted.history.get_history()


@pytest.mark.parametrize(
    "memory",
    [
        {"activation_offload": ActivationOffload(min_bytes=0)},
        {"activation_checkpointing": ActivationCheckpointing("*", every=2)},
        {"activation_checkpointing": ActivationCheckpointing("[134]", keep=["matmul"])},
        {
            "activation_checkpointing": "*",
            "activation_offload": ActivationOffload(min_bytes=0),
            "optimizer_offload": "host",
        },
    ],
    ids=["offload", "every second", "selective", "all"],
)
@pytest.mark.parametrize("name", ["clipped", "accumulated", "bf16"])
def test_activations_elsewhere_or_computed_again_change_no_bit(name: str, memory: dict[str, Any]):
    wanted, found = run_of(SETTINGS[name]), run_of(SETTINGS[name], **memory)
    for run in (wanted, found):
        run.train()
    assert same(state_of(found), state_of(wanted))


class Noting(HostMemory):
    """Notes the shapes that it is given."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def pack(self, tensor: Tensor) -> Tensor:
        self.shapes.append(tuple(tensor.shape))
        return super().pack(tensor)


def test_the_forward_pass_and_the_loss_of_a_run_are_inside():
    policy = Noting()
    run = trainer(
        {"max_iterations": 1, "activation_offload": ActivationOffload(min_bytes=0, policy=policy)},
        model=nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)),
    )
    run.train()
    assert (4, 3) in policy.shapes  # of the model
    assert (4, 1) in policy.shapes  # of the loss


@pytest.mark.parametrize(("before", "after"), [("disk", "disk"), ("disk", None), (None, "disk"), ("host", "disk")])
def test_a_resumed_run_is_the_same_bit_for_bit(before: str | None, after: str | None, tmp_path: Path):
    def begin(folder: Path, to: str | None) -> Trainer:
        memory = {} if to is None else {"optimizer_offload": offload(to, tmp_path / "state")}
        saving = Checkpointer(folder, every=Every(iterations=4), keep_last=9)
        return run_of(SETTINGS["clipped"], EMA(0.9), saving, **memory)

    whole = begin(tmp_path / "whole", None)
    whole.train()
    cut_after(begin(tmp_path / "cut", before), 13)
    resumed = begin(tmp_path / "cut", after)
    resumed.train(resume="latest")
    assert resumed.state.iteration == whole.state.iteration == 30
    assert same(state_of(resumed), state_of(whole))


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_holds_the_state_as_it_was_when_it_was_saved(background: bool, tmp_path: Path):
    def begin(folder: Path, **memory: Any) -> Trainer:
        saving = Checkpointer(folder, every=Every(iterations=10), background=background, at_end=False)
        return run_of(SETTINGS["plain"], saving, EventRecorder(folder), Fingerprints(Every(updates=5)), **memory)

    with structlog.testing.capture_logs() as logs:
        begin(tmp_path / "a", optimizer_offload=offload("disk", tmp_path)).train()
    assert not [each for each in logs if "in no checkpoint" in each["event"]]
    begin(tmp_path / "b").train()
    digests = []
    for name in ("a", "b"):
        resumed = begin(tmp_path / name)
        resumed.load_checkpoint(tmp_path / name)
        digests.append(state_of(resumed))
    assert same(*digests)


def test_a_recorded_run_is_verified(tmp_path: Path):
    def build(folder: Path) -> Trainer:
        saving = [EventRecorder(folder), Checkpointer(folder, every=Every(iterations=8))]
        memory = {"optimizer_offload": offload("disk", tmp_path / "state"), "activation_offload": "host"}
        return run_of(SETTINGS["accumulated"], Fingerprints(Every(updates=2)), *saving, **memory)

    build(tmp_path / "run").train()
    found = verify(tmp_path / "run", build)
    assert found, str(found)


def test_a_trial_of_rates_leaves_the_state_as_it_was(tmp_path: Path):
    def build(**memory: Any) -> Trainer:
        return run_of({**SETTINGS["plain"], "schedule": None}, LRFinder(iterations=20), rows=(), **memory)

    wanted, found = build(), build(optimizer_offload=offload("disk", tmp_path))
    for run in (wanted, found):
        run.train()
    assert same(state_of(found), state_of(wanted))


def test_an_optimizer_with_a_scheduler_of_torchs_may_be_given(tmp_path: Path):
    def build(**memory: Any) -> Trainer:
        model = regression_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
        return trainer(
            {"max_epochs": 1, "schedule": None, **memory}, model=model, optimizer=optimizer, handlers=[schedule]
        )

    wanted, found = build(), build(optimizer_offload=offload("disk", tmp_path))
    for run in (wanted, found):
        run.train()
    assert same(state_of(found), state_of(wanted))
    assert found.learning_rates == wanted.learning_rates != (0.01,)


def test_several_optimizers_in_turns(tmp_path: Path):
    class InTurns:
        def prepare_batch(self, batch: Any) -> Any:
            from pulsetrain.engine import TrainingBatch

            return TrainingBatch(batch[0], batch[1], len(batch[0]))

        def compute_losses(self, model: Any, batch: Any) -> Iterator[tuple[str, Tensor]]:
            output = model["actor"](batch.inputs)
            yield "critic", (model["critic"](output.detach()) - batch.targets).square().mean()
            yield "actor", (model["critic"](output) - batch.targets).square().mean()

    def build(**memory: Any) -> Trainer:
        torch.manual_seed(0)
        modules = {"actor": nn.Sequential(nn.Linear(4, 8), nn.Tanh()), "critic": nn.Linear(8, 1)}
        config = TrainingConfig(max_epochs=2, seed=3, learning_rate=0.01, **memory)
        return Trainer(modules, loader(), strategy=InTurns(), config=config)

    wanted, policy = build(), Noting()
    found = build(
        optimizer_offload=offload("disk", tmp_path), activation_offload=ActivationOffload(min_bytes=0, policy=policy)
    )
    for run in (wanted, found):
        run.train()
    assert same(state_of(found), state_of(wanted))
    assert (4, 8) in policy.shapes
    assert all(each is slots[name] for slots, values in _kept(found) for name, each in values.items() if each.dim())


def _kept(run: Any) -> list[tuple[Any, Any]]:
    """Where each of several optimizers keeps the state of its parameters, and that state."""
    return [(part._slots[each], part.state[each]) for part in run.optimizer.parts.values() for each in part.state]


def test_a_loop_by_hand(tmp_path: Path):
    def trained(**memory: Any) -> list[Tensor]:
        config = TrainingConfig(max_epochs=2, seed=4, learning_rate=0.01, optimizer="adamw", **memory)
        loop = Loop(regression_model(), loader(), strategy=SupervisedStrategy("mse"), config=config)
        for inputs, targets in loop.batches():
            nn.functional.mse_loss(loop.model(inputs), targets).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return state_of(loop)

    assert same(trained(optimizer_offload=offload("disk", tmp_path)), trained())
    with pytest.raises(ConfigurationError, match=r"activation_offload=.*has no effect in a Loop"):
        trained(activation_offload="host")


def test_two_processes_keep_the_state_of_their_copies_elsewhere(tmp_path: Path):
    def run(rank: int, **memory: Any) -> Any:
        made = make_with(linear().double(), DataLoader(double(18), 4), None, optimizer="adamw", **memory)
        made.train()
        return weights_of(made)

    memory = {"optimizer_offload": offload("disk", tmp_path), "activation_offload": ActivationOffload(min_bytes=0)}
    wanted = in_processes(run)
    found = in_processes(lambda rank: run(rank, **memory))
    assert [each.error for each in found] == ["", ""]
    assert [each.value for each in found] == [each.value for each in wanted]


# ------------------------------------------------------------------------------------------------- where, and refusals


def folder_of(run: Trainer) -> str:
    return str(run.optimizer._memory.folder)  # type: ignore[attr-defined]


def test_the_run_folder_is_where_it_is_kept(tmp_path: Path):
    build: Callable[..., Trainer] = lambda **more: trainer({"optimizer_offload": "disk", **more})  # noqa: E731
    assert folder_of(build(run_dir=str(tmp_path))) == str(tmp_path)
    given = OptimizerOffload(folder=str(tmp_path / "own"))
    assert folder_of(build(run_dir=str(tmp_path), optimizer_offload=given)) == str(tmp_path / "own")
    assert Path(folder_of(build(run_dir="memory://runs"))).is_dir()
    assert Path(folder_of(build())).is_dir()


def test_a_full_disk_is_refused_before_training(tmp_path: Path):
    model, data = regression_model(), loader()
    rule = r"OptimizerOffload\(folder=.*no room there for 1 MiB"
    with largest_file(8192), pytest.raises(ConfigurationError, match=rule):
        trainer({"optimizer_offload": offload("disk", tmp_path)}, model=model, train_loader=data)
    trainer({"optimizer_offload": offload("disk", tmp_path), "max_epochs": 1}, model=model, train_loader=data).train()


@pytest.mark.parametrize("setting", ["activation_offload", "optimizer_offload"])
def test_backends_that_compute_with_values_refuse(setting: str):
    with pytest.raises(ConfigurationError, match=rf"{setting}=.*works in place; leave it out"):
        trainer({setting: "host"}, backend=TorchBackend("cpu", functional=True))


def test_activations_of_a_compiled_model_are_refused():
    with pytest.raises(ConfigurationError, match=r"activation_offload=.*compile=True\): torch.compile decides itself"):
        trainer({"activation_offload": "host", "compile": True})


def test_the_kind_of_optimizer_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"optimizer_offload=.*MuonWithAdamW cannot update one parameter"):
        trainer(
            {"optimizer": "muon", "optimizer_offload": offload("disk", tmp_path)}, model=nn.Sequential(nn.Linear(4, 4))
        )
