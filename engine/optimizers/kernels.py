"""Which optimizers take torch's fused kernels unasked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

__all__ = ["fused_pays"]

# Where torch has a fused kernel that pays. One step in microseconds on 2 CPU cores with torch 2.13, default / fused:
#                     adamw        sgd, momentum 0.9   sgd, momentum 0   adagrad
#   4 tensors, 210     113 / 40         39 / 25             18 / 22        66 / 35
#   14 tensors, 1M    1885 / 493       438 / 330           230 / 226      711 / 379
#   60 tensors, 1M    3304 / 715       917 / 470           426 / 336     1850 / 568
# foreach=True lost to the default on the larger models. Fused kernels round differently in the last bit.
# On CUDA, torch itself takes foreach for every optimizer of its own, and fused kernels only when told to
# (_default_to_fused_or_foreach with use_fused=False), although they need fewer launches and no temporary copies.
# Not measured there. Adagrad's fused kernel refuses CUDA in the older releases that we allow; the others have none.
_FUSED = {"cpu": ("adamw", "adam", "sgd", "adagrad"), "cuda": ("adamw", "adam", "sgd")}


def fused_pays(
    name: str, model: nn.Module, trainable: Sequence[tuple[str, nn.Parameter]], options: Mapping[str, Any]
) -> bool:
    """Whether to ask for the fused kernel, where the options leave that open."""
    if {"fused", "foreach", "differentiable"} & options.keys() or not trainable:
        return False
    devices = {parameter.device.type for _, parameter in trainable}
    if not all(name in _FUSED.get(device, ()) for device in devices):
        return False
    if not all(parameter.is_floating_point() for _, parameter in trainable):
        return False
    if devices == {"cpu"} and name == "sgd" and not options["momentum"]:
        return False  # a small model would pay 3 us for it, see the figures above
    if name == "sgd" and options.get("dampening"):
        return False  # its first step is another one, which fp16 may skip: see engine/step/precision.py
    # nn.Embedding(sparse=True) makes sparse gradients, which no fused kernel takes
    return not any(getattr(module, "sparse", False) is True for module in model.modules())
