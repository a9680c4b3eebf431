"""An event-driven training engine for PyTorch and JAX with a flight recorder.

The names below are imported when they are first used: `import pulsetrain` loads neither torch nor any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulsetrain.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from pulsetrain.adapters.hugging_face_arguments import from_huggingface as from_huggingface
    from pulsetrain.adapters.lightning_module import from_lightning as from_lightning
    from pulsetrain.config import TrainingConfig as TrainingConfig
    from pulsetrain.configuration.trained_model import load as load
    from pulsetrain.engine import (
        CPOStrategy as CPOStrategy,
        DPOStrategy as DPOStrategy,
        Engine as Engine,
        Event as Event,
        EventBus as EventBus,
        EventEnum as EventEnum,
        Events as Events,
        Every as Every,
        GRPOStrategy as GRPOStrategy,
        JaxBackend as JaxBackend,
        KTOStrategy as KTOStrategy,
        MegatronBackend as MegatronBackend,
        ORPOStrategy as ORPOStrategy,
        Phase as Phase,
        PPOStrategy as PPOStrategy,
        PretrainStrategy as PretrainStrategy,
        RewardModelStrategy as RewardModelStrategy,
        SFTStrategy as SFTStrategy,
        SimPOStrategy as SimPOStrategy,
        SupervisedStrategy as SupervisedStrategy,
        TorchBackend as TorchBackend,
    )
    from pulsetrain.engine.metrics import (
        Accuracy as Accuracy,
        TokenAccuracy as TokenAccuracy,
        TopKAccuracy as TopKAccuracy,
    )
    from pulsetrain.engine.recording import EventLog as EventLog, Replay as Replay, diff as diff
    from pulsetrain.handlers import *
    from pulsetrain.manual_loop import Loop as Loop
    from pulsetrain.signals import SignalWatch as SignalWatch
    from pulsetrain.trainer import Trainer as Trainer
    from pulsetrain.verification import verify as verify
else:  # which type checkers do not see: to them, an unknown name is an error
    from pulsetrain.handlers import __all__ as HANDLERS

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pulsetrain.adapters.hugging_face_arguments": ("from_huggingface",),
            "pulsetrain.adapters.lightning_module": ("from_lightning",),
            "pulsetrain.config": ("TrainingConfig",),
            "pulsetrain.configuration.trained_model": ("load",),
            "pulsetrain.engine": (
                "CPOStrategy", "DPOStrategy", "Engine", "Event", "EventBus", "EventEnum", "Events", "Every",
                "GRPOStrategy", "JaxBackend", "KTOStrategy", "MegatronBackend", "ORPOStrategy", "PPOStrategy", "Phase",
                "PretrainStrategy", "RewardModelStrategy", "SFTStrategy", "SimPOStrategy", "SupervisedStrategy",
                "TorchBackend",
            ),
            "pulsetrain.engine.metrics": ("Accuracy", "TokenAccuracy", "TopKAccuracy"),
            "pulsetrain.engine.recording": ("EventLog", "Replay", "diff"),
            "pulsetrain.handlers": HANDLERS,
            "pulsetrain.manual_loop": ("Loop",),
            "pulsetrain.signals": ("SignalWatch",),
            "pulsetrain.trainer": ("Trainer",),
            "pulsetrain.verification": ("verify",),
        },
    )  # fmt: skip
