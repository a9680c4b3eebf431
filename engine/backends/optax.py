"""Optax optimizers that compute torch's numbers, and the learning rate in their state."""

from __future__ import annotations

import math
from types import ModuleType

from torch import Tensor

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers.functional import SGD, Adam, AdamW, DecayMask, RMSprop, create_functional
from pulsetrain.engine.step.protocols import Optimizer, Tree

__all__ = ["create_optax", "jax_and_optax", "learning_rate_of", "with_learning_rate"]

_RATE = "learning_rate"


def jax_and_optax(place: str = "JaxBackend") -> tuple[ModuleType, ModuleType]:
    """The packages jax and optax.

    Raises:
        ConfigurationError: one of them is not installed.
    """
    try:
        import jax
        import optax
    except ImportError as error:
        raise ConfigurationError(
            f"{place}: needs a package that is not there ({error}); pip install 'pulsetrain[jax]'"
        ) from error
    return jax, optax


def create_optax(
    name: str,
    learning_rate: float | Tensor,
    weight_decay: float = 0.0,
    *,
    decay_mask: DecayMask = None,
    **options: object,
) -> Optimizer:
    """The optax.GradientTransformation of that name, with the numbers of torch.optim.

    Optax's own of these names differ from torch's: rmsprop in where eps and the rate enter, adam in the first updates
    in float32 (by up to 1e-5, since it subtracts the power of beta2 from 1), adamw in the rounding of its decay. One
    difference remains in float32: torch rounds a decayed parameter before it adds the update, and XLA does not.

    Args:
        name: sgd, adam, adamw or rmsprop.
        decay_mask: a pytree of bools like the parameters, or a function from them to one; None lets all decay.
        options: those of `create_functional`, under torch's names.

    Raises:
        ConfigurationError: as `create_functional`; a dampening, which optax lacks; or jax or optax is not installed.
    """
    jax, optax = jax_and_optax("create_optax()")
    if isinstance(learning_rate, Tensor):
        raise ConfigurationError(
            "needs a number for an optimizer of optax", "create_optax", learning_rate=learning_rate
        )
    wanted = create_functional(name, learning_rate, weight_decay, decay_mask=decay_mask, **options)
    if isinstance(wanted, SGD) and wanted.dampening:
        raise ConfigurationError(
            "optax's momentum has none; leave it out, or take TorchBackend()",
            "create_optax",
            dampening=wanted.dampening,
        )

    # only the rate is injected: betas would become arrays, and in float32 1 - beta2 would be off by 1e-5
    def chain(learning_rate: Array) -> Tree:
        return optax.chain(*_steps(optax, wanted, learning_rate))

    # in bfloat16, the dtype of such parameters, the rate would be off by up to 0.4%
    dtype = jax.numpy.result_type(float)
    made: Optimizer = optax.inject_hyperparams(chain, hyperparam_dtype=dtype)(learning_rate=wanted.learning_rate)
    return made


def learning_rate_of(opt_state: Tree) -> Array:
    """The learning rate that a state holds, an array of shape (); None if none was injected.

    It is found at any depth, as inside optax.chain; if there are several, the first is returned.
    """
    jax, _ = jax_and_optax("learning_rate_of()")
    holders = filter(_holds_rate, jax.tree.leaves(opt_state, is_leaf=_holds_rate))
    return next((holder.hyperparams[_RATE] for holder in holders), None)


def with_learning_rate(opt_state: Tree, rate: Array) -> Tree:
    """The state with this learning rate wherever it holds one; unchanged if none was injected.

    The array has the old one's dtype and device, so that a compiled update accepts it without compiling again.
    """
    jax, _ = jax_and_optax("with_learning_rate()")

    def replaced(node: Tree) -> Tree:
        if not _holds_rate(node):
            return node
        old = node.hyperparams[_RATE]
        new = jax.numpy.asarray(rate, dtype=old.dtype)
        # arrays committed to a device and uncommitted ones need different programs
        if not isinstance(old, jax.core.Tracer) and getattr(old, "committed", False):
            new = jax.device_put(new, old.sharding)
        return node._replace(hyperparams={**node.hyperparams, _RATE: new})

    return jax.tree.map(replaced, opt_state, is_leaf=_holds_rate)


def _holds_rate(node: Tree) -> bool:
    """Whether it is a state of optax.inject_hyperparams whose rate was injected."""
    hyperparams = getattr(node, "hyperparams", None)
    return isinstance(hyperparams, dict) and _RATE in hyperparams


# ------------------------------------------------------------------------------------------------------ parts


def _steps(optax: ModuleType, wanted: SGD | Adam | AdamW | RMSprop, rate: Array) -> list[Optimizer]:
    """The transformations from gradients to updates, in torch's order."""
    scale = optax.stateless_with_tree_map(lambda update, _: (-rate * update).astype(update.dtype))
    if isinstance(wanted, AdamW):
        return [_moments(*wanted.betas, wanted.eps), scale, *_decoupled(optax, wanted, rate)]
    penalty = []
    if wanted.weight_decay:
        penalty = [optax.add_decayed_weights(wanted.weight_decay, mask=wanted.decay_mask)]
    if isinstance(wanted, Adam):
        return [*penalty, _moments(*wanted.betas, wanted.eps), scale]
    momentum = [optax.trace(wanted.momentum, isinstance(wanted, SGD) and wanted.nesterov)] if wanted.momentum else []
    if isinstance(wanted, SGD):
        return [*penalty, *momentum, scale]
    divide = optax.scale_by_stddev if wanted.centered else optax.scale_by_rms
    return [*penalty, divide(decay=wanted.alpha, eps=wanted.eps, eps_in_sqrt=False), *momentum, scale]


def _decoupled(optax: ModuleType, wanted: AdamW, rate: Array) -> list[Optimizer]:
    """The decoupled weight decay."""
    if not wanted.weight_decay:
        return []

    # by the factor that torch multiplies with, whose rounding in float32 is the same in each update
    def shrink(update: Array, param: Array) -> Array:
        kept = (1 - rate * wanted.weight_decay).astype(param.dtype)
        return update + (param * kept - param)

    decay = optax.stateless_with_tree_map(shrink)
    return [decay if wanted.decay_mask is None else optax.masked(decay, wanted.decay_mask)]


def _moments(beta1: float, beta2: float, eps: float) -> Optimizer:
    """optax.scale_by_adam, with its state, but exact in the first updates too."""
    jax, optax = jax_and_optax()
    empty = optax.scale_by_adam()

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        count = state.count + 1
        means = jax.tree.map(lambda grad, mean: beta1 * mean + (1 - beta1) * grad, updates, state.mu)
        squares = jax.tree.map(lambda grad, square: beta2 * square + (1 - beta2) * grad**2, updates, state.nu)

        # 1 - beta**count without the loss of digits when the power is close to 1
        first, second = (-jax.numpy.expm1(count * (math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2))

        def direction(mean: Array, square: Array) -> Array:
            root = jax.numpy.sqrt(square / second.astype(square.dtype))
            return mean / first.astype(mean.dtype) / (root + eps)

        return jax.tree.map(direction, means, squares), optax.ScaleByAdamState(count, means, squares)

    exact: Optimizer = optax.GradientTransformation(empty.init, update)
    return exact
