"""States as pytrees of torch: they are stacked and mapped without care for the numbers that they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pulsetrain.engine import ConfigurationError, ModelState, SupervisedStrategy, TorchBackend, TrainerCore
from pulsetrain.engine.optimizers.functional import SGD, AdamW
from pulsetrain.engine.schedules import Cosine, Scaled
from pulsetrain.engine.step.protocols import BackendSettings, TrainingResult


def model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()


def core_of(**settings: Any) -> TrainerCore:
    backend = TorchBackend("cpu", functional=True)
    return TrainerCore(backend, SupervisedStrategy("mse"), BackendSettings(device="cpu", **settings), check=False)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(6, 3, generator=generator, dtype=torch.float64),
        torch.randn(6, 2, generator=generator, dtype=torch.float64),
    )


def stacked(states: list[ModelState]) -> ModelState:
    found: ModelState = pytree.tree_map(lambda *each: torch.stack(each), *states)
    return found


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(pytree.tree_leaves(one), pytree.tree_leaves(other), rtol=1e-7, atol=1e-8)


# ------------------------------------------------------------------------------------------------------- ensembles


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop"])
@pytest.mark.parametrize("apart", [False, True], ids=["one batch", "a batch each"])
def test_train_step_under_vmap_trains_stacked_states_as_alone(optimizer: str, apart: bool) -> None:
    core = core_of(clip_grad_norm=0.5)
    schedule = Cosine(0.05, 6)
    states = [core.init(model(seed), optimizer, weight_decay=0.1, schedule=schedule) for seed in range(3)]
    ensemble = stacked(states)
    assert ensemble.metadata == states[0].metadata
    assert ensemble.optimizer["step"] == 0
    step = torch.vmap(core.train_step, in_dims=(0 if apart else None, 0))
    for at in range(5):
        batches = [batch(10 * at + (member if apart else 0)) for member in range(3)]
        together = tuple(torch.stack(each) for each in zip(*batches, strict=True)) if apart else batches[0]
        result = step(together, ensemble)
        alone = [core.train_step(each, state) for each, state in zip(batches, states, strict=True)]
        ensemble, states = result.state, [each.state for each in alone]
        same(result.loss, torch.stack([each.loss for each in alone]))
        same(result.metrics["grad_norm"], torch.stack([each.metrics["grad_norm"] for each in alone]))
    assert ensemble.metadata["step"] == ensemble.optimizer["step"] == 5
    assert ensemble.metadata["learning_rate"] == schedule.get_lr(4)
    same(ensemble, stacked(states))


def test_a_member_is_a_state_as_any_other() -> None:
    core = core_of()
    states = [core.init(model(seed), "adamw") for seed in range(3)]
    member = pytree.tree_map(lambda each: each[1], stacked(states))
    same(core.train_step(batch(), member).state, core.train_step(batch(), states[1]).state)


@pytest.mark.parametrize("place", ["metadata", "optimizer"])
def test_members_may_have_rates_of_their_own(place: str) -> None:
    core, rates = core_of(), torch.tensor([0.1, 0.02, 0.0], dtype=torch.float64)
    start = core.init(model(), "adamw")

    def with_rate(rate: Any) -> ModelState:
        return replace(start, **{place: {**getattr(start, place), "learning_rate": rate}})

    ensemble = stacked([with_rate(rate) for rate in rates])
    step = torch.vmap(core.train_step, in_dims=(None, 0))
    for _ in range(2):
        ensemble = step(batch(), ensemble).state
    for at, rate in enumerate(rates.tolist()):
        alone = core.init(model(), "adamw", learning_rate=rate or 1e-30)
        for _ in range(2):
            alone = core.train_step(batch(), alone).state
        member = pytree.tree_map(lambda each, at=at: each[at], ensemble)
        same(member.weights, alone.weights)


def test_members_that_differ_in_a_number_are_not_stacked() -> None:
    core = core_of()
    one = core.init(model(), "adamw")
    with pytest.raises(ValueError, match="context"):
        stacked([one, core.train_step(batch(), one).state])


def test_a_state_goes_round_as_a_tree() -> None:
    core = core_of()
    state = core.init(model(), "adamw", schedule=Cosine(0.1, 5))
    leaves, spec = pytree.tree_flatten(state)
    assert all(isinstance(each, torch.Tensor) for each in leaves)
    again = pytree.tree_unflatten(leaves, spec)
    assert list(again.optimizer) == list(state.optimizer)
    assert again.metadata == state.metadata
    assert again.weights["parameters"].keys() == state.weights["parameters"].keys()
    zeros = pytree.tree_unflatten([0] * len(leaves), spec)  # as torch.vmap does, to count leaves
    assert pytree.tree_structure(zeros) == spec
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(state)]
    assert ".weights['parameters']['0.weight']" in paths
    result = core.train_step(batch(), state)
    again = pytree.tree_map(lambda each: each, result)
    assert isinstance(again, TrainingResult)
    assert again.metrics.keys() == result.metrics.keys()
    assert again.diagnostics == result.diagnostics
    alone = pytree.tree_map(lambda each: each, TrainingResult({"loss": torch.ones(())}))
    assert alone.state is None


def test_in_place_states_are_leaves_as_they_are() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    again = pytree.tree_map(lambda each: each, ModelState(layer, optimizer))
    assert (again.weights, again.optimizer) == (layer, optimizer)


# ------------------------------------------------------------------------------------------------ learnt learning rates


def by_hand(rate: torch.Tensor, state: ModelState, steps: int) -> torch.Tensor:
    """The loss after some steps of gradient descent, by autograd alone."""
    layer = nn.Linear(3, 2).double()
    weights = {name: each.clone().requires_grad_() for name, each in state.weights["parameters"].items()}

    def loss() -> torch.Tensor:
        outputs = torch.func.functional_call(layer, weights, (batch()[0],))
        return (outputs - batch()[1]).square().mean()

    for _ in range(steps):
        gradients = torch.autograd.grad(loss(), list(weights.values()), create_graph=True)
        weights = {name: each - rate * g for (name, each), g in zip(weights.items(), gradients, strict=True)}
    return loss()


def in_metadata(core: TrainerCore, rate: Any, net: nn.Module) -> ModelState:
    state = core.init(net, SGD(0.5))
    return replace(state, metadata={**state.metadata, "learning_rate": rate})


def in_optimizer_state(core: TrainerCore, rate: Any, net: nn.Module) -> ModelState:
    state = core.init(net, SGD(0.5))
    return replace(state, optimizer={**state.optimizer, "learning_rate": rate})


def by_schedule(core: TrainerCore, rate: Any, net: nn.Module) -> ModelState:
    class Own:
        def get_lr(self, step: int) -> Any:
            return rate

    return core.init(net, SGD(0.5), schedule=Own())


PLACES = {
    "init": lambda core, rate, net: core.init(net, "sgd", learning_rate=rate, momentum=0.0),
    "optimizer object": lambda core, rate, net: core.init(net, SGD(rate)),
    "metadata": in_metadata,
    "optimizer state": in_optimizer_state,
    "schedule": by_schedule,
    "scaled schedule": lambda core, rate, net: core.init(
        net, SGD(0.5), schedule=Scaled(Cosine(1.0, 10**9), factor=rate)
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transform", ["torch.func.grad", "backward"])
def test_a_learnt_rate_has_its_gradient_wherever_it_is_given(place: str, transform: str) -> None:
    core, net = core_of(), nn.Linear(3, 2).double()

    def loss_after(rate: torch.Tensor) -> torch.Tensor:
        state = PLACES[place](core, rate, net)
        for _ in range(3):
            state = core.train_step(batch(), state).state
        assert state.metadata["step"] == 3
        found: torch.Tensor = core.train_step(batch(), state).loss
        return found

    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(by_hand(rate, core.init(net, SGD(0.1)), 3), rate)
    assert abs(expected) > 1e-3
    if transform == "backward":
        loss_after(rate).backward()
        slope = rate.grad
    else:
        slope = torch.func.grad(loss_after)(rate.detach())
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=0)


def test_an_optimizer_state_given_to_a_step_brings_its_rate() -> None:
    core = core_of()
    state = core.init(nn.Linear(3, 2).double(), AdamW(0.5))

    def loss_after(rate: torch.Tensor) -> torch.Tensor:
        after = core.train_step(batch(), state, {**state.optimizer, "learning_rate": rate}).state
        found: torch.Tensor = core.train_step(batch(), after).loss
        return found

    low, high = (loss_after(torch.tensor(0.1 + each, dtype=torch.float64)) for each in (-1e-6, 1e-6))
    slope = torch.func.grad(loss_after)(torch.tensor(0.1, dtype=torch.float64))
    torch.testing.assert_close(slope, (high - low) / 2e-6, rtol=1e-5, atol=0)


def test_rates_of_each_step_and_of_each_member_have_gradients() -> None:
    core, net = core_of(), nn.Linear(3, 2).double()
    start = core.init(net, SGD(0.5))

    data = batch()

    def loss_after(rates: torch.Tensor) -> torch.Tensor:
        state = start
        for rate in rates:
            state = replace(state, metadata={**state.metadata, "learning_rate": rate})
            state = core.train_step(data, state).state
        found: torch.Tensor = core.train_step(data, state).loss
        return found

    rates = torch.tensor([[0.1, 0.05], [0.2, 0.01]], dtype=torch.float64)
    slopes = torch.func.grad(lambda rates: torch.vmap(loss_after)(rates).sum())(rates)
    expected = torch.stack([torch.func.grad(loss_after)(each) for each in rates])
    torch.testing.assert_close(slopes, expected, rtol=1e-10, atol=1e-14)
    assert (slopes != 0).all()


def test_two_rates_at_once_are_refused_rather_than_one_of_them_ignored() -> None:
    core, rate = core_of(), torch.tensor(0.1, dtype=torch.float64)
    state = in_optimizer_state(core, rate, model())
    both = replace(state, metadata={**state.metadata, "learning_rate": rate.clone()})
    with pytest.raises(
        ConfigurationError, match=r"has a tensor as learning rate, and metadata\['learning_rate'\] would"
    ):
        core.train_step(batch(), both)
    scheduled = replace(state, metadata={**state.metadata, "schedule": Cosine(0.1, 5)})
    with pytest.raises(ConfigurationError, match=r"metadata\['schedule'\] would replace it"):
        core.train_step(batch(), scheduled)


@pytest.mark.parametrize("rate", [torch.ones(2), torch.tensor(1)], ids=["a vector", "an integer"])
def test_a_rate_that_is_not_one_number_is_refused(rate: torch.Tensor) -> None:
    for make in (lambda: SGD(rate), lambda: core_of().init(model(), "adamw", learning_rate=rate)):
        with pytest.raises(
            ConfigurationError, match=r"learning_rate=tensor\(.*needs a number, or a floating-point tensor"
        ):
            make()
    with pytest.raises(
        ConfigurationError, match=r"Scaled\(factor=tensor\(.*needs a number, or a floating-point tensor"
    ):
        Scaled(Cosine(0.1, 5), factor=rate)  # type: ignore[arg-type]


def test_a_trainer_refuses_a_rate_that_nothing_would_differentiate() -> None:
    from pulsetrain import Trainer

    with pytest.raises(ConfigurationError, match=r"Trainer\(optimizer=SGD\): its learning rate is a tensor"):
        Trainer(
            model(), [batch()], strategy=SupervisedStrategy("mse"), optimizer=SGD(torch.tensor(0.1)),
            backend=TorchBackend("cpu", functional=True),
        )  # fmt: skip
