"""Composition: a Trainer, its configuration and the command line."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsetrain.config import TrainingConfig
    from pulsetrain.loop import Loop
    from pulsetrain.trainer import Trainer

__all__ = ["Loop", "Trainer", "TrainingConfig"]


def _refuse_shadowed_handlers() -> None:
    """`handlers` is a common name: say so when a user's own file has taken it. Its own import checks `engine`."""
    spec = find_spec("handlers")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if PathFinder.find_spec("handlers.checkpointer", folders) is None:
        raise ImportError(
            f"pulsetrain: {spec.origin if spec is not None else 'nothing'} is found as `handlers` in place of "
            "Pulsetrain's package; rename that file (or folder), or start Python where it is not on sys.path"
        )


_refuse_shadowed_handlers()


def __getattr__(name: str) -> Any:
    """Import them when they are asked for: torch takes a second, and `pulsetrain --version` need not wait for it."""
    if name == "Trainer":
        from pulsetrain.trainer import Trainer

        return Trainer
    if name == "TrainingConfig":
        from pulsetrain.config import TrainingConfig

        return TrainingConfig
    if name == "SignalWatch":
        from pulsetrain.signals import SignalWatch

        return SignalWatch
    if name == "verify":
        from pulsetrain.verification import verify

        return verify
    if name == "Loop":
        from pulsetrain.loop import Loop

        return Loop
    raise AttributeError(f"module 'pulsetrain' has no attribute {name!r}")
