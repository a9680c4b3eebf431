"""Torch on values: what a state holds, ensembles by torch.vmap, and what works in place alone."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from engine import ConfigurationError, SupervisedStrategy, TorchBackend
from engine.backends import FunctionalBackend
from engine.core import TrainerCore
from engine.optimizers.functional import SGD
from engine.protocols import Backend, BackendSettings

NUMBERS = ("step", "learning_rate")  # of an optimizer's state: one for the whole ensemble


def mlp(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch_of(rows=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)


def core_of(loss="cross_entropy", **options):
    return TrainerCore(
        TorchBackend(functional=True, device="cpu"), SupervisedStrategy(loss), BackendSettings(**options)
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, inputs):
        return self.frozen(self.second(self.first(inputs)) * self.scale)


# --------------------------------------------------------------------------------------------------- what it holds


def test_a_state_holds_what_learns_apart_from_what_does_not():
    model = Tied()
    state = core_of().init(model, "adamw")
    assert list(state.weights["parameters"]) == ["first.weight", "first.bias", "second.bias"]
    assert set(state.weights["buffers"]) == {"frozen.weight", "frozen.bias", "scale"}
    for tree in (state.optimizer["exp_avg"], state.optimizer["exp_avg_sq"]):
        assert list(tree) == list(state.weights["parameters"])


def test_the_model_that_was_given_stays_what_it_is():
    core, model = core_of(), Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = core.init(model, "sgd", learning_rate=0.1)
    for seed in range(3):
        state = core.train_step(batch_of(seed=seed), state).state
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with torch.no_grad():
        model.first.weight.zero_()
    assert state.weights["parameters"]["first.weight"].any()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_pass_changes_buffers_in_the_new_state_alone():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    core = core_of()
    state = core.init(model, "sgd")
    result = core.train_step(batch_of(), state)
    assert state.weights["buffers"]["0.num_batches_tracked"] == 0
    assert result.state.weights["buffers"]["0.num_batches_tracked"] == 1
    assert not state.weights["buffers"]["0.running_mean"].any()
    assert result.state.weights["buffers"]["0.running_mean"].all()
    evaluated = core.eval_step(batch_of(), result.state)
    assert evaluated["loss"] != core.eval_step(batch_of(), state)["loss"], "by the statistics of the state"
    assert not model[0].running_mean.any()
    assert model.training


def test_no_value_of_a_state_hangs_on_a_graph():
    core = core_of()
    result = core.train_step(batch_of(), core.init(mlp(), "adamw"))
    tensors = [
        leaf
        for leaf in pytree.tree_leaves((result.state.weights, result.state.optimizer, dict(result.metrics)))
        if hasattr(leaf, "grad_fn")
    ]
    assert len(tensors) > 10
    assert not any(tensor.requires_grad for tensor in tensors)


def test_clipping_bounds_the_update_and_not_the_norm_that_is_told():
    free, bounded = core_of(), core_of(clip_grad_norm=0.01)
    results = []
    for core in (free, bounded):
        state = core.init(mlp(), SGD(1.0))
        result = core.train_step(batch_of(), state)
        moved = [
            result.state.weights["parameters"][name] - tensor for name, tensor in state.weights["parameters"].items()
        ]
        results.append((result.metrics["grad_norm"], torch.cat([each.flatten() for each in moved]).norm()))
    assert results[0][0] == results[1][0] > 0.1
    torch.testing.assert_close(results[0][1], results[0][0])
    assert results[1][1].item() == pytest.approx(0.01, rel=1e-3)


def test_every_part_of_the_protocol_is_there():
    wanted = {name for name in (*vars(Backend), *Backend.__annotations__) if not name.startswith("_")}
    for backend in (FunctionalBackend(), TorchBackend(functional=True)):
        assert [name for name in sorted(wanted) if not hasattr(backend, name)] == []


# ----------------------------------------------------------------------------------------------------- ensembles


def stacked(states):
    """Weights and optimizer states of an ensemble, and the dimensions of the latter for torch.vmap."""
    weights = pytree.tree_map(lambda *each: torch.stack(each), *[state.weights for state in states])
    first = states[0].optimizer
    optimizer = {
        name: first[name]
        if name in NUMBERS
        else pytree.tree_map(lambda *each: torch.stack(each), *[state.optimizer[name] for state in states])
        for name in first
    }
    return weights, optimizer, {name: None if name in NUMBERS else 0 for name in first}


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop"])
@pytest.mark.parametrize("apart", [False, True], ids=["one batch", "a batch each"])
def test_an_ensemble_trains_under_vmap_as_its_members_do_alone(optimizer, apart):
    core = core_of(clip_grad_norm=0.5)
    core.strategy.check_values = not apart  # what vmap has split cannot be looked at
    states = [core.init(mlp(seed), optimizer, learning_rate=0.01, weight_decay=0.1) for seed in range(3)]
    start = states[0]
    weights, opt_state, dims = stacked(states)
    for step in range(5):
        batches = [batch_of(seed=10 * step + (member if apart else 0)) for member in range(3)]
        numbers = {name: opt_state[name] for name in NUMBERS}
        metadata = {**start.metadata, "step": step}

        def train(weights, opt_state, inputs, targets, metadata=metadata):
            state = replace(start, weights=weights, optimizer=opt_state, metadata=metadata)
            result = core.train_step((inputs, targets), state)
            trees = {name: tree for name, tree in result.state.optimizer.items() if name not in NUMBERS}
            return result.state.weights, trees, result.metrics["loss"], result.metrics["grad_norm"]

        inputs, targets = (torch.stack(each) for each in zip(*batches, strict=True))
        given = (inputs, targets) if apart else batches[0]
        mapped = torch.vmap(train, in_dims=(0, dims, 0, 0) if apart else (0, dims, None, None))
        weights, trees, losses, norms = mapped(weights, opt_state, *given)
        opt_state = {name: {**trees, **numbers, "step": step + 1}[name] for name in dims}  # in the order of its keys
        results = [core.train_step(batch, state) for batch, state in zip(batches, states, strict=True)]
        states = [result.state for result in results]
        torch.testing.assert_close(losses, torch.stack([result.loss for result in results]))
        torch.testing.assert_close(norms, torch.stack([result.metrics["grad_norm"] for result in results]))
    expected, expected_opt, _ = stacked(states)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(opt_state, expected_opt, rtol=1e-5, atol=1e-6)
    assert len(set(losses.tolist())) == 3


# ------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"precision": "fp16"}, "precision='fp16'"),
        ({"compile": True}, "compile=True"),
        ({"activation_checkpointing": "0"}, "activation_checkpointing='0'"),
    ],
    ids=str,
)
def test_what_works_in_place_alone_is_refused(setting, told):
    message = rf"TorchBackend\(functional=True\): {told} works in place; leave it out"
    with pytest.raises(ConfigurationError, match=message):
        TorchBackend(functional=True, **setting)
    with pytest.raises(ConfigurationError, match=message):
        core_of(**setting)


def test_autocast_to_bfloat16_keeps_weights_in_float32():
    core = core_of(precision="bf16")
    state = core.init(mlp(), "adamw")
    result = core.train_step(batch_of(), state)
    assert {tensor.dtype for tensor in result.state.weights["parameters"].values()} == {torch.float32}
    full = core_of()
    assert result.loss != full.train_step(batch_of(), full.init(mlp(), "adamw")).loss


def test_a_loss_without_a_gradient_is_refused_as_it_is_in_place():
    class Detached(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).detach()

    core = core_of()
    state = core.init(Detached(4, 3), "sgd")
    before = state.weights["parameters"]["weight"].clone()
    with pytest.raises(RuntimeError, match="the loss has no gradient: no parameter that requires one took part in it"):
        core.train_step(batch_of(), state)
    assert torch.equal(state.weights["parameters"]["weight"], before)


def test_an_error_of_the_model_says_what_it_was_given():
    core = core_of()
    state = core.init(mlp(), "sgd")
    with pytest.raises(RuntimeError) as error:
        core.train_step((torch.ones(2, 5), torch.zeros(2, dtype=torch.int64)), state)
    assert error.value.__notes__ == [
        "given inputs float32 (2, 5), targets int64 (2,) from 0 to 0",
    ]


def test_a_backend_serves_one_trainer():
    backend = TorchBackend(functional=True)
    backend.configure(BackendSettings(device="cpu"))
    with pytest.raises(ConfigurationError, match="serves another trainer already; give each Trainer a backend of its"):
        TrainerCore(backend, SupervisedStrategy(), BackendSettings(device="cpu"))
