"""Decides for which optimizers torch's fused kernels are used by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["fill_late_momentum", "fill_momentum", "fused_pays"]

# Where torch has a faster fused kernel. Microseconds per step on 2 CPU cores with torch 2.13, default / fused:
#                     adamw        sgd, momentum 0.9   sgd, momentum 0   adagrad
#   4 tensors, 210     113 / 40         39 / 25             18 / 22        66 / 35
#   14 tensors, 1M    1885 / 493       438 / 330           230 / 226      711 / 379
#   60 tensors, 1M    3304 / 715       917 / 470           426 / 336     1850 / 568
# foreach=True was slower than the default on the larger models. Fused kernels round differently in the last bit.
# On CUDA torch defaults to foreach for all its optimizers and uses fused kernels only on request
# (_default_to_fused_or_foreach with use_fused=False), although they need fewer launches and no temporary copies.
# Not measured there. Adagrad's fused kernel rejects CUDA in the oldest supported releases; the others have none.
_FUSED = {"cpu": ("adamw", "adam", "sgd", "adagrad"), "cuda": ("adamw", "adam", "sgd")}


def fused_pays(
    name: str, model: nn.Module, trainable: Sequence[tuple[str, nn.Parameter]], options: Mapping[str, object]
) -> bool:
    """Whether to use the fused kernel; False if the options decide that already.

    >>> model = nn.Linear(2, 2)
    >>> fused_pays("adamw", model, list(model.named_parameters()), {})
    True
    """
    if {"fused", "foreach", "differentiable"} & options.keys() or not trainable:
        return False
    devices = {parameter.device.type for _, parameter in trainable} - {"meta"}  # of layers of another process
    if not devices or not all(name in _FUSED.get(device, ()) for device in devices):
        return False
    if not all(parameter.is_floating_point() for _, parameter in trainable):
        return False
    if name not in ("adam", "adamw") and any(hasattr(parameter, "to_local") for _, parameter in trainable):
        return False  # torch has no other ones for sharded parameters
    if devices == {"cpu"} and name == "sgd" and not options["momentum"]:
        return False  # it would cost a small model 3 us a step, see the figures above
    if name == "sgd" and options.get("dampening"):
        return False  # its first step differs, and fp16 may skip that step: see engine/step/precision.py
    # nn.Embedding(sparse=True) has sparse gradients, which no fused kernel supports
    return not any(getattr(module, "sparse", False) is True for module in model.modules())


def fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give torch's fused SGD the momentum of parameters with a gradient that have none yet: zeros.

    The kernel allocates the buffers in its first step, and zeros give the same step. It leaves them uninitialised if
    fp16 skips that step, and it fails if only some parameters have them.

    Raises:
        ConfigurationError: the group has dampening, with which zeros would give another step.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        for parameter in group["params"]:
            if parameter.grad is None or optimizer.state[parameter].get("momentum_buffer") is not None:
                continue
            if group["dampening"]:
                raise ConfigurationError(
                    "the first step would differ if fp16 skips it, or if some parameters get their first gradient "
                    "later than others; pass fused=False",
                    "SGD",
                    dampening=group["dampening"],
                    fused=True,
                )
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def fill_late_momentum(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
    """Before a step of torch's fused SGD: the same, but only after the first step, which thus stays torch's own.

    A step costs a comparison more as long as every parameter has its momentum.
    """
    made = len(optimizer.state)
    if made and made < sum(len(group["params"]) for group in optimizer.param_groups):
        fill_momentum(optimizer)
