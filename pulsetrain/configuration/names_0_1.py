"""Class paths of version 0.1, whose packages were `engine`, `handlers` and `pulsetrain`, in the names of today."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pulsetrain.engine
import pulsetrain.handlers

__all__ = ["MODULES", "current_module", "current_path"]

# Modules of user-facing names that have moved, by their package of today. A public name is found in its package, too.
_MOVED = {
    "pulsetrain.engine.events": "engine.bus engine.cadence engine.payloads engine.state engine.subscription",
    "pulsetrain.engine.data": "engine.chat engine.rng engine.sequences",
    "pulsetrain.engine.step": "engine.accumulation engine.averaging engine.gradients engine.precision engine.protocols",
    "pulsetrain.engine.backends": "engine.core",
    "pulsetrain.engine.checkpoint": "engine.snapshot",
}
MODULES = {
    "engine.events": "pulsetrain.engine.events.names",
    "engine.loop": "pulsetrain.engine.events.engine",
    "engine.batches": "pulsetrain.engine.data.keyed_loader",
    "engine.schedules.shapes": "pulsetrain.engine.schedules.decay",
    "engine.schedules.phases": "pulsetrain.engine.schedules.warmup",
    "engine.recording.log": "pulsetrain.engine.recording.log.reader",
    "engine.recording.replay": "pulsetrain.engine.recording.replay.playback",
    "engine.recording.diff": "pulsetrain.engine.recording.diff.compare",
    "pulsetrain.loop": "pulsetrain.manual_loop",
    **{old: f"{package}.{old.rpartition('.')[2]}" for package, moved in _MOVED.items() for old in moved.split()},
}
_PACKAGES = {"engine": pulsetrain.engine, "handlers": pulsetrain.handlers}


def current_module(name: str) -> str | None:
    """What a module of version 0.1 is called now; None where the name is not of 0.1, or a user's own module has it.

    >>> current_module("engine.schedules"), current_module("pulsetrain.loop"), current_module("my_model")
    ('pulsetrain.engine.schedules', 'pulsetrain.manual_loop', None)
    """
    top = name.partition(".")[0]
    if top in _PACKAGES and not _is_users_own(top):
        return MODULES.get(name, f"pulsetrain.{name}")
    return MODULES.get(name) if top == "pulsetrain" else None


def current_path(path: str) -> str:
    """A class path as it is written now; one that is not of version 0.1 stays as it is.

    >>> current_path("handlers.checkpointer.Checkpointer")
    'pulsetrain.handlers.Checkpointer'
    >>> current_path("engine.strategies.SFTStrategy")
    'pulsetrain.engine.strategies.SFTStrategy'
    """
    old, _, name = path.rpartition(".")
    module = current_module(old)
    if module is None:
        return path
    package = f"pulsetrain.{old}" if old.partition(".")[0] in _PACKAGES else old
    while module and not _has(module, name):
        package = module = package.rpartition(".")[0]
    return f"{module or current_module(old)}.{name}"


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name)
    except ModuleNotFoundError:
        return False


def _is_users_own(name: str) -> bool:
    """Whether a package of this name is importable that is not ours, seen from the root of a checkout."""
    spec = find_spec(name)
    ours = _PACKAGES[name].__file__
    assert ours is not None
    return spec is not None and (spec.origin is None or Path(spec.origin).resolve() != Path(ours).resolve())
