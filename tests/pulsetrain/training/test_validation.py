"""Validation sets, run by the trainer or directly: modes, names, metrics of any shape, empty sets; late counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import torch
from ignite.engine import Events as IgniteEvents
from ignite.metrics import ConfusionMatrix, MeanAbsoluteError, MeanSquaredError, MetricGroup
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MetricCollection
from torchmetrics.regression import MeanSquaredError as TorchMeanSquaredError

from pulsetrain.engine import Accumulate, EventBus, EventEnum, Events, Every, SupervisedStrategy, TorchBackend
from pulsetrain.engine.backends.model_store import InPlaceStore
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import Ranks
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.step.model_call import eval_mode
from pulsetrain.handlers import EventRecorder
from pulsetrain.handlers.metric_values.step_values import step_metrics
from pulsetrain.training.evaluator import check_sets
from pulsetrain.training.stepper import Stepper
from pulsetrain.training.validation import Evaluation
from tests.support.models import loader, regression_model, trainer


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def evaluation(bus: EventBus | None = None, trainer_name: str = "trainer") -> Evaluation:
    strategy, backend = SupervisedStrategy("mse"), TorchBackend("cpu")
    model = regression_model()
    store = InPlaceStore(backend, model, torch.optim.SGD(model.parameters(), lr=0.1))
    stepper = Stepper(backend, strategy, store, accumulate=Accumulate(batches=1))
    return Evaluation(stepper, {}, EventBus() if bus is None else bus, trainer_name, ControlGroup(Ranks()))


class Stream(IterableDataset[Any]):
    """An empty iterable without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Failing:
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        yield next(iter(loader()))
        raise OSError("the disk is gone")


class Vector(nn.Module):
    """A metric of three values."""

    def reset(self) -> None:
        pass

    def update(self, predicted: Tensor, true: Tensor) -> None:
        pass

    def compute(self) -> Tensor:
        return torch.ones(3)


# ------------------------------------------------------------------------------------------------------- modes


def test_a_submodule_kept_in_eval_mode_is_still_in_eval_mode_after_a_validation():
    run = trainer(val_loader=loader(shuffle=False))
    run.model_store.module.train()
    run.model_store.module[1].eval()
    before = modes(run.model_store.module)
    run.validate()
    assert modes(run.model_store.module) == before == [True, True, False, True, True, True]


def test_a_module_in_training_mode_below_one_in_eval_mode_stays_so_though_others_share_it():
    shared = nn.Dropout()
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.Dropout()))
    model.train()
    model[1].eval()
    shared.train()
    before = modes(model)
    with eval_mode(model):
        assert not any(modes(model))
    assert modes(model) == before


def test_a_module_that_does_more_when_its_mode_changes_does_it_on_the_way_back_too():
    class Merging(nn.Module):
        merged = False

        def train(self, mode: bool = True) -> Merging:
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merging())
    with eval_mode(model):
        assert model[0].merged
    assert not model[0].merged


# ------------------------------------------------------------------------------- the evaluator, run directly


def test_the_evaluator_run_directly_gives_what_a_validation_gives_and_leaves_the_model_alone():
    data = loader(10, shuffle=False)
    run = trainer(val_loader=data, metrics={"mse": MeanSquaredError()})
    before = {name: value.clone() for name, value in run.model_store.module.state_dict().items()}
    seen: list[bool] = []
    run.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(any(modes(run.model_store.module))))
    metrics = run.evaluator.run(data).metrics
    assert seen == [False] * 3
    assert all(modes(run.model_store.module))
    assert all(torch.equal(before[name], value) for name, value in run.model_store.module.state_dict().items())
    assert {f"val/{name}": value for name, value in metrics.items()} == run.validate()


def test_handlers_at_the_end_of_the_evaluators_epoch_find_the_loss():
    run = trainer()
    seen: list[float] = []
    run.evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda e: seen.append(e.state.metrics["loss"]))
    state = run.evaluator.run(loader())
    assert seen == [state.metrics["loss"]]


