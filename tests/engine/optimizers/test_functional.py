"""Functional optimizers: torch's, optax's and torch.optim's are one and the same, update for update."""

import functools

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from pulsetrain.engine.backends.optax import create_optax, learning_rate_of, with_learning_rate
from pulsetrain.engine.optimizers.functional import SGD, Adam, AdamW, RMSprop, apply_updates, create_functional

STEPS = 200
TORCHS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
KINDS = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "rmsprop": RMSprop}

CASES = [
    ("sgd", {"momentum": 0.0}),
    ("sgd", {"momentum": 0.0, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.8, "nesterov": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("adam", {}),
    ("adam", {"weight_decay": 0.1}),
    ("adam", {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ("adam", {"betas": (0.0, 0.9)}),
    ("adamw", {}),
    ("adamw", {"weight_decay": 0.1}),
    ("adamw", {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ("rmsprop", {}),
    ("rmsprop", {"alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1}),
    ("rmsprop", {"centered": True}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
]
FOR_OPTAX = [case for case in CASES if "dampening" not in case[1]]
ONE_OF_EACH = [CASES[3], CASES[8], CASES[12], CASES[18]]
DTYPES = {torch.float32: 1e-6, torch.float64: 1e-12}

# the keys are not in alphabetical order, which is the order of jax's leaves
SHAPES = {"layer": {"weight": (7, 5), "bias": (5,)}, "head": [(3, 2, 2), ((),)]}
MASK = {"layer": {"weight": True, "bias": False}, "head": [True, (False,)]}


def shown(case):
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


def random_tree(generator, dtype, steps=()):
    def drawn(shapes):
        if isinstance(shapes, dict):
            return {key: drawn(each) for key, each in shapes.items()}
        if isinstance(shapes, list):
            return [drawn(each) for each in shapes]
        if shapes == ((),):
            return (drawn(()),)
        return torch.randn((*steps, *shapes), generator=generator, dtype=dtype)

    return drawn(SHAPES)


@functools.cache
def problem(dtype):
    """Parameters, and the gradients of all updates along the first dimension."""
    generator = torch.Generator().manual_seed(0)
    return random_tree(generator, dtype), random_tree(generator, dtype, (STEPS,))


def constant(step):
    return 1e-3


def saw(step):
    return 1e-3 * (step % 50) / 25  # 0 at times


def by_path(tree):
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(tree)}


def by_torch_optim(case, dtype, rate=constant, mask=None):
    return computed_by_torch(CASES.index(case), dtype, rate, mask is not None)


@functools.cache
def computed_by_torch(case, dtype, rate, masked):
    name, options = CASES[case]
    params, grads = problem(dtype)
    weights = {path: leaf.clone().requires_grad_() for path, leaf in by_path(params).items()}
    decays = by_path(MASK) if masked else dict.fromkeys(weights, True)
    spared = {"params": [leaf for path, leaf in weights.items() if not decays[path]], "weight_decay": 0.0}
    decayed = {"params": [leaf for path, leaf in weights.items() if decays[path]]}
    optimizer = TORCHS[name]([decayed, spared], lr=1.0, **{"weight_decay": 0.0, **options})
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for path, grad in by_path(grads).items():
            weights[path].grad = grad[step].clone()
        optimizer.step()
    return {path: leaf.detach() for path, leaf in weights.items()}


def by_functional(case, dtype, rate=constant, mask=None):
    name, options = case
    params, grads = problem(dtype)
    optimizer = create_functional(name, rate(1), decay_mask=mask, **options)
    state = optimizer.init(params)
    for step in range(STEPS):
        state = {**state, "learning_rate": rate(step)}
        updates, state = optimizer.update(pytree.tree_map(lambda grad, at=step: grad[at], grads), state, params)
        params = apply_updates(params, updates)
    return by_path(params)


def by_optax(case, dtype, rate=constant, mask=None):
    jax = pytest.importorskip("jax", reason="needs the extra pulsetrain[jax]")
    optax = pytest.importorskip("optax", reason="needs the extra pulsetrain[jax]")
    name, options = case
    with jax.enable_x64(dtype is torch.float64):
        params, grads = jax.tree.map(lambda leaf: jax.numpy.asarray(leaf.numpy()), problem(dtype))
        optimizer = create_optax(name, rate(1), decay_mask=mask, **options)

        def update(carried, now):
            params, state = carried
            updates, state = optimizer.update(now[0], with_learning_rate(state, now[1]), params)
            return (optax.apply_updates(params, updates), state), None

        rates = jax.numpy.asarray([rate(step) for step in range(STEPS)])
        follow = jax.jit(lambda params, grads: jax.lax.scan(update, (params, optimizer.init(params)), (grads, rates)))
        (params, _), _ = follow(params, grads)
        return by_path(jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf)), params))


def deviation(ours, theirs):
    """The length of the difference over the length of all parameters."""
    assert ours.keys() == theirs.keys()
    assert all(ours[path].dtype == leaf.dtype and ours[path].shape == leaf.shape for path, leaf in theirs.items())
    difference = torch.stack([(ours[path] - leaf).norm() for path, leaf in theirs.items()]).norm()
    return (difference / torch.stack([leaf.norm() for leaf in theirs.values()]).norm()).item()


# ------------------------------------------------------------------------------------------------- one and the same


def in_both_dtypes(cases):
    """Each in float64, which distinguishes formulas best, and one of each kind in float32 too."""
    return [
        pytest.param(case, dtype, id=f"{shown(case)}-{dtype}")
        for dtype, its in ((torch.float64, cases), (torch.float32, ONE_OF_EACH))
        for case in its
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), in_both_dtypes(CASES))
def test_functional_optimizers_have_torchs_numbers(case, dtype):
    theirs = by_torch_optim(case, dtype)
    assert deviation(by_path(problem(dtype)[0]), theirs) > 1e-3  # otherwise there is nothing to compare
    assert deviation(by_functional(case, dtype), theirs) < DTYPES[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), in_both_dtypes(FOR_OPTAX))
def test_optax_has_torchs_numbers(case, dtype):
    assert deviation(by_optax(case, dtype), by_torch_optim(case, dtype)) < DTYPES[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("by", [by_functional, by_optax])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=shown)
def test_they_agree_under_a_schedule_too(case, dtype, by):
    theirs = by_torch_optim(case, dtype, saw)
    assert deviation(by_torch_optim(case, dtype), theirs) > 1e-5
    assert deviation(by(case, dtype, saw), theirs) < DTYPES[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("by", [by_functional, by_optax])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=shown)
def test_a_mask_spares_parameters_as_a_group_without_decay_does(case, by):
    theirs = by_torch_optim(case, torch.float64, mask=MASK)
    assert deviation(by_torch_optim(case, torch.float64), theirs) > 1e-5
    assert deviation(by(case, torch.float64, mask=MASK), theirs) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("by", [by_functional, by_optax])
def test_a_mask_may_be_a_function_of_the_parameters(by):
    def matrices(params):
        return {"layer": {name: each.ndim > 1 for name, each in params["layer"].items()}, "head": [True, (False,)]}

    case = ONE_OF_EACH[2]
    theirs = by_torch_optim(case, torch.float64, mask=MASK)
    assert deviation(by(case, torch.float64, mask=matrices), theirs) < 1e-12


# ------------------------------------------------------------------------------------------------------- purity


@pytest.mark.parametrize("case", CASES, ids=shown)
def test_nothing_that_is_given_changes_and_no_memory_is_shared(case):
    params, grads = problem(torch.float32)
    params, grads = pytree.tree_map(torch.clone, (params, pytree.tree_map(lambda grad: grad[0], grads)))
    optimizer = KINDS[case[0]](0.1, **case[1])
    state = optimizer.init(params)
    _, state = optimizer.update(grads, state, params)
    given = (params, grads, state)
    before = pytree.tree_map_only(torch.Tensor, torch.clone, given)
    structure = pytree.tree_structure(given)
    updates, following = optimizer.update(grads, state, params)
    made = apply_updates(params, updates)
    assert pytree.tree_structure(given) == structure
    for old, now in zip(pytree.tree_leaves(before), pytree.tree_leaves(given), strict=True):
        assert torch.equal(old, now) if isinstance(old, torch.Tensor) else old == now
    kept = {leaf.data_ptr() for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)}
    new = [leaf for leaf in pytree.tree_leaves((updates, following, made)) if isinstance(leaf, torch.Tensor)]
    assert kept.isdisjoint(leaf.data_ptr() for leaf in new)
    assert len({leaf.data_ptr() for leaf in pytree.tree_leaves((updates, made))}) == 8


def test_the_state_holds_all_that_changes_and_the_optimizer_nothing():
    params = problem(torch.float32)[0]
    optimizer = create_functional("rmsprop", 0.1, momentum=0.9, centered=True)
    state = optimizer.init(params)
    assert list(state) == ["learning_rate", "step", "square_avg", "grad_avg", "momentum_buffer"]
    assert (state["learning_rate"], state["step"]) == (0.1, 0)
    _, state = optimizer.update(params, state, params)
    _, state = optimizer.update(params, {**state, "learning_rate": 0.05}, params)
    assert (state["learning_rate"], state["step"], optimizer.learning_rate) == (0.05, 2, 0.1)
    with pytest.raises(AttributeError):
        optimizer.learning_rate = 0.2


def test_a_saved_state_continues_bit_for_bit(tmp_path):
    params, grads = problem(torch.float32)
    now = pytree.tree_map(lambda grad: grad[0], grads)
    optimizer = create_functional("adamw", 0.1, 0.1)
    _, state = optimizer.update(now, optimizer.init(params), params)
    torch.save(state, tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    torch.testing.assert_close(
        optimizer.update(now, loaded, params), optimizer.update(now, state, params), rtol=0, atol=0
    )


# ------------------------------------------------------------------------------------------ the rate in optax's state


@pytest.fixture
def jax():
    pytest.importorskip("optax", reason="needs the extra pulsetrain[jax]")
    return pytest.importorskip("jax", reason="needs the extra pulsetrain[jax]")


def test_a_different_rate_does_not_compile_a_new_program(jax):
    params = {"w": jax.numpy.ones(3)}
    optimizer = create_optax("adamw", 0.1)
    traced = []

    @jax.jit
    def update(grads, state, params):
        traced.append(1)
        return optimizer.update(grads, state, params)

    state = optimizer.init(params)
    for rate in (0.1, 0.5, 0.25, np.float64(0.125), jax.numpy.float32(0.0625)):
        updates, state = update(params, with_learning_rate(state, rate), params)
        assert learning_rate_of(state) == np.float32(rate)
        assert updates["w"].tolist() == pytest.approx([-float(rate)] * 3, rel=1e-5)
    assert len(traced) == 1


def test_a_new_rate_is_placed_where_the_old_one_was(jax):
    params = {"w": jax.numpy.ones(3)}
    state = create_optax("adamw", 0.1).init(params)
    assert not learning_rate_of(with_learning_rate(state, 0.5)).committed
    put = jax.device_put(state, jax.devices()[0])
    rate = learning_rate_of(with_learning_rate(put, 0.5))
    assert rate.committed
    assert (rate.sharding, rate.dtype) == (learning_rate_of(put).sharding, learning_rate_of(put).dtype)


def test_the_rate_is_found_at_any_depth_and_a_parameter_of_that_name_is_none(jax):
    import optax

    params = {"learning_rate": jax.numpy.ones(3)}
    state = optax.chain(optax.clip(1.0), optax.chain(create_optax("sgd", 0.1))).init(params)
    assert learning_rate_of(state) == np.float32(0.1)
    changed = with_learning_rate(state, 0.5)
    assert (learning_rate_of(changed), learning_rate_of(state)) == (0.5, np.float32(0.1))
    assert jax.tree.structure(changed) == jax.tree.structure(state)
    fixed = optax.sgd(0.1, momentum=0.9).init(params)
    assert learning_rate_of(fixed) is None
    assert with_learning_rate(fixed, 0.5) == fixed


@pytest.mark.slow
def test_beside_bfloat16_parameters_the_rate_stays_exact(jax):
    params = {"w": jax.numpy.ones(3, jax.numpy.bfloat16)}
    optimizer = create_optax("adamw", 0.001, 0.1)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert learning_rate_of(state) == np.float32(0.001)
    assert updates["w"].dtype == jax.numpy.bfloat16
