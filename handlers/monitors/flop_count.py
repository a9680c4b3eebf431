"""How many floating-point operations one training step takes, counted while it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pulsetrain.engine.optimizers import parts_of

__all__ = ["FlopCount", "is_compiled", "peak_flops_of", "shapes_of"]

# dense matrix products in 16 bits, operations a second, as the makers' data sheets give them; the first that fits holds
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

MOST_VALUES = 64  # of a batch that are looked at
_SCALARS = (int, float, str, bytes, type(None))


def peak_flops_of(device_name: str) -> float | None:
    """Operations a second that the device makes at best in 16 bits; None where the name is not known."""
    words = device_name.replace("-", " ").split()
    text = f" {' '.join(words)} "
    return next((peak for name, peak in PEAKS if f" {name} " in text), None)


def is_compiled(model: Any) -> bool:
    """Whether the model runs as compiled: counting would make it run uncompiled for a step, to other last bits."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in modules)


def shapes_of(batch: Any, depth: int = 4) -> tuple[Any, ...]:
    """The shapes of the tensors in a batch and the lengths of its lists: what the operations of its step depend on.

    It looks as deep as that, outermost first, and at 64 values at most: a batch may carry lists of texts as well.
    """
    found: list[Any] = []
    level, left = [((), batch)], MOST_VALUES
    for _ in range(depth + 1):
        below: list[tuple[tuple[Any, ...], Any]] = []
        for path, value in level:
            if isinstance(value, Tensor):
                found.append((path, tuple(value.shape)))
                continue
            items: Iterable[tuple[Any, Any]] = ()
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
    """Counts matrix products, convolutions and attention, as torch.utils.flop_counter knows them.

    The numbers that are computed stay the same to the bit. What the optimizer's own step computes is left out.

    Args:
        optimizer: whose steps are left out, or those of each of its parts; None for none.
    """

    def __init__(self, optimizer: Any) -> None:
        self.flops = 0
        self._mode: FlopCounterMode | None = None
        self._hooks = []
        for part in parts_of(optimizer).values():  # a NamedOptimizers' own step() is not what a trainer calls
            for name, hook in (("register_step_pre_hook", self._pause), ("register_step_post_hook", self._go_on)):
                if callable(register := getattr(part, name, None)):
                    self._hooks.append(register(hook))
        self._go_on()

    def end(self) -> int:
        """Count no more; returns how many there were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._pause()
        return self.flops

    def _go_on(self, *_: Any) -> None:
        if self._mode is None:
            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def _pause(self, *_: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
            self.flops += mode.get_total_flops()
