"""Policies: each handler is one file, subscribes to events and can be taken off again."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder


def _refuse_shadowed_engine() -> None:
    """`engine` is a common name: say so when a file of the user's own has taken it, before anything runs it."""
    loaded = sys.modules.get("engine")
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec("engine")
    folders = getattr(loaded, "__path__", None) if loaded is not None else spec and spec.submodule_search_locations
    if folders and PathFinder.find_spec("engine.handler_table", list(folders)) is not None:  # no other has this one
        return
    found = getattr(loaded, "__file__", None) or (spec.origin if spec is not None else None)
    if found is None:
        raise ImportError("handlers: Pulsetrain's package `engine` is not installed; install pulsetrain again")
    raise ImportError(
        f"handlers: {found} hides Pulsetrain's package `engine`, because Python finds it first; "
        "rename that file (or folder), or start Python where it is not on sys.path",
        name="engine",
        path=found,
    )


_refuse_shadowed_engine()

# behind the check: each of them imports engine
from handlers.callback import Callback, CallbackList  # noqa: E402
from handlers.checkpointer import Checkpointer  # noqa: E402
from handlers.console_logger import ConsoleLogger  # noqa: E402
from handlers.csv_logger import CSVLogger  # noqa: E402
from handlers.early_stopping import EarlyStopping  # noqa: E402
from handlers.ema import EMA  # noqa: E402
from handlers.event_recorder import EventRecorder  # noqa: E402
from handlers.fingerprints import Fingerprints  # noqa: E402
from handlers.loss_curve import LossCurve  # noqa: E402
from handlers.lr_scheduler import LRScheduler  # noqa: E402
from handlers.progress_bar import ProgressBar  # noqa: E402
from handlers.swa import SWA  # noqa: E402

__all__ = [
    "EMA",
    "SWA",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "Checkpointer",
    "ConsoleLogger",
    "EarlyStopping",
    "EventRecorder",
    "Fingerprints",
    "LRScheduler",
    "LossCurve",
    "ProgressBar",
]
