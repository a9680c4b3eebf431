"""The mechanism of training: events, the bus, the run loop, and the parts of a training step."""

from __future__ import annotations

if __name__ != "pulsetrain.engine":  # imported from the checkout's root, it would be a second copy of every class
    raise ImportError(f"{__name__!r} is not a top-level package; import pulsetrain.engine", name=__name__)

from typing import TYPE_CHECKING

from pulsetrain.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from pulsetrain.engine.backends import (
        FunctionalBackend as FunctionalBackend,
    )
    from pulsetrain.engine.backends import (
        JaxBackend as JaxBackend,
    )
    from pulsetrain.engine.backends import (
        MegatronBackend as MegatronBackend,
    )
    from pulsetrain.engine.backends import (
        MegatronGPT as MegatronGPT,
    )
    from pulsetrain.engine.backends import (
        TorchBackend as TorchBackend,
    )
    from pulsetrain.engine.backends.core import TrainerCore as TrainerCore
    from pulsetrain.engine.distributed.pretrained import pretrained as pretrained
    from pulsetrain.engine.distributed.topology import Topology as Topology
    from pulsetrain.engine.errors import (
        ArgumentTypeError as ArgumentTypeError,
    )
    from pulsetrain.engine.errors import (
        CheckpointError as CheckpointError,
    )
    from pulsetrain.engine.errors import (
        ConfigurationError as ConfigurationError,
    )
    from pulsetrain.engine.errors import (
        MetricNotFoundError as MetricNotFoundError,
    )
    from pulsetrain.engine.errors import (
        PulsetrainError as PulsetrainError,
    )
    from pulsetrain.engine.errors import (
        RecordingError as RecordingError,
    )
    from pulsetrain.engine.errors import (
        RunFolderError as RunFolderError,
    )
    from pulsetrain.engine.events.bus import EventBus as EventBus
    from pulsetrain.engine.events.cadence import Every as Every
    from pulsetrain.engine.events.engine import Engine as Engine
    from pulsetrain.engine.events.ignite_factories import (
        convert_tensor as convert_tensor,
    )
    from pulsetrain.engine.events.ignite_factories import (
        create_supervised_evaluator as create_supervised_evaluator,
    )
    from pulsetrain.engine.events.ignite_factories import (
        create_supervised_trainer as create_supervised_trainer,
    )
    from pulsetrain.engine.events.names import (
        Event as Event,
    )
    from pulsetrain.engine.events.names import (
        EventEnum as EventEnum,
    )
    from pulsetrain.engine.events.names import (
        Events as Events,
    )
    from pulsetrain.engine.events.payloads import (
        AnomalyDetected as AnomalyDetected,
    )
    from pulsetrain.engine.events.payloads import (
        CheckpointLoaded as CheckpointLoaded,
    )
    from pulsetrain.engine.events.payloads import (
        CheckpointSaved as CheckpointSaved,
    )
    from pulsetrain.engine.events.payloads import (
        EpochTerminated as EpochTerminated,
    )
    from pulsetrain.engine.events.payloads import (
        ExceptionRaised as ExceptionRaised,
    )
    from pulsetrain.engine.events.payloads import (
        GradientsReady as GradientsReady,
    )
    from pulsetrain.engine.events.payloads import (
        HandlerFailed as HandlerFailed,
    )
    from pulsetrain.engine.events.payloads import (
        MediaLogged as MediaLogged,
    )
    from pulsetrain.engine.events.payloads import (
        MetricsLogged as MetricsLogged,
    )
    from pulsetrain.engine.events.payloads import (
        OptimizerStepCompleted as OptimizerStepCompleted,
    )
    from pulsetrain.engine.events.payloads import (
        PolicyUpdated as PolicyUpdated,
    )
    from pulsetrain.engine.events.payloads import (
        Preempted as Preempted,
    )
    from pulsetrain.engine.events.payloads import (
        RanksDiverged as RanksDiverged,
    )
    from pulsetrain.engine.events.payloads import (
        RewardsComputed as RewardsComputed,
    )
    from pulsetrain.engine.events.payloads import (
        RolloutCompleted as RolloutCompleted,
    )
    from pulsetrain.engine.events.payloads import (
        Terminated as Terminated,
    )
    from pulsetrain.engine.events.payloads import (
        ValidationCompleted as ValidationCompleted,
    )
    from pulsetrain.engine.events.state import State as State
    from pulsetrain.engine.events.subscription import (
        FIRST as FIRST,
    )
    from pulsetrain.engine.events.subscription import (
        LAST as LAST,
    )
    from pulsetrain.engine.events.subscription import (
        OnError as OnError,
    )
    from pulsetrain.engine.events.subscription import (
        Order as Order,
    )
    from pulsetrain.engine.events.subscription import (
        Phase as Phase,
    )
    from pulsetrain.engine.events.subscription import (
        Subscription as Subscription,
    )
    from pulsetrain.engine.step.accumulation import Accumulate as Accumulate
    from pulsetrain.engine.step.backend import (
        Backend as Backend,
    )
    from pulsetrain.engine.step.backend import (
        ModelStore as ModelStore,
    )
    from pulsetrain.engine.step.memory_settings import (
        ActivationCheckpointing as ActivationCheckpointing,
    )
    from pulsetrain.engine.step.memory_settings import (
        ActivationOffload as ActivationOffload,
    )
    from pulsetrain.engine.step.memory_settings import (
        OffloadPolicy as OffloadPolicy,
    )
    from pulsetrain.engine.step.memory_settings import (
        OptimizerOffload as OptimizerOffload,
    )
    from pulsetrain.engine.step.protocols import (
        AlternatingStrategy as AlternatingStrategy,
    )
    from pulsetrain.engine.step.protocols import (
        BackendSettings as BackendSettings,
    )
    from pulsetrain.engine.step.protocols import (
        GradientInfo as GradientInfo,
    )
    from pulsetrain.engine.step.protocols import (
        ModelState as ModelState,
    )
    from pulsetrain.engine.step.protocols import (
        Optimizer as Optimizer,
    )
    from pulsetrain.engine.step.protocols import (
        TrainingBatch as TrainingBatch,
    )
    from pulsetrain.engine.step.protocols import (
        TrainingResult as TrainingResult,
    )
    from pulsetrain.engine.step.protocols import (
        TrainingStrategy as TrainingStrategy,
    )
    from pulsetrain.engine.strategies import (
        CPOStrategy as CPOStrategy,
    )
    from pulsetrain.engine.strategies import (
        DPOStrategy as DPOStrategy,
    )
    from pulsetrain.engine.strategies import (
        GRPOStrategy as GRPOStrategy,
    )
    from pulsetrain.engine.strategies import (
        KTOStrategy as KTOStrategy,
    )
    from pulsetrain.engine.strategies import (
        ORPOStrategy as ORPOStrategy,
    )
    from pulsetrain.engine.strategies import (
        PPOStrategy as PPOStrategy,
    )
    from pulsetrain.engine.strategies import (
        PretrainStrategy as PretrainStrategy,
    )
    from pulsetrain.engine.strategies import (
        RewardModelStrategy as RewardModelStrategy,
    )
    from pulsetrain.engine.strategies import (
        SFTStrategy as SFTStrategy,
    )
    from pulsetrain.engine.strategies import (
        SimPOStrategy as SimPOStrategy,
    )
    from pulsetrain.engine.strategies import (
        SupervisedStrategy as SupervisedStrategy,
    )
    from pulsetrain.engine.training_run import (
        TrainingRun as TrainingRun,
    )
    from pulsetrain.engine.training_run import (
        is_training_run as is_training_run,
    )
