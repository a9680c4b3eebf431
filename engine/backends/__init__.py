"""Backends compute gradients and apply them."""

from collections.abc import Callable

from pulsetrain.engine.backends.functional import FunctionalBackend
from pulsetrain.engine.backends.jax import JaxBackend  # imports jax when it is constructed
from pulsetrain.engine.backends.torch import TorchBackend
from pulsetrain.engine.step.backend import Backend

__all__ = ["BACKENDS", "FunctionalBackend", "JaxBackend", "TorchBackend"]

BACKENDS: dict[str, Callable[..., Backend]] = {"torch": TorchBackend, "jax": JaxBackend}
