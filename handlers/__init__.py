"""Handlers: policies that subscribe to the events of a run and can be detached. Each is one file."""

from __future__ import annotations

if __name__ != "pulsetrain.handlers":  # found in the checkout's root, which would create a second copy of every class
    raise ImportError(f"{__name__!r} is not a package of its own; import pulsetrain.handlers", name=__name__)

from typing import TYPE_CHECKING

from pulsetrain.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from pulsetrain.handlers.adapters.hugging_face_callbacks import HuggingFaceCallbacks as HuggingFaceCallbacks
    from pulsetrain.handlers.adapters.keras_callbacks import KerasCallbacks as KerasCallbacks
    from pulsetrain.handlers.adapters.lightning_callbacks import LightningCallbacks as LightningCallbacks
    from pulsetrain.handlers.averaging.ema import EMA as EMA
    from pulsetrain.handlers.averaging.swa import SWA as SWA
    from pulsetrain.handlers.callback import (
        Callback as Callback,
    )
    from pulsetrain.handlers.callback import (
        CallbackList as CallbackList,
    )
    from pulsetrain.handlers.checkpointing.best_model import BestModel as BestModel
    from pulsetrain.handlers.checkpointing.checkpointer import Checkpointer as Checkpointer
    from pulsetrain.handlers.checkpointing.hugging_face_exporter import HuggingFaceExporter as HuggingFaceExporter
    from pulsetrain.handlers.crash.crash_bundle import CrashBundle as CrashBundle
    from pulsetrain.handlers.crash.hang_watchdog import HangWatchdog as HangWatchdog
    from pulsetrain.handlers.guards.early_stopping import EarlyStopping as EarlyStopping
    from pulsetrain.handlers.guards.limits import (
        StepLimit as StepLimit,
    )
    from pulsetrain.handlers.guards.limits import (
        TimeLimit as TimeLimit,
    )
    from pulsetrain.handlers.guards.loss_spike_guard import LossSpikeGuard as LossSpikeGuard
    from pulsetrain.handlers.guards.nan_guard import NaNGuard as NaNGuard
    from pulsetrain.handlers.learning_rate.lr_finder import LRFinder as LRFinder
    from pulsetrain.handlers.learning_rate.lr_monitor import LRMonitor as LRMonitor
    from pulsetrain.handlers.learning_rate.lr_scheduler import LRScheduler as LRScheduler
    from pulsetrain.handlers.learning_rate.reduce_lr_on_plateau import ReduceLROnPlateau as ReduceLROnPlateau
    from pulsetrain.handlers.loggers import (
        ConsoleLogger as ConsoleLogger,
    )
    from pulsetrain.handlers.loggers import (
        CSVLogger as CSVLogger,
    )
    from pulsetrain.handlers.loggers import (
        JSONLinesLogger as JSONLinesLogger,
    )
    from pulsetrain.handlers.loggers import (
        MetricLogger as MetricLogger,
    )
    from pulsetrain.handlers.loggers import (
        MLflowLogger as MLflowLogger,
    )
    from pulsetrain.handlers.loggers import (
        TensorBoardLogger as TensorBoardLogger,
    )
    from pulsetrain.handlers.loggers import (
        TrackioLogger as TrackioLogger,
    )
    from pulsetrain.handlers.loggers import (
        WandbLogger as WandbLogger,
    )
    from pulsetrain.handlers.loggers.progress_bar import ProgressBar as ProgressBar
    from pulsetrain.handlers.loggers.run_summary import RunSummary as RunSummary
    from pulsetrain.handlers.monitors.alert import Alert as Alert
    from pulsetrain.handlers.monitors.garbage import Garbage as Garbage
    from pulsetrain.handlers.monitors.gradient_monitor import GradientMonitor as GradientMonitor
    from pulsetrain.handlers.monitors.memory_monitor import MemoryMonitor as MemoryMonitor
    from pulsetrain.handlers.monitors.profiler import Profiler as Profiler
    from pulsetrain.handlers.monitors.sample_text import SampleText as SampleText
    from pulsetrain.handlers.monitors.throughput import Throughput as Throughput
    from pulsetrain.handlers.plots.plots import Plots as Plots
    from pulsetrain.handlers.recorder.event_recorder import EventRecorder as EventRecorder
    from pulsetrain.handlers.recorder.fingerprints import Fingerprints as Fingerprints
else:  # which type checkers do not see: to them, an unknown name is an error
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pulsetrain.handlers.adapters.hugging_face_callbacks": ("HuggingFaceCallbacks",),
            "pulsetrain.handlers.adapters.keras_callbacks": ("KerasCallbacks",),
            "pulsetrain.handlers.adapters.lightning_callbacks": ("LightningCallbacks",),
            "pulsetrain.handlers.averaging.ema": ("EMA",),
            "pulsetrain.handlers.averaging.swa": ("SWA",),
            "pulsetrain.handlers.callback": ("Callback", "CallbackList"),
            "pulsetrain.handlers.checkpointing.best_model": ("BestModel",),
            "pulsetrain.handlers.checkpointing.checkpointer": ("Checkpointer",),
            "pulsetrain.handlers.checkpointing.hugging_face_exporter": ("HuggingFaceExporter",),
            "pulsetrain.handlers.crash.crash_bundle": ("CrashBundle",),
            "pulsetrain.handlers.crash.hang_watchdog": ("HangWatchdog",),
            "pulsetrain.handlers.guards.early_stopping": ("EarlyStopping",),
            "pulsetrain.handlers.guards.limits": ("StepLimit", "TimeLimit"),
            "pulsetrain.handlers.guards.loss_spike_guard": ("LossSpikeGuard",),
            "pulsetrain.handlers.guards.nan_guard": ("NaNGuard",),
            "pulsetrain.handlers.learning_rate.lr_finder": ("LRFinder",),
            "pulsetrain.handlers.learning_rate.lr_monitor": ("LRMonitor",),
            "pulsetrain.handlers.learning_rate.lr_scheduler": ("LRScheduler",),
            "pulsetrain.handlers.learning_rate.reduce_lr_on_plateau": ("ReduceLROnPlateau",),
            "pulsetrain.handlers.loggers": (
                "ConsoleLogger", "CSVLogger", "JSONLinesLogger", "MetricLogger", "MLflowLogger", "TensorBoardLogger",
                "TrackioLogger", "WandbLogger"
            ),
            "pulsetrain.handlers.loggers.progress_bar": ("ProgressBar",),
            "pulsetrain.handlers.loggers.run_summary": ("RunSummary",),
            "pulsetrain.handlers.monitors.alert": ("Alert",),
            "pulsetrain.handlers.monitors.garbage": ("Garbage",),
            "pulsetrain.handlers.monitors.gradient_monitor": ("GradientMonitor",),
            "pulsetrain.handlers.monitors.memory_monitor": ("MemoryMonitor",),
            "pulsetrain.handlers.monitors.profiler": ("Profiler",),
            "pulsetrain.handlers.monitors.sample_text": ("SampleText",),
            "pulsetrain.handlers.monitors.throughput": ("Throughput",),
            "pulsetrain.handlers.plots.plots": ("Plots",),
            "pulsetrain.handlers.recorder.event_recorder": ("EventRecorder",),
            "pulsetrain.handlers.recorder.fingerprints": ("Fingerprints",),
        },
    )  # fmt: skip
