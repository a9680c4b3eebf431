"""The mechanism of training: events, the bus, the run loop, and the parts of a training step."""

if __name__ != "pulsetrain.engine":  # imported from the checkout's root, it would be a second copy of every class
    raise ImportError(f"{__name__!r} is not a top-level package; import pulsetrain.engine", name=__name__)

from pulsetrain.engine.backends import FunctionalBackend, JaxBackend, TorchBackend
from pulsetrain.engine.backends.core import TrainerCore
from pulsetrain.engine.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    MetricNotFoundError,
    PulsetrainError,
    RecordingError,
    RunFolderError,
)
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.ignite_factories import (
    convert_tensor,
    create_supervised_evaluator,
    create_supervised_trainer,
)
from pulsetrain.engine.events.names import Event, EventEnum, Events
from pulsetrain.engine.events.payloads import (
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
from pulsetrain.engine.events.state import State
from pulsetrain.engine.events.subscription import FIRST, LAST, OnError, Order, Phase, Subscription
from pulsetrain.engine.step.accumulation import Accumulate
from pulsetrain.engine.step.backend import Backend, ModelStore
from pulsetrain.engine.step.protocols import (
    AlternatingStrategy,
    BackendSettings,
    GradientInfo,
    ModelState,
    Optimizer,
    TrainingBatch,
    TrainingResult,
    TrainingStrategy,
)
from pulsetrain.engine.strategies import (
    DPOStrategy,
    GRPOStrategy,
    PPOStrategy,
    PretrainStrategy,
    SFTStrategy,
    SupervisedStrategy,
)
from pulsetrain.engine.training_run import TrainingRun, is_training_run

__all__ = [
    "AlternatingStrategy", "Accumulate", "Engine", "Event", "EventBus", "EventEnum", "Events", "Every", "FIRST",
    "LAST", "OnError", "Order", "Phase", "State", "Subscription", "AnomalyDetected", "CheckpointLoaded",
    "CheckpointSaved", "EpochTerminated", "ExceptionRaised", "GradientsReady", "HandlerFailed", "MediaLogged",
    "MetricsLogged", "OptimizerStepCompleted", "PolicyUpdated", "Preempted", "RewardsComputed", "RolloutCompleted",
    "Terminated", "ValidationCompleted", "Backend", "BackendSettings", "GradientInfo", "ModelState", "ModelStore",
    "Optimizer", "TrainingBatch", "TrainingResult", "TrainingRun", "TrainingStrategy", "is_training_run",
    "FunctionalBackend", "JaxBackend", "TorchBackend", "TrainerCore", "DPOStrategy", "GRPOStrategy", "PPOStrategy",
    "PretrainStrategy", "SFTStrategy", "SupervisedStrategy", "ArgumentTypeError", "CheckpointError",
    "ConfigurationError", "MetricNotFoundError", "PulsetrainError", "RecordingError", "RunFolderError",
    "convert_tensor", "create_supervised_evaluator", "create_supervised_trainer",
]  # fmt: skip
