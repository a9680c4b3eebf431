"""Data that the policy makes itself: rollouts in environments and of texts, as batches for the one run loop."""

from pulsetrain.engine.rollouts.base import Rollouts
from pulsetrain.engine.rollouts.environment import EnvironmentRollouts
from pulsetrain.engine.rollouts.text import TextRollouts

__all__ = ["EnvironmentRollouts", "Rollouts", "TextRollouts"]
