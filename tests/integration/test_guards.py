"""NaNGuard and LossSpikeGuard in a trainer's run: skipped updates, reported anomalies, and rewinds."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pulsetrain import Trainer
from pulsetrain.engine import AnomalyDetected, Engine, Events, Every, Phase
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import Checkpointer, EventRecorder, LossSpikeGuard, NaNGuard
from tests.support.runs import guarded_data, guarded_run


class Syncs(TorchDispatchMode):
    """Counts the operations that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def anomalies(trainer: Trainer) -> list[AnomalyDetected]:
    found: list[AnomalyDetected] = []
    trainer.add_event_handler(Events.ANOMALY_DETECTED, lambda engine, event: found.append(event.payload))
    return found


def states(trainer: Trainer) -> list[torch.Tensor]:
    optimizer = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return [value.clone() for value in (*trainer.model.state_dict().values(), *optimizer)]


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "rmsprop", "muon"])
def test_a_run_with_a_bad_batch_ends_as_one_without_it(optimizer: str) -> None:
    guard = NaNGuard()
    guarded = guarded_run(guard, dataset=guarded_data((13,)), optimizer=optimizer, max_updates=12, max_epochs=None)
    guarded.train()
    left_out = guarded_run(
        dataset=guarded_data((13,)), optimizer=optimizer, max_updates=11, max_epochs=None, skip_batches=[(4, 4)]
    )
    left_out.train()
    for name, value in guarded.model.state_dict().items():
        if "num_batches" not in name:  # of a BatchNorm, which counts the batch
            assert torch.equal(value, left_out.model.state_dict()[name]), name
    assert guard.skipped == 1


def test_the_unguarded_run_is_lost() -> None:
    trainer = guarded_run(dataset=guarded_data((13,)))
    trainer.train()
    assert not any(p.isfinite().all() for p in trainer.model.parameters())


def test_weights_optimizer_and_buffers_stay_as_they_were() -> None:
    guard = NaNGuard()
    trainer = guarded_run(guard, dataset=guarded_data((13,)))
    seen: dict[int, list[torch.Tensor]] = {}
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: seen.__setitem__(engine.state.iteration, states(engine))
    )
    trainer.train()
    counts = [index for index, value in enumerate(seen[3]) if value.dtype == torch.int64]
    for index, (before, after) in enumerate(zip(seen[3], seen[4], strict=True)):
        assert torch.equal(before, after) or index in counts
    assert any(not torch.equal(a, b) for a, b in zip(seen[4], seen[5], strict=True))


def test_it_reports_the_rows_and_which_of_them_are_bad() -> None:
    trainer = guarded_run(NaNGuard(), dataset=guarded_data((13,)), shuffle=True)
    found = anomalies(trainer)
    rows: dict[int, list[int]] = {}
    trainer.add_event_handler(
        Events.ITERATION_STARTED,
        lambda engine: rows.__setitem__(engine.state.iteration, engine.data.rows(engine.state.iteration)),
    )
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    at = next(iteration for iteration, batch in rows.items() if 13 in batch)
    assert [(a.kind, a.at_iteration, list(a.batch_indices)) for a in found] == [("nan_gradient", at, rows[at])]
    assert [(line["rows"], line["rows_not_finite"]) for line in logs if "was skipped" in line["event"]] == [
        (rows[at], [13])
    ]


def test_accumulated_batches_are_reported_together() -> None:
    trainer = guarded_run(NaNGuard(), dataset=guarded_data((13,)), accumulate=4)
    found = anomalies(trainer)
    trainer.train()
    assert [a.batch_indices for a in found] == [tuple(range(16))]


def test_nothing_waits_for_the_device_between_two_looks() -> None:
    trainer = guarded_run(NaNGuard(every=Every(iterations=10**6)), dataset=guarded_data((13,)), log_every_n_steps=10**6)
    syncs: list[int] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        syncs.append(mode.count)

    with Syncs() as mode:
        trainer.train()
    assert syncs[-1] == syncs[1]  # the first update looks at values


def test_the_host_looks_at_the_cadence_and_at_the_end() -> None:
    trainer = guarded_run(NaNGuard(every=Every(iterations=6)), dataset=guarded_data((13, 61)))
    at: list[int] = []
    trainer.add_event_handler(Events.ANOMALY_DETECTED, lambda engine: at.append(engine.state.iteration))
    trainer.train()
    assert at == [6, 16]


