"""Precision, rates and backends in a run: true norms, counted overflows, exact resume, and no partial restore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import (
    Backend,
    CheckpointError,
    ConfigurationError,
    Events,
    Every,
    GradientInfo,
    ModelState,
    SupervisedStrategy,
    TorchBackend,
    TrainingResult,
)
from pulsetrain.engine.backends.model_store import InPlaceStore
from pulsetrain.engine.distributed.ranks import DataRank
from pulsetrain.engine.losses import mse
from pulsetrain.engine.schedules import Linear
from pulsetrain.engine.step.backend import OptimizerRequest
from pulsetrain.handlers import Checkpointer, LRScheduler
from tests.support.models import loader, regression_model, trainer


def fp16(scale: float = 1024.0) -> TorchBackend:
    return TorchBackend("cpu", precision="fp16", gradient_scale=scale)


def cut(run: Trainer, iteration: int) -> None:
    def pull(engine: Trainer) -> None:
        if engine.state.iteration == iteration:
            raise ZeroDivisionError

    run.add_event_handler(Events.ITERATION_COMPLETED, pull, phase=3)
    with pytest.raises(ZeroDivisionError):
        run.train()


class Overflowing:
    """A loss whose gradients overflow fp16 in the batches of these numbers."""

    def __init__(self, at: set[int]) -> None:
        self.at, self.calls = at, 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        return mse(outputs.float(), targets) * (1e30 if torch.is_grad_enabled() and self.calls in self.at else 1.0)


def metrics_of(run: Trainer) -> list[dict[str, float]]:
    logged: list[dict[str, float]] = []
    run.add_event_handler(Events.METRICS_LOGGED, lambda engine, event: logged.append(dict(event.payload.metrics)))
    run.train()
    return logged


def test_norms_are_those_of_the_unscaled_gradients_and_clipping_is_by_them():
    config = {"max_iterations": 20, "clip_grad_norm": 0.5, "learning_rate": 0.05}
    full = metrics_of(trainer(config))
    half = metrics_of(trainer(config, backend=fp16()))
    for mine, theirs in zip(half, full, strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=0.05)


@pytest.mark.slow
def test_an_fp16_run_resumed_equals_the_uninterrupted_one_in_scale_counts_and_announcements(tmp_path: Path):
    def make(folder: str) -> tuple[Trainer, list[Any]]:
        run = trainer(
            {"max_iterations": 20, "accumulate": 2, "clip_grad_norm": 1.0, "optimizer": "adamw"},
            strategy=SupervisedStrategy(Overflowing({3, 12})),
            backend=fp16(),
            handlers=[Checkpointer(tmp_path / folder, every=Every(iterations=1), keep_last=30)],
        )
        seen: list[Any] = []
        run.add_event_handler(
            Events.METRICS_LOGGED | Events.ANOMALY_DETECTED,
            lambda engine, event: seen.append((event.iteration, event.type, _exact(event.payload))),
        )
        return run, seen

    def _exact(payload: Any) -> Any:
        if not hasattr(payload, "metrics"):
            return payload.value
        # as text: nan, which the norm of an overflow is, does not equal itself
        return {name: repr(value) for name, value in payload.metrics.items() if not name.endswith("per_second")}

    whole, expected = make("whole")
    whole.train()
    assert whole.backend.skipped_updates() == 2
    begun, before = make("cut")
    cut(begun, 7)  # after the first overflow, which was announced at iteration 5
    again, after = make("cut")
    again.strategy._loss.calls = 7  # type: ignore[attr-defined]
    again.train(resume="latest")
    assert before + after == expected
    assert again.backend.state_dict() == whole.backend.state_dict()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_a_second_run_counts_from_0_and_keeps_the_scale():
    run = trainer({"max_iterations": 40}, backend=fp16(2.0**24))
    logged: list[dict[str, float]] = []
    run.add_event_handler(Events.METRICS_LOGGED, lambda engine, event: logged.append(dict(event.payload.metrics)))
    run.train()
    assert logged[-1]["skipped_updates"] > 1
    scale = run.backend.scaler.get_scale()  # type: ignore[union-attr]
    logged.clear()
    run.train()
    assert {metrics["skipped_updates"] for metrics in logged} == {0.0}
    assert run.backend.scaler.get_scale() == scale  # type: ignore[union-attr]
    again = trainer(
        {"max_iterations": 7}
    )  # 5 is a log point, 7 the end: what was not taken of the first run is forgotten
    again.train()
    again.reporter.losses.add(torch.tensor(1e9), 1)  # not taken in the first run, it is forgotten in the second
    assert again.train()["train/loss"][-1] < 1e6


def test_left_out_updates_are_logged_as_a_warning():
    with structlog.testing.capture_logs() as logs:
        trainer({"max_iterations": 5}, backend=fp16(2.0**100)).train()
    reported = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["skipped"] for entry in reported] == [5]


@pytest.mark.parametrize("given", ["name", "instance"])
def test_fused_sgd_survives_a_skipped_first_update(given: str):
    torch.utils.deterministic.fill_uninitialized_memory = True
    model = regression_model()
    optimizer: Any = "sgd"
    if given == "instance":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    run = trainer({"max_epochs": 4, "learning_rate": 0.01}, model=model, optimizer=optimizer, backend=fp16(2.0**22))
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with nan
    try:
        history = run.train()
    finally:
        torch.use_deterministic_algorithms(False)
    assert run.optimizer.param_groups[0]["fused"]
    assert run.backend.skipped_updates() > 0
    assert all(bool(torch.isfinite(parameter).all()) for parameter in run.model.parameters())
    assert history["train/loss"][-1] < history["train/loss"][0]


def test_fused_sgd_makes_the_same_steps_as_torchs_own_scaler_where_nothing_overflows():
    def weights(fused: bool) -> torch.Tensor:
        model = regression_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
        trainer({"max_iterations": 10}, model=model, optimizer=optimizer, backend=fp16(2.0)).train()
        return model[0].weight.detach()  # type: ignore[union-attr]

    torch.testing.assert_close(weights(fused=True), weights(fused=False), rtol=1e-5, atol=1e-7)


def test_dampening_with_a_fused_kernel_is_refused_for_fp16():
    model = regression_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.5, fused=True)
    run = trainer({"max_iterations": 2}, model=model, optimizer=optimizer, backend=fp16())
    with pytest.raises(ConfigurationError, match=r"SGD\(dampening=0.5, fused=True\): .*fp16 .*pass fused=False"):
        run.train()


# ------------------------------------------------------------------------------------------- refused restores


def as_it_was(run: Trainer) -> dict[str, Any]:
    return {
        "weights": {name: value.clone() for name, value in run.model.state_dict().items()},
        "optimizer": len(run.optimizer.state),
        "backend": run.backend.state_dict(),
        "iteration": run.state.iteration,
    }


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert all(torch.equal(mine["weights"][name], value) for name, value in theirs["weights"].items())
    assert {k: v for k, v in mine.items() if k != "weights"} == {k: v for k, v in theirs.items() if k != "weights"}


def saved_by(tmp_path: Path, config: dict[str, Any], **arguments: Any) -> Path:
    run = trainer({"max_iterations": 3, **config}, handlers=[Checkpointer(tmp_path)], **arguments)
    run.train()
    latest: Path = run.handlers[0].manager.get_latest()
    return latest


def test_a_refused_precision_leaves_the_trainer_as_it_was(tmp_path: Path):
    path = saved_by(tmp_path, {"precision": "fp16", "device": "cpu"})
    torch.manual_seed(5)
    run = trainer({"precision": "bf16", "device": "cpu"}, model=nn.Sequential(*regression_model()))
    with torch.no_grad():
        run.model[0].weight.add_(1.0)  # type: ignore[operator, union-attr]
    before = as_it_was(run)
    with pytest.raises(CheckpointError, match="'fp16'"):
        run.load_checkpoint(path)
    assert_same(as_it_was(run), before)


def test_swapped_halves_of_muon_are_refused_before_anything_is_loaded(tmp_path: Path):
    def options(first: bool) -> dict[str, Any]:
        return {"muon_rule": lambda name, parameter: parameter.ndim == 2 and name.startswith("0") == first}

    path = saved_by(tmp_path, {"optimizer": "muon", "optimizer_options": options(True)})
    run = trainer({"optimizer": "muon", "optimizer_options": options(False)})
    with torch.no_grad():
        run.model[0].weight.add_(1.0)  # type: ignore[operator, union-attr]
    before = as_it_was(run)
    with pytest.raises(CheckpointError):
        run.load_checkpoint(path)
    assert_same(as_it_was(run), before)


def test_a_handler_that_refuses_leaves_the_gradient_scale_alone(tmp_path: Path):
    folder = tmp_path / "a"
    config = {"precision": "fp16", "device": "cpu", "schedule": "linear", "max_iterations": 3}
    saver = trainer(config, handlers=[Checkpointer(folder)], strategy=SupervisedStrategy(Overflowing({1})))
    saver.train()
    run = trainer({**config, "schedule": "cosine"})
    before = as_it_was(run)
    with pytest.raises(CheckpointError):
        run.load_checkpoint(saver.handlers[0].manager.get_latest())
    assert_same(as_it_was(run), before)


def test_the_state_of_an_older_version_says_what_to_do():
    run = trainer()
    with pytest.raises(CheckpointError, match=r"of format 1, this version reads 3 to 5; .*new run from its weights"):
        run.load_checkpoint_state({"format": 1})


# -------------------------------------------------------------------------------------------- shared objects


def test_a_backend_serves_one_trainer():
    backend = TorchBackend("cpu", precision="bf16")
    first = trainer(backend=backend)
    with pytest.raises(ConfigurationError, match="serves another trainer already"):
        trainer(backend=backend)
    assert first.backend.precision.name == "bf16"


def test_a_second_trainer_leaves_the_activation_checkpointing_of_a_model_alone():
    model = regression_model()
    trainer({"activation_checkpointing": "0"}, model=model)
    trainer(model=model)
    assert "forward" in model[0].__dict__  # type: ignore[operator]


def test_weights_in_half_precision_are_refused_for_fp16_when_the_trainer_is_made():
    with pytest.raises(ConfigurationError, match=r"has weights in float16.*leave the weights in float32"):
        trainer(model=regression_model().half(), backend=fp16())


def test_a_strategy_looks_at_the_first_batches_of_each_run_and_each_validation():
    bad = [(torch.ones(2, 4), torch.tensor([[1.0], [float("nan")]]))]
    strategy = SupervisedStrategy("mse")
    first = trainer({"max_iterations": 3}, strategy=strategy, val_loader=loader(8))
    first.train()
    with pytest.raises(ValueError, match=r"mse\(targets\[1, 0\]=nan\)"):
        trainer({"max_iterations": 1}, strategy=strategy, train_loader=bad).train()
    with pytest.raises(ValueError, match=r"mse\(targets\[1, 0\]=nan\)"):
        first.evaluation.run("val", bad)


def test_bad_targets_after_the_first_batch_are_found_until_the_first_update():
    good = (torch.ones(2, 4), torch.ones(2, 1))
    bad = (torch.ones(2, 4), torch.tensor([[1.0], [float("nan")]]))
    run = trainer({"accumulate": 2}, train_loader=[good, bad])
    before = {name: value.clone() for name, value in run.model.named_parameters()}
    with pytest.raises(ValueError, match=r"mse\(targets\[1, 0\]=nan\)"):
        run.train()
    assert all(torch.equal(before[name], value) for name, value in run.model.named_parameters())


# ------------------------------------------------------------------------------------------------------ rates


def test_rates_that_are_tensors_are_reported_as_they_were_in_each_update():
    model = regression_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    reported: list[float] = []
    run = trainer({"max_iterations": 4}, model=model, optimizer=optimizer, handlers=[LRScheduler(Linear(0.1, 4))])
    run.add_event_handler(
        Events.OPTIMIZER_STEP_COMPLETED, lambda engine, event: reported.append(event.payload.learning_rates[0])
    )
    run.train()
    assert reported == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert all(type(rate) is float for rate in reported)


def test_rates_that_differ_from_the_checkpoints_are_reported_unless_a_schedule_sets_them(tmp_path: Path):
    path = saved_by(tmp_path, {"learning_rate": 0.01})
    run = trainer({"learning_rate": 0.5})
    with structlog.testing.capture_logs() as logs:
        run.load_checkpoint(path)
    reported = [entry for entry in logs if "configured" in entry]
    assert [(entry["checkpoint"], entry["configured"]) for entry in reported] == [([0.01], [0.5])]
    with structlog.testing.capture_logs() as logs:
        trainer({"learning_rate": 0.01}).load_checkpoint(path)
    assert not [entry for entry in logs if "configured" in entry]


# --------------------------------------------------------------------------------------- a backend of one's own


class Plain:
    """The methods that the backend protocol requires, and nothing else."""

    skips_updates = builds_model = False
    data_rank = DataRank()
    virtual_ranks = None
    device = batch_device = torch.device("cpu")

    def configure(self, settings: Any) -> None:
        self.max_norm = settings.clip_grad_norm

    def release(self) -> None: ...

    def make_store(self, model: Any, optimizer: OptimizerRequest, strategy: Any) -> InPlaceStore:
        return InPlaceStore(self, model, optimizer.build(model))

    def init(self, model: Any, optimizer: Any) -> ModelState:
        return ModelState(model, optimizer)

    def prepare_batch(self, batch: Any, strategy: Any) -> Any:
        return strategy.prepare_batch(batch)

    def forward_backward(
        self, state: ModelState, batch: Any, strategy: Any, scale: Any = 1.0, waiting: GradientInfo | None = None
    ) -> GradientInfo:
        loss = strategy.compute_loss(state.weights(batch.inputs), batch)
        (loss * scale).backward()
        return GradientInfo(loss.detach())

    def all_reduce_gradients(self, gradients: GradientInfo) -> GradientInfo:
        return gradients

    def finish_gradients(
        self, state: ModelState, gradients: GradientInfo, correction: Any = 1.0, measure: bool = True
    ) -> GradientInfo:
        for parameter in state.weights.parameters():
            parameter.grad.mul_(correction)
        norm = nn.utils.get_total_norm([parameter.grad for parameter in state.weights.parameters()])
        return replace(gradients, grad_norm=norm)

    def apply_gradients(
        self, state: ModelState, gradients: GradientInfo, skip: Any = None, donate: bool = False
    ) -> ModelState:
        nn.utils.clip_grads_with_norm_(state.weights.parameters(), self.max_norm, gradients.grad_norm)
        state.optimizer.step()
        state.optimizer.zero_grad()
        return state

    def discard_gradients(self, state: ModelState) -> None:
        state.optimizer.zero_grad()

    def skipped_updates(self) -> int:
        return 0

    def begin_run(self) -> None: ...

    def train_step(self, state: ModelState, batch: Any, strategy: Any, donate: bool = False) -> TrainingResult:
        gradients = self.finish_gradients(state, self.forward_backward(state, batch, strategy))
        metrics = {"loss": gradients.loss, "grad_norm": gradients.grad_norm}
        return TrainingResult(metrics, self.apply_gradients(state, gradients))

    def eval_step(self, state: ModelState, batch: Any, strategy: Any) -> Any:
        with torch.no_grad():
            outputs = state.weights(batch.inputs)
            return outputs, {"loss": strategy.compute_loss(outputs, batch)}

    def to_torch(self, value: Any) -> Any:
        return value

    def environment(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_backend_written_to_the_protocol_trains_as_the_shipped_one(tmp_path: Path, accumulate: int):
    def run(backend: Backend, folder: str) -> Trainer:
        made = Trainer(
            regression_model(),
            loader(),
            loader(8),
            strategy=SupervisedStrategy("mse"),
            backend=backend,
            config=TrainingConfig(
                max_epochs=2, accumulate=accumulate, clip_grad_norm=1.0, optimizer="sgd", learning_rate=0.01
            ),
            handlers=[Checkpointer(tmp_path / folder)],
        )
        made.train()
        return made

    assert run(Plain(), "plain").history.get_history() == run(TorchBackend("cpu"), "torch").history.get_history()
