"""Learning-rate schedules as pure functions of the number of updates made, and torch schedulers that follow them."""

from pulsetrain.engine.schedules.decay import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    Polynomial,
    Step,
)
from pulsetrain.engine.schedules.formula import Scaled, Schedule, Sequential
from pulsetrain.engine.schedules.groups import group_ratios, update_optimizer
from pulsetrain.engine.schedules.named import build_schedule
from pulsetrain.engine.schedules.picture import plot
from pulsetrain.engine.schedules.torch_schedulers import add_warmup, create_scheduler
from pulsetrain.engine.schedules.warmup import WSD, OneCycle, Warmup

__all__ = [
    "Schedule", "Constant", "Linear", "Polynomial", "Step", "MultiStep", "Exponential", "Cosine", "CosineRestarts",
    "InverseSqrt", "Warmup", "WSD", "OneCycle", "Sequential", "Scaled", "build_schedule", "create_scheduler",
    "add_warmup", "group_ratios", "update_optimizer", "plot",
]  # fmt: skip
