"""What results depend on besides the program and its data: versions, processor, threads, and torch's settings."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

__all__ = ["describe_environment", "version_of"]

_PACKAGES = ("numpy", "pytorch-ignite", "blinker", "msgspec", "pulsetrain")


def describe_environment(device: torch.device | str, more: Mapping[str, object] | None = None) -> dict[str, object]:
    """The environment as plain values, for a checkpoint or a run's record.

    >>> environment = describe_environment("cpu", {"jax": "0.7.0"})
    >>> environment["device"], environment["jax"], environment["torch"] == torch.__version__
    ('cpu', '0.7.0', True)

    Args:
        device: the device that computes the results.
        more: entries that a backend adds, such as the versions of its own libraries.
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
        "float32_matmul": _float32_matmul(),
        "torch": str(torch.__version__),  # with the build, such as +cpu, which the package's own version may lack
        **{name: found for name in _PACKAGES if (found := version_of(name)) is not None},
        **(more or {}),
    }


def _float32_matmul() -> str:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch 2.9 warns of its own setting
        return torch.get_float32_matmul_precision()


@cache  # reading a package's metadata takes milliseconds
def version_of(package: str) -> str | None:
    """The installed version of a package, or None.

    >>> version_of("no-such-package") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
