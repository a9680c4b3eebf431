"""Functional optimizers: ensembles under vmap, trees of all kinds, and arguments rejected before any computation."""

import re
import subprocess
import sys
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch

from pulsetrain.engine.backends.optax import create_optax, learning_rate_of, with_learning_rate
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers.functional import SGD, Adam, AdamW, RMSprop, apply_updates, create_functional


class Layer(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor


ALL = [
    SGD(0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    SGD(0.1, momentum=0.9, nesterov=True),
    Adam(0.1, weight_decay=0.1),
    AdamW(0.1, weight_decay=0.1),
    RMSprop(0.1, momentum=0.9, centered=True, weight_decay=0.1),
]


def tree(members=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(*members, *shape, generator=generator) for name, shape in (("w", (4, 3)), ("b", (3,)))}
    return {"layer": drawn, "scale": torch.randn(*members, 1, generator=generator)[..., 0]}


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.fixture(params=ALL, ids=lambda optimizer: type(optimizer).__name__)
def optimizer(request):
    return request.param


# ---------------------------------------------------------------------------------------------- torch's transforms


def test_an_ensemble_is_updated_as_its_members_are(optimizer):
    params, state = tree((3,)), optimizer.init(tree((3,)))
    dims = {key: None if key in ("learning_rate", "step") else 0 for key in state}
    together = torch.vmap(optimizer.update, in_dims=(0, dims, 0), out_dims=(0, dims))
    alone = [{"layer": {k: v[i] for k, v in params["layer"].items()}, "scale": params["scale"][i]} for i in range(3)]
    states = [optimizer.init(each) for each in alone]
    for step in range(4):
        grads = tree((3,), seed=step + 1)
        updates, state = together(grads, state, params)
        params = apply_updates(params, updates)
        for i in range(3):
            own = {"layer": {k: v[i] for k, v in grads["layer"].items()}, "scale": grads["scale"][i]}
            updates, states[i] = optimizer.update(own, states[i], alone[i])
            alone[i] = apply_updates(alone[i], updates)
    assert state["step"] == 4
    for i in range(3):
        assert_same(params["layer"]["w"][i], alone[i]["layer"]["w"])
        assert_same(params["scale"][i], alone[i]["scale"])


def test_members_of_an_ensemble_may_have_rates_of_their_own(optimizer):
    params, grads, rates = tree(), tree(seed=1), torch.tensor([0.1, 0.2, 0.0], dtype=torch.float64)
    state = optimizer.init(params)

    def moved(rate):
        return apply_updates(params, optimizer.update(grads, {**state, "learning_rate": rate}, params)[0])

    together = torch.vmap(moved)(rates)
    assert together["scale"].dtype == torch.float32
    for i, rate in enumerate(rates.tolist()):
        assert_same(together["layer"]["w"][i], moved(rate)["layer"]["w"])
    assert torch.equal(together["layer"]["w"][2], params["layer"]["w"])


def test_gradients_flow_through_an_update():
    optimizer = AdamW(0.1)
    params, grads = tree(), tree(seed=1)
    state = optimizer.init(params)

    def loss_after(rate):
        updates, _ = optimizer.update(grads, {**state, "learning_rate": rate}, params)
        return apply_updates(params, updates)["layer"]["w"].sum()

    slope = torch.func.grad(loss_after)(torch.tensor(0.1))
    assert slope.item() == pytest.approx(-grads["layer"]["w"].sign().sum().item(), rel=1e-4)


# ------------------------------------------------------------------------------------------------------------ trees


def test_any_pytree_is_taken_and_comes_back_in_its_kind(optimizer):
    params = [Layer(torch.ones(2, 3), torch.ones(3)), (torch.ones(()), {"deep": [torch.ones(2)]})]
    updates, state = optimizer.update(params, optimizer.init(params), params)
    made = apply_updates(params, updates)
    trees = [updates, made, *(value for key, value in state.items() if key not in ("learning_rate", "step"))]
    for each in trees:
        assert isinstance(each, list)
        assert isinstance(each[0], Layer)
        assert isinstance(each[1], tuple)
        assert each[1][1]["deep"][0].shape == (2,)
    assert optimizer.init(torch.ones(2))["step"] == 0


def test_leaves_are_matched_by_name_not_by_order(optimizer):
    params, grads = tree(), tree(seed=1)
    turned = OrderedDict(scale=grads["scale"], layer={"b": grads["layer"]["b"], "w": grads["layer"]["w"]})
    state = optimizer.init(params)
    torch.testing.assert_close(
        optimizer.update(turned, state, params), optimizer.update(grads, state, params), rtol=0, atol=0
    )


# --------------------------------------------------------------------------------------------------- what is refused

PARAMS = {"layer": {"w": torch.ones(4, 3), "b": torch.ones(3)}}


def with_layer(**changes):
    layer = {**PARAMS["layer"], **changes}
    return {"layer": {key: value for key, value in layer.items() if value is not ...}}


OTHERS = [  # the gradients, where they differ first, what is there, what should be
    (with_layer(w=torch.ones(4, 2)), "w", "torch.float32 of shape (4, 2)", "torch.float32 of shape (4, 3)"),
    (with_layer(b=...), "b", "nothing", "torch.float32 of shape (3,)"),
    (with_layer(c=torch.ones(1)), "c", "torch.float32 of shape (1,)", "nothing"),
    (with_layer(w=torch.ones(4, 3).double()), "w", "torch.float64 of shape (4, 3)", "torch.float32 of shape (4, 3)"),
    (with_layer(w={"deep": torch.ones(4, 3)}), "w", "nothing", "torch.float32 of shape (4, 3)"),
]


@pytest.mark.parametrize(("other", "name", "found", "needed"), OTHERS)
def test_gradients_of_other_parameters_are_refused_at_the_first_difference(optimizer, other, name, found, needed):
    difference = re.escape(
        f"['layer']['{name}']): is {found} where the parameters have {needed}; take them with respect"
    )
    with pytest.raises(ConfigurationError, match=rf"{type(optimizer).__name__}.update\(grads{difference}"):
        optimizer.update(other, optimizer.init(PARAMS), PARAMS)
    with pytest.raises(ConfigurationError, match=rf"apply_updates\(updates{difference}"):
        apply_updates(PARAMS, other)


@pytest.mark.parametrize("other", [other for other, *_ in OTHERS])
def test_a_state_of_other_parameters_is_refused(optimizer, other):
    with pytest.raises(
        ConfigurationError,
        match=r"update\(opt_state\['\w+'\]\['layer'\]\['.'\].*\): is .*new state with init\(",
    ):
        optimizer.update(other, optimizer.init(PARAMS), other)


def test_other_containers_are_refused(optimizer):
    with pytest.raises(ConfigurationError, match=r"update\(grads=tuple\): its containers are not those of the param"):
        optimizer.update((torch.ones(2),), optimizer.init([torch.ones(2)]), [torch.ones(2)])


@pytest.mark.parametrize("state", [{"learning_rate": 0.1, "step": 3}, {"step": 1, "exp_avg": PARAMS}, None, [1]])
def test_the_state_of_another_optimizer_is_refused(state):
    with pytest.raises(ConfigurationError, match=r"Adam.update\(opt_state.*needs \['exp_avg', .*create it with init\("):
        Adam(0.1).update(PARAMS, state, PARAMS)


def test_a_state_with_more_than_the_optimizer_keeps_is_refused(optimizer):
    state = {**optimizer.init(PARAMS), "more": PARAMS}
    with pytest.raises(
        ConfigurationError, match=r"update\(opt_state with \[.*'more'\]\): needs \[.*create it with init\("
    ):
        optimizer.update(PARAMS, state, PARAMS)


def test_what_is_not_a_tensor_is_refused_with_its_place_and_its_backend(optimizer):
    jnp = pytest.importorskip("jax.numpy", reason="needs the extra pulsetrain[jax]")
    state = optimizer.init(PARAMS)
    for leaf, message in (
        (np.ones((4, 3)), r"\(grads\['layer'\]\['w'\] of type numpy.ndarray\): needs a torch.Tensor; .*JaxBackend"),
        (jnp.ones((4, 3)), r"\(grads\['layer'\]\['w'\] of type jax.*\): needs a torch.Tensor; .*use JaxBackend"),
        (None, r"\(grads\['layer'\]\['w'\] of type builtins.NoneType\): needs .*pass zeros as the gradient"),
    ):
        with pytest.raises(TypeError, match=message):
            optimizer.update(with_layer(w=leaf), state, PARAMS)
        with pytest.raises(TypeError, match=message.replace("grads", "params")):
            optimizer.update(PARAMS, state, with_layer(w=leaf))
        with pytest.raises(TypeError, match=message.replace("grads", "params")):
            optimizer.init(with_layer(w=leaf))


def test_a_tree_without_numbers_to_train_is_refused(optimizer):
    with pytest.raises(ConfigurationError, match=r"init\(params=\{\}\): holds no tensor"):
        optimizer.init({})
    with pytest.raises(
        TypeError, match=r"init\(params\['layer'\]\['n'\] of torch.int64\): .*without the model's buffers"
    ):
        optimizer.init(with_layer(n=torch.ones(3, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"layer": {"w": True}}, r"\(decay_mask\['layer'\]\['b'\]\): is nothing where .*create the mask from these"),
        (lambda params: {"layer": [True, False]}, r"\(decay_mask\['layer'\]\['w'\]\): is nothing where"),
        (with_layer(w=True, b=None), r"\(decay_mask\['layer'\]\['b'\]=None\): needs True if the parameter decays"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    with pytest.raises(ConfigurationError, match=r"AdamW.init" + message):
        AdamW(0.1, weight_decay=0.1, decay_mask=mask).init(PARAMS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(0.0), r"SGD\(learning_rate=0.0\): needs a positive number"),
        (lambda: AdamW(0.1, weight_decay=-1.0), r"AdamW\(weight_decay=-1.0\): needs a number that is not negative"),
        (lambda: Adam(0.1, betas=(0.9, 1.0)), r"Adam\(betas\[1\]=1.0\): needs a number from 0"),
        (lambda: RMSprop(0.1, centered="no"), r"RMSprop\(centered='no'\): needs to be True or False"),
        (
            lambda: SGD(0.1, nesterov=True),
            r"SGD\(nesterov=True, momentum=0.0, dampening=0.0\): needs a momentum ab",
        ),
        (lambda: SGD(0.1, decay_mask="auto"), r"SGD\(decay_mask='auto'\): needs a pytree of bools"),
        (lambda: create_functional("sgd", 0.1, momentum=2.0), r"create_functional\(momentum=2.0\): needs a number"),
        (lambda: create_functional("adam", 0.1, momentum=0.9), r"create_functional\(momentum=0.9\): unknown to 'adam'"),
        (
            lambda: create_functional("adamw", 0.1, fused=True),
            r"create_functional\(fused=True\): .*only has it in",
        ),
        (
            lambda: create_functional("adam", 0.1, amsgrad=True),
            r"create_functional\(amsgrad=True\): .*TorchBackend",
        ),
        (
            lambda: create_functional("muon", 0.1),
            r"name='muon'\): unknown; choose one of adam, adamw, rmsprop, sgd; .*muon.* in place: use TorchBackend",
        ),
        (lambda: create_functional("adamx", 0.1), r"name='adamx'\): unknown; .*did you mean 'adam"),
        (lambda: create_optax("sgd", 0.1, dampening=0.5), r"create_optax\(dampening=0.5\): optax's momentum has none"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_by_name_come_the_defaults_and_keywords_of_optimizers_in_place():
    assert create_functional("sgd", 0.1) == SGD(0.1, momentum=0.9)
    assert create_functional("sgd", 0.1, momentum=0.0) == SGD(0.1)
    adamw = create_functional("adamw", 0.1, 0.2, adam_beta2=0.95, adam_epsilon=1e-6, fused=False, foreach=None)
    assert adamw == AdamW(0.1, weight_decay=0.2, betas=(0.9, 0.95), eps=1e-6)
    assert create_functional("rmsprop", 0.1, differentiable=True) == RMSprop(0.1)


# ------------------------------------------------------------------------------------------------- without the extra


@pytest.mark.parametrize("package", ["jax", "optax"])
def test_without_the_packages_the_extra_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    for call in (lambda: create_optax("sgd", 0.1), lambda: learning_rate_of({}), lambda: with_learning_rate({}, 0.1)):
        with pytest.raises(ConfigurationError, match=rf"\(\): needs a package that is not there .*{package}.*\[jax\]'"):
            call()


def test_importing_them_imports_neither_jax_nor_optax():
    code = (
        "import sys, pulsetrain.engine.backends.optax, pulsetrain.engine.optimizers.functional;"
        "print([name for name in ('jax', 'optax', 'flax') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