def test_the_metrics_of_an_earlier_set_are_gone_when_the_next_one_begins():
    run = trainer()
    run.evaluator.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda e: e.state.metrics.setdefault("old", 1.0))
    assert run.evaluator.run(loader()).metrics.keys() == {"loss", "old"}
    seen = {}
    run.evaluator.add_event_handler(Events.STARTED, lambda e: seen.update(e.state.metrics))
    run.evaluator.run(loader())
    assert seen == {}


@pytest.mark.parametrize("muted", [False, True])
def test_a_failing_evaluator_leaves_the_modes_as_they_were(muted: bool):
    run = trainer()
    run.model_store.module.train()
    run.model_store.module[1].eval()
    before = modes(run.model_store.module)
    signal = run.bus.signal(Events.EXCEPTION_RAISED)
    signal.is_muted = muted
    with pytest.raises(OSError, match="the disk is gone"):
        run.evaluator.run(Failing())
    with pytest.raises(ValueError, match="zero size"):  # before STARTED
        run.evaluator.run([])
    assert modes(run.model_store.module) == before


def test_a_handler_that_takes_the_evaluators_exception_leaves_the_modes_and_the_means_of_what_was_seen():
    run = trainer(val_loader=Failing())
    run.evaluator.add_event_handler(Events.EXCEPTION_RAISED, lambda e, error: None)
    assert run.validate().keys() == {"val/loss"}
    assert all(modes(run.model_store.module))


@pytest.mark.parametrize("skip", [False, True])
def test_a_terminated_evaluator_gives_the_means_of_what_it_saw_and_leaves_the_modes(skip: bool):
    batches = list(loader(shuffle=False))
    run = trainer(val_loader=batches)
    run.evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda e: e.terminate(skip_completed=skip))
    terminated = run.validate()
    assert terminated == trainer(val_loader=batches[:2]).validate()
    assert all(modes(run.model_store.module))


def test_a_paused_evaluator_leaves_the_modes_and_continues_in_eval_mode():
    run = trainer()
    data = loader(shuffle=False)
    run.evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda e: e.interrupt())
    seen: list[bool] = []
    run.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(any(modes(run.model_store.module))))
    run.evaluator.run(data)
    assert all(modes(run.model_store.module))
    loss = run.evaluator.run(data).metrics["loss"]
    assert seen == [False] * 10
    assert loss == trainer().evaluator.run(data).metrics["loss"]


# ------------------------------------------------------------------------------------------------------- names


def test_the_evaluators_of_two_trainers_share_a_bus_under_names_of_their_own():
    bus = EventBus()
    names = [evaluation(bus, name).engine.name for name in ("trainer", "student")]
    assert names == ["evaluator", "student.evaluator"]


def test_step_metrics_of_a_named_trainers_evaluator_are_validation_metrics():
    engine = evaluation(trainer_name="student").engine
    engine.run(loader(4))
    assert step_metrics(engine).keys() == {"val/loss"}


# ----------------------------------------------------------------------------------- metrics that are not scalars


