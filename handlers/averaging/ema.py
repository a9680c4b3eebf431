"""Keeps an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.handlers.averaging.averaging import Averaging

__all__ = ["EMA"]


class EMA:
    """An exponential moving average: average = decay * average + (1 - decay) * weights; the first is the weights.

    The numbers are those of torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay); buffers are the
    model's at the last occasion. An average is kept in its weights' dtype: in bfloat16, which has 8 bits, what a decay
    near 1 adds is lost (precision="bf16" keeps weights in float32). An fp16 update whose gradients overflowed, and
    which the device left out, counts as an update like any other: the same weights are averaged in once more.

    A checkpoint holds the raw weights as the model's, and the average in this handler's state.

    Args:
        decay: at least 0, below 1; the average goes back over about 1 / (1 - decay) occasions.
        model: by default the engine's.
        every: when to average; by default after each update.
        validate: let the engine's evaluator, where it has one, run the model with the averaged weights.

    Raises:
        ConfigurationError: the decay is out of range.
        TypeError: the model is no nn.Module, or the cadence no Every.
    """

    def __init__(
        self, decay: float = 0.999, model: nn.Module | None = None, every: Every | None = None, validate: bool = True
    ) -> None:
        if not isinstance(decay, (int, float)) or isinstance(decay, bool) or not 0.0 <= decay < 1.0:
            raise ConfigurationError(f"EMA(decay={decay!r}): needs a number of at least 0 and below 1, such as 0.999")
        self.decay = decay
        self.validate = validate
        every = Every(updates=1) if every is None else every
        self._averaging = Averaging("EMA", get_ema_multi_avg_fn(decay), model, every)

    def attach(self, engine: Engine) -> Self:
        """Average at the cadence, in phase COMPUTE, before a validation that is due at the same point.

        Raises:
            ConfigurationError: no model was given and the engine has none; or validation runs on another average of
                these weights already, that of a schedule-free optimizer, say.
        """
        self._averaging.attach(engine, applied=self.applied if self.validate else None)
        return self

    def detach(self) -> None:
        """Average no more; the average stays."""
        self._averaging.detach()

    @property
    def number_averaged(self) -> int:
        """How often weights were averaged in."""
        return self._averaging.weights("number_averaged").number_averaged

    def applied(self) -> AbstractContextManager[None]:
        """The model with the averaged weights, for a `with` block; before the first occasion with its own."""
        return self._averaging.weights("applied").applied()

    def copy_to(self, model: nn.Module) -> None:
        """Put the averaged weights and buffers into a model of the same kind, for good.

        Raises:
            ConfigurationError: they do not fit it.
            RuntimeError: nothing has been averaged yet.
        """
        self._averaging.weights("copy_to").copy_to(model)

    def state_dict(self) -> dict[str, Any]:
        return self._averaging.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved average.

        Raises:
            CheckpointError: it does not fit the model.
        """
        self._averaging.load_state_dict(state)
