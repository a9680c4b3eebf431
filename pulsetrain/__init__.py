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
    )
    from pulsetrain.engine import (
        Engine as Engine,
    )
    from pulsetrain.engine import (
        Event as Event,
    )
    from pulsetrain.engine import (
        EventBus as EventBus,
    )
    from pulsetrain.engine import (
        EventEnum as EventEnum,
    )
    from pulsetrain.engine import (
        Events as Events,
    )
    from pulsetrain.engine import (
        Every as Every,
    )
    from pulsetrain.engine import (
        GRPOStrategy as GRPOStrategy,
    )
    from pulsetrain.engine import (
        JaxBackend as JaxBackend,
    )
    from pulsetrain.engine import (
        Phase as Phase,
    )
    from pulsetrain.engine import (
        PPOStrategy as PPOStrategy,
    )
    from pulsetrain.engine import (
        PretrainStrategy as PretrainStrategy,
    )
    from pulsetrain.engine import (
        SFTStrategy as SFTStrategy,
    )
    from pulsetrain.engine import (
        SupervisedStrategy as SupervisedStrategy,
    )
    from pulsetrain.engine import (
        TorchBackend as TorchBackend,
    )
    from pulsetrain.engine.recording import EventLog as EventLog
    from pulsetrain.engine.recording import Replay as Replay
    from pulsetrain.engine.recording import diff as diff
    from pulsetrain.handlers import (
        EMA as EMA,
    )
    from pulsetrain.handlers import (
        SWA as SWA,
    )
    from pulsetrain.handlers import (
        Alert as Alert,
    )
    from pulsetrain.handlers import (
        BestModel as BestModel,
    )
    from pulsetrain.handlers import (
        Callback as Callback,
    )
    from pulsetrain.handlers import (
        CallbackList as CallbackList,
    )
    from pulsetrain.handlers import (
        Checkpointer as Checkpointer,
    )
    from pulsetrain.handlers import (
        ConsoleLogger as ConsoleLogger,
    )
    from pulsetrain.handlers import (
        CrashBundle as CrashBundle,
    )
    from pulsetrain.handlers import (
        CSVLogger as CSVLogger,
    )
    from pulsetrain.handlers import (
        EarlyStopping as EarlyStopping,
    )
    from pulsetrain.handlers import (
        EventRecorder as EventRecorder,
    )
    from pulsetrain.handlers import (
        Fingerprints as Fingerprints,
    )
    from pulsetrain.handlers import (
        Garbage as Garbage,
    )
    from pulsetrain.handlers import (
        GradientMonitor as GradientMonitor,
    )
    from pulsetrain.handlers import (
        HangWatchdog as HangWatchdog,
    )
    from pulsetrain.handlers import (
        JSONLinesLogger as JSONLinesLogger,
    )
    from pulsetrain.handlers import (
        LossSpikeGuard as LossSpikeGuard,
    )
    from pulsetrain.handlers import (
        LRFinder as LRFinder,
    )
    from pulsetrain.handlers import (
        LRMonitor as LRMonitor,
    )
    from pulsetrain.handlers import (
        LRScheduler as LRScheduler,
    )
    from pulsetrain.handlers import (
        MemoryMonitor as MemoryMonitor,
    )
    from pulsetrain.handlers import (
        MetricLogger as MetricLogger,
    )
    from pulsetrain.handlers import (
        MLflowLogger as MLflowLogger,
    )
    from pulsetrain.handlers import (
        NaNGuard as NaNGuard,
    )
    from pulsetrain.handlers import (
        Plots as Plots,
    )
    from pulsetrain.handlers import (
        Profiler as Profiler,
    )
    from pulsetrain.handlers import (
        ProgressBar as ProgressBar,
    )
    from pulsetrain.handlers import (
        ReduceLROnPlateau as ReduceLROnPlateau,
    )
    from pulsetrain.handlers import (
        SampleText as SampleText,
    )
    from pulsetrain.handlers import (
        StepLimit as StepLimit,
    )
    from pulsetrain.handlers import (
        TensorBoardLogger as TensorBoardLogger,
    )
    from pulsetrain.handlers import (
        Throughput as Throughput,
    )
    from pulsetrain.handlers import (
        TimeLimit as TimeLimit,
    )
    from pulsetrain.handlers import (
        TrackioLogger as TrackioLogger,
    )
    from pulsetrain.handlers import (
        WandbLogger as WandbLogger,
    )
    from pulsetrain.manual_loop import Loop as Loop
    from pulsetrain.signals import SignalWatch as SignalWatch
    from pulsetrain.trainer import Trainer as Trainer
    from pulsetrain.verification import verify as verify

# Where each public name is defined; the imports above say the same to type checkers, and a test compares the two.
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
