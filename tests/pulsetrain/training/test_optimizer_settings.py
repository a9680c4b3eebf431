"""The learning rate and weight decay that are configured are those that train, or an error says why they cannot be."""

import io
from functools import partial

import pytest
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, Events, SupervisedStrategy, TorchBackend
from pulsetrain.handlers import ConsoleLogger
from tests.support.models import loader, regression_model, trainer


def trained_with(optimizer, model=None, **settings):
    """The rate and decay of a trainer's optimizer."""
    run = Trainer(
        regression_model() if model is None else model,
        loader(),
        strategy=SupervisedStrategy("mse"),
        optimizer=optimizer,
        config=TrainingConfig(max_iterations=1, device="cpu", **settings),
    )
    group = run.optimizer.param_groups[0]
    return float(group["lr"]), group["weight_decay"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("settings", [{"learning_rate": 0.25}, {"weight_decay": 0.125}, {}])
def test_a_class_trains_at_the_configured_rate_and_decay_and_else_at_its_own(kind, settings):
    own = kind(regression_model().parameters()).defaults
    wanted = (settings.get("learning_rate", own["lr"]), settings.get("weight_decay", own["weight_decay"]))
    assert trained_with(kind, **settings) == wanted
    assert trained_with(partial(kind, lr=0.5), weight_decay=0.125) == (0.5, 0.125)


def refusals(attempts):
    found = []
    for attempt in attempts:
        try:
            attempt()
        except ConfigurationError as error:
            found.append((error.argument, error.value, str(error)))
    return found


SGD = partial(torch.optim.SGD, lr=0.5, weight_decay=0.25)
GIVEN = {
    "an instance": lambda model: SGD(model.parameters()),
    "an instance at a rate that is a tensor": lambda model: torch.optim.SGD(
        model.parameters(), lr=torch.tensor(0.5), weight_decay=0.25, foreach=False
    ),
    "a factory": lambda model: lambda parameters: SGD(parameters),
    "a partial": lambda model: SGD,
}


@pytest.mark.parametrize("given", GIVEN)
def test_what_contradicts_an_explicit_setting_is_refused_with_both_values_and_the_remedy(given):
    def attempt(**settings):
        model = regression_model()
        return partial(trained_with, GIVEN[given](model), model, **settings)

    contradicting = [{"learning_rate": 0.001}, {"weight_decay": 0.0}]  # also what the settings are by default
    found = refusals([attempt(**each) for each in contradicting])
    assert [each[:2] for each in found] == [("learning_rate", 0.001), ("weight_decay", 0.0)]
    for text, has in zip([each[2] for each in found], ["lr=0.5", "weight_decay=0.25"], strict=True):
        assert text.startswith("TrainingConfig(")
        assert has in text
        assert "leave the setting out, or make the two equal" in text
    agreeing = [{}, {"learning_rate": 0.5}, {"weight_decay": 0.25}, {"learning_rate": 0.5, "weight_decay": 0.25}]
    assert refusals([attempt(**each) for each in agreeing]) == []


def test_a_decay_that_the_optimizer_cannot_have_is_refused():
    model = regression_model()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5)
    assert len(refusals([lambda: trained_with(lbfgs, model, weight_decay=0.1)])) == 1


def test_an_optimizer_that_needs_a_closure_is_refused_before_the_first_batch():
    model, read = regression_model(), []
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5)
    made = trainer({"max_epochs": 1}, model=model, train_loader=loader(), optimizer=lbfgs)
    made.add_event_handler(Events.ITERATION_STARTED, lambda: read.append(1))
    with pytest.raises(ConfigurationError, match=r"Trainer\(optimizer=LBFGS\): its step\(\) .* with pulsetrain\.Loop"):
        made.train()
    assert read == []


def test_one_of_several_groups_has_the_configured_values():
    model = regression_model()
    layers = [each for each in model.children() if list(each.parameters())]
    groups = [{"params": layers[0].parameters(), "lr": 0.5, "weight_decay": 0.0}]
    groups += [{"params": each.parameters()} for each in layers[1:]]
    instance = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.125)
    assert refusals([lambda: trained_with(instance, model, learning_rate=0.25, weight_decay=0.125)]) == []
    assert len(refusals([lambda: trained_with(instance, model, learning_rate=0.75)])) == 1


def test_an_optimizer_of_a_backend_by_value_is_held_to_the_configured_rate():
    from pulsetrain.engine import optimizers

    def attempt(rate):
        made = optimizers.create_functional("sgd", learning_rate=0.5)
        return Trainer(
            regression_model(),
            loader(),
            strategy=SupervisedStrategy("mse"),
            optimizer=made,
            backend=TorchBackend("cpu", functional=True),
            config=TrainingConfig(max_iterations=1, learning_rate=rate),
        )

    assert len(refusals([lambda: attempt(0.25), lambda: attempt(0.5)])) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "sgd"}, "SGD(lr=0.001, momentum=0.9, weight_decay=0"),
        (
            {"optimizer": "adamw", "learning_rate": 0.5, "weight_decay": 0.25, "schedule": "linear", "warmup_steps": 1},
            "AdamW(lr=0.5, betas=(0.9, 0.999), weight_decay=0.25)",
        ),
    ],
)
def test_the_first_line_of_a_run_names_the_optimizer_as_it_was_configured(settings, says):
    stream = io.StringIO()
    Trainer(
        regression_model(),
        loader(),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_iterations=2, seed=17, **settings),
        handlers=[ConsoleLogger(stream=stream)],
    ).train()
    first = stream.getvalue().splitlines()[0]
    assert "run started" in first
    assert says in first
    assert "seed=17" in first


@pytest.mark.parametrize("settings", [{}, {"learning_rate": 0.25}])
def test_a_factory_may_call_its_rate_learning_rate(settings):
    def make(parameters, learning_rate):
        return torch.optim.SGD(parameters, lr=learning_rate)

    assert trained_with(make, **settings) == (settings.get("learning_rate", 0.001), 0)


def test_a_factory_that_needs_more_is_refused_with_what_it_needs():
    def make(parameters, lr, warmth):
        return torch.optim.SGD(parameters, lr=lr)

    with pytest.raises(ConfigurationError, match=r"'warmth'; give the other parameters defaults, or hold them by"):
        trained_with(make)
