"""Torch on values: what a state holds, ensembles by torch.vmap, and what works in place alone."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pulsetrain.engine import ActivationCheckpointing, ConfigurationError, JaxBackend, SupervisedStrategy, TorchBackend
from pulsetrain.engine.backends import FunctionalBackend
from pulsetrain.engine.backends.core import TrainerCore
from pulsetrain.engine.optimizers.functional import SGD
from pulsetrain.engine.step.backend import Backend
from pulsetrain.engine.step.protocols import BackendSettings
from tests.support.losses import needs_jax

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


def test_a_first_state_stays_what_it_was_whatever_becomes_of_the_model():
    core, model = core_of(), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    first = core.init(model, "sgd", learning_rate=0.1)
    before = pytree.tree_map(torch.clone, first.weights)
    core.train_epoch([batch_of(seed=seed) for seed in range(3)], first)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    torch.testing.assert_close(first.weights, before, rtol=0, atol=0)


def test_a_pass_changes_buffers_only_in_the_new_state():
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


def test_no_value_of_a_state_holds_a_graph():
    core = core_of()
    result = core.train_step(batch_of(), core.init(mlp(), "adamw"))
    tensors = [
        leaf
        for leaf in pytree.tree_leaves((result.state.weights, result.state.optimizer, dict(result.metrics)))
        if hasattr(leaf, "grad_fn")
    ]
    assert len(tensors) > 10
    assert not any(tensor.requires_grad for tensor in tensors)


def test_clipping_bounds_the_update_and_not_the_norm_that_is_reported():
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


class Elsewhere(torch.Tensor):
    """A condition that says that it is on an accelerator, where reading it would wait."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("cuda")

    def __bool__(self):
        raise AssertionError("the host would wait for the device")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_update_is_left_out_without_a_look_at_a_condition_on_an_accelerator(optimizer):
    core = core_of()
    state = core.train_step(batch_of(), core.init(mlp(), optimizer, learning_rate=0.1)).state
    found = core.backend.forward_backward(state, core.backend.prepare_batch(batch_of(), core.strategy), core.strategy)
    found = core.backend.finish_gradients(state, found)
    usual = core.backend.apply_gradients(state, found)
    for skip in (True, False):
        there = torch.tensor(skip).as_subclass(Elsewhere)
        assert there.device.type == "cuda"
        made, here = (core.backend.apply_gradients(state, found, each) for each in (there, torch.tensor(skip)))
        expected = state if skip else usual
        for each in (made, here):
            torch.testing.assert_close(each.weights, expected.weights, rtol=0, atol=0)
            trees = {name: tree for name, tree in each.optimizer.items() if name not in NUMBERS}
            torch.testing.assert_close(trees, {name: expected.optimizer[name] for name in trees}, rtol=0, atol=0)
            assert each.metadata["step"] == state.metadata["step"] + 1


LARGE = torch.full((3, 4), 5.0, dtype=torch.float16), torch.full((3, 2), 100.0, dtype=torch.float16)


def half_in_place():
    """Weights in half precision after one clipped update in place; squares of the gradients are beyond its range."""
    model = nn.Linear(4, 2).half()
    with torch.no_grad():
        model.weight.fill_(0.25)
        model.bias.zero_()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    backend, strategy = TorchBackend("cpu"), SupervisedStrategy("mse")
    backend.configure(BackendSettings(device="cpu", clip_grad_norm=1.0))
    state = backend.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
    backend.train_step(state, backend.prepare_batch(LARGE, strategy), strategy)
    return start, model.state_dict()


