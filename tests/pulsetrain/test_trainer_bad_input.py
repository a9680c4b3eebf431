"""Input that the trainer rejects: one clear error as early as possible."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from ignite.metrics import RunningAverage
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import (
    CheckpointError,
    ConfigurationError,
    Events,
    MetricNotFoundError,
    PretrainStrategy,
    SupervisedStrategy,
    TorchBackend,
)
from pulsetrain.engine.metrics import Accuracy
from pulsetrain.engine.schedules import Constant
from pulsetrain.handlers import Callback, Checkpointer, ConsoleLogger, EarlyStopping, LRScheduler
from pulsetrain.training.arguments import check_metric_names
from tests.support.models import Tokens, loader, regression_model, trainer


class Quiet(Callback):
    """Does nothing."""


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"strategy": "supervized"}, ConfigurationError, "did you mean 'supervised'"),
        ({"strategy": SupervisedStrategy}, TypeError, "prepare_batch"),
        ({"strategy": "mse"}, ConfigurationError, r"is a loss; pass strategy=SupervisedStrategy\('mse'\)"),
        ({"strategy": nn.MSELoss()}, TypeError, r"pass strategy=SupervisedStrategy\(loss\)"),
        ({"strategy": nn.functional.mse_loss}, TypeError, r"pass strategy=SupervisedStrategy\(loss\)"),
        ({"model": nn.Linear}, TypeError, r"model=Linear\): needs an object, such as Linear\(...\)"),
        ({"train_loader": 7}, TypeError, "iterable of batches"),
        ({"val_loader": iter([1])}, ConfigurationError, "read only once"),
        ({"handlers": [print]}, TypeError, "attach"),
        (
            {"handlers": [Quiet()]},
            TypeError,
            r"is a callback; pass it in callbacks=\[...\], or here as CallbackList\(\[Quiet\(...\)\]\)",
        ),
        ({"handlers": [EarlyStopping()]}, ConfigurationError, "no val_loader"),
        ({"metrics": {"m": 3}}, ConfigurationError, "reset"),
        ({"optimizer": "adamx"}, ConfigurationError, "did you mean 'adam'"),
        ({"config": {"device": "cuda:9"}}, ConfigurationError, "is not on this machine; choose one of cpu"),
        ({"backend": "torch"}, TypeError, r"needs a backend, such as TorchBackend\(\)"),
        ({"backend": TorchBackend}, TypeError, r"needs a backend, such as TorchBackend\(\)"),
        ({"callbacks": [EarlyStopping()]}, TypeError, r"is a handler; pass it in handlers=\[...\]"),
        ({"model": nn.ReLU()}, ConfigurationError, "has no parameters, so there is nothing to train"),
        ({"config": {"device": "gpu"}}, ConfigurationError, "device='gpu'"),
        ({"config": {"schedule": "cosin"}}, ConfigurationError, "did you mean 'cosine'"),
        ({"config": {"max_tokens": 10}}, ConfigurationError, "counts no tokens"),
    ],
)
def test_a_wrong_argument_is_one_clear_error_at_once(arguments: dict[str, Any], error: type, says: str):
    with pytest.raises(error, match=says):
        trainer(**arguments)


def test_early_stopping_by_a_setting_is_refused_where_no_set_is_called_val():
    sets = {"easy": loader(8), "hard": loader(8)}
    rule = r"early_stopping_patience=2\): judges val/loss, .* 'val'; there are: easy, hard; leave it out, and add"
    with pytest.raises(ConfigurationError, match=rule) as caught:
        trainer({"early_stopping_patience": 2}, val_loader=sets)
    remedy = str(caught.value).partition("add the handler ")[2]
    trainer(val_loader=sets, handlers=[eval(remedy, {"EarlyStopping": EarlyStopping})])
    trainer({"early_stopping_patience": 2}, val_loader={**sets, "val": loader(8)})


def test_two_schedules_are_refused():
    with pytest.raises(ConfigurationError, match=r"schedule='linear'\): a handler LRScheduler is given as well; "):
        trainer({"schedule": "linear"}, handlers=[LRScheduler(Constant(0.1))])


def on_two_optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def test_two_given_schedulers_for_one_optimizer_are_refused():
    model = regression_model()
    optimizer, other = on_two_optimizers(model)
    torch_s = LRScheduler(StepLR(optimizer, 5))
    for second in (LRScheduler(Constant(0.1)), LRScheduler(Constant(0.1), optimizer), torch_s):
        with pytest.raises(ConfigurationError, match=r"Trainer\(handlers=\[LRScheduler.*composed by >>"):
            trainer(model=model, optimizer=optimizer, handlers=[LRScheduler(Constant(0.1)), second])
    both = [LRScheduler(Constant(0.2)), LRScheduler(Constant(0.3), other)]
    trainer({"max_iterations": 1}, model=model, optimizer=optimizer, handlers=both).train()
    assert [each.param_groups[0]["lr"] for each in (optimizer, other)] == [0.2, 0.3]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"schedule_options": {"gamma": 0.5}},
            r"^TrainingConfig\(schedule_options={'gamma': 0.5}\): unknown to the sch",
        ),
        ({"min_lr_ratio": 0.1}, r"min_lr_ratio=0.1\): the schedule 'constant' has no lowest rate"),
    ],
)
def test_what_a_constant_schedule_would_not_read_is_refused(settings: dict[str, Any], says: str):
    with pytest.raises(ConfigurationError, match=says):
        trainer(settings)


def test_a_schedule_starts_from_a_rate_that_is_a_tensor():
    model = regression_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    trainer({"schedule": "linear", "max_iterations": 5}, model=model, optimizer=optimizer).train()
    assert float(optimizer.param_groups[0]["lr"]) == 0.0  # 0.5 * (1 - 5 / 5)
    assert optimizer.param_groups[0]["initial_lr"] == 0.5


@pytest.mark.parametrize("options", [{}, {"dampening": 0.1}])
def test_fp16_does_not_refuse_a_kernel_chosen_by_default(options: dict[str, Any]):
    run = trainer({"precision": "fp16", "max_iterations": 2, "optimizer_options": options})
    run.train()
    assert bool(run.optimizer.param_groups[0]["fused"]) is not bool(options)


def test_a_loss_that_cannot_take_the_output_says_both_shapes():
    run = trainer(strategy=SupervisedStrategy("cross_entropy"))
    with pytest.raises((ValueError, TypeError)) as caught:
        run.train()
    text = str(caught.value) + " ".join(caught.value.__notes__)
    assert "float32 (4, 1)" in text
    assert "SupervisedStrategy(loss='cross_entropy')" in text


def test_a_batch_that_is_not_a_pair_says_what_is_needed():
    with pytest.raises(TypeError, match="pairs"):
        trainer(train_loader=DataLoader(torch.zeros(8, 4), batch_size=2)).train()


def test_a_missing_metric_is_named_at_the_first_validation():
    run = trainer(val_loader=loader(8), handlers=[EarlyStopping(metric="val/acuracy", mode="max")])
    with pytest.raises(MetricNotFoundError, match="val/loss"):
        run.train()
    assert run.state.epoch == 1


def test_an_empty_loader_is_an_error():
    with pytest.raises(ConfigurationError, match="no batches"):
        trainer(train_loader=[])
    with pytest.raises(ValueError, match="gave no batch"):
        trainer(train_loader=iter([])).train()


def test_a_frozen_model_is_refused_before_the_first_step():
    model = regression_model().requires_grad_(False)
    with pytest.raises(ConfigurationError):
        trainer(model=model)


def test_a_loss_without_a_gradient_says_so():
    run = trainer(strategy=SupervisedStrategy(lambda outputs, targets: targets.sum()))
    with pytest.raises(RuntimeError, match="no gradient"):
        run.train()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"metrics": [1]}, "needs a mapping"),
        ({"metrics": {"a": ConsoleLogger}}, r"needs an object, such as ConsoleLogger\(\)"),
        ({"callbacks": Callback()}, r"callbacks=\[\.\.\.\]"),
        ({"handlers": ConsoleLogger()}, r"handlers=\[\.\.\.\]"),
        ({"handlers": [ConsoleLogger]}, "needs an object"),
    ],
)
def test_an_argument_of_another_kind_is_named(arguments: dict[str, Any], says: str):
    with pytest.raises(TypeError, match=says):
        trainer(**arguments)


def test_a_metric_may_not_take_the_name_of_the_loss():
    with pytest.raises(ConfigurationError, match="choose another"):
        trainer(metrics={"loss": object()})


def test_metrics_without_a_validation_set_are_warned_about_at_once():
    metrics = {"mse": RunningAverage(output_transform=lambda output: output["loss"])}
    with structlog.testing.capture_logs() as logs:
        trainer(metrics=metrics)
    (line,) = [each for each in logs if "metrics are computed over validation sets" in each["event"]]
    assert (line["log_level"], line["metrics"]) == ("warning", ["mse"])
    assert "pass val_loader=" in line["event"]


@pytest.mark.parametrize(
    "arguments", [{"val_loader": loader(8)}, {"metrics": {}}, {"train_loader": None, "val_loader": None}]
)
def test_metrics_that_are_computed_are_not_warned_about(arguments: dict[str, Any]):
    metrics = {"mse": RunningAverage(output_transform=lambda output: output["loss"])}
    given = {"train_loader": loader(8), "metrics": metrics, "strategy": SupervisedStrategy("mse"), **arguments}
    with structlog.testing.capture_logs() as logs:
        Trainer(regression_model(), config=TrainingConfig(progress=False), **given)
    assert not [each for each in logs if "metrics are computed" in each["event"]]


@pytest.mark.parametrize("name", ["perplexity", "bits_per_byte"])
def test_a_metric_may_take_a_name_that_the_strategy_does_not_use(name: str):
    run = trainer(val_loader=loader(8), metrics={name: RunningAverage(output_transform=lambda output: output["loss"])})
    assert f"val/{name}" in run.validate()


@pytest.mark.parametrize(
    ("strategy", "name", "refused"),
    [
        (SupervisedStrategy("mse"), "perplexity", False),
        (PretrainStrategy(), "perplexity", True),
        (PretrainStrategy(), "bits_per_byte", False),
        (PretrainStrategy(unit="byte"), "bits_per_byte", True),
    ],
    ids=["no derived", "perplexity", "no length of a token", "bytes"],
)
def test_a_metric_may_not_take_the_name_of_one_that_the_strategy_derives(strategy: Any, name: str, refused: bool):
    says = rf"metrics={{'{name}': ...}}\): PretrainStrategy reports a metric of that name"
    with pytest.raises(ConfigurationError, match=says) if refused else nullcontext():
        check_metric_names({"accuracy": object(), name: object()}, strategy)


def classes(*labels: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(len(labels), 4), torch.tensor(labels))]


EMPTY = [(torch.ones(0, 4), torch.zeros(0, dtype=torch.int64))]


def numbers(*targets: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(len(targets), 4), torch.tensor(targets).unsqueeze(1))]


@pytest.mark.parametrize(
    ("strategy", "data", "outputs", "says"),
    [
        ("supervised", classes(0, 2, 3, 1), 3, r"cross_entropy\(targets\[2\]=3\): needs class indices from 0 to 2"),
        ("supervised", classes(0, -1), 3, r"cross_entropy\(targets\[1\]=-1\): needs class indices"),
        (SupervisedStrategy("mse"), numbers(1.0, math.nan), 1, r"mse\(targets\[1, 0\]=nan\): needs finite numbers"),
        (SupervisedStrategy("huber"), numbers(math.inf), 1, r"huber\(targets\[0, 0\]=inf\): needs finite numbers"),
        (SupervisedStrategy("bce_with_logits"), numbers(0.0, 2.0), 1, r"bce_with_logits\(targets\[1, 0\]=2.0\)"),
        (SupervisedStrategy(nn.MSELoss()), numbers(math.nan), 1, r"MSELoss\(targets\[0, 0\]=nan\): needs finite"),
        ("supervised", [*classes(0), *EMPTY], 3, "a batch of 0 samples"),
        ("supervised", EMPTY, 3, "a batch of 0 samples"),
    ],
)
def test_bad_values_in_the_first_batch_are_named_before_the_first_update(
    strategy: Any, data: Any, outputs: int, says: str
):
    model = nn.Linear(4, outputs)
    before = model.weight.detach().clone()
    run = Trainer(model, data, strategy=strategy, config=TrainingConfig(accumulate=len(data)))
    with pytest.raises(ValueError, match=says):
        run.train()
    assert torch.equal(model.weight, before)
    assert run.state.update == 0


def test_a_token_outside_the_vocabulary_is_named_with_the_range_of_the_batch():
    data = [torch.tensor([[1, 2, 3, 300]])]
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[0, 2\]=300\): needs class indices from 0 to 7"):
        Trainer(Tokens(8), data, strategy="pretrain").train()
    with pytest.raises(IndexError) as caught:
        Trainer(Tokens(8), [torch.tensor([[1, 300, 3, 4]])], strategy="pretrain").train()
    assert any("int64 (1, 3) from 1 to 300" in note for note in caught.value.__notes__)


def test_an_empty_batch_in_validation_is_an_error_too():
    run = trainer(val_loader=[(torch.ones(0, 4), torch.ones(0, 1))])
    with pytest.raises(ValueError, match="a batch of 0 samples"):
        run.validate()


def test_targets_that_a_custom_loss_treats_as_missing_are_accepted():
    def masked(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.where(targets.isnan(), 0.0, outputs - targets.nan_to_num()).square().mean()

    run = Trainer(nn.Linear(4, 1), numbers(1.0, math.nan), strategy=SupervisedStrategy(masked))
    assert math.isfinite(run.train()["train/loss"][0])


def test_a_metric_may_not_take_a_name_that_the_strategy_makes():
    with pytest.raises(ConfigurationError, match="perplexity"):
        Trainer(Tokens(), [torch.tensor([[1, 2]])], strategy="pretrain", metrics={"perplexity": Accuracy()})


REPLACEMENTS = {
    "model": lambda run: regression_model(),
    "optimizer": lambda run: torch.optim.SGD(run.model.parameters(), lr=0.5),
    "strategy": lambda run: SupervisedStrategy("mse"),
    "backend": lambda run: TorchBackend(device="cpu"),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_what_the_run_would_not_use_cannot_be_set(name: str):
    run = trainer({"max_epochs": 1})
    before = getattr(run, name)
    with pytest.raises(ConfigurationError, match=rf"Trainer\({name}=.*\): cannot be replaced.*make a new Trainer"):
        setattr(run, name, REPLACEMENTS[name](run))
    setattr(run, name, before)
    assert getattr(run, name) is before


def test_the_data_can_be_replaced_between_runs_alone():
    run = trainer({"max_epochs": 1})
    refusals = []

    @run.on(Events.ITERATION_COMPLETED(once=2))
    def replace() -> None:
        try:
            run.train_loader = loader()
        except ConfigurationError as error:
            refusals.append(str(error))

    run.train()
    assert len(refusals) == 1
    assert "set it between two runs" in refusals[0]
    run.train_loader = [*run.train_loader][:3]
    run.train()
    assert run.state.iteration == 3


@pytest.mark.parametrize("name", [*REPLACEMENTS, "train_loader"])
def test_what_the_run_uses_cannot_be_deleted(name: str):
    run = trainer({"max_epochs": 1})
    held, refusals = getattr(run, name), []
    try:
        delattr(run, name)
    except (ConfigurationError, AttributeError) as error:
        refusals.append(str(error))
    assert ["cannot be deleted: the trainer would continue with the one that it has" in each for each in refusals] == [
        True
    ]
    assert getattr(run, name) is held


def test_the_length_of_a_run_is_that_of_its_data():
    run = trainer({"max_epochs": 2})
    run.train_loader = [*run.train_loader][:3]
    assert (run.total_iterations, run.length.total_updates) == (6, 6)
    run.train()
    assert run.state.iteration == 6


def test_the_length_in_tokens_is_measured_again():
    config = TrainingConfig(max_tokens=600)
    run = Trainer(Tokens(8), [torch.ones(1, 21, dtype=torch.long)] * 50, strategy="pretrain", config=config)
    assert run.total_iterations == 30
    run.train_loader = [torch.ones(1, 41, dtype=torch.long)] * 50
    assert run.total_iterations == 15


@pytest.mark.parametrize(
    ("settings", "depends"),
    [
        ({"schedule": "cosine"}, True),
        ({"schedule": "linear", "warmup_steps": 4}, True),
        ({"schedule": "constant", "warmup_steps": 4}, False),
        ({"schedule": "cosine", "max_epochs": None, "max_iterations": 20}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("trained_before", [False, True])
def test_data_of_another_length_is_refused_only_if_the_schedule_depends_on_it(
    settings: dict[str, Any], depends: bool, trained_before: bool
):
    run = trainer({"max_epochs": 2, **settings})
    if trained_before:
        run.train()
    held, total, refusals = run.train_loader, run.total_iterations, []
    run.train_loader = held = list(held)  # of the same length
    try:
        run.train_loader = held[:6]
    except ConfigurationError as error:
        refusals.append(str(error))
    assert len(refusals) == depends
    if depends:
        assert "was made for a run of 20 updates, and one over this data has 12; make a new Trainer" in refusals[0]
        assert (run.train_loader, run.total_iterations) == (held, total)
    run.train()
    assert run.state.iteration == run.total_iterations


def test_a_subclass_may_ask_for_its_model_before_it_has_one():
    class Lazy(Trainer):
        def __init__(self) -> None:
            if not hasattr(self, "model"):
                self.model = regression_model()
            self.driver = None  # a name of the trainer's own
            super().__init__(
                self.model, loader(), strategy=SupervisedStrategy("mse"), config=TrainingConfig(max_epochs=1)
            )

    run = Lazy()
    run.train()
    assert run.state.iteration == 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_inputs_of_another_type_than_the_weights_come_with_the_remedy(dtype: torch.dtype):
    data = [(torch.ones(2, 4, dtype=dtype), torch.ones(2, 1))]
    with pytest.raises(RuntimeError, match="type") as caught:
        trainer(train_loader=data).train()
    assert "let the dataset return inputs.to(torch.float32)" in caught.value.__notes__[-1]


def test_a_tuple_from_the_model_comes_with_the_remedy():
    class Twice(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            return super().forward(inputs), None

    with pytest.raises(AttributeError, match="tuple") as caught:
        trainer(model=Twice(4, 1)).train()
    assert any("mse takes one tensor: let the model return" in note for note in caught.value.__notes__)


def test_a_batch_of_three_says_that_it_has_three():
    with pytest.raises(TypeError, match="a batch of tuple of 3 cannot be split; let the loader return pairs"):
        trainer(train_loader=[(torch.ones(2, 4), torch.ones(2, 1), 7)]).train()


def test_a_decorator_without_its_event_is_refused():
    run = trainer()
    with pytest.raises(TypeError, match=r"needs an event, as in @trainer.on\(Events.EPOCH_COMPLETED\)"):

        @run.on
        def report(trainer: Trainer) -> None: ...


@pytest.mark.parametrize("every", [5, 1.5, "5", {"epochs": 1}])
def test_a_checkpointer_refuses_a_cadence_of_another_kind(every: Any, tmp_path: Path):
    with pytest.raises(TypeError, match=r"every=.*needs an Every, such as Every\(epochs=1\), or 'auto'"):
        Checkpointer(tmp_path, every=every)


@pytest.mark.parametrize("batch", [torch.ones(4, 3), torch.ones(4, 3).numpy()])
def test_one_batch_is_not_predicted_row_by_row(batch: Any):
    with pytest.raises(TypeError, match=r"is one batch, .* pass a DataLoader, or a list, as predict\(\[x\]\)"):
        trainer().predict(batch)


def test_a_wrong_shape_names_the_module_it_did_not_fit():
    model = nn.Sequential(nn.Linear(4, 16), nn.Sequential(nn.ReLU(), nn.Linear(15, 1)))
    training = Trainer(model, loader(), strategy=SupervisedStrategy("mse"), config=TrainingConfig(max_epochs=1))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        training.train()
    assert "in the module '1.1', Linear(in_features=15, out_features=1, bias=True)" in raised.value.__notes__


def test_training_longer_than_the_schedule_says_how(tmp_path: Path):
    def training(epochs: int) -> Trainer:
        config = {"schedule": "cosine", "max_epochs": epochs}
        return trainer(config=config, handlers=[Checkpointer(tmp_path)])

    training(1).train()
    with pytest.raises(CheckpointError, match=r"total_steps is .*; to train longer, start a new run"):
        training(2).train(resume="latest")
