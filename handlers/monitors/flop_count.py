"""Counts the floating-point operations of a training step while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from pulsetrain.engine.optimizers import parts_of

__all__ = ["FlopCount", "Shapes", "is_compiled", "peak_flops_of", "shapes_of"]

Shapes: TypeAlias = tuple[tuple[tuple[object, ...], object], ...]  # of pairs (path, shape or length)

# dense matrix products in 16 bits, operations per second, from the makers' data sheets; the first name that fits counts
PEAKS = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200", 989.4e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307.4e12),
    ("MI250X", 383e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)

MOST_VALUES = 64  # of a batch that are visited
_SCALARS = (int, float, str, bytes, type(None))


def peak_flops_of(device_name: str) -> float | None:
    """The device's peak in 16 bits, operations per second; None for an unknown name.

    >>> peak_flops_of("NVIDIA H100 80GB HBM3"), peak_flops_of("unknown")
    (989400000000000.0, None)
    """
    words = device_name.replace("-", " ").split()
    text = f" {' '.join(words)} "
    return next((peak for name, peak in PEAKS if f" {name} " in text), None)


def is_compiled(model: nn.Module | None) -> bool:
    """Whether the model is compiled: counting would run it uncompiled for a step, which may change the last bits."""
    modules = model.modules() if model is not None else ()
    # the attributes that torch.compile(module) and module.compile() set; there is no public way to ask
    return any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in modules)


def shapes_of(batch: object, depth: int = 4) -> Shapes:
    """The shapes of the tensors in a batch and the lengths of its lists, which determine the operations of its step.

    It visits at most 64 values, outermost first, down to that depth: a batch may also have lists of texts.

    >>> import torch
    >>> shapes_of({"inputs": torch.zeros(8, 4), "texts": ["a", "b"]})
    ((('inputs',), (8, 4)), (('texts',), 2))
    """
    found: list[tuple[tuple[object, ...], object]] = []
    level: list[tuple[tuple[object, ...], object]] = [((), batch)]
    left = MOST_VALUES
    for _ in range(depth + 1):
        below: list[tuple[tuple[object, ...], object]] = []
        for path, value in level:
            if isinstance(value, Tensor):
                found.append((path, tuple(value.shape)))
                continue
            items: Iterable[tuple[object, object]] = ()
            if isinstance(value, Mapping):
                items = value.items()
            elif isinstance(value, (list, tuple)):
                found.append((path, len(value)))
                scalars = value and isinstance(value, list) and all(isinstance(value[at], _SCALARS) for at in (0, -1))
                items = () if scalars else enumerate(value)
            elif (fields := getattr(value, "__dataclass_fields__", None)) is not None:
                items = ((name, getattr(value, name, None)) for name in fields)
            elif isinstance(inner := getattr(value, "__dict__", None), dict):
                items = inner.items()
            inside = [((*path, key), item) for key, item in islice(items, left)]
            left -= len(inside)
            below += inside
        level = below
    return tuple(found)


class FlopCount:
    """Counts matrix products, convolutions and attention, as torch.utils.flop_counter defines them.

    Results stay bit for bit the same. The optimizer's own computations are left out.

    Args:
        optimizer: its steps, or those of each of its parts, are left out; None if there is none.

    >>> import torch
    >>> count = FlopCount(None)
    >>> product = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> count.end()
    48
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.flops: int = 0
        self._mode: FlopCounterMode | None = None
        self._hooks: list[RemovableHandle] = []
        # of each part: a trainer does not call the step() of a NamedOptimizers itself
        for part in parts_of(optimizer).values() if optimizer is not None else ():
            self._hooks += [part.register_step_pre_hook(self._pause), part.register_step_post_hook(self._resume)]
        self._resume()

    def end(self) -> int:
        """Stop counting; returns the number of operations."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._pause()
        return self.flops

    def _resume(self, *_: object) -> None:
        if self._mode is None:
            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def _pause(self, *_: object) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
            self.flops += mode.get_total_flops()
