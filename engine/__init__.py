"""Mechanism: events, the bus, the run loop and the parts of a training step."""

from engine.accumulation import Accumulate
from engine.backends import FunctionalBackend, JaxBackend, TorchBackend
from engine.bus import EventBus
from engine.cadence import Every
from engine.core import TrainerCore
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
    PolicyUpdated,
    Preempted,
    RewardsComputed,
    RolloutCompleted,
    Terminated,
    ValidationCompleted,
)
from engine.protocols import (
    AlternatingStrategy,
    Backend,
    BackendSettings,
    GradientInfo,
    ModelState,
    Optimizer,
    TrainingBatch,
    TrainingResult,
    TrainingStrategy,
)
from engine.state import State
from engine.strategies import (
    DPOStrategy,
    GRPOStrategy,
    PPOStrategy,
    PretrainStrategy,
    SFTStrategy,
    SupervisedStrategy,
)
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
    "PolicyUpdated",
    "Preempted",
    "RewardsComputed",
    "RolloutCompleted",
    "Terminated",
    "ValidationCompleted",
    "Backend",
    "BackendSettings",
    "GradientInfo",
    "ModelState",
    "Optimizer",
    "TrainingBatch",
    "TrainingResult",
    "TrainingStrategy",
    "FunctionalBackend",
    "JaxBackend",
    "TorchBackend",
    "TrainerCore",
    "DPOStrategy",
    "GRPOStrategy",
    "PPOStrategy",
    "PretrainStrategy",
    "SFTStrategy",
    "SupervisedStrategy",
    "CheckpointError",
    "ConfigurationError",
    "MetricNotFoundError",
    "PulsetrainError",
    "RunFolderError",
]
