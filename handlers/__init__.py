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
from handlers.alert import Alert  # noqa: E402
from handlers.best_model import BestModel  # noqa: E402
from handlers.callback import Callback, CallbackList  # noqa: E402
from handlers.checkpointer import Checkpointer  # noqa: E402
from handlers.crash_bundle import CrashBundle  # noqa: E402
from handlers.early_stopping import EarlyStopping  # noqa: E402
from handlers.ema import EMA  # noqa: E402
from handlers.event_recorder import EventRecorder  # noqa: E402
from handlers.fingerprints import Fingerprints  # noqa: E402
from handlers.garbage import Garbage  # noqa: E402
from handlers.gradient_monitor import GradientMonitor  # noqa: E402
from handlers.hang_watchdog import HangWatchdog  # noqa: E402
from handlers.limits import StepLimit, TimeLimit  # noqa: E402
from handlers.loggers import (  # noqa: E402
    ConsoleLogger,
    CSVLogger,
    JSONLinesLogger,
    MetricLogger,
    MLflowLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from handlers.loss_spike_guard import LossSpikeGuard  # noqa: E402
from handlers.lr_finder import LRFinder  # noqa: E402
from handlers.lr_monitor import LRMonitor  # noqa: E402
from handlers.lr_scheduler import LRScheduler  # noqa: E402
from handlers.memory_monitor import MemoryMonitor  # noqa: E402
from handlers.nan_guard import NaNGuard  # noqa: E402
from handlers.plots import Plots  # noqa: E402
from handlers.profiler import Profiler  # noqa: E402
from handlers.progress_bar import ProgressBar  # noqa: E402
from handlers.reduce_lr_on_plateau import ReduceLROnPlateau  # noqa: E402
from handlers.sample_text import SampleText  # noqa: E402
from handlers.swa import SWA  # noqa: E402
from handlers.throughput import Throughput  # noqa: E402

__all__ = [
    "EMA",
    "SWA",
    "Alert",
    "BestModel",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "Checkpointer",
    "ConsoleLogger",
    "CrashBundle",
    "EarlyStopping",
    "EventRecorder",
    "Fingerprints",
    "Garbage",
    "GradientMonitor",
    "JSONLinesLogger",
    "LRFinder",
    "LRMonitor",
    "HangWatchdog",
    "LRScheduler",
    "LossSpikeGuard",
    "NaNGuard",
    "MLflowLogger",
    "MetricLogger",
    "MemoryMonitor",
    "Plots",
    "Profiler",
    "ProgressBar",
    "ReduceLROnPlateau",
    "StepLimit",
    "TensorBoardLogger",
    "SampleText",
    "Throughput",
    "TimeLimit",
    "TrackioLogger",
    "WandbLogger",
]
