"""What code that is written for Lightning finds as its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from pulsetrain.engine.optimizers import parts_of

__all__ = ["TrainerView"]


class TrainerView:
    """What callbacks and modules of Lightning see of the run.

    Args:
        run: the Trainer; whatever else is asked of this object raises an AttributeError that names it.
        callbacks: those that are called.
        place: the adapter's name, for the message.
    """

    callbacks: list[Any]

    fast_dev_run = sanity_checking = False
    num_sanity_val_steps = 0

    def __init__(self, run: Any, callbacks: Sequence[Any], place: str = "LightningCallbacks") -> None:
        self._run, self.callbacks, self._place = run, list(callbacks), place

    @property
    def current_epoch(self) -> int:
        return max(int(self._run.state.epoch) - 1, 0)

    @property
    def global_step(self) -> int:
        return int(self._run.state.update)

    @property
    def max_epochs(self) -> int | None:
        epochs: int | None = self._run.state.max_epochs
        return epochs

    @property
    def max_steps(self) -> int:
        return self._run.length.total_updates or -1

    estimated_stepping_batches = max_steps

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        history = {name: values[-1] for name, values in self._run.history.get_history().items() if values}
        found = {**history, **{k: v for k, v in self._run.state.metrics.items() if isinstance(v, int | float | Tensor)}}
        both = {**found, **{name.replace("/", "_"): value for name, value in found.items()}}
        return {name: torch.as_tensor(value) for name, value in both.items()}

    logged_metrics = callback_metrics
    progress_bar_metrics = callback_metrics

    @property
    def should_stop(self) -> bool:
        return bool(self._run.should_terminate)

    @should_stop.setter
    def should_stop(self, value: object) -> None:
        if value and not self._run.should_terminate:
            self._run.terminate(reason="a callback has set trainer.should_stop")

    @property
    def lightning_module(self) -> Any:
        return self._run.model

    model = lightning_module

    @property
    def optimizers(self) -> list[Any]:
        return list(parts_of(self._run.optimizer).values())

    @property
    def train_dataloader(self) -> Any:
        return self._run.train_loader

    @property
    def val_dataloaders(self) -> list[Any]:
        return list(self._run.val_loaders.values())

    @property
    def loggers(self) -> list[Any]:
        return []

    logger = None

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        return int(self._run.agreement.control.ranks.rank)

    @property
    def world_size(self) -> int:
        return int(self._run.agreement.control.ranks.world_size)

    @property
    def state(self) -> Any:
        return SimpleNamespace(fn="fit", stage="train")

    @property
    def strategy(self) -> Any:
        return _Strategy()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self._place}: code for Lightning asks the trainer for {name!r}, which our runs do not have; write that "
            "part as a pulsetrain.Callback or a handler",
            name=name,
            obj=self,
        )


class _Strategy:
    """What EarlyStopping asks of Lightning's strategy."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # as Lightning names it
        return decision
