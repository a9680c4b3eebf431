"""Learning-rate schedules: pure functions of the number of updates already made; and torch schedulers over them."""

from engine.schedules.formula import Scaled, Schedule, Sequential
from engine.schedules.groups import group_ratios, update_optimizer
from engine.schedules.named import build_schedule
from engine.schedules.phases import WSD, OneCycle, Warmup
from engine.schedules.picture import plot
from engine.schedules.shapes import (
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
from engine.schedules.torch_schedulers import add_warmup, create_scheduler

__all__ = [
    "Schedule",
    "Constant",
    "Linear",
    "Polynomial",
    "Step",
    "MultiStep",
    "Exponential",
    "Cosine",
    "CosineRestarts",
    "InverseSqrt",
    "Warmup",
    "WSD",
    "OneCycle",
    "Sequential",
    "Scaled",
    "build_schedule",
    "create_scheduler",
    "add_warmup",
    "group_ratios",
    "update_optimizer",
    "plot",
]