def test_the_policy_stop_ends_the_run_with_good_weights() -> None:
    trainer = guarded_run(NaNGuard("stop", Every(iterations=1)), dataset=guarded_data((13,)))
    trainer.train()
    assert trainer.state.iteration == 4
    assert "gradient of iteration 4 is not finite" in str(trainer.state.stop_reason)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_too_many_in_a_row_end_the_run_whatever_the_policy() -> None:
    trainer = guarded_run(
        NaNGuard(every=Every(iterations=1), max_in_a_row=3), dataset=guarded_data(tuple(range(16, 64)))
    )
    trainer.train()
    assert trainer.state.iteration == 7
    assert "3 updates in a row" in str(trainer.state.stop_reason)


def test_good_updates_between_bad_ones_break_the_row() -> None:
    trainer = guarded_run(NaNGuard(every=Every(iterations=1), max_in_a_row=2), dataset=guarded_data((1, 9, 17, 25)))
    trainer.train()
    assert trainer.state.stop_reason is None


def test_rewind_goes_back_and_leaves_the_batch_out(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, every=Every(iterations=2), keep_last=9)
    trainer = guarded_run(NaNGuard("rewind", Every(iterations=3)), saver, dataset=guarded_data((13,)))
    trainer.train()
    assert trainer.rewinds == 1
    assert trainer.state.stop_reason is None
    plain = guarded_run(dataset=guarded_data((13,)), skip_batches=[(4, 4)])
    plain.train()
    assert trainer.state.iteration == plain.state.iteration
    for a, b in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_resumed_after_a_rewind_leaves_the_batch_out_too(tmp_path: Path) -> None:
    def begin(bound: int, folder: Path) -> Trainer:
        saver = Checkpointer(folder, every=Every(iterations=2), keep_last=9)
        guard = NaNGuard("rewind", Every(iterations=3))
        # a second pass reaches the bad row again: batch numbers, not rows, are left out
        return guarded_run(
            guard, saver, dataset=guarded_data((13,)), max_iterations=bound, max_epochs=None, optimizer="sgd"
        )

    whole = begin(14, tmp_path / "whole")
    whole.train()
    begin(8, tmp_path / "parts").train()
    parts = begin(14, tmp_path / "parts")
    parts.train(resume="latest")
    assert parts.rewinds == whole.rewinds == 1
    for a, b in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_a_checkpoint_before_it_rewind_stops_and_says_so(tmp_path: Path) -> None:
    trainer = guarded_run(NaNGuard("rewind", Every(iterations=1)), Checkpointer(tmp_path), dataset=guarded_data((1,)))
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    assert "it cannot return to a checkpoint" in str(trainer.state.stop_reason)
    assert any("no checkpoint before that iteration" in str(line.get("reason")) for line in logs)


def test_going_back_too_often_ends_the_run(tmp_path: Path) -> None:
    guard = NaNGuard("rewind", Every(iterations=1), max_rewinds=2)
    trainer = guarded_run(
        guard, Checkpointer(tmp_path, every=Every(iterations=1)), dataset=guarded_data((13, 21, 29, 37))
    )
    trainer.train()
    assert trainer.rewinds == 2
    assert "has been rewound 2 times already" in str(trainer.state.stop_reason)


def test_skipped_updates_not_yet_reported_survive_a_resume(tmp_path: Path) -> None:
    def begin(bound: int) -> tuple[Trainer, NaNGuard]:
        guard = NaNGuard(every=Every(iterations=100))
        saver = Checkpointer(tmp_path, every=Every(iterations=5))
        return guarded_run(guard, saver, dataset=guarded_data((13,)), max_iterations=bound, max_epochs=None), guard

    trainer, _ = begin(9)

    @trainer.on(Events.ITERATION_STARTED(once=6))
    def fail() -> None:
        raise RuntimeError("the power went")

    with pytest.raises(RuntimeError, match="the power went"):
        trainer.train()
    again, guard = begin(9)
    found = anomalies(again)
    again.train(resume="latest")
    assert [a.at_iteration for a in found] == [4]
    assert guard.skipped == 1


