"""An event-driven training engine for PyTorch with a flight recorder.

The names below are imported when they are first used: `import pulsetrain` loads neither torch nor any of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsetrain.config import TrainingConfig as TrainingConfig
    from pulsetrain.engine import (
        DPOStrategy as DPOStrategy,
        Engine as Engine,
        Event as Event,
        EventBus as EventBus,
        EventEnum as EventEnum,
        Events as Events,
        Every as Every,
        GRPOStrategy as GRPOStrategy,
        JaxBackend as JaxBackend,
        Phase as Phase,
        PPOStrategy as PPOStrategy,
        PretrainStrategy as PretrainStrategy,
        SFTStrategy as SFTStrategy,
        SupervisedStrategy as SupervisedStrategy,
        TorchBackend as TorchBackend,
    )
    from pulsetrain.engine.recording import EventLog as EventLog, Replay as Replay, diff as diff
    from pulsetrain.handlers import *
    from pulsetrain.manual_loop import Loop as Loop
    from pulsetrain.signals import SignalWatch as SignalWatch
    from pulsetrain.trainer import Trainer as Trainer
    from pulsetrain.verification import verify as verify

# Where each public name is defined. The imports above say the same to type checkers, and a test compares the two.
_MODULES = {
    "pulsetrain.config": ("TrainingConfig",),
    "pulsetrain.engine": (
        "DPOStrategy", "Engine", "Event", "EventBus", "EventEnum", "Events", "Every", "GRPOStrategy", "JaxBackend",
        "PPOStrategy", "Phase", "PretrainStrategy", "SFTStrategy", "SupervisedStrategy", "TorchBackend",
    ),
    "pulsetrain.engine.recording": ("EventLog", "Replay", "diff"),
    "pulsetrain.handlers": (
        "Alert", "BestModel", "CSVLogger", "Callback", "CallbackList", "Checkpointer", "ConsoleLogger", "CrashBundle",
        "EMA", "EarlyStopping", "EventRecorder", "Fingerprints", "Garbage", "GradientMonitor", "HangWatchdog",
        "JSONLinesLogger", "LRFinder", "LRMonitor", "LRScheduler", "LossSpikeGuard", "MLflowLogger", "MemoryMonitor",
        "MetricLogger", "NaNGuard", "Plots", "Profiler", "ProgressBar", "ReduceLROnPlateau", "SWA", "SampleText",
        "StepLimit", "TensorBoardLogger", "Throughput", "TimeLimit", "TrackioLogger", "WandbLogger",
    ),
    "pulsetrain.manual_loop": ("Loop",),
    "pulsetrain.signals": ("SignalWatch",),
    "pulsetrain.trainer": ("Trainer",),
    "pulsetrain.verification": ("verify",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'pulsetrain' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
