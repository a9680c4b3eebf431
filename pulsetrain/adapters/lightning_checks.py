"""What of a LightningModule cannot run on a Trainer, refused by name before anything is computed."""

from __future__ import annotations

from typing import Any

from torch import nn

from pulsetrain.config import TrainingConfig
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError

__all__ = ["check_config", "check_module", "overrides"]

PLACE = "from_lightning"

_BATCHES = "move this into the dataset or the collate function; batches are moved to the model's device"
_HANDLER = "subscribe a handler to Events.GRADIENTS_READY or Events.OPTIMIZER_STEP_COMPLETED"
_STATE = "use nn.Module's get_extra_state and set_extra_state, or a handler with state_dict and load_state_dict"
_MANUAL = "set self.automatic_optimization = False, and make the step in training_step"

_REFUSED = {
    "backward": _MANUAL,
    "optimizer_step": _MANUAL,
    "optimizer_zero_grad": _MANUAL,
    "lr_scheduler_step": "return a scheduler whose step() takes no argument, or " + _MANUAL,
    "configure_gradient_clipping": "set TrainingConfig(clip_grad_norm=...) or clip_grad_value",
    "on_before_zero_grad": _HANDLER,
    "on_before_backward": _HANDLER,
    "on_after_backward": _HANDLER,
    "transfer_batch_to_device": _BATCHES,
    "on_before_batch_transfer": _BATCHES,
    "on_after_batch_transfer": _BATCHES,
    "on_save_checkpoint": _STATE,
    "on_load_checkpoint": _STATE,
    "configure_callbacks": "pass handlers=[LightningCallbacks([...])] to from_lightning",
    "configure_model": "make the layers in __init__",
    "on_validation_model_eval": "the Trainer sets the modes and restores them",
    "on_validation_model_train": "the Trainer sets the modes and restores them",
}
"""Hooks that take part in how Lightning's own Trainer works, and what to do instead."""

_OF_MODULE: dict[str, object] = {
    "optimizer": "adamw", "learning_rate": None, "weight_decay": None, "no_decay": None, "optimizer_options": {},
    "warmup_steps": 0, "min_lr_ratio": None, "schedule_options": {}, "compile": False,
}  # fmt: skip
"""Settings that the module decides, with their defaults."""


def overrides(module: nn.Module, hook: str) -> bool:
    """Whether the module's class has a method of its own in the place of Lightning's."""
    kinds = type(module).__mro__
    base = next((kind for kind in kinds if kind.__name__ == "LightningModule"), None)
    mine = getattr(type(module), hook, None)
    return callable(mine) and mine is not getattr(base, hook, None)


def check_module(module: Any) -> None:
    """Refuse an object that is not a LightningModule, and hooks that would not be called.

    Raises:
        ArgumentTypeError, ConfigurationError: it is refused.
    """
    if not isinstance(module, nn.Module) or "LightningModule" not in [kind.__name__ for kind in type(module).__mro__]:
        rule = "needs an object of a class that derives from lightning.LightningModule"
        raise ArgumentTypeError(rule, PLACE, module=type(module))
    for name in ("training_step", "configure_optimizers"):
        if not overrides(module, name):
            raise ConfigurationError(f"needs a method {name}", PLACE, module=type(module))
    for hook, remedy in _REFUSED.items():
        if overrides(module, hook):
            raise ConfigurationError(f"has {hook}, which is not called; {remedy}", PLACE, module=type(module))


def check_config(config: TrainingConfig, *, manual: bool, batches: int | None) -> None:
    """Refuse settings that the module decides, and what has not been tested.

    Args:
        config: the run's settings.
        manual: whether the module makes the steps itself.
        batches: in an epoch, if that is known.

    Raises:
        ConfigurationError: a setting is refused.
    """
    if ranks().world_size > 1:
        rule = "trains in one process; write the module as an nn.Module with a strategy for several"
        raise ConfigurationError(rule, PLACE, processes=ranks().world_size)
    for name, default in _OF_MODULE.items():
        if getattr(config, name) != default:
            remedy = "compile parts of the module in __init__" if name == "compile" else "set it in the module"
            rule = f"is decided by the module's configure_optimizers; leave it out, and {remedy}"
            raise ConfigurationError(rule, "TrainingConfig", **{name: getattr(config, name)})
    if config.schedule not in (None, "constant"):
        rule = "is decided by the module's configure_optimizers; leave it out, and return a scheduler there"
        raise ConfigurationError(rule, "TrainingConfig", schedule=config.schedule)
    count = config.accumulation.batches or 1
    if count == 1:
        return
    if manual:
        rule = "has no effect on a module that makes its steps itself; leave it out, and step less often"
        raise ConfigurationError(rule, "TrainingConfig", accumulate=count)
    if batches is not None and batches % count:
        rule = (
            f"does not divide the {batches} batches of an epoch: Lightning makes an update of those that are left, "
            "here they count towards the next one; choose a divisor"
        )
        raise ConfigurationError(rule, "TrainingConfig", accumulate=count)
