"""Backends: what computes gradients and applies them."""

from engine.backends.functional import FunctionalBackend
from engine.backends.jax import JaxBackend  # imports jax when one is made
from engine.backends.torch import TorchBackend

__all__ = ["FunctionalBackend", "JaxBackend", "TorchBackend"]
