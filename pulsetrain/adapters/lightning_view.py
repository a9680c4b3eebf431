"""`self.trainer` of a LightningModule that trains on a Trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pulsetrain.config import TrainingConfig
from pulsetrain.handlers.adapters.lightning_trainer import TrainerView

__all__ = ["ModuleView"]


class ModuleView(TrainerView):
    """`self.trainer` of the module, also before there is a run, as in `configure_optimizers`."""

    sanity_checking = False

    def __init__(self, config: TrainingConfig, batches: int | None) -> None:
        super().__init__(None, [], "from_lightning")
        self._config, self._batches = config, batches
        self.made: list[Optimizer] = []  # in the module's order
        self.methods: Any = None  # what the module's methods about its trainer do
        self.logged: Mapping[str, float] = {}  # the latest values by the module's names
        self.updating = False  # whether an update is about to be made, which the run counts already

    def __deepcopy__(self, memo: object) -> ModuleView:
        return self  # a copy of the module, such as an average, has the same trainer

    def bind(self, run: Any) -> None:
        """There is a run now."""
        self._run = run

    @property
    def current_epoch(self) -> int:
        return 0 if self._run is None else super().current_epoch

    @property
    def global_step(self) -> int:
        return 0 if self._run is None else super().global_step - self.updating

    @property
    def training(self) -> bool:
        return self._run is not None and bool(self._run.model.training)

    @property
    def max_epochs(self) -> int | None:
        return self._config.max_epochs

    @property
    def estimated_stepping_batches(self) -> int | float:  # type: ignore[override]  # infinite as in Lightning
        """Updates of the run, as far as they are known: else infinity."""
        config, batches = self._config, math.inf
        if config.max_updates is not None:
            return config.max_updates
        if config.max_iterations is not None:
            batches = config.max_iterations
        elif self._batches is not None and config.max_tokens is None:
            batches = self._batches * (config.max_epochs or 1)
        return batches // self.accumulate_grad_batches

    @property
    def num_training_batches(self) -> int | float:
        return math.inf if self._batches is None else self._batches

    @property
    def accumulate_grad_batches(self) -> int:
        return self._config.accumulation.batches or 1

    @property
    def optimizers(self) -> list[Any]:
        return self.made

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        found = {} if self._run is None else super().callback_metrics
        return {**found, **{name: torch.as_tensor(value) for name, value in self.logged.items()}}
