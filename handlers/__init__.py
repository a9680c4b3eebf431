"""Handlers: policies that subscribe to the events of a run and can be detached. Each is one file."""

if __name__ != "pulsetrain.handlers":  # found in the checkout's root, which would create a second copy of every class
    raise ImportError(f"{__name__!r} is not a package of its own; import pulsetrain.handlers", name=__name__)

from pulsetrain.handlers.averaging.ema import EMA
from pulsetrain.handlers.averaging.swa import SWA
from pulsetrain.handlers.callback import Callback, CallbackList
from pulsetrain.handlers.checkpointing.best_model import BestModel
from pulsetrain.handlers.checkpointing.checkpointer import Checkpointer
from pulsetrain.handlers.crash.crash_bundle import CrashBundle
from pulsetrain.handlers.crash.hang_watchdog import HangWatchdog
from pulsetrain.handlers.guards.early_stopping import EarlyStopping
from pulsetrain.handlers.guards.limits import StepLimit, TimeLimit
from pulsetrain.handlers.guards.loss_spike_guard import LossSpikeGuard
from pulsetrain.handlers.guards.nan_guard import NaNGuard
from pulsetrain.handlers.learning_rate.lr_finder import LRFinder
from pulsetrain.handlers.learning_rate.lr_monitor import LRMonitor
from pulsetrain.handlers.learning_rate.lr_scheduler import LRScheduler
from pulsetrain.handlers.learning_rate.reduce_lr_on_plateau import ReduceLROnPlateau
from pulsetrain.handlers.loggers import (
    ConsoleLogger,
    CSVLogger,
    JSONLinesLogger,
    MetricLogger,
    MLflowLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from pulsetrain.handlers.loggers.progress_bar import ProgressBar
from pulsetrain.handlers.monitors.alert import Alert
from pulsetrain.handlers.monitors.garbage import Garbage
from pulsetrain.handlers.monitors.gradient_monitor import GradientMonitor
from pulsetrain.handlers.monitors.memory_monitor import MemoryMonitor
from pulsetrain.handlers.monitors.profiler import Profiler
from pulsetrain.handlers.monitors.sample_text import SampleText
from pulsetrain.handlers.monitors.throughput import Throughput
from pulsetrain.handlers.plots.plots import Plots
from pulsetrain.handlers.recorder.event_recorder import EventRecorder
from pulsetrain.handlers.recorder.fingerprints import Fingerprints

__all__ = [
    "EMA", "SWA", "Alert", "BestModel", "CSVLogger", "Callback", "CallbackList", "Checkpointer", "ConsoleLogger",
    "CrashBundle", "EarlyStopping", "EventRecorder", "Fingerprints", "Garbage", "GradientMonitor", "JSONLinesLogger",
    "LRFinder", "LRMonitor", "HangWatchdog", "LRScheduler", "LossSpikeGuard", "NaNGuard", "MLflowLogger",
    "MetricLogger", "MemoryMonitor", "Plots", "Profiler", "ProgressBar", "ReduceLROnPlateau", "StepLimit",
    "TensorBoardLogger", "SampleText", "Throughput", "TimeLimit", "TrackioLogger", "WandbLogger",
]  # fmt: skip
