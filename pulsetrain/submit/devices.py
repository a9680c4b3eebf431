"""The devices that a queue shares out: the GPUs of this machine, or slots where it has none."""

from __future__ import annotations

import os

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["devices_here"]


def devices_here(count: int | None) -> list[str]:
    """The names of the devices, as CUDA_VISIBLE_DEVICES has them; empty texts for slots.

    Args:
        count: how many; None: all GPUs, or a slot for each processor.

    Raises:
        ConfigurationError: there are fewer GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        return [""] * (count or os.cpu_count() or 1)
    if count is not None and count > gpus:
        raise ConfigurationError(f"--devices {count}: this machine has {gpus} GPU(s); give at most {gpus}")
    visible = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    names = visible if len(visible) == gpus else [str(index) for index in range(gpus)]
    return names[:count]