@pytest.mark.parametrize("library", ["torch", pytest.param("jax", marks=needs_jax)])
def test_clipping_weights_in_half_precision_leaves_an_update_as_in_place(library):
    start, expected = half_in_place()
    if library == "jax":
        model = (lambda weights, x: x @ weights["weight"].T + weights["bias"], {k: v.numpy() for k, v in start.items()})
        backend = JaxBackend("cpu")
    else:
        model, backend = nn.Linear(4, 2).half(), TorchBackend(functional=True, device="cpu")
        model.load_state_dict(start)
    core = TrainerCore(backend, SupervisedStrategy("mse"), BackendSettings(device="cpu", clip_grad_norm=1.0))
    result = core.train_step(LARGE, core.init(model, "sgd", learning_rate=0.5, momentum=0.0))
    found = backend.flat(result.state.weights["parameters"])
    assert 1000 < float(result.metrics["grad_norm"]) < float("inf")
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float16
        assert (found[name] != start[name]).all()
        torch.testing.assert_close(found[name] - start[name], tensor - start[name], rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("library", ["torch", pytest.param("jax", marks=needs_jax)])
def test_a_factor_in_float64_leaves_gradients_in_their_own_type(library):
    """Counts are divided in float64, which would widen a scalar in torch, and everything in jax."""
    start = {"weight": torch.ones(2, 4), "scale": torch.ones(())}
    if library == "jax":
        import jax

        model = (
            lambda weights, x: weights["scale"] * (x @ weights["weight"].T),
            {k: v.numpy() for k, v in start.items()},
        )
        backend, wide = JaxBackend("cpu"), jax.enable_x64(True)
    else:

        class Scaled(nn.Linear):
            def __init__(self):
                super().__init__(4, 2, bias=False)
                self.scale = nn.Parameter(torch.ones(()))

            def forward(self, inputs):
                return self.scale * super().forward(inputs)

        model, backend, wide = Scaled(), TorchBackend(functional=True, device="cpu"), nullcontext()
    strategy, half = SupervisedStrategy("mse"), torch.tensor(0.5, dtype=torch.float64)
    with wide:
        state = TrainerCore(backend, strategy, BackendSettings(device="cpu")).init(model, "sgd", learning_rate=0.5)
        batch = backend.prepare_batch((torch.ones(3, 4), torch.zeros(3, 2)), strategy)
        found = backend.forward_backward(state, batch, strategy, half)
        found = backend.forward_backward(state, batch, strategy, half, found)
        finished = backend.finish_gradients(state, found, half)
        gradients = backend.flat(finished.gradients)
    assert {name: each.dtype for name, each in gradients.items()} == {"weight": torch.float32, "scale": torch.float32}


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
    core.check = not apart  # the values of what vmap has split cannot be read
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
    ("setting", "parts"),
    [
        ({"precision": "fp16"}, "precision='fp16'"),
        ({"compile": True}, "compile=True"),
        (
            {"activation_checkpointing": ActivationCheckpointing("0")},
            r"activation_checkpointing=ActivationCheckpointing\('0'\)",
        ),
        ({"activation_checkpointing": "0"}, "activation_checkpointing='0'"),
    ],
    ids=str,
)
def test_what_works_in_place_alone_is_refused(setting, parts):
    message = rf"TorchBackend\({parts}, functional=True\): works in place; leave it out"
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


@pytest.mark.parametrize("library", ["torch", pytest.param("jax", marks=needs_jax)])
def test_half_precision_rounds_the_product_and_not_the_factor(library):
    values = torch.linspace(1, 2, 200).bfloat16()
    if library == "jax":
        import jax.numpy as jnp

        backend, gradient = JaxBackend("cpu"), jnp.asarray(values.float().numpy(), dtype=jnp.bfloat16)
        factor = jnp.float32(1 + 3 / 1024)
    else:
        backend, gradient, factor = TorchBackend(functional=True, device="cpu"), values, torch.tensor(1 + 3 / 1024)
    found = backend.scaled({"weight": gradient}, factor)["weight"]
    assert found.dtype == gradient.dtype
    expected = (values.float() * (1 + 3 / 1024)).bfloat16()
    assert not torch.equal(expected, values)
    assert found.astype("float32").tolist() == expected.tolist() if library == "jax" else torch.equal(found, expected)