def test_a_metric_that_is_not_a_scalar_stays_with_the_evaluator_and_is_warned_about_once(tmp_path: Any):
    def signs(output: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        predicted, true = ((output[name][:, 0] > 0).long() for name in ("y_pred", "y"))
        return torch.eye(2)[predicted], true

    metrics = {"matrix": ConfusionMatrix(2, output_transform=signs), "mse": MeanSquaredError(), "vector": Vector()}
    run = trainer(val_loader=loader(10), metrics=metrics)
    recorder = EventRecorder(tmp_path).attach(run)  # it writes down whatever metrics there are
    media: list[Any] = []
    run.add_event_handler(Events.MEDIA_LOGGED, lambda engine, event: media.append(event.payload))
    with structlog.testing.capture_logs() as logs:
        first, second = run.validate(), run.validate()
    recorder.detach()
    assert [(each.name, each.kind) for each in media] == [("val/matrix", "matrix")] * 2
    assert [sum(map(sum, each.value)) for each in media] == [10, 10]
    assert first.keys() == second.keys() == {"val/loss", "val/mse"}
    assert run.evaluator.state.metrics["matrix"].sum() == 10
    assert run.evaluator.state.metrics["vector"].tolist() == [1.0, 1.0, 1.0]
    assert [(log["metric"], log["type"], log["shape"]) for log in logs] == [("vector", "Tensor", (3,))]
    assert all(f"trainer.evaluator.state.metrics[{log['metric']!r}]" in log["event"] for log in logs)


def test_a_metric_that_gives_a_mapping_is_flattened_under_its_name():
    groups = {
        "errors": MetricGroup({"mse": MeanSquaredError(), "loss": MeanAbsoluteError()}),
        "more": MetricCollection({"mse": TorchMeanSquaredError(), "rmse": TorchMeanSquaredError(squared=False)}),
    }
    metrics = trainer(val_loader=loader(10, shuffle=False), metrics=groups).validate()
    assert metrics.keys() == {"val/loss", "val/errors/mse", "val/errors/loss", "val/more/mse", "val/more/rmse"}
    assert metrics["val/loss"] == pytest.approx(metrics["val/errors/mse"])  # and not the group's own "loss"
    assert metrics["val/more/rmse"] ** 2 == pytest.approx(metrics["val/more/mse"])


def test_what_is_attached_to_the_evaluator_by_hand_is_reported_where_it_is_a_scalar_and_else_left_alone():
    run = trainer(val_loader=loader(10))
    MeanSquaredError().attach(run.evaluator, "mse")
    run.evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda e: e.state.metrics.update(text="1", many=[1, 2]))
    with structlog.testing.capture_logs() as logs:
        assert run.validate().keys() == {"val/loss", "val/mse"}
    assert logs == []
    assert run.evaluator.state.metrics["many"] == [1, 2]


# -------------------------------------------------------------------------------------------------- empty sets


@pytest.mark.parametrize("empty", [[], DataLoader(Stream(), batch_size=2)], ids=["list", "stream"])
def test_a_validation_set_that_gives_no_batch_is_named(empty: Any):
    with pytest.raises(ConfigurationError, match="validation set 'far': gave no batch"):
        evaluation().run("far", empty)


def test_an_empty_set_is_not_given_the_means_of_the_set_before():
    one = evaluation()
    one.run("near", loader(8))
    with pytest.raises(ConfigurationError, match="validation set 'far': gave no batch"):
        one.run("far", DataLoader(Stream(), batch_size=2))


def test_a_set_whose_validation_ended_before_its_first_batch_says_why():
    one = evaluation()
    one.engine.add_event_handler(Events.STARTED, lambda e: e.terminate(reason="no time"))
    with pytest.raises(ConfigurationError, match=r"validation set 'val': gave no batch \(no time\)"):
        one.run("val", loader())


def test_a_loaders_own_error_is_not_taken_for_emptiness():
    def broken() -> Iterator[Any]:
        raise ValueError("row 7 is not a number")
        yield

    with pytest.raises(ValueError, match="row 7 is not a number"):
        evaluation().run("val", broken())


def test_sets_of_length_zero_are_rejected_before_the_run_and_those_without_a_length_are_not():
    check_sets({"val": loader(), "stream": DataLoader(Stream(), batch_size=2), "lazy": iter(())})
    with pytest.raises(ConfigurationError, match="validation set 'far': gave no batch"):
        check_sets({"near": loader(), "far": loader(3, batch_size=4, drop_last=True)})


# ----------------------------------------------------------------- events and counters registered by a trainer


class Rollout(EventEnum):
    BEGUN = "begun"
    ENDED = "ended"


def test_a_counter_registered_late_reaches_the_plans_that_others_hold():
    run = trainer({"max_iterations": 6})
    run.register_events(Events.GRADIENTS_READY, event_to_attr={Events.GRADIENTS_READY: "gradients"})
    seen: list[int] = []
    run.add_event_handler(Events.GRADIENTS_READY(every=2), lambda e: seen.append(e.state.gradients))
    run.train()
    assert seen == [2, 4, 6]


