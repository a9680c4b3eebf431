"""A LightningModule, unchanged, on a Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pulsetrain.adapters.lightning_checks import PLACE, check_config, check_module, overrides
from pulsetrain.adapters.lightning_methods import ModuleMethods, put_methods_into
from pulsetrain.adapters.lightning_optimizers import configured
from pulsetrain.adapters.lightning_steps import ModuleHooks, ModuleStrategy, StepCall, redirect_forward
from pulsetrain.adapters.lightning_view import ModuleView
from pulsetrain.config import TrainingConfig
from pulsetrain.engine.data.loaders import length_of
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers import NamedOptimizers
from pulsetrain.manual_loop import Loop
from pulsetrain.trainer import Trainer

__all__ = ["LightningLoop", "from_lightning"]


def from_lightning(
    module: Any,
    train_loader: Iterable[Any] | None = None,
    val_loader: Iterable[Any] | None = None,
    *,
    config: TrainingConfig | None = None,
    handlers: Sequence[Any] = (),
    **options: Any,
) -> Trainer:
    """A Trainer that trains the unchanged LightningModule.

    With automatic optimization, `training_step` computes the strategy's loss, and the Trainer makes the updates of the
    one optimizer. A module with `automatic_optimization = False` makes them itself, as in the body of a `Loop`.
    Schedulers step as in Lightning, at each update or epoch, also by a metric. Values that `self.log` logs in training
    go to `trainer.log` under the same name; in evaluation they become metrics of the set: "val_acc" is "val/acc".
    Checkpoints hold the optimizers and schedulers, and a resumed run continues exactly.

    `self.trainer` has the same attributes as for callbacks, see `LightningCallbacks`. These hooks are called: those of
    the run, the training epoch and batch, the validation, and on_before_optimizer_step. Others that Lightning's Trainer
    would call are refused; the error says what to do instead.

    >>> import lightning
    >>> class Line(lightning.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(2, 1)
    ...     def training_step(self, batch, batch_idx):
    ...         return self.layer(batch[0]).sub(batch[1]).square().mean()
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> data = [(torch.ones(4, 2), torch.ones(4, 1))] * 5
    >>> trainer = from_lightning(Line(), data, config=TrainingConfig(max_epochs=3, progress=False))
    >>> len(trainer.train()["train/loss"]), trainer.state.update
    (3, 15)

    Args:
        module: a `lightning.LightningModule`.
        train_loader: by default, the result of its `train_dataloader()`.
        val_loader: one set; by default, the result of its `val_dataloader()`, if it has one.
        config: the length of the run, clipping, accumulation, precision, device and so on. The module decides on
            optimizers and schedules.
        handlers: as for Trainer.
        options: further arguments of Trainer: callbacks, name, bus.

    Raises:
        ArgumentTypeError: it is not a LightningModule, or `configure_optimizers` returns something that Lightning does
            not accept.
        ConfigurationError: a hook would not be called, the module decides on a setting, several optimizers are to be
            trained automatically, or several processes train.
    """
    check_module(module)
    config = config or TrainingConfig()
    manual = not module.automatic_optimization
    if train_loader is None and overrides(module, "train_dataloader"):
        train_loader = module.train_dataloader()
    if val_loader is None and overrides(module, "val_dataloader"):
        val_loader = module.val_dataloader()
    if isinstance(val_loader, list) and len(val_loader) == 1 and _is_loader(val_loader[0]):
        [val_loader] = val_loader
    if isinstance(val_loader, Mapping) or (isinstance(val_loader, list) and val_loader and _is_loader(val_loader[0])):
        rule = (
            "takes one validation set, since hooks are called once for each; call trainer.validate(loader) for others"
        )
        raise ConfigurationError(rule, PLACE, val_loader=...)
    if val_loader is not None and not overrides(module, "validation_step"):
        raise ConfigurationError(
            "has no validation_step for {val_loader}; leave one out", PLACE, module=type(module), val_loader=...
        )
    batches = length_of(train_loader)
    check_config(config, manual=manual, batches=batches)
    for name in ("strategy", "optimizer", "metrics", "model", "backend"):
        if name in options:
            raise ConfigurationError("is decided by the module; leave it out", PLACE, **{name: ...})
    view = ModuleView(config, batches)
    hooks = ModuleHooks(module, view, manual=manual)
    redirect_forward(module)
    module.trainer = view
    view.methods, view.logged = ModuleMethods(module, view, hooks), hooks.log.latest
    put_methods_into(module)
    _call_setup(module)

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizers, hooks.schedulers = configured(module.configure_optimizers(), manual=manual)
        view.made = optimizers
        if len(optimizers) == 1:
            return optimizers[0]
        return NamedOptimizers({str(number): each for number, each in enumerate(optimizers)})

    kind = LightningLoop if manual else Trainer
    trainer = kind(
        module, train_loader, val_loader, strategy=ModuleStrategy(hooks), optimizer=make,
        config=replace(config, schedule=None), handlers=[hooks, *handlers], **options,
    )  # fmt: skip
    view.bind(trainer)
    if isinstance(trainer, LightningLoop):
        trainer.hooks = hooks
    return trainer


class LightningLoop(Loop):
    """The run of a module that makes its steps itself."""

    hooks: ModuleHooks
    output: Any

    def train(self, resume: str | os.PathLike[str] | None = None, *, wait: bool = False) -> dict[str, list[float]]:
        for batch in self.batches(resume, wait=wait):
            _, number = self.hooks.current()
            found = self.model(StepCall(self.hooks, batch, number, ""))
            losses, self.hooks.losses = self.hooks.losses, []
            if isinstance(found, Tensor | Mapping):
                self.output = found
            elif losses:  # what was differentiated
                self.output = torch.stack([each.float() for each in losses]).sum()
        return self.history.get_history()


def _is_loader(value: object) -> bool:
    """Whether it gives batches, rather than being one."""
    return isinstance(value, torch.utils.data.DataLoader)


def _call_setup(module: Any) -> None:
    """Call the hooks that come before everything else."""
    for hook, arguments in (("prepare_data", ()), ("setup", ("fit",))):
        if overrides(module, hook):
            getattr(module, hook)(*arguments)
