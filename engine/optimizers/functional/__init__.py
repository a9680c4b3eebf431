"""Optimizers as pure functions over pytrees of tensors, for torch.func and torch.vmap too.

`init(params)` makes the state before the first update, `update(grads, opt_state, params)` returns what to add to the
parameters (see `apply_updates`) and the state that follows. Nothing that they are given changes, and what they return
shares no memory with it.

The learning rate is an entry of the state, which a schedule replaces: a float, or a tensor of shape (). In torch.vmap
the numbers of a state, "learning_rate" and "step", take the dimension None, its trees 0. Gradients flow through an
update; where parameters require gradients and nobody wants them to, `torch.no_grad()` keeps each update from being tied
to all before it.

Both raise TypeError for a leaf that is no torch tensor, and ConfigurationError, before anything is computed, where
names, structure, shapes or dtypes of the trees differ.
"""

from pulsetrain.engine.optimizers.functional.adam import Adam, AdamW
from pulsetrain.engine.optimizers.functional.create import FUNCTIONAL_NAMES, create_functional
from pulsetrain.engine.optimizers.functional.rmsprop import RMSprop
from pulsetrain.engine.optimizers.functional.sgd import SGD
from pulsetrain.engine.optimizers.functional.trees import DecayMask, OptimizerState, apply_updates

__all__ = [
    "FUNCTIONAL_NAMES",
    "SGD",
    "Adam",
    "AdamW",
    "DecayMask",
    "OptimizerState",
    "RMSprop",
    "apply_updates",
    "create_functional",
]
