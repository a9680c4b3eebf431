"""Composition: a Trainer, its configuration and the command line."""

import handlers as _handlers  # checks that `engine` is ours

if not hasattr(_handlers, "Checkpointer"):
    raise ImportError(
        f"pulsetrain: {getattr(_handlers, '__file__', None) or _handlers.__path__} hides Pulsetrain's package "
        "`handlers`, because Python finds it first; rename it, or start Python where it is not on sys.path"
    )

from pulsetrain.config import TrainingConfig  # behind the check
from pulsetrain.trainer import Trainer

__all__ = ["Trainer", "TrainingConfig"]