def test_fp16_is_left_to_its_scaler_and_reported_as_well() -> None:
    guard = NaNGuard(every=Every(iterations=1))
    trainer = guarded_run(guard, dataset=guarded_data((13,)), precision="fp16")
    trainer.train()
    assert guard.skipped >= 1
    assert trainer.backend.skipped_updates() >= 1
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"policy='halt'.*rewind.*skip.*stop"):
        NaNGuard("halt")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_in_a_row=0"):
        NaNGuard(max_in_a_row=0)
    with pytest.raises(TypeError, match="every=5"):
        NaNGuard(every=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"NaNGuard.attach\(.*cannot skip an update; attach it to a Trainer"):
        NaNGuard().attach(Engine(lambda engine, batch: None))
    with pytest.raises(ConfigurationError, match="threshold=0"):
        LossSpikeGuard(threshold=0)
    with pytest.raises(ConfigurationError, match="window=2"):
        LossSpikeGuard(window=2)
    with pytest.raises(ConfigurationError, match=r"policy=.rewind.*cannot return to a checkpoint.*choose .stop"):
        LossSpikeGuard(policy="rewind").attach(Engine(lambda engine, batch: None))
    guarded_run(EventRecorder(tmp_path)).train()
    with pytest.raises(RecordingError, match="model"):
        NaNGuard().attach(Replay(tmp_path))


def test_a_guard_that_has_nothing_to_watch_says_so_once() -> None:
    def said(metric: str, values: list[dict[str, float]]) -> list[dict[str, object]]:
        engine = Engine(lambda engine, batch: batch)
        LossSpikeGuard(metric=metric, every=Every(iterations=2)).attach(engine)
        with structlog.testing.capture_logs() as logs:
            engine.run(values, max_epochs=2)
        return [dict(line) for line in logs if "nothing to watch" in line["event"]]

    both = {"loss": 1.0, "kl": 0.1}
    (line,) = said("los", [both] * 5)
    assert (line["metric"], line["returned"]) == ("los", ["kl", "loss"])
    assert said("kl", [both] * 5) == said("train_loss", [both] * 5) == []
    assert said("train/loss", [{"kl": 0.1}] * 3 + [both]) != [], "the first look sees two steps without one"
    assert said("loss", [both] + [{"kl": 0.1}] * 9) == []
    assert said("loss", [{"loss": math.nan}] + [{"kl": 0.1}] * 9) == []
    assert said("loss", [{}] * 2)[0]["returned"] == []


class TestLossSpikeGuard:
    def drive(self, guard: LossSpikeGuard, losses: list[float]) -> list[int | None]:
        engine = Engine(lambda engine, loss: torch.tensor(loss), name="trainer")
        guard.attach(engine)
        found: list[int | None] = []
        engine.add_event_handler(
            Events.ANOMALY_DETECTED, lambda engine, event: found.append(event.payload.at_iteration)
        )
        engine.run(losses, max_epochs=1)
        return found

    def test_it_detects_spikes_by_the_median_and_its_deviation(self) -> None:
        generator = torch.Generator().manual_seed(0)
        losses = (1.0 + 0.1 * torch.randn(200, generator=generator)).tolist()
        losses[60], losses[150] = 3.0, float("inf")
        assert self.drive(LossSpikeGuard(), losses) == [61, 151]

    def test_a_falling_loss_is_not_a_spike(self) -> None:
        assert self.drive(LossSpikeGuard(threshold=5), [10 * 0.98**i for i in range(300)]) == []

    def test_a_new_level_is_reported_once_and_then_accepted(self) -> None:
        guard = LossSpikeGuard(patience=5)
        assert self.drive(guard, [1.0, 1.01] * 30 + [4.0, 4.02] * 30 + [9.0] + [4.0]) == [61, 121]

    def test_too_few_losses_report_nothing(self) -> None:
        assert self.drive(LossSpikeGuard(), [1.0] * 10 + [50.0]) == []

    def test_the_policy_stop_ends_the_run(self) -> None:
        guard = LossSpikeGuard(policy="stop", every=Every(iterations=10))
        engine = Engine(lambda engine, loss: loss, name="trainer")
        guard.attach(engine)
        engine.run([1.0] * 42 + [7.0] + [1.0] * 50, max_epochs=1)
        assert engine.state.iteration == 50
        assert "iteration 43" in str(engine.state.stop_reason)

    def test_rewind_leaves_the_spikes_batches_out(self, tmp_path: Path) -> None:
        bad = guarded_data(tuple(range(40, 44)), scale=1e4)
        saver = Checkpointer(tmp_path, every=Every(iterations=4), keep_last=20)
        guard = LossSpikeGuard(policy="rewind", window=8, every=Every(iterations=6), margin=0)
        trainer = guarded_run(guard, saver, dataset=bad, model=nn.Linear(4, 1), optimizer="sgd")
        found = anomalies(trainer)
        trainer.train()
        assert [a.batch_indices for a in found] == [(40, 41, 42, 43)]
        assert trainer.rewinds == 1
        plain = guarded_run(
            dataset=bad, model=nn.Linear(4, 1), optimizer="sgd", skip_batches=[trainer.data.left_out_since[0]]
        )
        plain.train()
        assert torch.equal(trainer.model.weight, plain.model.weight)

    def test_the_state_round_trips(self) -> None:
        guard = LossSpikeGuard(every=Every(iterations=1000))
        engine = Engine(lambda engine, loss: torch.tensor(loss), name="trainer")
        guard.attach(engine)
        engine.run([1.0, 2.0, 1.5] * 10, max_iters=29)
        fresh = LossSpikeGuard()
        fresh.load_state_dict(guard.state_dict())
        assert fresh.state_dict() == guard.state_dict()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_device_the_update_is_left_out_without_waiting_for_it() -> None:
    guard = NaNGuard(every=Every(iterations=10**6))
    trainer = guarded_run(guard, dataset=guarded_data((61,)), log_every_n_steps=10**6, device="cuda", progress=False)

    @trainer.on(Events.ITERATION_STARTED(once=3))  # the first update has looked at values
    def watch() -> None:
        with warnings.catch_warnings(action="ignore"):  # the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")

    @trainer.on(Events.EPOCH_COMPLETED, phase=Phase.COMPUTE)  # before the guard looks
    def done() -> None:
        torch.cuda.set_sync_debug_mode("default")

    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guard.skipped == 1
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_a_guard_attached_during_a_run_reports_nothing_before_it() -> None:
    guard = NaNGuard(every=Every(iterations=1))
    trainer = guarded_run(dataset=guarded_data((29,)))
    found = anomalies(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda engine: guard.attach(engine))
    trainer.train()
    assert [a.batch_indices for a in found] == [(28, 29, 30, 31)]