def test_an_event_that_gets_a_counter_after_its_first_firing_counts_and_filters_from_then_on():
    run = trainer()
    run.register_events(*Rollout)
    seen: list[int] = []
    run.fire(Rollout.BEGUN)
    dispatch = run.dispatch(Rollout.BEGUN)
    run.register_events(Rollout.BEGUN, event_to_attr={Rollout.BEGUN: "rollout"})
    run.add_event_handler(Rollout.BEGUN(every=3), lambda e: seen.append(e.state.rollout))
    for _ in range(7):
        run.fire(Rollout.BEGUN)
    assert (seen, run.state.rollout) == ([3, 6], 7)
    assert run.dispatch(Rollout.BEGUN) is dispatch


def test_a_window_found_by_the_old_counter_is_not_used_for_the_new_one():
    run = trainer()
    run.register_events(*Rollout, event_to_attr={Rollout.BEGUN: "one"})
    seen: list[int] = []
    run.add_event_handler(Rollout.BEGUN(every=1000), lambda e: seen.append(e.state.two))
    run.fire(Rollout.BEGUN)  # no receiver is due before 1000 now
    run.state.two = 1999
    run.register_events(Rollout.BEGUN, event_to_attr={Rollout.BEGUN: "two"})
    run.fire(Rollout.BEGUN)
    assert seen == [2000]


def test_the_event_that_follows_leads_when_its_leader_gets_another_counter():
    run = trainer()
    run.register_events(*Rollout, event_to_attr={Rollout.BEGUN: "phase", Rollout.ENDED: "phase"})
    run.fire(Rollout.BEGUN)
    run.fire(Rollout.ENDED)
    assert run.state.phase == 1
    run.register_events(Rollout.BEGUN, event_to_attr={Rollout.BEGUN: "begun"})
    for event in (Rollout.BEGUN, Rollout.ENDED, Rollout.ENDED):
        run.fire(event)
    assert (run.state.begun, run.state.phase) == (1, 3)


def test_names_are_all_checked_before_the_first_is_registered():
    run = trainer()
    with pytest.raises(TypeError, match="Value at 1"):
        run.register_events("fine", 7)
    assert not run.has_registered_events("fine")


def test_registered_events_are_listed_once_and_in_order():
    class Foreign(EventEnum):
        STARTED = "elsewhere"

    run = trainer()
    assert run.registered_events == tuple(Events)
    run.register_events(*Rollout, "sampled", IgniteEvents.STARTED, Rollout.BEGUN, "sampled", "BEGUN", Foreign.STARTED)
    keys = [getattr(event, "key", event) for event in run.registered_events]
    assert keys == [*(event.key for event in (*Events, *Rollout)), "sampled", Foreign.STARTED.key]


def test_the_recorder_finds_custom_events_by_the_public_accessor(tmp_path: Any):
    run = trainer()
    run.register_events(*Rollout)
    recorder = EventRecorder(tmp_path).attach(run)
    run.fire(Rollout.ENDED)
    recorder.detach()
    assert [event.event for event in EventLog(tmp_path).read()] == ["ended"]


def test_a_validation_that_is_cut_short_is_reported_as_partial():
    run = trainer(val_loader=loader(12, shuffle=False))
    run.evaluator.add_event_handler(
        Events.ITERATION_COMPLETED(once=2), lambda engine: engine.terminate(reason="enough")
    )
    with structlog.testing.capture_logs() as logs:
        run.validate()
    (line,) = logs
    assert (line["set"], line["batches"], line["reason"]) == ("val", 2, "enough")
    assert "a part of the set" in line["event"]


def test_validating_as_often_as_one_likes_changes_nothing_of_the_training():
    def weights(validate_every: Every | None) -> dict[str, torch.Tensor]:
        run = trainer(
            {"max_epochs": 2, "validate_every": validate_every},
            model=regression_model(dropout=0.3),
            val_loader=loader(8),  # shuffled, so that it draws
        )
        run.train()
        return run.model_store.module.state_dict()

    often, never = weights(Every(iterations=3)), weights(None)
    assert all(torch.equal(often[name], value) for name, value in never.items())
