"""What the bits of a result depend on beside the program and its data: versions, processor, threads, switches."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

__all__ = ["describe_environment", "environment_differences", "version_of"]

_PACKAGES = ("torch", "numpy", "pytorch-ignite", "blinker", "msgspec", "pulsetrain")


def describe_environment(device: torch.device | str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Plain values, for a checkpoint or a run's record.

    Args:
        device: where results are computed, or come to.
        more: what a backend's results depend on beside torch and our own packages.
    """
    device = torch.device(device)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": f"deterministic={torch.backends.cudnn.deterministic}, benchmark={torch.backends.cudnn.benchmark}",
        "float32_matmul": torch.get_float32_matmul_precision(),
        **{name: found for name in _PACKAGES if (found := version_of(name)) is not None},
        **(more or {}),
    }


def environment_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where two environments differ, as "threads: 2 -> 1"."""
    names = [*saved, *(name for name in now if name not in saved)]
    return [f"{name}: {saved.get(name)} -> {now.get(name)}" for name in names if saved.get(name) != now.get(name)]


def version_of(package: str) -> str | None:
    """The version that is installed; None where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
