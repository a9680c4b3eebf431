"""Mixed precision as a value: which autocast, and which gradient scaler, if any."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from engine.errors import CheckpointError, ConfigurationError, unknown_name

__all__ = ["Precision"]

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# One for all: it holds nothing, and entering it costs a tenth of entering an autocast.
_NOTHING: AbstractContextManager[Any] = nullcontext()


class Precision:
    """Full precision, or autocast to bf16 or fp16 on one kind of device; weights stay float32 in each.

    Args:
        name: "fp32", "bf16" or "fp16"; fp16 brings a gradient scaler, since its small gradients underflow.
        device: where the forward pass runs; only its kind matters.

    Raises:
        ConfigurationError: an unknown name, or a device that cannot autocast to that type.
    """

    scaler: torch.amp.GradScaler | None

    def __init__(self, name: Literal["fp32", "bf16", "fp16"], device: torch.device | str) -> None:
        if name not in _DTYPES:
            raise unknown_name("Precision", "name", name, _DTYPES)
        self.name = name
        self.device = torch.device(device)
        self.dtype: torch.dtype | None = _DTYPES[name]
        self.scaler = None
        if self.dtype is None:
            return
        try:
            with warnings.catch_warnings():
                # torch warns and then computes in float32, which would be another run than the one asked for
                warnings.simplefilter("error")
                torch.autocast(self.device.type, dtype=self.dtype)
                if name == "fp16":
                    self.scaler = torch.amp.GradScaler(self.device.type)
        except (RuntimeError, ValueError, TypeError, AssertionError, Warning) as error:
            raise ConfigurationError(
                f"Precision(name={name!r}, device={str(device)!r}): not available here ({error}); "
                "choose another, fp32 always works"
            ) from error

    def __repr__(self) -> str:
        return f"Precision(name={self.name!r}, device={str(self.device)!r})"

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for the forward pass and the loss; backward runs outside."""
        if self.dtype is None:
            return _NOTHING
        # a new one each time: an autocast entered twice, one inside the other, leaves autocasting on behind it
        return torch.autocast(self.device.type, dtype=self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The name, and the scaler's scale and growth; reading the scale waits for the device."""
        return {"name": self.name, "scaler": None if self.scaler is None else self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the scaler up where it was.

        Raises:
            CheckpointError: the state is that of another precision.
        """
        if state["name"] != self.name:
            raise CheckpointError(
                f"Precision.load_state_dict(name={state['name']!r}): this run has {self.name!r}; "
                f"resume with precision={state['name']!r}, or start a new run from the weights"
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state["scaler"]))
