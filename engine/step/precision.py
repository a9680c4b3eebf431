"""Mixed precision as a value: which autocast, and which gradient scaler, if any."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from pulsetrain.engine.argument_checks import check_choice, check_positive
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.optimizers.kernels import fill_momentum

__all__ = ["Precision", "autocast_of"]

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# shared: it holds nothing, and entering it takes a tenth of the time of entering an autocast
_NOTHING: AbstractContextManager[None] = nullcontext()


class Scaler(torch.amp.GradScaler):
    """Torch's gradient scaler, which also shows whether gradients overflowed."""

    def found_infinite(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """One tensor per device, 0 if all gradients were finite; `update` forgets them."""
        return list(self._found_inf_per_device(optimizer).values())


class Precision:
    """Full precision, or autocast to bf16 or fp16 on one kind of device; weights stay in float32.

    Args:
        name: "fp32", "bf16" or "fp16"; fp16 has a gradient scaler, since its small gradients underflow.
        device: where the forward pass runs; only its type matters.
        gradient_scale: the first factor by which fp16 multiplies gradients; it is halved when they overflow.

    Raises:
        ConfigurationError: an unknown name, a scale that is not a positive number, or a device that cannot autocast to
            that type.

    >>> with Precision("bf16", "cpu").autocast():
    ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    torch.bfloat16
    """

    scaler: Scaler | None
    skipped: torch.Tensor | None  # fp16 updates that overflowed and were skipped, shape (), on the device

    def __init__(
        self, name: Literal["fp32", "bf16", "fp16"], device: torch.device | str, gradient_scale: float = 65536.0
    ) -> None:
        check_choice("Precision", "name", name, _DTYPES)
        check_positive("Precision", "gradient_scale", gradient_scale)
        self.name = name
        self.device: torch.device = torch.device(device)
        self.dtype: torch.dtype | None = _DTYPES[name]
        self.scaler = self.skipped = None
        self._unscaled = False
        if self.dtype is None:
            return
        try:
            with warnings.catch_warnings():
                # torch warns and then computes in float32, which is not what was asked for
                warnings.simplefilter("error")
                torch.autocast(self.device.type, dtype=self.dtype)
                if name == "fp16":
                    self.scaler = Scaler(self.device.type, init_scale=float(gradient_scale))
        except (RuntimeError, ValueError, TypeError, AssertionError, Warning) as error:
            raise ConfigurationError(
                f"not available here ({error}); choose another, fp32 always works",
                "Precision",
                name=name,
                device=str(device),
            ) from error

    def __repr__(self) -> str:
        return f"Precision(name={self.name!r}, device={str(self.device)!r})"

    def autocast(self) -> AbstractContextManager[object]:
        """The context for the forward pass and the loss; backward runs outside."""
        if self.dtype is None:
            return _NOTHING
        # a new one each time: one autocast entered twice, nested, leaves autocasting switched on afterwards
        return torch.autocast(self.device.type, dtype=self.dtype)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients before they are measured or clipped; only fp16 has anything to do."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
            self._unscaled = True

    def step(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor | None = None) -> None:
        """One optimizer step. An fp16 overflow leaves the weights unchanged, lowers the scale and is counted.

        The fused kernels of Adam, AdamW and SGD can skip a step on the device. Other optimizers wait for the device if
        a step may have to be skipped: with fp16, in torch's own GradScaler, and with `skip`.

        Args:
            skip: of shape (), on the device; if true, weights and optimizer stay unchanged. With fp16 it counts as an
                overflow.
        """
        if self.scaler is None:
            _step_unless(skip, optimizer)
            return
        fill_momentum(optimizer)
        if skip is not None:
            if not self._unscaled:
                self.unscale(optimizer)
            for found in self.scaler.found_infinite(optimizer):
                torch.maximum(found, skip.to(found), out=found)  # 1 at most: kernels compare with 1
        self.scaler.step(optimizer)
        self._unscaled = False
        overflows = self.scaler.found_infinite(optimizer)
        self.scaler.update()
        overflowed = torch.stack([each.to(self.device) for each in overflows]).any()
        self.skipped = overflowed.long() + (0 if self.skipped is None else self.skipped)

    def discard(self) -> None:
        """Abandon an update that was begun: forget what `unscale` found, as if the update had been made."""
        if self.scaler is not None and self._unscaled:
            self.scaler.update()
            self._unscaled = False

    def begin_run(self) -> None:
        """Count skipped updates from 0 again; the scale stays, as the weights do."""
        self.skipped = None

    def skipped_updates(self) -> int:
        """How many updates have been skipped so far; for fp16 it waits for the device."""
        return 0 if self.skipped is None else int(self.skipped.item())

    def state_dict(self) -> dict[str, object]:
        """The name, the scaler's scale and growth, the count of skipped updates; for fp16 it waits for the device."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"name": self.name, "scaler": scaler, "skipped": self.skipped_updates()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scaler.

        Raises:
            CheckpointError: the state is of another precision.
        """
        if state["name"] != self.name:
            raise CheckpointError(
                f"this run has {self.name!r}; "
                f"resume with precision={state['name']!r}, or start a new run from the weights",
                "Precision.load_state_dict",
                name=state["name"],
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state["scaler"]))
            self.skipped = torch.tensor(state["skipped"], device=self.device)


def _step_unless(skip: torch.Tensor | None, optimizer: Any) -> None:  # Any: a fused kernel reads its attributes
    if skip is None:
        optimizer.step()
    elif getattr(optimizer, "_step_supports_amp_scaling", False):  # a fused kernel, which reads it on the device
        fill_momentum(optimizer)
        optimizer.grad_scale, optimizer.found_inf = None, skip.float()
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
    elif not skip.item():
        optimizer.step()


def autocast_of(backend: object) -> Callable[[], AbstractContextManager[None]]:
    """The context of the precision that a backend computes in; an empty one if that is not torch's."""
    found: Callable[[], AbstractContextManager[None]]
    found = getattr(getattr(backend, "precision", None), "autocast", nullcontext)
    return found
