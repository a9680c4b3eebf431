"""How many floating-point operations one training step takes, counted while it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

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
    """The shapes of the tensors in a batch, as deep as that: what the operations of its step depend on."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if depth == 0:
        return ()
    if isinstance(batch, Mapping):
        return tuple((key, shapes_of(value, depth - 1)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return tuple(shapes_of(value, depth - 1) for value in batch)
    fields = getattr(batch, "__dataclass_fields__", None)
    inner = getattr(batch, "__dict__", None) if fields is None else {name: getattr(batch, name) for name in fields}
    return shapes_of(inner, depth - 1) if isinstance(inner, dict) else ()


class FlopCount:
    """Counts matrix products, convolutions and attention, as torch.utils.flop_counter knows them.

    The numbers that are computed stay the same to the bit. What the optimizer's own step computes is left out.

    Args:
        optimizer: whose steps are left out; None for none.
    """

    def __init__(self, optimizer: Any) -> None:
        self.flops = 0
        self._mode: FlopCounterMode | None = None
        self._hooks = []
        for name, hook in (("register_step_pre_hook", self._pause), ("register_step_post_hook", self._go_on)):
            if callable(register := getattr(optimizer, name, None)):
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