else:  # which type checkers do not see: to them, an unknown name is an error
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pulsetrain.engine.backends": (
                "FunctionalBackend", "JaxBackend", "MegatronBackend", "MegatronGPT", "TorchBackend"
            ),
            "pulsetrain.engine.backends.core": ("TrainerCore",),
            "pulsetrain.engine.distributed.pretrained": ("pretrained",),
            "pulsetrain.engine.distributed.topology": ("Topology",),
            "pulsetrain.engine.errors": (
                "ArgumentTypeError", "CheckpointError", "ConfigurationError", "MetricNotFoundError", "PulsetrainError",
                "RecordingError", "RunFolderError"
            ),
            "pulsetrain.engine.events.bus": ("EventBus",),
            "pulsetrain.engine.events.cadence": ("Every",),
            "pulsetrain.engine.events.engine": ("Engine",),
            "pulsetrain.engine.events.ignite_factories": (
                "convert_tensor", "create_supervised_evaluator", "create_supervised_trainer"
            ),
            "pulsetrain.engine.events.names": ("Event", "EventEnum", "Events"),
            "pulsetrain.engine.events.payloads": (
                "AnomalyDetected", "CheckpointLoaded", "CheckpointSaved", "EpochTerminated", "ExceptionRaised",
                "GradientsReady", "HandlerFailed", "MediaLogged", "MetricsLogged", "OptimizerStepCompleted",
                "PolicyUpdated", "Preempted", "RanksDiverged",
                "RewardsComputed", "RolloutCompleted", "Terminated", "ValidationCompleted"
            ),
            "pulsetrain.engine.events.state": ("State",),
            "pulsetrain.engine.events.subscription": ("FIRST", "LAST", "OnError", "Order", "Phase", "Subscription"),
            "pulsetrain.engine.step.accumulation": ("Accumulate",),
            "pulsetrain.engine.step.backend": ("Backend", "ModelStore"),
            "pulsetrain.engine.step.memory_settings": (
                "ActivationCheckpointing", "ActivationOffload", "OffloadPolicy", "OptimizerOffload"
            ),
            "pulsetrain.engine.step.protocols": (
                "AlternatingStrategy", "BackendSettings", "GradientInfo", "ModelState", "Optimizer", "TrainingBatch",
                "TrainingResult", "TrainingStrategy"
            ),
            "pulsetrain.engine.strategies": (
                "CPOStrategy", "DPOStrategy", "GRPOStrategy", "KTOStrategy", "ORPOStrategy", "PPOStrategy",
                "PretrainStrategy", "RewardModelStrategy", "SFTStrategy", "SimPOStrategy", "SupervisedStrategy"
            ),
            "pulsetrain.engine.training_run": ("TrainingRun", "is_training_run"),
        },
    )  # fmt: skip