def test_skipped_updates_are_reported_before_an_exception_ends_the_run() -> None:
    trainer = guarded_run(NaNGuard(every=Every(iterations=100)), dataset=guarded_data((13,)))
    found = anomalies(trainer)

    @trainer.on(Events.ITERATION_COMPLETED(once=7))
    def fail() -> None:
        raise RuntimeError("the power went")

    with pytest.raises(RuntimeError, match="the power went"):
        trainer.train()
    assert [a.at_iteration for a in found] == [4]


def test_many_reports_at_once_are_summarised() -> None:
    trainer = guarded_run(NaNGuard(every=Every(iterations=100)), dataset=guarded_data((1, 5, 9, 13, 17, 21)))
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    assert [line["iteration"] for line in logs if "skipped: " in line["event"]] == [1, 2, 3, 6]
    assert "3 more updates were skipped" in logs[-1]["event"]


class TestARowOfSpikes:
    drive = TestLossSpikeGuard.drive

    def test_spikes_with_a_non_finite_loss_still_make_a_new_level(self) -> None:
        guard = LossSpikeGuard(patience=5)
        assert self.drive(guard, [1.0, 1.01] * 30 + [float("nan")] + [4.0, 4.02] * 30) == [61]
        assert guard.spikes == 5  # NaN, and four before the fifth was taken for the level

    def test_a_row_of_non_finite_losses_stays_small(self) -> None:
        guard = LossSpikeGuard(patience=5)
        self.drive(guard, [1.0, 1.01] * 30 + [float("nan")] * 500)
        assert guard.spikes == 500
        assert guard.state_dict()["in_a_row"] == []

    def test_a_row_leaves_out_the_configured_number_of_batches_before_it(self) -> None:
        asked: list[tuple[int, int]] = []

        class Going(Engine):
            rewinds = 0

            def rewind(self, first: int, last: int, reason: str) -> None:
                asked.append((first, last))

        engine = Going(lambda engine, loss: loss, name="trainer")
        LossSpikeGuard(policy="rewind", margin=2, every=Every(iterations=10)).attach(engine)
        engine.run([1.0] * 42 + [7.0, 1.0, 8.0] + [1.0] * 5, max_epochs=1)
        assert asked == [(41, 45)]
