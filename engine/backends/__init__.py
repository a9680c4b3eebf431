"""Backends: what computes gradients and applies them."""

from collections.abc import Callable

from engine.backends.functional import FunctionalBackend
from engine.backends.jax import JaxBackend  # imports jax when one is made
from engine.backends.torch import TorchBackend
from engine.protocols import Backend

__all__ = ["BACKENDS", "FunctionalBackend", "JaxBackend", "TorchBackend"]

BACKENDS: dict[str, Callable[..., Backend]] = {"torch": TorchBackend, "jax": JaxBackend}
