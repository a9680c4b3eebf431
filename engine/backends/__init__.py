"""Backends: what computes gradients and applies them."""

from engine.backends.torch import TorchBackend

__all__ = ["TorchBackend"]
