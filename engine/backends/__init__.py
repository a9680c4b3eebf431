"""Backends compute gradients and apply them."""

from collections.abc import Callable

from pulsetrain.engine.backends.functional import FunctionalBackend
from pulsetrain.engine.backends.jax import JaxBackend  # imports jax when it is constructed
from pulsetrain.engine.backends.megatron import MegatronBackend  # imports megatron.core when it is constructed
from pulsetrain.engine.backends.megatron_models import MegatronGPT, megatron_llama
from pulsetrain.engine.backends.torch import TorchBackend
from pulsetrain.engine.step.backend import Backend

__all__ = [
    "BACKENDS",
    "FunctionalBackend",
    "JaxBackend",
    "MegatronBackend",
    "MegatronGPT",
    "TorchBackend",
    "megatron_llama",
]

BACKENDS: dict[str, Callable[..., Backend]] = {"torch": TorchBackend, "jax": JaxBackend, "megatron": MegatronBackend}
