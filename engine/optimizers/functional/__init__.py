"""Optimizers as pure functions over pytrees of tensors, for torch.func and torch.vmap too.

`init(params)` returns the state before the first update. `update(grads, opt_state, params)` returns the updates, which
`apply_updates` adds to the parameters, and the next state. Neither changes its arguments, and the results share no
memory with them.

The learning rate is an entry of the state that a schedule replaces: a float, or a tensor of shape (). In torch.vmap
the numbers of a state, "learning_rate" and "step", have the dimension None, and its trees 0. Gradients flow through an
update. If the parameters require gradients but the updates need not be differentiated, use `torch.no_grad()`;
otherwise the graph of each update keeps those of all updates before it.

Both raise TypeError for a leaf that is not a torch tensor, and ConfigurationError, before anything is computed, if
names, structure, shapes or dtypes of the trees differ.

>>> import torch
>>> params = {"w": torch.tensor([1.0, 2.0])}
>>> optimizer = SGD(0.1)
>>> state = optimizer.init(params)
>>> updates, state = optimizer.update({"w": torch.tensor([1.0, -1.0])}, state, params)
>>> apply_updates(params, updates)
{'w': tensor([0.9000, 2.1000])}
>>> state
{'learning_rate': 0.1, 'step': 1}
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
