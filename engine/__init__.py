"""Mechanism: events, the bus, the run loop and the parts of a training step."""

from engine.accumulation import Accumulate
from engine.backends import TorchBackend
from engine.bus import EventBus
from engine.cadence import Every
from engine.errors import (
    CheckpointError,
    ConfigurationError,
    MetricNotFoundError,
    PulsetrainError,
    RunFolderError,
)
from engine.events import Event, EventEnum, Events
from engine.loop import Engine
from engine.payloads import (
    AnomalyDetected,
    CheckpointLoaded,
    CheckpointSaved,
    EpochTerminated,
    ExceptionRaised,
    GradientsReady,
    HandlerFailed,
    MediaLogged,
    MetricsLogged,
    OptimizerStepCompleted,
    Preempted,
    Terminated,
    ValidationCompleted,
)
from engine.protocols import AlternatingStrategy, ModelState, TrainingBatch, TrainingResult, TrainingStrategy
from engine.state import State
from engine.strategies import PretrainStrategy, SupervisedStrategy
from engine.subscription import Phase, Subscription

__all__ = [
    "AlternatingStrategy",
    "Accumulate",
    "Engine",
    "Event",
    "EventBus",
    "EventEnum",
    "Events",
    "Every",
    "Phase",
    "State",
    "Subscription",
    "AnomalyDetected",
    "CheckpointLoaded",
    "CheckpointSaved",
    "EpochTerminated",
    "ExceptionRaised",
    "GradientsReady",
    "HandlerFailed",
    "MediaLogged",
    "MetricsLogged",
    "OptimizerStepCompleted",
    "Preempted",
    "Terminated",
    "ValidationCompleted",
    "ModelState",
    "TrainingBatch",
    "TrainingResult",
    "TrainingStrategy",
    "TorchBackend",
    "PretrainStrategy",
    "SupervisedStrategy",
    "CheckpointError",
    "ConfigurationError",
    "MetricNotFoundError",
    "PulsetrainError",
    "RunFolderError",
]
