"""Backends compute gradients and apply them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulsetrain.engine.backends.functional import FunctionalBackend
    from pulsetrain.engine.backends.jax import JaxBackend
    from pulsetrain.engine.backends.megatron import MegatronBackend
    from pulsetrain.engine.backends.megatron_models import MegatronGPT, megatron_llama
    from pulsetrain.engine.backends.torch import TorchBackend
else:  # imported when they are used: a replay needs none of them
    from pulsetrain.engine.lazy_names import lazy_names

    _, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pulsetrain.engine.backends.functional": ("FunctionalBackend",),
            "pulsetrain.engine.backends.jax": ("JaxBackend",),
            "pulsetrain.engine.backends.megatron": ("MegatronBackend",),
            "pulsetrain.engine.backends.megatron_models": ("MegatronGPT", "megatron_llama"),
            "pulsetrain.engine.backends.torch": ("TorchBackend",),
        },
    )

__all__ = ["FunctionalBackend", "JaxBackend", "MegatronBackend", "MegatronGPT", "TorchBackend", "megatron_llama"]
