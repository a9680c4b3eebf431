"""Keeps an exponential moving average of the weights."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pulsetrain.engine.argument_checks import check_number
from pulsetrain.engine.events.cadence import Every
from pulsetrain.handlers.averaging.averaging import Averaging

__all__ = ["EMA"]


class EMA(Averaging):
    """An exponential moving average: average = decay * average + (1 - decay) * weights; it starts as the weights.

    The numbers are those of torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay); buffers are copied
    from the model each time. An average has the dtype of its weights: bfloat16, with 8 significant bits, loses what a
    decay near 1 adds (precision="bf16" keeps weights in float32). An fp16 update that the device skipped after an
    overflow counts like any other: the same weights are averaged once more.

    A checkpoint holds the raw weights as the model's, and the average in this handler's state.

    Args:
        decay: at least 0, below 1; the average reaches back over about 1 / (1 - decay) points of the cadence.
        model: by default the engine's.
        every: when to average; by default after each update.
        validate: let the engine's evaluator, if it has one, run the model with the averaged weights.

    Raises:
        ConfigurationError: the decay is out of range.
        TypeError: the model is not an nn.Module, or the cadence not an Every.

    >>> from pulsetrain.engine import Engine
    >>> model = nn.Linear(1, 1, bias=False)
    >>> ema = EMA(0.5, model, Every(iterations=1))
    >>> engine = Engine(lambda engine, batch: nn.init.constant_(model.weight, batch))
    >>> _ = ema.attach(engine)
    >>> _ = engine.run([1.0, 2.0, 3.0])
    >>> with ema.applied():
    ...     print(model.weight.item())  # 0.5 * (0.5 * 1 + 0.5 * 2) + 0.5 * 3
    2.25
    """

    def __init__(
        self, decay: float = 0.999, model: nn.Module | None = None, every: Every | None = None, validate: bool = True
    ) -> None:
        check_number("EMA", "decay", decay, below=1.0)
        self.decay = decay
        super().__init__(get_ema_multi_avg_fn(decay), model, Every(updates=1) if every is None else every, validate)
